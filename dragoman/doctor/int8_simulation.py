"""Products in eight bits, as engines with dynamic quantisation compute them, for any model and without touching it.

Each row of a weight and each vector that meets it is divided by its largest number and rounded to -127..127. Sums of such products
are whole numbers that float32 holds exactly up to a thousand of the largest, so multiplying what was rounded gives what an
int8 kernel gives. PyTorch's own `quantize_dynamic` is on its way out (pytorch/ao#2259) and knows only `nn.Linear`.
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
    """A context in which linear layers multiply in eight bits; in recurrent kernels, which are one call, only the weights are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by the weight's identity, the weight held so that it stays its own

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Round the operands of a product; let everything else through."""
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
        """Round a weight, once if it is a parameter; others are made anew at each call."""
        if not isinstance(weight, nn.Parameter):
            return fake_quantize(weight)
        if id(weight) not in self._cache:
            self._cache[id(weight)] = weight, fake_quantize(weight)
        return self._cache[id(weight)][1]


def fake_quantize(x: Tensor) -> Tensor:
    """Round every vector along the last axis to 255 levels between its largest number and minus that."""
    step = x.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / _MAX_INT8
    return (x / step).round() * step
