"""What happens between two updates: requests are met, validations and checkpoints come when they are due, and runs end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from dragoman import stopping
from dragoman.config import TrainConfig
from dragoman.training.checkpoint import RunDirectory
from dragoman.training.distributed import World
from dragoman.training.ema import RunningAverage
from dragoman.training.holding import Holding
from dragoman.training.ledger import Ledger
from dragoman.training.progress import TrainingView
from dragoman.training.randomness import seed_for
from dragoman.training.saving import Saver
from dragoman.training.standing import Standing
from dragoman.training.update import Requests
from dragoman.training.validating import Validate, measure

DONE, STOP, DEADLINE, PATIENCE, TARGET = "done", "stop", "deadline", "patience", "target"

Replan = Callable[[int, float], int]  # (updates done, seconds an update) -> updates planned in all
Observe = Callable[[Mapping[str, Any]], None]


class Interlude:
    """Decides what is due after an update, and does it."""

    def __init__(
        self,
        *,
        model: nn.Module,
        holding: Holding,
        average: RunningAverage | None,
        config: TrainConfig,
        ledger: Ledger,
        saver: Saver,
        run: RunDirectory,
        world: World,
        validate: Validate | None,
        deadline: Callable[[], float] | None,
        replan: Replan | None,
        observers: list[Observe],
    ) -> None:
        self._model, self._holding, self._average, self._config, self._ledger, self._saver = model, holding, average, config, ledger, saver
        self._run, self._world, self._validate, self._deadline = run, world, validate, deadline
        self._replan, self.observers = replan, observers
        self.requests = Requests()  # what all processes have agreed on
        self.published = 0  # the newest update that a checkpoint has
        self.pace = 0.0  # seconds an update, lately
        self._validation_seconds = self._publish_seconds = 0.0

    @property
    def _standing(self) -> Standing:
        return self._ledger.standing

    def ask(self) -> Requests:
        """Collect what is wanted of this process; only rank 0 minds the clock."""
        late = False
        if self._deadline is not None and self._world.leads:
            late = self._deadline() < 1.5 * self.pace + self._validation_seconds + self._publish_seconds
        return Requests(stopping.requested(), stopping.publish_requested(), late)

    def pass_by(self, view: TrainingView, settle: Callable[[], None]) -> str | None:
        """Do what is due, after `settle` has read all figures; says why training ends here, or None to go on."""
        standing, config = self._standing, self._config
        if self._asked_to_stop():
            return STOP
        last = standing.update >= standing.steps
        if self._validation_due(last=last):
            settle()
            self.validate(view)
            if self._asked_to_stop():
                return STOP
        if last:
            return DONE
        if standing.reached(config.target_exact):
            return TARGET
        if config.patience and standing.stale >= config.patience:
            return PATIENCE
        if self.requests.late:
            return DEADLINE
        due = standing.update > self.published and standing.update % config.checkpoint_every == 0
        if due or self.requests.publish:
            settle()
            self.publish(view)
        return None

    def end(self, why: str, view: TrainingView) -> None:
        """Bring the run to a resting point; a second request to stop leaves the newest checkpoint as it is."""
        if why == DEADLINE and self._validation_due(last=True):
            self.validate(view)
        if not stopping.urgent():
            self.publish(view, patient=False)

    def validate(self, view: TrainingView) -> None:
        """Validate, judge and keep the best; a validation that was interrupted is left undone, and done at the resume."""
        assert self._validate is not None, "validation is only due where there is one"
        standing, validate = self._standing, self._validate
        began = time.monotonic()
        seed = seed_for(self._config.seed, standing.update, 0, "validation")
        with self._average.in_place() if self._average is not None else nullcontext(), self._holding.whole():
            metrics = self._world.share(lambda: measure(self._model, validate, seed=seed), f"validate update {standing.update}")
        if metrics is None:
            self.requests = self.requests._replace(stop=True)
            return
        better = standing.judge(standing.update, metrics, self._config.best_by)
        if standing.reached(self._config.target_exact):
            # Training ends here, so the finished model takes these weights, whatever an earlier loss was.
            standing.best, standing.stale, better = {**standing.metrics, "update": standing.update}, 0, True
        self.tell({"event": "validation", "update": standing.update, **metrics})
        view.validated(metrics, standing.best)
        self._validation_seconds = time.monotonic() - began
        standing.seconds += self._validation_seconds
        if better:
            self.publish(view)
            if self.published == standing.update:
                self._saver.keep_best(standing.update)

    def publish(self, view: TrainingView, *, patient: bool = True) -> None:
        """Publish the present state, unless it is published already."""
        standing = self._standing
        stopping.clear_publish()
        self.requests = self.requests._replace(publish=False)
        if self.published == standing.update or not standing.update:
            return
        began = time.monotonic()
        if self._replan is not None:
            replan = self._replan
            steps = self._world.share(lambda: replan(standing.update, self.pace), "plan")
            standing.steps = max(int(steps), standing.update)
            view.plan(standing.steps)
        state, divergence = self._ledger.export_state(), self._ledger.divergence
        if self._saver.publish(standing.update, state, metrics=standing.metrics, patient=patient, suspect=divergence.suspect):
            self.published = standing.update
            divergence.suspect = False
        self._publish_seconds = time.monotonic() - began
        standing.seconds += self._publish_seconds

    def tell(self, record: Mapping[str, Any]) -> None:
        """Log a record, and show it to whoever observes."""
        if self._world.leads:
            self._run.log(record)
        for observe in self.observers:
            observe(record)

    def _asked_to_stop(self) -> bool:
        """Look at the requests of this process when it is alone; among several, only what all have agreed on counts."""
        if self._world.size == 1:
            self.requests = self.ask()
        return self.requests.stop

    def _unvalidated(self) -> bool:
        return self._validate is not None and self._standing.validated < self._standing.update

    def _validation_due(self, *, last: bool) -> bool:
        """Whether to validate now: at a fixed interval and at the end, but not twice within a quarter of an interval."""
        standing, interval = self._standing, self._config.validate_every
        if not self._unvalidated():
            return False
        if last:  # only a time budget moves the end so near to a validation
            return self._replan is None or not standing.validated or 4 * (standing.update - standing.validated) >= interval
        return standing.update % interval == 0 and 4 * (standing.steps - standing.update) >= interval
