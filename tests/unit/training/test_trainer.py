"""The training loop: what it learns, logs, publishes, and where it ends."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from training_kit import (
    SETTINGS,
    assert_same_run,
    log_of,
    state_of,
    tensors_of,
    tiny_model,
    tiny_trainer,
)

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import TrainConfig
from dragoman.errors import ConfigError
from dragoman.runs.time_budget import trained_seconds
from dragoman.runtime import signals
from dragoman.tasks.translation import TranslationTask
from dragoman.training import data_loader, train_step
from dragoman.training import trainer as trainer_module
from dragoman.training.data_loader import derive_seed
from dragoman.training.model_and_optimizer_checkpoint import Checkpointer


@pytest.fixture(autouse=True)
def _one_thread_and_no_requests():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signals.uninstall_handlers()


def train(path, *, resume=False, **options):
    with RunDirectory(path, keep_checkpoints=options.get("keep_checkpoints", 3)) as run:
        trainer = tiny_trainer(run, **options)
        return trainer, trainer.fit(resume=resume)


def test_the_loss_falls(tmp_path) -> None:
    _, result = train(tmp_path, steps=150, checkpoint_every=1000, model={"dropout": 0.0})
    losses = [record["nll"] for record in log_of(tmp_path) if "nll" in record]
    assert result.step == 150
    assert result.stopped is None
    assert losses[0] > 3.0  # log of the vocabulary size, 24
    assert sum(losses[-10:]) / 10 < 2.3


def test_log_has_a_line_per_step_with_all_metrics(tmp_path) -> None:
    """Metrics from the first step on, not after an hour (OpenNMT/OpenNMT#75)."""
    train(tmp_path, steps=6)
    records = [record for record in RunDirectory(tmp_path).records() if "event" not in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(
        {"step", "loss", "nll", "lr", "grad_norm", "tokens", "padding", "seconds"} == set(record)
        for record in records
    )
    assert all(
        0 <= record["padding"] < 0.6 and record["tokens"] > 0 and record["grad_norm"] > 0
        for record in records
    )
    assert [record["lr"] for record in records] == pytest.approx(
        [0.00075, 0.0015, 0.00225, 0.003, 0.003, 0.003]
    )


def test_checkpoints_are_saved_at_the_interval_and_at_the_end(tmp_path) -> None:
    train(tmp_path, steps=10, keep_checkpoints=5)
    assert RunDirectory(tmp_path).steps() == [4, 8, 10]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("finished", 0, 10)


def test_same_seed_gives_the_same_run(tmp_path) -> None:
    """Seeds fix the result (flairNLP/flair#1189, #2676)."""
    for name in ("one", "two"):
        train(tmp_path / name)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_the_moving_average_follows_every_step_with_its_own_number(tmp_path) -> None:
    """After step n, the decay is at most (1 + n) / (10 + n)."""
    train(tmp_path, steps=5, checkpoint_every=1, keep_checkpoints=9, ema_decay=SETTINGS.ema_decay)
    run = RunDirectory(tmp_path)
    expected = {name: tensor.detach().double() for name, tensor in tiny_model().named_parameters()}
    assert run.steps() == [1, 2, 3, 4, 5]
    for step in run.steps():
        decay = min(SETTINGS.ema_decay, (1 + step) / (10 + step))
        weights, average = run.open_step(step).load_weights(), run.open_step(step).load_ema()
        assert average is not None
        for name in expected:
            expected[name] = decay * expected[name] + (1 - decay) * weights[name].double()
            torch.testing.assert_close(average[name].double(), expected[name], rtol=1e-5, atol=1e-7)
            assert not torch.allclose(average[name], weights[name], rtol=1e-6, atol=0) or step == 0


def test_a_finished_run_that_is_resumed_does_nothing(tmp_path) -> None:
    """Running the same command again resumes (LibreTranslate/Locomotive#29)."""
    train(tmp_path)
    before = log_of(tmp_path)
    _, result = train(tmp_path, resume=True)
    assert result.step == 12
    assert log_of(tmp_path) == before


def test_finished_run_can_be_extended(tmp_path) -> None:
    train(tmp_path / "short", steps=8)
    _, result = train(tmp_path / "short", steps=12, resume=True)
    train(tmp_path / "long", steps=12)
    assert result.step == 12
    assert_same_run(tmp_path / "short", tmp_path / "long")


def test_new_run_rejects_a_directory_with_checkpoints(tmp_path) -> None:
    train(tmp_path)
    with pytest.raises(ConfigError, match="found step 12 in"):
        train(tmp_path)


def test_validation_changes_nothing(tmp_path) -> None:
    """Validation draws random numbers, uses dropout and trains nothing; the run must not notice."""

    def validate(model):
        model.train()
        torch.manual_seed(3)
        torch.rand(7)
        return {"loss": 1.0}

    train(tmp_path / "with", parts={"validate": validate}, validate_every=3, checkpoint_every=4)
    train(tmp_path / "without", checkpoint_every=4)
    one, other = tensors_of(tmp_path / "with"), tensors_of(tmp_path / "without")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_validations_have_random_numbers_of_their_step_and_seed(tmp_path) -> None:
    drawn = {}
    for seed in (7, 7, 8):
        found: list[float] = []

        def validate(model, found=found):
            found.append(float(torch.rand(())))
            return {"loss": 1.0}

        folder = tmp_path / f"{seed}-{len(drawn)}"
        train(folder, steps=4, validate_every=2, seed=seed, parts={"validate": validate})
        assert drawn.setdefault(seed, found) == found
    assert len({number for each in drawn.values() for number in each}) == 4


def test_validation_uses_the_ema_in_evaluation_mode(tmp_path) -> None:
    seen = []

    def validate(model):
        seen.append((model.training, torch.is_grad_enabled(), model.output_weight.detach().clone()))
        return {"loss": 1.0}

    trainer, _ = train(tmp_path, steps=4, parts={"validate": validate})
    (training, gradients, weight), *rest = seen
    assert not rest
    assert not training
    assert not gradients
    assert trainer.model.training
    assert torch.equal(weight, trainer.ema.state_dict()["embeddings.shared.weight"])
    assert not torch.equal(weight, trainer.model.output_weight)


def test_early_stopping_and_the_best(tmp_path) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.0, 2.4, 0.1])
    _, result = train(
        tmp_path,
        steps=100,
        validate_every=2,
        patience=3,
        checkpoint_every=50,
        parts={"validate": lambda model: {"loss": next(losses)}},
    )
    assert result.stopped == "patience"
    assert result.step == 10
    assert result.best == {"loss": 2.0, "step": 4}
    assert result.metrics == {"loss": 2.4}
    best = RunDirectory(tmp_path).best()
    assert best is not None
    assert best.step == 4
    assert best.metrics == {"loss": 2.0}


@pytest.mark.parametrize(
    ("target", "step", "stopped"),
    [
        (0.9, 6, "target"),
        (0.85, 4, "target"),
        (0.8, 4, "target"),
        (1.0, 12, None),
        (0.0, 12, None),
    ],
)
def test_training_stops_once_validation_sentences_are_exactly_right(
    tmp_path, target: float, step: int, stopped: str | None
) -> None:
    """The model takes the weights of that step, though an earlier loss was lower.

    A resumed run has nothing left to do.
    """
    found = iter([(0.0, 0.5), (0.85, 1.0), (0.95, 1.2), (0.5, 2.0), (0.7, 2.0), (0.7, 2.0)])

    def validate(model):
        return dict(zip(("exact", "loss"), next(found), strict=True))

    options = {
        "steps": 12,
        "validate_every": 2,
        "target_exact": target,
        "checkpoint_every": 50,
        "parts": {"validate": validate},
    }
    _, result = train(tmp_path, **options)
    assert (result.step, result.stopped) == (step, stopped)
    best = RunDirectory(tmp_path).best()
    assert best is not None
    assert best.step == result.best["step"] == (step if stopped else 2)
    if stopped:
        _, again = train(tmp_path, **options, resume=True)
        assert (again.step, again.stopped) == (step, stopped)


def test_best_checkpoint_by_bleu_has_the_highest_score(tmp_path) -> None:
    scores = iter([5.0, 9.0, 7.0])
    _, result = train(
        tmp_path,
        steps=6,
        validate_every=2,
        best_metric="bleu",
        parts={"validate": lambda model: {"loss": 1.0, "bleu": next(scores)}},
    )
    assert result.best["step"] == 4
    assert result.best["bleu"] == 9.0


def test_the_last_step_is_validated_with_any_interval(tmp_path) -> None:
    calls = []
    train(
        tmp_path,
        steps=7,
        validate_every=100,
        parts={"validate": lambda model: calls.append(1) or {"loss": 1.0}},
    )
    assert len(calls) == 1


def test_a_time_budget_ends_in_time_with_a_validation_and_a_checkpoint(tmp_path) -> None:
    left = itertools.count(8, -1)
    _, result = train(
        tmp_path,
        steps=1000,
        checkpoint_every=1000,
        validate_every=1000,
        parts={"deadline": lambda: next(left), "validate": lambda model: {"loss": 2.0}},
    )
    assert result.stopped == "deadline"
    assert 2 <= result.step <= 8
    assert result.metrics == {"loss": 2.0}
    assert RunDirectory(tmp_path).steps()[-1] == result.step


class Clock:
    """A fake clock that a test advances by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class SlowTask(TranslationTask):
    """Translation, at one second per step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(smoothing=0.0)
        self.clock = clock

    def loss(self, model, batch):
        self.clock.now += 1
        return super().loss(model, batch)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trainer_module, "time", clock)
    return clock


def slow_parts(clock: Clock, seconds: float) -> dict[str, object]:
    """Return a task of a second per step and a validation of 20 seconds, with a time budget."""

    def validate(model):
        clock.now += 20
        return {"loss": 2.0}

    return {
        "task": SlowTask(clock),
        "validate": validate,
        "deadline": lambda: seconds - clock.now,
    }


def test_a_time_budget_has_room_for_the_last_validation(tmp_path, clock) -> None:
    _, result = train(
        tmp_path,
        steps=1000,
        checkpoint_every=1000,
        validate_every=10,
        parts=slow_parts(clock, seconds=85),
    )
    assert result.stopped == "deadline"
    assert state_of(tmp_path)["validated_step"] == result.step == 24
    assert clock.now == 24 + 3 * 20  # a step and a half must be left beside the validation


@pytest.fixture
def slow_checkpoints(clock, monkeypatch) -> None:
    """Let every checkpoint take five seconds."""
    save = Checkpointer.save_checkpoint

    def save_slowly(self, *arguments, **options):
        clock.now += 5
        return save(self, *arguments, **options)

    monkeypatch.setattr(Checkpointer, "save_checkpoint", save_slowly)


@pytest.mark.usefixtures("slow_checkpoints")
def test_a_time_budget_has_room_for_the_last_checkpoint(tmp_path, clock) -> None:
    trainer, result = train(
        tmp_path,
        steps=1000,
        checkpoint_every=10,
        parts={"task": SlowTask(clock), "deadline": lambda: 30 - clock.now},
    )
    assert (result.step, result.stopped) == (19, "deadline")
    assert trainer.state.seconds == clock.now == 19 + 2 * 5


def test_plans_get_a_smooth_average_of_the_seconds_per_step(tmp_path, clock) -> None:
    """The first step counts in full, and every other by a twentieth."""
    averages = []

    def replan(done, seconds):
        averages.append(seconds)
        clock.now += 50  # no part of a step
        return 4

    class UnsteadyTask(SlowTask):
        def loss(self, model, batch):
            self.clock.now += 2 * (self.clock.now > 0)
            return super().loss(model, batch)

    train(
        tmp_path, steps=4, checkpoint_every=2, parts={"replan": replan, "task": UnsteadyTask(clock)}
    )
    assert averages == pytest.approx([1.1, 1.1 + 0.05 * 1.9 + 0.05 * 0.95 * 1.9])


def test_the_status_is_written_once_a_minute(tmp_path, clock, monkeypatch) -> None:
    statuses = []
    status = RunDirectory.status

    def note(self, **fields):
        statuses.append((fields.get("state"), fields.get("step")))
        status(self, **fields)

    monkeypatch.setattr(RunDirectory, "status", note)

    class SlowerTask(SlowTask):
        def loss(self, model, batch):
            self.clock.now += 19
            return super().loss(model, batch)

    train(tmp_path, steps=8, checkpoint_every=100, parts={"task": SlowerTask(clock)})
    assert [step for state, step in statuses if state == "training"] == [1, 4, 7]
    assert statuses[-1] == ("finished", 8)


def test_signal_handlers_are_restored_at_an_interval(tmp_path, monkeypatch) -> None:
    restored = []
    monkeypatch.setattr(trainer_module, "SIGNAL_CHECK_INTERVAL", 3)
    monkeypatch.setattr(signals, "restore_handlers", lambda: restored.append(steps[-1]))
    steps: list[int] = []
    trainer_options = {"on_record": lambda record: steps.append(record["step"])}
    train(tmp_path, steps=7, checkpoint_every=100, parts=trainer_options)
    assert restored == [3, 6]


def test_only_the_last_checkpoint_must_be_saved(tmp_path, monkeypatch) -> None:
    """A checkpoint that cannot be written does not become the best one; training continues."""
    tolerated = {}
    save = Checkpointer.save_checkpoint

    def fail_to_save(self, step, *arguments, tolerate_disk_errors, **options):
        tolerated[step] = tolerate_disk_errors
        return step != 2 and save(
            self, step, *arguments, tolerate_disk_errors=tolerate_disk_errors, **options
        )

    monkeypatch.setattr(Checkpointer, "save_checkpoint", fail_to_save)
    losses = iter([1.0, 2.0, 3.0])
    _, result = train(
        tmp_path,
        steps=5,
        checkpoint_every=4,
        validate_every=2,
        parts={"validate": lambda model: {"loss": next(losses)}},
    )
    assert tolerated == {2: True, 4: True, 5: False}
    assert result.best == {"loss": 1.0, "step": 2}
    assert RunDirectory(tmp_path).best() is None
    assert RunDirectory(tmp_path).steps() == [4, 5]


def test_an_unexpected_error_is_written_to_the_status(tmp_path) -> None:
    def fail(record):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        train(tmp_path, parts={"on_record": fail})
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert status["reason"] == "ValueError: no such thing"


def test_a_stop_request_is_written_to_the_status(tmp_path) -> None:
    """The run does not count as finished, and its last step is not validated."""

    def ask(record):
        if record["step"] == 3:
            signals.request_stop("a test")

    validated = []
    _, result = train(
        tmp_path,
        validate_every=3,
        parts={"on_record": ask, "validate": lambda model: validated.append(1) or {"loss": 1.0}},
    )
    status = json.loads((tmp_path / "status.json").read_text())
    assert (result.step, result.stopped, validated) == (3, "a test", [])
    assert (status["state"], status["exit_code"], status["step"]) == ("stopped", 75, 3)
    assert status["reason"] == "a test"


def test_time_of_validations_counts_as_training_time(tmp_path, clock) -> None:
    train(tmp_path, steps=8, parts=slow_parts(clock, seconds=1000))
    with RunDirectory(tmp_path) as run:
        assert trained_seconds(run) == clock.now == 8 + 2 * 20


def test_throughput_measures_at_least_one_step(tmp_path) -> None:
    with RunDirectory(tmp_path) as run:
        throughput = tiny_trainer(run).measure_throughput(0.0)
    assert all(0 < each < float("inf") for each in throughput)


def test_a_new_plan_is_part_of_the_checkpoint(tmp_path) -> None:
    """The learning rate depends on the step and the saved plan, so a resumed run repeats it."""
    plans = []

    def replan(done, seconds):
        plans.append((done, seconds > 0))
        return 10 if done < 8 else 9

    train(tmp_path, steps=10, schedule="linear", checkpoint_every=4, parts={"replan": replan})
    rates = {record["step"]: record["lr"] for record in log_of(tmp_path) if "lr" in record}
    assert plans == [(4, True), (8, True), (9, True)]
    assert rates[4] == pytest.approx(3e-3)
    assert rates[5] == pytest.approx(3e-3 * 6 / 7)
    assert rates[9] == pytest.approx(3e-3 * 1 / 6)
    assert state_of(tmp_path)["max_steps"] == 9
    _, result = train(tmp_path, steps=10, resume=True, parts={"replan": replan})
    assert result.step == 9


def test_a_plan_of_fewer_steps_than_are_done_ends_the_run(tmp_path) -> None:
    """The number of planned steps is never below the steps that are done."""
    _, result = train(tmp_path, steps=12, parts={"replan": lambda done, seconds: 3})
    assert result.stopped is None
    assert result.step <= 5
    assert state_of(tmp_path)["max_steps"] == result.step


def test_a_resumed_run_with_a_time_budget_keeps_its_planned_steps(tmp_path) -> None:
    """Without one, it has the steps of the configuration."""
    train(tmp_path, steps=8)
    _, result = train(tmp_path, steps=12, time_budget=60.0, resume=True)
    assert result.step == 8
    _, result = train(tmp_path, steps=9, resume=True)
    assert result.step == 9


@pytest.mark.parametrize(
    ("steps", "planned", "validated"),
    [
        (24, {}, [8, 16, 24]),
        (25, {}, [8, 16, 25]),  # not at 24 and 25
        (26, {}, [8, 16, 24, 26]),
        (24, {4: 30, 8: 27, 16: 23, 20: 22}, [8, 16, 22]),
        (24, {16: 25, 20: 25}, [8, 16, 25]),
        (24, {16: 17}, [8, 16]),  # the time is up just after a validation
        (24, {16: 18}, [8, 16, 18]),  # a quarter of the interval later
    ],
)
def test_validations_come_at_fixed_intervals(tmp_path, steps, planned, validated) -> None:
    """A time budget moved them with every new plan: 200, 202 and 222."""
    plan = {"steps": steps}

    def replan(done, seconds):
        plan["steps"] = planned.get(done, plan["steps"])
        return plan["steps"]

    parts = {"validate": lambda model: {"loss": 1.0}} | ({"replan": replan} if planned else {})
    train(tmp_path, steps=steps, checkpoint_every=4, validate_every=8, parts=parts)
    assert [
        record["step"] for record in log_of(tmp_path) if record.get("event") == "validation"
    ] == validated


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize("chosen_decay", [0.0, 0.5])
def test_reconfigured_trainer_runs_as_a_new_one(tmp_path, ema_decay, chosen_decay) -> None:
    """A run chooses its steps after it has measured the throughput, with the same trainer."""
    chosen = {"steps": 12, "warmup_steps": 3, "checkpoint_every": 4, "ema_decay": chosen_decay}
    with RunDirectory(tmp_path / "one") as run:
        trainer = tiny_trainer(run, ema_decay=ema_decay)
        trainer.measure_throughput(seconds=0.05)
        trainer.reconfigure(dataclasses.replace(trainer.config, **chosen))
        trainer.fit(resume=False)
    train(tmp_path / "two", **chosen)
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_reconfigured_trainer_forgets_what_did_not_fit_while_measuring(tmp_path) -> None:
    with RunDirectory(tmp_path) as run:
        trainer = tiny_trainer(run)
        splitter = trainer._step.oom_splitter
        splitter.token_limits["9x9"], splitter.splits = 40, 2
        splitter.dropped_examples.append(3)
        trainer.reconfigure(trainer.config)
    assert (splitter.token_limits, splitter.dropped_examples, splitter.splits) == ({}, [], 0)
    splitter.token_limits["9x9"] = 30
    assert trainer.state.token_limits == {"9x9": 30}, "limits are part of the state"


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_reconfigured_trainer_compiles_or_uncompiles_its_blocks_once(
    tmp_path, monkeypatch, before, after
) -> None:
    calls = []
    for name in ("compile_blocks", "uncompile_blocks"):
        monkeypatch.setattr(trainer_module, name, lambda model, name=name: calls.append(name))
    with RunDirectory(tmp_path) as run:
        trainer = tiny_trainer(run, compile="on" if before else "off")
        assert trainer.compile_decision.enabled is before
        assert calls == ["compile_blocks"] * before
        calls.clear()
        trainer.reconfigure(dataclasses.replace(trainer.config, compile="on" if after else "off"))
    assert trainer.compile_decision.enabled is after
    assert calls == ["compile_blocks"] * (after and not before) + ["uncompile_blocks"] * (
        before and not after
    )


@pytest.mark.parametrize("norm", ["layer", "batch"])  # batch: running means are weights, too
def test_measuring_throughput_changes_nothing(tmp_path, norm: str) -> None:
    """A throughput estimate before the first step (LibreTranslate/Locomotive#35), without changing
    the run.
    """
    model = {"norm": norm}
    with RunDirectory(tmp_path / "one") as run:
        trainer = tiny_trainer(run, model=model, steps=4)
        throughput = trainer.measure_throughput(seconds=0.05)
        trainer.fit(resume=False)
    train(tmp_path / "two", model=model, steps=4)
    assert throughput.seconds_per_step > 0
    assert throughput.tokens_per_second > 0
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_observers_get_the_records_of_the_log(tmp_path) -> None:
    seen = []
    train(
        tmp_path, steps=4, parts={"on_record": seen.append, "validate": lambda model: {"loss": 1.0}}
    )
    assert [record.get("event", record["step"]) for record in seen] == [1, 2, 3, 4, "validation"]


def test_checkpoint_request_saves_once(tmp_path) -> None:
    def ask(record):
        if record["step"] == 3:
            signals._state.checkpoint = True

    train(tmp_path, steps=6, checkpoint_every=100, keep_checkpoints=5, parts={"on_record": ask})
    assert RunDirectory(tmp_path).steps() == [3, 6]


def test_gradient_clipping_limits_the_norm(tmp_path) -> None:
    """With plain Adam the first change is the rate whatever the norm.

    Epsilon makes the clipped size show.
    """
    for name, clip in (("free", 0.0), ("clipped", 1e-4)):
        train(
            tmp_path / name,
            steps=1,
            max_grad_norm=clip,
            epsilon=1.0,
            optimizer="adam",
            weight_decay=0.0,
            ema_decay=0.0,
            warmup_steps=0,
        )
    first, other = (
        {k: v for k, v in tensors_of(tmp_path / name).items() if k.endswith("exp_avg")}
        for name in ("free", "clipped")
    )
    norms = [
        torch.cat([value.flatten() for value in each.values()]).norm().item() * 10
        for each in (first, other)
    ]  # exp_avg is a tenth of it
    logged = log_of(tmp_path / "free")[0]["grad_norm"]
    assert norms[0] == pytest.approx(logged, rel=1e-4)
    assert norms[1] == pytest.approx(1e-4, rel=1e-4)


class SpikingTask(TranslationTask):
    """Translation with one loss that is a million times too high."""

    def __init__(self, spike: int) -> None:
        super().__init__(smoothing=0.0)
        self.spike, self.calls = spike, 0

    def loss(self, model, batch):
        found = super().loss(model, batch)
        self.calls += 1
        factor = 1e6 if self.calls == self.spike else 1.0
        return dataclasses.replace(found, total=factor * found.total)


def test_a_spike_marks_the_next_checkpoint(tmp_path, monkeypatch) -> None:
    """A run that is resumed there marks no later one either."""
    monkeypatch.setattr("dragoman.training.trainer_state.SPIKE_WINDOW", 3)
    monkeypatch.setattr("dragoman.training.trainer_state.SPIKE_SIGMAS", 1e3)
    train(tmp_path / "whole", parts={"task": SpikingTask(6)})
    train(tmp_path / "cut", steps=8, parts={"task": SpikingTask(6)})
    train(tmp_path / "cut", resume=True, parts={"task": SpikingTask(0)})
    for run in (RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "cut")):
        suspects = [run.open_step(step).manifest["suspect"] for step in (4, 8, 12)]
        assert suspects == [False, True, False], run.path.name
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_validation_without_a_number_is_never_the_best(tmp_path) -> None:
    losses = iter([float("nan"), 3.0, float("inf")])
    _, result = train(
        tmp_path,
        steps=6,
        validate_every=2,
        parts={"validate": lambda model: {"loss": next(losses)}},
    )
    assert result.best == {"loss": 3.0, "step": 4}


def test_best_by_bleu_needs_sentences() -> None:
    (target,) = TrainConfig(target_exact=0.9, validate_sentences=0).problems()
    assert (
        "needs sentences to translate; found train.validate_sentences=0 with train.target_exact=0.9"
        in target
    )
    problems = list(TrainConfig(best_metric="bleu", validate_sentences=0).problems())
    assert any("found train.validate_sentences=0" in problem for problem in problems)


def test_tensorboard_is_written_beside_the_run_if_enabled(tmp_path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    train(tmp_path, steps=4, tensorboard=True, parts={"validate": lambda model: {"loss": 1.0}})
    train(tmp_path, steps=6, tensorboard=True, resume=True)
    found = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in found.Scalars("valid/loss")] == [1.0]
    steps = ("loss", "nll", "lr", "grad_norm", "tokens", "padding", "seconds")
    assert set(found.Tags()["scalars"]) == {"valid/loss", *(f"train/{name}" for name in steps)}
    rates = [record["lr"] for record in log_of(tmp_path) if "lr" in record]
    assert [event.value for event in found.Scalars("train/lr")] == pytest.approx(rates)


def test_text_and_dropout_are_seeded_by_the_seed_of_the_run(tmp_path, monkeypatch) -> None:
    seeds = []

    def recorded(run_seed, *position):
        seeds.append(run_seed)
        return derive_seed(run_seed, *position)

    for module in (train_step, data_loader):
        monkeypatch.setattr(module, "derive_seed", recorded)
    train(tmp_path, seed=11, steps=2)
    assert seeds == [11] * 4  # a text and a forward pass for each step


def test_gradient_accumulation_takes_so_many_micro_batches_a_step(tmp_path) -> None:
    trainer, _ = train(tmp_path / "one", steps=2, gradient_accumulation=1)
    other, _ = train(tmp_path / "three", steps=2, gradient_accumulation=3)
    assert (trainer.state.batch, other.state.batch) == (2, 6)
    assert other.state.examples_seen > 2 * trainer.state.examples_seen


def test_excluded_steps_change_nothing_but_the_position(tmp_path) -> None:
    with RunDirectory(tmp_path) as run:
        trainer = tiny_trainer(run, steps=1, ema_decay=0.0)
        trainer.state.divergence.excluded_steps.add(1)
        before = {name: each.clone() for name, each in trainer.model.state_dict().items()}
        trainer.fit()
    assert all(torch.equal(each, before[name]) for name, each in trainer.model.state_dict().items())
    assert (trainer.state.step, trainer.state.batch, trainer.state.applied_steps) == (1, 1, 0)
    assert [each for each in log_of(tmp_path) if each.get("excluded")]


def test_a_resumed_run_remembers_what_fits_in_memory(tmp_path) -> None:
    with RunDirectory(tmp_path) as run:
        trainer = tiny_trainer(run, steps=1)
        trainer._step.oom_splitter.token_limits["9x9"] = 40
        trainer.fit()
    resumed, _ = train(tmp_path, steps=2, resume=True)
    assert resumed._step.oom_splitter.token_limits == {"9x9": 40}
    resumed._step.oom_splitter.token_limits["8x8"] = 30
    assert resumed.state.token_limits == {"9x9": 40, "8x8": 30}
