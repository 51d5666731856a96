"""The machine that a run takes: its device, and its name for people."""

from __future__ import annotations

import os
import platform

import torch

from dragoman.errors import ConfigError
from dragoman.files.disk import readable_size
from dragoman.training.distributed import local_rank
from dragoman.translator.device import choose_device


def take_device(wanted: str) -> torch.device:
    """Choose the device; under torchrun each process takes a GPU of its own."""
    alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
    device = choose_device(wanted, strict=not alone)
    if device.type == "cuda" and device.index is None:
        number, gpus = local_rank(), torch.cuda.device_count()
        if number >= gpus:
            raise ConfigError([f"each process needs a GPU of its own; found {gpus} for process {number + 1}; start fewer with torchrun"])
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    return device


def require_memory(parameters: int) -> None:
    """Refuse a model whose float32 weights alone exceed the memory of this machine, before anything is allocated."""
    needed, there = 4 * parameters, _physical_memory()
    if there and needed > there:
        found = f"{parameters:,} parameters, {readable_size(needed)} in float32, and {readable_size(there)} of memory"
        raise ConfigError([f"a model must fit into this machine's memory; found {found}; lower model.width or the number of layers"])


def _physical_memory() -> int:
    """Return the bytes of memory that the machine has; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def machine_name(device: torch.device, ranks: int) -> str:
    """Name the hardware, for people."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        name = f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores ({platform.machine()})"
    else:
        name = device.type
    return name if ranks == 1 else f"{ranks} processes, each on {name}"
