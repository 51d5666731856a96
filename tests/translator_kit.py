"""Translators for tests: one whose model writes its source again, and one of random weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.bundle import write_bundle
from dragoman.config import Config
from dragoman.inference import Translator
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import EOS, PAD

TEXT = [
    "Ein Mann geht.",
    "Eine Frau steht!",
    "Zwei Kinder spielen?",
    "你好。世界。",
    "0123456789",
] * 10
SIZES = {
    "width": 16,
    "heads": 2,
    "ffn_width": 32,
    "encoder": ("transformer*2",),
    "decoder": ("transformer*2",),
}
CONFIG = Config().replace(text={"vocab_size": 330}, model=SIZES, data={"max_length": 40})


class CopyState(NamedTuple):
    """What was read, and how much of it is written."""

    src: Tensor  # (N, S)
    written: int

    @property
    def device(self) -> torch.device:
        return self.src.device

    def select(self, rows: Tensor) -> CopyState:
        return CopyState(self.src[rows], self.written)

    keep = select

    def reorder(self, rows: Tensor) -> CopyState:
        raise AssertionError("a beam of one never changes its order")


class CopyModel(nn.Module):
    """Copies the source, token by token; `stutter` makes it never end, `silent` makes it end
    at once.
    """

    def __init__(self, vocabulary: int, *, stutter: bool = False, silent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.vocabulary, self.stutter, self.silent = vocabulary, stutter, silent
        self.batches: list[tuple[int, int]] = []

    def encode(self, src: Tensor, mask: Tensor | None) -> Tensor:
        self.batches.append((src.shape[0], src.shape[1]))
        assert mask is None or torch.equal(mask, src != PAD)
        return src

    def start(self, memory: Tensor) -> CopyState:
        return CopyState(memory, 0)

    def step(self, tokens: Tensor, state: CopyState) -> tuple[Tensor, CopyState]:
        wanted = state.src[:, min(state.written, state.src.shape[1] - 1)].clone()
        if self.stutter:
            wanted = state.src[:, 0].clone()
        logits = torch.zeros(len(tokens), self.vocabulary)
        if self.silent and state.written == 0:
            logits[torch.arange(len(tokens)), wanted] = 1.0
            wanted[:] = EOS
        wanted[wanted == PAD] = EOS
        logits[torch.arange(len(tokens)), wanted] = 20.0
        return logits, CopyState(state.src, state.written + 1)


def build_copying_translator(
    tokenizers: Tokenizers, config: Config = CONFIG, **options: bool
) -> Translator:
    """Build a translator that copies."""
    model = CopyModel(len(tokenizers.tgt), **options)
    return Translator(model, tokenizers, config.replace(decode={"beam": 1}))


def write_random_bundle(path: Path, tokenizers: Tokenizers) -> Path:
    """Write a real model whose random weights are large enough for distinct logits."""
    torch.manual_seed(3)
    model = build_model(
        CONFIG.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    weights = {
        name: tensor * 2.5 if tensor.dim() > 1 else tensor
        for name, tensor in model.state_dict().items()
    }
    config = CONFIG.replace(decode={"max_length_ratio": 1.0, "max_length_extra": 6})
    write_bundle(path, config=config, tokenizers=tokenizers, weights=weights, golden=TEXT[:2])
    return path


def load_translator_that_ends(bundle: Path) -> Translator:
    """Load a random bundle with a likely end of sentence, so that searches end at any length."""
    translator = Translator.load(bundle, device="cpu")
    with torch.no_grad():
        weight = translator.model.output_weight
        weight[EOS] = weight[[300, 310, 329]].mean(dim=0) * 1.2
    return translator
