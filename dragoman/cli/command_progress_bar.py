"""Progress bars of commands: on stderr if it is a terminal, after two seconds.

Training has its own, `training/progress_display.py`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

DELAY_SECONDS = 2.0  # before a bar is shown
_BAR_WIDTH = 20  # columns: leaves space for the count and the time left at 80 columns

Item = TypeVar("Item")


class ProgressBar:
    """A progress bar, shown after DELAY_SECONDS."""

    def __init__(self, name: str, total: int | None, unit: str, stream: IO[str] | None) -> None:
        self.done = 0
        self._name, self._total, self._unit, self._stream = name, total, unit, stream
        self._progress: RichProgress | None = None
        self._has_ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(DELAY_SECONDS, self._start)
        if stream is not None and DELAY_SECONDS <= 0:
            self._start()
        elif stream is not None:
            self._timer.daemon = True
            self._timer.start()

    def advance(self, count: int = 1) -> None:
        """Add to the number of items done."""
        self.done += count
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self.done)

    def end(self) -> None:
        """Remove the bar from the terminal."""
        self._timer.cancel()
        # A terminal that was closed loses the bar, not the work.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._has_ended = True
            if self._progress is not None:
                self._progress.stop()

    def _start(self) -> None:
        """Show the bar unless the work has ended."""
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        columns: list[Any] = [TextColumn("{task.description}", markup=False)]
        if self._total is not None:
            counted = f"{{task.completed:,.0f}} of {{task.total:,.0f}} {self._unit}"
            columns += [
                BarColumn(bar_width=_BAR_WIDTH),
                TextColumn(counted, markup=False),
                TimeRemainingColumn(),
                TextColumn("left"),
            ]
        else:
            count = [TextColumn(f"{{task.completed:,.0f}} {self._unit}", markup=False)] * bool(
                self._unit
            )
            columns += [SpinnerColumn("line"), *count, TimeElapsedColumn()]
        with self._lock, contextlib.suppress(OSError, ValueError):
            if not self._has_ended:
                # By default rich would redirect results on stdout to its own console.
                console = Console(file=self._stream, force_terminal=True)
                self._progress = RichProgress(
                    *columns,
                    console=console,
                    transient=True,
                    redirect_stdout=False,
                    refresh_per_second=4,
                )
                self._progress.add_task(self._name, total=self._total, completed=self.done)
                self._progress.start()


@contextlib.contextmanager
def progress(
    name: str, total: int | None = None, unit: str = "", *, shown: bool = True
) -> Iterator[ProgressBar]:
    """Show a progress bar during the block, such as `progress("translating", 1000, "lines")`."""
    bar = ProgressBar(name, total, unit, sys.stderr if shown and is_terminal(sys.stderr) else None)
    try:
        yield bar
    finally:
        bar.end()


def track(items: Iterable[Item], bar: ProgressBar) -> Iterator[Item]:
    """Yield the items, advancing the bar by one for each."""
    for item in items:
        yield item
        bar.advance()


def is_terminal(stream: IO[str]) -> bool:
    """Whether a stream is an open terminal."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False
