"""Calibration and output distributions against plain loops over the model's own numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dragoman.config import ModelConfig
from dragoman.evaluate.classification import expected_calibration_error
from dragoman.explain import model_statistics
from dragoman.explain.figures_statistics import Calibration
from dragoman.explain.model_statistics import (
    measure_documents,
    measure_pairs,
    reliability_bins,
    smoothed_target,
)
from dragoman.models.factory import build_model
from dragoman.models.language_model import LanguageDropout, build_language_model
from dragoman.ops.cross_entropy import linear_cross_entropy_reference
from dragoman.text.special_tokens import BOS, EOS

PAIRS = [([5, 6, 7], [8, 9]), ([5], [10, 11, 12, 13]), ([9, 9], [7])]


def tiny_config(**changes) -> ModelConfig:
    sizes = {"width": 16, "heads": 2, "ffn_width": 32}
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = tiny_config(encoder=("transformer",), decoder=("transformer",))
    return build_model(config, src_vocab_size=20, tgt_vocab_size=20).eval()


@torch.no_grad()
def loop(model) -> list[tuple[torch.Tensor, int]]:
    """Return each position's distribution and reference, one sentence at a time."""
    found = []
    for src, tgt in PAIRS:
        logits = model(torch.tensor([[*src, EOS]]), torch.tensor([[BOS, *tgt]]))[0]
        found += list(zip(logits.double().softmax(-1), [*tgt, EOS], strict=True))
    return found


def test_every_token_is_measured_as_in_a_plain_loop(model) -> None:
    found = measure_pairs(model, PAIRS)
    expected = loop(model)
    assert len(found.right) == len(expected) == sum(len(tgt) + 1 for _, tgt in PAIRS)
    # Batches are sorted by length, so the values are compared as multisets.
    np.testing.assert_allclose(
        np.sort(found.confidence), np.sort([float(p.max()) for p, _ in expected]), atol=1e-6
    )
    np.testing.assert_allclose(
        np.sort(found.reference), np.sort([float(p[t]) for p, t in expected]), atol=1e-6
    )
    assert found.right.sum() == sum(int(p.argmax()) == t for p, t in expected)
    mean = torch.stack([p.sort(descending=True).values for p, _ in expected]).mean(0)
    np.testing.assert_allclose(found.sorted_mean, mean.numpy(), atol=1e-6)
    assert found.sorted_mean.sum() == pytest.approx(1.0)


def test_the_number_of_tokens_is_bounded(model, monkeypatch) -> None:
    monkeypatch.setattr(model_statistics, "MAX_TOKENS", 4)
    monkeypatch.setattr(model_statistics, "_MAX_LOGITS", 40)
    assert len(measure_pairs(model, PAIRS * 9).right) == 4


def test_language_models_read_segments(monkeypatch) -> None:
    torch.manual_seed(4)
    config = tiny_config(encoder=(), decoder=("transformer",))
    model = build_language_model(
        config, vocab_size=20, max_distance=0, dropout=LanguageDropout()
    ).eval()
    documents = [[5, 6, 7, 8, 9], [10, 11]]
    found = measure_documents(model, documents, segment=3)
    rows = [([BOS, 5, 6], [5, 6, 7]), ([7, 8], [8, 9]), ([BOS, 10], [10, 11])]
    with torch.no_grad():
        expected = [
            float(p[t])
            for inputs, targets in rows
            for p, t in zip(model(torch.tensor([inputs]))[0].softmax(-1), targets, strict=True)
        ]
    np.testing.assert_allclose(found.reference, expected, atol=1e-6)


def test_the_calibration_error_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(500)
    right = rng.random(500) < confidence**2
    total = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        inside = [at for at in range(500) if low < confidence[at] <= high]
        if inside:
            accuracy = sum(bool(right[at]) for at in inside) / len(inside)
            mean = sum(float(confidence[at]) for at in inside) / len(inside)
            total += len(inside) / 500 * abs(accuracy - mean)
    run = Calibration("model", confidence, right, "tokens")
    assert run.error == pytest.approx(total)
    assert run.error == pytest.approx(expected_calibration_error(confidence, right))
    bins = reliability_bins(confidence, right)
    assert sum(each.predictions for each in bins) == 500
    assert sum(
        each.predictions / 500 * abs(each.accuracy - each.confidence) for each in bins
    ) == pytest.approx(total)


def test_the_smoothed_target_is_that_of_the_loss() -> None:
    """Cross-entropy against the target equals the loss that training minimizes."""
    target = smoothed_target(10, 0.1)
    assert target.sum() == pytest.approx(1.0)
    hidden, weight = torch.randn(1, 4), torch.randn(10, 4)
    loss = linear_cross_entropy_reference(
        hidden, weight, None, torch.tensor([3]), smoothing=0.1
    ).loss
    log_probs = (hidden @ weight.T).log_softmax(-1)[0]
    order = [3, *(at for at in range(10) if at != 3)]
    assert -sum(target[at] * float(log_probs[each]) for at, each in enumerate(order)) == (
        pytest.approx(float(loss), abs=1e-5)
    )
    assert smoothed_target(4, 0.0).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert math.isclose(smoothed_target(4, 0.3)[1], 0.1)
