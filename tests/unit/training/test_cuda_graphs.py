"""CUDA graphs give the losses and gradients of eager mode, which is their fallback."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from kernel_kit import needs_gpu
from torch import Tensor, nn
from training_kit import FakeCUDAGraphRunner

from dragoman.attention import SelfAttention, edit, heads_off, record
from dragoman.config import ModelConfig, TrainConfig
from dragoman.data.collate import Batch, make_batch
from dragoman.models.factory import build_model
from dragoman.runtime.random_generators import seed_generators
from dragoman.tasks.translation import TranslationTask
from dragoman.training.cuda_graphs import CAPTURE_AT_OCCURRENCE, CUDAGraphRunner
from dragoman.training.task_protocol import Loss
from dragoman.training.torch_compile import should_use_cuda_graphs

CPU = torch.device("cpu")


def batch(rows: int = 4, src: int = 5, tgt: int = 6, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(4, 30, (length,), generator=generator).tolist()

    return make_batch(
        [draw(src) for _ in range(rows)], [draw(tgt - row % 2) for row in range(rows)]
    )


class Plain:
    """A tiny loss with a gradient, that counts how often it is computed."""

    def __init__(self, *, host_noise: bool = False, fails: bool = False) -> None:
        self.used, self.unused = nn.Parameter(torch.ones(30)), nn.Parameter(torch.ones(3))
        self.host_noise, self.fails, self.calls = host_noise, fails, 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.used, self.unused]

    def __call__(self, batch: Batch) -> Loss:
        self.calls += 1
        if self.fails:
            raise RuntimeError("called a synchronizing CUDA operation")
        noise = torch.rand(()) if self.host_noise else torch.zeros(())
        total = (self.used[batch.src] * batch.src_lengths.unsqueeze(1)).sum() + noise
        total.backward()  # type: ignore[no-untyped-call]
        return Loss(total, total.detach(), batch.tgt_lengths.sum())


def gradients(parameters: list[nn.Parameter]) -> list[Tensor | None]:
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def test_each_batch_gets_its_own_loss_and_gradients_and_an_unused_parameter_none() -> None:
    plain = Plain()
    replay = FakeCUDAGraphRunner(plain, plain.parameters, CPU)
    kept = []
    for seed in range(CAPTURE_AT_OCCURRENCE + 3):
        each = batch(seed=seed)
        loss, found = replay(each), gradients(plain.parameters)
        expected_loss, expected = plain(each), gradients(plain.parameters)
        assert torch.equal(loss.total.detach(), expected_loss.total.detach())
        assert found[1] is None
        assert found[0] is not None
        assert expected[0] is not None
        assert torch.equal(found[0], expected[0])
        kept.append((loss.total, expected_loss.total))
    assert replay._graphs
    for (
        one,
        other,
    ) in kept:  # read after the last replay: no returned loss was overwritten
        assert torch.equal(one.detach(), other.detach())


def test_shape_is_captured_at_its_second_occurrence() -> None:
    plain = Plain()
    replay = FakeCUDAGraphRunner(plain, plain.parameters, CPU)
    replay(batch(rows=4))
    assert not replay._graphs
    replay(batch(rows=4))
    replay(batch(rows=3))
    replay(batch(rows=4, src=9))
    assert len(replay._graphs) == 1
    full = make_batch([[5, 6]] * 2, [[7, 8]] * 2)
    padded = make_batch([[5, 6], [5]], [[7, 8]] * 2)
    for _ in range(CAPTURE_AT_OCCURRENCE):
        replay(full), replay(padded)
    assert len(replay._graphs) == 3


def test_recording_attention_disables_graph_replay() -> None:
    plain, attention = Plain(), SelfAttention(4, 2)
    replay = FakeCUDAGraphRunner(plain, plain.parameters, CPU)
    with record(attention):
        for _ in range(CAPTURE_AT_OCCURRENCE + 1):
            replay(batch())
    assert not replay._graphs
    for _ in range(CAPTURE_AT_OCCURRENCE + 1):
        replay(batch())
    with edit(attention, {"": heads_off([0])}):
        before = plain.calls
        replay(batch())
    assert plain.calls == before + 1


def test_released_graphs_are_captured_again() -> None:
    plain = Plain()
    replay = FakeCUDAGraphRunner(plain, plain.parameters, CPU)
    for _ in range(CAPTURE_AT_OCCURRENCE):
        replay(batch())
    replay.release_graphs()
    assert not replay._graphs
    loss = [replay(batch()) for _ in range(CAPTURE_AT_OCCURRENCE)][-1]
    assert replay._graphs
    assert torch.equal(loss.total.detach(), plain(batch()).total.detach())


def test_host_random_numbers_prevent_capture(caplog: pytest.LogCaptureFixture) -> None:
    plain = Plain(host_noise=True)
    replay = FakeCUDAGraphRunner(plain, plain.parameters, CPU)
    with caplog.at_level(logging.INFO):
        seed_generators(7, CPU)
        replay(batch())
        seed_generators(7, CPU)
        again = replay(batch())
    seed_generators(7, CPU)
    assert torch.equal(again.total.detach(), plain(batch()).total.detach()), (
        "a rejected capture must leave the draws as they were"
    )
    assert not replay.is_enabled
    assert "random numbers on the host" in caplog.text


def test_failed_capture_falls_back_to_eager_with_one_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = Plain()
    replay = FakeCUDAGraphRunner(plain, plain.parameters, CPU)
    replay(batch())
    plain.fails = True
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError):
        replay(batch())  # the plain pass fails too here
    plain.fails = False
    assert not replay.is_enabled
    assert "called a synchronizing" in caplog.text
    calls = plain.calls
    replay(batch())
    assert plain.calls == calls + 1


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [("cpu", "auto", False), ("cuda", "auto", True), ("cuda", "off", False)],
)
def test_only_gpus_use_cuda_graphs(device: str, setting: str, expected: bool) -> None:
    assert (
        should_use_cuda_graphs(TrainConfig(cuda_graphs=setting), torch.device(device)) is expected
    )
    assert not should_use_cuda_graphs(
        TrainConfig(cuda_graphs=setting), torch.device(device), sharded=True
    )


MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"encoder": ("transformer*2",), "decoder": ("transformer*2",)},
    "recurrent": {
        "encoder": ("bigru",),
        "decoder": ("gru(attention=additive)",),
        "positions": "none",
    },
    "stacked": {
        "encoder": ("lstm(layers=2)",),
        "decoder": ("lstm(layers=2, attention=general)",),
        "positions": "none",
    },
    "convolutional": {"encoder": ("conv*2",), "decoder": ("conv*2",), "positions": "learned"},
}


@needs_gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_graph_replay_is_bit_exact(name: str) -> None:
    device = torch.device("cuda")
    torch.manual_seed(1)
    model = build_model(
        ModelConfig(width=64, heads=4, ffn_width=128, dropout=0.3, **MODELS[name]),
        src_vocab_size=30,
        tgt_vocab_size=30,
    )
    model.to(device).train()
    task, parameters = TranslationTask(smoothing=0.1), list(model.parameters())

    def plain(each: Batch) -> Loss:
        with torch.autocast("cuda", torch.bfloat16):
            loss = task.loss(model, each.to(device))
        loss.total.backward()  # type: ignore[no-untyped-call]
        return Loss(
            loss.total.detach(), loss.nll, loss.count
        )  # no reference to a forward pass may survive the next capture

    replay = CUDAGraphRunner(plain, parameters, device)
    for seed in range(6):
        each = batch(rows=8, src=9, tgt=11, seed=seed).pin_memory()
        seed_generators(seed, device)
        loss, found = replay(each), gradients(parameters)
        seed_generators(seed, device)
        expected_loss, expected = plain(each), gradients(parameters)
        assert torch.equal(loss.total.detach(), expected_loss.total.detach())
        for one, other in zip(found, expected, strict=True):
            assert (one is None and other is None) or (
                one is not None and other is not None and torch.equal(one, other)
            )
    assert replay.is_enabled
    assert replay._graphs


@needs_gpu
def test_on_a_gpu_a_synchronizing_model_falls_back_to_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = torch.device("cuda")
    weight = nn.Parameter(torch.ones(30, device=device))

    def plain(each: Batch) -> Loss:
        total = nn.functional.dropout(weight[each.to(device).src], 0.5).sum()
        if float(total.detach()) > -1:  # waits
            total.backward()  # type: ignore[no-untyped-call]
        return Loss(total, total.detach(), torch.ones((), device=device))

    replay = CUDAGraphRunner(plain, [weight], device)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            weight.grad = None
            replay(batch())
    assert not replay.is_enabled
    assert weight.grad is not None
