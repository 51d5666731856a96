"""Seeds as pure functions of the position in training.

A generator's state that is carried along can drift by one draw at a resume and never come back (NVIDIA-NeMo/
Megatron-Bridge#5257). So nothing is carried: each micro-batch starts from a seed of its own, made from where it stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(run_seed: int, step: int, micro_index: int, stream: str | int) -> int:
    """Make the seed of one part of one micro-batch: 63 bits of SHA-256, the same for any number of ranks."""
    digest = hashlib.sha256(f"{run_seed}/{step}/{micro_index}/{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # some generators take signed numbers


def seed_generators(seed: int, device: torch.device) -> None:
    """Start the CPU's and the device's generators anew; a hundredth of what `torch.manual_seed` takes, which asks after every backend."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ].manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Run something, such as validation, from a seed of its own, and leave every generator as it was."""
    initialized = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if initialized else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
