"""Confidence of translations: the fit against closed forms and brute force, and its file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from confidence_kit import CALIBRATION

from dragoman.errors import BundleError
from dragoman.evaluate.classification_metrics import (
    calibration_chance_error,
    expected_calibration_error,
)
from dragoman.evaluate.confidence_calibration import (
    FEATURES,
    MAX_POINTS,
    ConfidenceFeatures,
    ConfidenceMap,
    TranslationTokens,
    area_under_roc,
    fit_confidence,
    fit_logistic,
    isotonic_regression,
)
from dragoman.evaluate.translation_metrics import sentence_chrf

NUMBERS = np.random.default_rng(3)
MAP = CALIBRATION
MEASURES = ("calibration_error", "chance_error", "auroc")


def test_features_are_those_of_the_definition() -> None:
    found = ConfidenceFeatures.measure(
        tokens=["▁a", "b", "c"],
        log_probs=[-0.1, -0.2, -0.6, -0.3],
        src_tokens=["▁x", "<unk>", "<0xE4>", "▁y", "z", "</s>"],
        length_ratio=2.0,
    )
    assert found is not None
    assert found.mean_log_prob == pytest.approx(-0.3)
    assert found.min_log_prob == -0.6
    assert found.known_tokens == pytest.approx(3 / 5)
    assert found.length_fit == pytest.approx(-math.log(3))  # 4/6 is a third of 2


def test_a_forced_token_of_no_probability_has_a_finite_feature() -> None:
    found = ConfidenceFeatures.measure(tokens=["a"], log_probs=[-math.inf, 0.0], src_tokens=["b"])
    assert found is not None
    assert found.min_log_prob == -100.0
    assert found.mean_log_prob == -50.0


def test_without_log_probabilities_there_is_no_confidence() -> None:
    assert MAP.confidence(tokens=["a"], log_probs=[], src_tokens=["b", "</s>"]) is None


@pytest.mark.parametrize("signs", list(itertools.product([-1.0, 1.0], repeat=2)))
def test_the_regression_fulfils_the_conditions_of_its_optimum(signs: tuple[float, ...]) -> None:
    """By torch's gradients: 0 for the bias and positive weights, not negative for those at 0."""
    rows = NUMBERS.normal(size=(300, 4)) * [1.0, 5.0, 0.1, 0.0] + [0.0, 3.0, 0.9, 2.0]
    logits = signs[0] * rows[:, 0] + signs[1] * 0.3 * (rows[:, 1] - 3)
    good = NUMBERS.random(300) < 1 / (1 + np.exp(-logits))
    bias, weights = fit_logistic(rows, good)
    assert (weights >= 0).all()
    assert weights[3] == 0.0, "a constant has no information"
    for at in (0, 1):
        assert (weights[at] > 0) == (signs[at] > 0)
    positives, negatives = int(good.sum()), int((~good).sum())
    labels = torch.tensor(np.where(good, (positives + 1) / (positives + 2), 1 / (negatives + 2)))
    x = torch.tensor(rows)
    theta = torch.tensor([bias, *weights], dtype=torch.float64, requires_grad=True)
    deviation = x.std(0, correction=0)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        theta[0] + x @ theta[1:], labels, reduction="sum"
    )
    (loss + ((theta[1:] * deviation) ** 2).sum() / 2).backward()
    assert theta.grad is not None
    assert abs(float(theta.grad[0])) < 1e-4
    for at in range(3):
        gradient = float(theta.grad[at + 1])
        assert gradient > -1e-4 if weights[at] == 0 else abs(gradient) < 1e-3


def test_without_a_useful_feature_the_regression_is_the_rate_of_good_ones() -> None:
    good = np.array([True] * 30 + [False] * 10)
    bias, weights = fit_logistic(np.zeros((40, 4)), good)
    rate = (30 * 31 / 32 + 10 * 1 / 12) / 40  # Platt's labels
    assert (weights == 0).all()
    assert bias == pytest.approx(math.log(rate / (1 - rate)), abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_isotonic_regression_is_the_maximum_of_minimal_means(count: int) -> None:
    """By the formula of Barlow et al. (1972): max over starts of min over ends of the mean."""
    values = NUMBERS.integers(0, 5, size=count).astype(np.float64)
    expected = [
        max(
            min(values[start : end + 1].mean() for end in range(at, count))
            for start in range(at + 1)
        )
        for at in range(count)
    ]
    assert isotonic_regression(values) == pytest.approx(np.array(expected))


def test_area_under_roc_counts_pairs() -> None:
    confidence = NUMBERS.integers(0, 6, size=30) / 5
    good = NUMBERS.random(30) < 0.4
    pairs = [(a, b) for a in confidence[good] for b in confidence[~good]]
    expected = np.mean([1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs])
    assert area_under_roc(confidence, good) == pytest.approx(float(expected))


def drawn(
    count: int, probability: Any, seed: int = 0
) -> tuple[list[TranslationTokens], list[float], list[str]]:
    """Draw translations that are good with a probability given by their log-probabilities."""
    draw = np.random.default_rng(seed)
    found, chrf = list[TranslationTokens](), list[float]()
    for _ in range(count):
        length = int(draw.integers(2, 12))
        log_probs = (-draw.exponential(0.6) * draw.random(length + 1)).tolist()
        found.append(TranslationTokens(["a"] * length, log_probs, ["b"] * length + ["</s>"]))
        is_good = draw.random() < probability(float(np.mean(log_probs)))
        chrf.append(float(draw.uniform(60, 100) if is_good else draw.uniform(0, 59)))
    return found, chrf, [f"sentence {number}" for number in range(count)]


def test_a_confidence_is_as_calibrated_as_chance_allows() -> None:
    found = fit_confidence(*drawn(4000, lambda mean: 1 / (1 + math.exp(-(2 + 8 * mean)))))
    assert found is not None
    assert found.fitted_on + found.measured_on == 4000
    assert abs(found.fitted_on - 2000) < 150
    assert found.weights["mean_log_prob"] > 3
    assert found.calibration_error < 2 * found.chance_error < 0.06
    assert 0.6 < found.auroc < 0.95


def test_a_step_is_fitted_by_an_isotonic_map() -> None:
    """A logistic curve through probabilities of 0.35 and 0.65 cannot be flat on both sides."""
    found = fit_confidence(*drawn(6000, lambda mean: 0.2 if mean < -0.25 else 0.7))
    assert found is not None
    assert found.kind == "isotonic"
    probabilities = [
        found.probability(ConfidenceFeatures(mean, mean, 1.0, 0.0))
        for mean in np.linspace(-5, 0, 200).tolist()
    ]
    assert probabilities == sorted(probabilities)
    assert found.calibration_error < 2.5 * found.chance_error


def test_the_map_of_few_sentences_is_rarely_isotonic() -> None:
    """Steps always follow the sentences that they are fitted on; the choice must not."""
    kinds = [
        found.kind
        for seed in range(5)
        if (found := fit_confidence(*drawn(400, lambda mean: 1 / (1 + math.exp(-8 * mean)), seed)))
    ]
    assert len(kinds) == 5
    assert kinds.count("logistic") >= 4


def test_sentences_that_measure_the_map_do_not_change_it() -> None:
    translations, chrf, sources = drawn(400, lambda mean: 1 / (1 + math.exp(-(2 + 8 * mean))))
    translations = [
        each._replace(tokens=["a"] * (3 + at % 7)) for at, each in enumerate(translations)
    ]
    held_out = [zlib.crc32(source.encode()) % 2 == 1 for source in sources]
    changed = [
        each._replace(tokens=["a"] * 50, log_probs=[-3.0] * 51) if other else each
        for each, other in zip(translations, held_out, strict=True)
    ]
    before = fit_confidence(translations, chrf, sources)
    after = fit_confidence(changed, chrf, sources)
    assert before is not None
    assert after is not None
    assert before.measured_on == sum(held_out)
    assert before.auroc != after.auroc
    measures = {name: getattr(before, name) for name in MEASURES}
    assert dataclasses.replace(after, **measures) == before


def test_the_fit_does_not_depend_on_the_order_and_is_repeatable() -> None:
    translations, chrf, sources = drawn(400, lambda mean: 1 / (1 + math.exp(-(2 + 8 * mean))))
    once, again = (fit_confidence(translations, chrf, sources) for _ in range(2))
    assert once == again
    order = np.random.default_rng(1).permutation(400).tolist()
    shuffled = fit_confidence(
        [translations[at] for at in order],
        [chrf[at] for at in order],
        [sources[at] for at in order],
    )
    assert once is not None
    assert shuffled is not None
    assert shuffled.bias == pytest.approx(once.bias, abs=1e-5)
    assert shuffled.calibration_error == pytest.approx(once.calibration_error, abs=1e-5)


def test_equal_sources_are_in_one_half() -> None:
    translations, chrf, _ = drawn(400, lambda mean: 0.5)
    assert fit_confidence(translations, chrf, ["the same"] * 400) is None


def test_too_few_sentences_of_a_kind_fit_nothing() -> None:
    translations, chrf, sources = drawn(30, lambda mean: 0.5)
    assert fit_confidence(translations, chrf, sources) is None
    translations, chrf, sources = drawn(400, lambda mean: 0.5)
    assert fit_confidence(translations, [100.0] * 400, sources) is None, "all are the median"
    without = [each._replace(log_probs=[]) for each in translations]
    assert fit_confidence(without, chrf, sources) is None
    assert fit_confidence([], [], []) is None


@pytest.mark.parametrize("name", FEATURES)
def test_the_confidence_never_falls_as_a_feature_grows(name: str) -> None:
    base = ConfidenceFeatures(-0.5, -1.0, 0.8, -0.2)
    points = tuple((at / 3, (at + 3) / 9) for at in range(-2, 5))
    for each in (MAP, dataclasses.replace(MAP, isotonic=points)):
        found = [
            each.probability(base._replace(**{name: value}))
            for value in np.linspace(-10, 1, 300).tolist()
        ]
        assert found == sorted(found)
        assert all(0 <= value <= 1 for value in found)


def test_an_isotonic_map_interpolates_and_is_constant_outside() -> None:
    points = ((-1.0, 0.2), (0.0, 0.4), (2.0, 1.0))
    found = dataclasses.replace(
        MAP, isotonic=points, bias=0.0, weights=dict.fromkeys(FEATURES, 0.0) | {"length_fit": 1.0}
    )
    totals = [-9.0, -1.0, -0.5, 0.0, 1.0, 2.0, 9.0]
    values = [found.probability(ConfidenceFeatures(0.0, 0.0, 1.0, total)) for total in totals]
    assert values == pytest.approx(np.interp(totals, *zip(*points, strict=True)))


@pytest.mark.parametrize("isotonic", [(), ((-1.0, 0.25), (0.5, 0.5))])
def test_a_map_is_the_same_after_its_file(isotonic: Any) -> None:
    chosen = dataclasses.replace(MAP, isotonic=isotonic)
    assert ConfidenceMap.from_dict(json.loads(json.dumps(chosen.to_dict())), "x") == chosen


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"bias": float("nan")}, "bias nan"),
        ({"bias": "1"}, "bias '1'"),
        ({"bias": True}, "bias True"),
        ({"bias": 10**400}, "bias 1000"),
        ({"length_ratio": 0.0}, "length_ratio 0.0"),
        ({"length_ratio": float("inf")}, "length_ratio inf"),
        ({"length_ratio": 1001.0}, "length_ratio 1001.0"),
        ({"length_ratio": 0.0009}, "length_ratio 0.0009"),
        ({"weights": [1, 2]}, "weights [1, 2]"),
        ({"weights": {}}, "weights {}"),
        ({"weights": dict.fromkeys(FEATURES, -1.0)}, "mean_log_prob -1.0"),
        ({"fitted_on": 0.5}, "fitted_on 0.5"),
        ({"auroc": 1.5}, "auroc 1.5"),
        ({"calibration_error": -0.1}, "calibration_error -0.1"),
        ({"isotonic": {}}, "isotonic that is not a short list"),
        ({"isotonic": [[0.0, 0.5]] * (MAX_POINTS + 1)}, "isotonic that is not a short list"),
        ({"isotonic": [[0.0]]}, "the point [0.0]"),
        ({"isotonic": [["a", 0.5]]}, "the point ['a', 0.5]"),
        ({"isotonic": [[0.0, 2.0]]}, "the probability 2.0"),
        ({"isotonic": [[0.0, 0.5], [0.0, 0.6]]}, "the point [0.0, 0.6] after [0.0, 0.5]"),
        ({"isotonic": [[0.0, 0.5], [1.0, 0.4]]}, "the point [1.0, 0.4] after [0.0, 0.5]"),
        ({"program": "rm"}, "an unknown value 'program'"),
        ({"auroc": None}, "auroc None"),
    ],
)
def test_a_hostile_map_is_rejected(change: dict[str, Any], found: str) -> None:
    with pytest.raises(BundleError) as caught:
        ConfidenceMap.from_dict(MAP.to_dict() | change, "m/calibration.json")
    assert "m/calibration.json must be a monotone map to a probability" in str(caught.value)
    assert f"found {found}" in str(caught.value)


def test_a_map_of_another_format_or_with_a_value_missing_is_rejected() -> None:
    with pytest.raises(BundleError, match=r"x must have format 1; found format 2"):
        ConfidenceMap.from_dict(MAP.to_dict() | {"format": 2}, "x")
    values = MAP.to_dict()
    del values["bias"]
    with pytest.raises(BundleError, match=r"found no value 'bias'"):
        ConfidenceMap.from_dict(values, "x")


def test_sentence_chrf_is_sacrebleus() -> None:
    import sacrebleu

    found = sentence_chrf(["a cat sat", "no"], ["a cat sits", "yes"])
    assert found[0] == sacrebleu.sentence_chrf("a cat sat", ["a cat sits"]).score
    assert found[1] == sacrebleu.sentence_chrf("no", ["yes"]).score


@pytest.mark.parametrize("change", [{"length_ratio": 1e3}, {"length_ratio": 1e-3}, {"auroc": 1.0}])
def test_values_at_the_limit_of_a_map_are_accepted(change: dict[str, Any]) -> None:
    assert ConfidenceMap.from_dict(MAP.to_dict() | change, "x").to_dict() == MAP.to_dict() | change


def test_measures_are_those_of_the_held_out_half() -> None:
    translations, chrf, sources = drawn(600, lambda mean: 1 / (1 + math.exp(-(2 + 8 * mean))))
    translations = [
        each._replace(tokens=["a"] * (1 + at % 13)) for at, each in enumerate(translations)
    ]
    found = fit_confidence(translations, chrf, sources)
    assert found is not None
    held_out = np.array([zlib.crc32(source.encode()) % 2 == 1 for source in sources])
    assert found.good_chrf == pytest.approx(float(np.median(chrf)), abs=1e-6)
    ratios = [
        (len(each.tokens) + 1) / len(each.src_tokens)
        for each, held in zip(translations, held_out, strict=True)
        if not held
    ]
    assert found.length_ratio == pytest.approx(float(np.median(ratios)), abs=1e-6)
    confidence = np.array([found.confidence(**each._asdict()) for each in translations])[held_out]
    right = np.array([each >= found.good_chrf for each in chrf])[held_out]
    error = expected_calibration_error(confidence, right, bins=10, equal_mass=True)
    assert found.calibration_error == pytest.approx(error, abs=1e-6)
    chance = calibration_chance_error(confidence, bins=10)
    assert found.chance_error == pytest.approx(chance, abs=1e-6)
    assert found.auroc == pytest.approx(area_under_roc(confidence, right), abs=1e-6)


def test_a_translation_of_the_median_chrf_is_good() -> None:
    translations, _, sources = drawn(300, lambda mean: 0.5)
    found = fit_confidence(translations, [40.0] * 100 + [60.0] * 200, sources)
    assert found is not None
    assert found.good_chrf == 60.0


@pytest.mark.parametrize("held_out", [False, True])
def test_ten_sentences_of_each_kind_in_each_half_suffice(held_out: bool) -> None:
    translations, _, _ = drawn(40, lambda mean: 0.5)
    named = [f"sentence {number}" for number in range(200)]
    halves = [[each for each in named if zlib.crc32(each.encode()) % 2 == at] for at in (0, 1)]
    sources = [*halves[held_out][:20], *halves[not held_out][:20]]
    chrf = [20.0, 80.0] * 20
    assert fit_confidence(translations, chrf, sources) is not None
    assert fit_confidence(translations[1:], chrf[1:], sources[1:]) is None
