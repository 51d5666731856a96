"""Entry point of the `dragoman` command; training installs its signal handlers before torch is
imported.
"""

from __future__ import annotations

import signal

# A Ctrl-C during the imports would print a traceback of whatever is being imported. Until our own
# handlers are installed it ends the process; nothing has been written yet.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import io
import os
import sys

from dragoman.runtime import signals
from dragoman.runtime.tolerant_streams import make_tolerant, open_missing_descriptors

# Commands that save their work when they are stopped; the others keep Python's own Ctrl-C.
_SAVING = ("train", "demo", "tune")


def main() -> None:
    """Run the `dragoman` command."""
    open_missing_descriptors()  # before any file is opened, which would take a standard descriptor
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command in _SAVING:
        signals.install_handlers()
    elif signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Spin count of torch's OpenMP threads, which must be set before torch is imported. By default
    # they spin for milliseconds, and on a busy machine training is ten times as slow (docs/log.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    open_streams(keep_working=command in _SAVING)
    from dragoman.cli.app import main as run  # after the handlers

    sys.exit(run())


def open_streams(*, keep_working: bool = False) -> None:
    """Set the standard streams to UTF-8 and make them tolerate a closed reader.

    Errors on stderr never end a command. A closed stdout ends a command whose results are not read,
    unless `keep_working` is set because the command saves its results in files.
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
