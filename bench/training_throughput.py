"""Training throughput of our trainer and of plain models: timed rounds, rows and ratios.

Ours is the trainer of `dragoman train`, data loading included. A plain model trains in a loop of
`plain_step` over batches. A row of a system holds its throughput in the rounds after a warm-up.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bench.timing_helpers import free_memory, reset_peak, synchronize, timing_row
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.data.batch_plan import BatchPlan, Cursor, Plan
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.tasks.non_translation_task import TrainingTask
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.trainer import Trainer

Row = dict[str, Any]
Systems = dict[str, Callable[[], Row]]  # what measures each system, by label
Item = TypeVar("Item")
Batch = TypeVar("Batch", bound=TensorBatch)

ROUNDS = 2  # timed rounds of `time_trainer` and `time_plain`
RECOMPILE_LIMIT = 256  # of torch.compile; lengths differ from batch to batch


def throughput_parser(
    description: str | None, members: Iterable[str], *, steps: int
) -> argparse.ArgumentParser:
    """Return a parser of the arguments that the benchmarks of several models share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    names = list(members)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--size", choices=["recipe", "tiny"], default="recipe")
    parser.add_argument("--steps", type=int, default=steps, help="training steps of each round")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", metavar="DEVICE"
    )
    parser.add_argument("--no-compile", action="store_true", help="do not compile the plain models")
    return parser


def start_clock(device: torch.device) -> float:
    """Return the time, after setting the seed and the counter of peak memory."""
    reset_peak(device)
    torch.manual_seed(1)
    return time.perf_counter()


class RoundTimes(NamedTuple):
    """How long each round took, and the warm-up before them, building the model included."""

    seconds: list[float]
    warmup_seconds: float


# Our trainer


class StepTimes(NamedTuple):
    """When training began, and when each step had been logged."""

    began: float
    ends: dict[int, float]  # by step
    tokens: dict[int, int]  # real tokens of each step

    def rounds(self, *, warmup: int, steps: int, rounds: int) -> RoundTimes:
        """Return the times of rounds of so many steps after the warm-up."""
        ends = [self.ends[warmup + number * steps] for number in range(rounds + 1)]
        seconds = [end - start for start, end in itertools.pairwise(ends)]
        return RoundTimes(seconds, ends[0] - self.began)

    def round_tokens(self, *, warmup: int, steps: int, rounds: int) -> list[int]:
        """Return the real tokens of each round."""
        starts = range(warmup, warmup + rounds * steps, steps)
        return [
            sum(self.tokens[step] for step in range(start + 1, start + steps + 1))
            for start in starts
        ]


def train(
    task: TrainingTask,
    store: InMemoryExamples,
    plan: Plan,
    settings: Mapping[str, Any],
    device: torch.device,
) -> StepTimes:
    """Train with our trainer and `settings` of train, reading the clock at every step's record.

    There is no EMA, because the plain models have none.
    """
    began = start_clock(device)
    config = task.config.replace(
        train={
            "epochs": 0.0,
            "checkpoint_every": 10**6,
            "validate_every": 10**6,
            "ema_decay": 0.0,
            **settings,
        }
    )
    ends: dict[int, float] = {}
    tokens: dict[int, int] = {}

    def on_record(record: Mapping[str, Any]) -> None:
        if "tokens" in record:
            ends[int(record["step"])] = time.perf_counter()
            tokens[int(record["step"])] = int(record["tokens"])

    with (
        tempfile.TemporaryDirectory() as folder,
        RunDirectory(Path(folder), keep_checkpoints=1) as run,
    ):
        Trainer(
            model=task.build_model().to(device),
            task=task,
            plan=plan,
            collate=lambda examples, *, seed: training_batch(
                task, store, plan, examples, seed=seed
            ),
            config=config.train,
            run=run,
            width=config.model.width,
            on_record=on_record,
        ).fit(resume=False)
    return StepTimes(began, ends, tokens)


def time_trainer(
    task: TrainingTask,
    store: InMemoryExamples,
    plan: Plan,
    settings: Mapping[str, Any],
    device: torch.device,
    *,
    warmup: int,
    steps: int,
) -> Row:
    """Return the row of our trainer."""
    settings = {"steps": warmup + ROUNDS * steps + 1, **settings}
    times = train(task, store, plan, settings, device)
    seconds, warmup_seconds = times.rounds(warmup=warmup, steps=steps, rounds=ROUNDS)
    tokens = times.round_tokens(warmup=warmup, steps=steps, rounds=ROUNDS)
    return timing_row("ours", tokens, seconds, warmup_seconds, device) | {"ours": True}


def time_trainer_rounds(
    task: TrainingTask,
    store: InMemoryExamples,
    plan: Plan,
    settings: Mapping[str, Any],
    device: torch.device,
    *,
    steps: int,
    warmup_rounds: int,
    rounds: int,
) -> RoundTimes:
    """Train with our trainer for rounds of so many steps."""
    settings = {"steps": (warmup_rounds + rounds) * steps, **settings}
    times = train(task, store, plan, settings, device)
    return times.rounds(warmup=warmup_rounds * steps, steps=steps, rounds=rounds)


# Plain models


def plain_step(
    loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer, *, max_grad_norm: float
) -> None:
    """Take one optimizer step; a norm of 0 does not clip."""
    loss.backward()  # type: ignore[no-untyped-call]
    if max_grad_norm:
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def allow_recompiles() -> None:
    """Let torch.compile compile a function for many shapes before it falls back to eager mode."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT


class PlainTraining(NamedTuple, Generic[Batch]):
    """How a plain model is built and trained."""

    build: Callable[[], nn.Module]
    inputs: Callable[[Batch, torch.device], tuple[Tensor, ...]]  # of a batch, on a device
    loss: Callable[..., Tensor]  # mean loss of the model and the inputs; compiled


def time_plain_model(
    plain: PlainTraining[Batch],
    batches: list[Batch],
    device: torch.device,
    *,
    precision: str,
    compiled: bool,
) -> Row:
    """Return the row of a plain model with fused AdamW."""
    began = start_clock(device)
    chosen = choose_precision(precision, device)
    model = plain.build().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss(*inputs: Tensor) -> Tensor:
        return plain.loss(model, *inputs)

    compute: Any = torch.compile(loss, dynamic=True) if compiled else loss

    def step(batch: Batch) -> None:
        inputs = plain.inputs(batch, device)
        with chosen.autocast(device):
            mean = compute(*inputs)
        plain_step(mean, model, optimizer, max_grad_norm=5.0)

    return time_plain(step, batches, device, began=began)


def time_rounds(
    step: Callable[[Item], None], rounds: Iterable[Iterable[Item]], device: torch.device
) -> list[float]:
    """Return the seconds of each round, which takes a step on each of its batches."""
    seconds = []
    for batches in rounds:
        started = time.perf_counter()
        for batch in batches:
            step(batch)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def time_plain_rounds(
    step: Callable[[NDArray[np.int64]], None],
    plan: Plan,
    device: torch.device,
    *,
    began: float,
    steps: int,
    warmup_rounds: int,
    rounds: int,
) -> RoundTimes:
    """Take plain steps on the examples of a plan's batches, for rounds of so many steps."""
    examples = epochs_of(plan)
    batches = (itertools.islice(examples, steps) for _ in itertools.count())
    time_rounds(step, itertools.islice(batches, warmup_rounds), device)
    warmup_seconds = time.perf_counter() - began
    return RoundTimes(time_rounds(step, itertools.islice(batches, rounds), device), warmup_seconds)


def time_plain(
    step: Callable[[Batch], None], batches: list[Batch], device: torch.device, *, began: float
) -> Row:
    """Return the row of a plain model that was begun at a time; one round is the warm-up."""
    time_rounds(step, [batches], device)
    warmup_seconds = time.perf_counter() - began
    seconds = time_rounds(step, [batches] * ROUNDS, device)
    tokens = [sum(batch.tokens for batch in batches)] * ROUNDS
    return timing_row("plain", tokens, seconds, warmup_seconds, device)


# Batches


def training_batch(
    task: TrainingTask,
    store: InMemoryExamples,
    plan: Plan,
    examples: NDArray[np.int64],
    *,
    seed: int = 0,
) -> Any:
    """Return a training batch of a plan, padded to one of its shapes where it has some."""
    shapes = getattr(plan, "shapes", ())
    return task.collate(store, examples, shapes=shapes, seed=seed, training=True)


def epochs_of(plan: Plan) -> Iterator[NDArray[np.int64]]:
    """Yield the examples of one batch after another, epoch by epoch, without end."""
    for epoch in itertools.count():
        for number in range(plan.batches(epoch)):
            yield plan.batch(Cursor(epoch, number))


def planned_batches(task: TrainingTask, store: InMemoryExamples, steps: int) -> list[Any]:
    """Return batches of similar lengths, as our trainer has them."""
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=2)
    assert isinstance(plan, BatchPlan), "a plan has batches of similar lengths"
    return [
        task.collate(store, examples, shapes=plan.shapes)
        for examples in itertools.islice(epochs_of(plan), steps)
    ]


def shuffled_batches(task: TrainingTask, store: InMemoryExamples, steps: int) -> list[Any]:
    """Return batches of random examples, as many in each as ours have on average."""
    plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=2)
    rows = max(1, len(store) // plan.batches(0))
    generator = np.random.default_rng(2)
    return [
        task.collate(store, generator.choice(len(store), rows, replace=False)) for _ in range(steps)
    ]


def pin_batches(batches: list[Batch], device: torch.device) -> list[Batch]:
    """Return the batches, in pinned memory if the device is a GPU."""
    return [batch.pin_memory() for batch in batches] if device.type == "cuda" else batches


# Systems

MODES = {"eager": "off", "cuda_graphs": "auto"}  # values of train.cuda_graphs
PLAIN_BATCHES = {"plain, shuffled": shuffled_batches, "plain, our batches": planned_batches}


def list_systems(
    task: TrainingTask,
    store: InMemoryExamples,
    plain: PlainTraining[Any],
    options: argparse.Namespace,
    device: torch.device,
) -> Systems:
    """Return our trainer in its modes, and the plain model on shuffled and on our batches."""

    def measure_ours(mode: str) -> Row:
        plan = task.plan(store, batch_tokens=task.config.train.batch_tokens, seed=1)
        warmup = 2 * plan.batches(0)  # every shape is captured at its second occurrence
        settings = {"cuda_graphs": MODES[mode]}
        return time_trainer(task, store, plan, settings, device, warmup=warmup, steps=options.steps)

    def measure_plain(system: str) -> Row:
        batches = pin_batches(PLAIN_BATCHES[system](task, store, options.steps), device)
        precision, compiled = task.config.train.precision, not options.no_compile
        return time_plain_model(plain, batches, device, precision=precision, compiled=compiled)

    modes = [mode for mode in MODES if device.type == "cuda" or mode == "eager"]
    systems: Systems = {f"ours, {mode}": functools.partial(measure_ours, mode) for mode in modes}
    systems |= {system: functools.partial(measure_plain, system) for system in PLAIN_BATCHES}
    return systems


# Rows


def time_systems(member: str, systems: Systems, device: torch.device, *, unit: str) -> list[Row]:
    """Return the rows of a model's systems, printing each and the ratios; errors are rows too."""
    rows = []
    for system, measure in systems.items():
        row: Row
        try:
            row = measure()
        except Exception as error:  # such as torch.compile without a compiler
            row = {"error": " ".join(str(error).split())[:200]}
        row["system"] = f"{member}: {system}"
        rows.append(row)
        show(row, unit=unit)
        free_memory(device)
    show_ratios(rows)
    return rows


def show(row: Mapping[str, Any], *, unit: str) -> None:
    """Print a row."""
    if "error" in row:
        print(f"  {row['system']:34s} failed: {row['error']}", flush=True)
        return
    memory = "" if row["MiB"] is None else f"  {row['MiB']:8,.0f} MiB"
    print(
        f"  {row['system']:34s} {row['tokens_s']:12,.0f} {unit}/s (slowest round "
        f"{row['slowest']:,.0f})  warm-up {row['warm_up_s']:6.1f} s{memory}",
        flush=True,
    )


def show_ratios(rows: Iterable[Row]) -> None:
    """Print the ratios of our fastest mode to the plain models."""
    good = [row for row in rows if "error" not in row]
    ours = [row for row in good if "ours" in row]
    if ours:
        best = max(ours, key=lambda row: row["tokens_s"])
        for row in good:
            if "ours" not in row:
                ratio = best["tokens_s"] / row["tokens_s"]
                print(f"  {best['system']} against {row['system']}: {ratio:.2f} times")


def median_row(system: str, rates: list[float], warmup_seconds: float, *, unit: str) -> Row:
    """Return a row with the median throughput of the rounds and its range."""
    return {
        "system": system,
        f"{unit}_s": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "warm_up_s": warmup_seconds,
    }


def show_median(row: Mapping[str, Any], *, unit: str, width: int, digits: int) -> None:
    """Print a row of `median_row`."""
    print(
        f"{row['system']:16} {row[f'{unit}_s']:{width},.{digits}f} {unit}/s  "
        f"({row['slowest']:,.{digits}f} to {row['fastest']:,.{digits}f}), "
        f"warm-up {row['warm_up_s']:.1f} s",
        flush=True,
    )
