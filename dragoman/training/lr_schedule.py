"""Learning-rate schedules as pure functions of the step, without a state to save.

Steps are counted from 1. Every schedule has a linear warm-up over `train.warmup_steps` steps to
`train.learning_rate` (`noam` to its own peak). Schedules that decay end at `train.steps` and reach
zero one step later, because a step with a learning rate of zero would be wasted.

To add a schedule, write a function here and name it in `optimizer_and_schedule_catalogue.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dragoman.config import TrainConfig

LRSchedule = Callable[[int, TrainConfig, int], float]  # (step, config, width) -> learning rate


def constant(step: int, config: TrainConfig, width: int) -> float:
    """Return the learning rate of a constant schedule."""
    return config.learning_rate * _warmup_factor(step, config)


def noam(step: int, config: TrainConfig, width: int) -> float:
    """Return the rate of Vaswani et al. (2017), equation 3.

    It is `factor * width^-0.5 * min(step^-0.5, step * warmup^-1.5)`. `train.learning_rate` is the
    factor, 1 in the paper; the peak rate is `factor * (width * warmup)^-0.5`.
    """
    warmup_term = step * config.warmup_steps**-1.5 if config.warmup_steps else math.inf
    return config.learning_rate * width**-0.5 * min(step**-0.5, warmup_term)


def inverse_sqrt(step: int, config: TrainConfig, width: int) -> float:
    """Return a rate that decays with the inverse square root of the step after the warm-up."""
    peak = max(config.warmup_steps, 1)
    return config.learning_rate * (
        _warmup_factor(step, config) if step < peak else math.sqrt(peak / step)
    )


def cosine(step: int, config: TrainConfig, width: int) -> float:
    """Return a rate with cosine decay; Loshchilov and Hutter (2017), without restarts."""
    if step < config.warmup_steps:
        return config.learning_rate * _warmup_factor(step, config)
    return (
        config.learning_rate
        * 0.5
        * (1 + math.cos(math.pi * (1 - _decay_factor(step, config, config.warmup_steps))))
    )


def linear(step: int, config: TrainConfig, width: int) -> float:
    """Return a rate with linear decay."""
    if step < config.warmup_steps:
        return config.learning_rate * _warmup_factor(step, config)
    return config.learning_rate * _decay_factor(step, config, config.warmup_steps)


def wsd(step: int, config: TrainConfig, width: int) -> float:
    """Return the warmup-stable-decay rate: linear decay over the last `train.cooldown_fraction`."""
    decay_start = max(
        config.warmup_steps, config.steps - round(config.cooldown_fraction * config.steps)
    )
    return config.learning_rate * (
        _warmup_factor(step, config)
        if step <= decay_start
        else _decay_factor(step, config, decay_start)
    )


def _warmup_factor(step: int, config: TrainConfig) -> float:
    """Return the factor of the linear warm-up, at most 1."""
    return min(1.0, step / max(config.warmup_steps, 1))


def _decay_factor(step: int, config: TrainConfig, start: int) -> float:
    """Return the factor of a linear decay from 1 at `start` to 0 one step after the last."""
    return max(0.0, (config.steps + 1 - step) / max(config.steps + 1 - start, 1))
