"""Layers of torch.nn with the weights of ours, for the plain models of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def copy_linear(ours: nn.Linear) -> nn.Linear:
    """Return a copy of a linear layer."""
    copy = nn.Linear(ours.in_features, ours.out_features)
    copy.load_state_dict(ours.state_dict())
    return copy


def copy_norm(ours: Any) -> nn.Module:
    """Return a copy of a layer normalization, or the identity for None."""
    if ours is None:
        return nn.Identity()
    norm = nn.LayerNorm(ours.weight.numel(), eps=ours.eps)
    norm.load_state_dict(ours.state_dict())
    return norm


def copy_residual_norm(residual: Any) -> nn.Module:
    """Return a copy of the norm of a residual connection, or the identity."""
    return copy_norm(getattr(residual, "norm", None))


def copy_embedding(ours: Any) -> nn.Embedding:
    """Return a copy of an embedding, trained like any."""
    copy = nn.Embedding(*ours.weight.shape)
    copy.weight.data = ours.weight.data.clone()
    return copy


def copy_bilstm(layers: Sequence[Any], *, dropout: float = 0.0) -> nn.LSTM:
    """Return a bidirectional LSTM with the weights of our layers."""
    first = layers[0].forward_rnn.module
    lstm = nn.LSTM(
        first.input_size,
        first.hidden_size,
        num_layers=len(layers),
        dropout=dropout if len(layers) > 1 else 0.0,
        bidirectional=True,
        batch_first=True,
    )
    for number, layer in enumerate(layers):
        for side, suffix in ((layer.forward_rnn, ""), (layer.backward_rnn, "_reverse")):
            for name, weight in side.module.named_parameters():
                target = getattr(lstm, f"{name[:-1]}{number}{suffix}")
                target.data = weight.data.clone()
    lstm.flatten_parameters()
    return lstm


class PackedLSTM(nn.Module):
    """An LSTM over packed sequences, which torch.compile leaves out.

    It has no packed sequences, and stops compiling where it meets an `nn.LSTM` itself; after the
    call of a module like this one it continues.
    """

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the states of (B, T, D), given lengths (B,) on the host; padding has zeros."""
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.lstm(packed)
        return pad_packed_sequence(states, batch_first=True, total_length=x.size(1))[0]
