"""Estimates before a run: memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training_kit import FakeCUDAGraphRunner

from dragoman.config import Config, TrainConfig
from dragoman.errors import ConfigError
from dragoman.runs import measured_resource_estimate as resource_estimate
from dragoman.runs.measured_resource_estimate import RunEstimate
from dragoman.runtime import device
from dragoman.training.throughput_benchmark import Throughput


def test_a_model_larger_than_memory_is_rejected_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource_estimate, "_physical_memory", lambda: 4_000_000_000)
    resource_estimate.require_model_fits_memory(1_000_000_000)
    with pytest.raises(
        ConfigError,
        match=r"found 1,000,000,001 parameters, 4\.0 GB in float32, and 4\.0 GB of memory; lower",
    ):
        resource_estimate.require_model_fits_memory(1_000_000_001)


def test_unknown_free_memory_rejects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_value_error(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(device.os, "sysconf", raise_value_error)
    resource_estimate.require_model_fits_memory(10**15)


@pytest.mark.parametrize(
    ("error", "tried"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), [8, 4, 2, 1]),
        (RuntimeError("expected a matrix"), [8]),
    ],
)
def test_only_a_lack_of_memory_halves_the_batch(
    error: Exception, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fail(config: Config, where: torch.device, rows: int) -> float:
        seen.append(rows)
        raise error

    monkeypatch.setattr(resource_estimate, "_measure_rows", fail)
    config = Config().replace(train={"batch_tokens": 8 * resource_estimate.RANDOM_SENTENCE_TOKENS})
    with pytest.raises(type(error), match=str(error)):
        resource_estimate.measure_random_throughput(config, torch.device("cpu"))
    assert seen == tried


def test_random_throughput_is_that_of_replayed_graphs_where_training_replays_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[FakeCUDAGraphRunner] = []

    class Runner(FakeCUDAGraphRunner):
        replays = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            built.append(self)

        def _replay_graph(self, captured: Any, batch: Any) -> Any:
            Runner.replays += 1
            return super()._replay_graph(captured, batch)

    config = Config().replace(
        text={"vocab_size": 50},
        model={"encoder": ["transformer"], "decoder": ["transformer"], "width": 8, "dropout": 0.0},
        train={"batch_tokens": 2 * resource_estimate.RANDOM_SENTENCE_TOKENS},
    )
    monkeypatch.setattr(resource_estimate, "RANDOM_PROBE_SECONDS", 0.0)
    monkeypatch.setattr(resource_estimate, "CUDAGraphRunner", Runner)
    assert resource_estimate.measure_random_throughput(config, torch.device("cpu")) > 0
    assert not built, "a CPU has no graphs"
    monkeypatch.setattr(resource_estimate, "should_use_cuda_graphs", lambda *args: True)
    assert resource_estimate.measure_random_throughput(config, torch.device("cpu")) > 0
    assert len(built) == 1
    assert Runner.replays > resource_estimate.CAPTURE_AT_OCCURRENCE, "most of the time is replays"


def estimate(**changes: object) -> RunEstimate:
    fields: dict[str, object] = {
        "data": "3 pairs",
        "parameters": 10,
        "steps": 100,
        "epochs": 4.0,
        "padding": 0.1,
        "throughput": Throughput(1000.0, 2.0),
        "peak_memory_bytes": 1,
        "checkpoint_bytes": 300_000_000,
        "validation_seconds": 3.0,
    }
    return RunEstimate(**{**fields, **changes})  # type: ignore[arg-type]


def test_other_steps_are_other_epochs() -> None:
    found = estimate().with_steps(50)
    assert (found.steps, found.epochs) == (50, 2.0)


@pytest.mark.parametrize(
    ("checkpoint_every", "checkpoints"),
    [(20, 6), (10, 10 + 6)],  # with validations, or besides those
)
def test_overhead_is_that_of_validations_and_checkpoints(
    checkpoint_every: int, checkpoints: int
) -> None:
    train = TrainConfig(steps=100, validate_every=20, checkpoint_every=checkpoint_every)
    assert estimate().checkpoint_seconds == pytest.approx(2.1)
    assert estimate().overhead(train) == pytest.approx(6 * 3.0 + checkpoints * 2.1)
