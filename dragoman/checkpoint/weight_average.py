"""The mean of several checkpoints' weights, as in section 6.1 of the Transformer paper.

`runs/averaged_model_writer.py` chooses the newest checkpoints of a run and writes the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dragoman.errors import DataError


def average_weights(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of several models' weights, summed in float64.

    One model at a time is in memory.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
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
            dtypes.setdefault(name, tensor.dtype)
        count += 1
    if not count:
        raise DataError(
            "an average needs at least one model", found="none", fix="name one or more checkpoints"
        )
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}


def _first_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """Return the first tensor whose shape differs."""
    for name in sorted(one.keys() | other.keys()):
        shapes = [tuple(side[name].shape) if name in side else None for side in (one, other)]
        if shapes[0] != shapes[1]:
            found = ["no shape" if shape is None else str(shape) for shape in shapes]
            return f"{name} with {' and '.join(found)}"
    return "a different order of tensors"
