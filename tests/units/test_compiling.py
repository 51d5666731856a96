"""Compiling: when, and what happens when it cannot be done."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn
from training_kit import tiny_trainer

from dragoman.config import TrainConfig
from dragoman.models.blocks import Block
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


class Doubling(Block):
    """A block that may fail while it is compiled."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x, context=None):  # type: ignore[no-untyped-def]
        if self.error is not None and torch.compiler.is_compiling():
            raise self.error
        return 2 * x


class Looping(Doubling):
    compiles = False


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for torch's compiler: notes what is compiled, and says within that it is; a stance turns it off."""
    compiled: list[str] = []
    state = {"compiling": False, "stance": "default"}

    def compile_by_hand(function, *, dynamic):  # type: ignore[no-untyped-def]
        assert dynamic, "one code for all shapes"
        compiled.append(type(function.__self__).__name__)

        def run(*arguments):  # type: ignore[no-untyped-def]
            state["compiling"] = state["stance"] == "default"
            try:
                return function(*arguments)
            finally:
                state["compiling"] = False

        return run

    monkeypatch.setattr(torch, "compile", compile_by_hand)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: state["compiling"])
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: state.update(stance=stance))
    return compiled


def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x)
    return found


def test_blocks_are_compiled_once_but_for_those_that_loop(by_hand: list[str]) -> None:
    model = nn.Sequential(Doubling(), Looping(), nn.Identity(), Doubling())
    compiled = Compiled(call)
    for _ in range(3):
        assert float(compiled(model, torch.tensor(1.0))) == 8.0
    assert by_hand == ["Doubling", "Doubling"]


def test_a_failure_to_compile_falls_back_with_one_line(by_hand: list[str], caplog: pytest.LogCaptureFixture) -> None:
    compiled = Compiled(call)
    model = Doubling(RuntimeError("no C++ compiler\nwas found"))
    assert [float(compiled(model, torch.tensor(value))) for value in (3.0, 4.0)] == [6.0, 8.0]
    assert caplog.text.count("compiling failed") == 1
    assert "RuntimeError: no C++ compiler was found" in caplog.text
    assert "set train.compile=off" in caplog.text


def test_a_full_memory_is_no_failure_to_compile(by_hand: list[str]) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        Compiled(call)(Doubling(torch.OutOfMemoryError("CUDA out of memory")), torch.tensor(1.0))


def test_an_error_of_the_plain_pass_is_raised(by_hand: list[str]) -> None:
    def fail(model: nn.Module) -> None:
        raise ValueError("not the compiler's fault")

    with pytest.raises(ValueError, match="not the compiler"):
        Compiled(fail)(Doubling())


def test_the_trainer_compiles_the_blocks_for_training_and_validates_without(tmp_path: Path, by_hand: list[str]) -> None:
    with RunDirectory(tmp_path) as run:
        trainer = tiny_trainer(run, steps=3, compile="on")
        trainer.run(resume=False)
    assert set(by_hand) == {"TransformerLayer"}


def test_torch_may_compile_every_variant() -> None:
    Compiled(call)
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
