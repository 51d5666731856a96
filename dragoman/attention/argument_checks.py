"""Validation of the arguments of attention modules, with errors that name the wrong argument.

Only shapes and dtypes are checked, never values, so nothing synchronizes with a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dragoman.errors import DragomanError


def check_heads(width: int, heads: int, *, head_width: int = 0, kv_heads: int = 0) -> None:
    """Raise DragomanError if heads do not divide the width; suggest the nearest that do."""
    if heads < 1 or width < 1:
        raise DragomanError(
            "attention needs a width and at least one head",
            found=f"{heads} heads and width {width}",
            fix="set both to at least 1",
        )
    if not head_width and width % heads:
        fix = f"use {_nearest_divisors(heads, width)} heads, or set head_width"
        raise DragomanError(
            "heads must divide the width", found=f"{heads} heads and width {width}", fix=fix
        )
    if kv_heads and heads % kv_heads:
        fix = f"use kv_heads={_nearest_divisors(kv_heads, heads)}"
        raise DragomanError(
            "kv_heads must divide heads", found=f"{heads} heads and kv_heads={kv_heads}", fix=fix
        )


def check_sequence(x: Tensor, width: int, what: str, fix: str = "") -> None:
    """Raise DragomanError unless `x` is (B, T, D) with the given width."""
    if x.dim() != 3:
        add = "add a batch axis with x.unsqueeze(0)" if x.dim() == 2 else "reshape it to (B, T, D)"
        raise DragomanError(f"{what} must be (B, T, D)", found=f"shape {tuple(x.shape)}", fix=add)
    if x.size(-1) != width:
        raise DragomanError(
            f"{what} must have width {width}, as the attention was built",
            found=f"shape {tuple(x.shape)}",
            fix=fix or f"build it with width {x.size(-1)}, or project {what}",
        )


def check_same_batch(first: Tensor, second: Tensor, axes: int, what: str) -> None:
    """Raise DragomanError if the first `axes` dimensions of two tensors differ."""
    if first.shape[:axes] != second.shape[:axes]:
        found = f"{tuple(first.shape[:axes])} and {tuple(second.shape[:axes])}"
        must = f"{what} must have equal batch sizes" + (" and lengths" if axes > 1 else "")
        raise DragomanError(must, found=found, fix="use one batch for both, batch first")


def check_key_mask(mask: Tensor | None, rows: int, keys: int) -> None:
    """Raise DragomanError unless a key mask is boolean and (B, S)."""
    if mask is None:
        return
    _check_mask_dtype(mask)
    if tuple(mask.shape) != (rows, keys):
        raise DragomanError(
            f"a key mask must be (B, S), here {(rows, keys)}",
            found=f"shape {tuple(mask.shape)}",
            fix="make it from the lengths: masks.from_lengths(lengths)",
        )


def check_mask(mask: Tensor | None, rows: int, queries: int, keys: int) -> None:
    """Raise DragomanError unless a mask is boolean and broadcasts to (B, T, S) or (B, H, T, S)."""
    if mask is None:
        return
    _check_mask_dtype(mask)
    full = (rows, queries, keys) if mask.dim() != 4 else (rows, mask.size(1), queries, keys)
    is_broadcastable = mask.dim() in (2, 3, 4) and all(
        size in (1, wanted) for size, wanted in zip(mask.shape, full[-mask.dim() :], strict=True)
    )
    if not is_broadcastable:
        padding = tuple(mask.shape) == (rows, keys)
        fix = (
            "add an axis for the queries: mask.unsqueeze(1)"
            if padding
            else "make it with dragoman.attention.masks"
        )
        raise DragomanError(
            f"a mask must broadcast to (B, T, S), here {(rows, queries, keys)}",
            found=f"shape {tuple(mask.shape)}",
            fix=fix,
        )


def _check_mask_dtype(mask: Tensor) -> None:
    """Raise DragomanError unless a mask is boolean: the meaning of numbers differs by library."""
    if mask.dtype != torch.bool:
        fix = "use a boolean mask, True for what may be attended to: mask.bool()"
        if mask.is_floating_point():
            fix = "use a boolean mask, True for what may be attended to: mask == 0 if it adds -inf"
        raise DragomanError("a mask must be boolean", found=str(mask.dtype), fix=fix)


def _nearest_divisors(number: int, of: int) -> str:
    """Return the nearest divisors below and above a number, as text."""
    below = max((n for n in range(1, number) if of % n == 0), default=1)
    above = next((n for n in range(number, of + 1) if of % n == 0), None)
    return f"{below} or {above}" if above else str(below)
