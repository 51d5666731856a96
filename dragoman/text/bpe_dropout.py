"""BPE encoding with BPE-dropout over the merges of a SentencePiece model, from a seeded generator.

SentencePiece's own BPE-dropout (Provilkov, Emelianenko and Voita, 2020) ignores its seed, which
rules out an exact resume. Here, as in the paper's algorithm 1, each possible merge is dropped with
probability p and the best of the others is applied, until none is left.

The number of merges until one is skipped is geometric, and so is the number of merges skipped then.
So the merge sequence of a word without dropout is cached: most words cost a look-up and no draw,
and only a word with a skip is merged again from that point. Without dropout the result equals
SentencePiece's encoding.
"""

from __future__ import annotations

import heapq
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from dragoman.text.special_tokens import UNK

SPACE_MARK = "\u2581"  # SentencePiece's visible space
_MAX_CACHED_WORDS = 100_000  # cached words; at this number the cache is emptied
# Characters; longer "words" are lines without spaces, which rarely repeat.
_MAX_CACHED_WORD_LENGTH = 40


class _MergeSequence:
    """A word's merges without dropout: the segmentation after each, and the final ids."""

    __slots__ = ("ids", "segmentations")

    def __init__(self, segmentations: list[tuple[str, ...]], ids: list[int]) -> None:
        self.segmentations, self.ids = segmentations, ids


class MergeSkips:
    """Geometric draws: merges until the next skip, and how many are skipped then."""

    def __init__(self, dropout: float, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._skip, self._make = (
            (1.0 / math.log(dropout), 1.0 / math.log1p(-dropout)) if dropout else (0.0, 0.0)
        )
        self.clear = self._next() if dropout else sys.maxsize

    def _next(self) -> int:
        return int(math.log(self._draw()) * self._make)

    def take(self) -> int:
        """Return how many of the best merges to skip now, at least one, and draw the next skip."""
        skipped = 1 + int(math.log(self._draw()) * self._skip)
        self.clear = self._next()
        return skipped


class BPEDropoutEncoder:
    """BPE encoder with optional BPE-dropout."""

    def __init__(
        self, scores: Mapping[str, float], ids: Mapping[str, int], byte_ids: list[int] | None
    ) -> None:
        self._scores, self._ids, self._byte_ids = scores, ids, byte_ids
        self._cached_words: dict[str, _MergeSequence] = {}
        # Tokens that contain a space (our vocabularies have none) would rule out encoding word by
        # word.
        across = any(SPACE_MARK in token.lstrip(SPACE_MARK) for token in scores)
        self._word = re.compile(
            r".+" if across else f"{SPACE_MARK}+[^{SPACE_MARK}]*|[^{SPACE_MARK}]+", re.DOTALL
        )

    def encode(self, text: str, dropout: float, draw: Callable[[], float]) -> list[int]:
        """Return the token ids of a text; each possible merge is skipped with probability
        `dropout`.
        """
        if not text:
            return []
        skips = MergeSkips(dropout, draw)
        out: list[int] = []
        for word in self._word.findall(SPACE_MARK + text.replace(" ", SPACE_MARK)):
            if len(word) > _MAX_CACHED_WORD_LENGTH:
                out += self._to_ids(self._merge(word, skips))
                continue
            sequence = self._cached_words.get(word) or self._merge_word(word)
            if skips.clear >= len(sequence.segmentations) - 1:
                skips.clear -= len(sequence.segmentations) - 1
                out += sequence.ids
            else:
                cut = sequence.segmentations[skips.clear]
                skips.clear = 0
                out += self._to_ids(self._merge(cut, skips))
        return out if self._byte_ids else _merge_unknowns(out)

    def _merge_word(self, word: str) -> _MergeSequence:
        """Merge a word without dropout and return every intermediate segmentation."""
        segmentations = [tuple(word)]
        while candidates := self._candidate_merges(segmentations[-1]):
            _, position = min(candidates)
            cut = segmentations[-1]
            segmentations.append(
                (*cut[:position], cut[position] + cut[position + 1], *cut[position + 2 :])
            )
        if len(self._cached_words) >= _MAX_CACHED_WORDS:
            self._cached_words.clear()
        sequence = self._cached_words[word] = _MergeSequence(
            segmentations, self._to_ids(segmentations[-1])
        )
        return sequence

    def _candidate_merges(self, cut: Sequence[str]) -> list[tuple[float, int]]:
        """Return the possible merges; the smallest is SentencePiece's next merge."""
        scores = self._scores
        return [
            (-scores[pair], position)
            for position in range(len(cut) - 1)
            if (pair := cut[position] + cut[position + 1]) in scores
        ]

    def _merge(self, cut: Iterable[str], skips: MergeSkips) -> list[str]:
        """Merge a segmentation to the end with skips; a heap keeps long lines cheap."""
        tokens = list(cut)
        size = len(tokens)
        # The position of a merged token stays empty.
        after, before = (
            list(range(1, size + 1)),
            list(range(-1, size - 1)),
        )
        scores = self._scores
        heap = [
            (score, position, len(tokens[position]) + len(tokens[position + 1]))
            for score, position in self._candidate_merges(tokens)
        ]
        heapq.heapify(heap)

        def best() -> tuple[float, int, int] | None:
            while heap:
                move = heapq.heappop(heap)
                _, left, length = move
                right = after[left]
                if (
                    right < size
                    and tokens[left]
                    and len(tokens[left]) + len(tokens[right]) == length
                ):
                    return move
            return None  # the rest were merges with a token that has been merged since

        while move := best():
            skipped = []
            if skips.clear:
                skips.clear -= 1
            else:
                for _ in range(skips.take()):
                    skipped.append(move)
                    if not (move := best()):
                        return [token for token in tokens if token]
            _, left, _ = move
            right = after[left]
            tokens[left], tokens[right] = tokens[left] + tokens[right], ""
            after[left] = after[right]
            if after[left] < size:
                before[after[left]] = left
            for position in (before[left], left):
                if position >= 0 and after[position] < size:
                    pair = tokens[position] + tokens[after[position]]
                    if pair in scores:
                        heapq.heappush(heap, (-scores[pair], position, len(pair)))
            for each in skipped:
                heapq.heappush(heap, each)
        return [token for token in tokens if token]

    def _to_ids(self, cut: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for token in cut:
            known = self._ids.get(token)
            if known is not None:
                ids.append(known)
            elif self._byte_ids:
                ids.extend(self._byte_ids[byte] for byte in token.encode())
            else:
                ids.append(UNK)
        return ids


def _merge_unknowns(ids: list[int]) -> list[int]:
    """Merge consecutive unknown tokens into one, as SentencePiece does."""
    return [
        now
        for before, now in zip([None, *ids], ids, strict=False)
        if not (now == UNK and before == UNK)
    ]
