"""Numbers behind the figures of statistics, and that the figures show them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dragoman.evaluate.bleu_by_length import LengthBucket, LengthScores
from dragoman.explain.calibration_and_output_distribution import TokenStatistics, smoothed_target
from dragoman.explain.evaluation_plots import (
    Calibration,
    measure_entropies,
    row_entropies,
    save_calibration,
    save_distribution,
    save_entropies,
    save_length_scores,
)
from tests.explanation_kit import make_explanation


def test_entropies_have_their_closed_forms() -> None:
    uniform = np.full((1, 8), 1 / 8)
    assert row_entropies(uniform)[0] == pytest.approx(math.log(8))
    assert row_entropies(np.eye(3)).tolist() == [0.0, 0.0, 0.0]
    assert row_entropies(np.array([[0.5, 0.25, 0.25]]))[0] == pytest.approx(1.5 * math.log(2))
    # A row that sums to less is normalized first; one without weights has no entropy.
    assert row_entropies(np.array([[0.1, 0.1]]))[0] == pytest.approx(math.log(2))
    assert np.isnan(row_entropies(np.zeros((1, 2)))[0])


def test_heads_are_averaged_over_rows_and_sentences() -> None:
    explanation = make_explanation()
    found = {site.site: site for site in measure_entropies([explanation, explanation])}
    assert list(found) == ["e0", "d0", "x0", "x1"]
    weights = explanation.arrays["x0.w"].astype(np.float64)
    expected = -(weights * np.log(weights)).sum(axis=-1).mean(axis=-1)
    np.testing.assert_allclose(found["x0"].entropy, expected, rtol=1e-6)
    np.testing.assert_allclose(found["x0"].fraction, expected / math.log(4), rtol=1e-6)
    # Uniform over the past: log 1, log 2, log 3, log 4, and the largest possible in each row.
    assert found["d0"].entropy[0] == pytest.approx(math.log(24) / 4, rel=1e-6)
    assert found["d0"].fraction[0] == pytest.approx(1.0, rel=1e-6)


def read(path) -> str:
    return path.read_text(encoding="utf-8")


def test_figures_are_drawn_with_their_numbers(tmp_path) -> None:
    save_entropies(tmp_path / "e.svg", measure_entropies([make_explanation()]), sentences=1)
    assert "Mean entropy of attention rows in nats, 1 sentence" in read(tmp_path / "e.svg")
    assert "Cross-attention" in read(tmp_path / "e.svg")

    rng = np.random.default_rng(0)
    confidence = rng.random(300)
    runs = [
        Calibration(name, confidence, rng.random(300) < confidence, "tokens")
        for name in ("one", "二 $x$")
    ]
    save_calibration(tmp_path / "c.svg", runs)
    assert f"one: ECE {100 * runs[0].error:.1f} %" in read(tmp_path / "c.svg")
    assert "probability of the most probable token" in read(tmp_path / "c.svg")

    sorted_mean = np.sort(rng.dirichlet(np.ones(50)))[::-1]
    tokens = TokenStatistics(confidence, runs[0].right, confidence, sorted_mean)
    save_distribution(tmp_path / "d.svg", [("one", tokens, 0.1), ("two", tokens, 0.0)])
    assert "one: target, label smoothing 0.1" in read(tmp_path / "d.svg")
    assert "two: target, no label smoothing" in read(tmp_path / "d.svg")
    assert smoothed_target(50, 0.1)[1] == pytest.approx(0.1 / 49)

    buckets = [LengthBucket(1, 5, 30, 20.0, 15.0, 26.0), LengthBucket(6, 6, 30, 18.0, 12.0, 24.0)]
    save_length_scores(tmp_path / "l.svg", [("one", LengthScores(buckets, "words", "tok:13a"))])
    assert "source length in words" in read(tmp_path / "l.svg")
    assert "1–5" in read(tmp_path / "l.svg")
