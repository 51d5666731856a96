"""Finding where two aligned files slip: from some line on, each sentence stands beside its neighbour's translation.

Lengths of translations go together, and so do the numbers in them. Over a window of lines, the lengths fit at their true shift and
at no other; where another shift fits clearly better than none, twice in a row, the files have slipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_WINDOW = 200
_SHIFTS = (0, 1, -1, 2, -2, 3, -3)
_MAX_SHIFT = max(_SHIFTS)  # lines at both ends of a window whose neighbours are outside it
_DIGITS = re.compile(r"\d+")
_MIN_IMPROVEMENT = (
    0.3  # how much better another shift's correlation must be; sound corpora stay under 0.1
)


class Misalignment(NamedTuple):
    """Where the files part, and by how many lines the target is late (negative: early)."""

    line: int
    shift: int


class LineFeatures(NamedTuple):
    """What is compared of a line: the logarithm of its length and a hash of its numbers."""

    length: float
    numbers: int


def line_features(text: str) -> LineFeatures:
    """Take a line's traits."""
    digits = _DIGITS.findall(text) if not text.isalpha() else []
    return LineFeatures(
        math.log1p(len(text)),
        hash(tuple(sorted(map(int, (d for d in digits if len(d) < 19))))) if digits else 0,
    )


def find_misalignment(pairs: Iterable[tuple[LineFeatures, LineFeatures]]) -> Misalignment | None:
    """Find the first place where the sides slip, in one pass over the pairs' traits and in bounded memory."""
    before: _Window | None = None
    suspect: Misalignment | None = None
    clearness = 0.0
    for window in _windows(pairs):
        shift, clearness = _best_shift(window)
        if suspect and shift == suspect.shift:
            return suspect
        suspect = _locate(before, window, shift) if shift else None
        before = window
    return (
        suspect if clearness > 1.5 * _MIN_IMPROVEMENT else None
    )  # the files end before a second window could confirm it


class _Window(NamedTuple):
    """Traits of some pairs in a row, (length, numbers) each; `start` is the number of the first pair."""

    start: int
    src: NDArray[np.float64]
    tgt: NDArray[np.float64]


def _windows(pairs: Iterable[tuple[LineFeatures, LineFeatures]]) -> Iterator[_Window]:
    """Cut the pairs into windows; the first pair has number 1."""
    start = 1
    rows: list[tuple[LineFeatures, LineFeatures]] = []
    for pair in pairs:
        rows.append(pair)
        if len(rows) == _WINDOW:
            yield _Window(
                start, np.array([src for src, _ in rows]), np.array([tgt for _, tgt in rows])
            )
            start += _WINDOW
            rows.clear()
    if len(rows) >= _WINDOW // 4:
        yield _Window(start, np.array([src for src, _ in rows]), np.array([tgt for _, tgt in rows]))


def _best_shift(window: _Window) -> tuple[int, float]:
    """Say at which shift a window fits best, and by how much better than as it stands; no shift unless clearly."""
    inner = slice(_MAX_SHIFT, len(window.src) - _MAX_SHIFT)
    fits = {
        shift: _correlation(window.src[inner], np.roll(window.tgt, -shift, axis=0)[inner])
        for shift in _SHIFTS
    }
    best = max(fits, key=lambda shift: fits[shift])
    clearness = fits[best] - fits[0]
    return (best, clearness) if clearness >= _MIN_IMPROVEMENT else (0, clearness)


def _locate(before: _Window | None, window: _Window, shift: int) -> Misalignment:
    """Find the line, in this window or the one before, from which on the shift fits better."""
    start = before.start if before else window.start
    src = np.concatenate([before.src, window.src]) if before else window.src
    tgt = np.concatenate([before.tgt, window.tgt]) if before else window.tgt
    # Before the place the files fit as they are, after it they fit shifted: the cut with the least misfit in all.
    aligned, shifted = _misfit(src, tgt), _misfit(src, np.roll(tgt, -shift, axis=0))
    costs = np.concatenate([[0.0], np.cumsum(aligned)]) + np.concatenate(
        [np.cumsum(shifted[::-1])[::-1], [0.0]]
    )
    return Misalignment(start + int(np.argmin(costs)), shift)


def _correlation(src: NDArray[np.float64], tgt: NDArray[np.float64]) -> float:
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
