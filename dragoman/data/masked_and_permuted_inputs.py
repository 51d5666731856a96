"""Inputs of masked (MLM), permuted (PLM) and sentence-order (SOP) objectives, functions of a key.

All rows of a batch have the same number of predicted tokens, so that batches have few shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.runtime.counter_rng import derive_key, splitmix64_outputs
from dragoman.text.special_tokens import BOS, EOS, SPECIAL_TOKENS

# Devlin et al. (2019), section 3.1: replacements of the tokens to predict.
MASKED_FRACTION, RANDOM_FRACTION = 0.8, 0.1


class MaskedRows(NamedTuple):
    """Rows with some tokens replaced, and the tokens to predict."""

    tokens: NDArray[np.int64]  # (B, L)
    positions: NDArray[np.int64]  # (B, P), ascending
    targets: NDArray[np.int64]  # (B, P), the tokens that were there


class OrderedRows(NamedTuple):
    """Two segments a row, in order or swapped: <s> A </s> B </s>."""

    tokens: NDArray[np.int64]  # (B, L)
    in_order: NDArray[np.int64]  # (B,) 1 in order, 0 swapped


def predicted_count(length: int, rate: float) -> int:
    """Return how many of `length` tokens are predicted, at least one."""
    return max(1, round(rate * length))


def choose_positions(
    columns: NDArray[np.int64], rows: int, count: int, *key: object
) -> NDArray[np.int64]:
    """Choose `count` of the columns (L,) for each row, in random order: (B, count)."""
    drawn = _uniform((rows, len(columns)), *key, "positions")
    return columns[np.argsort(drawn, axis=1, kind="stable")[:, :count]]


def mask_tokens(
    tokens: NDArray[np.int64],
    columns: NDArray[np.int64],
    *,
    rate: float,
    mask_token: int,
    key: tuple[object, ...],
) -> MaskedRows:
    """Choose tokens (B, L) among some columns and replace 80 % by the mask, 10 % at random.

    Devlin et al. (2019), "BERT", section 3.1: the other 10 % stay, but are predicted too. Random
    tokens are below `mask_token`, the last of the vocabulary, and not special.
    """
    count = predicted_count(len(columns), rate)
    positions = np.sort(choose_positions(columns, len(tokens), count, *key), axis=1)
    targets = np.take_along_axis(tokens, positions, axis=1)
    kind = _uniform(positions.shape, *key, "kind")
    first = len(SPECIAL_TOKENS)
    drawn = _uniform(positions.shape, *key, "token") * (mask_token - first)
    others = np.where(
        kind < MASKED_FRACTION + RANDOM_FRACTION, first + drawn.astype(np.int64), targets
    )
    replaced = tokens.copy()
    np.put_along_axis(
        replaced, positions, np.where(kind < MASKED_FRACTION, mask_token, others), axis=1
    )
    return MaskedRows(replaced, positions, targets)


def factorization_ranks(length: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ranks (B, length) of an order that predicts positions (B, P) one after another.

    All other tokens have rank 0: they are given, and attend to each other. Yang et al. (2019),
    "XLNet", section 2.3, partial prediction.
    """
    ranks = np.zeros((len(positions), length), np.int64)
    np.put_along_axis(ranks, positions, np.arange(1, positions.shape[1] + 1)[None], axis=1)
    return ranks


def join_segments(tokens: NDArray[np.int64], swapped: NDArray[np.bool_]) -> OrderedRows:
    """Cut rows (B, T) in two, swap the halves where `swapped` (B,), and add special tokens.

    Lan et al. (2020), "ALBERT", section 3.1, sentence-order prediction.
    """
    half = tokens.shape[1] // 2
    first, second = tokens[:, :half], tokens[:, half : 2 * half]
    flag = swapped[:, None]
    start = np.full((len(tokens), 1), BOS)
    end = np.full((len(tokens), 1), EOS)
    parts = [start, np.where(flag, second, first), end, np.where(flag, first, second), end]
    return OrderedRows(np.concatenate(parts, axis=1), (~swapped).astype(np.int64))


def segment_columns(length: int) -> NDArray[np.int64]:
    """Return where `join_segments` puts the tokens of rows of a length: (2 * (length // 2),)."""
    half = length // 2
    return np.concatenate([1 + np.arange(half), 2 + half + np.arange(half)])


def draw_swaps(rows: int, *key: object) -> NDArray[np.bool_]:
    """Choose rows with probability one half: (B,)."""
    return _uniform((rows,), *key, "swaps") < 0.5


def _uniform(shape: tuple[int, ...], *key: object) -> NDArray[np.float64]:
    """Return numbers in [0, 1), the same for the same key on every machine."""
    bits = splitmix64_outputs(derive_key(*key), np.arange(int(np.prod(shape))))
    return (bits >> np.uint64(11)).astype(np.float64).reshape(shape) * 2.0**-53
