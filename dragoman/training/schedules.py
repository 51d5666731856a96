"""Learning rates as pure functions of the update's number, so that no schedule has a state to save.

Updates are counted from 1. Every schedule rises in a straight line over `train.warmup` updates and reaches
`train.learning_rate` there (`noam` in its own way); those that end do so at `train.steps`, and reach zero one update
later, because an update at a rate of zero would be wasted.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dragoman.config import TrainConfig

Schedule = Callable[[int, TrainConfig, int], float]  # (update, settings, model width) -> learning rate


def constant(update: int, config: TrainConfig, width: int) -> float:
    """Rise, then stay."""
    return config.learning_rate * _rise(update, config)


def noam(update: int, config: TrainConfig, width: int) -> float:
    """Follow Vaswani et al. (2017), equation 3: `factor * width^-0.5 * min(update^-0.5, update * warmup^-1.5)`.

    `train.learning_rate` is the factor here, 1 in the paper, and not the highest rate, which is
    `factor * (width * warmup)^-0.5`.
    """
    climb = update * config.warmup**-1.5 if config.warmup else math.inf
    return config.learning_rate * width**-0.5 * min(update**-0.5, climb)


def inverse_sqrt(update: int, config: TrainConfig, width: int) -> float:
    """Fall with the square root of the update, from the highest rate at the end of the warm-up."""
    peak = max(config.warmup, 1)
    return config.learning_rate * (_rise(update, config) if update < peak else math.sqrt(peak / update))


def cosine(update: int, config: TrainConfig, width: int) -> float:
    """Fall along half a cosine; Loshchilov and Hutter (2017), without restarts."""
    if update < config.warmup:
        return config.learning_rate * _rise(update, config)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * (1 - _left(update, config, config.warmup))))


def linear(update: int, config: TrainConfig, width: int) -> float:
    """Fall in a straight line."""
    if update < config.warmup:
        return config.learning_rate * _rise(update, config)
    return config.learning_rate * _left(update, config, config.warmup)


def wsd(update: int, config: TrainConfig, width: int) -> float:
    """Stay at the highest rate until the last `train.cooldown` share of the updates, then fall in a straight line."""
    turn = max(config.warmup, config.steps - round(config.cooldown * config.steps))
    return config.learning_rate * (_rise(update, config) if update <= turn else _left(update, config, turn))


def _rise(update: int, config: TrainConfig) -> float:
    """Climb from nearly 0 to 1 over the warm-up."""
    return min(1.0, update / max(config.warmup, 1))


def _left(update: int, config: TrainConfig, start: int) -> float:
    """Fall from 1 at `start` to 0 just past the last update; a warm-up longer than the run leaves nothing to fall."""
    return max(0.0, (config.steps + 1 - update) / max(config.steps + 1 - start, 1))
