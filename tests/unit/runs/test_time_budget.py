"""Time budgets: the time left for training, and the steps that fit into it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.runs import time_budget as time_budget_module
from dragoman.runs.time_budget import TimeBudget


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_planned_steps_leave_time_for_validations():
    """Announced 60 epochs and trained 34: validations and checkpoints were not counted."""
    plain, with_overhead = (TimeBudget(1000.0, now=Time()) for _ in range(2))
    most = plain.plan_steps(0, 1.0, most=10_000)
    steps = with_overhead.plan_steps(0, 1.0, most=10_000, overhead=lambda steps: 8 * 30.0)
    assert steps == pytest.approx(most - 8 * 30 / 1.05, rel=0.02)
    assert (
        TimeBudget(1000.0, now=Time()).plan_steps(
            0, 1.0, most=10_000, overhead=lambda steps: 5000.0
        )
        <= 10
    )


def test_a_budget_that_is_too_short_for_a_step_is_compared_with_it():
    budget = TimeBudget(25.0, spent=12.0, now=Time())
    assert re.search(
        "found 25 s, of which preparation and writing take 21 s, and one training step about 1 min",
        str(budget.too_short_error(61.0)),
    )
    for quick in (0.0, 0.2):
        assert "one training step" not in str(budget.too_short_error(quick))


def test_overhead_is_that_of_the_planned_steps():
    """Validations that take as long as the steps between them leave time for half of those."""
    plain, with_overhead = (TimeBudget(1000.0, now=Time()) for _ in range(2))
    most = plain.plan_steps(0, 1.0, most=10_000)
    steps = with_overhead.plan_steps(0, 1.0, most=10_000, overhead=lambda steps: 1.05 * steps)
    assert steps == pytest.approx(most / 2, rel=0.02)


def test_seconds_left_reserves_time_after_training():
    time = Time()
    time_budget = TimeBudget(600.0, now=time)
    time.now += 400
    assert time_budget.elapsed() == 400
    assert 0 < time_budget.seconds_left() < 200


def test_reserved_seconds_are_a_fraction_and_a_constant():
    time = Time()
    time_budget = TimeBudget(600.0, now=time)
    time.now += 400
    assert time_budget.closing_seconds() == pytest.approx(0.03 * 600 + 8)
    assert time_budget.seconds_left() == pytest.approx(200 - 26)
    assert time_budget.scoring_seconds_left() == pytest.approx(200 - 0.01 * 600 - 6)
    time.now += 500
    assert time_budget.scoring_seconds_left() == 0.0
    assert TimeBudget(0.0).scoring_seconds_left() == float("inf")


def test_zero_is_unlimited():
    assert TimeBudget(0.0).seconds_left() == float("inf")
    assert not TimeBudget(0.0).is_limited


def test_spent_seconds_count():
    time = Time()
    time_budget = TimeBudget(600.0, now=time)
    time_budget.spend(550.0)
    assert time_budget.seconds_left() < 50


def test_planned_steps_follow_the_measured_throughput():
    time = Time()
    time_budget = TimeBudget(1000.0, now=time)
    planned = time_budget.plan_steps(0, 1.0, most=10_000)
    assert 850 < planned < 1000
    time.now += 200  # twice as slow as measured: 100 steps in 200 seconds
    again = time_budget.plan_steps(100, 1.0, most=10_000)
    assert again == pytest.approx(100 + time_budget.seconds_left() / 2, abs=1)
    assert time_budget.plan_steps(100, 1.0, most=120) == 120


def test_a_resumed_run_measures_its_own_steps():
    """Its first 5,000 steps were taken by an earlier process, in time that is spent already."""
    time = Time()
    time_budget = TimeBudget(1000.0, spent=500.0, now=time)
    time_budget.plan_steps(5000, 0.1, most=100_000)
    time.now += 50
    planned = time_budget.plan_steps(5100, 0.1, most=100_000)  # 100 steps in 50 seconds
    assert time_budget.seconds_per_step == pytest.approx(0.5)
    assert planned == pytest.approx(5100 + time_budget.seconds_left() / 0.5, abs=1)


def test_the_training_time_is_that_of_the_latest_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = {"new": {"seconds": 12.5}, "old": {"seconds": 3.0}}
    monkeypatch.setattr(
        time_budget_module, "read_trainer_state", lambda checkpoint: states[checkpoint]
    )
    run: Any = SimpleNamespace(verified_checkpoints=lambda: iter(["new", "old"]))
    assert time_budget_module.trained_seconds(run) == 12.5
    run.verified_checkpoints = lambda: iter([])
    assert time_budget_module.trained_seconds(run) == 0.0
