"""A shortlist: for each source piece the target pieces that came up beside it, so that few of a vocabulary need to be scored.

The output layer is a quarter to a third of a translation's work. What a sentence may use are the pieces listed for its own, and the
most frequent ones of all; so the result still does not depend on the batch, but now and then on the shortlist.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.data.corpus import Corpus
from dragoman.engines.cpu.laying import Some
from dragoman.errors import DataError
from dragoman.text.specials import SPECIALS
from dragoman.text.tokenizer import Tokenizers

COMMON, EACH = 100, 50  # the most frequent target pieces, and those listed for a source piece
MOST_PAIRS = 200_000  # that are counted: more change little
_BLOCK = 1024  # lines that are cut into pieces at once
_LONGEST = 256  # pieces of a side
_AT_ONCE = 1 << 22  # co-occurrences that are held uncounted

Ints = NDArray[np.int64]
Pair = tuple[Sequence[int], Sequence[int]]  # pieces of a source and of its translation


class Short(NamedTuple):
    """What the sentences of a batch may use, list behind list."""

    some: Some  # what any of them may
    ids: Ints
    columns: Ints  # where those stand in what any may
    ends: Ints  # (N + 1,) where each list ends, after a nought


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Which target pieces go with which source pieces."""

    common: Ints  # rising
    firsts: Ints  # (source pieces + 1,): where a piece's list begins
    listed: Ints  # the lists one behind another
    vocabulary: int  # target pieces

    @classmethod
    def count(
        cls, pairs: Iterable[Pair], *, src_vocabulary: int, tgt_vocabulary: int, joint: bool, common: int = COMMON, each: int = EACH
    ) -> Shortlist:
        r"""Count how often pieces come up in one pair, and list for each source piece those it has the strongest ties to.

        .. math:: 2\, n_{st} / (n_s + n_t)

        Dice's coefficient, with pairs counted and not pieces. Where both sides share a vocabulary a piece is listed for itself: names
        and numbers are copied.
        """
        counted = _Counted(src_vocabulary, tgt_vocabulary)
        for pair in itertools.islice(pairs, MOST_PAIRS):
            counted.add(pair)
        codes, together = counted.result()
        if not codes.size:
            raise DataError("a shortlist is made from pairs of sentences", found="none that hold pieces", fix="give it the training text")
        src, tgt = np.divmod(codes, tgt_vocabulary)
        ties = 2.0 * together / (counted.src[src] + counted.tgt[tgt])
        order = np.lexsort((tgt, -ties, src))
        place = np.arange(order.size) - np.searchsorted(src[order], src[order], side="left")
        kept = order[place < each]
        sources, targets = src[kept], tgt[kept]
        if joint:
            own = np.arange(min(src_vocabulary, tgt_vocabulary))
            sources, targets = np.concatenate([sources, own]), np.concatenate([targets, own])
            by_source = np.argsort(sources, kind="stable")
            sources, targets = sources[by_source], targets[by_source]
        frequent = np.argsort(-counted.tgt, kind="stable")[:common]
        usual = np.union1d(frequent, np.arange(min(len(SPECIALS), tgt_vocabulary)))
        return cls(
            usual.astype(np.int64), np.searchsorted(sources, np.arange(src_vocabulary + 1)), targets.astype(np.int64), tgt_vocabulary
        )

    def allowed(self, source: Sequence[int], also: Sequence[int] = ()) -> Ints:
        """List what a sentence's translation may use, rising; and what else it must be able to."""
        may = np.zeros(self.vocabulary, dtype=np.bool_)
        may[self.common] = True
        for piece in set(source):
            may[self.listed[self.firsts[piece] : self.firsts[piece + 1]]] = True
        may[list(also)] = True
        return np.flatnonzero(may)


class _Counted:
    """Counts of pairs: those that hold a source piece, a target piece, and both."""

    def __init__(self, src_vocabulary: int, tgt_vocabulary: int) -> None:
        self.src, self.tgt = np.zeros(src_vocabulary, dtype=np.int64), np.zeros(tgt_vocabulary, dtype=np.int64)
        self._waiting: list[Ints] = []
        self._held = 0
        self._codes: Ints = np.empty(0, dtype=np.int64)
        self._numbers: Ints = np.empty(0, dtype=np.int64)

    def add(self, pair: Pair) -> None:
        """Count the different pieces of one pair."""
        src, tgt = (np.unique(np.asarray(side, dtype=np.int64)) for side in pair)
        self.src[src] += 1
        self.tgt[tgt] += 1
        self._waiting.append((src[:, None] * self.tgt.size + tgt).ravel())
        self._held += src.size * tgt.size
        if self._held >= _AT_ONCE:
            self._gather()

    def result(self) -> tuple[Ints, Ints]:
        """Give what came up together, a source piece times the target vocabulary plus a target piece, and how often."""
        self._gather()
        return self._codes, self._numbers

    def _gather(self) -> None:
        """Add what waits to the counts."""
        codes, numbers = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *self._waiting]), return_counts=True)
        both = np.concatenate([self._codes, codes])
        self._codes, place = np.unique(both, return_inverse=True)
        self._numbers = np.bincount(place, weights=np.concatenate([self._numbers, numbers]), minlength=self._codes.size).astype(np.int64)
        self._waiting, self._held = [], 0


def shortlist_of_texts(corpus: Corpus, tokenizers: Tokenizers) -> Shortlist:
    """Count the pairs of a corpus, in pieces; a side that is very long says little about what goes with what, and is left out."""
    texts = ((pair.src, pair.tgt) for pair in corpus.pairs())

    def pieces() -> Iterator[Pair]:
        counted = itertools.islice(texts, MOST_PAIRS)
        while block := list(itertools.islice(counted, _BLOCK)):
            sides = (side.encode_batch(list(lines)) for side, lines in zip(tokenizers, zip(*block, strict=True), strict=True))
            yield from (pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= _LONGEST)

    src, tgt = tokenizers
    return Shortlist.count(pieces(), src_vocabulary=len(src), tgt_vocabulary=len(tgt), joint=tokenizers.joint)
