"""Which number format the matrix products use, decided once a run and told.

bfloat16 has float32's range, so no loss scale is needed and none can run out (facebookresearch/fairseq#1529, #512, #282,
#1895, #4555: "Minimum loss scale reached"). It is taken where the hardware multiplies it: on CPUs without such
instructions it is emulated and several times slower than float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

_CPU_FLAGS = ("amx_bf16", "avx512_bf16")  # with either, products ran 1.3 to 1.7 times as fast as in float32 (docs/log.md)


class Precision(NamedTuple):
    """A number format for products, and why it was chosen."""

    dtype: torch.dtype
    reason: str

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Make the context that a forward pass runs in."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    @property
    def name(self) -> str:
        """Name the format as the configuration does."""
        return str(self.dtype).removeprefix("torch.")


def choose_precision(wanted: str, device: torch.device) -> Precision:
    """Follow `train.precision`; `auto` asks the hardware and never the clock, so that a rerun decides alike."""
    if wanted == "float32":
        return Precision(torch.float32, "as configured")
    if wanted == "bfloat16" and (device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)):
        return Precision(torch.bfloat16, "as configured")
    if device.type == "cuda":  # one without bfloat16 would emulate it, slower than float32 and no more exact
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision(torch.bfloat16, f"{torch.cuda.get_device_name(device)} multiplies it")
        return Precision(torch.float32, f"{torch.cuda.get_device_name(device)} does not multiply bfloat16")
    if device.type == "cpu":
        flag = next((flag for flag in _CPU_FLAGS if flag in _cpu_flags()), None)
        if flag:
            return Precision(torch.bfloat16, f"this CPU has {flag}")
        return Precision(torch.float32, "this CPU does not multiply bfloat16")
    return Precision(torch.float32, f"bfloat16 was not tried on {device.type}")


@cache
def _cpu_flags() -> frozenset[str]:
    """Read what the processor can do; empty where the system does not say, which leads to float32."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
