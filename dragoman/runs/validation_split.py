"""A corpus in two parts: some pairs for validation when nobody gave any, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dragoman.data.corpus import BadPair, Corpus, SentencePair
from dragoman.data.text_stream import TextStream

HOLD_OUT_EVERY = 50  # one pair in fifty is held out ...
HOLD_OUT_WITHIN = 50_000  # ... of the first fifty thousand: a thousand pairs at the most


class SplitCorpus(Corpus):
    """The pairs of another corpus that are held out, or those that are not: decided by the line's number alone."""

    def __init__(self, whole: Corpus, *, held_out: bool) -> None:
        super().__init__(max_line_bytes=whole.max_line_bytes, on_bad_line=whole.on_bad_line)
        self._corpus, self._held_out = whole, held_out

    @property
    def files(self) -> list[Path]:
        """The whole corpus's files."""
        return self._corpus.files

    @property
    def streams(self) -> list[TextStream]:
        """How far the reading of the whole is."""
        return self._corpus.streams

    @streams.setter
    def streams(self, streams: list[TextStream]) -> None:
        """Leave it to the whole, which does the reading."""

    def describe_line(self, number: int) -> int | str:
        """Return where the pair stands in the whole corpus."""
        return self._corpus.describe_line(number)

    def part_counts(self) -> list[int]:
        """Return the pairs of each of the whole corpus's parts."""
        return self._corpus.part_counts()

    def fraction_read(self) -> float:
        """Return the fraction of the whole that was read."""
        return self._corpus.fraction_read()

    def layout(self) -> dict[str, object]:
        """The whole's layout, and which part this is."""
        return {
            **self._corpus.layout(),
            "held_out": [self._held_out, HOLD_OUT_EVERY, HOLD_OUT_WITHIN],
        }

    def records(self) -> Iterator[SentencePair | BadPair]:
        """Go through this part's pairs."""
        for record in self._corpus.records():
            if is_held_out(record.number) == self._held_out:
                yield record
            elif self._held_out and record.number > HOLD_OUT_WITHIN:
                return


def is_held_out(number: int) -> bool:
    """Say whether the pair of a line, counted from 1, is for validation."""
    return number <= HOLD_OUT_WITHIN and number % HOLD_OUT_EVERY == 0
