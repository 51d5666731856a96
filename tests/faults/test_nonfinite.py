"""Steps that are not finite are skipped and never saved; too many of them end the run."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from task_models_kit import records_of, subject_of
from training_kit import assert_same_run, log_of, state_of, tensors_of, tiny_trainer

from dragoman.bundle.writer import write_task_bundle
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import DivergedError
from dragoman.inference.non_translation_evaluation import evaluate_task


class NonFiniteTask:
    """A task whose loss is not finite at some steps.

    With `late`, only the backward pass shows it.
    """

    def __init__(self, task, is_bad, *, in_backward=False) -> None:
        self.task, self.is_bad, self.in_backward, self.update = task, is_bad, in_backward, 0

    def loss(self, model, batch):
        found = self.task.loss(model, batch)
        if not self.is_bad(self.update):
            return found
        bad = (
            found.total * float("inf")
            if not self.in_backward
            else found.total + _bad_gradient(model.output_weight)
        )
        return type(found)(bad, found.nll, found.count)


def _bad_gradient(weight):
    """Zero, with a gradient that is not a number: sqrt at 0, times 0."""
    return (weight.sum() * 0).sqrt() * 0


def nonfinite_trainer(run, is_bad, *, in_backward=False, **options):
    trainer = tiny_trainer(run, **options)
    task = trainer._step.task = NonFiniteTask(trainer._step.task, is_bad, in_backward=in_backward)
    train_step = trainer.train_step

    def note(batch):
        task.update = batch.step
        train_step(batch)

    trainer.train_step = note
    return trainer


@pytest.mark.parametrize("in_backward", [False, True], ids=["loss", "gradient"])
def test_one_bad_step_is_skipped_and_named(tmp_path, caplog, in_backward):
    """The batch that did it is named (facebookresearch/fairseq#1529, #512, #282, #1895, #4555)."""
    with RunDirectory(tmp_path) as run:
        trainer = nonfinite_trainer(run, lambda update: update == 7, in_backward=in_backward)
        result = trainer.fit(resume=False)
    skipped = [record for record in log_of(tmp_path) if record.get("skipped")]
    assert result.step == 12
    assert [record["step"] for record in skipped] == [7]
    assert len(skipped[0]["examples"]) >= 1
    assert "step 7 was skipped: its loss is" in caplog.text
    state = state_of(tmp_path)
    assert (state["step"], state["applied_steps"], state["divergence"]["total_skips"]) == (
        12,
        11,
        1,
    )
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(tmp_path).values())
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.slow
def test_one_bad_step_of_five_hundred(tmp_path):
    with RunDirectory(tmp_path) as run:
        nonfinite_trainer(run, lambda update: update == 250, steps=500, checkpoint_every=100).fit(
            resume=False
        )
    assert [record["step"] for record in log_of(tmp_path) if record.get("skipped")] == [250]


def test_a_skipped_step_leaves_weights_and_moments_alone(tmp_path):
    """The number moves on, so that data and learning rate stay functions of it.

    Nothing else does.
    """
    with RunDirectory(tmp_path) as run:
        trainer = nonfinite_trainer(
            run, lambda update: update == 5, steps=5, checkpoint_every=4, ema_decay=0.0
        )
        trainer.fit(resume=False)
        before, after = run.open_step(4), run.open_step(5)
        for one, other in (
            (before.load_weights(), after.load_weights()),
            (before.load_optimizer(), after.load_optimizer()),
        ):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_divergence_rolls_back_and_excludes_the_steps(tmp_path, caplog):
    """Ten bad steps in a row return to the newest checkpoint.

    The same steps are then skipped and the run finishes.
    """
    with RunDirectory(tmp_path) as run:
        trainer = nonfinite_trainer(
            run, lambda update: 12 <= update <= 21, steps=24, checkpoint_every=11
        )
        result = trainer.fit(resume=False)
    assert result.step == 24
    assert "rolled back to step 11, excluding 10 steps" in caplog.text
    log = [record for record in log_of(tmp_path) if "event" not in record]
    assert [record["step"] for record in log] == list(range(1, 25))
    assert [record["step"] for record in log if record.get("excluded")] == list(range(12, 22))
    state = state_of(tmp_path)
    assert state["divergence"]["rolled_back"]
    assert state["applied_steps"] == 14


def test_a_rollback_before_any_checkpoint_returns_to_the_start(tmp_path):
    with RunDirectory(tmp_path / "rolled") as run:
        trainer = nonfinite_trainer(
            run, lambda update: 2 <= update <= 11, steps=14, checkpoint_every=100
        )
        train_step, after_first_step = trainer.train_step, []

        def watch(batch):
            train_step(batch)
            if batch.step == 1:
                tensors = (trainer.model.state_dict(), trainer.ema.state_dict())
                after_first_step.append(copy.deepcopy(tensors))

        trainer.train_step = watch
        trainer.fit(resume=False)
    first, again = after_first_step
    for one, other in zip(first, again, strict=True):  # the weights, and their EMA
        assert all(torch.equal(one[name], other[name]) for name in one)
    log = [record for record in log_of(tmp_path / "rolled") if "event" not in record]
    assert [record["step"] for record in log if record.get("excluded")] == list(range(2, 12))
    assert state_of(tmp_path / "rolled")["applied_steps"] == 4
    with RunDirectory(tmp_path / "excluded") as run:
        trainer = tiny_trainer(run, steps=14, checkpoint_every=100)
        trainer.state.divergence.excluded_steps.update(range(2, 12))
        trainer.fit(resume=False)
    rolled, excluded = (tensors_of(tmp_path / name) for name in ("rolled", "excluded"))
    assert rolled.keys() == excluded.keys()
    assert [name for name in rolled if not torch.equal(rolled[name], excluded[name])] == []


def test_a_run_that_stays_bad_ends_with_70_and_its_last_good_step(tmp_path):
    """Exit code 70 within 25 steps of the first bad one; earlier checkpoints are intact."""
    with RunDirectory(tmp_path) as run:
        trainer = nonfinite_trainer(run, lambda update: update >= 30, steps=100, checkpoint_every=4)
        with pytest.raises(
            DivergedError,
            match=r"10 steps with gradients that were not, the last of them 49, after one rollback",
        ) as error:
            trainer.fit(resume=False)
        assert error.value.exit_code == 70
        newest = run.latest()
        assert newest is not None
        assert newest.step <= 48
        assert all(torch.isfinite(tensor).all() for tensor in newest.load_weights().values())
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 70)
    assert "DivergedError" in status["reason"]


def test_resumed_run_excludes_the_same_steps(tmp_path):
    def is_bad(update):
        return 9 <= update <= 18

    with RunDirectory(tmp_path / "whole") as run:
        nonfinite_trainer(run, is_bad, steps=24).fit(resume=False)
    with RunDirectory(tmp_path / "cut") as run:
        nonfinite_trainer(run, is_bad, steps=20).fit(resume=False)
    with RunDirectory(tmp_path / "cut") as run:
        nonfinite_trainer(run, is_bad, steps=24).fit(resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("recipe", ["kim2014", "yang2016", "lample2016", "chen2017"])
def test_labels_of_outputs_that_are_not_finite_are_an_error(recipe: str) -> None:
    """A label was predicted with the probability NaN."""
    predictor, example = subject_of(recipe)
    with torch.no_grad():
        for weight in predictor.model.parameters():
            weight.fill_(torch.nan)
    with pytest.raises(DivergedError, match="outputs must be finite numbers"):
        predictor.predict([example])


@pytest.mark.parametrize("recipe", ["yang2016", "lee2019"])
def test_a_score_of_outputs_that_are_not_finite_is_an_error(recipe: str, tmp_path: Path) -> None:
    """Loss and metrics were NaN, and the exit code 0.

    The bundle has no golden vectors; with none, a classifier could not be loaded.
    """
    predictor, _ = subject_of(recipe)
    state = predictor.model.state_dict()
    weights = {
        name: torch.full_like(each, 3e38) if each.is_floating_point() else each
        for name, each in state.items()
    }
    write_task_bundle(tmp_path / "model", task=predictor.task, weights=weights)
    records, _ = records_of(predictor.config)
    test_set = tmp_path / "test.jsonl"
    test_set.write_text("".join(json.dumps(each.fields) + "\n" for each in records))
    with pytest.raises(DivergedError, match="outputs must be finite numbers"):
        evaluate_task(tmp_path / "model", [test_set], device="cpu")
