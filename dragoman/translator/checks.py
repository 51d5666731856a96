"""Looking at an output for what a person would not send: answers that go round in circles, bytes that change a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # all but the tab
_LONGEST = 8  # pieces of a pattern
_TIMES = 5  # repetitions that no sentence has
_LEAST = 12  # pieces that they must take up, so that "ha ha ha ha ha" passes


def without_controls(text: str) -> str:
    """Keep a line one line, and a terminal as it was: spaces for control characters (marian-dev#365)."""
    return _CONTROLS.sub(" ", text)


class Circle(NamedTuple):
    """A pattern that an output repeats without a break."""

    pattern: tuple[int, ...]
    times: int


def circle(tokens: Sequence[int]) -> Circle | None:
    """Find the first short pattern that is written again and again, if there is one."""
    if len(tokens) - len(set(tokens)) < _LEAST - 2:  # what every circle repeats at least: the dearest check is the one that is not made
        return None
    for length in range(1, _LONGEST + 1):
        run = 0
        for at in range(length, len(tokens)):
            run = run + 1 if tokens[at] == tokens[at - length] else 0
            times = run // length + 1
            if times >= _TIMES and run + length >= _LEAST:
                start = at - run - length + 1
                while at + 1 < len(tokens) and tokens[at + 1] == tokens[at + 1 - length]:
                    at, run = at + 1, run + 1
                return Circle(tuple(tokens[start : start + length]), run // length + 1)
    return None
