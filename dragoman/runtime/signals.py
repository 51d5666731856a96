"""Stop and checkpoint requests from signals, a time limit or a test.

The first SIGTERM, SIGINT or SIGHUP requests a stop: the trainer finishes its step, saves a
checkpoint and exits with code 75 (`errors.StoppedError`, raised by `runs/training_run.py`; every
exit code is returned by `cli/app.py`). The second is urgent: the step in progress is abandoned and
nothing is saved. The third has the system's default action. SIGUSR1 requests a checkpoint; training
continues.

Only the standard library is imported, so that the handlers are installed before torch's slow
import.
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
    """Requests of this process; one instance, because signals are per process."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset all requests."""
        self.reasons: list[str] = []
        self.checkpoint = False
        self.termination: int | None = None
        self.previous: dict[signal.Signals, _Handler] = {}
        self.pipe: tuple[int, int] | None = None
        self.previous_wakeup = -1


_state = _SignalState()


def install_handlers() -> None:
    """Install the signal handlers; a second call has no effect."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "install_handlers() must run in the main thread; found "
            f"{threading.current_thread().name}"
        )
    if _state.pipe is not None:
        return
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    _state.pipe = (reader, writer)
    # The interpreter's C-level handler writes the byte, so that a waiting thread wakes even while
    # the main thread is inside a long native call and cannot run the Python handler.
    _state.previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _STOP_SIGNALS + _CHECKPOINT_SIGNALS:
        current = signal.getsignal(number)
        # `nohup` and background jobs start us with SIGHUP or SIGINT ignored on purpose.
        if current is signal.SIG_IGN:
            continue
        _state.previous[number] = current
        signal.signal(number, _on_stop if number in _STOP_SIGNALS else _on_checkpoint)


def uninstall_handlers() -> None:
    """Restore the previous handlers and reset all requests; for tests."""
    for number, handler in _state.previous.items():
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    if _state.pipe is not None:
        signal.set_wakeup_fd(_state.previous_wakeup)
        for descriptor in _state.pipe:
            os.close(descriptor)
    _state.clear()


def restore_handlers() -> list[str]:
    """Reinstall handlers that a library replaced, and return their signals' names."""
    taken = []
    for number in _state.previous:
        ours = _on_stop if number in _STOP_SIGNALS else _on_checkpoint
        # After the second request the default action is intended.
        if signal.getsignal(number) is not ours and not (
            number in _STOP_SIGNALS and len(_state.reasons) > 1
        ):
            signal.signal(number, ours)
            taken.append(number.name)
    return taken


def request_stop(reason: str) -> None:
    """Request a stop without a signal, as a time limit does; safe from any thread."""
    _state.reasons.append(reason)
    _wake()


def stop_requested() -> bool:
    """Whether a stop was requested."""
    return bool(_state.reasons)


def is_stop_urgent() -> bool:
    """Whether a stop was requested twice: abandon the step in progress and save nothing."""
    return len(_state.reasons) > 1


def stop_reason() -> str:
    """Return the requests in order, such as "SIGTERM" or "SIGINT, SIGINT"; "" if there are none."""
    return ", ".join(_state.reasons)


def checkpoint_requested() -> bool:
    """Whether a checkpoint was requested."""
    return _state.checkpoint


def clear_checkpoint_request() -> None:
    """Clear the checkpoint request after saving."""
    _state.checkpoint = False


def wait_for_stop(seconds: float) -> bool:
    """Sleep until a request arrives or the time is over; return whether a stop was requested."""
    if _state.pipe is None:
        threading.Event().wait(seconds)
    elif not stop_requested():
        select.select([_state.pipe[0]], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(_state.pipe[0], 4096)
    return stop_requested()


def raise_if_stop_requested() -> None:
    """Raise StoppedError if a stop was requested, before training has anything to save."""
    if stop_requested():
        raise StoppedError(
            f"stopped by {stop_reason()} while preparing, before training",
            found="",
            fix="run the same command again",
        )


def interrupt_on_termination() -> None:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt, so that temporary files are removed.

    `end_by_signal` ends the process as the signal would have. A second signal has the system's
    default action.
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
            signal.signal(number, _on_termination)


def end_by_signal() -> None:
    """End the process by the signal that `interrupt_on_termination` turned into an exception."""
    if _state.termination is not None:
        os.kill(os.getpid(), _state.termination)


def _on_termination(number: int, frame: FrameType | None) -> None:
    """Record the signal, restore its default action and unwind the stack."""
    _state.termination = number
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _on_stop(number: int, frame: FrameType | None) -> None:
    """Count the request; from the third on the system's default action applies."""
    _state.reasons.append(signal.Signals(number).name)
    if len(_state.reasons) > 1:
        for each in _STOP_SIGNALS:
            if each in _state.previous:
                signal.signal(each, signal.SIG_DFL)


def _on_checkpoint(number: int, frame: FrameType | None) -> None:
    """Record a checkpoint request."""
    _state.checkpoint = True


def _wake() -> None:
    """Write the wake-up byte that a signal would have written."""
    if _state.pipe is not None:
        with contextlib.suppress(BlockingIOError):
            os.write(_state.pipe[1], b"\0")
