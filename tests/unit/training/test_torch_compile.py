"""torch.compile: when it is used, and the fallback to eager mode."""

from __future__ import annotations

import dataclasses
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from training_kit import tiny_trainer

from dragoman.attention import CrossAttention, SelfAttention
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import TrainConfig
from dragoman.errors import ConfigError
from dragoman.layers.feed_forward import FeedForward
from dragoman.layers.norms_and_residuals import LayerNorm, PostNorm
from dragoman.models.block_interface import Block
from dragoman.training import torch_compile
from dragoman.training.torch_compile import (
    allow_graph_kernels,
    choose_torch_compile,
    compile_blocks,
    configure_backends,
    fall_back_to_eager,
)

LONG = TrainConfig(steps=100_000)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("changes", "device", "wanted", "reason"),
    [
        ({}, GPU, True, "100,000 steps"),
        ({}, CPU, False, "on cpu"),
        ({"steps": 500}, GPU, False, "500 steps are too few"),
        ({"steps": 9_999}, GPU, False, "9,999 steps are too few"),
        ({"steps": 10_000}, GPU, True, "10,000 steps on cuda"),
        ({"time_budget": 240.0}, GPU, False, "240 s is too short"),
        ({"time_budget": 299.0}, GPU, False, "299 s is too short"),
        ({"time_budget": 300.0}, GPU, True, "100,000 steps"),
        ({"deterministic": True}, GPU, False, "round differently"),
        ({"compile": "off"}, GPU, False, "as configured"),
        ({"compile": "on", "steps": 5}, CPU, True, "as configured"),
    ],
)
def test_auto_compiles_long_runs_on_a_gpu(changes, device, wanted, reason) -> None:
    found = choose_torch_compile(dataclasses.replace(LONG, **changes), device)
    assert found.enabled == wanted
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
    supports_compile = False


@pytest.fixture
def fake_torch_compile(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake torch.compile: records its arguments, and `is_compiling` is True inside."""
    compiled: list[str] = []
    state = {"compiling": False}

    def compile_by_hand(function, *, dynamic):  # type: ignore[no-untyped-def]
        assert dynamic, "one code for all shapes"
        compiled.append(type(function.__self__).__name__)

        def run(*arguments):  # type: ignore[no-untyped-def]
            state["compiling"] = True
            try:
                return function(*arguments)
            finally:
                state["compiling"] = False

        return run

    monkeypatch.setattr(torch, "compile", compile_by_hand)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: state["compiling"])
    monkeypatch.setattr(torch_compile, "_failure", "")
    monkeypatch.setattr(torch_compile, "_compiled_blocks", weakref.WeakSet())
    return compiled


def call(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x)
    return found


@pytest.mark.parametrize("compile", ["auto", "on"])
def test_sharded_ranks_never_compile(compile: str) -> None:
    found = choose_torch_compile(dataclasses.replace(LONG, compile=compile), GPU, sharded=True)
    assert (found.enabled, "communicates within the forward pass" in found.reason) == (False, True)


def test_supported_blocks_are_compiled_once(fake_torch_compile: list[str]) -> None:
    model = nn.Sequential(Doubling(), Looping(), nn.Identity(), Doubling())
    compile_blocks(model)
    for _ in range(3):
        assert float(call(model, torch.tensor(1.0))) == 8.0
    assert fake_torch_compile == ["Doubling", "Doubling"]


def test_failed_compilation_falls_back_to_eager(
    fake_torch_compile: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = Doubling(RuntimeError("\nno C++ compiler\nset TORCH_LOGS for pages of it"))
    compile_blocks(model)
    with pytest.raises(RuntimeError) as found:
        call(model, torch.tensor(3.0))
    assert fall_back_to_eager(found.value)
    assert float(call(model, torch.tensor(3.0))) == 6.0
    assert not fall_back_to_eager(found.value), (
        "nothing is compiled any more, so the error is the model's own"
    )
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile failed (RuntimeError: no C++ compiler); training continues in eager mode "
        "with the same result; set train.compile=off to skip it"
    ]
    assert choose_torch_compile(dataclasses.replace(LONG, compile="on"), CPU) == (
        False,
        "it failed before",
    )


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), ConfigError(["a setting"])],
    ids=["memory", "ours"],
)
def test_oom_and_own_errors_do_not_fall_back_to_eager(
    fake_torch_compile: list[str], error: Exception
) -> None:
    model = Doubling()
    compile_blocks(model)
    call(model, torch.tensor(1.0))
    assert not fall_back_to_eager(error)


def test_trainer_compiles_blocks_and_validates_in_eager_mode(
    tmp_path: Path, fake_torch_compile: list[str]
) -> None:
    with RunDirectory(tmp_path) as run:
        trainer = tiny_trainer(run, steps=3, compile="on")
        trainer.fit(resume=False)
    assert set(fake_torch_compile) == {"TransformerLayer"}


def test_recompile_limit_is_raised() -> None:
    compile_blocks(nn.Identity())
    assert torch._dynamo.config.recompile_limit >= torch_compile.RECOMPILE_LIMIT


def test_compiled_kernels_are_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAGOMAN_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    compile_blocks(nn.Identity())
    assert (
        os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    )  # whoever has chosen a folder keeps it
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compile_blocks(nn.Identity())
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")


def test_graph_kernels_are_allowed_for_one_model_only() -> None:
    def layers() -> list[nn.Module]:
        norm = LayerNorm(8)
        return [SelfAttention(8, 2), CrossAttention(8, 2), FeedForward(8, 16), PostNorm(norm)]

    first, second = (nn.Sequential(*layers()) for _ in range(2))
    allow_graph_kernels(first, True)
    assert [layer.cuda_graphs for layer in first] == [True] * 4
    assert [layer.cuda_graphs for layer in second] == [False] * 4
    allow_graph_kernels(first, False)
    assert [layer.cuda_graphs for layer in first] == [False] * 4


def test_a_cpu_needs_no_preparation() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    configure_backends(CPU, deterministic=True)
    assert (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    ) == before


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method.*:DeprecationWarning"
)  # torch's own, when its compiler is imported
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # and traces
def test_compiled_training_follows_the_plain_one(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels round differently; the losses stay within a thousandth."""
    monkeypatch.setattr(torch_compile, "_failure", "")
    # Of this test alone: an error in a later one would look like that of a compiler.
    monkeypatch.setattr(torch_compile, "_compiled_blocks", weakref.WeakSet())
    losses = []
    for name in ("off", "on"):
        with RunDirectory(tmp_path / name) as run:
            tiny_trainer(run, steps=6, compile=name, model={"dropout": 0.0}).fit(resume=False)
            losses.append([record["loss"] for record in run.records() if "nll" in record])
    assert not torch_compile._failure, "a run that fell back to eager mode shows nothing"
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
