"""What a person sees while something takes long: a live display on a terminal, plain lines elsewhere.

Every phase that takes longer than two seconds shows a count, a rate and an estimate (facebookresearch/fairseq#2603: "is
it frozen?"), and training shows them from its first seconds on, not after the first hour (OpenNMT-py#1397,
OpenNMT/OpenNMT#75, LibreTranslate/Locomotive#35).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import IO, TYPE_CHECKING, Any, Protocol

from dragoman.files.streams import tolerant
from dragoman.training.meter import Clock, Meter, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Field = tuple[int, str]  # a text with its rank: in a narrow terminal the highest ranks are left out first

WIDE_BAR, NARROW_BAR, WIDE_TERMINAL = 20, 10, 80  # columns
PATIENCE_SECONDS = 2.0  # a phase that is shorter is not worth a line
LINE_SECONDS = 5.0


class Phase(Protocol):
    """One thing that takes a while."""

    def advance(self, count: int = 1) -> None:
        """Say that so much more of it is done."""
        ...


class TrainingView(Protocol):
    """Training, as it is shown."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Take in one update's record, as the log has it."""
        ...

    def validated(self, metrics: Mapping[str, float], best: Mapping[str, float]) -> None:
        """Take in a validation's outcome and the best so far."""
        ...

    def plan(self, steps: int) -> None:
        """Take in a new number of planned updates."""
        ...


class Progress(Protocol):
    """Where the parts of a run report to."""

    def phase(self, name: str, total: int | None = None, unit: str = "") -> AbstractContextManager[Phase]:
        """Show something that takes a while, such as `phase("preparing", 29000, "pairs")`."""
        ...

    def training(self, *, steps: int, done: int = 0) -> AbstractContextManager[TrainingView]:
        """Show training."""
        ...

    def note(self, text: str) -> None:
        """Say one thing in one line."""
        ...


def open_progress(stream: IO[str], *, live: bool | None = None) -> Progress:
    """Choose the display that fits a stream: live on a terminal, lines in a file or a pipe; a stream that goes away ends neither."""
    stream = tolerant(stream)
    if live if live is not None else stream.isatty():
        from rich.console import Console

        return LiveProgress(Console(file=stream))
    return PlainProgress(stream)


class TrainingMeter:
    """The figures of training: loss, speed, padding, time left, best so far."""

    def __init__(self, *, steps: int, done: int = 0, clock: Clock = time.monotonic) -> None:
        self.updates = Meter(steps, done=done, clock=clock)
        self.tokens = Meter(None, clock=clock)
        self.loss = self.padding = 0.0
        self.best: Mapping[str, float] = {}
        self.valid: Mapping[str, float] = {}

    def update(self, record: Mapping[str, Any]) -> None:
        """Take in one update's record; loss and padding are smoothed over some twenty updates."""
        seen = self.updates.done
        self.updates.advance()
        if "nll" not in record:
            return
        share = 0.05 if self.loss else 1.0
        if isinstance(record["nll"], float) and record["nll"] == record["nll"]:  # a skipped update may have none
            self.loss += share * (record["nll"] - self.loss)
        self.padding += (share if seen else 1.0) * (record["padding"] - self.padding)
        self.tokens.advance(record["tokens"])

    def figures(self) -> str:
        """Say it all in one line."""
        return " · ".join(text for _, text in self.fields())

    def fields(self) -> list[Field]:
        """Return everything in the order in which it is shown, each with its rank among what is kept in a narrow terminal."""
        fields: list[Field] = [(2, f"loss {self.loss:.3f}"), (3, f"{self.tokens.rate:,.0f} tokens/s")]
        fields.append((5, f"padding {100 * self.padding:.1f} %"))
        if self.best:
            figure = next(
                (f"{shown} {self.best[name]:.2f}" for name, shown in (("bleu", "BLEU"), ("loss", "loss")) if name in self.best), ""
            )
            fields.append((4, f"best at {int(self.best['update']):,}: {figure}".rstrip(": ")))
        return [*fields, *_time_left(self.updates)]


class QuietProgress:
    """Shows nothing: for tests, libraries and every rank but the first."""

    def advance(self, count: int = 1) -> None:
        """Ignore it."""

    def update(self, record: Mapping[str, Any]) -> None:
        """Ignore it."""

    def validated(self, metrics: Mapping[str, float], best: Mapping[str, float]) -> None:
        """Ignore it."""

    def plan(self, steps: int) -> None:
        """Ignore it."""

    def note(self, text: str) -> None:
        """Ignore it."""

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Show nothing."""
        yield self

    @contextmanager
    def training(self, *, steps: int, done: int = 0) -> Iterator[TrainingView]:
        """Show nothing."""
        yield self


class PlainProgress:
    """A line every few seconds."""

    def __init__(self, stream: IO[str], *, every: float = LINE_SECONDS, clock: Clock = time.monotonic) -> None:
        self._stream, self._every, self._clock = stream, every, clock

    def note(self, text: str) -> None:
        """Write one line at once."""
        self._stream.write(text + "\n")
        self._stream.flush()

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Write lines once it has taken two seconds, and one at its end."""
        phase = _PlainPhase(self, Meter(total, clock=self._clock), name, unit, self._every, self._clock)
        yield phase
        phase.end()

    @contextmanager
    def training(self, *, steps: int, done: int = 0) -> Iterator[TrainingView]:
        """Write a line every few seconds, and one for every validation."""
        yield _PlainTraining(self, TrainingMeter(steps=steps, done=done, clock=self._clock), self._every, self._clock)


class _PlainPhase:
    def __init__(self, owner: PlainProgress, meter: Meter, name: str, unit: str, every: float, clock: Clock) -> None:
        self._owner, self._meter, self._name, self._unit, self._every, self._clock = owner, meter, name, unit, every, clock
        self._next = clock() + PATIENCE_SECONDS

    def advance(self, count: int = 1) -> None:
        self._meter.advance(count)
        if self._clock() >= self._next:
            self._next = self._clock() + self._every
            self._owner.note(phase_line(self._name, self._meter, self._unit))

    def end(self) -> None:
        if self._meter.seconds >= PATIENCE_SECONDS:
            self._owner.note(f"{self._name}: {self._meter.done:,} {self._unit}".rstrip() + f" in {duration(self._meter.seconds)}")


class _PlainTraining:
    def __init__(self, owner: PlainProgress, meter: TrainingMeter, every: float, clock: Clock) -> None:
        self._owner, self._meter, self._every, self._clock = owner, meter, every, clock
        self._next = clock() + PATIENCE_SECONDS

    def update(self, record: Mapping[str, Any]) -> None:
        self._meter.update(record)
        if self._clock() >= self._next:
            self._next = self._clock() + self._every
            self._owner.note(f"update {self._meter.updates.done:,} of {self._meter.updates.total:,} · {self._meter.figures()}")

    def validated(self, metrics: Mapping[str, float], best: Mapping[str, float]) -> None:
        self._meter.best = best
        self._owner.note(validation_line(self._meter.updates.done, metrics, best))

    def plan(self, steps: int) -> None:
        self._meter.updates.total = steps


class LiveProgress:
    """A display that moves, drawn by rich."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn: RichProgress | None = None

    def note(self, text: str) -> None:
        """Write a line above the moving part."""
        self._console.print(text, highlight=False, markup=False)

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        """Draw a bar, and take it away at the end."""
        meter = Meter(total)
        with self._bar(name, meter, lambda: [(1, counted(meter, unit)), *_time_left(meter)]) as bar:
            yield bar
        if meter.seconds >= PATIENCE_SECONDS:
            self.note(f"{name}: {meter.done:,} {unit}".rstrip() + f" in {duration(meter.seconds)}")

    @contextmanager
    def training(self, *, steps: int, done: int = 0) -> Iterator[TrainingView]:
        """Draw the bar of training, with its figures beside it."""
        meter = TrainingMeter(steps=steps, done=done)
        with self._bar("training", meter.updates, lambda: [(1, counted(meter.updates)), *meter.fields()]) as bar:
            yield _LiveTraining(self, meter, bar)

    @contextmanager
    def _bar(self, name: str, meter: Meter, fields: Callable[[], list[Field]]) -> Iterator[_Bar]:
        """Add a bar to the one display that a terminal can hold, and start or stop that with its first and last bar."""
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        outermost = self._drawn is None
        if self._drawn is None:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=WIDE_BAR), TextColumn("{task.fields[text]}", markup=False))
            self._drawn = RichProgress(*columns, console=self._console, refresh_per_second=4, transient=True)
            self._drawn.start()
        bar = _Bar(self._drawn, self._drawn.add_task(name, total=meter.total, completed=meter.done, text=""), meter, fields)
        try:
            yield bar
        finally:
            self._drawn.remove_task(bar.task)
            if outermost:
                self._drawn.stop()
                self._drawn = None


class _Bar:
    """One bar; told of everything, it redraws four times a second."""

    def __init__(self, drawn: RichProgress, task: TaskID, meter: Meter, fields: Callable[[], list[Field]]) -> None:
        self._drawn, self.task, self._meter, self._fields = drawn, task, meter, fields
        self._next = 0.0

    def advance(self, count: int = 1) -> None:
        self._meter.advance(count)
        self.draw()

    def draw(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 0.25
            self._drawn.update(self.task, completed=self._meter.done, total=self._meter.total, text=self._text())

    def _text(self) -> str:
        """Return the fields that fit beside the name and the bar, in a terminal that may have changed its width."""
        width = self._drawn.console.width
        bar: Any = self._drawn.columns[1]
        bar.bar_width = WIDE_BAR if width >= WIDE_TERMINAL else NARROW_BAR
        name = max(len(str(task.description)) for task in self._drawn.tasks)
        return fitting(self._fields(), width - name - bar.bar_width - 2)  # and a space after each


class _LiveTraining:
    def __init__(self, owner: LiveProgress, meter: TrainingMeter, bar: _Bar) -> None:
        self._owner, self._meter, self._bar = owner, meter, bar

    def update(self, record: Mapping[str, Any]) -> None:
        self._meter.update(record)
        self._bar.draw()

    def validated(self, metrics: Mapping[str, float], best: Mapping[str, float]) -> None:
        self._meter.best = best
        self._owner.note(validation_line(self._meter.updates.done, metrics, best))

    def plan(self, steps: int) -> None:
        self._meter.updates.total = steps


def fitting(fields: list[Field], room: int) -> str:
    """Join the fields that fit into so many columns, leaving out those of the highest ranks first; one is always kept."""
    kept = list(fields)
    while len(kept) > 1 and len(" · ".join(text for _, text in kept)) > room:
        kept.remove(max(kept))
    return " · ".join(text for _, text in kept)


def _time_left(meter: Meter) -> list[Field]:
    """Return the field that is kept longest, as soon as it can be estimated."""
    return [] if meter.left is None else [(0, f"{duration(meter.left)} left")]


def counted(meter: Meter, unit: str = "") -> str:
    """Say how much of a thing is done: "1,200 of 29,000 pairs"."""
    total = f" of {meter.total:,}" if meter.total is not None else ""
    return f"{meter.done:,}{total} {unit}".rstrip()


def phase_line(name: str, meter: Meter, unit: str) -> str:
    """Say how a phase stands: count, rate, estimate."""
    left = f", {duration(meter.left)} left" if meter.left is not None else ""
    return f"{name}: {counted(meter, unit)}, {meter.rate:,.0f} a second{left}"


def validation_line(update: int, metrics: Mapping[str, float], best: Mapping[str, float]) -> str:
    """Say how a validation went."""
    figures = " · ".join(_figure(name, value) for name, value in metrics.items())
    return f"validation at {update:,}: {figures}" + (" · the best so far" if best.get("update") == update else "")


def _figure(name: str, value: float) -> str:
    """Write one metric as people read it."""
    shown = {"bleu": f"BLEU {value:.1f}", "exact": f"{100 * value:.0f} % exact"}
    return shown.get(name, f"{name} {value:.3f}")
