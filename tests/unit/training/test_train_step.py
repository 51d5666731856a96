"""One training step: sums over micro-batches, divided once by the global count."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from training_kit import Corpus, FakeCUDAGraphRunner, accumulated, tiny_model

from dragoman.config import TrainConfig
from dragoman.data.batch_plan import Cursor
from dragoman.data.collate import make_batch
from dragoman.tasks.translation import TranslationTask
from dragoman.training.bf16_mixed_precision import BF16DataParallel
from dragoman.training.data_loader import GlobalBatch, MicroBatch
from dragoman.training.distributed.data_parallel import ReplicatedDataParallel
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.optimizer import build_adam
from dragoman.training.train_step import OOMSplitter, SingleProcess, StepRequests, TrainStep

CPU = torch.device("cpu")


def make_step(
    model,
    *,
    max_grad_norm: float = 0.0,
    seed: int = 1,
    parallel: SingleProcess | None = None,
) -> TrainStep:
    return TrainStep(
        parallel=parallel or SingleProcess(model),
        task=TranslationTask(smoothing=0.1),
        optimizer=build_adam(model, TrainConfig()),
        device=CPU,
        autocast=nullcontext(),
        oom_splitter=OOMSplitter(),
        seed=seed,
        max_grad_norm=max_grad_norm,
    )


def make_global_batch(groups: list[list[int]], number: int = 1) -> GlobalBatch:
    corpus = Corpus()
    batches = [
        make_batch(
            [corpus.src[i] for i in ids], [corpus.tgt[i] for i in ids], examples=np.array(ids)
        )
        for ids in groups
    ]
    micro_batches = [MicroBatch(index, 0, batch) for index, batch in enumerate(batches)]
    return GlobalBatch(number, micro_batches, [batch.examples for batch in batches], Cursor(0, 1))


def test_accumulation_equals_one_big_batch() -> None:
    """Micro-batches of unequal size and padding weigh each token alike.

    A mean of means would not.
    """
    model = tiny_model(dropout=0.0).train()
    step = make_step(model)
    whole, sums = accumulated(step, make_global_batch([list(range(24))]))
    parts, others = accumulated(
        step, make_global_batch([list(range(3)), list(range(3, 20)), [20], list(range(21, 24))])
    )
    torch.testing.assert_close(sums, others)
    assert sums[2] == sum(len(ids) + 1 for ids in Corpus().tgt[:24])
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [ReplicatedDataParallel, BF16DataParallel])
def test_replayed_gradients_accumulate(
    kind: type[ReplicatedDataParallel],
) -> None:
    """Whether the first micro-batch of a step is replayed, the second, or both."""
    model = tiny_model(dropout=0.0).train()
    plain, replayed = (make_step(model, parallel=kind(model, ProcessGroup())) for _ in range(2))
    replayed.uses_cuda_graphs = True
    replayed._compute_gradients = FakeCUDAGraphRunner(
        replayed._forward_backward,
        replayed._parameters,
        CPU,
        accumulates_grad=replayed._parallel.accumulates_grad,
    )
    for number in range(1, 5):
        update = make_global_batch([[0, 1, 2], [3, 4, 5], [number]], number)
        for one, other in zip(
            accumulated(replayed, update)[0], accumulated(plain, update)[0], strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert replayed._compute_gradients._graphs


def test_accumulated_micro_batches_equal_one_big_batch_step() -> None:
    models = [tiny_model(dropout=0.0).train() for _ in range(2)]
    for model, groups in zip(
        models, ([list(range(24))], [list(range(3)), list(range(3, 24))]), strict=True
    ):
        step = make_step(model, max_grad_norm=0.5)
        for number in range(1, 4):
            step(make_global_batch(groups, number), lr=0.01, requests=StepRequests())
    with torch.no_grad():
        batch = make_global_batch([list(range(24, 40))]).micro_batches[0].batch
        losses = [
            TranslationTask(smoothing=0.0).loss(model.eval(), batch).nll.item() for model in models
        ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_metrics_are_per_target_token() -> None:
    model = tiny_model(dropout=0.0).train()
    update = make_global_batch([[0, 1], [2, 3, 4]])
    expected = [
        TranslationTask(smoothing=0.1).loss(model, part.batch) for part in update.micro_batches
    ]
    step_metrics = make_step(model)(
        update, lr=0.0, requests=StepRequests(save_checkpoint=True)
    ).read()
    count = sum(int(loss.count) for loss in expected)
    assert step_metrics.num_targets == count
    assert step_metrics.loss == pytest.approx(
        sum(loss.total.item() for loss in expected) / count, rel=1e-5
    )
    assert step_metrics.nll == pytest.approx(
        sum(loss.nll.item() for loss in expected) / count, rel=1e-5
    )
    assert step_metrics.tokens == sum(part.batch.tokens for part in update.micro_batches)
    assert step_metrics.padded_tokens == sum(
        part.batch.padded_tokens for part in update.micro_batches
    )
    assert step_metrics.is_finite
    assert step_metrics.requests == StepRequests(
        stop=False, save_checkpoint=True, out_of_time=False
    )


def test_the_norm_is_that_of_the_mean_gradient() -> None:
    model = tiny_model(dropout=0.0).train()
    step, update = make_step(model), make_global_batch([[0, 1, 2]])
    gradient, sums = accumulated(step, update)
    norm = torch.cat([(part / sums[2]).flatten() for part in gradient if part is not None]).norm()
    assert step(update, lr=0.0, requests=StepRequests()).read().grad_norm == pytest.approx(
        norm.item(), rel=1e-5
    )


def test_a_gradient_below_the_limit_is_not_scaled() -> None:
    update, moments = make_global_batch([[0, 1, 2]]), []
    for limit in (0.0, 1e3):
        model = tiny_model(dropout=0.0).train()
        step = make_step(model, max_grad_norm=limit)
        norm = step(update, lr=0.01, requests=StepRequests()).read().grad_norm
        assert 0 < norm < 1e3
        moments.append([step._optimizer.state[each]["exp_avg"] for each in model.parameters()])
    for one, other in zip(*moments, strict=True):
        assert torch.equal(one, other)


def test_idle_micro_batches_count_nothing() -> None:
    model = tiny_model(dropout=0.0).train()
    step, update = make_step(model), make_global_batch([[0, 1], [2]])
    real, idle = update.micro_batches
    alone, both = (
        update._replace(micro_batches=each)
        for each in ([real], [real, idle._replace(is_dummy=True)])
    )
    (gradients, sums), (others, other_sums) = accumulated(step, alone), accumulated(step, both)
    assert torch.equal(sums, other_sums)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other)
    metrics = step(both, lr=0.0, requests=StepRequests()).read()
    assert metrics == step(alone, lr=0.0, requests=StepRequests()).read()
    assert metrics.tokens == real.batch.tokens


@pytest.mark.parametrize("name", StepRequests._fields)
def test_requests_come_back_with_the_metrics(name: str) -> None:
    step = make_step(tiny_model(dropout=0.0).train())
    requests = StepRequests(**{name: True})
    assert step(make_global_batch([[0]]), lr=0.0, requests=requests).read().requests == requests


def test_no_gradient_is_left_behind() -> None:
    model = tiny_model().train()
    make_step(model)(make_global_batch([[0, 1]]), lr=0.1, requests=StepRequests())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_step_without_micro_batches_changes_nothing() -> None:
    model = tiny_model().train()
    step = make_step(model)
    step(make_global_batch([[0, 1]]), lr=0.1, requests=StepRequests())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step_metrics = step(
        make_global_batch([[0]])._replace(micro_batches=[]), lr=0.1, requests=StepRequests()
    ).read()
    assert not step_metrics.is_finite
    assert step_metrics.num_targets == 0
    assert all(
        torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)
    )


def test_dropout_depends_on_the_position_alone() -> None:
    """Micro-batch 1 of step 5 has the same dropout masks on any rank, whatever ran before."""
    model = tiny_model(dropout=0.5).train()
    step = make_step(model)
    update = make_global_batch([[0, 1], [2, 3]], number=5)
    torch.manual_seed(123)
    first = accumulated(step, update)[1]
    torch.rand(17)
    second = accumulated(step, update)[1]
    alone = (
        accumulated(step, update._replace(micro_batches=update.micro_batches[1:]))[1]
        + accumulated(step, update._replace(micro_batches=update.micro_batches[:1]))[1]
    )
    other = accumulated(step, update._replace(step=6))[1]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone)
    assert not torch.equal(first, other)
    assert not torch.equal(first, accumulated(make_step(model, seed=2), update)[1])


def test_equal_micro_batches_of_a_step_have_different_dropout_masks() -> None:
    for dropout, equal in ((0.0, True), (0.5, False)):
        step = make_step(tiny_model(dropout=dropout).train())
        update = make_global_batch([[0, 1], [0, 1]])
        both, first = (
            accumulated(step, update._replace(micro_batches=update.micro_batches[:count]))[1]
            for count in (2, 1)
        )
        assert torch.allclose(both, 2 * first) == equal


def test_an_error_in_the_model_is_not_hidden_and_leaves_no_gradient() -> None:
    model = tiny_model().train()
    step = make_step(model)

    def broken(model, batch):
        raise ValueError("no such thing")

    step.task.loss = broken
    with pytest.raises(ValueError, match="no such thing"):
        step(make_global_batch([[0]]), lr=0.1, requests=StepRequests())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_skips_the_step_though_its_gradient_is(bad: float) -> None:
    model = tiny_model().train()
    step, task = make_step(model), TranslationTask(smoothing=0.1)

    class BadTask:
        def loss(self, model, batch):
            loss = task.loss(model, batch)
            return dataclasses.replace(loss, total=loss.total + bad)

    step.task = BadTask()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    metrics = step(make_global_batch([[0, 1]]), lr=0.1, requests=StepRequests()).read()
    assert not metrics.is_finite
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
