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
from dragoman.training.cuda_graphs import CAPTURE_AT_OCCURRENCE
from dragoman.training.data_loader import DataLoader
from dragoman.training.distributed.data_parallel import named_weights
from dragoman.training.train_step import StepRequests, TrainStep

REPEATED_STEPS = 4  # updates


class Throughput(NamedTuple):
    """How fast training goes."""

    seconds: float  # an update
    tokens: float  # a second, both sides


def measure_throughput(
    step: TrainStep,
    data_loader: DataLoader,
    *,
    local_module: nn.Module,
    optimizer: Optimizer,
    seconds: float,
    most: int,
) -> Throughput:
    """Measure the pace by up to `most` real updates for about so long, and put everything back as it was before the first one.

    The first half only warms up: a GPU meets each shape for the first time, and that takes as long as many updates. Where
    shapes are recorded when they come again, a few updates are gone through over and over.
    """
    kept = {name: tensor.clone() for name, tensor in named_weights(local_module).items()}
    warmed = done = tokens = 0
    least = (CAPTURE_AT_OCCURRENCE + 1) * REPEATED_STEPS if step.uses_cuda_graphs else 1
    began = start = time.monotonic()
    with closing(data_loader.batches(1, Cursor(0, 0))) as coming:
        batches = (
            itertools.cycle(list(itertools.islice(coming, REPEATED_STEPS)))
            if step.uses_cuda_graphs
            else coming
        )
        while warmed < least or (2 * warmed < most and time.monotonic() - began < seconds / 2):
            step(next(batches), learning_rate=0.0, requests=StepRequests()).read()
            warmed, start = warmed + 1, time.monotonic()
        while done < max(1, least // 2) or (
            warmed + done < most and time.monotonic() - began < seconds
        ):
            tokens += step(next(batches), learning_rate=0.0, requests=StepRequests()).read().tokens
            done += 1
    took = time.monotonic() - start
    with torch.no_grad():
        for name, tensor in named_weights(local_module).items():
            tensor.copy_(kept[name])
    optimizer.state.clear()
    step.release_graphs()  # the run has an update step of its own, and the memory should be free for it
    return Throughput(took / done, tokens / took)
