"""Requests to stop, from signals, a clock or a test: noticed at once, acted on where a training loop can afford it.

The first SIGTERM, SIGINT or SIGHUP asks the loop to finish its update, publish and leave with exit code 75. The
second asks it to leave the running update and to publish nothing. The third meets the system's default action.
SIGUSR1 asks for a checkpoint now, and training goes on.

Only the standard library is imported, so that handlers stand before torch's slow import begins: a signal that
arrives in that time is kept, not fatal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from dragoman.errors import StoppedError

_Handler = Callable[[int, FrameType | None], Any] | int | None

_STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)
_CHECKPOINT_SIGNALS = tuple(getattr(signal, name) for name in ("SIGUSR1",) if hasattr(signal, name))


class _SignalState:
    """What has been asked of this process; one a process, since signals are."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.reasons: list[str] = []
        self.checkpoint = False
        self.previous: dict[signal.Signals, _Handler] = {}
        self.pipe: tuple[int, int] | None = None
        self.previous_wakeup = -1


_state = _SignalState()


def install_handlers() -> None:
    """Put the handlers in place; a second call changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            f"stopping.install() must run in the main thread; found {threading.current_thread().name}"
        )
    if _state.pipe is not None:
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    _state.pipe = (reader, writer)
    # The interpreter's C-level handler writes the byte, so that a waiting thread wakes even while the main one
    # is inside a long native call and cannot run the Python handler yet.
    _state.previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _STOP_SIGNALS + _CHECKPOINT_SIGNALS:
        current = signal.getsignal(number)
        # `nohup` and a shell's background jobs start us with SIGHUP or SIGINT ignored: that is somebody's wish.
        if current is signal.SIG_IGN:
            continue
        _state.previous[number] = current
        signal.signal(number, _on_stop if number in _STOP_SIGNALS else _on_checkpoint)


def uninstall_handlers() -> None:
    """Put back the handlers that stood before, and forget every request: for tests."""
    for number, handler in _state.previous.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    if _state.pipe is not None:
        signal.set_wakeup_fd(_state.previous_wakeup)
        for descriptor in _state.pipe:
            os.close(descriptor)
    _state.clear()


def restore_handlers() -> list[str]:
    """Take back the signals whose handlers a library replaced, and name them: called now and then by the loop."""
    taken = []
    for number in _state.previous:
        ours = _on_stop if number in _STOP_SIGNALS else _on_checkpoint
        # After the second request the default action stands on purpose.
        if signal.getsignal(number) is not ours and not (
            number in _STOP_SIGNALS and len(_state.reasons) > 1
        ):
            signal.signal(number, ours)
            taken.append(number.name)
    return taken


def request_stop(reason: str) -> None:
    """Ask for a stop without a signal, as a time limit does; safe from any thread."""
    _state.reasons.append(reason)
    _wake()


def stop_requested() -> bool:
    """Say whether somebody asked to stop."""
    return bool(_state.reasons)


def is_stop_urgent() -> bool:
    """Say whether somebody asked twice: leave the update in progress and publish nothing."""
    return len(_state.reasons) > 1


def stop_reason() -> str:
    """Name what asked, in order, such as "SIGTERM" or "SIGINT, SIGINT"; empty when nothing did."""
    return ", ".join(_state.reasons)


def checkpoint_requested() -> bool:
    """Say whether a checkpoint is wanted now."""
    return _state.checkpoint


def clear_checkpoint_request() -> None:
    """Note that the wanted checkpoint has been published."""
    _state.checkpoint = False


def wait_for_stop(seconds: float) -> bool:
    """Sleep, but wake at a request; says whether a stop was requested."""
    if _state.pipe is None:
        threading.Event().wait(seconds)
    elif not stop_requested():
        select.select([_state.pipe[0]], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(_state.pipe[0], 4096)
    return stop_requested()


def raise_if_stop_requested() -> None:
    """Raise StoppedError out of a long preparation, where there is nothing to finish or publish yet."""
    if stop_requested():
        raise StoppedError(
            f"stopped by {stop_reason()} while preparing, before training",
            found="",
            fix="run the same command again",
        )


def _on_stop(number: int, frame: FrameType | None) -> None:
    """Count the request; from the third on the system's own action applies."""
    _state.reasons.append(signal.Signals(number).name)
    if len(_state.reasons) > 1:
        for each in _STOP_SIGNALS:
            if each in _state.previous:
                signal.signal(each, signal.SIG_DFL)


def _on_checkpoint(number: int, frame: FrameType | None) -> None:
    """Note that a checkpoint is wanted."""
    _state.checkpoint = True


def _wake() -> None:
    """Write the wake-up byte that a signal would have written."""
    if _state.pipe is not None:
        with contextlib.suppress(BlockingIOError):
            os.write(_state.pipe[1], b"\0")
