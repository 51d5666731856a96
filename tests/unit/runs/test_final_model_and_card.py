"""The final model: selection of weights, and the estimated time of a validation."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_kit import checkpoint_tensors, save_checkpoint
from training_kit import Corpus, tiny_model

from dragoman.bundle.golden_vectors import GoldenInput
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config
from dragoman.data.parallel_corpus import SentencePair
from dragoman.errors import CorruptError
from dragoman.runs import measured_resource_estimate as resource_estimate
from dragoman.runs.final_model_and_card import (
    NUM_GOLDEN_SENTENCES,
    select_golden_sentences,
    select_scored_sentences,
    select_weights,
)
from dragoman.runs.measured_resource_estimate import (
    PROBE_VALIDATION_BATCHES,
    PROBE_VALIDATION_SENTENCES,
    estimate_validation_seconds,
)
from dragoman.runs.time_budget import TimeBudget


@pytest.fixture
def run(tmp_path):
    with RunDirectory(tmp_path / "training", keep_checkpoints=9) as directory:
        yield directory


def config(**train: Any) -> Config:
    return Config().replace(train={"average_checkpoints": 0, **train})


def first(weights: dict[str, torch.Tensor]) -> float:
    return float(weights["layer.weight"][0, 0])


def test_the_best_step_is_taken_or_the_last_with_its_moving_average(run):
    save_checkpoint(run, 1, 2, 3)
    weights, description = select_weights(run, config(final_checkpoint="best"))
    assert (first(weights), description) == (
        1.0,
        "step 3, last checkpoint, EMA",
    )  # none was kept as the best
    run.keep_best(2)
    weights, description = select_weights(run, config(final_checkpoint="best"))
    assert (first(weights), description) == (
        pytest.approx(2 / 3),
        "step 2, best checkpoint, EMA",
    )
    weights, description = select_weights(run, config(final_checkpoint="last"))
    assert (first(weights), description) == (1.0, "step 3, last checkpoint, EMA")
    run.save_checkpoint(4, checkpoint_tensors(4) | {"ema": None}, {})
    weights, description = select_weights(run, config(final_checkpoint="last"))
    assert (first(weights), description) == (4.0, "step 4, last checkpoint")


@pytest.mark.parametrize(
    ("count", "steps", "mean"), [(2, "3, 2", 2.5), (3, "3, 2, 1", 2.0), (9, "3, 2, 1", 2.0)]
)
def test_the_newest_checkpoints_are_averaged_before_the_best_is_searched(run, count, steps, mean):
    save_checkpoint(run, 1, 2, 3)
    run.keep_best(1)
    weights, description = select_weights(run, config(average_checkpoints=count))
    assert description == f"average of steps {steps}"
    assert first(weights) == pytest.approx(mean / 3)  # of their moving averages


def test_one_averaged_checkpoint_is_no_average(run):
    save_checkpoint(run, 1, 2, 3)
    run.keep_best(1)
    for count in (0, 1):
        chosen = config(average_checkpoints=count, final_checkpoint="best")
        assert select_weights(run, chosen)[1] == "step 1, best checkpoint, EMA"


@pytest.mark.parametrize("count", [0, 2])
def test_buffers_without_a_moving_average_are_those_of_the_weights(run, count):
    """Running means of a batch norm, thresholds of a classifier."""
    for step in (2, 4):
        tensors = checkpoint_tensors(step)
        tensors["weights"]["norm.running_mean"] = torch.full((4,), float(step))
        run.save_checkpoint(step, tensors, {})
    weights, _ = select_weights(run, config(average_checkpoints=count, final_checkpoint="last"))
    last = 3.0 if count else 4.0  # the mean of both, or the last
    assert first(weights) == pytest.approx(last / 3)
    assert weights["norm.running_mean"].tolist() == [last] * 4


def test_a_run_without_a_checkpoint_writes_no_model(run):
    for settings in ({}, {"average_checkpoints": 3}, {"final_checkpoint": "last"}):
        with pytest.raises(CorruptError, match="must have a valid checkpoint; found none in"):
            select_weights(run, config(**settings))


@pytest.mark.parametrize("sentences", [0, 3, 200])
@pytest.mark.parametrize("translates", [True, False])
def test_a_validation_is_timed_by_a_few_batches_and_sentences(monkeypatch, sentences, translates):
    """On a clock that each batch and each sentence moves by a second."""
    corpus, now = Corpus(12), SimpleNamespace(now=0.0)
    plan = corpus.plan()
    batch = corpus.collate(plan)(plan.epoch(0)[0], 0)
    num_sentences: list[int] = []

    @contextlib.contextmanager
    def autocast(device: torch.device):
        now.now += 1.0
        yield

    def translate(model: Any, src: list[str]) -> None:
        num_sentences.append(len(src))
        now.now += len(src)

    monkeypatch.setattr(resource_estimate, "time", SimpleNamespace(monotonic=lambda: now.now))
    validation: Any = SimpleNamespace(
        batches=lambda: [batch] * 10,
        precision=SimpleNamespace(autocast=autocast),
        device=torch.device("cpu"),
        count=10,
        translate=translate if translates else None,
        sample=SimpleNamespace(src=["a"] * sentences),
    )
    model = tiny_model().train()
    found = estimate_validation_seconds(validation, model)
    assert model.training
    few = min(sentences, PROBE_VALIDATION_SENTENCES)
    assert num_sentences == ([min(2, few), few] if translates and sentences else [])
    batches = (
        10 * PROBE_VALIDATION_BATCHES / PROBE_VALIDATION_BATCHES
    )  # the first of those timed only warms up
    assert found == pytest.approx(
        batches + (few * max(1, sentences / few) ** 0.75 * 0.4 if num_sentences else 0)
    )
    assert estimate_validation_seconds(None, model) == 0.0


def test_golden_sentences_are_of_medium_length_and_of_each_direction() -> None:
    texts = ["x" * size for size in range(1, 40)]
    plain = [SentencePair(number, text, "y") for number, text in enumerate([*texts, "", " "], 1)]
    prepared: Any = SimpleNamespace(sentences=plain)
    assert select_golden_sentences(prepared) == texts[19 : 19 + NUM_GOLDEN_SENTENCES]
    prepared.sentences = [
        SentencePair(pair.number, pair.src, "y", direction=direction)
        for direction in ("de-en", "en-de")
        for pair in plain
    ]
    half = NUM_GOLDEN_SENTENCES // 2
    assert select_golden_sentences(prepared) == [
        GoldenInput(text, language) for language in ("en", "de") for text in texts[19 : 19 + half]
    ]


def test_as_many_sentences_are_scored_as_the_time_budget_allows() -> None:
    """Of the 60 seconds left after training, seven are kept; a sentence counts a fifth more."""
    pairs = [SentencePair(number, "a", "b") for number in range(100)]
    budget = TimeBudget(100.0, spent=40.0, now=lambda: 0.0)
    assert select_scored_sentences(pairs, budget, 1.0) == pairs[: int(53 / 1.2)]
    assert select_scored_sentences(pairs, budget, 0.0) == pairs
    assert select_scored_sentences(pairs, TimeBudget(0.0), 1e9) == pairs
    late = TimeBudget(100.0, spent=99.0, now=lambda: 0.0)
    assert select_scored_sentences(pairs, late, 1.0) == []
