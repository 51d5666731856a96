"""Misalignment detection: from some line on, sentences are paired with another line's translation.

Lengths of translations correlate, and so do the numbers in them. Over a window of lines, lengths
correlate at the true shift and at no other. Where another shift correlates clearly better than
none, twice in a row, the files are misaligned.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_WINDOW = 200
_SHIFTS = (0, 1, -1, 2, -2, 3, -3)
_MAX_SHIFT = max(_SHIFTS)  # lines at both ends of a window whose shifted lines are outside
_DIGITS = re.compile(r"\d+")
# How much better another shift's correlation must be; sound corpora stay under 0.1.
_MIN_IMPROVEMENT = 0.3


class Misalignment(NamedTuple):
    """The first misaligned line, and how many lines the target is late (negative: early)."""

    line: int
    shift: int


class LineFeatures(NamedTuple):
    """Features of a line: the logarithm of its length and a hash of its numbers."""

    length: float
    numbers: int


def line_features(text: str) -> LineFeatures:
    """Return a line's features."""
    digits = _DIGITS.findall(text) if not text.isalpha() else []
    return LineFeatures(
        math.log1p(len(text)),
        hash(tuple(sorted(map(int, (d for d in digits if len(d) < 19))))) if digits else 0,
    )


NumberedFeatures = tuple[int, LineFeatures, LineFeatures]  # line number, source, target


def find_misalignment(pairs: Iterable[NumberedFeatures]) -> Misalignment | None:
    """Return the first misaligned line, in one pass over the features and bounded memory."""
    before: _Window | None = None
    suspect: Misalignment | None = None
    gain = 0.0
    for window in _windows(pairs):
        shift, gain = _best_shift(window)
        if suspect and shift == suspect.shift:
            return suspect
        suspect = _locate(before, window, shift) if shift else None
        before = window
    # The files end before a second window could confirm it.
    return suspect if gain > 1.5 * _MIN_IMPROVEMENT else None


class _Window(NamedTuple):
    """Features of consecutive pairs, and the line numbers of the pairs."""

    lines: list[int]
    src: NDArray[np.float64]
    tgt: NDArray[np.float64]


def _windows(pairs: Iterable[NumberedFeatures]) -> Iterator[_Window]:
    """Cut the pairs into windows."""
    remaining = iter(pairs)
    for rows in iter(lambda: list(itertools.islice(remaining, _WINDOW)), []):
        if len(rows) >= _WINDOW // 4:
            lines, src, tgt = zip(*rows, strict=True)
            yield _Window(list(lines), np.array(src), np.array(tgt))


def _best_shift(window: _Window) -> tuple[int, float]:
    """Return the best shift of a window and its gain over no shift; no shift unless it is clear."""
    inner = slice(_MAX_SHIFT, len(window.src) - _MAX_SHIFT)
    fits = {
        shift: _correlation(window.src[inner], np.roll(window.tgt, -shift, axis=0)[inner])
        for shift in _SHIFTS
    }
    best = max(fits, key=lambda shift: fits[shift])
    gain = fits[best] - fits[0]
    return (best, gain) if gain >= _MIN_IMPROVEMENT else (0, gain)


def _locate(before: _Window | None, window: _Window, shift: int) -> Misalignment:
    """Return the line, in this window or the one before, from which on the shift fits better."""
    lines = [*before.lines, *window.lines] if before else window.lines
    src = np.concatenate([before.src, window.src]) if before else window.src
    tgt = np.concatenate([before.tgt, window.tgt]) if before else window.tgt
    # Before the position the files are aligned, after it they are shifted: the split with the least
    # total error.
    aligned, shifted = _misfit(src, tgt), _misfit(src, np.roll(tgt, -shift, axis=0))
    costs = np.concatenate([[0.0], np.cumsum(aligned)]) + np.concatenate(
        [np.cumsum(shifted[::-1])[::-1], [0.0]]
    )
    return Misalignment([*lines, lines[-1] + 1][int(np.argmin(costs))], shift)


def _correlation(src: NDArray[np.float64], tgt: NDArray[np.float64]) -> float:
    """Return the correlation of lengths plus the fraction of lines with equal numbers."""
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
