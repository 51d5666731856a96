"""The average of several checkpoints' weights, as the Transformer paper takes of its last five or twenty (section 6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dragoman.errors import DataError


def average_weights(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Average tensor by tensor, summing in float64, in the order given; only one model besides the sum is held at a time."""
    sums: dict[str, Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    count = 0
    for weights in models:
        if count and {name: tuple(tensor.shape) for name, tensor in weights.items()} != {
            n: tuple(t.shape) for n, t in sums.items()
        }:
            raise DataError(
                "models that are averaged must have the same tensors",
                found=_first_difference(sums, weights),
                fix="average checkpoints of one run",
            )
        for name, tensor in weights.items():
            sums[name] = tensor.double() + sums[name] if count else tensor.double().clone()
            kinds.setdefault(name, tensor.dtype)
        count += 1
    if not count:
        raise DataError(
            "an average needs at least one model", found="none", fix="name one or more checkpoints"
        )
    return {name: (total / count).to(kinds[name]) for name, total in sums.items()}


def _first_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Name the first tensor that does not match."""
    for name in sorted(one.keys() | other.keys()):
        shapes = [tuple(side[name].shape) if name in side else None for side in (one, other)]
        if shapes[0] != shapes[1]:
            return f"{name} with {' and '.join('nothing' if shape is None else str(shape) for shape in shapes)}"
    return "tensors in another order"
