"""The training loop: optimizer steps with validation, checkpoints, early stopping and time budgets between them."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import TrainConfig
from dragoman.data.batches import BatchPlan
from dragoman.errors import StoppedError
from dragoman.registry import catalogue
from dragoman.runtime import signals
from dragoman.runtime.seeds import derive_seed, isolated_rng
from dragoman.runtime.standard_streams import pop_lost_streams
from dragoman.storage import fault_injection
from dragoman.training.checkpointer import Checkpointer
from dragoman.training.data_loader import CollateFunction, DataLoader, GlobalBatch
from dragoman.training.distributed.data_parallel import ParallelStrategy
from dragoman.training.distributed.fsdp import build_parallel_strategy, choose_fsdp
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.ema import EMA
from dragoman.training.lr_schedule import LRSchedule
from dragoman.training.mixed_precision import choose_precision, should_use_bf16_weights
from dragoman.training.progress import Progress, QuietProgress, TrainingDisplay
from dragoman.training.task import Task
from dragoman.training.tensorboard import TensorBoardWriter
from dragoman.training.throughput import Throughput, measure_throughput
from dragoman.training.torch_compile import (
    choose_torch_compile,
    configure_backends,
    eager_mode,
    should_use_cuda_graphs,
)
from dragoman.training.train_state import TrainState, TrainStateTracker
from dragoman.training.train_step import PendingMetrics, StepRequests, TrainStep

ValidateFunction = Callable[[nn.Module], Mapping[str, float]]


def run_validation(
    model: nn.Module, validate: ValidateFunction, *, seed: int
) -> dict[str, float] | None:
    """Validate in evaluation mode; None when a request to stop cut it short."""
    model.eval()
    try:
        fault_injection.point("valid.mid")
        with isolated_rng(seed), torch.no_grad(), eager_mode():
            return {name: float(value) for name, value in validate(model).items()}
    except StoppedError:
        return None
    finally:
        model.train()


DONE, STOP, DEADLINE, PATIENCE, TARGET = "done", "stop", "deadline", "patience", "target"

ReplanSteps = Callable[
    [int, float], int
]  # (updates done, seconds an update) -> updates planned in all
RecordCallback = Callable[[Mapping[str, Any]], None]


class StepHooks:
    """Decides what is due after an update, and does it."""

    def __init__(
        self,
        *,
        model: nn.Module,
        parallel: ParallelStrategy,
        ema: EMA | None,
        config: TrainConfig,
        tracker: TrainStateTracker,
        checkpointer: Checkpointer,
        run: RunDirectory,
        world: ProcessGroup,
        validate: ValidateFunction | None,
        deadline: Callable[[], float] | None,
        replan: ReplanSteps | None,
        callbacks: list[RecordCallback],
    ) -> None:
        self._model, self._parallel, self._ema, self._config, self._tracker, self._checkpointer = (
            model,
            parallel,
            ema,
            config,
            tracker,
            checkpointer,
        )
        self._run, self._world, self._validate, self._deadline = run, world, validate, deadline
        self._replan, self.callbacks = replan, callbacks
        self.requests = StepRequests()  # what all processes have agreed on
        self.checkpointed_step = 0  # the newest update that a checkpoint has
        self.seconds_per_step = 0.0  # seconds an update, lately
        self._validation_seconds = self._checkpoint_seconds = 0.0

    @property
    def _train_state(self) -> TrainState:
        return self._tracker.train_state

    def collect_requests(self) -> StepRequests:
        """Collect what is wanted of this process; only rank 0 minds the clock."""
        out_of_time = False
        if self._deadline is not None and self._world.is_rank_zero:
            out_of_time = (
                self._deadline()
                < 1.5 * self.seconds_per_step + self._validation_seconds + self._checkpoint_seconds
            )
        return StepRequests(signals.stop_requested(), signals.checkpoint_requested(), out_of_time)

    def run_due(self, view: TrainingDisplay, flush_metrics: Callable[[], None]) -> str | None:
        """Do what is due, after `settle` has read all figures; says why training ends here, or None to go on."""
        train_state, config = self._train_state, self._config
        if self._is_stop_requested():
            return STOP
        last = train_state.step >= train_state.steps
        if self._is_validation_due(last=last):
            flush_metrics()
            self.validate(view)
            if self._is_stop_requested():
                return STOP
        if last:
            return DONE
        if train_state.has_reached(config.target_exact):
            return TARGET
        if config.patience and train_state.validations_since_best >= config.patience:
            return PATIENCE
        if self.requests.out_of_time:
            return DEADLINE
        due = (
            train_state.step > self.checkpointed_step
            and train_state.step % config.checkpoint_every == 0
        )
        if due or self.requests.save_checkpoint:
            flush_metrics()
            self.save_checkpoint(view)
        return None

    def end(self, why: str, view: TrainingDisplay) -> None:
        """Bring the run to a resting point; a second request to stop leaves the newest checkpoint as it is."""
        if why == DEADLINE and self._is_validation_due(last=True):
            self.validate(view)
        if not signals.is_stop_urgent():
            self.save_checkpoint(view, tolerate_disk_errors=False)

    def validate(self, view: TrainingDisplay) -> None:
        """Validate, judge and keep the best; a validation that was interrupted is left undone, and done at the resume."""
        assert self._validate is not None, "validation is only due where there is one"
        train_state, validate = self._train_state, self._validate
        began = time.monotonic()
        seed = derive_seed(self._config.seed, train_state.step, 0, "validation")
        with (
            self._ema.averaged_weights() if self._ema is not None else nullcontext(),
            self._parallel.gathered_model(),
        ):
            metrics = self._world.run_on_rank_zero(
                lambda: run_validation(self._model, validate, seed=seed),
                f"validate update {train_state.step}",
            )
        if metrics is None:
            self.requests = self.requests._replace(stop=True)
            return
        better = train_state.record_validation(train_state.step, metrics, self._config.best_metric)
        if train_state.has_reached(self._config.target_exact):
            # Training ends here, so the finished model takes these weights, whatever an earlier loss was.
            train_state.best, train_state.validations_since_best, better = (
                {**train_state.metrics, "step": train_state.step},
                0,
                True,
            )
        self.log_record({"event": "validation", "step": train_state.step, **metrics})
        view.validated(metrics, train_state.best)
        self._validation_seconds = time.monotonic() - began
        train_state.seconds += self._validation_seconds
        if better:
            self.save_checkpoint(view)
            if self.checkpointed_step == train_state.step:
                self._checkpointer.keep_best(train_state.step)

    def save_checkpoint(self, view: TrainingDisplay, *, tolerate_disk_errors: bool = True) -> None:
        """Publish the present state, unless it is published already."""
        train_state = self._train_state
        signals.clear_checkpoint_request()
        self.requests = self.requests._replace(save_checkpoint=False)
        if self.checkpointed_step == train_state.step or not train_state.step:
            return
        began = time.monotonic()
        if self._replan is not None:
            replan = self._replan
            steps = self._world.run_on_rank_zero(
                lambda: replan(train_state.step, self.seconds_per_step), "plan"
            )
            train_state.steps = max(int(steps), train_state.step)
            view.set_max_steps(train_state.steps)
        state, divergence = self._tracker.state_dict(), self._tracker.divergence
        if self._checkpointer.save_checkpoint(
            train_state.step,
            state,
            metrics=train_state.metrics,
            tolerate_disk_errors=tolerate_disk_errors,
            suspect=divergence.suspect,
        ):
            self.checkpointed_step = train_state.step
            divergence.suspect = False
        self._checkpoint_seconds = time.monotonic() - began
        train_state.seconds += self._checkpoint_seconds

    def log_record(self, record: Mapping[str, Any]) -> None:
        """Log a record, and show it to whoever observes."""
        if self._world.is_rank_zero:
            self._run.log(record)
        for on_record in self.callbacks:
            on_record(record)

    def _is_stop_requested(self) -> bool:
        """Look at the requests of this process when it is alone; among several, only what all have agreed on counts."""
        if self._world.size == 1:
            self.requests = self.collect_requests()
        return self.requests.stop

    def _needs_validation(self) -> bool:
        return self._validate is not None and self._train_state.validated < self._train_state.step

    def _is_validation_due(self, *, last: bool) -> bool:
        """Whether to validate now: at a fixed interval and at the end, but not twice within a quarter of an interval."""
        train_state, interval = self._train_state, self._config.validate_every
        if not self._needs_validation():
            return False
        if last:  # only a time budget moves the end so near to a validation
            return (
                self._replan is None
                or not train_state.validated
                or 4 * (train_state.step - train_state.validated) >= interval
            )
        return (
            train_state.step % interval == 0
            and 4 * (train_state.steps - train_state.step) >= interval
        )


__all__ = ["ReplanSteps", "Throughput", "TrainResult", "Trainer", "ValidateFunction"]

logger = logging.getLogger(__name__)

DISTRIBUTED_PROBE_STEPS = 8  # updates that several ranks rehearse
SIGNAL_CHECK_INTERVAL = (
    100  # updates between looks at whether a library replaced our signal handlers
)


class TrainResult(NamedTuple):
    """How a run ended."""

    step: int  # the last update
    metrics: dict[str, float]  # of the newest validation
    best: dict[str, float]  # of the best one, with its "update"
    stopped: (
        str | None
    )  # why it ended before its last update: a signal's name, "deadline", "patience" or "target"


class _PendingStep(NamedTuple):
    update: GlobalBatch
    learning_rate: float
    pending: PendingMetrics


class _DivergenceDetected(Exception):  # noqa: N818 - never leaves this module
    """The rule of divergence.py has struck."""


class Trainer:
    """Trains a model: a pure function of (configuration, data, seed), however often it is stopped and resumed.

    `deadline` gives the seconds that are left; training ends in time for a last validation and checkpoint. `replan` is
    asked at every checkpoint how many updates there will be, so that a schedule ends with its budget; the answer is part of
    the checkpoint, which keeps the learning rate a pure function of the update. `observe` sees every record of the log.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        task: Task,
        plan: BatchPlan,
        collate: CollateFunction,
        config: TrainConfig,
        run: RunDirectory,
        width: int,
        validate: ValidateFunction | None = None,
        progress: Progress | None = None,
        distributed: ProcessGroup | None = None,
        deadline: Callable[[], float] | None = None,
        replan: ReplanSteps | None = None,
        on_record: RecordCallback | None = None,
    ) -> None:
        self.model, self.config, self.plan = model, config, plan
        self._width, self._run = width, run
        self._world = distributed or ProcessGroup()
        self._progress = progress or QuietProgress()
        self._device = next(model.parameters()).device
        self.fsdp = choose_fsdp(config, model, ranks=self._world.size, device=self._device)
        self.precision = choose_precision(config.precision, self._device)
        self.bf16_weights = (
            should_use_bf16_weights(config, model, self.precision, self._device)
            and not self.fsdp.enabled
        )
        self._parallel = build_parallel_strategy(
            model, self._world, self._device, self.fsdp, bf16_weights=self.bf16_weights
        )
        local_module = self._parallel.local_module
        self._schedule: LRSchedule = catalogue("schedule").load(config.schedule)
        self.optimizer: Optimizer = catalogue("optimizer").load(config.optimizer)(
            local_module, config
        )
        self.ema = EMA(local_module, config.ema_decay) if config.ema_decay else None
        cuda_graphs = should_use_cuda_graphs(config, self._device, sharded=self.fsdp.enabled)
        configure_backends(
            self._device, deterministic=config.deterministic, cuda_graphs=cuda_graphs
        )
        self.compile_decision = choose_torch_compile(
            config, self._device, sharded=self.fsdp.enabled
        )
        self._tracker = TrainStateTracker(config, self.precision, replanned=replan is not None)
        self._checkpointer = Checkpointer(
            run,
            model=model,
            parallel=self._parallel,
            optimizer=self.optimizer,
            ema=self.ema,
            world=self._world,
        )
        self._hooks = StepHooks(
            model=model,
            parallel=self._parallel,
            ema=self.ema,
            config=config,
            tracker=self._tracker,
            checkpointer=self._checkpointer,
            run=run,
            world=self._world,
            validate=validate,
            deadline=deadline,
            replan=replan,
            callbacks=[on_record] if on_record is not None else [],
        )
        on_gpu = self._device.type == "cuda"
        self._data_loader = DataLoader(
            plan=plan,
            collate=collate,
            gradient_accumulation=config.gradient_accumulation,
            seed=config.seed,
            rank=self._world.rank,
            ranks=self._world.size,
            lockstep=self._parallel.lockstep,
            prefetch=2
            if on_gpu
            else 0,  # on a CPU a thread would only take turns with the products
            pin_memory=on_gpu,
        )
        self._train_step = TrainStep(
            parallel=self._parallel,
            task=task.with_torch_compile() if self.compile_decision.enabled else task,
            optimizer=self.optimizer,
            device=self._device,
            precision=self.precision,
            oom_splitter=self._tracker.oom_splitter,
            seed=config.seed,
            max_grad_norm=config.max_grad_norm,
            cuda_graphs=cuda_graphs,
        )
        self._metrics_delay = 1 if on_gpu else 0  # updates whose figures may still be on their way
        self._pending_steps: deque[_PendingStep] = deque()
        self._clock = time.monotonic()

    def fit(self, resume: bool) -> TrainResult:
        """Train to the end, or until something asks to stop; with `resume` go on from the newest checkpoint, if any."""
        self._world.on_rank_lost = lambda reason: self._write_status(
            state="failed", exit_code=StoppedError.exit_code, reason=reason
        )
        try:
            self._start_or_resume(resume)
            logger.info(
                "products in %s%s: %s",
                self.precision.name,
                " with rounded weights" if self.bf16_weights else "",
                self.precision.reason,
            )
            logger.info(
                "compiled: %s, %s",
                "yes" if self.compile_decision.enabled else "no",
                self.compile_decision.reason,
            )
            if self._world.size > 1:
                logger.info(
                    "weights shared out over the ranks: %s, %s",
                    "yes" if self.fsdp.enabled else "no",
                    self.fsdp.reason,
                )
            with self._tensorboard():
                while True:
                    try:
                        return self._run_steps()
                    except _DivergenceDetected:
                        self._roll_back()
        except BaseException as error:
            # A launcher may lose the exit code; status.json keeps it.
            self._write_status(
                state="failed",
                exit_code=getattr(error, "exit_code", 1),
                reason=f"{type(error).__name__}: {error}",
            )
            raise

    def measure_throughput(self, seconds: float = 10.0) -> Throughput:
        """Measure the pace by real updates for about so long, and put everything back as it was; only before `run`."""
        most = max(4, self.config.steps // 20)
        if (
            self._world.size > 1
        ):  # ranks must make equally many updates, and their clocks need not agree
            seconds, most = math.inf, DISTRIBUTED_PROBE_STEPS
        self.model.train()
        return measure_throughput(
            self._train_step,
            self._data_loader,
            local_module=self._parallel.local_module,
            optimizer=self.optimizer,
            seconds=seconds,
            most=most,
        )

    @property
    def train_state(self) -> TrainState:
        """Say where the run stands."""
        return self._tracker.train_state

    # From update to update

    def _run_steps(self) -> TrainResult:
        """Go through the updates until one of the ends is reached."""
        self.model.train()
        train_state = self.train_state
        progress = self._progress if self._world.is_rank_zero else QuietProgress()
        with (
            progress.training(steps=train_state.steps, done=train_state.step) as view,
            closing(self._data_loader.batches(train_state.step + 1, train_state.cursor)) as batches,
        ):
            self._clock = time.monotonic()
            while True:
                end = self._hooks.run_due(view, lambda: self._flush_metrics(view))
                if end is not None:
                    return self._finish(end, view)
                if not self._pending_steps:
                    self._clock = time.monotonic()  # what happened between has been counted there
                self._launch_step(next(batches))
                self._flush_metrics(view, leaving=self._metrics_delay)

    def _launch_step(self, update: GlobalBatch) -> None:
        """Start an update; its figures are settled later."""
        self._world.check_launcher()
        settings = dataclasses.replace(self.config, steps=self.train_state.steps)
        rate = self._schedule(update.number, settings, self._width)
        if update.number in self._tracker.divergence.excluded_steps:
            update = update._replace(micro_batches=[])
        pending = self._train_step(
            update, learning_rate=rate, requests=self._hooks.collect_requests()
        )
        if self.ema is not None:
            self.ema.follow(update.number)
        self._pending_steps.append(_PendingStep(update, rate, pending))
        self.train_state.step = update.number
        self.train_state.cursor = update.next_cursor

    def _flush_metrics(self, view: TrainingDisplay, leaving: int = 0) -> None:
        """Read the figures of launched updates, count them in, and log them."""
        while len(self._pending_steps) > leaving:
            pending_step = self._pending_steps.popleft()
            step_metrics = pending_step.pending.read()
            now = time.monotonic()
            took, self._clock = now - self._clock, now
            self._hooks.seconds_per_step += (took - self._hooks.seconds_per_step) * (
                0.05 if self._hooks.seconds_per_step else 1.0
            )
            self.train_state.seconds += took
            self._hooks.requests = step_metrics.requests
            record = self._tracker.advance(
                pending_step.update, pending_step.learning_rate, step_metrics
            ) | {"seconds": round(took, 6)}
            self._hooks.log_record(record)
            self._write_status(now=False, state="training", step=record["step"])
            view.update(record)
            self._log_lost_streams(record["step"])
            if pending_step.update.number % SIGNAL_CHECK_INTERVAL == 0:
                signals.restore_handlers()
            if record.get("diverged"):
                raise _DivergenceDetected

    def _log_lost_streams(self, update: int) -> None:
        """Record in log.jsonl and status.json that progress is no longer shown: training does not end for that."""
        for stream, reason in pop_lost_streams().items() if self._world.is_rank_zero else ():
            self._run.log(
                {"event": "stream lost", "step": update, "stream": stream, "reason": reason}
            )
            self._write_status(progress=f"not shown since update {update}: {stream}: {reason}")

    def _finish(self, end: str, view: TrainingDisplay) -> TrainResult:
        """Bring the run to a resting point and say how it stands."""
        self._flush_metrics(view)
        self._hooks.end(end, view)
        train_state = self.train_state
        stopped = {STOP: signals.stop_reason() or "another rank was asked to stop", DONE: None}.get(
            end, end
        )
        code = StoppedError.exit_code if end == STOP else 0
        self._write_status(
            state="stopped" if end == STOP else "finished",
            step=train_state.step,
            exit_code=code,
            reason=stopped or "",
        )
        return TrainResult(
            train_state.step, dict(train_state.metrics), dict(train_state.best), stopped
        )

    def _start_or_resume(self, resume: bool) -> None:
        """Start anew, or go on from the newest checkpoint."""
        if resume:
            self._tracker.load_state_dict(self._checkpointer.restore())
            self._hooks.checkpointed_step = self.train_state.step
        else:
            self._checkpointer.start_new_run()

    @contextmanager
    def _tensorboard(self) -> Iterator[None]:
        """Write for TensorBoard too, where that was asked for."""
        if not (self.config.tensorboard and self._world.is_rank_zero):
            yield
            return
        board = TensorBoardWriter(self._run.path / "board", done=self.train_state.step)
        self._hooks.callbacks.append(board)
        try:
            yield
        finally:
            self._hooks.callbacks.remove(board)
            board.close()

    def _roll_back(self) -> None:
        """Return to the newest checkpoint and pass over the updates that were not finite; once a run."""
        self._tracker.require_first_rollback()
        self._pending_steps.clear()
        self._tracker.roll_back(self._checkpointer.roll_back())
        self._hooks.checkpointed_step = self.train_state.step

    def _write_status(self, **fields: Any) -> None:
        if self._world.is_rank_zero:
            self._run.status(**fields)
