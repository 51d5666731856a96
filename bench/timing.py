"""What every timed way of training needs: a limit of time, a device that has finished, and times turned into a row."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ALARM_INTERVAL = 5.0  # seconds between rings; leaving takes less


class OutOfTimeError(BaseException):
    """A way has had its seconds; nothing on its way up takes this for a failure that it could do without."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Leave what runs within after so long, where the system has an alarm.

    It rings until it is heard: an error raised in what Python calls by itself, as a dying object's callback, is only printed.
    """

    def raise_out_of_time(signal_number: int, frame: object) -> None:
        raise OutOfTimeError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, raise_out_of_time)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), ALARM_INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def timing_row(
    system: str,
    tokens: list[int],
    seconds: list[float],
    warmup_seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    """Turn each round's useful tokens and time into a row."""
    rates = [count / each for count, each in zip(tokens, seconds, strict=True)]
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {
        "system": system,
        "tokens_s": max(rates),
        "slowest": min(rates),
        "warm_up_s": warmup_seconds,
        "MiB": peak,
    }


def device_name(device: torch.device) -> str:
    """Name what is measured."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )


def synchronize(device: torch.device) -> None:
    """Let the device finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Forget the peak of memory so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> None:
    """Give the last way's memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
