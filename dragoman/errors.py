"""Exceptions of Dragoman, as a tree.

    DragomanError                 the user can correct it; exit 2
    ├── ConfigError               one or more invalid settings; all problems are listed
    ├── DataError                 a corpus, a line of it, or a text file
    ├── BundleError               a directory that is not a model, or an incomplete one
    ├── CorruptError              files that differ from what was written; exit 65
    ├── DivergedError             non-finite loss or weights in training; exit 70
    ├── LockedError               another process owns the directory; exit 73
    ├── DiskError                 reading or writing failed, or the disk is full; exit 74
    ├── StoppedError              stopped on request, progress saved; exit 75
    └── PermissionDeniedError     no permission; exit 77

A message has three parts: what must hold, what was found, what to do. The command line prints it as
one line and exits with the class's exit code; the codes follow the BSD sysexits.

A message may quote an untrusted file, so control characters are escaped when it is rendered: it
cannot move the cursor, reverse the writing direction, start another line or fill the screen.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

# Characters of each part of a message; longer parts lose their middle.
MAX_MESSAGE_CHARACTERS = 2000
MAX_LISTED_PROBLEMS = 50  # problems of a configuration that are listed; the rest are counted
_MIN_SIMILARITY = 0.6  # of a name that is suggested, as in difflib
_MAX_NAME_CHARACTERS = 100  # longer names are not compared with known names, which would be slow
# C0 and C1 controls, DEL, surrogates, bidirectional formatting and line separators.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_UNPRINTABLE_EXCEPT_LINES = re.compile(
    _UNPRINTABLE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f")
)


def escape_unprintable(text: str, *, lines: bool = False, most: int | None = None) -> str:
    """Return a text with control characters escaped as Python writes them.

    With `lines`, line ends and tabs are kept. A text longer than `most` loses its middle.
    """
    if most is not None and len(text) > most:
        text = f"{text[: most * 3 // 4]} … {text[len(text) - most // 4 :]}"
    pattern = _UNPRINTABLE_EXCEPT_LINES if lines else _UNPRINTABLE
    return pattern.sub(
        lambda found: found.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text
    )


def escape_json_controls(text: str) -> str:
    """Return JSON with terminal control characters escaped; they occur only inside strings."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def encode_json(text: str) -> bytes:
    """Return JSON as UTF-8 with lone surrogates (from undecodable file names) escaped."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text).encode()


class DragomanError(Exception):
    """An error that the user can correct: what must hold, what was found, what to do."""

    exit_code = 2

    def __init__(self, must: str, *, found: str, fix: str) -> None:
        super().__init__(must, found, fix)
        self.must, self.found, self.fix = must, found, fix

    def __str__(self) -> str:
        """Return the three parts as one line."""
        return "; ".join(
            escape_unprintable(str(part), most=MAX_MESSAGE_CHARACTERS)
            for part in (self.must, f"found {self.found}", self.fix)
        )


class ConfigError(DragomanError):
    """An invalid configuration, with all its problems."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(
            "the configuration must be consistent",
            found=f"{len(problems)} problem{'s' if len(problems) != 1 else ''}",
            fix="; ".join(problems[:MAX_LISTED_PROBLEMS]),
        )
        self.problems = tuple(problems)

    def __str__(self) -> str:
        """Return the only problem, or several as a list with one line each."""
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
    """A corpus or text file that cannot be used."""


class BundleError(DragomanError):
    """A directory that is not a complete model."""


class CorruptError(DragomanError):
    """Files that differ from what was written, or a corpus that changed during a run."""

    exit_code = 65


class DivergedError(DragomanError):
    """Training with a non-finite loss or weights that did not recover."""

    exit_code = 70


class LockedError(DragomanError):
    """A directory that another running process owns."""

    exit_code = 73


class DiskError(DragomanError):
    """Reading or writing failed, or the disk is full."""

    exit_code = 74


class StoppedError(DragomanError):
    """Stopped on request with progress saved; `found` may be empty."""

    exit_code = 75

    def __str__(self) -> str:
        """Return what happened and how to resume, with `found` unless it is empty."""
        return super().__str__() if self.found else f"{self.must}; {self.fix}"


class PermissionDeniedError(DragomanError):
    """The file system denies permission."""

    exit_code = 77


def suggest_name(name: str, names: Iterable[str], *, listed: bool = False) -> str:
    """Return a suggestion for an unknown name: the nearest known name, or all of them.

    `listed`: whether the message lists them already.
    """
    known = sorted(names)
    close = (
        difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if len(name) <= _MAX_NAME_CHARACTERS
        else []
    )
    if close:
        return f"did you mean {close[0]}?"
    return f"choose one of {'them' if listed else ', '.join(known)}"


def suggest_names(name: str, names: Iterable[str]) -> str:
    """Return a suggestion of up to three near names, those that contain the name first; or ""."""
    written = name[:_MAX_NAME_CHARACTERS].lower()

    def similarity(known: str) -> tuple[bool, float]:
        ratio = difflib.SequenceMatcher(None, written, known.lower()).ratio()
        return bool(written) and written in known.lower(), ratio

    ranked = sorted(names, key=similarity, reverse=True)[:3]
    return suggest_any([each for each in ranked if max(similarity(each)) >= _MIN_SIMILARITY])


def suggest_any(near: Sequence[str]) -> str:
    """Return a suggestion of these names, or "" if there are none."""
    if not near:
        return ""
    return f"did you mean {' or '.join([', '.join(near[:-1]), near[-1]][len(near) < 2 :])}?"
