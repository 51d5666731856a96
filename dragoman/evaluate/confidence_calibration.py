"""Confidence of a translation: the probability that it is good, calibrated on validation data.

Good means a sentence chrF of at least the validation set's median. A logistic regression maps four
features of a translation to that probability; each may change it in one direction only. Half of the
validation sentences fit it, and the other half measure its calibration error.
"""

from __future__ import annotations

import bisect
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import BundleError
from dragoman.evaluate.classification_metrics import (
    calibration_chance_error,
    expected_calibration_error,
)
from dragoman.text.special_tokens import EOS, SPECIAL_TOKENS, UNK, byte_of_token

FORMAT = 1
MEASURED_BINS = 10  # of equal mass
MIN_EXAMPLES = 10  # of either kind, in each half: with fewer there is nothing to fit or to measure
MAX_POINTS = 1 << 12  # of an isotonic map in a file
MIN_LOG_PROB = -100.0  # a forced token may have a probability of 0

_LARGEST = 1e9  # of the numbers in a file
_DIGITS = 6  # of the numbers in a file
_RIDGE = 1.0  # penalty on the squares of the weights of standardized features

Floats = NDArray[np.float64]


class ConfidenceFeatures(NamedTuple):
    """The features of a confidence: a larger value of each means a better translation."""

    mean_log_prob: float  # per token: the length-normalized log-probability
    min_log_prob: float  # of the least probable token
    known_tokens: float  # fraction of the source tokens that are neither unknown nor bytes
    length_fit: float  # minus the distance of the log length ratio from the usual one; 0 is best

    @classmethod
    def measure(
        cls,
        *,
        tokens: Sequence[str],
        log_probs: Sequence[float],
        src_tokens: Sequence[str],
        length_ratio: float = 1.0,
    ) -> ConfidenceFeatures | None:
        """Return the features of a translation; None without log-probabilities of its tokens."""
        if not log_probs:
            return None
        bounded = [max(MIN_LOG_PROB, each) for each in log_probs]
        unknown = sum(
            each == SPECIAL_TOKENS[UNK] or byte_of_token(each) is not None for each in src_tokens
        )
        return cls(
            mean_log_prob=math.fsum(bounded) / len(bounded),
            min_log_prob=min(bounded),
            known_tokens=1.0 - unknown / max(1, _count_tokens(src_tokens)),
            length_fit=-abs(math.log(_length_ratio(tokens, src_tokens) / length_ratio)),
        )


FEATURES = ConfidenceFeatures._fields


class TranslationTokens(NamedTuple):
    """The tokens of a translation and its source, and the log-probability of each target token."""

    tokens: Sequence[str]
    log_probs: Sequence[float]
    src_tokens: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfidenceMap:
    """A monotone map from features to a probability, with its error on held-out sentences."""

    good_chrf: float  # a translation is good from this sentence chrF
    length_ratio: float  # the usual one, of target to source tokens, each plus 1
    weights: Mapping[str, float]  # by feature, at least 0
    bias: float
    # Points (weighted sum, probability) to interpolate between; empty for the logistic function.
    isotonic: tuple[tuple[float, float], ...] = ()
    fitted_on: int  # sentences
    measured_on: int  # other sentences
    calibration_error: float  # expected calibration error, 10 bins of equal mass
    chance_error: float  # what a perfectly calibrated confidence measures on as many sentences
    auroc: float  # probability that a good translation has a higher confidence than another one

    def confidence(
        self, *, tokens: Sequence[str], log_probs: Sequence[float], src_tokens: Sequence[str]
    ) -> float | None:
        """Return the probability that a translation is good; None without log-probabilities."""
        features = ConfidenceFeatures.measure(
            tokens=tokens,
            log_probs=log_probs,
            src_tokens=src_tokens,
            length_ratio=self.length_ratio,
        )
        return None if features is None else self.probability(features)

    def probability(self, features: ConfidenceFeatures) -> float:
        """Return the probability that a translation with these features is good."""
        total = self.bias + sum(
            self.weights[name] * value for name, value in zip(FEATURES, features, strict=True)
        )
        if not self.isotonic:
            return _logistic(total)
        at = bisect.bisect_right(self.isotonic, (total, math.inf))
        if at == 0 or at == len(self.isotonic):
            return self.isotonic[max(0, at - 1)][1]
        (left, low), (right, high) = self.isotonic[at - 1 : at + 1]
        return low + (high - low) * (total - left) / (right - left)

    @property
    def kind(self) -> str:
        """The name of the map: `isotonic` or `logistic`."""
        return "isotonic" if self.isotonic else "logistic"

    def to_dict(self) -> dict[str, Any]:
        """Return the map as JSON values."""
        values = asdict(self) | {"weights": dict(self.weights)}
        return {"format": FORMAT, **values, "isotonic": [list(point) for point in self.isotonic]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> ConfidenceMap:
        """Return the map in untrusted JSON values; raise BundleError, naming `where`."""
        if values.get("format") != FORMAT:
            raise BundleError(
                f"{where} must have format {FORMAT}",
                found=f"format {values.get('format')!r:.80}",
                fix="use the dragoman that wrote it",
            )
        content = {name: value for name, value in values.items() if name != "format"}
        if problem := _find_problem(content):
            raise BundleError(
                f"{where} must be a monotone map to a probability",
                found=problem,
                fix="copy the model directory again",
            )
        points = tuple((float(left), float(right)) for left, right in content["isotonic"])
        return cls(**(content | {"isotonic": points}))


def fit_confidence(
    translations: Sequence[TranslationTokens], chrf: Sequence[float], sources: Sequence[str]
) -> ConfidenceMap | None:
    """Fit the map on half of the translations and measure it on the others; None with too few.

    `chrf` are sentence scores. The hash of a source text decides its half, so that sentences that
    occur twice are not in both. The map, logistic or isotonic, is chosen by its squared error in
    a cross-validation within the first half: the second one serves for the measurement only.
    """
    scored = [at for at, each in enumerate(translations) if each.log_probs]
    if not scored:
        return None
    good_chrf = _rounded(float(np.median([chrf[at] for at in scored])))
    good = np.array([chrf[at] >= good_chrf for at in scored])
    halves = np.array([zlib.crc32(sources[at].encode("utf-8", "replace")) for at in scored])
    held_out = halves % 2 == 1
    if any(
        np.count_nonzero(held_out[good == kind] == half) < MIN_EXAMPLES
        for kind in (False, True)
        for half in (False, True)
    ):
        return None
    ratios = [_length_ratio(translations[at].tokens, translations[at].src_tokens) for at in scored]
    ratio = _rounded(float(np.median(np.array(ratios)[~held_out])))
    found = [
        ConfidenceFeatures.measure(**translations[at]._asdict(), length_ratio=ratio)
        for at in scored
    ]
    features = np.array(found, dtype=np.float64)  # (N, 4)
    fit, fit_good, folds = features[~held_out], good[~held_out], halves[~held_out] // 2 % 2 == 1
    common: dict[str, Any] = {
        "good_chrf": good_chrf,
        "length_ratio": ratio,
        "fitted_on": len(fit),
        "measured_on": int(held_out.sum()),
        **dict.fromkeys(("calibration_error", "chance_error", "auroc"), 0.0),  # not measured yet
    }

    def fitted(rows: Floats, labels: NDArray[np.bool_], *, isotonic: bool) -> ConfidenceMap:
        bias, weights = fit_logistic(rows, labels)
        linear = ConfidenceMap(
            **common,
            bias=_rounded(bias),
            weights={name: _rounded(each) for name, each in zip(FEATURES, weights, strict=True)},
        )
        if not isotonic:
            return linear
        totals = linear.bias + rows @ np.array([linear.weights[name] for name in FEATURES])
        points = _isotonic_points(totals, _smoothed_labels(labels))
        return ConfidenceMap(**(_fields(linear) | {"isotonic": points}))

    def error(*, isotonic: bool) -> float:
        """Mean squared error of maps that were fitted on the other fold."""
        total = 0.0
        for fold in (False, True):
            chosen = fitted(fit[folds != fold], fit_good[folds != fold], isotonic=isotonic)
            predicted = _probabilities(chosen, fit[folds == fold])
            total += float(((predicted - fit_good[folds == fold]) ** 2).sum())
        return total

    is_isotonic = error(isotonic=True) < error(isotonic=False)
    chosen = fitted(fit, fit_good, isotonic=is_isotonic)
    confidence, right = _probabilities(chosen, features[held_out]), good[held_out]
    measured = {
        "calibration_error": expected_calibration_error(
            confidence, right, bins=MEASURED_BINS, equal_mass=True
        ),
        "chance_error": calibration_chance_error(confidence, bins=MEASURED_BINS),
        "auroc": area_under_roc(confidence, right),
    }
    return ConfidenceMap(
        **(_fields(chosen) | {name: _rounded(each) for name, each in measured.items()})
    )


def fit_logistic(features: Floats, good: NDArray[np.bool_]) -> tuple[float, Floats]:
    """Return bias and weights (F,) of a logistic regression whose weights are at least 0.

    It minimizes the cross-entropy with Platt's smoothed labels (1999) plus half the squares of the
    weights of the standardized features. At the optimum some weights are 0 and the others those of
    a regression without the bound, so the best admissible one of all subsets of features is exact.
    """
    mean, scale = features.mean(0), features.std(0)
    varying = [at for at in range(features.shape[1]) if scale[at] > 1e-9 * max(1.0, abs(mean[at]))]
    labels = _smoothed_labels(good)
    best_loss, best = math.inf, (0.0, np.zeros(features.shape[1]))
    for count in range(len(varying) + 1):
        for subset in itertools.combinations(varying, count):
            chosen = list(subset)
            rows = (features[:, chosen] - mean[chosen]) / scale[chosen]
            loss, bias, weights = _newton(rows, labels)
            if loss < best_loss and (weights >= 0).all():
                raw = np.zeros(features.shape[1])
                raw[chosen] = weights / scale[chosen]
                best_loss, best = loss, (bias - float(raw @ mean), raw)
    return best


def isotonic_regression(values: Floats) -> Floats:
    """Return the non-decreasing sequence with the least squared distance from values (N,).

    Pool adjacent violators (Ayer et al. 1955).
    """
    blocks = list[tuple[float, int]]()  # mean and size
    for value in values:
        mean, size = float(value), 1
        while blocks and blocks[-1][0] >= mean:
            other, count = blocks.pop()
            mean, size = (mean * size + other * count) / (size + count), size + count
        blocks.append((mean, size))
    return np.repeat([mean for mean, _ in blocks], [size for _, size in blocks])


def area_under_roc(confidence: Floats, good: NDArray[np.bool_]) -> float:
    """Return the probability that a good example's confidence is above another's; ties are half."""
    others = np.sort(confidence[~good])
    below = np.searchsorted(others, confidence[good], side="left")
    not_above = np.searchsorted(others, confidence[good], side="right")
    return float((below + not_above).mean() / 2 / len(others))


def _newton(rows: Floats, labels: Floats) -> tuple[float, float, Floats]:
    """Return loss, bias and weights (F,) of a ridge logistic regression, by Newton's method."""
    design = np.column_stack([np.ones(len(rows)), rows])
    ridge = np.full(design.shape[1], _RIDGE)
    ridge[0] = 0.0  # the bias is free

    def loss_of(theta: Floats) -> float:
        logits = design @ theta
        return float((np.logaddexp(0.0, logits) - labels * logits).sum() + ridge @ theta**2 / 2)

    theta = np.zeros(design.shape[1])
    loss = loss_of(theta)
    for _ in range(100):
        predicted = 1.0 / (1.0 + np.exp(-np.clip(design @ theta, -500, 500)))
        gradient = design.T @ (predicted - labels) + ridge * theta
        curvature = (design.T * (predicted * (1 - predicted))) @ design + np.diag(ridge)
        step = np.linalg.solve(curvature + 1e-12 * np.eye(len(theta)), gradient)
        while loss_of(theta - step) > loss and np.abs(step).max() > 1e-12:
            step = step / 2
        theta, before = theta - step, loss
        loss = loss_of(theta)
        if before - loss <= 1e-12 * max(1.0, abs(loss)):
            break
    return loss, float(theta[0]), theta[1:]


def _isotonic_points(totals: Floats, labels: Floats) -> tuple[tuple[float, float], ...]:
    """Return the ends of the blocks of an isotonic regression, with equal totals pooled first."""
    unique, inverse = np.unique(np.round(totals, _DIGITS), return_inverse=True)
    counts = np.bincount(inverse)
    means = np.bincount(inverse, weights=labels) / counts
    smooth = isotonic_regression(np.repeat(means, counts))[np.cumsum(counts) - 1]
    ends = [
        (float(unique[at]), _rounded(float(smooth[at])))
        for at in range(len(unique))
        if at in (0, len(unique) - 1)
        or smooth[at] != smooth[at - 1]
        or smooth[at] != smooth[at + 1]
    ]
    return tuple(ends[:MAX_POINTS])


def _smoothed_labels(good: NDArray[np.bool_]) -> Floats:
    """Return Platt's labels: no finite number of examples proves a probability of 0 or 1."""
    return np.where(good, (good.sum() + 1) / (good.sum() + 2), 1 / ((~good).sum() + 2))


def _probabilities(chosen: ConfidenceMap, features: Floats) -> Floats:
    """Return the probabilities (N,) of rows of features, exactly as for single translations."""
    return np.array([chosen.probability(ConfidenceFeatures(*row)) for row in features.tolist()])


def _length_ratio(tokens: Sequence[str], src_tokens: Sequence[str]) -> float:
    """Return the ratio of target to source tokens, each plus 1, which may be empty."""
    return (_count_tokens(tokens) + 1) / (_count_tokens(src_tokens) + 1)


def _count_tokens(tokens: Sequence[str]) -> int:
    return sum(each != SPECIAL_TOKENS[EOS] for each in tokens)


def _logistic(value: float) -> float:
    power = math.exp(-min(abs(value), 700.0))
    return (1.0 if value >= 0 else power) / (1.0 + power)


def _rounded(value: float) -> float:
    return round(float(value), _DIGITS)


def _fields(found: ConfidenceMap) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}


def _find_problem(content: Mapping[str, Any]) -> str:
    """Return the problem with the values of a map; empty if they are valid."""
    names = {field.name for field in fields(ConfidenceMap)}
    if wrong := sorted(set(content) ^ names):
        return f"{'no' if wrong[0] in names else 'an unknown'} value {wrong[0]!r:.80}"
    weights, points = content["weights"], content["isotonic"]
    if not isinstance(weights, dict) or set(weights) != set(FEATURES):
        return f"weights {weights!r:.80} instead of one for each of {', '.join(FEATURES)}"
    for name, value in (*content.items(), *weights.items()):
        if name in ("weights", "isotonic"):
            continue
        if not _is_number(value) or (name != "bias" and value < 0):
            return f"{name} {value!r:.80}"
        if name in ("fitted_on", "measured_on") and type(value) is not int:
            return f"{name} {value!r:.80}"
        if name in ("calibration_error", "chance_error", "auroc") and value > 1:
            return f"{name} {value!r:.80}"
    if not 1e-3 <= content["length_ratio"] <= 1e3:
        return f"length_ratio {content['length_ratio']!r:.80}"
    if not isinstance(points, list) or len(points) > MAX_POINTS:
        return "isotonic that is not a short list"
    for point in points:
        if not isinstance(point, list) or len(point) != 2 or not all(map(_is_number, point)):
            return f"the point {point!r:.80}"
        if not 0 <= point[1] <= 1:
            return f"the probability {point[1]!r:.80}"
    for left, right in itertools.pairwise(points):
        if left[0] >= right[0] or left[1] > right[1]:
            return f"the point {right!r:.80} after {left!r:.80}"
    return ""


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a number of a usual size; NaN is not."""
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST
