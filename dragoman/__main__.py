"""The command's entry point: for training, signal handlers stand before anything slow is imported."""

from __future__ import annotations

import sys

from dragoman import stopping

# Commands whose work is worth saving when somebody stops them; the others keep Python's own Ctrl-C.
_SAVING = ("train", "demo")


def main() -> None:
    """Run the `dragoman` command."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command in _SAVING:
        stopping.install()
    from dragoman.cli.app import main as run  # here, because it must come after the handlers

    sys.exit(run())


if __name__ == "__main__":
    main()
