"""Batches: padded token ids with their lengths, and padding masks made from the lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.data.batch_plan import smallest_fitting_shape
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.token_store import TokenStore
from dragoman.runtime.counter_rng import CounterRNG
from dragoman.text.sentencepiece_tokenizer import TokenIds, Tokenizer, Tokenizers
from dragoman.text.special_tokens import BOS, EOS, PAD


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """A batch of examples: axis 0 of every tensor is the batch row.

    Subclasses add fields; Tensor fields are moved, pinned and selected by row. Counting tokens
    must not read a tensor, which may be on a GPU.
    """

    examples: NDArray[np.int64]  # (B,) indices of the examples in the store

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        raise NotImplementedError

    @property
    def padded_tokens(self) -> int:
        """The number of tokens, padding included."""
        raise NotImplementedError

    @property
    def limit_tokens(self) -> int:
        """Padded tokens as `train.batch_tokens` counts them."""
        return self.padded_tokens

    @property
    def shape_key(self) -> str:
        """The padded lengths: batches with the same key need the same memory per row."""
        return "x".join(
            "x".join(map(str, tensor.shape[1:])) for tensor in self.tensors() if tensor.dim() > 1
        )

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """The key of batches that run the same kernels: all shapes."""
        return tuple(tensor.shape for tensor in self.tensors())

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors, in the order of the fields."""
        values = (getattr(self, each.name) for each in dataclasses.fields(self))
        return tuple(value for value in values if isinstance(value, Tensor))

    def __len__(self) -> int:
        """Return the number of rows, B."""
        return len(self.examples)

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on a device; does not wait if the memory is pinned."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Return the batch in pinned memory."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def clone(self) -> Self:
        """Return a copy of the batch."""
        return self._map_tensors(torch.clone)

    def rows(self, index: slice | Tensor | NDArray[np.int64] | Sequence[int]) -> Self:
        """Return some rows with the same padding, for a rank or after out-of-memory.

        NumPy fields are selected like tensors.
        """
        if isinstance(index, slice):
            chosen = np.arange(len(self))[index]
            part = self._map_tensors(lambda tensor: tensor[index])
        else:
            chosen = np.asarray(index, np.int64)
            where = torch.from_numpy(chosen).to(self.tensors()[0].device)
            part = self._map_tensors(lambda tensor: tensor[where])
        arrays: dict[str, Any] = {
            each.name: getattr(self, each.name)[chosen]
            for each in dataclasses.fields(self)
            if isinstance(getattr(self, each.name), np.ndarray)
        }
        return dataclasses.replace(part, **arrays)

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        values = ((each.name, getattr(self, each.name)) for each in dataclasses.fields(self))
        changes: dict[str, Any] = {
            name: change(value) for name, value in values if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Batch(TensorBatch):
    """A batch of sentence pairs.

    `src` is tokens and EOS, `tgt_in` BOS and tokens, `tgt_out` tokens and EOS.
    """

    src: Tensor  # (B, S)
    src_lengths: Tensor  # (B,)
    tgt_in: Tensor  # (B, T)
    tgt_out: Tensor  # (B, T)
    tgt_lengths: Tensor  # (B,)
    # (B, 2) both lengths on the host, so that counting tokens never waits for a GPU.
    sizes: NDArray[np.int64]

    @property
    def src_mask(self) -> Tensor | None:
        """True at real source positions, (B, S); None without padding."""
        return self._mask(self.src_lengths, self.src.shape[1], 0)

    @property
    def tgt_mask(self) -> Tensor | None:
        """True at real target positions, (B, T); None without padding."""
        return self._mask(self.tgt_lengths, self.tgt_in.shape[1], 1)

    @property
    def tokens(self) -> int:
        """The number of real tokens of both sides, BOS and EOS included."""
        return int(self.sizes.sum())

    @property
    def padded_tokens(self) -> int:
        """The number of tokens of both sides, padding included."""
        return self.src.numel() + self.tgt_in.numel()

    @property
    def limit_tokens(self) -> int:
        """Padded tokens of the longer side."""
        return len(self) * max(self.src.shape[1], self.tgt_in.shape[1])

    @property
    def shape_key(self) -> str:
        """Source length x target length."""
        return f"{self.src.shape[1]}x{self.tgt_in.shape[1]}"

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """Shapes, and which sides have padding: without, there is no mask."""
        full = (self.sizes == (self.src.shape[1], self.tgt_in.shape[1])).all(axis=0)
        return (self.src.shape, self.tgt_in.shape, *full.tolist())

    def _mask(self, lengths: Tensor, width: int, side: int) -> Tensor | None:
        if bool((self.sizes[:, side] == width).all()):
            return None
        return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def collate(
    store: TokenStore,
    examples: NDArray[np.int64],
    *,
    shapes: Sequence[BatchShape] = (),
    tokenizers: Tokenizers | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    max_length: int | None = None,
) -> Batch:
    """Read pairs from the store and pad them to the smallest batch shape, or the longest pair.

    With `dropout` the pairs are tokenized with BPE-dropout, a pure function of (seed, pair).
    Sequences grow by about a fifth at 0.1, and the batch may exceed the token limit by as much. A
    sentence whose sampled segmentation has more than `max_length` tokens keeps its stored one.
    """
    limit = None if max_length is None else max_length + 1  # EOS
    if dropout and tokenizers:
        pairs = [store.pair(int(each)) for each in examples]
        draws = [CounterRNG(seed, int(each)) for each in examples]
        sides = zip(tokenizers, zip(*pairs, strict=True), strict=True)
        src, tgt = (
            _encode_with_dropout(tokenizer, rows, dropout, draws, max_length)
            for tokenizer, rows in sides
        )
        return make_batch(src, tgt, examples=examples, shapes=shapes, limit=limit)
    examples = np.asarray(examples, np.int64)
    # EOS
    sizes = (
        np.stack([store.src_lengths[examples], store.tgt_lengths[examples]], axis=1).astype(
            np.int64
        )
        + 1
    )
    shape = _choose_padded_shape(sizes, shapes, limit)
    return _build_batch(
        store.padded_ids("src", examples, shape.src),
        store.padded_ids("tgt", examples, shape.tgt),
        sizes,
        examples,
    )


def make_batch(
    src: Sequence[TokenIds],
    tgt: Sequence[TokenIds],
    *,
    examples: NDArray[np.int64] | None = None,
    shapes: Sequence[BatchShape] = (),
    limit: int | None = None,
) -> Batch:
    """Pad pairs of token ids, without BOS and EOS, to a batch of at most `limit` positions.

    A longer pair widens the batch.
    """
    sizes = np.array(
        [[len(a) + 1, len(b) + 1] for a, b in zip(src, tgt, strict=True)], np.int64
    ).reshape(-1, 2)
    shape = _choose_padded_shape(sizes, shapes, limit)
    sides = tuple(np.full((len(sizes), width), PAD, np.int64) for width in shape)
    for row, pair in enumerate(zip(src, tgt, strict=True)):
        for side, ids in zip(sides, pair, strict=True):
            side[row, : len(ids)] = ids
    return _build_batch(
        sides[0],
        sides[1],
        sizes,
        np.arange(len(sizes)) if examples is None else np.asarray(examples, np.int64),
    )


def _choose_padded_shape(
    sizes: NDArray[np.int64], shapes: Sequence[BatchShape], limit: int | None = None
) -> BatchShape:
    """Return the smallest shape that holds all sizes (B, 2); without shapes, the longest.

    Lengths beyond all shapes are rounded up, but not past `limit`, where learned positions may end.
    """
    longest = BatchShape(*sizes.max(axis=0, initial=1).tolist())
    if not shapes:
        return longest
    found = smallest_fitting_shape(list(shapes), longest.src, longest.tgt)
    return (
        found
        if limit is None
        else BatchShape(
            *(min(side, max(least, limit)) for side, least in zip(found, longest, strict=True))
        )
    )


def _build_batch(
    src: NDArray[np.int64],
    tgt: NDArray[np.int64],
    sizes: NDArray[np.int64],
    examples: NDArray[np.int64],
) -> Batch:
    """Add BOS and EOS to padded tokens (B, S) and (B, T); sizes (B, 2) count the EOS."""
    rows = np.arange(len(sizes))
    tgt_in = np.empty_like(tgt)
    tgt_in[:, 0], tgt_in[:, 1:] = BOS, tgt[:, :-1]
    src[rows, sizes[:, 0] - 1] = EOS
    tgt[rows, sizes[:, 1] - 1] = EOS
    return Batch(
        src=torch.from_numpy(src),
        src_lengths=torch.from_numpy(sizes[:, 0].copy()),
        tgt_in=torch.from_numpy(tgt_in),
        tgt_out=torch.from_numpy(tgt),
        tgt_lengths=torch.from_numpy(sizes[:, 1].copy()),
        examples=examples,
        sizes=sizes,
    )


def _encode_with_dropout(
    tokenizer: Tokenizer,
    rows: Sequence[TokenIds],
    dropout: float,
    draws: Sequence[CounterRNG],
    max_length: int | None,
) -> list[list[int]]:
    """Tokenize one side again with BPE-dropout; the text is decoded from the stored tokens.

    A language tag, which has no text, stays the first token.
    """
    texts = tokenizer.decode_batch(rows)
    tags = set(tokenizer.tag_ids.values())
    found = [
        [
            *(int(each) for each in row[:1] if int(each) in tags),
            *tokenizer.encode_with_dropout(text, dropout=dropout, generator=draw),
        ]
        for row, text, draw in zip(rows, texts, draws, strict=True)
    ]
    if max_length is None:
        return found
    return [
        ids if len(ids) <= max_length else [int(each) for each in row]
        for ids, row in zip(found, rows, strict=True)
    ]
