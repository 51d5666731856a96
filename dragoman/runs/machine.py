"""The machine that a run takes: its device, and its name for people."""

from __future__ import annotations

import os
import platform

import torch

from dragoman.training.distributed import local_rank
from dragoman.translator.device import choose_device


def take_device(wanted: str) -> torch.device:
    """Choose the device; under torchrun each process takes a GPU of its own."""
    device = choose_device(wanted)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    return device


def machine_name(device: torch.device, ranks: int) -> str:
    """Name the hardware, for people."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        name = f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores ({platform.machine()})"
    else:
        name = device.type
    return name if ranks == 1 else f"{ranks} processes, each on {name}"
