"""A batch that does not fit is split by rows.

Nothing is dropped, and what fits is remembered.
"""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest
import torch
from training_kit import (
    Corpus,
    accumulated,
    assert_same_run,
    fail_in_parts,
    log_of,
    state_of,
    tiny_model,
    tiny_trainer,
)

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.data.batch_plan import Cursor
from dragoman.runtime.out_of_memory import is_out_of_memory
from dragoman.tasks.translation import TranslationTask
from dragoman.training import train_step
from dragoman.training.train_step import OOMSplitter


@pytest.fixture(scope="module", autouse=True)
def _few_objects():
    """Spare garbage collection, which every shortage of memory starts, what other tests loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class LimitedMemoryTask:
    """A task on a device with memory for a limited number of padded tokens.

    With `late`, it fails half-way through the backward pass.
    """

    def __init__(
        self,
        task,
        limit: int,
        *,
        late: bool = False,
        error: type[Exception] = torch.OutOfMemoryError,
        text: str = "out of memory",
    ) -> None:
        self.task, self.limit, self.late, self.error, self.text = task, limit, late, error, text
        self.tried: list[int] = []

    def loss(self, model, batch):
        padded_tokens = len(batch) * max(batch.src.shape[1], batch.tgt_in.shape[1])
        self.tried.append(padded_tokens)
        if padded_tokens > self.limit and not self.late:
            raise self.error(self.text)
        found = self.task.loss(model, batch)
        if padded_tokens > self.limit:
            found.total.register_hook(lambda gradient: None)
            model.embeddings["shared"].weight.register_hook(self._fail)
        return found

    def _fail(self, gradient):
        if self.tried[-1] > self.limit:
            raise self.error(self.text)
        return gradient


def make(run, limit, *, late=False, **options):
    options.setdefault("model", {"dropout": 0.0})
    trainer = tiny_trainer(run, **options)
    trainer._step.task = LimitedMemoryTask(trainer._step.task, limit, late=late)
    return trainer


@pytest.mark.parametrize("late", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("fraction", [0.6, 0.3])
@pytest.mark.parametrize("gradient_accumulation", [1, 3])
def test_gradient_of_parts_equals_that_of_the_batch(
    tmp_path, fraction, late, gradient_accumulation
):
    """One long sentence must not end a run (OpenNMT-py#1161), nor count twice."""
    gradients = []
    for name, limit in (("whole", 10**9), ("parts", int(64 * fraction))):
        with RunDirectory(tmp_path / name) as run:
            trainer = make(run, limit, late=late, gradient_accumulation=gradient_accumulation)
            batch = next(trainer._data_loader.batches(1, Cursor(0, 0)))
            gradients.append(accumulated(trainer._step, batch))
            assert (trainer._step.oom_splitter.splits > 0) == (name == "parts")
    (whole, sums), (parts, others) = gradients
    torch.testing.assert_close(sums, others, rtol=1e-6, atol=0)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * one.abs().max().item())


def test_a_run_in_little_memory_finishes_and_counts_every_example(tmp_path):
    for name, limit in (("whole", 10**9), ("narrow", 30)):
        with RunDirectory(tmp_path / name) as run:
            make(run, limit).fit(resume=False)
    logs = [
        [record for record in log_of(tmp_path / name) if "nll" in record]
        for name in ("whole", "narrow")
    ]
    assert [record["tokens"] for record in logs[0]] == [record["tokens"] for record in logs[1]]
    assert [record["nll"] for record in logs[0]] == pytest.approx(
        [record["nll"] for record in logs[1]], rel=1e-4
    )
    assert state_of(tmp_path / "narrow")["token_limits"]


def test_token_limits_are_remembered(tmp_path):
    with RunDirectory(tmp_path) as run:
        trainer = make(run, 30, steps=24)
        trainer.fit(resume=False)
    tried = trainer._step.task.tried
    failures = [padded_tokens for padded_tokens in tried if padded_tokens > 30]
    assert len(failures) <= 2 * len(trainer._step.oom_splitter.token_limits)
    assert all(padded_tokens <= 30 for padded_tokens in tried[len(tried) // 2 :])


def test_a_resumed_run_splits_the_same_way(tmp_path):
    """Caps are part of the state: dropout, which differs by part, must differ the same way."""
    options = {"model": {"dropout": 0.1}}
    with RunDirectory(tmp_path / "whole") as run:
        make(run, 30, **options).fit(resume=False)
    with RunDirectory(tmp_path / "cut") as run:
        make(run, 30, steps=8, **options).fit(resume=False)
    with RunDirectory(tmp_path / "cut") as run:
        make(run, 30, **options).fit(resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_batch_splitting_warns_once_per_process(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(train_step, "_warned", set())
    for name in ("dry_run", "run"):
        with RunDirectory(tmp_path / name) as run:
            trainer = make(run, 10, steps=4)
            trainer.fit(resume=False)
            assert trainer._step.oom_splitter.splits > 1
    [line] = [
        record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()
    ]
    assert re.fullmatch(
        r"out of memory with \d+ padded tokens of shape \d+x\d+: .* in parts, with the same "
        r"result; lower train.batch_tokens to avoid it",
        line,
    )


def test_out_of_memory_for_every_sentence_is_raised():
    corpus = Corpus(3)
    plan = corpus.plan()
    batch = corpus.collate(plan)(plan.epoch(0)[0], 0)

    with pytest.raises(
        torch.OutOfMemoryError, match=f"every sentence of a batch of {batch.src.shape[1]}x"
    ):
        fail_in_parts(OOMSplitter(), batch, MemoryError())


def test_sentence_too_large_for_memory_is_skipped_with_a_warning(caplog):
    corpus = Corpus(3)
    plan = corpus.plan()
    batch = corpus.collate(plan)(plan.epoch(0)[0], 0)
    oom_splitter, seen = OOMSplitter(), []
    heavy = int(batch.examples[0])

    for part in oom_splitter.parts(batch):
        with part:
            if heavy in part.batch.examples:
                raise MemoryError
            seen.extend(part.batch.examples.tolist())
    assert oom_splitter.dropped_examples == [heavy]
    assert sorted(seen) == sorted(set(batch.examples.tolist()) - {heavy})
    assert f"example {heavy} is skipped" in caplog.text


def test_sentences_that_were_skipped_before_do_not_count_for_a_later_batch():
    corpus = Corpus(8)
    collate = corpus.collate(corpus.plan())
    oom_splitter = OOMSplitter()

    def compute(examples: list[int], heavy: set[int]) -> None:
        for part in oom_splitter.parts(collate(np.array(examples), 0)):
            with part:
                if heavy & set(part.batch.examples.tolist()):
                    raise MemoryError

    compute([0, 1, 2], heavy={0})
    compute([3, 4], heavy={3})  # two were skipped by now, and one of these two fits
    with pytest.raises(torch.OutOfMemoryError, match="every sentence of a batch"):
        compute([5, 6], heavy={5, 6})
    assert oom_splitter.dropped_examples == [0, 3, 5, 6]


def test_a_batch_of_one_sentence_that_does_not_fit_is_skipped():
    corpus = Corpus(3)
    batch = corpus.collate(corpus.plan())(np.array([1]), 0).rows(slice(1))
    oom_splitter = OOMSplitter()
    fail_in_parts(oom_splitter, batch, MemoryError())
    assert oom_splitter.dropped_examples == [1]
    assert oom_splitter.splits == 0
    assert oom_splitter.token_limits == {}


def test_a_batch_of_a_size_known_to_fit_is_not_split():
    corpus = Corpus(8)
    batch = corpus.collate(corpus.plan())(np.arange(8), 0)
    tokens = train_step.BatchPart(batch).padded_tokens
    for limit, paths in ((tokens, [""]), (tokens - 1, ["0", "1"])):
        parts = OOMSplitter({batch.shape_key: limit}).parts(batch)
        assert [part.path for part in parts] == paths
    other = OOMSplitter({"1x1": 1}).parts(batch)
    assert [part.path for part in other] == [""], "the limit of another shape"


def test_four_fifths_of_the_failed_size_are_tried_next():
    corpus = Corpus(8)
    batch = corpus.collate(corpus.plan())(np.arange(8), 0)
    oom_splitter = OOMSplitter()
    for part in oom_splitter.parts(batch):
        with part:
            if not part.path:
                raise MemoryError
    tokens = train_step.BatchPart(batch).padded_tokens
    assert oom_splitter.token_limits == {batch.shape_key: int(0.8 * tokens)}
    assert oom_splitter.splits == 1


def test_other_errors_are_not_swallowed():
    corpus = Corpus(3)
    plan = corpus.plan()
    batch = corpus.collate(plan)(plan.epoch(0)[0], 0)

    with pytest.raises(RuntimeError, match="shapes do not match"):
        fail_in_parts(OOMSplitter(), batch, RuntimeError("shapes do not match"))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors_are_recognized(error, full):
    assert is_out_of_memory(error) == full


def test_cpu_allocator_error_is_recognized():
    """torch raises a plain RuntimeError there.

    Should its text ever change, this fails and not a long run.
    """
    with pytest.raises((RuntimeError, MemoryError)) as error:
        torch.empty(1 << 46)
    assert is_out_of_memory(error.value)


def test_parts_have_seeds_of_their_own():
    """The path of splits is part of the seed, so the same dropout mask does not come twice."""
    model = tiny_model(dropout=0.5).train()
    corpus = Corpus(8)
    plan = corpus.plan()
    batch = corpus.collate(plan)(plan.epoch(0)[0], 0)
    paths = []
    oom_splitter = OOMSplitter({f"{batch.src.shape[1]}x{batch.tgt_in.shape[1]}": 1})
    for part in oom_splitter.parts(batch):
        with part:
            paths.append(part.path)
            TranslationTask(smoothing=0.0).loss(model, part.batch)
    assert len(set(paths)) == len(paths) == len(batch)


def test_halves_contain_every_row_once():
    corpus = Corpus(8)
    for count in (2, 3, 5, 8):
        batch = corpus.collate(corpus.plan())(np.arange(count), 0)
        rows = len(batch.examples)  # a shape may ask for more rows than there are pairs
        halves = train_step.BatchPart(batch, "1").halves()
        assert [half.path for half in halves] == ["10", "11"]
        assert [len(half.batch.examples) for half in halves] == [rows - rows // 2, rows // 2]
        assert torch.equal(torch.cat([half.batch.src for half in halves]), batch.src)
        assert torch.equal(torch.cat([half.batch.tgt_out for half in halves]), batch.tgt_out)
