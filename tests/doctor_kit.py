"""A small correct model for tests of the doctor, which break it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dragoman.bundle.golden_vectors import make_golden
from dragoman.config import Config
from dragoman.doctor import ModelUnderTest, run_checks
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

LINES = [
    "ein mann geht",
    "eine frau geht schnell",
    "zwei hunde",
    "ein hund und ein mann sehen eine frau",
]
SMALL = {
    "encoder": ["transformer*2"],
    "decoder": ["transformer*2"],
    "width": 32,
    "heads": 4,
    "ffn_width": 64,
    "dropout": 0.0,
}


class Parts(NamedTuple):
    """The parts of a ModelUnderTest, for tests to break."""

    model: EncoderDecoder
    tokenizers: Tokenizers
    config: Config
    golden: dict[str, Any]

    def subject(self, **more: Any) -> ModelUnderTest:
        """Return the model under test."""
        given = {
            "config": self.config,
            "tokenizers": self.tokenizers,
            "golden": self.golden,
            **more,
        }
        return ModelUnderTest(lambda: self.model, **given)

    def verdicts(self, **more: Any) -> dict[str, str]:
        """Run all checks and return the verdicts by name."""
        return {finding.name: finding.verdict for finding in run_checks(self.subject(**more))}


def make_tokenizers() -> Tokenizers:
    """Train tokenizers on LINES."""
    return train_tokenizers(
        LINES * 3,
        [line.upper() for line in LINES] * 3,
        Config().replace(text={"vocab_size": 300}).text,
    )


def make_parts(tokenizers: Tokenizers) -> Parts:
    """Build a model with enlarged weights, so that errors exceed rounding."""
    config = Config().replace(
        model=SMALL,
        text={"vocab_size": 300},
        decode={"max_length_ratio": 0.5, "max_length_extra": 3},
    )
    torch.manual_seed(1)
    model = (
        build_model(
            config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
        )
        .eval()
        .requires_grad_(False)
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(1.5)
    return Parts(model, tokenizers, config, make_golden(model, tokenizers, LINES))
