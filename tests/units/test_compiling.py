"""Compiling: when, and what happens when it cannot be done."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from training_kit import tiny_trainer

from dragoman.config import TrainConfig
from dragoman.training import compiling
from dragoman.training.checkpoint import RunDirectory
from dragoman.training.compiling import Compiled, choose_compiling, prepare_device

LONG = TrainConfig(steps=100_000)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("changes", "device", "wanted", "reason"),
    [
        ({}, GPU, True, "100,000 updates"),
        ({}, CPU, False, "on cpu"),
        ({"steps": 500}, GPU, False, "500 updates are too few"),
        ({"budget": 240.0}, GPU, False, "240 s is too short"),
        ({"deterministic": True}, GPU, False, "round differently"),
        ({"compile": "off"}, GPU, False, "as configured"),
        ({"compile": "on", "steps": 5}, CPU, True, "as configured"),
    ],
)
def test_auto_compiles_what_is_long_enough_to_gain(changes, device, wanted, reason) -> None:
    found = choose_compiling(dataclasses.replace(LONG, **changes), device)
    assert found.wanted == wanted
    assert reason in found.reason


def test_a_failure_to_compile_falls_back_with_one_line(monkeypatch, caplog) -> None:
    def compile_badly(function, *, dynamic):
        def broken(*arguments):
            raise RuntimeError("no C++ compiler\nwas found")

        return broken

    monkeypatch.setattr(torch, "compile", compile_badly)
    double = Compiled(lambda value: 2 * value)
    assert [double(3), double(4)] == [6, 8]
    assert caplog.text.count("compiling failed") == 1
    assert "RuntimeError: no C++ compiler was found" in caplog.text
    assert "set train.compile=off" in caplog.text


def test_a_full_memory_is_no_failure_to_compile(monkeypatch) -> None:
    def compile_into_nothing(function, *, dynamic):
        def full(*arguments):
            raise torch.OutOfMemoryError("CUDA out of memory")

        return full

    monkeypatch.setattr(torch, "compile", compile_into_nothing)
    double = Compiled(lambda value: 2 * value)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        double(3)


def test_the_trainer_compiles_the_forward_pass_of_training_alone(tmp_path, monkeypatch) -> None:
    calls = []

    def compile_by_hand(function, *, dynamic):
        assert not dynamic

        def counted(*arguments):
            calls.append(1)
            return function(*arguments)

        return counted

    monkeypatch.setattr(torch, "compile", compile_by_hand)
    with RunDirectory(tmp_path) as run:
        tiny_trainer(run, steps=3, compile="on").run(resume=False)
    assert len(calls) == 3


def test_torch_may_compile_every_shape(monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
    Compiled(lambda value: value)
    assert torch._dynamo.config.recompile_limit >= compiling.MOST_VARIANTS


def test_a_cpu_needs_no_preparation() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    prepare_device(CPU, deterministic=True)
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()) == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, when its compiler is imported
def test_compiled_training_follows_the_plain_one(tmp_path) -> None:
    """Fused kernels round differently; the losses stay within a thousandth."""
    losses = []
    for name in ("off", "on"):
        with RunDirectory(tmp_path / name) as run:
            tiny_trainer(run, steps=6, compile=name, model={"dropout": 0.0}).run(resume=False)
            losses.append([record["loss"] for record in run.records() if "nll" in record])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
