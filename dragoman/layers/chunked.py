"""The feed-forward layer a few positions at a time, so that its wide inner values never stand in memory all at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dragoman.layers.feedforward import FeedForward


class ChunkedFeedForward(FeedForward):
    """The same layer with the positions cut into `chunks`: Kitaev et al. (2020) note that positions do not depend on each other here.

    Training keeps each chunk's input and computes its inner values again on the way back, or they would all wait there.
    """

    def __init__(
        self, width: int, inner: int, *, chunks: int, activation: nn.Module | None = None, dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__(width, inner, activation=activation, dropout=dropout, bias=bias)
        self.chunks = chunks

    def forward(self, x: Tensor) -> Tensor:
        """Change every position of (B, T, D) by itself."""
        if self.chunks == 1 or x.size(1) < self.chunks:
            return super().forward(x)
        change = super().forward
        if torch.is_grad_enabled():
            change = partial(checkpoint, change, use_reentrant=False, preserve_rng_state=self.training and self.dropout > 0)
        return torch.cat([change(part) for part in x.tensor_split(self.chunks, dim=1)], dim=1)
