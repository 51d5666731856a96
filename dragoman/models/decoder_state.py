"""The decoding state: named tensors whose axis 0 is the row, and how many positions they have seen.

`select` is all that a search needs. Two narrower verbs do the same for less where rows keep to their sentence, as beams do:
`reorder` leaves what was read of the source where it is, and `keep` drops whole sentences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Empty slots given to a cache that grows. Beams copy the cache at every step, empty slots and all, so a few are better than many;
# a quarter more than needed keeps the copying of a growing cache below one eighth of the reading.
MIN_CACHE_GROWTH = 8


@dataclass(frozen=True, slots=True)
class DecoderState:
    """All that a decoder carries from one position to the next.

    Extending a state writes into its caches, so the old one is spent: `select` first what must be kept.
    """

    recurrent: dict[str, Tensor] = field(
        default_factory=dict
    )  # replaced at every step: (rows, ...)
    cache: dict[str, Tensor] = field(
        default_factory=dict
    )  # grows: (rows, ..., slots, D), of which `length` are filled
    memory: dict[str, Tensor] = field(
        default_factory=dict
    )  # only read: (sentences, ..., S, D), and "mask" (sentences, S) if any is hidden
    children: dict[str, DecoderState] = field(
        default_factory=dict
    )  # the states of the parts, by name
    length: int = 0  # positions seen by the row that has seen most; a number, because asking a GPU takes a wait
    position_ids: Tensor | None = (
        None  # (rows,) positions seen, where rows differ; None where all have seen `length`
    )

    @property
    def rows(self) -> int:
        """Count the rows."""
        own = [tensor.size(0) for tensor in (*self.recurrent.values(), *self.cache.values())]
        return max([*own, *(part.rows for part in self.children.values())], default=0)

    @property
    def sentences(self) -> int:
        """Count the sentences that the rows belong to; each has the same number of rows, one after another."""
        own = [tensor.size(0) for tensor in self.memory.values()]
        return max([*own, *(part.sentences for part in self.children.values())], default=self.rows)

    @property
    def device(self) -> torch.device:
        """Say where the tensors are."""
        for tensor in (*self.recurrent.values(), *self.cache.values(), *self.memory.values()):
            return tensor.device
        return next(iter(self.children.values())).device

    def select(self, rows: Tensor) -> DecoderState:
        """Take rows (N,) in any order, any number of times: each becomes a sentence of its own."""
        rows_per_sentence = self.rows // max(self.sentences, 1)
        return self._map(
            _row_selector(rows),
            _row_selector(rows if rows_per_sentence == 1 else rows // rows_per_sentence),
        )

    def reorder(self, rows: Tensor) -> DecoderState:
        """Take rows (N,) that each go on with a row of the same sentence, N / sentences for each sentence in turn."""
        return self._map(_row_selector(rows), lambda tensor: tensor)

    def keep(self, sentences: Tensor) -> DecoderState:
        """Keep all rows of the sentences (N,) and drop the others."""
        rows_per_sentence = self.rows // max(self.sentences, 1)
        rows = (
            sentences.unsqueeze(1) * rows_per_sentence
            + torch.arange(rows_per_sentence, device=sentences.device)
        ).flatten()
        return self._map(_row_selector(rows), _row_selector(sentences))

    def advance(
        self, count: int, *, children: dict[str, DecoderState] | None = None
    ) -> DecoderState:
        """Move on by `count` positions."""
        return replace(
            self,
            children=self.children if children is None else children,
            length=self.length + count,
            position_ids=None if self.position_ids is None else self.position_ids + count,
        )

    def append(self, name: str, new: Tensor) -> DecoderState:
        """Move on by new slots (rows, ..., T, D) of a cache."""
        append = _append_slots if self.position_ids is None else _append_slots_at(self.position_ids)
        cache = {**self.cache, name: append(self.cache[name], self.length, new)}
        return replace(self.advance(new.size(-2)), cache=cache)

    def filled(self, name: str) -> Tensor:
        """Read the slots of a cache that hold something: (rows, ..., length, D)."""
        return self.cache[name][..., : self.length, :]

    def next_positions(self, count: int) -> Tensor:
        """Say the places of the next `count` positions: (rows, T), or (T,) where rows do not differ."""
        if self.position_ids is None:
            return torch.arange(self.length, self.length + count, device=self.device)
        return self.position_ids.unsqueeze(1) + torch.arange(count, device=self.position_ids.device)

    def visible(self, count: int) -> Tensor | None:
        """Say which slots each of the last `count` positions may see, (rows, T, length); None where rows do not differ."""
        if self.position_ids is None:
            return None
        slots = torch.arange(self.length, device=self.position_ids.device)
        last = self.position_ids.unsqueeze(1) + torch.arange(
            -count, 0, device=self.position_ids.device
        )  # (rows, T)
        return slots <= last.unsqueeze(2)

    def _map(
        self, own: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor]
    ) -> DecoderState:
        """Apply one function to what rows own and another to what was read of their sentences."""
        return DecoderState(
            recurrent={name: own(tensor) for name, tensor in self.recurrent.items()},
            cache={name: own(tensor) for name, tensor in self.cache.items()},
            memory={name: read(tensor) for name, tensor in self.memory.items()},
            children={name: part._map(own, read) for name, part in self.children.items()},
            length=self.length,
            position_ids=None if self.position_ids is None else own(self.position_ids),
        )


def _row_selector(rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Make a function that takes rows, once from a tensor that several parts share."""
    taken: dict[int, Tensor] = {}

    def take(tensor: Tensor) -> Tensor:
        if id(tensor) not in taken:
            taken[id(tensor)] = tensor.index_select(0, rows)
        return taken[id(tensor)]

    return take


def _append_slots(cache: Tensor, length: int, new: Tensor) -> Tensor:
    """Write new slots after the first `length`, in place while there is room."""
    if torch.is_grad_enabled() and (new.requires_grad or cache.requires_grad):
        # What a gradient flows through must not be written into.
        return torch.cat([cache[..., :length, :], new], dim=-2)
    cache = _grow_cache(cache, length, new)
    cache[..., length : length + new.size(-2), :] = new
    return cache


def _append_slots_at(position_ids: Tensor) -> Callable[[Tensor, int, Tensor], Tensor]:
    """Make the `_append` for rows that stand at different places (rows,)."""

    def append(cache: Tensor, length: int, new: Tensor) -> Tensor:
        cache = _grow_cache(cache, length, new)
        slots = position_ids.unsqueeze(1) + torch.arange(
            new.size(-2), device=position_ids.device
        )  # (rows, T)
        index = slots.view(slots.size(0), *(1,) * (new.dim() - 3), slots.size(1), 1).expand_as(new)
        if torch.is_grad_enabled() and (new.requires_grad or cache.requires_grad):
            return cache.scatter(-2, index, new)
        return cache.scatter_(-2, index, new)

    return append


def _grow_cache(cache: Tensor, length: int, new: Tensor) -> Tensor:
    """Give back the cache, or a larger copy where the new slots do not fit."""
    needed = length + new.size(-2)
    if needed <= cache.size(-2):
        return cache
    grown = new.new_zeros(
        *new.shape[:-2], needed + max(MIN_CACHE_GROWTH - 1, needed // 4), new.size(-1)
    )
    grown[..., :length, :] = cache[..., :length, :]
    return grown
