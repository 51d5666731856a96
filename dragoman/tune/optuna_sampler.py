"""Sampling and pruning of trials by Optuna, with no storage but the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dragoman.tune.search_space import SearchParameter, Value
from dragoman.tune.trial_journal import COMPLETE, FAILED, PRUNED, RUNNING, TrialRecord

if TYPE_CHECKING:
    import optuna

MIN_COMPLETE_TRIALS = 4  # before any is pruned
MIN_VALIDATIONS = 2  # of a trial before it is pruned
STARTUP_TRIALS = 6  # sampled at random, before TPE models their values


def build_optuna_study(
    trials: Sequence[TrialRecord],
    space: Sequence[SearchParameter],
    *,
    lower: bool,
    seed: int,
    first: Mapping[str, Value] | None = None,
) -> optuna.Study:
    """Return an Optuna study with the ended trials, whose next `ask` has the values of `first`.

    It is rebuilt for each trial, with its own seed, so that a resumed study samples the
    same values as one that was never stopped.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="dragoman",
        direction="minimize" if lower else "maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS),
        pruner=optuna.pruners.MedianPruner(
            n_startup_trials=MIN_COMPLETE_TRIALS,
            n_warmup_steps=MIN_VALIDATIONS,  # Optuna's steps: validations, which count from 1
        ),
    )
    states = {
        COMPLETE: optuna.trial.TrialState.COMPLETE,
        PRUNED: optuna.trial.TrialState.PRUNED,
        FAILED: optuna.trial.TrialState.FAIL,
    }
    distributions = {each.name: _distribution(each) for each in space}
    for each in trials:
        if each.state != RUNNING:
            study.add_trial(
                optuna.trial.create_trial(
                    state=states[each.state],
                    value=each.value,
                    params=each.values,
                    distributions=distributions,
                    intermediate_values=dict(enumerate(each.reports, 1)),
                )
            )
    if first:
        study.enqueue_trial(dict(first))
    return study


def suggest_value(sampled: optuna.trial.Trial, parameter: SearchParameter) -> Any:
    """Return the sampled value of a parameter."""
    if parameter.choices:
        return str(sampled.suggest_categorical(parameter.name, parameter.choices))
    if parameter.integer:
        low, high = round(parameter.low), round(parameter.high)
        return sampled.suggest_int(parameter.name, low, high, log=parameter.log)
    return sampled.suggest_float(parameter.name, parameter.low, parameter.high, log=parameter.log)


def _distribution(parameter: SearchParameter) -> optuna.distributions.BaseDistribution:
    """Return the distribution that `_suggest` samples from."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    if parameter.choices:
        return CategoricalDistribution(parameter.choices)
    if parameter.integer:
        return IntDistribution(round(parameter.low), round(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)
