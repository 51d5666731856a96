"""A running average of the weights, which often translates better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Exponentially decaying average of a model's parameters.

    The decay warms up as `min(decay, (1 + n) / (10 + n))` at the n-th update, so that the random weights of the
    start are soon forgotten; the same rule as TensorFlow's ExponentialMovingAverage with `num_updates`.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._names = [name for name, _ in model.named_parameters()]
        self._weights: list[Tensor] = [parameter for _, parameter in model.named_parameters()]
        self._average = [parameter.detach().clone() for parameter in self._weights]

    def decay_at(self, step: int) -> float:
        """Give the decay of the n-th update, counted from 1."""
        return min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move towards the weights; a skipped update has left them unchanged and moves the average all the same."""
        torch._foreach_lerp_(self._average, self._weights, 1.0 - self.decay_at(step))

    @contextmanager
    @torch.no_grad()
    def averaged_weights(self) -> Iterator[None]:
        """Lend the average to the model, as for validation, and put the weights back afterwards."""
        kept = [weight.detach().clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self._average)
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Give the average by parameter name."""
        return dict(zip(self._names, self._average, strict=True))

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take an average back."""
        for name, average in zip(self._names, self._average, strict=True):
            average.copy_(tensors[name])
