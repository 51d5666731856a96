"""Positions: how a model that sees all words at once knows their order."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from dragoman.errors import DragomanError

MAX_TABLE_ROWS = (
    2048  # of sines kept ready: a configuration that asks for a million must not cost gigabytes
)


class RelativePosition(nn.Module):
    """Tells places inside one layer's self-attention, by either of two verbs; the other does nothing.

    Places are consecutive from `first` on, or given as (B, T), all below first + T.
    """

    has_bias: ClassVar[bool] = (
        False  # whether `bias` gives anything: distances are computed only for those
    )

    def rotate(self, x: Tensor, position_ids: Tensor | None, *, first: int = 0) -> Tensor:
        """Change queries or keys (B, H, T, Dh) by their places; keys are kept changed."""
        return x

    def shift_query(self, query: Tensor) -> Tensor:
        """Change queries (B, H, T, Dh) once `bias` has seen them, before they meet the keys; only where `biased`."""
        return query

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Give what is added to the scores, broadcastable to (B, H, T, S).

        Distances (..., T, S) are key place minus query place; queries are (B, H, T, Dh).
        """
        raise NotImplementedError


class Positions(nn.Module):
    """Adds to each embedding what tells its place, or acts inside attention by what `within` gives."""

    def __init__(self, *, width: int, max_positions: int = 1024) -> None:
        super().__init__()
        self.width, self.max_positions = width, max_positions

    @classmethod
    def within(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> RelativePosition | None:
        """Build what acts inside one layer's self-attention; None where places are told by the embeddings alone."""
        return None

    def vectors(self, first: int, count: int) -> Tensor | None:
        """Give the vectors (T, D) of `count` places from `first` on, or None for none."""
        raise NotImplementedError

    def forward(self, x: Tensor, *, first: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """Add places to embeddings (B, T, D): consecutive ones from `first`, or those given as (B, T).

        Given places must lie below first + T: that number is known without asking the device.
        """
        if position_ids is None:
            added = self.vectors(first, x.size(1))
        else:
            table = self.vectors(0, first + x.size(1))
            added = None if table is None else nn.functional.embedding(position_ids, table)
        return (
            x if added is None else (x + added).to(x.dtype)
        )  # a table is float32 whatever the embeddings are


class SinusoidalPositions(Positions):
    r"""Sines and cosines of geometric frequencies, in turn.

    .. math:: p_{t,2i} = \sin(t / 10000^{2i/D}), \quad p_{t,2i+1} = \cos(t / 10000^{2i/D})

    Vaswani et al. (2017), section 3.5. Places past the table are computed when they are met.
    """

    table: Tensor

    def __init__(self, *, width: int, max_positions: int = 1024) -> None:
        super().__init__(width=width, max_positions=max_positions)
        # Real even while a model is laid out on the meta device: loading weights would not fill it.
        device = torch.get_default_device()
        table = (
            self.compute(0, min(max_positions, MAX_TABLE_ROWS))
            .float()
            .to("cpu" if device.type == "meta" else device)
        )
        self.register_buffer("table", table, persistent=False)

    def compute(self, first: int, count: int) -> Tensor:
        """Compute vectors (T, D), in float64: single precision is off by 1e-4 at place 1,000."""
        position_ids = torch.arange(
            first, first + count, dtype=torch.float64, device="cpu"
        )  # some devices lack float64
        frequency = 10_000.0 ** (
            -torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu") / self.width
        )
        return self.arrange(position_ids.unsqueeze(1) * frequency)

    def arrange(self, angle: Tensor) -> Tensor:
        """Put sines and cosines of angles (T, D / 2) into one vector."""
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)

    def vectors(self, first: int, count: int) -> Tensor:
        """Read the table, or compute what it does not hold."""
        if first + count <= self.table.size(0):
            return self.table[first : first + count]
        return self.compute(first, count).to(self.table)


class SinusoidalHalvesPositions(SinusoidalPositions):
    r"""The same numbers, all sines before all cosines, as Marian and the Hugging Face Marian models lay them out."""

    def arrange(self, angle: Tensor) -> Tensor:
        """Put the sines into the first half of the vector and the cosines into the second."""
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class LearnedPositions(Positions):
    """A trained vector for each position; there are as many as there are."""

    def __init__(self, *, width: int, max_positions: int = 1024) -> None:
        super().__init__(width=width, max_positions=max_positions)
        self.weight = nn.Parameter(torch.empty(max_positions, width))
        nn.init.normal_(self.weight, std=width**-0.5)

    def vectors(self, first: int, count: int) -> Tensor:
        """Read the trained vectors."""
        if first + count > self.max_positions:
            raise DragomanError(
                f"a sequence must fit the {self.max_positions} learned positions",
                found=f"{first + count} tokens",
                fix="split the text, or train with a larger model.max_positions or with sinusoidal positions",
            )
        return self.weight[first : first + count]


class NoPositions(Positions):
    """Nothing: a causal decoder can count for itself, an encoder sees a bag of words."""

    def vectors(self, first: int, count: int) -> None:
        """Add nothing."""
