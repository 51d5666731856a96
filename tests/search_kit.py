"""Reference implementations of the searches, without cache or batching."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.config import ModelConfig
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.search_interface import REFERENCE_BACKEND, search
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.text.special_tokens import BOS, EOS

Words = tuple[int, ...]


class TableState(NamedTuple):
    """A source number a sentence and all tokens so far a row; sentences have equally many rows."""

    sources: Tensor  # (N,)
    history: Tensor  # (N * F, T)

    @property
    def device(self) -> torch.device:
        return self.sources.device

    @property
    def fan(self) -> int:
        return len(self.history) // len(self.sources)

    def select(self, rows: Tensor) -> TableState:
        return TableState(self.sources[rows // self.fan], self.history[rows])

    def reorder(self, rows: Tensor) -> TableState:
        new = TableState(self.sources, self.history[rows])
        assert torch.equal(rows // self.fan, torch.arange(len(rows)) // new.fan), (
            "rows must stay with their sentence"
        )
        return new

    def keep(self, sentences: Tensor) -> TableState:
        rows = (sentences[:, None] * self.fan + torch.arange(self.fan)).flatten()
        return TableState(self.sources[sentences], self.history[rows])


@dataclass
class TableModel:
    """Logits from a hash of (source, tokens so far): any history matters, and nothing else does."""

    vocabulary: int = 7
    peak: float = 1.0  # how sure it is
    end: float = 0.0  # how much it likes to end
    steps: int = 0
    rows_seen: int = 0

    def start(self, memory: Tensor) -> TableState:
        return TableState(memory, torch.empty(len(memory), 0, dtype=torch.long))

    def step(self, tokens: Tensor, state: TableState) -> tuple[Tensor, TableState]:
        self.steps += 1
        self.rows_seen += len(tokens)
        history = torch.cat([state.history, tokens[:, None]], dim=1)
        sources = state.sources.repeat_interleave(state.fan).tolist()
        rows = [
            self.logits(source, tuple(words))
            for source, words in zip(sources, history.tolist(), strict=True)
        ]
        return torch.tensor(rows, dtype=torch.float32), TableState(state.sources, history)

    def logits(self, source: int, history: tuple[int, ...]) -> list[float]:
        digest = hashlib.sha256(repr((source, history)).encode()).digest()
        values = [self.peak * (digest[i] / 32.0 - 4.0) for i in range(self.vocabulary)]
        values[EOS] += self.end
        return values

    def log_probs(self, source: int, history: tuple[int, ...]) -> list[float]:
        return torch.tensor(self.logits(source, history)).log_softmax(-1).tolist()


def reference_beam_search(
    log_probs: Callable[[Words], Any],
    allowed_tokens: Sequence[int],
    *,
    limit: int,
    size: int,
    penalty: WuLengthPenalty,
) -> list[tuple[float, Words]]:
    """Beam search without early stopping: it always runs to the limit.

    `log_probs` maps a prefix to next-token log-probabilities.
    """
    living: list[tuple[float, Words]] = [(0.0, ())]
    finished: list[tuple[float, Words]] = []
    for step in range(limit + 1):
        grown = []
        for total, words in living:
            scores = log_probs(words)
            grown += [
                (total + float(scores[token]), words, token) for token in (EOS, *allowed_tokens)
            ]
        grown.sort(key=lambda item: (-item[0], item[2]))
        living = []
        for total, words, token in grown[: size - len(finished)]:
            if token == EOS:
                finished.append((penalty.score(total, step + 1), words))
            else:
                living.append((total, (*words, token)))
    return sorted(finished, key=lambda pair: -pair[0])


def search_with_own_backend(model: Any, memory: Any, **options: Any) -> list[list[Hypothesis]]:
    """Search with the backend of a converted model, as the native engine does; else the
    reference.
    """
    backend = getattr(model, "search_backend", REFERENCE_BACKEND)
    return search(model, memory, backend=backend, **options)


VOCABULARY = 12
SOURCES = [[5, 6, 7, 8], [9], [4, 10, 4], [11, 11, 6, 5, 4, 8, 9], [7, 7]]


def build_random_model(**settings: Any) -> EncoderDecoder:
    """Build a small model whose random weights are large enough for distinct logits."""
    torch.manual_seed(11)
    stacks = {"encoder": ("transformer*2",), "decoder": ("transformer*2",)}
    config = ModelConfig(width=16, heads=2, ffn_width=32, **(stacks | settings))
    model = build_model(config, src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)  # so that logits differ and beams are reordered
    return model


def next_log_probs(model: EncoderDecoder, source: list[int], words: tuple[int, ...]) -> Tensor:
    """Return the next log-probabilities without a cache, from the whole prefix."""
    with torch.no_grad():
        return model(pad_sources([source]).ids, torch.tensor([[BOS, *words]]))[0, -1].log_softmax(
            -1
        )
