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

A message may quote what a stranger's file says, so it is made `printable` when it is rendered: it cannot move the cursor,
reverse the direction of writing, begin another line or fill the screen.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

MAX_MESSAGE_CHARACTERS = (
    2000  # of each part of a message; a path may have 4096, and then its middle is left out
)
MAX_LISTED_PROBLEMS = 50  # of a configuration that are listed; the rest are counted
_MAX_NAME_CHARACTERS = 100  # a longer name resembles none of ours, and comparing takes its time
# C0 and C1 controls, DEL, surrogates, directions of writing (Unicode's bidirectional formatting) and line separators.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNPRINTABLE_EXCEPT_LINES = re.compile(
    _UNPRINTABLE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f")
)


def escape_unprintable(text: str, *, lines: bool = False, most: int | None = None) -> str:
    """Return a text that a terminal shows as it is: controls are escaped as Python writes them.

    With `lines`, line ends and tabs stay. A text longer than `most` loses its middle.
    """
    if most is not None and len(text) > most:
        text = f"{text[: most * 3 // 4]} … {text[len(text) - most // 4 :]}"
    pattern = _UNPRINTABLE_EXCEPT_LINES if lines else _UNPRINTABLE
    return pattern.sub(
        lambda found: found.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text
    )


def escape_json_controls(text: str) -> str:
    """Return the same JSON with the characters that control a terminal escaped; they can only stand inside of strings."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def encode_json(text: str) -> bytes:
    """Return JSON as UTF-8, with lone surrogates escaped: they are the bytes of file names that are not UTF-8."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text).encode()


class DragomanError(Exception):
    """Something a person can put right: what must hold, what was found, what to do."""

    exit_code = 2

    def __init__(self, must: str, *, found: str, fix: str) -> None:
        super().__init__(must, found, fix)
        self.must, self.found, self.fix = must, found, fix

    def __str__(self) -> str:
        """Join the three parts into the line that a person reads."""
        return "; ".join(
            escape_unprintable(str(part), most=MAX_MESSAGE_CHARACTERS)
            for part in (self.must, f"found {self.found}", self.fix)
        )


class ConfigError(DragomanError):
    """A configuration that cannot be run, with all its problems at once."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(
            "the configuration must hold together",
            found=f"{len(problems)} problem{'s' if len(problems) != 1 else ''}",
            fix="; ".join(problems[:MAX_LISTED_PROBLEMS]),
        )
        self.problems = tuple(problems)

    def __str__(self) -> str:
        """One problem stands alone; several are numbered, a line each."""
        shown = [
            escape_unprintable(problem, most=MAX_MESSAGE_CHARACTERS)
            for problem in self.problems[:MAX_LISTED_PROBLEMS]
        ]
        if len(self.problems) == 1:
            return shown[0]
        more = len(self.problems) - len(shown)
        rest = [f"  - and {more:,} more"] if more else []
        return "\n".join(
            [
                f"{len(self.problems)} problems in the configuration:",
                *(f"  - {each}" for each in shown),
                *rest,
            ]
        )


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
    """Stopped because somebody asked; what was done is saved. Nothing was `found` wrong where that is empty."""

    exit_code = 75

    def __str__(self) -> str:
        """State what happened and how to resume; what was found only where something was."""
        return super().__str__() if self.found else f"{self.must}; {self.fix}"


class PermissionDeniedError(DragomanError):
    """The file system does not let us."""

    exit_code = 77


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Suggest the nearest right name, or list them all: the end of a message about a wrong name."""
    known = sorted(names)
    close = (
        difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if len(name) <= _MAX_NAME_CHARACTERS
        else []
    )
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"


def suggest_names(name: str, names: Iterable[str]) -> str:
    """Suggest the three nearest names where there are too many to list; those that hold what was written come first."""
    written = name[:_MAX_NAME_CHARACTERS].lower()

    def distance(known: str) -> tuple[bool, float]:
        return not (written and written in known.lower()), -difflib.SequenceMatcher(
            None, written, known.lower()
        ).ratio()

    first, second, third = sorted(names, key=distance)[:3]
    return f"did you mean {first}, {second} or {third}?"
