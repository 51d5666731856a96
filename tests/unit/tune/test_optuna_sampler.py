"""Sampling and pruning by Optuna: its studies are built anew for each trial."""

from __future__ import annotations

import pytest

from dragoman.tune.optuna_sampler import build_optuna_study, suggest_value
from dragoman.tune.search_space import SearchParameter
from dragoman.tune.trial_journal import COMPLETE, FAILED, PRUNED, RUNNING, TrialRecord

RATE = SearchParameter("train.learning_rate", low=1e-4, high=1e-2, log=True)
DROPOUT = SearchParameter("model.dropout", low=0.0, high=0.4)
VOCABULARY = SearchParameter("text.vocab_size", low=100, high=10_000, log=True, integer=True)


def complete(number: int, reports: list[float], state: str = COMPLETE) -> TrialRecord:
    value = None if state in (FAILED, RUNNING) else min(reports)
    values: dict[str, str | int | float] = {"model.dropout": 0.02 * number}
    return TrialRecord(number, values, state, reports=reports, value=value)


def sample(parameter: SearchParameter, seed: int) -> float:
    trial = build_optuna_study([], [parameter], lower=True, seed=seed).ask()
    return float(suggest_value(trial, parameter))


@pytest.mark.parametrize(("trials", "prunes"), [(3, False), (4, True)])
def test_nothing_is_pruned_before_four_trials_are_complete(trials: int, prunes: bool) -> None:
    before = [complete(number, [1.0, 0.5]) for number in range(trials)]
    trial = build_optuna_study(before, [DROPOUT], lower=True, seed=1).ask()
    suggest_value(trial, DROPOUT)
    trial.report(2.0, 1)
    assert not trial.should_prune(), "never at the first validation"
    trial.report(2.0, 2)
    assert bool(trial.should_prune()) is prunes


@pytest.mark.parametrize(("value", "prunes"), [(0.9, False), (1.1, True)])
def test_a_validation_is_compared_with_those_of_the_same_number(value: float, prunes: bool) -> None:
    before = [complete(number, [2.0, 1.0, 0.1]) for number in range(4)]
    trial = build_optuna_study(before, [DROPOUT], lower=True, seed=1).ask()
    suggest_value(trial, DROPOUT)
    trial.report(value, 2)
    assert bool(trial.should_prune()) is prunes


@pytest.mark.parametrize(("value", "prunes"), [(0.9, True), (1.1, False)])
def test_a_lower_metric_is_pruned_where_higher_is_better(value: float, prunes: bool) -> None:
    before = [complete(number, [0.5, 1.0]) for number in range(4)]
    trial = build_optuna_study(before, [DROPOUT], lower=False, seed=1).ask()
    suggest_value(trial, DROPOUT)
    trial.report(value, 2)
    assert bool(trial.should_prune()) is prunes


def test_ended_trials_are_known_to_the_study_and_the_running_one_is_not() -> None:
    before = [
        complete(0, [1.0]),
        complete(1, [1.0], PRUNED),
        complete(2, [], FAILED),
        complete(3, [1.0], RUNNING),
    ]
    found = build_optuna_study(before, [DROPOUT], lower=True, seed=1).trials
    assert [trial.state.name for trial in found] == ["COMPLETE", "PRUNED", "FAIL"]


def test_values_depend_on_the_seed() -> None:
    assert sample(DROPOUT, 1) == sample(DROPOUT, 1) != sample(DROPOUT, 2)


@pytest.mark.parametrize(("parameter", "middle"), [(RATE, 1e-3), (VOCABULARY, 1000)])
def test_half_of_a_logarithmic_range_lies_below_its_geometric_mean(
    parameter: SearchParameter, middle: float
) -> None:
    values = [sample(parameter, seed) for seed in range(60)]
    assert 18 <= sum(value < middle for value in values) <= 42


def test_the_first_six_trials_are_sampled_at_random() -> None:
    """Values of random sampling do not depend on the losses before; those of TPE do."""

    def ask(trials: int, best: int) -> float:
        before = [complete(number, [abs(number - best) + 1.0]) for number in range(trials)]
        trial = build_optuna_study(before, [DROPOUT], lower=True, seed=3).ask()
        return float(suggest_value(trial, DROPOUT))

    assert ask(5, best=0) == ask(5, best=4)
    assert ask(6, best=0) != ask(6, best=5)
