"""Translation directions such as de-en, and the file pairs that they are trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# No hyphen, which separates the two languages of a direction: a variant is pt_BR.
_LANGUAGE = r"[A-Za-z]{2,8}(?:_[A-Za-z0-9]{1,8})*"
_DIRECTION = re.compile(f"({_LANGUAGE})-({_LANGUAGE})")


class Direction(NamedTuple):
    """A source and a target language."""

    source: str
    target: str

    @property
    def reverse(self) -> Direction:
        """The other direction."""
        return Direction(self.target, self.source)

    def __str__(self) -> str:
        """Return it as `source-target`."""
        return f"{self.source}-{self.target}"


def parse_direction(text: str) -> Direction | None:
    """Return the direction of a text such as de-en; None if it is no direction."""
    found = _DIRECTION.fullmatch(text)
    if found is None or found[1] == found[2]:
        return None
    return Direction(found[1], found[2])


def parse_directions(texts: Sequence[str]) -> list[Direction]:
    """Return the directions of valid texts; others are left out."""
    return [found for text in texts if (found := parse_direction(text)) is not None]


def list_languages(directions: Sequence[str]) -> list[str]:
    """Return the languages of directions, sorted."""
    return sorted({language for each in parse_directions(directions) for language in each})


def direction_problems(path: str, directions: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the directions of a setting."""
    for text in directions:
        if parse_direction(text) is None:
            yield (
                f"{path} must hold two different languages joined by a hyphen, such as de-en or "
                f"pt_BR-en; found {text!r:.60}; write them so"
            )


def file_language_problems(
    prefix: str, languages: Sequence[str], files: int, directions: Sequence[str]
) -> Iterator[str]:
    """Yield the problems of the languages of the file pairs of one corpus."""
    path = f"data.{prefix}languages"
    problems = list(direction_problems(path, languages))
    yield from problems
    if files and len(languages) != files:
        flag = prefix.replace("_", "-")
        yield (
            f"{path} must name the languages of each file pair of a multilingual model; found "
            f"{len(languages)} for {files} file pairs; use --{flag}pair de-en FILE FILE, or with "
            "--init-from --src-lang de --tgt-lang en"
        )
    elif not problems:
        for given in parse_directions(languages):
            if not {str(given), str(given.reverse)} & set(directions):
                yield (
                    f"{path} must name languages of data.directions; found {given} where those "
                    f"are {', '.join(directions)}; add it there"
                )
