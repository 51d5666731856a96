"""The training loop: updates in order, with what must happen between them."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from dragoman import stopping
from dragoman.config import TrainConfig
from dragoman.data.batches import BatchPlan
from dragoman.errors import StoppedError
from dragoman.files.streams import take_losses
from dragoman.registry import catalogue
from dragoman.training.board import Board
from dragoman.training.checkpoint import RunDirectory
from dragoman.training.compiling import choose_compiling, choose_replaying, prepare_device
from dragoman.training.distributed import World
from dragoman.training.ema import RunningAverage
from dragoman.training.feed import Collate, Feed, Update
from dragoman.training.halved import choose_halving
from dragoman.training.interlude import DONE, STOP, Interlude, Observe, Replan
from dragoman.training.ledger import Ledger
from dragoman.training.loss import Trainable
from dragoman.training.precision import choose_precision
from dragoman.training.progress import Progress, QuietProgress, TrainingView
from dragoman.training.rehearsal import Pace, rehearse
from dragoman.training.saving import Saver
from dragoman.training.schedules import Schedule
from dragoman.training.sharded import choose_sharding, hold
from dragoman.training.standing import Standing
from dragoman.training.update import Pending, UpdateStep
from dragoman.training.validating import Validate

__all__ = ["Pace", "Replan", "Result", "Trainer", "Validate"]

log = logging.getLogger(__name__)

REHEARSED_TOGETHER = 8  # updates that several ranks rehearse
HANDLER_CHECK = 100  # updates between looks at whether a library replaced our signal handlers


class Result(NamedTuple):
    """How a run ended."""

    step: int  # the last update
    metrics: dict[str, float]  # of the newest validation
    best: dict[str, float]  # of the best one, with its "update"
    stopped: str | None  # why it ended before its last update: a signal's name, "deadline", "patience" or "target"


class _Launched(NamedTuple):
    update: Update
    learning_rate: float
    pending: Pending


class _Diverged(Exception):  # noqa: N818 - never leaves this module
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
        task: Trainable,
        plan: BatchPlan,
        collate: Collate,
        config: TrainConfig,
        run: RunDirectory,
        width: int,
        validate: Validate | None = None,
        progress: Progress | None = None,
        distributed: World | None = None,
        deadline: Callable[[], float] | None = None,
        replan: Replan | None = None,
        observe: Observe | None = None,
    ) -> None:
        self.model, self.config, self.plan = model, config, plan
        self._width, self._run = width, run
        self._world = distributed or World()
        self._progress = progress or QuietProgress()
        self._device = next(model.parameters()).device
        self.sharding = choose_sharding(config, model, ranks=self._world.size, device=self._device)
        self.precision = choose_precision(config.precision, self._device)
        self.halved = choose_halving(config, model, self.precision, self._device) and not self.sharding.wanted
        self._holding = hold(model, self._world, self._device, self.sharding, halved=self.halved)
        shares = self._holding.shares
        self._schedule: Schedule = catalogue("schedule").load(config.schedule)
        self.optimiser: Optimizer = catalogue("optimiser").load(config.optimiser)(shares, config)
        self.average = RunningAverage(shares, config.ema) if config.ema else None
        replaying = choose_replaying(config, self._device, sharded=self.sharding.wanted)
        prepare_device(self._device, deterministic=config.deterministic, replaying=replaying)
        self.compiling = choose_compiling(config, self._device, sharded=self.sharding.wanted)
        self._ledger = Ledger(config, self.precision, replanned=replan is not None)
        self._saver = Saver(run, model=model, holding=self._holding, optimiser=self.optimiser, average=self.average, world=self._world)
        self._interlude = Interlude(
            model=model,
            holding=self._holding,
            average=self.average,
            config=config,
            ledger=self._ledger,
            saver=self._saver,
            run=run,
            world=self._world,
            validate=validate,
            deadline=deadline,
            replan=replan,
            observers=[observe] if observe is not None else [],
        )
        on_gpu = self._device.type == "cuda"
        self._feed = Feed(
            plan=plan,
            collate=collate,
            accumulate=config.accumulate,
            seed=config.seed,
            rank=self._world.rank,
            ranks=self._world.size,
            lockstep=self._holding.lockstep,
            depth=2 if on_gpu else 0,  # on a CPU a thread would only take turns with the products
            pin=on_gpu,
        )
        self._step = UpdateStep(
            holding=self._holding,
            task=task.compiled() if self.compiling.wanted else task,
            optimiser=self.optimiser,
            device=self._device,
            precision=self.precision,
            guard=self._ledger.guard,
            seed=config.seed,
            clip=config.clip,
            replay=replaying,
        )
        self._lag = 1 if on_gpu else 0  # updates whose figures may still be on their way
        self._launched: deque[_Launched] = deque()
        self._clock = time.monotonic()

    def run(self, resume: bool) -> Result:
        """Train to the end, or until something asks to stop; with `resume` go on from the newest checkpoint, if any."""
        self._world.on_loss = lambda reason: self._status(state="failed", exit_code=StoppedError.exit_code, reason=reason)
        try:
            self._begin(resume)
            log.info("products in %s%s: %s", self.precision.name, " with rounded weights" if self.halved else "", self.precision.reason)
            log.info("compiled: %s, %s", "yes" if self.compiling.wanted else "no", self.compiling.reason)
            if self._world.size > 1:
                log.info("weights shared out over the ranks: %s, %s", "yes" if self.sharding.wanted else "no", self.sharding.reason)
            with self._board():
                while True:
                    try:
                        return self._train()
                    except _Diverged:
                        self._roll_back()
        except BaseException as error:
            # A launcher may lose the exit code; status.json keeps it.
            self._status(state="failed", exit_code=getattr(error, "exit_code", 1), reason=f"{type(error).__name__}: {error}")
            raise

    def rehearse(self, seconds: float = 10.0) -> Pace:
        """Measure the pace by real updates for about so long, and put everything back as it was; only before `run`."""
        most = max(4, self.config.steps // 20)
        if self._world.size > 1:  # ranks must make equally many updates, and their clocks need not agree
            seconds, most = math.inf, REHEARSED_TOGETHER
        self.model.train()
        return rehearse(self._step, self._feed, shares=self._holding.shares, optimiser=self.optimiser, seconds=seconds, most=most)

    @property
    def standing(self) -> Standing:
        """Say where the run stands."""
        return self._ledger.standing

    # From update to update

    def _train(self) -> Result:
        """Go through the updates until one of the ends is reached."""
        self.model.train()
        standing = self.standing
        progress = self._progress if self._world.leads else QuietProgress()
        with (
            progress.training(steps=standing.steps, done=standing.update) as view,
            closing(self._feed.updates(standing.update + 1, standing.cursor)) as updates,
        ):
            self._clock = time.monotonic()
            while True:
                end = self._interlude.pass_by(view, lambda: self._settle(view))
                if end is not None:
                    return self._finish(end, view)
                if not self._launched:
                    self._clock = time.monotonic()  # what happened between has been counted there
                self._launch(next(updates))
                self._settle(view, leaving=self._lag)

    def _launch(self, update: Update) -> None:
        """Start an update; its figures are settled later."""
        self._world.check_parent()
        settings = dataclasses.replace(self.config, steps=self.standing.steps)
        rate = self._schedule(update.number, settings, self._width)
        if update.number in self._ledger.divergence.excluded:
            update = update._replace(slices=[])
        pending = self._step(update, learning_rate=rate, requests=self._interlude.ask())
        if self.average is not None:
            self.average.follow(update.number)
        self._launched.append(_Launched(update, rate, pending))
        self.standing.update = update.number
        self.standing.cursor = update.after

    def _settle(self, view: TrainingView, leaving: int = 0) -> None:
        """Read the figures of launched updates, count them in, and log them."""
        while len(self._launched) > leaving:
            launched = self._launched.popleft()
            figures = launched.pending.read()
            now = time.monotonic()
            took, self._clock = now - self._clock, now
            self._interlude.pace += (took - self._interlude.pace) * (0.05 if self._interlude.pace else 1.0)
            self.standing.seconds += took
            self._interlude.requests = figures.requests
            record = self._ledger.count(launched.update, launched.learning_rate, figures) | {"seconds": round(took, 6)}
            self._interlude.tell(record)
            self._status(now=False, state="training", update=record["update"])
            view.update(record)
            self._note_lost_streams(record["update"])
            if launched.update.number % HANDLER_CHECK == 0:
                stopping.restore()
            if record.get("diverged"):
                raise _Diverged

    def _note_lost_streams(self, update: int) -> None:
        """Record in log.jsonl and status.json that progress is no longer shown: training does not end for that."""
        for stream, reason in take_losses().items() if self._world.leads else ():
            self._run.log({"event": "stream lost", "update": update, "stream": stream, "reason": reason})
            self._status(progress=f"not shown since update {update}: {stream}: {reason}")

    def _finish(self, end: str, view: TrainingView) -> Result:
        """Bring the run to a resting point and say how it stands."""
        self._settle(view)
        self._interlude.end(end, view)
        standing = self.standing
        stopped = {STOP: stopping.reason() or "another rank was asked to stop", DONE: None}.get(end, end)
        code = StoppedError.exit_code if end == STOP else 0
        self._status(state="stopped" if end == STOP else "finished", update=standing.update, exit_code=code, reason=stopped or "")
        return Result(standing.update, dict(standing.metrics), dict(standing.best), stopped)

    def _begin(self, resume: bool) -> None:
        """Start anew, or go on from the newest checkpoint."""
        if resume:
            self._ledger.take(self._saver.restore())
            self._interlude.published = self.standing.update
        else:
            self._saver.begin()

    @contextmanager
    def _board(self) -> Iterator[None]:
        """Write for TensorBoard too, where that was asked for."""
        if not (self.config.tensorboard and self._world.leads):
            yield
            return
        board = Board(self._run.path / "board", done=self.standing.update)
        self._interlude.observers.append(board)
        try:
            yield
        finally:
            self._interlude.observers.remove(board)
            board.close()

    def _roll_back(self) -> None:
        """Return to the newest checkpoint and pass over the updates that were not finite; once a run."""
        self._ledger.may_roll_back()
        self._launched.clear()
        self._ledger.roll_back(self._saver.go_back())
        self._interlude.published = self.standing.update

    def _status(self, **fields: Any) -> None:
        if self._world.leads:
            self._run.status(**fields)
