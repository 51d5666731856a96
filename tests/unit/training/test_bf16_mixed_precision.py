"""Mixed precision: the choice of a dtype, and the bfloat16 copy of float32 master weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_kit import needs_gpu
from torch import nn
from training_kit import (
    SETTINGS,
    Corpus,
    FakeCUDAGraphRunner,
    assert_same_run,
    log_of,
    tensors_of,
    tiny_model,
    tiny_trainer,
)

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.data.collate import Batch
from dragoman.layers.norms_and_residuals import LayerNorm, RMSNorm
from dragoman.tasks.translation import TranslationTask
from dragoman.training import bf16_mixed_precision
from dragoman.training.bf16_mixed_precision import (
    BF16DataParallel,
    Precision,
    choose_precision,
    should_use_bf16_weights,
)
from dragoman.training.cuda_graphs import CAPTURE_AT_OCCURRENCE
from dragoman.training.distributed.data_parallel import ReplicatedDataParallel
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.task_protocol import Loss
from dragoman.training.trainer import Trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BF16 = Precision(torch.bfloat16, "as configured")
TASK = TranslationTask(smoothing=0.1)
BF16_WEIGHTS: dict[str, Any] = {"precision": "bfloat16", "param_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("flags", "name", "reason"),
    [
        ({"avx2", "avx512_bf16"}, "bfloat16", "avx512_bf16"),
        ({"avx2", "amx_bf16"}, "bfloat16", "amx_bf16"),
        ({"avx2", "avx512f"}, "float32", "no bfloat16 instructions"),
        (set(), "float32", "no bfloat16 instructions"),
    ],
)
def test_auto_precision_depends_on_cpu_flags(monkeypatch, flags, name, reason) -> None:
    monkeypatch.setattr(bf16_mixed_precision, "_cpu_flags", lambda: frozenset(flags))
    chosen = choose_precision("auto", CPU)
    assert chosen.name == name
    assert reason in chosen.reason


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_configured_precision_is_used(name) -> None:
    assert choose_precision(name, CPU).name == name
    assert choose_precision(name, CPU).reason == "as configured"


def test_unknown_devices_stay_with_float32() -> None:
    chosen = choose_precision("auto", torch.device("mps"))
    assert chosen.name == "float32"
    assert "mps" in chosen.reason


def test_autocast_is_on_only_where_it_is_chosen() -> None:
    """bfloat16 needs no loss scaling (facebookresearch/fairseq#1529, #512, #282, #1895, #4555)."""
    for name, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with choose_precision(name, CPU).autocast(CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == kind


def test_the_flags_of_this_machine_can_be_read() -> None:
    assert bf16_mixed_precision._cpu_flags() is not None
    assert choose_precision("auto", CPU).name in ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (
            "processor\t: 0\nvmx flags\t: ept\nflags\t\t: fpu avx512_bf16\n\nflags\t\t: sse\n",
            {"fpu", "avx512_bf16"},
        ),
        ("processor\t: 0\nFeatures\t: fp asimd\n", set()),
        (None, set()),
    ],
)
def test_flags_are_those_of_the_first_processor(monkeypatch, text, flags) -> None:
    def read_text(self: Path, **options: Any) -> str:
        if text is None:
            raise FileNotFoundError(str(self))
        return text

    monkeypatch.setattr(Path, "read_text", read_text)
    assert bf16_mixed_precision._cpu_flags.__wrapped__() - {"flags", ":"} == flags


def batch() -> Batch:
    corpus = Corpus()
    plan = corpus.plan()
    return corpus.collate(plan)(plan.epoch(0)[0], 0)


@pytest.mark.parametrize(
    ("wanted", "device", "precision", "model", "expected"),
    [
        ("auto", GPU, BF16, {}, True),
        ("auto", CPU, BF16, {}, False),
        ("auto", GPU, Precision(torch.float32, ""), {}, False),
        (
            "auto",
            GPU,
            BF16,
            {"encoder": ("bigru",), "decoder": ("gru(attention=additive)",), "positions": "none"},
            False,
        ),
        ("auto", GPU, BF16, {"norm": "batch"}, False),  # its running means are part of the model
        ("bfloat16", GPU, BF16, {"norm": "batch"}, False),
        ("bfloat16", CPU, BF16, {}, True),
        ("bfloat16", CPU, Precision(torch.float32, ""), {}, False),
        ("float32", GPU, BF16, {}, False),
    ],
)
def test_when_bf16_weights_are_used(
    wanted: str, device: torch.device, precision: Precision, model: dict[str, Any], expected: bool
) -> None:
    config = dataclasses.replace(SETTINGS, param_dtype=wanted)
    assert should_use_bf16_weights(config, tiny_model(**model), precision, device) is expected


def test_models_without_blocks_or_with_other_weights_have_no_bf16_copy() -> None:
    config = dataclasses.replace(SETTINGS, param_dtype="auto")
    assert not should_use_bf16_weights(config, nn.Linear(2, 2), BF16, GPU)
    config = dataclasses.replace(SETTINGS, param_dtype="bfloat16")
    assert should_use_bf16_weights(config, nn.Linear(2, 2), BF16, GPU)
    assert not should_use_bf16_weights(config, nn.Linear(2, 2).double(), BF16, GPU)


def gradients(
    parallel: ReplicatedDataParallel, precision: Precision = BF16
) -> dict[str, torch.Tensor]:
    with precision.autocast(CPU):
        loss = parallel.wrap_task(TASK).loss(parallel.module, batch())
    parallel.backward(loss)
    found = {
        name: parameter.grad
        for name, parameter in parallel.local_module.named_parameters()
        if parameter.grad is not None
    }
    for parameter in parallel.local_module.parameters():
        parameter.grad = None
    return found


def test_bf16_gradients_are_float32_and_match_the_rounded_model() -> None:
    model = tiny_model(dropout=0.0)
    parallel = BF16DataParallel(model, ProcessGroup())
    exact = tiny_model(dropout=0.0)
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    found, expected = (
        gradients(parallel),
        gradients(ReplicatedDataParallel(exact, ProcessGroup()), Precision(torch.float32, "")),
    )
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype is torch.float32
        assert (gradient - expected[name]).norm() <= 0.05 * expected[name].norm() + 1e-3, name
    assert all(parameter.grad is None for parameter in parallel.bf16_copy.parameters())
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_bf16_copy_follows_the_master_weights() -> None:
    """The copy follows the optimizer, a loaded checkpoint, and a throughput measurement."""
    model = tiny_model(dropout=0.0)
    parallel = BF16DataParallel(model, ProcessGroup())
    before = gradients(parallel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert any(
        not torch.equal(gradient, before[name]) for name, gradient in gradients(parallel).items()
    )
    for bf16_copy, parameter in zip(
        parallel.bf16_copy.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(bf16_copy, parameter.to(torch.bfloat16))


def test_bf16_gradients_reuse_existing_tensors() -> None:
    model = tiny_model(dropout=0.0)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    parallel = BF16DataParallel(model, ProcessGroup())
    buffers = {
        name: torch.full_like(parameter, 7.0)
        for name, parameter in model.named_parameters()
        if name != "unused"
    }
    for name, buffer in buffers.items():
        model.get_parameter(name).grad = buffer
    found = gradients(parallel)
    assert found.keys() == buffers.keys()
    for name, buffer in buffers.items():
        assert found[name] is buffer
    model.get_parameter("unused").grad = torch.full(
        (3,), 7.0
    )  # as in CUDA graph capture, which allocates all
    assert not gradients(parallel)["unused"].any()
    again = gradients(parallel)
    for name, buffer in buffers.items():
        assert torch.equal(buffer, again[name])


def test_replay_leaves_the_gradients_of_eager_mode() -> None:
    model = tiny_model(dropout=0.0)
    parallel = BF16DataParallel(model, ProcessGroup())

    def compute(each: Batch) -> Loss:
        with BF16.autocast(CPU):
            loss = parallel.wrap_task(TASK).loss(parallel.module, each)
        parallel.backward(loss)
        return loss

    expected = gradients(parallel)
    replay = FakeCUDAGraphRunner(
        compute,
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        CPU,
        accumulates_grad=parallel.accumulates_grad,
    )
    for _ in range(CAPTURE_AT_OCCURRENCE + 2):
        replay(batch())
        found = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        for parameter in model.parameters():
            parameter.grad = None
    assert replay._graphs


def test_hidden_states_are_bfloat16() -> None:
    parallel = BF16DataParallel(tiny_model(dropout=0.1), ProcessGroup())
    seen = set()
    for name, module in parallel.bf16_copy.named_modules():
        if name.endswith(("residual", "norm", "ffn", "self", "cross", "_input")):
            module.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
    gradients(parallel)
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_norms_keep_their_input_dtype_and_sum_in_float32(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(50, 64) * 3 + 1, kind(64)
    expected = norm(x.bfloat16().float())
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x).dtype is torch.float32  # float32 stays what it is
        found = norm.to(torch.bfloat16)(x.bfloat16())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.01)


def losses(path: Path) -> list[float]:
    return [record["nll"] for record in log_of(path) if "nll" in record]


def test_losses_are_those_of_autocast_and_of_float32_within_noise(tmp_path: Path) -> None:
    """The noise is what other dropout does to a float32 run.

    Rounding changes less over the same steps.
    """
    settings: dict[str, Any] = {
        "steps": 60,
        "ema_decay": 0.0,
        "checkpoint_every": 60,
        "validate_every": 60,
    }
    ways = {
        "exact": {"precision": "float32"},
        "other": {"precision": "float32", "seed": 8},
        "autocast": {"precision": "bfloat16", "param_dtype": "float32"},
        "bf16_copy": BF16_WEIGHTS,
    }
    curves = {}
    for name, way in ways.items():
        with RunDirectory(tmp_path / name) as run:
            trainer = tiny_trainer(run, **{**settings, **way})
            assert trainer.bf16_weights is (name == "bf16_copy")
            trainer.fit(resume=False)
        curves[name] = torch.tensor(losses(tmp_path / name)).view(6, 10).mean(dim=1)
    noise = (curves["other"] - curves["exact"]).abs().max()
    assert (curves["bf16_copy"] - curves["exact"]).abs().max() < max(0.02, noise)
    assert (curves["bf16_copy"] - curves["autocast"]).abs().max() < max(0.02, noise)
    assert curves["bf16_copy"][-1] < curves["bf16_copy"][0] - 0.3


def test_resume_with_bf16_weights_is_bit_exact(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "whole") as run:
        tiny_trainer(run, **BF16_WEIGHTS).fit(resume=False)
    for steps in (4, 12):
        with RunDirectory(tmp_path / "parts") as run:
            tiny_trainer(run, **BF16_WEIGHTS, steps=steps).fit(resume=steps > 4)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "whole").values()} == {torch.float32}


def test_measuring_throughput_changes_nothing_in_bf16(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "plain") as run:
        tiny_trainer(run, **BF16_WEIGHTS).fit(resume=False)
    with RunDirectory(tmp_path / "dry_run") as run:
        trainer = tiny_trainer(run, **BF16_WEIGHTS)
        trainer.measure_throughput(0.01)
        trainer.fit(resume=False)
    assert_same_run(tmp_path / "plain", tmp_path / "dry_run")


@needs_gpu
def test_on_a_gpu_bf16_weights_train_alike_with_cuda_graphs(tmp_path: Path) -> None:
    """Launches that are replayed are the same ones: the same losses to the last bit."""
    curves = []
    for replay in ("off", "auto"):
        config = dataclasses.replace(
            SETTINGS,
            **BF16_WEIGHTS,
            steps=40,
            cuda_graphs=replay,
            compile="off",
            checkpoint_every=40,
            validate_every=40,
        )
        corpus = Corpus()
        plan = corpus.plan()
        model = tiny_model().cuda()
        with RunDirectory(tmp_path / replay) as run:
            task = TranslationTask(smoothing=0.1)
            Trainer(
                model=model,
                task=task,
                plan=plan,
                collate=corpus.collate(plan),
                config=config,
                run=run,
                width=16,
            ).fit(resume=False)
        curves.append(losses(tmp_path / replay))
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
