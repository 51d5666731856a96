"""Throughput: the first half of the time is warm-up, and steps are bounded on both sides."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import MagicMock

import pytest

from dragoman.training import throughput_benchmark, trainer


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"seconds": 10.0}, 6),  # 1 + 2 + 2 seconds, then 2 + 2 + 2
        ({"seconds": 0.0}, 2),
        ({"seconds": math.inf, "max_steps": 7}, 7),
        ({"seconds": 0.0, "min_steps": 8}, 12),
    ],
)
def test_steps_are_timed_after_the_warm_up(
    options: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step takes one second and every other two; a step has 6 tokens."""
    clock = [100.0]
    calls: list[int] = []

    def step() -> int:
        clock[0] += 2.0 if calls else 1.0
        calls.append(6)
        return 6

    monkeypatch.setattr(throughput_benchmark.time, "monotonic", lambda: clock[0])
    assert throughput_benchmark.time_steps(step, **options) == throughput_benchmark.Throughput(
        2.0, 3.0
    )
    assert len(calls) == steps


@pytest.mark.parametrize(("steps", "most"), [(10, 4), (80, 4), (2000, 100)])
def test_a_probe_is_a_twentieth_of_the_run(
    steps: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "measure_throughput", lambda *_, **options: options)
    probed = MagicMock()
    probed.config.steps, probed._world.size = steps, 1
    found: Any = trainer.Trainer.measure_throughput(probed, seconds=3.0)
    assert (found["seconds"], found["max_steps"]) == (3.0, most)
    probed._world.size = 2
    found = trainer.Trainer.measure_throughput(probed, seconds=3.0)
    assert (found["seconds"], found["max_steps"]) == (math.inf, trainer.DISTRIBUTED_PROBE_STEPS)
