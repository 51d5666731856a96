"""One update: sums over micro-batches, divided once by the global count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training_kit import Corpus, Pretended, tiny_model

from dragoman.config import TrainConfig
from dragoman.data.batches import Cursor, make_batch
from dragoman.tasks.translate import TranslateTask
from dragoman.training import optimisers
from dragoman.training.distributed import World
from dragoman.training.feed import Slice, Update
from dragoman.training.halved import Halved
from dragoman.training.holding import Replicated
from dragoman.training.memory import MemoryGuard
from dragoman.training.precision import choose_precision
from dragoman.training.update import Requests, UpdateStep

CPU = torch.device("cpu")


def make_step(model, *, clip: float = 0.0, seed: int = 1, holding: Replicated | None = None) -> UpdateStep:
    return UpdateStep(
        holding=holding or Replicated(model, World()),
        task=TranslateTask(smoothing=0.1),
        optimiser=optimisers.adam(model, TrainConfig()),
        device=CPU,
        precision=choose_precision("float32", CPU),
        guard=MemoryGuard(),
        seed=seed,
        clip=clip,
    )


def make_update(groups: list[list[int]], number: int = 1) -> Update:
    corpus = Corpus()
    batches = [make_batch([corpus.src[i] for i in ids], [corpus.tgt[i] for i in ids], examples=np.array(ids)) for ids in groups]
    slices = [Slice(place, 0, batch) for place, batch in enumerate(batches)]
    return Update(number, slices, [batch.examples for batch in batches], Cursor(0, 1))


def test_accumulation_equals_one_big_batch() -> None:
    """Micro-batches of unequal size and padding weigh each token alike; a mean of means would not."""
    model = tiny_model(dropout=0.0).train()
    step = make_step(model)
    whole, sums = step.gradient(make_update([list(range(24))]))
    parts, others = step.gradient(make_update([list(range(3)), list(range(3, 20)), [20], list(range(21, 24))]))
    torch.testing.assert_close(sums, others)
    assert sums[2] == sum(len(ids) + 1 for ids in Corpus().tgt[:24])
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Replicated, Halved])
def test_replayed_passes_add_up_though_each_writes_over_the_last(kind: type[Replicated]) -> None:
    """Whether an update's first batch is replayed or its second, or both."""
    model = tiny_model(dropout=0.0).train()
    plain, replayed = (make_step(model, holding=kind(model, World())) for _ in range(2))
    replayed._backward = Pretended(replayed._launch, replayed._parameters, CPU, adds=replayed._holding.adds)
    for number in range(1, 5):
        update = make_update([[0, 1, 2], [3, 4, 5], [number]], number)
        for one, other in zip(replayed.gradient(update)[0], plain.gradient(update)[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert replayed._backward._recordings


def test_accumulated_updates_equal_one_big_update() -> None:
    models = [tiny_model(dropout=0.0).train() for _ in range(2)]
    for model, groups in zip(models, ([list(range(24))], [list(range(3)), list(range(3, 24))]), strict=True):
        step = make_step(model, clip=0.5)
        for number in range(1, 4):
            step(make_update(groups, number), learning_rate=0.01, requests=Requests())
    with torch.no_grad():
        batch = make_update([list(range(24, 40))]).slices[0].batch
        losses = [TranslateTask(smoothing=0.0).loss(model.eval(), batch).nll.item() for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_figures_are_per_target_and_count_everything() -> None:
    model = tiny_model(dropout=0.0).train()
    update = make_update([[0, 1], [2, 3, 4]])
    expected = [TranslateTask(smoothing=0.1).loss(model, part.batch) for part in update.slices]
    figures = make_step(model)(update, learning_rate=0.0, requests=Requests(publish=True)).read()
    count = sum(int(loss.count) for loss in expected)
    assert figures.targets == count
    assert figures.total == pytest.approx(sum(loss.total.item() for loss in expected) / count, rel=1e-5)
    assert figures.nll == pytest.approx(sum(loss.nll.item() for loss in expected) / count, rel=1e-5)
    assert figures.tokens == sum(part.batch.tokens for part in update.slices)
    assert figures.slots == sum(part.batch.slots for part in update.slices)
    assert figures.finite
    assert figures.requests == Requests(stop=False, publish=True, late=False)


def test_the_norm_is_that_of_the_mean_gradient() -> None:
    model = tiny_model(dropout=0.0).train()
    step, update = make_step(model), make_update([[0, 1, 2]])
    gradient, sums = step.gradient(update)
    norm = torch.cat([(part / sums[2]).flatten() for part in gradient if part is not None]).norm()
    assert step(update, learning_rate=0.0, requests=Requests()).read().norm == pytest.approx(norm.item(), rel=1e-5)


def test_no_gradient_is_left_behind() -> None:
    model = tiny_model().train()
    make_step(model)(make_update([[0, 1]]), learning_rate=0.1, requests=Requests())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_update_without_work_changes_nothing() -> None:
    model = tiny_model().train()
    step = make_step(model)
    step(make_update([[0, 1]]), learning_rate=0.1, requests=Requests())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    figures = step(make_update([[0]])._replace(slices=[]), learning_rate=0.1, requests=Requests()).read()
    assert not figures.finite
    assert figures.targets == 0
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_dropout_depends_on_the_position_alone() -> None:
    """Whatever drew random numbers before, and on whichever rank: micro-batch 1 of update 5 has its own masks."""
    model = tiny_model(dropout=0.5).train()
    step = make_step(model)
    update = make_update([[0, 1], [2, 3]], number=5)
    torch.manual_seed(123)
    first = step.gradient(update)[1]
    torch.rand(17)
    second = step.gradient(update)[1]
    alone = step.gradient(update._replace(slices=update.slices[1:]))[1] + step.gradient(update._replace(slices=update.slices[:1]))[1]
    other = step.gradient(update._replace(number=6))[1]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone)
    assert not torch.equal(first, other)
    assert not torch.equal(first, make_step(model, seed=2).gradient(update)[1])


def test_an_error_in_the_model_is_not_hidden_and_leaves_no_gradient() -> None:
    model = tiny_model().train()
    step = make_step(model)

    def broken(model, batch):
        raise ValueError("no such thing")

    step._task.loss = broken
    with pytest.raises(ValueError, match="no such thing"):
        step(make_update([[0]]), learning_rate=0.1, requests=Requests())
    assert all(parameter.grad is None for parameter in model.parameters())
