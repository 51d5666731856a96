"""A corpus in two parts: some pairs for validation when nobody gave any, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dragoman.data.corpus import BadPair, Corpus, Pair
from dragoman.data.streams import TextStream

EVERY = 50  # one pair in fifty is held out ...
WITHIN = 50_000  # ... of the first fifty thousand: a thousand pairs at the most


class HeldOut(Corpus):
    """The pairs of another corpus that are held out, or those that are not: decided by the line's number alone."""

    def __init__(self, whole: Corpus, *, held_out: bool) -> None:
        super().__init__(max_line_bytes=whole.max_line_bytes, on_bad_line=whole.on_bad_line)
        self._whole, self._held_out = whole, held_out

    @property
    def files(self) -> list[Path]:
        """The whole corpus's files."""
        return self._whole.files

    @property
    def streams(self) -> list[TextStream]:
        """How far the reading of the whole is."""
        return self._whole.streams

    @streams.setter
    def streams(self, streams: list[TextStream]) -> None:
        """Leave it to the whole, which does the reading."""

    def name_line(self, number: int) -> int | str:
        """Return where the pair stands in the whole corpus."""
        return self._whole.name_line(number)

    def part_counts(self) -> list[int]:
        """Return the pairs of each of the whole corpus's parts."""
        return self._whole.part_counts()

    def share_read(self) -> float:
        """Return the fraction of the whole that was read."""
        return self._whole.share_read()

    def layout(self) -> dict[str, object]:
        """The whole's layout, and which part this is."""
        return {**self._whole.layout(), "held_out": [self._held_out, EVERY, WITHIN]}

    def records(self) -> Iterator[Pair | BadPair]:
        """Go through this part's pairs."""
        for record in self._whole.records():
            if is_held_out(record.number) == self._held_out:
                yield record
            elif self._held_out and record.number > WITHIN:
                return


def is_held_out(number: int) -> bool:
    """Say whether the pair of a line, counted from 1, is for validation."""
    return number <= WITHIN and number % EVERY == 0
