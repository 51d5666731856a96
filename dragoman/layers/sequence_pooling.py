"""Pooling of a sequence to one vector: mean, maximum, last state."""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.layers.rnn import last_bidirectional_states, last_state
from dragoman.ops.masked_pooling import max_pool, mean_pool


class MeanPooling(nn.Module):
    """The mean of the real positions; zeros for an empty sequence."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        return mean_pool(x, mask)


class MaxPooling(nn.Module):
    """The maximum of each feature over the real positions; zeros for an empty sequence."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        return max_pool(x, mask)


class LastPooling(nn.Module):
    """The last real position: the final state of a forward RNN or a causal convolution."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        return last_state(x, mask)


class LastBidirectionalPooling(nn.Module):
    """The final states of both directions of a bidirectional RNN, concatenated."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Pool (B, S, D) with a mask (B, S) to (B, D)."""
        return last_bidirectional_states(x, mask)
