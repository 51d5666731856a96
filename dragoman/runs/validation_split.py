"""Split of a corpus into training pairs and held-out validation pairs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dragoman.data.corpus import BadPair, Corpus, SentencePair
from dragoman.data.file_stream import FileStream

HOLD_OUT_EVERY = 50  # one pair in fifty is held out ...
HOLD_OUT_WITHIN = 50_000  # ... of the first fifty thousand: at most a thousand pairs


class SplitCorpus(Corpus):
    """The held-out pairs of a corpus, or the others; the line number decides."""

    def __init__(self, corpus: Corpus, *, held_out: bool) -> None:
        super().__init__(max_line_bytes=corpus.max_line_bytes, on_bad_line=corpus.on_bad_line)
        self._corpus, self._held_out = corpus, held_out

    @property
    def files(self) -> list[Path]:
        """The files of the corpus."""
        return self._corpus.files

    @property
    def streams(self) -> list[FileStream]:
        """The open streams of the corpus."""
        return self._corpus.streams

    @streams.setter
    def streams(self, streams: list[FileStream]) -> None:
        """Ignore the assignment: the corpus itself opens its streams."""

    def describe_line(self, number: int) -> int | str:
        """Return the position of a pair in the corpus."""
        return self._corpus.describe_line(number)

    def part_counts(self) -> list[int]:
        """Return the number of pairs of each part of the corpus."""
        return self._corpus.part_counts()

    def fraction_read(self) -> float:
        """Return the fraction of the corpus read so far."""
        return self._corpus.fraction_read()

    def layout(self) -> dict[str, object]:
        """Return the layout of the corpus and which side of the split this is."""
        return {
            **self._corpus.layout(),
            "held_out": [self._held_out, HOLD_OUT_EVERY, HOLD_OUT_WITHIN],
        }

    def records(self) -> Iterator[SentencePair | BadPair]:
        """Yield the pairs of this side of the split."""
        for record in self._corpus.records():
            if is_held_out(record.number) == self._held_out:
                yield record
            elif self._held_out and record.number > HOLD_OUT_WITHIN:
                return


def is_held_out(number: int) -> bool:
    """Whether the pair of a line, counted from 1, is held out for validation."""
    return number <= HOLD_OUT_WITHIN and number % HOLD_OUT_EVERY == 0
