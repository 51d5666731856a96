"""A few real updates before a run begins, to tell how long it will take."""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dragoman.data.batches import Cursor
from dragoman.training.feed import Feed
from dragoman.training.holding import weights_of
from dragoman.training.replaying import SIGHTINGS
from dragoman.training.update import Requests, UpdateStep

REPEATED = 4  # updates


class Pace(NamedTuple):
    """How fast training goes."""

    seconds: float  # an update
    tokens: float  # a second, both sides


def rehearse(step: UpdateStep, feed: Feed, *, shares: nn.Module, optimiser: Optimizer, seconds: float, most: int) -> Pace:
    """Measure the pace by up to `most` real updates for about so long, and put everything back as it was before the first one.

    The first half only warms up: a GPU meets each shape for the first time, and that takes as long as many updates. Where
    shapes are recorded when they come again, a few updates are gone through over and over.
    """
    kept = {name: tensor.clone() for name, tensor in weights_of(shares).items()}
    warmed = done = tokens = 0
    least = (SIGHTINGS + 1) * REPEATED if step.replays else 1
    began = start = time.monotonic()
    with closing(feed.updates(1, Cursor(0, 0))) as coming:
        updates = itertools.cycle(list(itertools.islice(coming, REPEATED))) if step.replays else coming
        while warmed < least or (2 * warmed < most and time.monotonic() - began < seconds / 2):
            step(next(updates), learning_rate=0.0, requests=Requests()).read()
            warmed, start = warmed + 1, time.monotonic()
        while done < max(1, least // 2) or (warmed + done < most and time.monotonic() - began < seconds):
            tokens += step(next(updates), learning_rate=0.0, requests=Requests()).read().tokens
            done += 1
    took = time.monotonic() - start
    with torch.no_grad():
        for name, tensor in weights_of(shares).items():
            tensor.copy_(kept[name])
    optimiser.state.clear()
    step.forget()  # the run has an update step of its own, and the memory should be free for it
    return Pace(took / done, tokens / took)
