"""The training loop: steps, validation, checkpoints, resume, early stopping and rollback.

A run with a time budget ends when `deadline` leaves less than one and a half steps plus the last
validation and checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import TrainConfig
from dragoman.data.batch_plan import Plan
from dragoman.errors import StoppedError
from dragoman.registry import catalogue
from dragoman.runtime import fault_tolerant_stdio, signals
from dragoman.runtime.random_generators import isolated_rng
from dragoman.storage import fault_injection
from dragoman.training.bf16_mixed_precision import choose_precision, should_use_bf16_weights
from dragoman.training.data_loader import CollateFunction, DataLoader, GlobalBatch, derive_seed
from dragoman.training.distributed.fsdp import build_parallel_strategy, choose_fsdp
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.ema import EMA
from dragoman.training.lr_schedule import LRSchedule
from dragoman.training.model_and_optimizer_checkpoint import Checkpointer
from dragoman.training.progress_display import Progress, QuietProgress, TrainingDisplay
from dragoman.training.task_protocol import Task
from dragoman.training.tensorboard import TensorBoardWriter
from dragoman.training.throughput_benchmark import Throughput, measure_throughput
from dragoman.training.torch_compile import (
    allow_graph_kernels,
    choose_torch_compile,
    compile_blocks,
    configure_backends,
    eager_mode,
    should_use_cuda_graphs,
    uncompile_blocks,
)
from dragoman.training.train_step import OOMSplitter, PendingMetrics, StepRequests, TrainStep
from dragoman.training.trainer_state import TrainerState

__all__ = ["ReplanSteps", "Throughput", "TrainResult", "Trainer", "ValidateFunction"]

logger = logging.getLogger(__name__)

ValidateFunction = Callable[[nn.Module], Mapping[str, float]]
ReplanSteps = Callable[[int, float], int]  # (steps done, seconds per step) -> planned steps
RecordCallback = Callable[[Mapping[str, Any]], None]

# Why training ended.
DONE, STOP, DEADLINE, PATIENCE, TARGET = "done", "stop", "deadline", "patience", "target"

DISTRIBUTED_PROBE_STEPS = 8  # steps of a throughput measurement with several ranks
SIGNAL_CHECK_INTERVAL = 100  # steps between checks whether a library replaced our signal handlers
STATUS_INTERVAL_SECONDS = 60.0


class TrainResult(NamedTuple):
    """How a run ended."""

    step: int  # the last step
    metrics: dict[str, float]  # of the newest validation
    best: dict[str, float]  # of the best validation, with its "step"
    stopped: str | None  # why it ended early: a signal's name, "deadline", "patience" or "target"


class _PendingStep(NamedTuple):
    batch: GlobalBatch
    lr: float
    metrics: PendingMetrics


class _DivergenceDetected(Exception):  # noqa: N818 - never leaves this module
    """Too many steps had gradients that were not finite."""


class Trainer:
    """Train a model until its step budget, time budget or a stop request ends the run.

    The result is a pure function of (configuration, data, seed), however often the run is stopped
    and resumed. `deadline` returns the seconds that are left; training ends in time for a last
    validation and checkpoint. `replan` returns the number of planned steps at every checkpoint, so
    that the schedule ends with the time budget; it is part of the checkpoint, so that a resumed run
    has the same learning rates. `on_record` is called with every record of the training log.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        task: Task,
        plan: Plan,
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
        self._validate, self._deadline, self._replan = validate, deadline, replan
        self._callbacks = [on_record] if on_record is not None else []
        self._progress = progress if progress and self._world.is_rank_zero else QuietProgress()
        self._display: TrainingDisplay = QuietProgress()
        device = self._device = next(model.parameters()).device
        on_gpu = device.type == "cuda"

        self.fsdp = choose_fsdp(config, model, ranks=self._world.size, device=device)
        sharded = self.fsdp.enabled
        self.precision = choose_precision(config.precision, device)
        self.bf16_weights = not sharded and should_use_bf16_weights(
            config, model, self.precision, device
        )
        self._parallel = build_parallel_strategy(
            model, self._world, device, self.fsdp, bf16_weights=self.bf16_weights
        )
        local_module = self._parallel.local_module
        self._schedule: LRSchedule = catalogue("schedule").load(config.schedule)
        self.optimizer: Optimizer = catalogue("optimizer").load(config.optimizer)(
            local_module, config
        )
        self.ema = EMA(local_module, config.ema_decay) if config.ema_decay else None
        cuda_graphs = should_use_cuda_graphs(config, device, sharded=sharded)
        configure_backends(device, deterministic=config.deterministic)
        allow_graph_kernels(self._parallel.module, cuda_graphs)
        self.compile_decision = choose_torch_compile(config, device, sharded=sharded)
        if self.compile_decision.enabled:
            compile_blocks(self._parallel.module)
        self._checkpointer = Checkpointer(
            run,
            model=model,
            parallel=self._parallel,
            optimizer=self.optimizer,
            ema=self.ema,
            world=self._world,
            task=task,
        )
        self._data_loader = DataLoader(
            plan=plan,
            collate=collate,
            gradient_accumulation=config.gradient_accumulation,
            seed=config.seed,
            rank=self._world.rank,
            ranks=self._world.size,
            lockstep=self._parallel.lockstep,
            prefetch=2 if on_gpu else 0,  # on a CPU a thread would only compete with the model
            pin_memory=on_gpu,
        )
        self._step = TrainStep(
            parallel=self._parallel,
            task=task,
            optimizer=self.optimizer,
            device=device,
            autocast=self.precision.autocast(device),
            oom_splitter=OOMSplitter(),
            seed=config.seed,
            max_grad_norm=config.max_grad_norm,
            cuda_graphs=cuda_graphs,
        )
        self.state = TrainerState(max_steps=config.steps, precision=self.precision.name)
        self.state.token_limits = self._step.oom_splitter.token_limits
        self._requests = StepRequests()  # agreed on by all ranks
        self._metrics_delay = 1 if on_gpu else 0  # steps whose metrics may still be on the device
        self._pending_steps: deque[_PendingStep] = deque()
        self._checkpointed_step = 0
        self._clock = self._next_status = time.monotonic()
        self._seconds_per_step = self._validation_seconds = self._checkpoint_seconds = 0.0

    def fit(self, *, resume: bool = False) -> TrainResult:
        """Run training steps, validating and saving checkpoints on schedule, and return the result.

        With `resume`, continue from the newest checkpoint, if there is one.
        """
        with self._status_on_error():
            self._start_or_resume(resume)
            self._log_decisions()
            with self._tensorboard():
                while True:
                    try:
                        with self._open_display(), self._open_batches() as batches:
                            while True:
                                self._poll_requests()
                                if self._is_validation_due() and not self._requests.stop:
                                    self.validate()
                                if reason := self.stop_reason():
                                    return self.finish(reason)
                                if self._is_checkpoint_due():
                                    self.save_checkpoint()
                                self.train_step(next(batches))
                                self._flush_metrics(keep=self._metrics_delay)
                    except _DivergenceDetected:
                        self._roll_back()

    def train_step(self, batch: GlobalBatch) -> None:
        """Do one optimizer step and update the EMA.

        On a GPU its metrics are read one step later.
        """
        if self._world.size > 1:
            self._world.check_launcher()
        if not self._pending_steps:
            self._clock = time.monotonic()  # validation and checkpoints are timed on their own
        config = dataclasses.replace(self.config, steps=self.state.max_steps)
        lr = self._schedule(batch.step, config, self._width)
        if batch.step in self.state.divergence.excluded_steps:
            batch = batch._replace(micro_batches=[])
        metrics = self._step(batch, lr=lr, requests=self._collect_requests())
        if self.ema is not None:
            self.ema.update(batch.step)
        self._pending_steps.append(_PendingStep(batch, lr, metrics))
        self.state.step = batch.step
        self.state.epoch, self.state.batch = batch.next_cursor

    def stop_reason(self) -> str | None:
        """Return why training ends here, or None."""
        if self._requests.stop:
            return STOP
        if self.state.step >= self.state.max_steps:
            return DONE
        if self.state.has_reached(self.config.target_exact):
            return TARGET
        if self.config.patience and self.state.validations_since_best >= self.config.patience:
            return PATIENCE
        return DEADLINE if self._requests.out_of_time else None

    def validate(self) -> None:
        """Validate the (averaged) weights, and keep the checkpoint if they are the best so far.

        A validation that a stop request interrupts has no result, and is repeated by the resumed
        run.
        """
        assert self._validate is not None, "validation is only due where there is a function for it"
        self._flush_metrics()
        state, validate, started = self.state, self._validate, time.monotonic()
        seed = derive_seed(self.config.seed, state.step, 0, "validation")
        averaged = self.ema.averaged_weights() if self.ema is not None else nullcontext()
        with averaged, self._parallel.gathered_model():
            metrics = self._world.run_on_rank_zero(
                lambda: run_validation(self.model, validate, seed=seed),
                f"validate step {state.step}",
            )
        if metrics is None:
            self._requests = self._requests._replace(stop=True)
            return
        better = state.record_validation(state.step, metrics, self.config.best_metric)
        if state.has_reached(self.config.target_exact):
            # Training ends here, and the final model has these weights, even without the best loss.
            state.best, state.validations_since_best = {**state.metrics, "step": state.step}, 0
            better = True
        self._log({"event": "validation", "step": state.step, **metrics})
        self._display.show_validation(metrics, state.best, best_metric=self.config.best_metric)
        self._validation_seconds = time.monotonic() - started
        state.seconds += self._validation_seconds
        if better:
            self.save_checkpoint()
            if self._checkpointed_step == state.step:
                self._checkpointer.keep_best(state.step)
        self._poll_requests()

    def save_checkpoint(self, *, tolerate_disk_errors: bool = True) -> None:
        """Save the current state as a checkpoint, unless there is one of this step."""
        self._flush_metrics()
        state, started = self.state, time.monotonic()
        signals.clear_checkpoint_request()
        self._requests = self._requests._replace(save_checkpoint=False)
        if self._checkpointed_step == state.step or not state.step:
            return
        if self._replan is not None:
            replan = self._replan
            steps = self._world.run_on_rank_zero(
                lambda: replan(state.step, self._seconds_per_step), "plan the number of steps"
            )
            state.max_steps = max(int(steps), state.step)
            self._display.set_max_steps(state.max_steps)
        if self._checkpointer.save_checkpoint(
            state.step,
            state.state_dict(),
            metrics=state.metrics,
            tolerate_disk_errors=tolerate_disk_errors,
            suspect=state.divergence.suspect,
        ):
            self._checkpointed_step = state.step
            state.divergence.suspect = False
        self._checkpoint_seconds = time.monotonic() - started
        state.seconds += self._checkpoint_seconds

    def finish(self, reason: str) -> TrainResult:
        """Save a last checkpoint, write the status and return the result.

        A second stop request saves nothing: the newest checkpoint stays as it is.
        """
        self._flush_metrics()
        if reason == DEADLINE and self._is_validation_due(last=True):
            self.validate()
        if not signals.is_stop_urgent():
            self.save_checkpoint(tolerate_disk_errors=False)
        signal = signals.stop_reason() or "a stop request on another rank"
        stopped = {STOP: signal, DONE: None}.get(reason, reason)
        self._write_status(
            state="stopped" if reason == STOP else "finished",
            step=self.state.step,
            exit_code=StoppedError.exit_code if reason == STOP else 0,
            reason=stopped or "",
        )
        state = self.state
        return TrainResult(state.step, dict(state.metrics), dict(state.best), stopped)

    def measure_throughput(self, seconds: float = 10.0) -> Throughput:
        """Time real steps for about so many seconds, and restore everything; only before `fit`."""
        max_steps = max(4, self.config.steps // 20)
        if self._world.size > 1:  # ranks must do equally many steps, and their clocks may differ
            seconds, max_steps = math.inf, DISTRIBUTED_PROBE_STEPS
        self.model.train()
        return measure_throughput(
            self._step,
            self._data_loader,
            local_module=self._parallel.local_module,
            optimizer=self.optimizer,
            seconds=seconds,
            max_steps=max_steps,
        )

    def reconfigure(self, config: TrainConfig) -> None:
        """Change steps, warm-up, EMA decay and intervals, which a run may choose after measuring.

        Only before `fit`. The settings of model, optimizer and data must be the same.
        """
        self.config = config
        self.state.max_steps = config.steps
        self._step.oom_splitter.reset()
        local_module = self._parallel.local_module
        self.ema = EMA(local_module, config.ema_decay) if config.ema_decay else None
        self._checkpointer.ema = self.ema
        before = self.compile_decision.enabled
        self.compile_decision = choose_torch_compile(
            config, self._device, sharded=self.fsdp.enabled
        )
        if self.compile_decision.enabled and not before:
            compile_blocks(self._parallel.module)
        elif before and not self.compile_decision.enabled:
            uncompile_blocks(self._parallel.module)

    # Between steps

    def _flush_metrics(self, *, keep: int = 0) -> None:
        """Read the metrics of launched steps but the last `keep`, and log them."""
        while len(self._pending_steps) > keep:
            batch, lr, pending = self._pending_steps.popleft()
            metrics = pending.read()
            now = time.monotonic()
            seconds, self._clock = now - self._clock, now
            smoothing = 0.05 if self._seconds_per_step else 1.0
            self._seconds_per_step += smoothing * (seconds - self._seconds_per_step)
            self.state.seconds += seconds
            self._requests = metrics.requests
            record = self.state.advance(batch, lr, metrics) | {"seconds": round(seconds, 6)}
            self._log(record)
            self._display.update(record)
            if now >= self._next_status:
                self._next_status = now + STATUS_INTERVAL_SECONDS
                self._write_status(state="training", step=batch.step)
            if fault_tolerant_stdio.lost_streams:
                self._log_lost_streams(batch.step)
            if batch.step % SIGNAL_CHECK_INTERVAL == 0:
                signals.restore_handlers()
            if record.get("diverged"):
                raise _DivergenceDetected

    def _collect_requests(self) -> StepRequests:
        """Return the requests of this rank; only rank 0 watches the time budget."""
        out_of_time = False
        if self._deadline is not None and self._world.is_rank_zero:
            reserve = self._validation_seconds + self._checkpoint_seconds
            out_of_time = self._deadline() < 1.5 * self._seconds_per_step + reserve
        return StepRequests(signals.stop_requested(), signals.checkpoint_requested(), out_of_time)

    def _poll_requests(self) -> None:
        """Read the requests of a single process; several ranks act on agreed ones only."""
        if self._world.size == 1:
            self._requests = self._collect_requests()

    def _is_validation_due(self, *, last: bool = False) -> bool:
        """Whether to validate now: at a fixed interval and at the end, but not twice in a row."""
        state, interval = self.state, self.config.validate_every
        if self._validate is None or state.validated_step >= state.step:
            return False
        if last or state.step >= state.max_steps:
            # Only a time budget moves the end close to a validation.
            since = state.step - state.validated_step
            return self._replan is None or not state.validated_step or 4 * since >= interval
        return state.step % interval == 0 and 4 * (state.max_steps - state.step) >= interval

    def _is_checkpoint_due(self) -> bool:
        step = self.state.step
        scheduled = step > self._checkpointed_step and step % self.config.checkpoint_every == 0
        return scheduled or self._requests.save_checkpoint

    # Start, rollback and status

    def _start_or_resume(self, resume: bool) -> None:
        """Load the newest checkpoint, or begin a new run."""
        if resume:
            self._load_state(self._checkpointer.load_latest())
        else:
            self._checkpointer.start_new_run()

    def _load_state(self, saved: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint's state, or from the first step without one."""
        oom_splitter, precision = self._step.oom_splitter, self.precision.name
        if saved is None:
            self.state = TrainerState(max_steps=self.state.max_steps, precision=precision)
            self.state.token_limits = oom_splitter.token_limits
        else:
            self.state = TrainerState.from_state_dict(saved)
            if self._replan is None and not self.config.time_budget:
                self.state.max_steps = self.config.steps  # train.steps may change at a resume
            if self.state.precision and self.state.precision != precision:
                logger.warning(
                    "resume is not bit-exact: precision %s -> %s", self.state.precision, precision
                )
            self.state.precision = precision
            oom_splitter.token_limits = self.state.token_limits
        self._checkpointed_step = self.state.step

    def _roll_back(self) -> None:
        """Return to the newest checkpoint and exclude the steps that were not finite.

        Once per run.
        """
        diverged, last_step = self.state.divergence, self.state.step
        diverged.require_first_rollback()
        self._pending_steps.clear()
        self._load_state(self._checkpointer.roll_back())
        self.state.divergence = diverged.roll_back(self.state.divergence.state_dict())
        logger.warning(
            "training diverged before step %d: rolled back to step %d, excluding %d steps",
            last_step,
            self.state.step,
            len(diverged.recent_skips),
        )

    def _open_batches(self) -> closing[Generator[GlobalBatch, None, None]]:
        """Return the batches from the current position on, to be closed."""
        self.model.train()
        return closing(self._data_loader.batches(self.state.step + 1, self.state.cursor))

    @contextmanager
    def _open_display(self) -> Iterator[None]:
        """Show the progress of training."""
        state = self.state
        with self._progress.training(steps=state.max_steps, done=state.step) as self._display:
            yield

    @contextmanager
    def _tensorboard(self) -> Iterator[None]:
        """Write TensorBoard scalars, with `train.tensorboard`."""
        if not (self.config.tensorboard and self._world.is_rank_zero):
            yield
            return
        writer = TensorBoardWriter(self._run.path / "board", done=self.state.step)
        self._callbacks.append(writer)
        try:
            yield
        finally:
            self._callbacks.remove(writer)
            writer.close()

    @contextmanager
    def _status_on_error(self) -> Iterator[None]:
        """Write an error to status.json: launchers may lose the exit code."""
        self._world.on_rank_lost = lambda reason: self._write_status(
            state="failed", exit_code=StoppedError.exit_code, reason=reason
        )
        try:
            yield
        except BaseException as error:
            self._write_status(
                state="failed",
                exit_code=getattr(error, "exit_code", 1),
                reason=f"{type(error).__name__}: {error}",
            )
            raise

    def _log(self, record: Mapping[str, Any]) -> None:
        """Append a record to the training log and pass it to the callbacks."""
        if self._world.is_rank_zero:
            self._run.training_log.append(record)
        for on_record in self._callbacks:
            on_record(record)

    def _log_decisions(self) -> None:
        """Log which optimizations are on, and why."""
        copy = ", bf16 compute copy of float32 master weights" if self.bf16_weights else ""
        logger.info("mixed precision: %s%s (%s)", self.precision.name, copy, self.precision.reason)
        decisions: dict[str, tuple[bool, str]] = {"torch.compile": self.compile_decision}
        if self._world.size > 1:
            decisions["FSDP"] = self.fsdp
        for name, (enabled, reason) in decisions.items():
            logger.info("%s: %s (%s)", name, "on" if enabled else "off", reason)

    def _log_lost_streams(self, step: int) -> None:
        """Record in log.jsonl and status.json that progress is no longer shown.

        Training continues.
        """
        lost = fault_tolerant_stdio.pop_lost_streams() if self._world.is_rank_zero else {}
        for stream, reason in lost.items():
            self._run.training_log.append(
                {"event": "stream lost", "step": step, "stream": stream, "reason": reason}
            )
            self._write_status(progress=f"not shown since step {step}: {stream}: {reason}")

    def _write_status(self, **fields: Any) -> None:
        if self._world.is_rank_zero:
            self._run.status(**fields)


def run_validation(
    model: nn.Module, validate: ValidateFunction, *, seed: int
) -> dict[str, float] | None:
    """Validate in evaluation mode; return None when a stop request interrupts it."""
    model.eval()
    try:
        fault_injection.point("valid.mid")
        with isolated_rng(seed), torch.no_grad(), eager_mode():
            return {name: float(value) for name, value in validate(model).items()}
    except StoppedError:
        return None
    finally:
        model.train()
