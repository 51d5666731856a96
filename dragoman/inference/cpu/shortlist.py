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
from dragoman.errors import DataError
from dragoman.inference.cpu.packed_weights import OutputSubset
from dragoman.text.special_tokens import SPECIAL_TOKENS
from dragoman.text.tokenizer import Tokenizers

COMMON_TOKENS, TOKENS_PER_SOURCE_TOKEN = (
    100,
    50,
)  # the most frequent target pieces, and those listed for a source piece
MAX_PAIRS = 200_000  # that are counted: more change little
_LINES_PER_BATCH = 1024  # lines that are cut into pieces at once
_MAX_TOKENS = 256  # pieces of a side
_MAX_PENDING = 1 << 22  # co-occurrences that are held uncounted

IntArray = NDArray[np.int64]
TokenPair = tuple[Sequence[int], Sequence[int]]  # pieces of a source and of its translation


class BatchShortlist(NamedTuple):
    """What the sentences of a batch may use, list behind list."""

    output_subset: OutputSubset  # what any of them may
    ids: IntArray
    subset_columns: IntArray  # where those stand in what any may
    ends: IntArray  # (N + 1,) where each list ends, after a nought


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Which target pieces go with which source pieces."""

    common_tokens: IntArray  # rising
    list_starts: IntArray  # (source pieces + 1,): where a piece's list begins
    token_lists: IntArray  # the lists one behind another
    vocabulary: int  # target pieces

    @classmethod
    def count(
        cls,
        pairs: Iterable[TokenPair],
        *,
        src_vocab_size: int,
        tgt_vocab_size: int,
        shared_vocab: bool,
        common_tokens: int = COMMON_TOKENS,
        each: int = TOKENS_PER_SOURCE_TOKEN,
    ) -> Shortlist:
        r"""Count how often pieces come up in one pair, and list for each source piece those it has the strongest ties to.

        .. math:: 2\, n_{st} / (n_s + n_t)

        Dice's coefficient, with pairs counted and not pieces. Where both sides share a vocabulary a piece is listed for itself: names
        and numbers are copied.
        """
        counted = _CooccurrenceCounts(src_vocab_size, tgt_vocab_size)
        for pair in itertools.islice(pairs, MAX_PAIRS):
            counted.add(pair)
        codes, pair_counts = counted.result()
        if not codes.size:
            raise DataError(
                "a shortlist is made from pairs of sentences",
                found="none that hold tokens",
                fix="give it the training text",
            )
        src, tgt = np.divmod(codes, tgt_vocab_size)
        dice = 2.0 * pair_counts / (counted.src[src] + counted.tgt[tgt])
        order = np.lexsort((tgt, -dice, src))
        place = np.arange(order.size) - np.searchsorted(src[order], src[order], side="left")
        kept = order[place < each]
        sources, targets = src[kept], tgt[kept]
        if shared_vocab:
            own = np.arange(min(src_vocab_size, tgt_vocab_size))
            sources, targets = np.concatenate([sources, own]), np.concatenate([targets, own])
            by_source = np.argsort(sources, kind="stable")
            sources, targets = sources[by_source], targets[by_source]
        frequent = np.argsort(-counted.tgt, kind="stable")[:common_tokens]
        usual = np.union1d(frequent, np.arange(min(len(SPECIAL_TOKENS), tgt_vocab_size)))
        return cls(
            usual.astype(np.int64),
            np.searchsorted(sources, np.arange(src_vocab_size + 1)),
            targets.astype(np.int64),
            tgt_vocab_size,
        )

    def allowed_tokens(self, source: Sequence[int], extra_tokens: Sequence[int] = ()) -> IntArray:
        """List what a sentence's translation may use, rising; and what else it must be able to."""
        is_allowed = np.zeros(self.vocabulary, dtype=np.bool_)
        is_allowed[self.common_tokens] = True
        for piece in set(source):
            is_allowed[self.token_lists[self.list_starts[piece] : self.list_starts[piece + 1]]] = (
                True
            )
        is_allowed[list(extra_tokens)] = True
        return np.flatnonzero(is_allowed)


class _CooccurrenceCounts:
    """Counts of pairs: those that hold a source piece, a target piece, and both."""

    def __init__(self, src_vocab_size: int, tgt_vocab_size: int) -> None:
        self.src, self.tgt = (
            np.zeros(src_vocab_size, dtype=np.int64),
            np.zeros(tgt_vocab_size, dtype=np.int64),
        )
        self._pending: list[IntArray] = []
        self._num_pending = 0
        self._codes: IntArray = np.empty(0, dtype=np.int64)
        self._numbers: IntArray = np.empty(0, dtype=np.int64)

    def add(self, pair: TokenPair) -> None:
        """Count the different pieces of one pair."""
        src, tgt = (np.unique(np.asarray(side, dtype=np.int64)) for side in pair)
        self.src[src] += 1
        self.tgt[tgt] += 1
        self._pending.append((src[:, None] * self.tgt.size + tgt).ravel())
        self._num_pending += src.size * tgt.size
        if self._num_pending >= _MAX_PENDING:
            self._merge_pending()

    def result(self) -> tuple[IntArray, IntArray]:
        """Give what came up together, a source piece times the target vocabulary plus a target piece, and how often."""
        self._merge_pending()
        return self._codes, self._numbers

    def _merge_pending(self) -> None:
        """Add what waits to the counts."""
        codes, numbers = np.unique(
            np.concatenate([np.empty(0, dtype=np.int64), *self._pending]), return_counts=True
        )
        both = np.concatenate([self._codes, codes])
        self._codes, place = np.unique(both, return_inverse=True)
        self._numbers = np.bincount(
            place, weights=np.concatenate([self._numbers, numbers]), minlength=self._codes.size
        ).astype(np.int64)
        self._pending, self._num_pending = [], 0


def build_shortlist(corpus: Corpus, tokenizers: Tokenizers) -> Shortlist:
    """Count the pairs of a corpus, in pieces; a side that is very long says little about what goes with what, and is left out."""
    texts = ((pair.src, pair.tgt) for pair in corpus.pairs())

    def token_pairs() -> Iterator[TokenPair]:
        counted = itertools.islice(texts, MAX_PAIRS)
        while block := list(itertools.islice(counted, _LINES_PER_BATCH)):
            sides = (
                side.encode_batch(list(lines))
                for side, lines in zip(tokenizers, zip(*block, strict=True), strict=True)
            )
            yield from (
                pair for pair in zip(*sides, strict=True) if max(map(len, pair)) <= _MAX_TOKENS
            )

    src, tgt = tokenizers
    return Shortlist.count(
        token_pairs(),
        src_vocab_size=len(src),
        tgt_vocab_size=len(tgt),
        shared_vocab=tokenizers.shared_vocab,
    )
