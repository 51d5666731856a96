"""BPE merges over the pieces of a SentencePiece model, with merges dropped at random from a given stream.

SentencePiece has BPE-dropout (Provilkov, Emelianenko and Voita, 2020) but its sampler ignores its seed, which
rules out an exact resume. Here, as in the paper's algorithm 1, each merge that is possible now is dropped with probability
p and the best of the others is made, until none is left. Put differently: of the merges in order of their scores, a
geometric number is skipped; and the number of merges until one is skipped at all is geometric too. So a word's undisturbed
way is remembered, most words cost a look-up and no draw, and only a word with a skip is merged anew from that point.
Without dropout the result is SentencePiece's encoding.
"""

from __future__ import annotations

import heapq
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from dragoman.text.special_tokens import UNK

SPACE_MARK = "\u2581"  # SentencePiece's visible space
_MAX_CACHED_WORDS = 100_000  # remembered at once; past this they are forgotten and learnt anew
_MAX_CACHED_WORD_LENGTH = (
    40  # characters; longer "words" are lines without spaces, which rarely come again
)


class _MergeSequence:
    """A word's merges without dropout: the cut after each, and the ids of the last."""

    __slots__ = ("ids", "segmentations")

    def __init__(self, segmentations: list[tuple[str, ...]], ids: list[int]) -> None:
        self.segmentations, self.ids = segmentations, ids


class MergeSkips:
    """How many merges are made before one is skipped, and how many are then skipped: two geometric draws."""

    def __init__(self, dropout: float, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._skip, self._make = (
            (1.0 / math.log(dropout), 1.0 / math.log1p(-dropout)) if dropout else (0.0, 0.0)
        )
        self.clear = self._next() if dropout else sys.maxsize

    def _next(self) -> int:
        return int(math.log(self._draw()) * self._make)

    def take(self) -> int:
        """Say how many of the best merges to skip now, at least one, and draw when the next skip comes."""
        skipped = 1 + int(math.log(self._draw()) * self._skip)
        self.clear = self._next()
        return skipped


class BPEDropoutEncoder:
    """Cuts text into BPE pieces, dropping merges when asked."""

    def __init__(
        self, scores: Mapping[str, float], ids: Mapping[str, int], byte_ids: list[int] | None
    ) -> None:
        self._scores, self._ids, self._byte_ids = scores, ids, byte_ids
        self._cached_words: dict[str, _MergeSequence] = {}
        # Pieces that reach over a space (no vocabulary of ours has them) would forbid cutting the text into words.
        across = any(SPACE_MARK in piece.lstrip(SPACE_MARK) for piece in scores)
        self._word = re.compile(
            r".+" if across else f"{SPACE_MARK}+[^{SPACE_MARK}]*|[^{SPACE_MARK}]+", re.DOTALL
        )

    def encode(self, text: str, dropout: float, draw: Callable[[], float]) -> list[int]:
        """Cut text into piece ids; each possible merge is passed over with probability `dropout` each time."""
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
        """Merge a word without dropout and remember every cut on the way."""
        segmentations = [tuple(word)]
        while candidates := self._candidate_merges(segmentations[-1]):
            _, place = min(candidates)
            cut = segmentations[-1]
            segmentations.append((*cut[:place], cut[place] + cut[place + 1], *cut[place + 2 :]))
        if len(self._cached_words) >= _MAX_CACHED_WORDS:
            self._cached_words.clear()
        sequence = self._cached_words[word] = _MergeSequence(
            segmentations, self._to_ids(segmentations[-1])
        )
        return sequence

    def _candidate_merges(self, cut: Sequence[str]) -> list[tuple[float, int]]:
        """List a cut's merges; the least is the best score, leftmost among equals: the order of SentencePiece."""
        scores = self._scores
        return [
            (-scores[pair], place)
            for place in range(len(cut) - 1)
            if (pair := cut[place] + cut[place + 1]) in scores
        ]

    def _merge(self, cut: Iterable[str], skips: MergeSkips) -> list[str]:
        """Merge a cut to the end, skipping as told; a heap holds the possible merges, so long lines stay cheap."""
        pieces = list(cut)
        size = len(pieces)
        after, before = (
            list(range(1, size + 1)),
            list(range(-1, size - 1)),
        )  # a merged piece's room stays empty
        scores = self._scores
        heap = [
            (score, place, len(pieces[place]) + len(pieces[place + 1]))
            for score, place in self._candidate_merges(pieces)
        ]
        heapq.heapify(heap)

        def best() -> tuple[float, int, int] | None:
            while heap:
                move = heapq.heappop(heap)
                _, left, length = move
                right = after[left]
                if (
                    right < size
                    and pieces[left]
                    and len(pieces[left]) + len(pieces[right]) == length
                ):
                    return move
            return None  # the rest were merges with a piece that has been merged with another since

        while move := best():
            skipped = []
            if skips.clear:
                skips.clear -= 1
            else:
                for _ in range(skips.take()):
                    skipped.append(move)
                    if not (move := best()):
                        return [piece for piece in pieces if piece]
            _, left, _ = move
            right = after[left]
            pieces[left], pieces[right] = pieces[left] + pieces[right], ""
            after[left] = after[right]
            if after[left] < size:
                before[after[left]] = left
            for place in (before[left], left):
                if place >= 0 and after[place] < size:
                    pair = pieces[place] + pieces[after[place]]
                    if pair in scores:
                        heapq.heappush(heap, (-scores[pair], place, len(pair)))
            for each in skipped:
                heapq.heappush(heap, each)
        return [piece for piece in pieces if piece]

    def _to_ids(self, cut: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for piece in cut:
            known = self._ids.get(piece)
            if known is not None:
                ids.append(known)
            elif self._byte_ids:
                ids.extend(self._byte_ids[byte] for byte in piece.encode())
            else:
                ids.append(UNK)
        return ids


def _merge_unknowns(ids: list[int]) -> list[int]:
    """Make one unknown piece of several in a row, as SentencePiece does."""
    return [
        now
        for before, now in zip([None, *ids], ids, strict=False)
        if not (now == UNK and before == UNK)
    ]
