"""Random number generators: seed those of a device, or isolate a block of code from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def default_generators(device: torch.device) -> list[Any]:
    """Return the generators of the CPU and the device; each has a method `manual_seed`.

    Seeding them takes a hundredth of the time of `torch.manual_seed`, which checks every backend.
    """
    if device.type == "cpu":
        return [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return [torch.default_generator, torch.cuda.default_generators[index]]
    return [torch]  # torch.manual_seed, for every backend


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the default generators of the CPU and the device."""
    for generator in default_generators(device):
        generator.manual_seed(seed)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Run a block, such as validation, with a seed of its own; restore the generators after it."""
    devices: list[int] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
