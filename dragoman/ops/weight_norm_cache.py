"""A cache for a weight that is computed from parameters, such as one with weight normalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class WeightCache:
    """Holds one computed weight while its parameters do not change and no gradient is needed."""

    def __init__(self) -> None:
        self._entry: tuple[object, Tensor] | None = None

    def get(self, parameters: Sequence[Tensor], compute: Callable[[], Tensor]) -> Tensor:
        """Return the cached weight, or compute it.

        It is always computed where gradients are recorded, under torch.compile, and for inference
        tensors, which have no version counter.
        """
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or any(each.is_inference() for each in parameters)
        ):
            return compute()
        key = [(each.data_ptr(), each._version, each.dtype, each.device) for each in parameters]
        entry = self._entry  # read once: another thread may replace it
        if entry is None or entry[0] != key:
            entry = self._entry = (key, compute())
        return entry[1]

    def clear(self) -> None:
        """Forget the cached weight."""
        self._entry = None
