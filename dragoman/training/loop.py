"""The training loop: updates in order, with what must happen between them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from dragoman import stopping
from dragoman.config import TrainConfig
from dragoman.data.batches import BatchPlan
from dragoman.errors import StoppedError
from dragoman.registry import catalogue
from dragoman.training.checkpoint import RunDirectory
from dragoman.training.distributed import World
from dragoman.training.ema import RunningAverage
from dragoman.training.feed import Collate, Feed, Update
from dragoman.training.ledger import Ledger
from dragoman.training.loss import Trainable
from dragoman.training.precision import choose_precision
from dragoman.training.progress import Progress, QuietProgress, TrainingView
from dragoman.training.randomness import seed_for
from dragoman.training.saving import Saver, weights_of
from dragoman.training.schedules import Schedule
from dragoman.training.standing import Standing
from dragoman.training.update import Pending, Requests, UpdateStep
from dragoman.training.validating import Validate, measure

log = logging.getLogger(__name__)

DONE, STOP, DEADLINE, PATIENCE = "done", "stop", "deadline", "patience"
HANDLER_CHECK = 100  # updates between looks at whether a library replaced our signal handlers

Replan = Callable[[int, float], int]  # (updates done, seconds an update) -> updates planned in all


class Result(NamedTuple):
    """How a run ended."""

    step: int  # the last update
    metrics: dict[str, float]  # of the newest validation
    best: dict[str, float]  # of the best one, with its "update"
    stopped: str | None  # why it ended before its last update: a signal's name, "deadline" or "patience"


class Pace(NamedTuple):
    """How fast training goes."""

    seconds: float  # an update
    tokens: float  # a second, both sides


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
        observe: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.model, self.config, self.plan = model, config, plan
        self._width, self._run = width, run
        self._validate, self._deadline, self._replan, self._observe = validate, deadline, replan, observe
        self._world = distributed or World()
        self._progress = progress or QuietProgress()
        self._device = next(model.parameters()).device
        self._schedule: Schedule = catalogue("schedule").load(config.schedule)
        self.optimiser: Optimizer = catalogue("optimiser").load(config.optimiser)(model, config)
        self.average = RunningAverage(model, config.ema) if config.ema else None
        self.precision = choose_precision(config.precision, self._device)
        self._ledger = Ledger(config, self.precision, replanned=replan is not None)
        self._saver = Saver(run, model=model, optimiser=self.optimiser, average=self.average, world=self._world)
        on_gpu = self._device.type == "cuda"
        self._feed = Feed(
            plan=plan,
            collate=collate,
            accumulate=config.accumulate,
            seed=config.seed,
            rank=self._world.rank,
            ranks=self._world.size,
            depth=2 if on_gpu else 0,  # on a CPU a thread would only take turns with the products
            pin=on_gpu,
        )
        self._step = UpdateStep(
            model=model,
            task=task,
            optimiser=self.optimiser,
            world=self._world,
            device=self._device,
            precision=self.precision,
            guard=self._ledger.guard,
            seed=config.seed,
            clip=config.clip,
        )
        self._lag = 1 if on_gpu else 0  # updates whose figures may still be on their way
        self._launched: deque[_Launched] = deque()
        self._requests = Requests()
        self._published = 0
        self._seconds = {"update": 0.0, "validate": 0.0, "publish": 0.0}  # what each took lately
        self._clock = time.monotonic()

    def run(self, resume: bool) -> Result:
        """Train to the end, or until something asks to stop; with `resume` go on from the newest checkpoint, if any."""
        try:
            self._begin(resume)
            log.info("products in %s: %s", self.precision.name, self.precision.reason)
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
        """Measure the pace by real updates for about so long, and put everything back as it was; only before `run`.

        The first half only warms up: a GPU meets each shape for the first time, and that takes as long as many updates.
        """
        kept = {name: tensor.clone() for name, tensor in weights_of(self.model).items()}
        self.model.train()
        done = tokens = 0
        began = time.monotonic()
        start: float | None = None
        with closing(self._feed.updates(1, self.standing.cursor)) as updates:
            while start is None or not done or time.monotonic() - began < seconds:
                figures = self._step(next(updates), learning_rate=0.0, requests=Requests()).read()
                if start is not None:
                    done, tokens = done + 1, tokens + figures.tokens
                elif time.monotonic() - began >= seconds / 2:
                    start = time.monotonic()
        took = time.monotonic() - start
        with torch.no_grad():
            for name, tensor in weights_of(self.model).items():
                tensor.copy_(kept[name])
        self.optimiser.state.clear()
        return Pace(took / done, tokens / took)

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
                end = self._between(view)
                if end is not None:
                    return self._finish(end, view)
                self._launch(next(updates))
                self._settle(view, leaving=self._lag)

    def _between(self, view: TrainingView) -> str | None:
        """Do what is due after an update; says why training ends here, or None to go on."""
        standing, config = self.standing, self.config
        if self._asked_to_stop():
            return STOP
        last = standing.update >= standing.steps
        if (
            self._validate is not None
            and standing.validated < standing.update
            and (last or standing.update % self._scaled(config.validate_every) == 0)
        ):
            self._settle(view)
            self._run_validation(view)
            if self._asked_to_stop():
                return STOP
        if last:
            return DONE
        if config.patience and standing.stale >= config.patience:
            return PATIENCE
        if self._requests.late:
            return DEADLINE
        due = standing.update > self._published and standing.update % self._scaled(config.checkpoint_every) == 0
        if due or self._requests.publish:
            self._settle(view)
            self._publish(view)
        return None

    def _asked_to_stop(self) -> bool:
        """Look at the requests of this process when it is alone; among several, only what all have agreed on counts."""
        if self._world.size == 1:
            self._requests = self._ask()
        return self._requests.stop

    def _scaled(self, interval: int) -> int:
        """Keep the number of validations and checkpoints when a time budget changes the number of updates."""
        return max(1, round(interval * self.standing.steps / self.config.steps)) if self._replan is not None else interval

    def _ask(self) -> Requests:
        """Collect what is wanted of this process; only rank 0 minds the clock."""
        late = False
        if self._deadline is not None and self._world.leads:
            late = self._deadline() < 1.5 * self._seconds["update"] + self._seconds["validate"] + self._seconds["publish"]
        return Requests(stopping.requested(), stopping.publish_requested(), late)

    def _launch(self, update: Update) -> None:
        """Start an update; its figures are settled later."""
        self._world.check_parent()
        settings = dataclasses.replace(self.config, steps=self.standing.steps)
        rate = self._schedule(update.number, settings, self._width)
        if update.number in self._ledger.divergence.excluded:
            update = update._replace(slices=[])
        pending = self._step(update, learning_rate=rate, requests=self._ask())
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
            self._seconds["update"] += (took - self._seconds["update"]) * (0.05 if self._seconds["update"] else 1.0)
            self.standing.seconds += took
            self._requests = figures.requests
            record = self._ledger.count(launched.update, launched.learning_rate, figures) | {"seconds": round(took, 6)}
            if self._world.leads:
                self._run.log(record)
                self._status(now=False, state="training", update=record["update"])
            view.update(record)
            if self._observe is not None:
                self._observe(record)
            if launched.update.number % HANDLER_CHECK == 0:
                stopping.restore()
            if record.get("diverged"):
                raise _Diverged

    # What happens between updates

    def _run_validation(self, view: TrainingView) -> None:
        """Validate, judge and keep the best; a validation that was interrupted is left undone, and done at the resume."""
        assert self._validate is not None, "validation is only due where there is one"
        standing, validate = self.standing, self._validate
        began = time.monotonic()
        seed = seed_for(self.config.seed, standing.update, 0, "validation")
        metrics = self._world.share(
            lambda: measure(self.model, validate, average=self.average, seed=seed), f"validate update {standing.update}"
        )
        if metrics is None:
            self._requests = self._requests._replace(stop=True)
            return
        better = standing.judge(standing.update, metrics, self.config.best_by)
        if self._world.leads:
            record = {"event": "validation", "update": standing.update, **metrics}
            self._run.log(record)
            if self._observe is not None:
                self._observe(record)
        view.validated(metrics, standing.best)
        self._seconds["validate"] = time.monotonic() - began
        if better:
            self._publish(view)
            if self._published == standing.update:
                self._saver.keep_best(standing.update)
        self._clock = time.monotonic()

    def _publish(self, view: TrainingView, *, patient: bool = True) -> None:
        """Publish the present state, unless it is published already."""
        standing = self.standing
        stopping.clear_publish()
        self._requests = self._requests._replace(publish=False)
        if self._published == standing.update or not standing.update:
            return
        began = time.monotonic()
        if self._replan is not None:
            replan = self._replan
            steps = self._world.share(lambda: replan(standing.update, self._seconds["update"]), "plan")
            standing.steps = max(int(steps), standing.update)
            view.plan(standing.steps)
        state, divergence = self._ledger.export_state(), self._ledger.divergence
        if self._saver.publish(standing.update, state, metrics=standing.metrics, patient=patient, suspect=divergence.suspect):
            self._published = standing.update
            divergence.suspect = False
        self._seconds["publish"] = time.monotonic() - began
        self._clock = time.monotonic()

    def _finish(self, end: str, view: TrainingView) -> Result:
        """Bring the run to a resting point and say how it stands."""
        self._settle(view)
        standing = self.standing
        if end == DEADLINE and self._validate is not None and standing.validated < standing.update:
            self._run_validation(view)
        if not stopping.urgent():
            self._publish(view, patient=False)
        stopped = {STOP: stopping.reason() or "another rank was asked to stop", DONE: None}.get(end, end)
        code = StoppedError.exit_code if end == STOP else 0
        self._status(state="stopped" if end == STOP else "finished", update=standing.update, exit_code=code, reason=stopped or "")
        return Result(standing.update, dict(standing.metrics), dict(standing.best), stopped)

    def _begin(self, resume: bool) -> None:
        """Start anew, or go on from the newest checkpoint."""
        if resume:
            self._ledger.take(self._saver.restore())
            self._published = self.standing.update
        else:
            self._saver.begin()

    def _roll_back(self) -> None:
        """Return to the newest checkpoint and pass over the updates that were not finite; once a run."""
        self._ledger.may_roll_back()
        self._launched.clear()
        self._ledger.roll_back(self._saver.go_back())
        self._published = self.standing.update

    def _status(self, **fields: Any) -> None:
        if self._world.leads:
            self._run.status(**fields)
