"""What can go wrong, as a family.

    DragomanError                 a person can put it right; exit 2
    ├── ConfigError               a setting, or several: every problem is listed
    ├── DataError                 a corpus, a line of it, or a text file
    ├── BundleError               a directory that is not a model, or not a whole one
    ├── CorruptError              what was written can no longer be trusted; exit 65
    ├── DivergedError             training left the finite numbers; exit 70
    ├── LockedError               another process owns the directory; exit 73
    ├── DiskError                 reading or writing failed, or the disk is full; exit 74
    ├── StoppedError              stopped on request and saved; exit 75
    └── ForbiddenError            no permission; exit 77

Every message has three parts: what must hold, what was found, what to do. The command line prints it as one
line and ends with the class's exit code; the exit codes follow the BSD sysexits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class DragomanError(Exception):
    """Something a person can put right: what must hold, what was found, what to do."""

    exit_code = 2

    def __init__(self, must: str, *, found: str, fix: str) -> None:
        super().__init__(must, found, fix)
        self.must, self.found, self.fix = must, found, fix

    def __str__(self) -> str:
        """Join the three parts into the line that a person reads."""
        return f"{self.must}; found {self.found}; {self.fix}"


class ConfigError(DragomanError):
    """A configuration that cannot be run, with all its problems at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(
            "the configuration must hold together",
            found=f"{len(problems)} problem{'s' if len(problems) != 1 else ''}",
            fix="; ".join(problems),
        )
        self.problems = tuple(problems)

    def __str__(self) -> str:
        """One problem stands alone; several are numbered, a line each."""
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join([f"{len(self.problems)} problems in the configuration:", *(f"  - {p}" for p in self.problems)])


class DataError(DragomanError):
    """A corpus or text file that cannot be used as it is."""


class BundleError(DragomanError):
    """A directory that is not a whole model."""


class CorruptError(DragomanError):
    """Files that no longer hold what was written into them, or a corpus that changed under a run."""

    exit_code = 65


class DivergedError(DragomanError):
    """Training that left the finite numbers and would not come back."""

    exit_code = 70


class LockedError(DragomanError):
    """A directory that a living process owns."""

    exit_code = 73


class DiskError(DragomanError):
    """Reading or writing failed, or there is no room."""

    exit_code = 74


class StoppedError(DragomanError):
    """Stopped because somebody asked; what was done is saved."""

    exit_code = 75


class ForbiddenError(DragomanError):
    """The file system does not let us."""

    exit_code = 77


def nearest(name: str, names: Iterable[str]) -> str:
    """Suggest the nearest right name, or list them all: the end of a message about a wrong name."""
    known = sorted(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"


def nearest_few(name: str, names: Iterable[str]) -> str:
    """Suggest the three nearest names where there are too many to list; those that hold what was written come first."""
    written = name.lower()

    def distance(known: str) -> tuple[bool, float]:
        return not (written and written in known.lower()), -difflib.SequenceMatcher(None, written, known.lower()).ratio()

    first, second, third = sorted(names, key=distance)[:3]
    return f"did you mean {first}, {second} or {third}?"
