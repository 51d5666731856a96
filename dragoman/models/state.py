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
LEAST_ROOM = 8


@dataclass(frozen=True, slots=True)
class State:
    """All that a decoder carries from one position to the next.

    Extending a state writes into its caches, so the old one is spent: `select` first what must be kept.
    """

    carried: dict[str, Tensor] = field(default_factory=dict)  # replaced at every step: (rows, ...)
    cache: dict[str, Tensor] = field(default_factory=dict)  # grows: (rows, ..., slots, D), of which `length` are filled
    memory: dict[str, Tensor] = field(default_factory=dict)  # only read: (sentences, ..., S, D), and "mask" (sentences, S) if any is hidden
    parts: dict[str, State] = field(default_factory=dict)  # the states of the parts, by name
    length: int = 0  # positions seen by the row that has seen most; a number, because asking a GPU takes a wait
    places: Tensor | None = None  # (rows,) positions seen, where rows differ; None where all have seen `length`

    @property
    def rows(self) -> int:
        """Count the rows."""
        own = [tensor.size(0) for tensor in (*self.carried.values(), *self.cache.values())]
        return max([*own, *(part.rows for part in self.parts.values())], default=0)

    @property
    def sentences(self) -> int:
        """Count the sentences that the rows belong to; each has the same number of rows, one after another."""
        own = [tensor.size(0) for tensor in self.memory.values()]
        return max([*own, *(part.sentences for part in self.parts.values())], default=self.rows)

    @property
    def device(self) -> torch.device:
        """Say where the tensors are."""
        for tensor in (*self.carried.values(), *self.cache.values(), *self.memory.values()):
            return tensor.device
        return next(iter(self.parts.values())).device

    def select(self, rows: Tensor) -> State:
        """Take rows (N,) in any order, any number of times: each becomes a sentence of its own."""
        fan = self.rows // max(self.sentences, 1)
        return self._map(_taker(rows), _taker(rows if fan == 1 else rows // fan))

    def reorder(self, rows: Tensor) -> State:
        """Take rows (N,) that each go on with a row of the same sentence, N / sentences for each sentence in turn."""
        return self._map(_taker(rows), lambda tensor: tensor)

    def keep(self, sentences: Tensor) -> State:
        """Keep all rows of the sentences (N,) and drop the others."""
        fan = self.rows // max(self.sentences, 1)
        rows = (sentences.unsqueeze(1) * fan + torch.arange(fan, device=sentences.device)).flatten()
        return self._map(_taker(rows), _taker(sentences))

    def advance(self, count: int, *, parts: dict[str, State] | None = None) -> State:
        """Move on by `count` positions."""
        return replace(
            self,
            parts=self.parts if parts is None else parts,
            length=self.length + count,
            places=None if self.places is None else self.places + count,
        )

    def append(self, name: str, new: Tensor) -> State:
        """Move on by new slots (rows, ..., T, D) of a cache."""
        append = _append if self.places is None else _append_at(self.places)
        cache = {**self.cache, name: append(self.cache[name], self.length, new)}
        return replace(self.advance(new.size(-2)), cache=cache)

    def filled(self, name: str) -> Tensor:
        """Read the slots of a cache that hold something: (rows, ..., length, D)."""
        return self.cache[name][..., : self.length, :]

    def coming(self, count: int) -> Tensor:
        """Say the places of the next `count` positions: (rows, T), or (T,) where rows do not differ."""
        if self.places is None:
            return torch.arange(self.length, self.length + count, device=self.device)
        return self.places.unsqueeze(1) + torch.arange(count, device=self.places.device)

    def visible(self, count: int) -> Tensor | None:
        """Say which slots each of the last `count` positions may see, (rows, T, length); None where rows do not differ."""
        if self.places is None:
            return None
        slots = torch.arange(self.length, device=self.places.device)
        last = self.places.unsqueeze(1) + torch.arange(-count, 0, device=self.places.device)  # (rows, T)
        return slots <= last.unsqueeze(2)

    def _map(self, own: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor]) -> State:
        """Apply one function to what rows own and another to what was read of their sentences."""
        return State(
            carried={name: own(tensor) for name, tensor in self.carried.items()},
            cache={name: own(tensor) for name, tensor in self.cache.items()},
            memory={name: read(tensor) for name, tensor in self.memory.items()},
            parts={name: part._map(own, read) for name, part in self.parts.items()},
            length=self.length,
            places=None if self.places is None else own(self.places),
        )


def _taker(rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Make a function that takes rows, once from a tensor that several parts share."""
    taken: dict[int, Tensor] = {}

    def take(tensor: Tensor) -> Tensor:
        if id(tensor) not in taken:
            taken[id(tensor)] = tensor.index_select(0, rows)
        return taken[id(tensor)]

    return take


def _append(cache: Tensor, length: int, new: Tensor) -> Tensor:
    """Write new slots after the first `length`, in place while there is room."""
    if torch.is_grad_enabled() and (new.requires_grad or cache.requires_grad):
        # What a gradient flows through must not be written into.
        return torch.cat([cache[..., :length, :], new], dim=-2)
    cache = _with_room(cache, length, new)
    cache[..., length : length + new.size(-2), :] = new
    return cache


def _append_at(places: Tensor) -> Callable[[Tensor, int, Tensor], Tensor]:
    """Make the `_append` for rows that stand at different places (rows,)."""

    def append(cache: Tensor, length: int, new: Tensor) -> Tensor:
        cache = _with_room(cache, length, new)
        slots = places.unsqueeze(1) + torch.arange(new.size(-2), device=places.device)  # (rows, T)
        index = slots.view(slots.size(0), *(1,) * (new.dim() - 3), slots.size(1), 1).expand_as(new)
        if torch.is_grad_enabled() and (new.requires_grad or cache.requires_grad):
            return cache.scatter(-2, index, new)
        return cache.scatter_(-2, index, new)

    return append


def _with_room(cache: Tensor, length: int, new: Tensor) -> Tensor:
    """Give back the cache, or a larger copy where the new slots do not fit."""
    needed = length + new.size(-2)
    if needed <= cache.size(-2):
        return cache
    grown = new.new_zeros(*new.shape[:-2], needed + max(LEAST_ROOM - 1, needed // 4), new.size(-1))
    grown[..., :length, :] = cache[..., :length, :]
    return grown
