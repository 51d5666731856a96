"""The command's entry point: for training, signal handlers stand before anything slow is imported."""

from __future__ import annotations

import signal

# Python would answer a Ctrl-C that comes before our own handlers with the traceback of whatever it was importing: until
# then the process just ends. Nothing has been written yet.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import io
import os
import sys

from dragoman.runtime import signals
from dragoman.runtime.standard_streams import make_tolerant, open_missing_descriptors

# Commands whose work is worth saving when somebody stops them; the others keep Python's own Ctrl-C.
_SAVING = ("train", "demo")


def main() -> None:
    """Run the `dragoman` command."""
    open_missing_descriptors()  # before anything is opened, which would take their places
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command in _SAVING:
        signals.install_handlers()
    elif signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # How often torch's OpenMP threads look again before they sleep; it must be set before torch is there. By default they
    # spin for milliseconds, and on a machine that does anything else besides, training is then ten times as slow (docs/log.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    open_streams(keep_working=command in _SAVING)
    from dragoman.cli.app import main as run  # here, because it must come after the handlers

    sys.exit(run())


def open_streams(*, keep_working: bool = False) -> None:
    """Write UTF-8 whatever the locale is, and let no stream that goes away end a command.

    What is shown on stderr is never worth ending for. A closed stdout ends a command whose results nobody reads, unless it
    is to `keep_working` for what it saves.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stderr = make_tolerant(sys.stderr)
    if keep_working:
        sys.stdout = make_tolerant(sys.stdout, "stdout")


if __name__ == "__main__":
    main()
