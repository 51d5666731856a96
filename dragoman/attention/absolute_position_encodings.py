"""Absolute position encodings, and the interface of relative ones."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dragoman.errors import DragomanError

MAX_TABLE_ROWS = (
    2048  # of sinusoids: a million positions in a configuration must not take gigabytes
)
MAX_TABLE_ELEMENTS = 1 << 23  # 32 MiB: a width that no machine can train costs no time either


class RelativePosition(nn.Module):
    """A position encoding inside self-attention: it rotates queries and keys, or biases the scores.

    Positions are consecutive from `first`, or given as (B, T), all below first + T.
    """

    has_bias: ClassVar[bool] = False  # whether it has a `bias`; otherwise it has a `rotate`
    # Whether causal attention takes `distance_scores` instead of a `bias`.
    scores_distances: bool = False

    def rotate(self, x: Tensor, position_ids: Tensor | None, *, first: int = 0) -> Tensor:
        """Rotate queries or keys (B, H, T, Dh) by their positions; keys are cached rotated."""
        return x

    def shift_query(self, query: Tensor) -> Tensor:
        """Return the queries (B, H, T, Dh) to multiply with the keys; `bias` gets the originals."""
        return query

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Return the bias on the scores, broadcastable to (B, H, T, S).

        Distances (..., T, S) are key position minus query position; queries are (B, H, T, Dh).
        """
        raise NotImplementedError

    def causal_bias(self, query: Tensor, keys: int) -> Tensor:
        """Return the bias for queries (B, H, T, Dh), the last T of `keys` positions."""
        positions = torch.arange(keys, device=query.device)
        return self.bias(positions - positions[keys - query.size(-2) :].unsqueeze(-1), query)

    def distance_scores(self, query: Tensor, keys: int) -> Tensor:
        """Return the scores (B, H, T, S) by distance, S - 1 down to 0, with S `keys`."""
        raise NotImplementedError


class Positions(nn.Module):
    """A position encoding: added to embeddings, or inside attention by a `RelativePosition`."""

    def __init__(self, *, width: int, max_positions: int = 1024) -> None:
        super().__init__()
        self.width, self.max_positions = width, max_positions

    @classmethod
    def build_relative_position(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> RelativePosition | None:
        """Return the relative positions of one self-attention layer, or None if there are none."""
        return None

    def vectors(self, first: int, count: int) -> Tensor | None:
        """Return the vectors (T, D) of `count` positions from `first`, or None."""
        raise NotImplementedError

    def forward(self, x: Tensor, *, first: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Add position vectors to embeddings (B, T, D), from `first` or for `position_ids` (B, T).

        Position ids must be below first + T, which is known without synchronizing with the device.
        """
        if position_ids is None:
            added = self.vectors(first, x.size(1))
        else:
            table = self.vectors(0, first + x.size(1))
            added = None if table is None else nn.functional.embedding(position_ids, table)
        return x if added is None else (x + added).to(x.dtype)  # the table is float32


class SinusoidalPositions(Positions):
    r"""Sinusoidal positions, sines and cosines interleaved.

    .. math:: p_{t,2i} = \sin(t / 10000^{2i/D}), \quad p_{t,2i+1} = \cos(t / 10000^{2i/D})

    Vaswani et al. (2017), section 3.5. Positions past the table are computed when needed.
    """

    table: Tensor

    def __init__(self, *, width: int, max_positions: int = 1024) -> None:
        super().__init__(width=width, max_positions=max_positions)
        # Not on the meta device, even if the model is: loading weights would not fill the table.
        device = torch.get_default_device()
        rows = min(max_positions, MAX_TABLE_ROWS, max(1, MAX_TABLE_ELEMENTS // width))
        table = self.compute(0, rows).float().to("cpu" if device.type == "meta" else device)
        self.register_buffer("table", table, persistent=False)

    def compute(self, first: int, count: int) -> Tensor:
        """Compute vectors (T, D) in float64: float32 is off by 1e-4 at position 1,000."""
        options: dict[str, Any] = {
            "dtype": torch.float64,
            "device": "cpu",
        }  # some devices lack float64
        positions = torch.arange(first, first + count, **options)
        frequency = 10_000.0 ** (-torch.arange(0, self.width, 2, **options) / self.width)
        return self.arrange(positions.unsqueeze(1) * frequency)

    def arrange(self, angle: Tensor) -> Tensor:
        """Interleave sines and cosines of angles (T, D / 2): (T, D)."""
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)

    def vectors(self, first: int, count: int) -> Tensor:
        """Return rows of the table, or compute those past its end."""
        if first + count <= self.table.size(0):
            return self.table[first : first + count]
        return self.compute(first, count).to(self.table)


class SinusoidalHalvesPositions(SinusoidalPositions):
    """Sinusoidal positions, all sines before all cosines, as in Marian."""

    def arrange(self, angle: Tensor) -> Tensor:
        """Concatenate sines and cosines of angles (T, D / 2): (T, D)."""
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class LearnedPositions(Positions):
    """A trained vector for each position up to `max_positions`."""

    def __init__(self, *, width: int, max_positions: int = 1024) -> None:
        super().__init__(width=width, max_positions=max_positions)
        self.weight = nn.Parameter(torch.empty(max_positions, width))
        nn.init.normal_(self.weight, std=width**-0.5)

    def vectors(self, first: int, count: int) -> Tensor:
        """Return the trained vectors (T, D)."""
        if first + count > self.max_positions:
            raise DragomanError(
                f"a sequence must fit the {self.max_positions} learned positions",
                found=f"{first + count} tokens",
                fix="split the text, or train with a larger model.max_positions "
                "or with sinusoidal positions",
            )
        return self.weight[first : first + count]


class NoPositions(Positions):
    """No position encoding: order is visible through the causal mask only."""

    def vectors(self, first: int, count: int) -> None:
        """Return None: nothing is added."""
