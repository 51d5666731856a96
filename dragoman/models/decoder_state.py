"""Decoder state: KV caches, recurrent states and source tensors, reordered here for beam search.

`DecoderState.select` gathers arbitrary rows. Beam search uses two cheaper forms: `reorder` moves
hypotheses within their sentence and leaves the source tensors alone, `keep` drops finished
sentences. The CPU and CUDA engines reorder caches of their own: `inference/cpu/cpp_kv_cache.py`,
`inference/cpu/torch_kv_cache.py` and `inference/cuda/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Free positions allocated when a KV cache grows. Beam search copies the cache at every step, free
# positions included, so few are better than many; a quarter more than needed keeps the cost of
# growing below one eighth of that of reading.
MIN_CACHE_GROWTH = 8


@dataclass(frozen=True, slots=True)
class DecoderState:
    """State of a decoder between two positions: a tree of tensors whose axis 0 is the batch row.

    Extending a state writes into its caches in place, so the old state must not be used again.
    """

    # Replaced at every step: (rows, ...).
    recurrent: dict[str, Tensor] = field(default_factory=dict)
    # KV caches, which grow: (rows, ..., positions, D), of which `length` positions are filled.
    cache: dict[str, Tensor] = field(default_factory=dict)
    # Read-only source tensors: (sentences, ..., S, D), and "mask" (sentences, S) with padding. In
    # a prefix LM the source is in the cache, and "prefix_mask" (sentences, S) hides its padding.
    memory: dict[str, Tensor] = field(default_factory=dict)
    # States of the submodules, by name.
    children: dict[str, DecoderState] = field(default_factory=dict)
    # Positions decoded so far; an int, because reading a GPU tensor would synchronize.
    length: int = 0
    # Earlier positions that T new ones attend to at most (Transformer-XL's memory); 0 for all.
    limit: int = 0
    dropped: int = 0  # positions that left the front of the caches

    @property
    def rows(self) -> int:
        """Return the number of rows: sentences times beam size."""
        own = [tensor.size(0) for tensor in (*self.recurrent.values(), *self.cache.values())]
        return max([*own, *(child.rows for child in self.children.values())], default=0)

    @property
    def sentences(self) -> int:
        """Return the number of sentences; each has the same number of consecutive rows."""
        own = [tensor.size(0) for tensor in self.memory.values()]
        below = (child.sentences for child in self.children.values())
        return max([*own, *below], default=self.rows)

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        for tensor in (*self.recurrent.values(), *self.cache.values(), *self.memory.values()):
            return tensor.device
        return next(iter(self.children.values())).device

    @property
    def memory_mask(self) -> Tensor | None:
        """Return the padding mask of cross-attention, (sentences, 1, S), or None."""
        mask = self.memory.get("mask")
        return None if mask is None else mask.unsqueeze(1)

    def prefix_mask(self) -> Tensor | None:
        """Return the mask (rows, 1, length) that hides a prefix LM's source padding, or None."""
        mask = self.memory.get("prefix_mask")
        if mask is None:
            return None
        mask = torch.nn.functional.pad(mask, (0, self.length - mask.size(1)), value=True)
        rows_per_sentence = self.rows // max(self.sentences, 1)
        if rows_per_sentence > 1:
            mask = mask.repeat_interleave(rows_per_sentence, dim=0)
        return mask.unsqueeze(1)

    def select(self, rows: Tensor) -> DecoderState:
        """Return the rows (N,), in any order and with repetitions, each as its own sentence."""
        rows_per_sentence = self.rows // max(self.sentences, 1)
        return self._map(
            _row_selector(rows),
            _row_selector(rows if rows_per_sentence == 1 else rows // rows_per_sentence),
        )

    def reorder(self, rows: Tensor) -> DecoderState:
        """Return the state of rows (N,) chosen within each sentence: the beams' KV cache reorder.

        Every sentence, in order, has N / sentences of the rows; source tensors are not copied.
        """
        return self._map(_row_selector(rows), lambda tensor: tensor)

    def keep(self, sentences: Tensor) -> DecoderState:
        """Return the state of all rows of the sentences (N,), without the others."""
        rows_per_sentence = self.rows // max(self.sentences, 1)
        beams = torch.arange(rows_per_sentence, device=sentences.device)
        rows = (sentences.unsqueeze(1) * rows_per_sentence + beams).flatten()
        return self._map(_row_selector(rows), _row_selector(sentences))

    def advance(
        self, count: int, *, children: dict[str, DecoderState] | None = None
    ) -> DecoderState:
        """Return the state `count` positions later, with new states of the submodules if given."""
        children = self.children if children is None else children
        return replace(self, children=children, length=self.length + count)

    def append(self, name: str, new: Tensor) -> DecoderState:
        """Return the state with new positions (rows, ..., T, D) appended to a cache.

        With a limit, positions that no later one attends to leave the cache from time to time.
        """
        state = self._drop_old()
        filled = state.length - state.dropped
        cache = {**state.cache, name: _append(state.cache[name], filled, new)}
        return replace(state.advance(new.size(-2)), cache=cache)

    def filled(self, name: str) -> Tensor:
        """Return the filled positions of a cache: (rows, ..., length - dropped, D)."""
        return self.cache[name][..., : self.length - self.dropped, :]

    def recent(self, name: str, new: int, window: int = 0) -> Tensor:
        """Return the part of a cache that the last `new` positions may attend to.

        Those are all cached ones, or the last `limit`, or the last `window` of them.
        """
        filled = self.filled(name)
        reach = [each for each in (self.limit, window) if each]
        if not reach:
            return filled
        return filled[..., max(0, filled.size(-2) - new - min(reach)) :, :]

    def _drop_old(self) -> DecoderState:
        """Return the state without positions beyond the limit, once they outnumber it."""
        filled = self.length - self.dropped
        if not self.limit or filled <= 2 * self.limit:
            return self
        cache = {
            name: self.filled(name)[..., filled - self.limit :, :].clone() for name in self.cache
        }
        return replace(self, cache=cache, dropped=self.length - self.limit)

    def _map(
        self, own: Callable[[Tensor], Tensor], source: Callable[[Tensor], Tensor]
    ) -> DecoderState:
        """Apply `own` to the tensors of rows and `source` to those of sentences, recursively."""
        return DecoderState(
            recurrent={name: own(tensor) for name, tensor in self.recurrent.items()},
            cache={name: own(tensor) for name, tensor in self.cache.items()},
            memory={name: source(tensor) for name, tensor in self.memory.items()},
            children={name: child._map(own, source) for name, child in self.children.items()},
            length=self.length,
            limit=self.limit,
            dropped=self.dropped,
        )


def _row_selector(rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that gathers rows, once from a tensor that several blocks share."""
    selected: dict[int, Tensor] = {}

    def select(tensor: Tensor) -> Tensor:
        if id(tensor) not in selected:
            selected[id(tensor)] = tensor.index_select(0, rows)
        return selected[id(tensor)]

    return select


def _append(cache: Tensor, length: int, new: Tensor) -> Tensor:
    """Write new positions after the first `length`, in place if they fit."""
    if torch.is_grad_enabled() and (new.requires_grad or cache.requires_grad):
        # Autograd does not allow writing in place here.
        return torch.cat([cache[..., :length, :], new], dim=-2)
    needed = length + new.size(-2)
    if needed > cache.size(-2):
        size = needed + max(MIN_CACHE_GROWTH - 1, needed // 4)
        grown = new.new_zeros(*new.shape[:-2], size, new.size(-1))
        grown[..., :length, :] = cache[..., :length, :]
        cache = grown
    cache[..., length:needed, :] = new
    return cache
