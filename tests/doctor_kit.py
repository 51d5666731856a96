"""A small sound model for the doctor, to be spoilt."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dragoman.bundle.golden import make_golden
from dragoman.config import Config
from dragoman.doctor import ModelUnderTest, run_checks
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.text.tokenizer import Tokenizers, train_tokenizers

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
    """What a subject is made of, to be broken before it is."""

    model: EncoderDecoder
    tokenizers: Tokenizers
    config: Config
    golden: dict[str, Any]

    def subject(self, **more: Any) -> ModelUnderTest:
        """Put it on the table."""
        given = {
            "config": self.config,
            "tokenizers": self.tokenizers,
            "golden": self.golden,
            **more,
        }
        return ModelUnderTest(lambda: self.model, **given)

    def verdicts(self, **more: Any) -> dict[str, str]:
        """Examine it."""
        return {finding.name: finding.verdict for finding in run_checks(self.subject(**more))}


def make_tokenizers() -> Tokenizers:
    """Learn tokenizers for the lines."""
    return train_tokenizers(
        LINES * 3,
        [line.upper() for line in LINES] * 3,
        Config().replace(text={"vocab_size": 300}).text,
    )


def make_parts(tokenizers: Tokenizers) -> Parts:
    """Make a model that has opinions, so that a mistake changes more than a rounding would."""
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
