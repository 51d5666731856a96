"""The command's entry point: for training, signal handlers stand before anything slow is imported."""

from __future__ import annotations

import io
import os
import sys

from dragoman import stopping

# Commands whose work is worth saving when somebody stops them; the others keep Python's own Ctrl-C.
_SAVING = ("train", "demo")


def main() -> None:
    """Run the `dragoman` command."""
    # How often torch's OpenMP threads look again before they sleep; it must be set before torch is there. By default they
    # spin for milliseconds, and on a machine that does anything else besides, training is then ten times as slow (docs/log.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command in _SAVING:
        stopping.install()
    open_streams()
    from dragoman.cli.app import main as run  # here, because it must come after the handlers

    sys.exit(run())


def open_streams() -> None:
    """Write UTF-8 wherever the locale stands, as text is read, and put something harmless where a stream was closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")


if __name__ == "__main__":
    main()
