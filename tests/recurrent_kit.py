"""Recurrent layers in miniature, in double precision, beside torch's cells."""

from __future__ import annotations

import torch
from torch import nn

from dragoman.config import ModelConfig
from dragoman.layers.rnn import RNN
from dragoman.models.block_interface import BuildContext

D = 6
MASK = torch.tensor([[True] * 5, [True, True, True, False, False]])


def build_context(*, causal: bool, **settings: object) -> BuildContext:
    """Return the build context of an encoder's or a decoder's block."""
    config = ModelConfig(
        **{"width": D, "heads": 2, "dropout": 0.0, "residual": "no_norm", **settings}
    )  # type: ignore[arg-type]
    return BuildContext(config=config, causal=causal, memory_width=D if causal else None)


def copy_weights(rnn: RNN, layer: int, cell: nn.RNNCellBase) -> nn.RNNCellBase:
    """Copy the weights of one of our layers into a PyTorch cell."""
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(cell, name).data = getattr(rnn.module, f"{name}_l{layer}").data
    return cell
