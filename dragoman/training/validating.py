"""Validation from the trainer's side: it must change nothing that training goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from dragoman.errors import StoppedError
from dragoman.files import faults
from dragoman.training.ema import RunningAverage
from dragoman.training.randomness import own_randomness

Validate = Callable[[nn.Module], Mapping[str, float]]


def measure(model: nn.Module, validate: Validate, *, average: RunningAverage | None, seed: int) -> dict[str, float] | None:
    """Validate in evaluation mode, on the running average where there is one; None when a request to stop cut it short."""
    model.eval()
    try:
        faults.point("valid.mid")
        with own_randomness(seed), torch.no_grad(), average.in_place() if average is not None else nullcontext():
            return {name: float(value) for name, value in validate(model).items()}
    except StoppedError:
        return None
    finally:
        model.train()
