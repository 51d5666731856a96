"""Models to be exported: every weight moved off its first value, and tokenizers learnt once."""

from __future__ import annotations

from typing import Any

import torch
from model_kit import shaken

from dragoman.config import Config
from dragoman.models.build import build_model
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.tokenizer import Tokenizers, train_tokenizers

LINES = ["ein mann geht", "eine frau geht schnell", "zwei hunde", "ein hund und ein mann sehen eine frau", "der hund"]
BASE = {"encoder": ["self*2"], "decoder": ["self*2"], "width": 32, "heads": 4, "feedforward": 64, "dropout": 0.0}
TOKENIZERS: dict[bool, Tokenizers] = {}


def tokenizers_of(config: Config) -> Tokenizers:
    """Learn tokenizers once for all tests."""
    joint = config.text.joint
    if joint not in TOKENIZERS:
        TOKENIZERS[joint] = train_tokenizers(LINES * 3, [line.upper() for line in LINES] * 3, config.text)
    return TOKENIZERS[joint]


def made(**model: Any) -> tuple[EncoderDecoder, Tokenizers, Config]:
    """Build a model whose every weight, norms and biases included, has moved off its first value."""
    config = Config().replace(model={**BASE, **model}, text={"vocabulary": 300, "joint": model.get("tie", "all") == "all"})
    tokenizers = tokenizers_of(config)
    torch.manual_seed(0)
    net = shaken(build_model(config.model, src_vocabulary=len(tokenizers.src), tgt_vocabulary=len(tokenizers.tgt))).eval()
    return net, tokenizers, config
