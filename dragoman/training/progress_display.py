"""Progress display: counts, rates and ETA, live on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol

from dragoman.runtime.fault_tolerant_stdio import make_tolerant

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

TimeFunction = Callable[[], float]

RATE_WINDOW_SECONDS = 20.0  # of a rate: long enough to be smooth, short enough to be current
MAX_MARKS = 256


class Meter:
    """A counter with a total, a rate and an ETA."""

    def __init__(
        self, total: int | None, *, done: int = 0, clock: TimeFunction = time.monotonic
    ) -> None:
        self.total, self.done = total, done
        self._clock = clock
        self.started = clock()
        self._marks: deque[tuple[float, int]] = deque([(self.started, done)], maxlen=MAX_MARKS)

    def advance(self, count: int = 1) -> None:
        """Add to the count."""
        self.done += count
        now = self._clock()
        # At most MAX_MARKS marks over the window, however fast the counter is.
        if now - self._marks[-1][0] >= RATE_WINDOW_SECONDS / MAX_MARKS:
            self._marks.append((now, self.done))
            while len(self._marks) > 2 and now - self._marks[0][0] > RATE_WINDOW_SECONDS:
                self._marks.popleft()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self.started

    @property
    def rate(self) -> float:
        """Count per second, over the last seconds."""
        then, before = self._marks[0]
        passed = self._clock() - then
        return (self.done - before) / passed if passed > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Estimated seconds to the end; None while unknown."""
        if self.total is None or self.rate <= 0:
            return None
        return max(self.total - self.done, 0) / self.rate


def format_duration(seconds: float) -> str:
    """Return seconds as text: "45 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


# A text with its priority: a narrow terminal drops the fields with the highest numbers first.
ProgressField = tuple[int, str]

WIDE_BAR_COLUMNS, NARROW_BAR_COLUMNS, WIDE_TERMINAL_COLUMNS = 20, 10, 80  # columns
MIN_PHASE_SECONDS = 2.0  # a shorter phase is not shown
LINE_INTERVAL_SECONDS = 5.0


class Phase(Protocol):
    """A part of a run with a progress bar, such as tokenizing the corpus."""

    def advance(self, count: int = 1) -> None:
        """Add to the progress."""
        ...


class TrainingDisplay(Protocol):
    """The display of training."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the log record of a step."""
        ...

    def show_validation(
        self, metrics: Mapping[str, float], best: Mapping[str, float], *, best_metric: str = "loss"
    ) -> None:
        """Show the metrics of a validation, and those of the best one so far by `best_metric`."""
        ...

    def set_max_steps(self, steps: int) -> None:
        """Change the number of planned steps."""
        ...


class Progress(Protocol):
    """The progress display of a run."""

    def phase(
        self, name: str, total: int | None = None, unit: str = ""
    ) -> AbstractContextManager[Phase]:
        """Show a part of the run, such as `phase("preparing", 29000, "pairs")`."""
        ...

    def training(self, *, steps: int, done: int = 0) -> AbstractContextManager[TrainingDisplay]:
        """Show training, of which `done` steps are done."""
        ...

    def note(self, text: str) -> None:
        """Show one line of text."""
        ...


def open_progress(stream: IO[str], *, live: bool | None = None) -> Progress:
    """Return the display for a stream: live on a terminal, lines elsewhere.

    It survives a closed stream.
    """
    stream = make_tolerant(stream)
    if live if live is not None else stream.isatty():
        from rich.console import Console

        return LiveProgress(Console(file=stream))
    return PlainProgress(stream)


class TrainingMeter:
    """Metrics of training for display: loss, tokens/s, padding, best validation, ETA."""

    def __init__(self, *, steps: int, done: int = 0, clock: TimeFunction = time.monotonic) -> None:
        self.steps = Meter(steps, done=done, clock=clock)
        self.tokens = Meter(None, clock=clock)
        self.loss = self.padding = 0.0
        self.best: Mapping[str, float] = {}
        self.best_metric = "loss"  # by which it is the best
        self.valid: Mapping[str, float] = {}

    def update(self, record: Mapping[str, Any]) -> None:
        """Add the record of a step; loss and padding are smoothed over about twenty steps."""
        seen = self.steps.done
        self.steps.advance()
        if "nll" not in record:
            return
        smoothing = 0.05 if self.loss else 1.0
        nll = record["nll"]
        if isinstance(nll, float) and nll == nll:  # a skipped step may have NaN
            self.loss += smoothing * (nll - self.loss)
        self.padding += (smoothing if seen else 1.0) * (record["padding"] - self.padding)
        self.tokens.advance(record["tokens"])

    def summary(self) -> str:
        """Return all fields in one line."""
        return " · ".join(text for _, text in self.fields())

    def fields(self) -> list[ProgressField]:
        """Return the fields in the order of display, each with its priority."""
        fields: list[ProgressField] = [
            (2, f"loss {self.loss:.3f}"),
            (3, f"{self.tokens.rate:,.0f} tokens/s"),
        ]
        fields.append((5, f"padding {100 * self.padding:.1f} %"))
        if self.best:
            value = self.best.get(self.best_metric)
            metric = "" if value is None else f": {_format_metric(self.best_metric, value)}"
            fields.append((4, f"best at step {int(self.best['step']):,}{metric}"))
        return [*fields, *_eta_field(self.steps)]


class QuietProgress:
    """Shows nothing: for tests, libraries and all ranks but rank 0."""

    def advance(self, count: int = 1) -> None:
        """Do nothing."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Do nothing."""

    def show_validation(
        self, metrics: Mapping[str, float], best: Mapping[str, float], *, best_metric: str = "loss"
    ) -> None:
        """Do nothing."""

    def set_max_steps(self, steps: int) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Show nothing."""
        yield self

    @contextmanager
    def training(self, *, steps: int, done: int = 0) -> Iterator[TrainingDisplay]:
        """Show nothing."""
        yield self


class PlainProgress:
    """A line every few seconds."""

    def __init__(
        self,
        stream: IO[str],
        *,
        every: float = LINE_INTERVAL_SECONDS,
        clock: TimeFunction = time.monotonic,
    ) -> None:
        self._stream, self._every, self._clock = stream, every, clock

    def note(self, text: str) -> None:
        """Write and flush one line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Write a line every few seconds, and one at the end of a phase of over two seconds."""
        phase = _PlainPhase(
            self, Meter(total, clock=self._clock), name, unit, self._every, self._clock
        )
        yield phase
        phase.end()

    @contextmanager
    def training(self, *, steps: int, done: int = 0) -> Iterator[TrainingDisplay]:
        """Write a line every few seconds, and one for each validation."""
        yield _PlainTrainingDisplay(
            self, TrainingMeter(steps=steps, done=done, clock=self._clock), self._every, self._clock
        )


class _PlainPhase:
    def __init__(
        self,
        owner: PlainProgress,
        meter: Meter,
        name: str,
        unit: str,
        every: float,
        clock: TimeFunction,
    ) -> None:
        self._owner, self._meter, self._name, self._unit = owner, meter, name, unit
        self._every, self._clock = every, clock
        self._next = clock() + MIN_PHASE_SECONDS

    def advance(self, count: int = 1) -> None:
        self._meter.advance(count)
        if self._clock() >= self._next:
            self._next = self._clock() + self._every
            self._owner.note(format_phase(self._name, self._meter, self._unit))

    def end(self) -> None:
        if self._meter.seconds >= MIN_PHASE_SECONDS:
            self._owner.note(
                f"{self._name}: {self._meter.done:,} {self._unit}".rstrip()
                + f" in {format_duration(self._meter.seconds)}"
            )


class _PlainTrainingDisplay:
    def __init__(
        self, owner: PlainProgress, meter: TrainingMeter, every: float, clock: TimeFunction
    ) -> None:
        self._owner, self._meter, self._every, self._clock = owner, meter, every, clock
        self._next = clock() + MIN_PHASE_SECONDS

    def update(self, record: Mapping[str, Any]) -> None:
        self._meter.update(record)
        if self._clock() >= self._next:
            self._next = self._clock() + self._every
            steps = self._meter.steps
            self._owner.note(f"step {steps.done:,} of {steps.total:,} · {self._meter.summary()}")

    def show_validation(
        self, metrics: Mapping[str, float], best: Mapping[str, float], *, best_metric: str = "loss"
    ) -> None:
        self._meter.best, self._meter.best_metric = best, best_metric
        self._owner.note(format_validation(self._meter.steps.done, metrics, best))

    def set_max_steps(self, steps: int) -> None:
        self._meter.steps.total = steps


class LiveProgress:
    """A live display, drawn by rich."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rich_progress: RichProgress | None = None

    def note(self, text: str) -> None:
        """Print a line above the live display; one with a command is copied, so never broken."""
        is_command = "dragoman " in text
        self._console.print(text, highlight=False, markup=False, soft_wrap=is_command)

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Draw a progress bar, and remove it at the end."""
        meter = Meter(total)
        with self._bar(
            name, meter, lambda: [(1, format_meter(meter, unit)), *_eta_field(meter)]
        ) as bar:
            yield bar
        if meter.seconds >= MIN_PHASE_SECONDS:
            self.note(
                f"{name}: {meter.done:,} {unit}".rstrip() + f" in {format_duration(meter.seconds)}"
            )

    @contextmanager
    def training(self, *, steps: int, done: int = 0) -> Iterator[TrainingDisplay]:
        """Draw the progress bar of training, with its metrics."""
        meter = TrainingMeter(steps=steps, done=done)
        with self._bar(
            "training", meter.steps, lambda: [(1, format_meter(meter.steps)), *meter.fields()]
        ) as bar:
            yield _LiveTrainingDisplay(self, meter, bar)

    @contextmanager
    def _bar(
        self, name: str, meter: Meter, fields: Callable[[], list[ProgressField]]
    ) -> Iterator[_Bar]:
        """Add a bar to the live display, of which a terminal can have only one."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        outermost = self._rich_progress is None
        if self._rich_progress is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=WIDE_BAR_COLUMNS),
                TextColumn("{task.fields[text]}", markup=False),
            )
            self._rich_progress = RichProgress(
                *columns, console=self._console, refresh_per_second=4, transient=True
            )
            self._rich_progress.start()
        bar = _Bar(
            self._rich_progress,
            self._rich_progress.add_task(name, total=meter.total, completed=meter.done, text=""),
            meter,
            fields,
        )
        try:
            yield bar
        finally:
            self._rich_progress.remove_task(bar.task)
            if outermost:
                self._rich_progress.stop()
                self._rich_progress = None


class _Bar:
    """A progress bar, redrawn at most four times per second."""

    def __init__(
        self,
        rich_progress: RichProgress,
        task: TaskID,
        meter: Meter,
        fields: Callable[[], list[ProgressField]],
    ) -> None:
        self._rich_progress, self.task = rich_progress, task
        self._meter, self._fields = meter, fields
        self._next = 0.0

    def advance(self, count: int = 1) -> None:
        self._meter.advance(count)
        self.draw()

    def draw(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 0.25
            self._rich_progress.update(
                self.task, completed=self._meter.done, total=self._meter.total, text=self._text()
            )

    def _text(self) -> str:
        """Return the fields that fit beside name and bar at the terminal's current width."""
        width = self._rich_progress.console.width
        bar: Any = self._rich_progress.columns[1]
        bar.bar_width = WIDE_BAR_COLUMNS if width >= WIDE_TERMINAL_COLUMNS else NARROW_BAR_COLUMNS
        name = max(len(str(task.description)) for task in self._rich_progress.tasks)
        spaces = 2
        return join_fitting_fields(self._fields(), width - name - bar.bar_width - spaces)


class _LiveTrainingDisplay:
    def __init__(self, owner: LiveProgress, meter: TrainingMeter, bar: _Bar) -> None:
        self._owner, self._meter, self._bar = owner, meter, bar

    def update(self, record: Mapping[str, Any]) -> None:
        self._meter.update(record)
        self._bar.draw()

    def show_validation(
        self, metrics: Mapping[str, float], best: Mapping[str, float], *, best_metric: str = "loss"
    ) -> None:
        self._meter.best, self._meter.best_metric = best, best_metric
        self._owner.note(format_validation(self._meter.steps.done, metrics, best))

    def set_max_steps(self, steps: int) -> None:
        self._meter.steps.total = steps


def join_fitting_fields(fields: list[ProgressField], columns: int) -> str:
    """Join the fields that fit into the columns, dropping the highest numbers first.

    Keeps at least one.
    """
    kept = list(fields)
    while len(kept) > 1 and len(" · ".join(text for _, text in kept)) > columns:
        kept.remove(max(kept))
    return " · ".join(text for _, text in kept)


def _eta_field(meter: Meter) -> list[ProgressField]:
    """Return the ETA, which is dropped last, once it is known."""
    return [] if meter.eta is None else [(0, f"ETA {format_duration(meter.eta)}")]


def format_meter(meter: Meter, unit: str = "") -> str:
    """Return a count with its total: "1,200 of 29,000 pairs"."""
    total = f" of {meter.total:,}" if meter.total is not None else ""
    return f"{meter.done:,}{total} {unit}".rstrip()


def format_phase(name: str, meter: Meter, unit: str) -> str:
    """Return the progress of a phase: count, rate, ETA."""
    eta = f", ETA {format_duration(meter.eta)}" if meter.eta is not None else ""
    return f"{name}: {format_meter(meter, unit)}, {meter.rate:,.0f} {unit or 'items'}/s{eta}"


def format_validation(step: int, metrics: Mapping[str, float], best: Mapping[str, float]) -> str:
    """Return the metrics of a validation as a line."""
    summary = " · ".join(_format_metric(name, value) for name, value in metrics.items())
    marker = " · best so far" if best.get("step") == step else ""
    return f"validation at step {step:,}: {summary}{marker}"


def _format_metric(name: str, value: float) -> str:
    """Return one metric as text."""
    shown = {"bleu": f"BLEU {value:.1f}", "exact": f"{100 * value:.0f} % exact"}
    metric, _, direction = name.partition("_")
    if direction and metric in ("bleu", "loss"):  # of one direction of a multilingual model
        return f"{direction} {_format_metric(metric, value)}"
    return shown.get(name, f"{name} {value:.3f}")
