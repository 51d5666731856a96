"""Lexical shortlist: target tokens that occurred with each source token; fewer logits are needed.

The output projection is a quarter to a third of the work of decoding. A sentence may use the tokens
listed for its source tokens and the most frequent ones. So the result does not depend on the batch,
but occasionally on the shortlist.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.data.parallel_corpus import Corpus
from dragoman.errors import DataError
from dragoman.inference.cpu.cpp_weight_packing import OutputSubset
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import SPECIAL_TOKENS

COMMON_TOKENS = 100  # the most frequent target tokens, allowed for every sentence
TOKENS_PER_SOURCE_TOKEN = 50
MAX_PAIRS = 200_000  # sentence pairs counted: more change little
_LINES_PER_BATCH = 1024  # lines tokenized together
_MAX_TOKENS = 256  # of a side; longer pairs are skipped
_MAX_PENDING = 1 << 22  # co-occurrences collected before they are counted

IntArray = NDArray[np.int64]
TokenPair = tuple[Sequence[int], Sequence[int]]  # token ids of a source and of its translation


class BatchShortlist(NamedTuple):
    """The allowed tokens of the sentences of a batch, lists concatenated."""

    output_subset: OutputSubset  # output projection of the union of all lists
    ids: IntArray
    subset_columns: IntArray  # column of each id in the output subset
    ends: IntArray  # (N + 1,) zero, and the end of each list


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The target tokens associated with each source token."""

    common_tokens: IntArray  # ascending
    list_starts: IntArray  # (source vocabulary size + 1,): start of each source token's list
    token_lists: IntArray  # the lists, concatenated
    vocabulary: int  # target vocabulary size

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
        r"""Count co-occurrences in sentence pairs; keep the best targets of each source token.

        .. math:: 2\, n_{st} / (n_s + n_t)

        Dice's coefficient over sentence pairs. With a shared vocabulary every token is also listed
        for itself, because names and numbers are copied.
        """
        counted = _CooccurrenceCounts(src_vocab_size, tgt_vocab_size)
        for pair in itertools.islice(pairs, MAX_PAIRS):
            counted.add(pair)
        codes, pair_counts = counted.result()
        if not codes.size:
            raise DataError(
                "a shortlist is made from pairs of sentences",
                found="none that hold tokens",
                fix="pass the training text",
            )
        src, tgt = np.divmod(codes, tgt_vocab_size)
        dice = 2.0 * pair_counts / (counted.src[src] + counted.tgt[tgt])
        order = np.lexsort((tgt, -dice, src))
        rank = np.arange(order.size) - np.searchsorted(src[order], src[order], side="left")
        kept = order[rank < each]
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
        """Return the ids allowed in a sentence's translation, ascending, with `extra_tokens`."""
        is_allowed = np.zeros(self.vocabulary, dtype=np.bool_)
        is_allowed[self.common_tokens] = True
        for token in set(source):
            first, last = self.list_starts[token], self.list_starts[token + 1]
            is_allowed[self.token_lists[first:last]] = True
        is_allowed[list(extra_tokens)] = True
        return np.flatnonzero(is_allowed)


class _CooccurrenceCounts:
    """Counts of sentence pairs that hold a source token, a target token, and both."""

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
        """Count the distinct tokens of one pair."""
        src, tgt = (np.unique(np.asarray(side, dtype=np.int64)) for side in pair)
        self.src[src] += 1
        self.tgt[tgt] += 1
        self._pending.append((src[:, None] * self.tgt.size + tgt).ravel())
        self._num_pending += src.size * tgt.size
        if self._num_pending >= _MAX_PENDING:
            self._merge_pending()

    def result(self) -> tuple[IntArray, IntArray]:
        """Return codes (source id times target vocabulary size plus target id) and their counts."""
        self._merge_pending()
        return self._codes, self._numbers

    def _merge_pending(self) -> None:
        """Add pending co-occurrences to the counts."""
        codes, numbers = np.unique(
            np.concatenate([np.empty(0, dtype=np.int64), *self._pending]), return_counts=True
        )
        both = np.concatenate([self._codes, codes])
        self._codes, group = np.unique(both, return_inverse=True)
        self._numbers = np.bincount(
            group, weights=np.concatenate([self._numbers, numbers]), minlength=self._codes.size
        ).astype(np.int64)
        self._pending, self._num_pending = [], 0


def build_shortlist(corpus: Corpus, tokenizers: Tokenizers) -> Shortlist:
    """Build a shortlist from a corpus; very long pairs associate little and are skipped."""
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
