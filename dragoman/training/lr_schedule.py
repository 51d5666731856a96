"""Learning rates as pure functions of the update's number, so that no schedule has a state to save.

Updates are counted from 1. Every schedule rises in a straight line over `train.warmup_steps` updates and reaches
`train.learning_rate` there (`noam` in its own way); those that end do so at `train.steps`, and reach zero one update
later, because an update at a rate of zero would be wasted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dragoman.config import TrainConfig

LRSchedule = Callable[
    [int, TrainConfig, int], float
]  # (update, settings, model width) -> learning rate


def constant(step: int, config: TrainConfig, width: int) -> float:
    """Rise, then stay."""
    return config.learning_rate * _warmup_factor(step, config)


def noam(step: int, config: TrainConfig, width: int) -> float:
    """Follow Vaswani et al. (2017), equation 3: `factor * width^-0.5 * min(update^-0.5, update * warmup^-1.5)`.

    `train.learning_rate` is the factor here, 1 in the paper, and not the highest rate, which is
    `factor * (width * warmup)^-0.5`.
    """
    warmup_term = step * config.warmup_steps**-1.5 if config.warmup_steps else math.inf
    return config.learning_rate * width**-0.5 * min(step**-0.5, warmup_term)


def inverse_sqrt(step: int, config: TrainConfig, width: int) -> float:
    """Fall with the square root of the update, from the highest rate at the end of the warm-up."""
    peak = max(config.warmup_steps, 1)
    return config.learning_rate * (
        _warmup_factor(step, config) if step < peak else math.sqrt(peak / step)
    )


def cosine(step: int, config: TrainConfig, width: int) -> float:
    """Fall along half a cosine; Loshchilov and Hutter (2017), without restarts."""
    if step < config.warmup_steps:
        return config.learning_rate * _warmup_factor(step, config)
    return (
        config.learning_rate
        * 0.5
        * (1 + math.cos(math.pi * (1 - _decay_factor(step, config, config.warmup_steps))))
    )


def linear(step: int, config: TrainConfig, width: int) -> float:
    """Fall in a straight line."""
    if step < config.warmup_steps:
        return config.learning_rate * _warmup_factor(step, config)
    return config.learning_rate * _decay_factor(step, config, config.warmup_steps)


def wsd(step: int, config: TrainConfig, width: int) -> float:
    """Stay at the highest rate until the last `train.cooldown_fraction` share of the updates, then fall in a straight line."""
    decay_start = max(
        config.warmup_steps, config.steps - round(config.cooldown_fraction * config.steps)
    )
    return config.learning_rate * (
        _warmup_factor(step, config)
        if step <= decay_start
        else _decay_factor(step, config, decay_start)
    )


def _warmup_factor(step: int, config: TrainConfig) -> float:
    """Climb from nearly 0 to 1 over the warm-up."""
    return min(1.0, step / max(config.warmup_steps, 1))


def _decay_factor(step: int, config: TrainConfig, start: int) -> float:
    """Fall from 1 at `start` to 0 just past the last update; a warm-up longer than the run leaves nothing to fall."""
    return max(0.0, (config.steps + 1 - step) / max(config.steps + 1 - start, 1))
