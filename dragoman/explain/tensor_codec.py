"""Tensors in JSON: quantized, base64, and pooled in groups of positions.

Weights are `u8` with square-root companding (value = scale * (u / 255)²: worst error 0.004 at 1,
4e-6 near 0), small signed matrices and vectors `f32`, large signed ones `i8` with a scale, integers
exact. Pooling sums keys and averages queries, so that rows still sum to what they summed to.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.errors import DataError
from dragoman.explain.explanation import Array

DTYPES = {"u8": "<u1", "i8": "<i1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "f32": "<f4"}

# A signed matrix of at most this size is exact: the attribution of a token with probability near 1
# is far below the largest, and one scale for all rows would round it to zero.
EXACT_CELLS = 16_384

Pool = dict[str, list[int]]  # "q" and "k": borders of groups, one more than there are groups


def encode_tensor(array: Array, *, pool: Pool | None = None, dtype: str = "") -> dict[str, Any]:
    """Return an array as a JSON object: dtype, code, scale, shape, pool and base64 data."""
    dtype, code, scale, values = quantize(np.asarray(array), dtype)
    return {
        "dtype": dtype,
        "code": code,
        "scale": scale,
        "shape": list(values.shape),
        "pool": pool,
        "data": base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii"),
    }


def decode_tensor(entry: Mapping[str, Any]) -> Array:
    """Return the array of `encode_tensor`: float32, or int64 for integers."""
    try:
        raw = np.frombuffer(
            base64.b64decode(entry["data"], validate=True), dtype=DTYPES[entry["dtype"]]
        ).reshape(entry["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            "a tensor's data must be base64 of its dtype and shape",
            found=str(error)[:200],
            fix="write the explanation again",
        ) from error
    if entry["dtype"] == "u8" and entry["code"] == "sqrt":
        unit = (raw.astype(np.float64) / 255.0) ** 2
        return (entry["scale"] * unit).astype(np.float32)
    if entry["dtype"] == "i8":
        return (entry["scale"] * raw.astype(np.float64) / 127.0).astype(np.float32)
    return raw.astype(np.float32 if entry["dtype"] == "f32" else np.int64)


def quantize(array: Array, dtype: str) -> tuple[str, str, float, Array]:
    """Return dtype, code, scale and the values as they are written."""
    if array.dtype.kind in "biu" or dtype in ("u8", "u16", "u32", "i32"):
        dtype = dtype or integer_dtype(array)
        return dtype, "linear", 1.0, array.astype(DTYPES[dtype])
    if dtype == "f32" or is_exact(array):
        return "f32", "linear", 1.0, array.astype("<f4")
    array = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=3e38, neginf=-3e38)
    largest = float(np.abs(array).max(initial=0.0))
    if array.min(initial=0.0) >= 0.0:
        # Rounding may put a weight above 1 by one unit in the last place.
        scale = 1.0 if largest <= 1.0 + 1e-4 else _round_scale(largest)
        unit = np.clip(array / scale, 0.0, 1.0)
        return "u8", "sqrt", scale, np.rint(np.sqrt(unit) * 255.0).astype("<u1")
    scale = _round_scale(largest)
    return "i8", "linear", scale, np.rint(array / scale * 127.0).clip(-127, 127).astype("<i1")


def is_exact(array: Array) -> bool:
    """Whether numbers are written as float32: vectors and small signed matrices."""
    small = array.ndim == 2 and array.size <= EXACT_CELLS
    return array.ndim < 2 or (small and bool(array.min(initial=0.0) < 0.0))


def integer_dtype(array: Array) -> str:
    """Return the smallest dtype that holds integers."""
    if array.min(initial=0) < 0:
        return "i32"
    largest = int(array.max(initial=0))
    return "u8" if largest < 1 << 8 else "u16" if largest < 1 << 16 else "u32"


def _round_scale(largest: float) -> float:
    """Return a scale that a decoded array gives again: that of a float32."""
    return float(np.float32(largest))


# --- pooling ---


def pool_edges(length: int, factor: int, words: Sequence[tuple[int, int]] = ()) -> list[int]:
    """Return the borders of ceil(length / factor) groups, at word edges where one is near."""
    groups = max(1, math.ceil(length / factor))
    starts = {start for start, _ in words} | {end for _, end in words}
    edges = [0]
    for group in range(1, groups):
        ideal = round(group * length / groups)
        latest = length - (groups - group)  # the groups after it hold one position each
        near = [
            edge
            for edge in starts
            if edges[-1] < edge <= latest and abs(edge - ideal) <= factor // 2
        ]
        edges.append(
            min(near, key=lambda edge: (abs(edge - ideal), edge))
            if near
            else min(max(ideal, edges[-1] + 1), latest)
        )
    return [*edges, length]


def pool_matrix(array: Array, queries: Sequence[int], keys: Sequence[int]) -> Array:
    """Return (..., Q, K) as groups: the sum over the keys and the mean over the queries of each."""
    exact = np.asarray(array, dtype=np.float64)
    summed = np.add.reduceat(exact, np.asarray(keys[:-1], dtype=np.intp), axis=-1)
    total = np.add.reduceat(summed, np.asarray(queries[:-1], dtype=np.intp), axis=-2)
    return (total / np.diff(queries)[:, None]).astype(np.float32)
