"""Throughput measurement: a few training steps before a run begins."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dragoman.data.batch_plan import Cursor
from dragoman.training.cuda_graphs import CAPTURE_AT_OCCURRENCE
from dragoman.training.data_loader import DataLoader
from dragoman.training.distributed.data_parallel import named_weights
from dragoman.training.train_step import StepRequests, TrainStep

REPEATED_STEPS = 4  # steps that are repeated until their CUDA graphs are captured


class Throughput(NamedTuple):
    """Speed of training."""

    seconds_per_step: float
    tokens_per_second: float  # source and target


def time_steps(
    step: Callable[[], int], *, seconds: float, max_steps: float = math.inf, min_steps: int = 1
) -> Throughput:
    """Time calls of `step`, which returns its tokens, for about so many seconds.

    The first half is warm-up: the first step of each batch shape takes as long as many others on a
    GPU.
    """
    warmup = done = tokens = 0
    began = start = time.monotonic()
    while warmup < min_steps or (2 * warmup < max_steps and time.monotonic() - began < seconds / 2):
        step()
        warmup, start = warmup + 1, time.monotonic()
    while done < max(1, min_steps // 2) or (
        warmup + done < max_steps and time.monotonic() - began < seconds
    ):
        tokens += step()
        done += 1
    elapsed = time.monotonic() - start
    return Throughput(elapsed / done, tokens / elapsed)


def measure_throughput(
    train_step: TrainStep,
    data_loader: DataLoader,
    *,
    local_module: nn.Module,
    optimizer: Optimizer,
    seconds: float,
    max_steps: int,
) -> Throughput:
    """Time real steps for about so many seconds, and restore weights and optimizer.

    With CUDA graphs, a few batches are repeated, since a shape is captured when it occurs again.
    """
    weights = {name: tensor.clone() for name, tensor in named_weights(local_module).items()}
    graphs, requests = train_step.uses_cuda_graphs, StepRequests()
    min_steps = (CAPTURE_AT_OCCURRENCE + 1) * REPEATED_STEPS if graphs else 1
    with closing(data_loader.batches(1, Cursor(0, 0))) as loaded:
        batches = (
            itertools.cycle(list(itertools.islice(loaded, REPEATED_STEPS))) if graphs else loaded
        )
        throughput = time_steps(
            lambda: train_step(next(batches), lr=0.0, requests=requests).read().tokens,
            seconds=seconds,
            max_steps=max_steps,
            min_steps=min_steps,
        )
    with torch.no_grad():
        for name, tensor in named_weights(local_module).items():
            tensor.copy_(weights[name])
    optimizer.state.clear()
    train_step.release_graphs()  # their batches may not occur soon in the run
    return throughput
