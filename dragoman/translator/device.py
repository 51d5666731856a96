"""Where a model runs: what `auto` means, and what is said of a device that is not there."""

from __future__ import annotations

import torch

from dragoman.errors import ConfigError


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """Take the named device, or with `auto` a GPU where there is one and else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda", "mps")
    except (RuntimeError, TypeError):
        known = False
    if not known:
        raise ConfigError([f"the device must be auto, cpu, cuda, cuda:1 or mps; found {name!r}; try auto"]) from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError([f"the device must be one that torch sees; found {name!r} and {torch.cuda.device_count()} GPUs; try auto or cpu"])
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError([f"the device must be one that torch sees; found {name!r} on a machine without it; try auto or cpu"])
    if device.type == "cuda":
        # cuDNN's attention builds a plan for every shape it meets, half a second each on an H200 with torch 2.11, and a
        # decoder meets a new shape at every step. PyTorch's own fused kernels take all shapes as they come.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device
