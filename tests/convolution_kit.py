"""Convolutional models in miniature, with the settings of Gehring et al. (2017)."""

from __future__ import annotations

import torch

from dragoman.config import ModelConfig
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model

VOCABULARY = 19
PAPER = {
    "residual": "scaled",
    "positions": "learned",
    "scale_embeddings": False,
    "tie_embeddings": "none",
    "max_positions": 32,
    "dropout": 0.0,
}


def build_conv_model(
    encoder: tuple[str, ...], decoder: tuple[str, ...], **more: object
) -> EncoderDecoder:
    """Build a model of these blocks, in double precision."""
    torch.manual_seed(0)
    values = {
        "encoder": encoder,
        "decoder": decoder,
        "width": 16,
        "heads": 2,
        "ffn_width": 32,
        "dropout": 0.0,
        **more,
    }
    model = build_model(ModelConfig(**values), src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)  # type: ignore[arg-type]
    return model.double().eval()
