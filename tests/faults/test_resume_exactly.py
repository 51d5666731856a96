"""A run that is stopped and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import pytest
import torch
from training_kit import assert_same_run, log_of, tiny_trainer

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import StoppedError
from dragoman.runtime import signals


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_requests():
    yield
    signals.uninstall_handlers()


class NanAt:
    """Makes the loss of the given steps NaN, however often it is computed."""

    def __init__(self, task, *updates: int) -> None:
        self.task, self.updates, self.update = task, updates, 0

    def loss(self, model, batch):
        found = self.task.loss(model, batch)
        if self.update in self.updates:
            found = type(found)(found.total * float("nan"), found.nll, found.count)
        return found


def make(run, *, nan_at=(), stop_after=0, stop_in_validation=0, **options):
    """Build a trainer that gets a stop request after a step, or inside a validation."""

    def on_record(record):
        if "event" not in record and record["step"] == stop_after:
            signals.request_stop("a test")

    def validate(model):
        if trainer.state.step == stop_in_validation:
            signals.request_stop("a test")
        signals.raise_if_stop_requested()
        return {"loss": float(model.output_weight.abs().mean())}

    trainer = tiny_trainer(
        run,
        parts={"on_record": on_record, "validate": validate, **options.pop("parts", {})},
        **options,
    )
    if nan_at:
        trainer._step.task = nan_task = NanAt(trainer._step.task, *nan_at)
        train_step = trainer.train_step

        def note(batch):
            nan_task.update = batch.step
            train_step(batch)

        trainer.train_step = note
    return trainer


def reference_and_resumed(tmp_path, *, stop_after=0, stop_in_validation=0, **options):
    with RunDirectory(tmp_path / "whole") as run:
        make(run, **options).fit(resume=False)
    signals.uninstall_handlers()
    with RunDirectory(tmp_path / "cut") as run:
        result = make(
            run, stop_after=stop_after, stop_in_validation=stop_in_validation, **options
        ).fit(resume=False)
    assert result.stopped == "a test"
    stopped_at = result.step
    signals.uninstall_handlers()
    with RunDirectory(tmp_path / "cut") as run:
        assert make(run, **options).fit(resume=True).stopped is None
    return stopped_at


@pytest.mark.parametrize("stop_after", [1, 3, 4, 7, 11])
def test_stopped_after_a_step(tmp_path, threads, stop_after):
    """Resume is not a different run (joeynmt#125, #172; OpenNMT-py#2006, #2517; transformers#11323.

    Helsinki-NLP/mammoth#63).
    """
    assert reference_and_resumed(tmp_path, stop_after=stop_after) == stop_after
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_resume_with_two_threads_is_exact(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        reference_and_resumed(tmp_path, stop_after=3, steps=5)
    finally:
        torch.set_num_threads(before)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_stopped_at_the_end_of_an_epoch_and_within_a_step_that_crosses_it(tmp_path):
    """Mid-epoch order is kept (huggingface/accelerate#4071)."""
    with RunDirectory(tmp_path / "probe") as run:
        plan = tiny_trainer(run).plan
    last = plan.batches(0)
    assert last > 2
    reference_and_resumed(tmp_path, stop_after=last, steps=last + 3)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    crossing = tmp_path / "crossing"
    reference_and_resumed(
        crossing, stop_after=last // 3 + 1, steps=last // 3 + 4, gradient_accumulation=3
    )
    assert_same_run(crossing / "whole", crossing / "cut")


def test_stopped_inside_a_validation(tmp_path, threads):
    """An interrupted validation is run first after resuming."""
    assert reference_and_resumed(tmp_path, stop_in_validation=8) == 8
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert [
        record["step"] for record in log_of(tmp_path / "cut") if record.get("event") == "validation"
    ] == [4, 8, 12]
    best = [RunDirectory(tmp_path / name).best() for name in ("whole", "cut")]
    assert best[0].step == best[1].step


def test_stopped_after_a_skipped_step(tmp_path):
    reference_and_resumed(tmp_path, stop_after=6, nan_at=(5,))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert [record["step"] for record in log_of(tmp_path / "cut") if record.get("skipped")] == [5]


MODELS = {
    "post-norm": {"residual": "post_norm"},
    "learned positions": {"positions": "learned"},
    "dropped weights": {"tie_embeddings": "none", "attention_dropout": 0.2},
    "RNN": {
        "encoder": ("bigru(residual_connection=false)",),
        "decoder": ("gru(attention=additive, decoder=bahdanau, residual_connection=false)",),
        "positions": "none",
    },
    "ConvS2S": {
        "encoder": ("conv*2",),
        "decoder": ("conv(layers=2)",),
        "residual": "scaled",
        "positions": "learned",
    },
    # Noise is drawn at every position, and hard attention has a baseline that only a checkpoint
    # knows.
    "monotonic": {
        "encoder": ("lstm(layers=2)",),
        "decoder": ("lstm(attention=monotonic, layers=2)",),
    },
    "hard": {"encoder": ("bilstm",), "decoder": ("lstm(attention=reinforce)",)},
    "mixed": {
        "encoder": ("conv", "transformer"),
        "decoder": ("lstm(attention=coverage, coverage_loss_weight=0.5)", "cross_attention", "ffn"),
    },
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_kind_of_model(tmp_path, model):
    reference_and_resumed(tmp_path, stop_after=5, model=model, steps=8)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    "settings",
    [
        {"ema_decay": 0.0},
        {"optimizer": "adam"},
        {"gradient_accumulation": 2},
        {"precision": "bfloat16"},
        {"schedule": "cosine"},
    ],
)
def test_every_kind_of_setting(tmp_path, settings):
    reference_and_resumed(tmp_path, stop_after=5, steps=8, **settings)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_crash_between_checkpoints_repeats_the_same_steps(tmp_path):
    """The log is truncated to the checkpoint, so that no step is counted twice."""
    with RunDirectory(tmp_path / "whole") as run:
        make(run).fit(resume=False)

    def crash(record):
        if "event" not in record and record["step"] == 7:
            raise KeyboardInterrupt

    with RunDirectory(tmp_path / "cut") as run, pytest.raises(KeyboardInterrupt):
        make(run, parts={"on_record": crash}).fit(resume=False)
    assert [record["step"] for record in log_of(tmp_path / "cut") if "lr" in record][-1] == 7
    with RunDirectory(tmp_path / "cut") as run:
        make(run).fit(resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    discarded = (tmp_path / "cut" / "log.discarded.jsonl").read_text().splitlines()
    assert len(discarded) == 3


def test_second_request_saves_no_checkpoint(tmp_path):
    """The first request finishes the step and saves, the second exits at once.

    The last checkpoint is kept.
    """

    def twice(record):
        if "event" not in record and record["step"] == 6:
            signals.request_stop("SIGINT")
            signals.request_stop("SIGINT")

    with RunDirectory(tmp_path) as run:
        result = make(run, parts={"on_record": twice}).fit(resume=False)
    assert result.stopped == "SIGINT, SIGINT"
    assert RunDirectory(tmp_path).steps() == [4]


def test_a_stop_before_the_first_step_publishes_nothing(tmp_path):
    signals.request_stop("SIGTERM")
    with RunDirectory(tmp_path) as run:
        result = make(run).fit(resume=False)
    assert result.stopped == "SIGTERM"
    assert result.step == 0
    assert RunDirectory(tmp_path).steps() == []


def test_second_stop_request_interrupts_a_step(tmp_path):
    """On a second request a long step of many micro-batches is interrupted."""
    calls = []

    def urgent(task):
        def loss(model, batch):
            calls.append(1)
            if len(calls) == 2:
                signals.request_stop("SIGTERM")
                signals.request_stop("SIGTERM")
            return task(model, batch)

        return loss

    with RunDirectory(tmp_path) as run:
        trainer = make(run, gradient_accumulation=8)
        trainer._step.task.loss = urgent(trainer._step.task.loss)
        with pytest.raises(StoppedError, match="found SIGTERM, SIGTERM"):
            trainer.fit(resume=False)
    assert len(calls) == 2


def test_changed_precision_is_warned_about(tmp_path, caplog):
    with RunDirectory(tmp_path) as run:
        make(run, stop_after=5).fit(resume=False)
    signals.uninstall_handlers()
    with RunDirectory(tmp_path) as run:
        make(run, precision="bfloat16").fit(resume=True)
    assert "resume is not bit-exact: precision float32 -> bfloat16" in caplog.text
