"""Helpers of the training benchmarks: time limit, synchronization, result rows."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

ALARM_INTERVAL = 5.0  # seconds between alarms


class OutOfTimeError(BaseException):
    """A system exceeded its time limit; not an Exception, so that no handler swallows it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block after some seconds, where the platform has alarms.

    The alarm repeats, because an error raised inside a destructor is only printed.
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
    """Return a row with the throughput of the rounds."""
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
    """Return the name of the device."""
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory counter."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> None:
    """Release cached memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
