"""Estimates before a run: memory."""

from __future__ import annotations

import pytest
import torch

from dragoman.config import Config
from dragoman.errors import ConfigError
from dragoman.runs import resource_estimate
from dragoman.runtime import device


def test_a_model_larger_than_memory_is_rejected_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource_estimate, "_physical_memory", lambda: 4_000_000_000)
    resource_estimate.require_model_fits_memory(1_000_000_000)
    with pytest.raises(
        ConfigError,
        match=r"found 1,000,000,001 parameters, 4\.0 GB in float32, and 4\.0 GB of memory; lower",
    ):
        resource_estimate.require_model_fits_memory(1_000_000_001)


def test_unknown_free_memory_rejects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_value_error(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(device.os, "sysconf", raise_value_error)
    resource_estimate.require_model_fits_memory(10**15)


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), [8, 4, 2, 1]),
        (RuntimeError("expected a matrix"), [8]),
    ],
)
def test_only_a_lack_of_memory_halves_the_batch(
    error: Exception, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fail(config: Config, where: torch.device, rows: int) -> float:
        seen.append(rows)
        raise error

    monkeypatch.setattr(resource_estimate, "_measure_rows", fail)
    config = Config().replace(train={"batch_tokens": 8 * resource_estimate.RANDOM_SENTENCE_TOKENS})
    with pytest.raises(type(error), match=str(error)):
        resource_estimate.measure_random_throughput(config, torch.device("cpu"))
    assert seen == tried
