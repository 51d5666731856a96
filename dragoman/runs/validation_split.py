"""Split of a corpus into training examples and held-out validation examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from dragoman.data.parallel_corpus import BadPair, Corpus, CorpusView, SentencePair

HOLD_OUT_EVERY = 50  # one pair in fifty is held out ...
HOLD_OUT_WITHIN = 50_000  # ... of the first fifty thousand: at most a thousand pairs


class SplitCorpus(CorpusView):
    """The held-out pairs of a corpus, or the others; the line number decides."""

    def __init__(self, corpus: Corpus, *, held_out: bool) -> None:
        super().__init__(corpus)
        self._held_out = held_out

    def part_counts(self) -> list[int]:
        """Return the number of pairs of each part of the corpus."""
        return self._corpus.part_counts()

    def layout(self) -> dict[str, object]:
        """Return the layout of the corpus and which side of the split this is."""
        return {
            **self._corpus.layout(),
            "held_out": [self._held_out, HOLD_OUT_EVERY, HOLD_OUT_WITHIN, "hashed"],
        }

    def records(self) -> Iterator[SentencePair | BadPair]:
        """Yield the pairs of this side of the split."""
        for record in self._corpus.records():
            if is_held_out(record.number) == self._held_out:
                yield record
            elif self._held_out and record.number > HOLD_OUT_WITHIN:
                return


def is_held_out(
    number: int, *, every: int = HOLD_OUT_EVERY, within: int = HOLD_OUT_WITHIN, seed: int = 0
) -> bool:
    """Whether an example, counted from 1, is held out for validation.

    One in each block of `every` is held out; a hash of the block and the seed chooses it:
    every n-th would be all of one class in a file whose classes alternate.
    """
    if number > within:
        return False
    block, position = divmod(number - 1, every)
    digest = hashlib.blake2b(f"{seed} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % every == position
