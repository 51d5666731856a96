"""What a block may need beside its input, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from dragoman.attention import masks


class Memory(NamedTuple):
    """What the encoder hands on; read-only once made."""

    values: Tensor  # (B, S, D)
    mask: Tensor | None = None  # (B, S), or None when nothing is padded
    embeddings: Tensor | None = (
        None  # (B, S, D), with their positions: for attention that wants them in the values
    )
    segment_ids: Tensor | None = None  # (B, S) sentence ids, where several are packed in a row

    @property
    def rows(self) -> int:
        """Count the rows."""
        return self.values.size(0)

    def select(self, rows: Tensor) -> Memory:
        """Take rows (N,) in any order, any number of times."""
        others = (None if part is None else part.index_select(0, rows) for part in self[1:])
        return Memory(self.values.index_select(0, rows), *others)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """What surrounds a sequence (B, T) while it goes through a stack."""

    mask: Tensor | None = None  # (B, T), or None when nothing is padded
    position_ids: Tensor | None = None  # (B, T) positions, where they are not 0 to T - 1
    segment_ids: Tensor | None = None  # (B, T) sentence ids, where several are packed in a row
    memory: Memory | None = None  # in a decoder
    embeddings: Tensor | None = None  # (B, T, D), what went into the stack before positions
    losses: dict[str, Tensor] = field(default_factory=dict)  # what `add_loss` collected

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add a term, summed over the batch, that a member trains with beside the task's loss."""
        self.losses[name] = self.losses[name] + value if name in self.losses else value

    def self_mask(self, *, causal: bool) -> Tensor | None:
        """Say what a position may see of its own sequence, beside causality: broadcastable to (B, T, T)."""
        # Padding stands at the end, where no real position of a causal sequence looks: no mask, and the fastest kernel.
        padding = None if causal or self.mask is None else self.mask.unsqueeze(1)
        return masks.combine(
            padding,
            None
            if self.segment_ids is None
            else masks.same_segment(self.segment_ids, self.segment_ids),
        )

    def memory_mask(self) -> Tensor | None:
        """Say what a position may see of the memory: broadcastable to (B, T, S)."""
        if self.memory is None:
            return None
        padding = None if self.memory.mask is None else self.memory.mask.unsqueeze(1)
        if self.segment_ids is None or self.memory.segment_ids is None:
            return padding
        return masks.combine(padding, masks.same_segment(self.segment_ids, self.memory.segment_ids))
