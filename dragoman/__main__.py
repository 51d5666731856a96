"""Entry point of the `dragoman` command; training installs its signal handlers before torch is
imported.
"""

from __future__ import annotations

import signal

# A Ctrl-C during the imports would print a traceback of whatever is being imported. Until our own
# handlers are installed it ends the process; nothing has been written yet.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import atexit
import io
import os
import sys
import threading
from typing import NoReturn

from dragoman.runtime import signals
from dragoman.runtime.fault_tolerant_stdio import make_tolerant, open_missing_descriptors

# Commands that save their work when they are stopped; the others keep Python's own Ctrl-C.
_SAVING = ("train", "demo", "tune")


def main() -> None:
    """Run the `dragoman` command."""
    open_missing_descriptors()  # before any file is opened, which would take a standard descriptor
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command in _SAVING:
        signals.install_handlers()
    # Spin count of torch's OpenMP threads, which must be set before torch is imported. By default
    # they spin for milliseconds, and on a busy machine training is ten times as slow (docs/log.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    open_streams(keep_working=command in _SAVING)
    from dragoman.cli.app import INTERRUPTED  # after the handlers
    from dragoman.cli.app import main as run

    if command not in _SAVING and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # `run` reports it in one line
    if command not in _SAVING:
        signals.interrupt_on_termination()
    code = run()
    if command in _SAVING:
        sys.exit(code)
    if code == INTERRUPTED:
        signals.end_by_signal()
    exit_without_teardown(code)


def exit_without_teardown(code: int) -> NoReturn:
    """Exit like sys.exit, but leave the memory of the process to the operating system.

    Clearing torch's modules takes the interpreter 0.3 s, a fifth of a short command. Exit handlers
    run and the streams are flushed; with other threads alive it is sys.exit.
    """
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    if any(not each.daemon for each in others):
        sys.exit(code)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        if not code:  # not reported yet: sys.exit does
            sys.exit(code)
    os._exit(code)


def open_streams(*, keep_working: bool = False) -> None:
    """Set the standard streams to UTF-8 and make them tolerate a closed reader.

    Errors on stderr never end a command. A closed stdout ends a command that writes results to it,
    unless `keep_working` is set because the command saves its results in files.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            path = 1 if name == "stdout" and not keep_working else os.devnull
            setattr(sys, name, open(path, mode, encoding="utf-8", closefd=path != 1))  # noqa: SIM115 - it stays open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stderr = make_tolerant(sys.stderr)
    if keep_working:
        sys.stdout = make_tolerant(sys.stdout, "stdout")


if __name__ == "__main__":
    main()
