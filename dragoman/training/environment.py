"""What besides the configuration decides a run's bits: recorded with every checkpoint and compared at resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def describe_environment(*, device: str = "cpu", world: int = 1, deterministic: bool = False) -> dict[str, Any]:
    """Record what the bits depend on; sums are split by threads and instruction set, so those are part of it."""
    return {
        "torch": torch.__version__.split("+")[0],
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "world": world,
        "deterministic": deterministic,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what changed, such as "threads 1 -> 2"; empty when a resumed run repeats every bit."""
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
