"""Finding where two aligned files slip: from some line on, each sentence stands beside its neighbour's translation.

Lengths of translations go together, and so do the numbers in them. Over a window of lines, the lengths fit at their true shift and
at no other; where another shift fits clearly better than none, twice in a row, the files have slipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dragoman.data.corpus import PairedFiles

_WINDOW = 200
_SHIFTS = (0, 1, -1, 2, -2, 3, -3)
_REACH = 3
_DIGITS = re.compile(r"\d+")
_CLEARER = 0.3  # how much better another shift's correlation must be; sound corpora stay under 0.1


class Slip(NamedTuple):
    """Where the files part, and by how many lines the target is late (negative: early)."""

    line: int
    shift: int


class Traits(NamedTuple):
    """What is compared of a line: the logarithm of its length and a hash of its numbers."""

    length: float
    numbers: int


def traits(text: str) -> Traits:
    """Take a line's traits."""
    digits = _DIGITS.findall(text) if not text.isalpha() else []
    return Traits(float(np.log1p(len(text))), hash(tuple(sorted(map(int, (d for d in digits if len(d) < 19))))) if digits else 0)


def find_slip(pairs: Iterable[tuple[Traits, Traits]]) -> Slip | None:
    """Find the first place where the sides slip, in one pass over the pairs' traits and in bounded memory."""
    before: Slip | None = None
    for start, src, tgt in _windows(pairs):
        slip = _best_shift(start, src, tgt)
        if slip and before and slip.shift == before.shift:
            return before
        before = slip
    return None


def first_drift(corpus: PairedFiles, common: int) -> int:
    """Say near which line two files part, of which the first `common` lines exist in both; 0 when it does not show."""
    src_lines, tgt_lines = (corpus._lines(path) for path in corpus.files)
    pairs = (
        (traits(src if isinstance(src, str) else ""), traits(tgt if isinstance(tgt, str) else ""))
        for _, src, tgt in zip(range(common), src_lines, tgt_lines, strict=False)
    )
    slip = find_slip(pairs)
    return slip.line if slip else 0


def _windows(pairs: Iterable[tuple[Traits, Traits]]) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    """Cut the pairs into windows of (length, numbers) rows; the first pair has number 1."""
    start = 1
    rows: list[tuple[Traits, Traits]] = []
    for pair in pairs:
        rows.append(pair)
        if len(rows) == _WINDOW:
            yield start, np.array([src for src, _ in rows]), np.array([tgt for _, tgt in rows])
            start += _WINDOW
            rows.clear()
    if len(rows) >= _WINDOW // 4:
        yield start, np.array([src for src, _ in rows]), np.array([tgt for _, tgt in rows])


def _best_shift(start: int, src: NDArray[np.float64], tgt: NDArray[np.float64]) -> Slip | None:
    inner = slice(_REACH, len(src) - _REACH)
    fits = {shift: _fit(src[inner], np.roll(tgt, -shift, axis=0)[inner]) for shift in _SHIFTS}
    best = max(fits, key=lambda shift: fits[shift])
    if best == 0 or fits[best] < fits[0] + _CLEARER:
        return None
    aligned = _misfit(src, tgt)
    shifted = _misfit(src, np.roll(tgt, -best, axis=0))
    # Before the place the files fit as they are, after it they fit shifted: the cut with the least misfit in all.
    costs = np.concatenate([[0.0], np.cumsum(aligned)]) + np.concatenate([np.cumsum(shifted[::-1])[::-1], [0.0]])
    return Slip(start + int(np.argmin(costs)), best)


def _fit(src: NDArray[np.float64], tgt: NDArray[np.float64]) -> float:
    """Correlate the lengths, and add the share of lines with numbers that have the same ones."""
    lengths = (src[:, 0] - src[:, 0].mean()) * (tgt[:, 0] - tgt[:, 0].mean())
    spread = float(src[:, 0].std() * tgt[:, 0].std())
    fit = float(lengths.mean()) / spread if spread > 1e-9 else 0.0
    with_numbers = (src[:, 1] != 0) | (tgt[:, 1] != 0)
    if int(with_numbers.sum()) >= 5:
        fit += float((src[:, 1] == tgt[:, 1])[with_numbers].mean())
    return fit


def _misfit(src: NDArray[np.float64], tgt: NDArray[np.float64]) -> NDArray[np.float64]:
    ratio = src[:, 0] - tgt[:, 0]
    return np.abs(ratio - np.median(ratio)) + (src[:, 1] != tgt[:, 1])
