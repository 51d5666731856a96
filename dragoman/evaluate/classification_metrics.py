"""Metrics of classification: accuracy, F1 by class, macro and micro F1, calibration error."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CALIBRATION_BINS = 15  # Guo et al. (2017)


class ClassScore(NamedTuple):
    """Scores of one class."""

    precision: float
    recall: float
    f1: float
    support: int  # examples that have the class
    predicted: int  # examples predicted to have it


class ClassificationScores(NamedTuple):
    """Metrics of the predictions of a data set, as fractions."""

    accuracy: float  # of whole examples: with several labels, all of them must be right
    macro_f1: float  # mean over all classes, also those without examples
    micro_f1: float  # of all decisions together
    calibration_error: float
    classes: tuple[ClassScore, ...]

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name, those by class left out."""
        names = ("accuracy", "macro_f1", "micro_f1", "calibration_error")
        return {name: float(getattr(self, name)) for name in names}


def score_classes(
    predicted: NDArray[np.bool_],
    expected: NDArray[np.bool_],
    probabilities: NDArray[np.floating],
    *,
    calibrated: NDArray[np.bool_] | slice = slice(None),
) -> ClassificationScores:
    """Score predictions (N, C) against the expected classes (N, C).

    `probabilities` (N, C) are for the calibration error: of the predicted class if every example
    has one class, else of each decision. `calibrated` (N,) are the examples that it is measured on,
    those that have probabilities. A ratio of zero by zero is 0, as in scikit-learn.
    """
    true_positives = (predicted & expected).sum(axis=0)
    support, selected = expected.sum(axis=0), predicted.sum(axis=0)
    precision, recall = _divide(true_positives, selected), _divide(true_positives, support)
    f1 = _divide(2 * true_positives, support + selected)
    chosen, wanted, values = predicted[calibrated], expected[calibrated], probabilities[calibrated]
    single = bool((wanted.sum(axis=1) == 1).all() and (chosen.sum(axis=1) == 1).all())
    right: NDArray[np.bool_]
    if single:
        confidence = np.where(chosen, values, 0.0).sum(axis=1)
        right = np.asarray((chosen & wanted).any(axis=1))
    else:
        confidence = np.where(chosen, values, 1 - values).ravel()
        right = (chosen == wanted).ravel()
    return ClassificationScores(
        accuracy=_mean((predicted == expected).all(axis=1)),
        macro_f1=_mean(f1),
        micro_f1=float(
            _divide(2 * true_positives.sum(keepdims=True), (support + selected).sum(keepdims=True))[
                0
            ]
        ),
        calibration_error=expected_calibration_error(confidence, right),
        classes=tuple(
            ClassScore(
                float(precision[each]),
                float(recall[each]),
                float(f1[each]),
                int(support[each]),
                int(selected[each]),
            )
            for each in range(len(f1))
        ),
    )


def expected_calibration_error(
    confidence: NDArray[np.floating],
    right: NDArray[np.bool_],
    *,
    bins: int = CALIBRATION_BINS,
    equal_mass: bool = False,
) -> float:
    r"""Return the mean difference between confidence and accuracy, over bins of equal width.

    .. math:: \sum_b \frac{n_b}{N} \lvert \mathrm{acc}(b) - \mathrm{conf}(b) \rvert

    Guo et al. (2017), equation 3; a bin includes its upper end. With `equal_mass` the bins hold
    equally many predictions instead, but those of equal confidence share one.
    """
    if not len(confidence):
        return 0.0
    if not np.isfinite(confidence).all():  # of a model that diverged
        return math.nan
    if equal_mass:
        bin_of = _equal_mass_bins(confidence, bins)
    else:
        bin_of = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=right.astype(np.float64) - confidence, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def calibration_chance_error(confidence: NDArray[np.floating], *, bins: int) -> float:
    r"""Return the calibration error that a perfectly calibrated confidence is expected to measure.

    With bins of equal mass. The sum of a bin's errors is then about normal, with the variance of
    independent Bernoulli variables, and the mean of its absolute value is

    .. math:: \sqrt{\tfrac{2}{\pi} \textstyle\sum_{i \in b} p_i (1 - p_i)}
    """
    if not len(confidence):
        return 0.0
    variance = np.bincount(
        _equal_mass_bins(confidence, bins), weights=confidence * (1 - confidence), minlength=bins
    )
    return float(np.sqrt(2 / np.pi * variance).sum() / len(confidence))


def _equal_mass_bins(confidence: NDArray[np.floating], bins: int) -> NDArray[np.int64]:
    """Return the bin of each prediction (N,) by its rank; equal confidences share a bin."""
    rank = np.searchsorted(np.sort(confidence), confidence, side="left")
    return (rank * bins // len(confidence)).astype(np.int64)


MIN_POSITIVES = 5  # examples of a label that a threshold of its own is tuned on


def tune_thresholds(
    probabilities: NDArray[np.floating], expected: NDArray[np.bool_], *, by_label: bool
) -> NDArray[np.float64]:
    """Return the thresholds (C,) with the highest F1 on a data set.

    One threshold for all labels maximizes micro F1; with `by_label` each maximizes the F1 of its
    label (Yang 2001, "SCut"). Tuned on one or two examples it would admit anything: with fewer
    than MIN_POSITIVES it maximizes the F1 that is expected of the probabilities themselves, which
    needs no examples (Lipton, Elkan and Narayanaswamy 2014). Candidates lie halfway between
    neighbouring probabilities; of equal ones the nearest to 0.5 is taken, which is also that of no
    examples.
    """
    if not by_label:
        common = _best_threshold(probabilities.ravel(), expected.ravel())
        return np.full(probabilities.shape[1], common)
    is_rare = expected.sum(axis=0) < MIN_POSITIVES
    return np.array(
        [
            _best_threshold(found, found if rare else right)
            for found, right, rare in zip(probabilities.T, expected.T, is_rare, strict=True)
        ]
    )


def _best_threshold(
    probabilities: NDArray[np.floating], expected: NDArray[np.bool_] | NDArray[np.floating]
) -> float:
    """Return the threshold of the decisions `probability >= threshold` with the highest F1.

    `expected` are the right decisions, or their probabilities.
    """
    if not expected.any():
        return 0.5
    order = np.argsort(-probabilities, kind="stable")
    sorted_, hits = probabilities[order].astype(np.float64), np.cumsum(expected[order])
    selected = np.arange(1, len(sorted_) + 1)
    f1 = 2 * hits / (selected + expected.sum())
    below = np.append(sorted_[1:], 0.0)
    possible = sorted_ > below  # equal probabilities cannot be separated
    candidates = ((sorted_ + below) / 2)[possible]
    if not len(candidates):
        return 0.5
    best = f1[possible] >= f1[possible].max() - 1e-12
    return float(min(candidates[best], key=lambda each: abs(each - 0.5)))


def _divide(above: NDArray[np.integer], below: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the quotient; zero by zero is 0."""
    return np.where(below > 0, above / np.maximum(below, 1), 0.0)


def _mean(values: NDArray[np.floating] | NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else 0.0
