"""Metrics of classification against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman.evaluate.classification_metrics import (
    calibration_chance_error,
    expected_calibration_error,
    score_classes,
    tune_thresholds,
)


def count_f1(predicted: np.ndarray, expected: np.ndarray) -> float:
    """Return F1 of decisions counted one by one."""
    tp = fp = fn = 0
    for guess, truth in zip(predicted.ravel(), expected.ravel(), strict=True):
        tp += guess and truth
        fp += guess and not truth
        fn += truth and not guess
    if tp == 0:
        return 0.0
    precision, recall = tp / (tp + fp), tp / (tp + fn)
    return 2 * precision * recall / (precision + recall)


def decisions(seed: int, rows: int = 40, labels: int = 5) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    probabilities = generator.random((rows, labels))
    expected = generator.random((rows, labels)) < 0.3 + 0.4 * probabilities
    expected[:, -1] = False  # a label without examples
    return probabilities, expected


@pytest.mark.parametrize("seed", range(3))
def test_scores_of_several_labels(seed: int) -> None:
    probabilities, expected = decisions(seed)
    predicted = probabilities >= 0.5
    scores = score_classes(predicted, expected, probabilities)
    by_class = [count_f1(predicted[:, each], expected[:, each]) for each in range(5)]
    assert scores.macro_f1 == pytest.approx(np.mean(by_class))
    assert [each.f1 for each in scores.classes] == pytest.approx(by_class)
    assert scores.micro_f1 == pytest.approx(count_f1(predicted, expected))
    exact = [bool((one == other).all()) for one, other in zip(predicted, expected, strict=True)]
    assert scores.accuracy == pytest.approx(np.mean(exact))
    assert scores.classes[0].support == expected[:, 0].sum()
    assert scores.classes[0].predicted == predicted[:, 0].sum()
    assert scores.classes[-1].f1 == 0.0
    assert scores.classes[0].precision == pytest.approx(
        (predicted & expected)[:, 0].sum() / predicted[:, 0].sum()
    )
    assert scores.classes[0].recall == pytest.approx(
        (predicted & expected)[:, 0].sum() / expected[:, 0].sum()
    )


def test_micro_f1_of_one_class_per_text_is_the_accuracy() -> None:
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(4), 50)
    predicted = np.arange(4) == probabilities.argmax(axis=1)[:, None]
    expected = np.arange(4) == generator.integers(0, 4, 50)[:, None]
    scores = score_classes(predicted, expected, probabilities)
    assert scores.micro_f1 == pytest.approx(scores.accuracy)
    confidence = probabilities.max(axis=1)
    right = (predicted & expected).any(axis=1)
    assert scores.calibration_error == pytest.approx(expected_calibration_error(confidence, right))


def test_confidence_of_a_label_that_is_not_predicted_is_that_of_its_absence() -> None:
    probabilities = np.array([[0.9, 0.1], [0.9, 0.9], [0.1, 0.1]])
    predicted = probabilities > 0.5
    scores = score_classes(predicted, predicted, probabilities)
    assert scores.calibration_error == pytest.approx(0.1)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    confidence = np.array([0.95, 0.95, 0.95, 0.95, 0.55, 0.55])
    right = np.array([True, True, True, False, True, False])
    expected = (4 * abs(0.95 - 0.75) + 2 * abs(0.55 - 0.5)) / 6
    assert expected_calibration_error(confidence, right, bins=10) == pytest.approx(expected)
    # A bin includes its upper end; 0 belongs to the first.
    assert expected_calibration_error(np.array([0.5]), np.array([False]), bins=2) == 0.5
    assert expected_calibration_error(np.array([0.0, 1.0]), np.array([False, True])) == 0.0
    assert expected_calibration_error(np.zeros(0), np.zeros(0, bool)) == 0.0
    # A probability that rounding lifts above 1 belongs to the last bin.
    confidence, right = np.array([1 + 1e-7, 0.95]), np.array([False, True])
    found = expected_calibration_error(confidence, right, bins=10)
    assert found == pytest.approx((1 - 0.05) / 2)


def test_calibration_error_with_bins_of_equal_mass() -> None:
    confidence = np.array([0.9, 0.1, 0.3, 0.2, 0.8, 0.85])
    right = np.array([True, False, True, False, True, False])
    # Bins (0.1, 0.2, 0.3) with one right of three and (0.8, 0.85, 0.9) with two.
    expected = (abs(1 - 0.6) + abs(2 - 2.55)) / 6
    found = expected_calibration_error(confidence, right, bins=2, equal_mass=True)
    assert found == pytest.approx(expected)
    # Equal confidences share a bin, whatever their order.
    constant = np.full(10, 0.4)
    right = np.arange(10) < 7
    for labels in (right, right[::-1]):
        found = expected_calibration_error(constant, labels, bins=5, equal_mass=True)
        assert found == pytest.approx(0.3)
    assert expected_calibration_error(np.zeros(0), np.zeros(0, bool), equal_mass=True) == 0.0


def test_chance_error_is_the_mean_of_calibrated_draws() -> None:
    draw = np.random.default_rng(0)
    confidence = draw.random(300)
    simulated = [
        expected_calibration_error(
            confidence, draw.random(300) < confidence, bins=10, equal_mass=True
        )
        for _ in range(400)
    ]
    found = calibration_chance_error(confidence, bins=10)
    assert found == pytest.approx(float(np.mean(simulated)), rel=0.05)
    assert calibration_chance_error(np.zeros(0), bins=10) == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_tuned_thresholds_are_the_best_of_all(seed: int) -> None:
    probabilities, expected = decisions(seed)
    every = np.concatenate([[0.0], np.sort(probabilities.ravel()) + 1e-9])
    best = max(count_f1(probabilities >= each, expected) for each in every)
    tuned = tune_thresholds(probabilities, expected, by_label=False)
    assert len(set(tuned)) == 1
    assert count_f1(probabilities >= tuned, expected) == pytest.approx(best)
    tuned = tune_thresholds(probabilities, expected, by_label=True)
    for label in range(4):
        column, truth = probabilities[:, label], expected[:, label]
        best = max(count_f1(column >= each, truth) for each in every)
        assert count_f1(column >= tuned[label], truth) == pytest.approx(best)


def test_a_rare_label_gets_the_threshold_of_the_highest_expected_f1() -> None:
    """Tuned on one example of low probability, it would admit almost everything."""
    generator = np.random.default_rng(3)
    probabilities = np.sort(generator.beta(0.3, 3.0, (60, 1)), axis=0)
    expected = np.zeros((60, 1), bool)
    expected[0] = True
    (tuned,) = tune_thresholds(probabilities, expected, by_label=True)
    # F1 over all possible truths, drawn by the probabilities; its mean has the same maximum as
    # the ratio of means up to what 60 texts leave.
    truths = generator.random((4000, 60)) < probabilities[:, 0]
    mean_f1 = {
        count: np.mean(
            2 * truths[:, 60 - count :].sum(axis=1) / (truths.sum(axis=1) + count).clip(min=1)
        )
        for count in range(1, 61)
    }
    chosen = int((probabilities >= tuned).sum())
    assert mean_f1[chosen] > max(mean_f1.values()) - 0.01
    # Lipton et al. (2014): the best threshold is half of the F1 that it reaches.
    assert tuned == pytest.approx(mean_f1[chosen] / 2, abs=0.05)


@pytest.mark.parametrize(("positives", "is_tuned"), [(4, False), (5, True)])
def test_five_examples_of_a_label_suffice_for_a_threshold_of_its_own(
    positives: int, is_tuned: bool
) -> None:
    probabilities = np.linspace(0.02, 0.4, 20)[:, None]
    expected = np.arange(20)[:, None] >= 20 - positives
    tuned = tune_thresholds(probabilities, expected, by_label=True)
    assert (count_f1(probabilities >= tuned, expected) == 1.0) == is_tuned


def test_thresholds_of_equal_probabilities() -> None:
    probabilities, expected = np.full((8, 1), 0.3), np.array([[True], [False]] * 2 + [[True]] * 4)
    tuned = tune_thresholds(probabilities, expected, by_label=True)
    assert (probabilities >= tuned).all()


def test_calibration_error_has_fifteen_bins() -> None:
    right = np.array([False, True])
    # 0.605 and 0.66 are in the tenth of fifteen bins, 0.61 and 0.69 in two.
    found = expected_calibration_error(np.array([0.605, 0.66]), right)
    assert found == pytest.approx((0.605 - 0.34) / 2)
    found = expected_calibration_error(np.array([0.61, 0.69]), right)
    assert found == pytest.approx((0.61 + 0.31) / 2)


def test_a_text_without_a_predicted_class_is_calibrated_by_decision() -> None:
    probabilities, expected = np.array([[0.4, 0.3]]), np.array([[True, False]])
    scores = score_classes(np.zeros((1, 2), bool), expected, probabilities)
    assert scores.calibration_error == pytest.approx((0.6 + 0.3) / 2)
    scores = score_classes(expected, np.ones((1, 2), bool), probabilities)
    assert scores.calibration_error == pytest.approx((0.6 + 0.7) / 2)


@pytest.mark.parametrize(
    ("probabilities", "threshold"),
    [([0.9, 0.8, 0.7, 0.1], 0.85), ([0.98, 0.94, 0.7, 0.6], 0.3)],
)
def test_of_equally_good_thresholds_the_nearest_to_a_half_is_taken(
    probabilities: list[float], threshold: float
) -> None:
    """The first one alone and all four have the same F1, 2/3."""
    expected = np.array([[True], [False], [False], [True]])
    tuned = tune_thresholds(np.array(probabilities)[:, None], expected, by_label=False)
    assert tuned == pytest.approx([threshold])


def test_without_examples_the_threshold_is_a_half() -> None:
    probabilities = np.array([[0.9, 0.8], [0.2, 0.1]])
    tuned = tune_thresholds(probabilities, np.zeros((2, 2), bool), by_label=False)
    assert tuned.tolist() == [0.5, 0.5]
    tuned = tune_thresholds(np.zeros((2, 1)), np.zeros((2, 1), bool), by_label=True)
    assert tuned.tolist() == [0.5]


def test_no_texts_score_zero() -> None:
    nothing = np.zeros((0, 2), bool)
    scores = score_classes(nothing, nothing, np.zeros((0, 2)))
    assert scores.metrics() == dict.fromkeys(
        ("accuracy", "macro_f1", "micro_f1", "calibration_error"), 0.0
    )


def test_the_calibration_error_is_of_the_predicted_class_not_the_most_probable() -> None:
    probabilities = np.array([[0.7, 0.3], [0.7, 0.3]])
    predicted = np.array([[False, True], [False, True]])
    scores = score_classes(predicted, predicted, probabilities)
    # both are predicted with 0.3, and both are right
    assert scores.calibration_error == pytest.approx(1.0 - 0.3)
