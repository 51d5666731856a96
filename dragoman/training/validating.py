"""Validation from the trainer's side: it must change nothing that training goes on from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from dragoman.errors import StoppedError
from dragoman.files import faults
from dragoman.training.compiling import as_they_are
from dragoman.training.randomness import own_randomness

Validate = Callable[[nn.Module], Mapping[str, float]]


def measure(model: nn.Module, validate: Validate, *, seed: int) -> dict[str, float] | None:
    """Validate in evaluation mode; None when a request to stop cut it short."""
    model.eval()
    try:
        faults.point("valid.mid")
        with own_randomness(seed), torch.no_grad(), as_they_are():
            return {name: float(value) for name, value in validate(model).items()}
    except StoppedError:
        return None
    finally:
        model.train()
