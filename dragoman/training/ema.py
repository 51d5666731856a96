"""Exponential moving average (EMA) of the weights, which often translates better than they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average of a model's parameters.

    The decay warms up as `min(decay, (1 + n) / (10 + n))` at step n, so that the initial weights
    lose their influence soon: the rule of TensorFlow's ExponentialMovingAverage with `num_updates`.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._names = [name for name, _ in model.named_parameters()]
        self._weights: list[Tensor] = [parameter for _, parameter in model.named_parameters()]
        self._average = [parameter.detach().clone() for parameter in self._weights]

    def decay_at(self, step: int) -> float:
        """Return the decay of a step, counted from 1."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights, also after a step that was skipped."""
        torch._foreach_lerp_(self._average, self._weights, 1.0 - self.decay_at(step))

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Swap the averaged weights into the model within the block, as for validation."""
        # Detached tensors share the memory and need no gradient mode. torch.no_grad() as a
        # decorator would resume the generator by a form of throw() that Python 3.12 deprecates.
        weights = [weight.detach() for weight in self._weights]
        trained = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, self._average)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, trained)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the average by parameter name."""
        return dict(zip(self._names, self._average, strict=True))

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load an average."""
        for name, average in zip(self._names, self._average, strict=True):
            average.copy_(tensors[name])
