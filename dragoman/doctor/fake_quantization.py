"""Simulated dynamic int8 quantization of linear layers, for any model, without changing it.

Each weight row and each activation vector is scaled by its largest absolute value and rounded to
-127..127. The integer sums are exact in float32 for up to a thousand of the largest terms, so the
float matmul of the rounded operands equals that of an int8 kernel. PyTorch's own `quantize_dynamic`
is deprecated (pytorch/ao#2259) and supports only `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_MAX_INT8 = 127


class SimulatedInt8(TorchFunctionMode):
    """Context in which linear layers use int8; in RNN kernels only the weights are rounded."""

    def __init__(self) -> None:
        super().__init__()
        # By id; the weight itself is kept alive, so that its id is not reused.
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Round the operands of matrix multiplications; pass other calls through."""
        given = dict(kwargs or {})
        if func is F.linear:
            x, weight, *bias = args
            return func(fake_quantize(x), self._weight(weight), *bias, **given)
        if func in (torch.lstm, torch.gru):
            x, states, weights, *rest = args
            return func(
                x,
                states,
                [self._weight(each) if each.dim() > 1 else each for each in weights],
                *rest,
                **given,
            )
        return func(*args, **given)

    def _weight(self, weight: Tensor) -> Tensor:
        """Return a rounded weight, cached if it is a parameter."""
        if not isinstance(weight, nn.Parameter):
            return fake_quantize(weight)
        if id(weight) not in self._cache:
            self._cache[id(weight)] = weight, fake_quantize(weight)
        return self._cache[id(weight)][1]


def fake_quantize(x: Tensor) -> Tensor:
    """Round every vector along the last axis to 255 levels, symmetric around zero."""
    step = x.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / _MAX_INT8
    return (x / step).round() * step
