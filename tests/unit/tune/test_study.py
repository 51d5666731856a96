"""Studies: sampling, pruning, failures, stops and kills, with runs that cost nothing.

The run of a trial is replaced by a function with a known optimum; whole trainings are in
tests/commands/test_tune_command.py.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from sync_kit import SyncRecorder

from dragoman.config import Config, read_config
from dragoman.errors import (
    BundleError,
    ConfigError,
    CorruptError,
    DivergedError,
    LockedError,
    StoppedError,
)
from dragoman.storage.lock import DirectoryLock
from dragoman.training.progress_display import QuietProgress
from dragoman.tune import base_and_best_config
from dragoman.tune import study as study_module
from dragoman.tune.study import StudyResult, tune

SEARCH = ("model.dropout=0.0..0.4", "train.optimizer=adam,adamw")
Run = Callable[..., Any]


class CapturedNotes(QuietProgress):
    """Collects notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def loss(config: Config, validation: int) -> float:
    """Return a loss that falls with time to (dropout - 0.3)², and is lower for adamw."""
    penalty = 0.0 if config.train.optimizer == "adamw" else 0.01
    return (config.model.dropout - 0.3) ** 2 + penalty + 1 / validation


def fake_run(config: Config, out: Path, **options: Any) -> Path:
    """Report four validations of `loss`; leave a run directory."""
    (out / "training").mkdir(parents=True, exist_ok=True)
    (out / "training" / "step-00000004").mkdir(exist_ok=True)
    for number in range(1, 5):
        options["on_record"]({"step": number, "nll": 1.0})
        options["on_record"](
            {"event": "validation", "step": number, "loss": loss(config, number), "bleu": number}
        )
    return out


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("a.src", "a.tgt", "v.src", "v.tgt"):
        (tmp_path / name).write_text("".join(f"line {number}\n" for number in range(9)))
    files = [
        f"data.{option}={tmp_path / file}"
        for option, file in (
            ("src", "a.src"), ("tgt", "a.tgt"), ("valid_src", "v.src"), ("valid_tgt", "v.tgt")
        )
    ]  # fmt: skip
    return read_config(recipe="tiny", overrides=[*files, "train.steps=4"])


@pytest.fixture
def run(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that tunes with fake runs, replaced by `train` if given.

    Figures, which take longer than all the rest, are only drawn on request; there is no memory of
    models to release.
    """
    draw = study_module.draw_trials
    monkeypatch.setattr(study_module, "release_memory", lambda: None)

    def call(
        trials: int,
        *,
        train: Run = fake_run,
        out: str = "study",
        figures: bool = False,
        **options: Any,
    ) -> Any:
        monkeypatch.setattr(study_module, "train", train)
        monkeypatch.setattr(
            study_module, "draw_trials", draw if figures else lambda *args, **named: False
        )
        return tune(
            options.pop("config", config),
            tmp_path / out,
            trials=trials,
            **{
                "budget": 1000.0,
                "search": SEARCH,
                "explicit_settings": ["train.steps"],
                **options,
            },
        )

    return call


def points(result: StudyResult) -> list[Any]:
    return [(each.values, each.state, each.value, each.reports) for each in result.trials]


def test_the_first_trial_is_the_base_and_the_best_is_found(
    run: Run, config: Config, tmp_path: Path
) -> None:
    result = run(25, figures=True)
    first, best = result.trials[0], result.best
    assert first.values == {"model.dropout": 0.1, "train.optimizer": "adamw"}
    assert best is not None
    assert best.values["train.optimizer"] == "adamw"
    assert best.values["model.dropout"] == pytest.approx(0.3, abs=0.03)
    assert best.value == min(each.value for each in result.trials if each.state == "complete")
    assert {each.state for each in result.trials} == {"complete", "pruned"}

    settings = read_config(file=tmp_path / "study" / "best.yaml")
    assert settings.model.dropout == best.values["model.dropout"]
    assert settings.data == config.data
    assert settings.train == config.train  # without what only a trial needs
    with (tmp_path / "study" / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["trial"]) for row in rows] == list(range(25))
    assert float(rows[best.number]["loss"]) == best.value
    for name in ("trials.png", "trials.svg"):
        assert (tmp_path / "study" / name).stat().st_size > 1000
    assert not (tmp_path / "other").exists()


def test_a_resumed_study_writes_the_same_table(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times were rounded once in the table, and twice after they were read from the journal."""
    clock = itertools.count(0.0, 0.25000004)
    monkeypatch.setattr(study_module, "time", SimpleNamespace(monotonic=clock.__next__))
    run(8)
    table = (tmp_path / "study" / "trials.csv").read_text()
    run(8)
    assert (tmp_path / "study" / "trials.csv").read_text() == table


def test_each_end_is_shown_with_the_best_so_far(run: Run) -> None:
    captured = CapturedNotes()
    result = run(12, progress=captured)
    notes = [note for note in captured.notes if note.startswith("trial ") and " in 0 s" in note]
    best = None
    for each in result.trials:
        if each.state != "complete":
            continue
        note = next(note for note in notes if note.startswith(f"trial {each.number}:"))
        is_best = best is None or each.value < best.value
        assert note.endswith("best so far") == (is_best and best is not None)
        assert (", best " in note and " in trial " in note) == (not is_best)
        if not is_best:
            assert note.endswith(f"best {best.value:.4f} in trial {best.number}")
        best = each if is_best else best


def test_pruned_trials_are_those_worse_than_the_median(run: Run) -> None:
    """The decision is compared with the definition: the median of complete trials' best so far."""
    result = run(25)
    ended: list[Any] = []
    for trial in result.trials:
        for number in range(2, len(trial.reports) + 1):
            others = sorted(min(each.reports[:number]) for each in ended if len(each.reports) == 4)
            median = statistics.median(others) if len(others) >= 4 else float("inf")
            worse = min(trial.reports[:number]) > median
            assert worse == (trial.state == "pruned" and number == len(trial.reports))
        if trial.state == "complete":
            ended.append(trial)
    pruned = [len(each.reports) for each in result.trials if each.state == "pruned"]
    assert pruned
    assert min(pruned) >= 2
    assert all(each.state == "complete" for each in run(12, out="all", prune=False).trials)


def test_an_interrupted_study_samples_the_same_as_one_in_one_run(run: Run) -> None:
    whole = run(9)
    for trials in (1, 7, 9):
        resumed = run(trials, out="pieces")
        assert points(resumed) == points(whole)[:trials]
    assert points(run(9, out="pieces")) == points(whole)


def test_only_the_best_runs_are_kept_without_checkpoints(run: Run, tmp_path: Path) -> None:
    result = run(8, keep=2)
    complete = [each for each in result.trials if each.state == "complete"]
    best = sorted(complete, key=lambda each: each.value or 0.0)[:2]
    kept = sorted(path.name for path in (tmp_path / "study" / "trials").iterdir())
    assert kept == sorted(f"{each.number:04d}" for each in best)
    assert not list((tmp_path / "study").rglob("step-*"))


class Killed(BaseException):
    """Simulates a killed process."""


@pytest.mark.parametrize("where", [1, 3, 6])
def test_a_killed_trial_continues_where_its_run_does(run: Run, tmp_path: Path, where: int) -> None:
    """The run repeats its last validation after a kill, as one does that lost a checkpoint."""
    whole = run(4, out="whole")
    calls = 0

    def dying(config: Config, out: Path, **options: Any) -> Path:
        def on_record(record: dict[str, Any]) -> None:
            nonlocal calls
            calls += 1
            options["on_record"](record)
            if calls == where:
                raise Killed

        return fake_run(config, out, **{**options, "on_record": on_record})

    with pytest.raises(Killed):
        run(4, train=dying)
    journal = tmp_path / "study" / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"event": "val')  # a line that the kill cut off
    assert points(run(4)) == points(whole)
    assert b'"val{' not in journal.read_bytes()


def test_a_trial_that_kills_its_process_three_times_has_failed(run: Run) -> None:
    def dying(config: Config, out: Path, **options: Any) -> Path:
        raise Killed

    for _ in range(3):
        with pytest.raises(Killed):
            run(2, train=dying)
    result = run(2)
    assert [each.state for each in result.trials] == ["failed", "complete"]
    assert "3 times" in result.trials[0].reason


def test_stop_request_is_not_counted_as_a_crash(run: Run) -> None:
    """However often a study is stopped, its trial resumes; the table so far is returned."""

    def stopped(config: Config, out: Path, **options: Any) -> Path:
        raise StoppedError("stopped", found="", fix="")

    run(1)
    for _ in range(5):
        result = run(3, train=stopped)
        assert result.stopped
        assert [each.state for each in result.trials] == ["complete", "running"]
    assert [each.state for each in run(3).trials] == ["complete"] * 3


@pytest.mark.parametrize(("crashes", "state"), [(2, "complete"), (3, "failed")])
def test_a_trial_that_was_stopped_has_its_crashes_still(run: Run, crashes: int, state: str) -> None:
    def ending(error: BaseException) -> Run:
        def end(config: Config, out: Path, **options: Any) -> Path:
            raise error

        return end

    assert run(1, train=ending(StoppedError("stopped", found="", fix=""))).stopped
    for _ in range(crashes):
        with pytest.raises(Killed):
            run(1, train=ending(Killed()))
    assert [each.state for each in run(1).trials] == [state]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DivergedError("gradients must stay finite", found="NaN", fix="lower it"), "NaN"),
        (MemoryError("no space"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "out of memory"),
        (ConfigError(["a must be b; found c; do d"]), "a must be b; found c; do d"),
    ],
)
def test_a_failed_trial_is_not_the_end(run: Run, error: Exception, reason: str) -> None:
    def failing(config: Config, out: Path, **options: Any) -> Path:
        if config.train.optimizer == "adam":
            raise error
        return fake_run(config, out, **options)

    result = run(10, train=failing)
    failed = [each for each in result.trials if each.state == "failed"]
    assert failed
    assert all(reason in each.reason and each.value is None for each in failed)
    assert result.best is not None
    assert points(run(10)) == points(result)


def test_a_loss_that_is_not_finite_fails_the_trial(run: Run) -> None:
    def diverging(config: Config, out: Path, **options: Any) -> Path:
        options["on_record"]({"event": "validation", "step": 1, "loss": float("nan")})
        raise AssertionError("the trial was not stopped")

    with pytest.raises(ConfigError, match=r"5 that failed.*diverged: validation loss nan"):
        run(9, train=diverging)


def test_values_that_do_not_fit_together_fail_the_trial(run: Run) -> None:
    result = run(6, search=["model.width=128,129,130"])
    states = {each.values["model.width"]: each.state for each in result.trials}
    assert states["128"] == "complete"
    assert set(states.values()) == {"complete", "failed"}


def test_other_errors_end_the_study_and_it_can_be_resumed(run: Run) -> None:
    def broken(config: Config, out: Path, **options: Any) -> Path:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run(2, train=broken)
    assert [each.state for each in run(2).trials] == ["complete"] * 2


def test_a_metric_may_be_larger_for_better(run: Run, tmp_path: Path) -> None:
    result = run(3, metric="bleu")
    assert [each.value for each in result.trials] == [4.0] * 3
    assert "bleu" in (tmp_path / "study" / "best.yaml").read_text()


def test_a_trial_without_validations_is_an_error(run: Run) -> None:
    with pytest.raises(ConfigError, match="tuning needs validations; found none"):
        run(2, train=lambda config, out, **options: out)


def test_a_trial_is_ranked_by_its_best_validation(run: Run, tmp_path: Path) -> None:
    """The run keeps its best checkpoint, whatever comes after it."""

    def overfitting(config: Config, out: Path, **options: Any) -> Path:
        losses = (0.5, 0.2, 0.9) if out.name == "0000" else (0.6, 0.5, 0.4)
        for step, value in enumerate(losses, 1):
            options["on_record"]({"event": "validation", "step": step, "loss": value})
        return out

    result = run(2, train=overfitting, prune=False)
    assert [each.value for each in result.trials] == [0.2, 0.4]
    assert result.best is result.trials[0]
    ends = [line for line in _lines(tmp_path) if line["event"] == "end"]
    assert [line["value"] for line in ends] == [0.2, 0.4]


def test_a_validation_is_durable_before_the_trial_continues(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, journal = SyncRecorder(monkeypatch), tmp_path / "study" / "journal.jsonl"
    durable = []

    def noting(config: Config, out: Path, **options: Any) -> Path:
        def on_record(record: dict[str, Any]) -> None:
            options["on_record"](record)
            durable.append(bool(recorder.synced(journal)))

        return fake_run(config, out, **{**options, "on_record": on_record})

    run(1, train=noting)
    assert durable == [True] * 8
    assert recorder.synced(journal)  # the end of the trial
    assert recorder.synced(journal.parent)  # the name of the journal


def test_best_settings_have_no_schedule_of_a_short_trial(
    run: Run, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_and_best_config, "measure_random_throughput", lambda *args: 1000.0)
    run(
        1,
        override=lambda base: base.replace(data=dataclasses.asdict(config.data)),
        explicit_settings=(),
        search=("model.dropout=0.0..0.4",),
    )
    small = read_config(recipe="small").train
    best = read_config(file=tmp_path / "study" / "best.yaml").train
    for name in ("steps", "warmup_steps", "ema_decay", "checkpoint_every", "validate_every"):
        assert getattr(best, name) == getattr(small, name), name


def test_trials_get_a_part_of_the_budget(run: Run) -> None:
    seen: list[Config] = []

    def noting(config: Config, out: Path, **options: Any) -> Path:
        seen.append(config)
        return fake_run(config, out, **options)

    run(1, train=noting, explicit_settings=(), budget=7200.0)
    run(1, train=noting, explicit_settings=(), budget=600.0, out="short")
    run(1, train=noting, trial_budget=90.0, out="given")
    run(1, train=noting, out="steps")
    assert [each.train.time_budget for each in seen] == [360.0, 60.0, 90.0, 0.0]
    assert seen[-1].train.validate_every == 1
    assert {each.train.seed for each in seen} == {1}


def test_a_budget_below_a_minute_is_that_of_its_only_trial(run: Run) -> None:
    seen: list[Config] = []

    def noting(config: Config, out: Path, **options: Any) -> Path:
        seen.append(config)
        return fake_run(config, out, **options)

    run(1, train=noting, explicit_settings=(), budget=40.0)
    run(1, train=noting, explicit_settings=["train.epochs"], out="epochs")
    run(1, train=noting, trial_budget=1000.0, out="whole")
    assert [each.train.time_budget for each in seen] == [40.0, 0.0, 1000.0]


def test_a_trial_of_given_steps_is_validated_eight_times(run: Run, config: Config) -> None:
    seen: list[Any] = []

    def noting(config: Config, out: Path, **options: Any) -> Path:
        seen.append((config.train, options))
        return fake_run(config, out, **options)

    long = config.replace(train={"steps": 1000, "average_checkpoints": 3})
    run(1, train=noting, config=long)
    train, options = seen[0]
    assert (train.validate_every, train.checkpoint_every) == (125, 125)
    assert (train.validate_sentences, train.keep_checkpoints) == (0, 3)
    assert train.best_metric == "loss"
    assert options["cpu_fallback"] is False, "a trial on another device is not comparable"
    assert options["explicit_settings"] == {"train.steps", "model.dropout", "train.optimizer"}
    often = long.replace(train={"validate_every": 50, "validate_sentences": 7})
    explicit = ["train.steps", "train.validate_sentences", "train.checkpoint_every"]
    run(1, train=noting, config=often, explicit_settings=explicit, out="often")
    train, _ = seen[1]
    assert (train.validate_every, train.validate_sentences) == (50, 7)
    assert train.checkpoint_every == often.train.checkpoint_every
    run(1, train=noting, config=long, metric="bleu", out="bleu")
    train, _ = seen[2]
    assert (train.best_metric, train.validate_sentences) == (
        "bleu",
        long.train.validate_sentences,
    )


@pytest.mark.parametrize("first", [4, 5])
def test_five_failures_in_a_row_at_the_start_end_the_study(run: Run, first: int) -> None:
    def failing(config: Config, out: Path, **options: Any) -> Path:
        if int(out.name) < first:
            raise DivergedError("loss", found="NaN", fix="lower it")
        return fake_run(config, out, **options)

    if first < 5:
        assert run(6, train=failing).trials[-1].state == "complete"
        return
    with pytest.raises(ConfigError, match="some trial must train; found 5 that failed"):
        run(6, train=failing)


def test_later_failures_do_not_end_a_study(run: Run) -> None:
    def failing(config: Config, out: Path, **options: Any) -> Path:
        if int(out.name) > 0:
            raise DivergedError("loss", found="NaN", fix="lower it")
        return fake_run(config, out, **options)

    assert [each.state for each in run(7, train=failing).trials] == ["complete", *["failed"] * 6]


def test_trials_of_another_seed_have_other_values(run: Run, config: Config) -> None:
    def values(seed: int) -> list[Any]:
        changed = config.replace(train={"seed": seed})
        return [each.values for each in run(4, config=changed, out=f"seed{seed}").trials]

    one, two = values(1), values(2)
    assert one[0] == two[0], "the base configuration"
    assert one[1:] != two[1:]
    assert len({each["model.dropout"] for each in one}) == 4


def test_the_budget_ends_a_study_and_a_larger_one_extends_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(study_module.time, "monotonic", lambda: clock[0])

    def slow(config: Config, out: Path, **options: Any) -> Path:
        clock[0] += 10
        return fake_run(config, out, **options)

    assert len(run(0, train=slow, budget=35.0).trials) == 3  # no time for a fourth
    assert len(run(0, train=slow, budget=35.0).trials) == 3
    assert len(run(0, train=slow, budget=55.0).trials) == 5
    assert len(run(0, train=slow, budget=60.0).trials) == 6  # just time for one more


def test_trials_of_an_extended_study_train_as_long_as_the_first(run: Run) -> None:
    """Their metrics are compared: a twentieth of the first budget, 1200 s, and not of 7200 s."""
    seen: list[float] = []

    def noting(config: Config, out: Path, **options: Any) -> Path:
        seen.append(config.train.time_budget)
        return fake_run(config, out, **options)

    run(1, train=noting, explicit_settings=(), budget=1200.0)
    run(2, train=noting, explicit_settings=(), budget=7200.0)
    assert seen == [60.0, 60.0]


def test_the_budget_interrupts_a_trial_that_can_be_resumed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(study_module.time, "monotonic", lambda: clock[0])

    def slow(config: Config, out: Path, **options: Any) -> Path:
        def on_record(record: dict[str, Any]) -> None:
            clock[0] += 1
            options["on_record"](record)

        return fake_run(config, out, **{**options, "on_record": on_record})

    result = run(0, train=slow, budget=6.5)
    assert [each.state for each in result.trials] == ["running"]
    assert not result.stopped
    extended = run(1, train=slow, budget=100.0)
    assert [each.state for each in extended.trials] == ["complete"]
    assert len(extended.trials[0].reports) == 4


# Resuming with something else


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"search": ["dropout"]}, "--search"),
        ({"metric": "bleu"}, "--metric"),
        ({"trial_budget": 77.0}, "--trial-budget"),
        ({"prune": False}, "--pruning"),
        ({"explicit_settings": ["train.steps", "train.validate_every"]}, "explicit settings"),
    ],
)
def test_another_request_is_rejected(run: Run, options: dict[str, Any], name: str) -> None:
    run(1)
    with pytest.raises(ConfigError, match=rf"holds a study with {name}=.*found .*another --out"):
        run(2, **options)


def test_explicit_settings_outside_of_training_may_differ(run: Run) -> None:
    """Only intervals and step counts of a trial depend on whether they are given."""
    run(1)
    result = run(2, explicit_settings=["train.steps", "data.cache_dir", "model.width"])
    assert len(result.trials) == 2


def test_a_journal_without_pruning_and_explicit_settings_is_resumed(
    run: Run, tmp_path: Path
) -> None:
    run(1)
    journal = tmp_path / "study" / "journal.jsonl"
    first, *others = journal.read_text().splitlines(keepends=True)
    header = json.loads(first)
    for name in ("--pruning", "explicit settings"):
        del header["asked"][name]
    journal.write_text("".join([json.dumps(header) + "\n", *others]))
    assert len(run(2, prune=False, explicit_settings=["train.epochs"]).trials) == 2


def test_mismatched_search_is_shown_as_typed(run: Run) -> None:
    run(1, search=["dropout", "train.optimizer=adam,adamw"])
    with pytest.raises(ConfigError) as error:
        run(2, search=["dropout"])
    assert "--search=dropout train.optimizer=adam,adamw; found dropout; " in str(error.value)


def test_another_setting_is_rejected(run: Run, config: Config) -> None:
    run(1)
    with pytest.raises(ConfigError, match=r"holds a study with train.batch_tokens=.*found 77"):
        run(2, config=config.replace(train={"batch_tokens": 77}))
    with pytest.raises(ConfigError, match=r"holds a study with --recipe='tiny'; found 'small'"):
        run(2, config=dataclasses.replace(config, recipe="small"))


@pytest.mark.parametrize("name", ["a.src", "a.tgt", "v.src", "v.tgt"])
def test_a_changed_corpus_is_rejected(run: Run, tmp_path: Path, name: str) -> None:
    run(1)
    (tmp_path / name).write_text("other\n" * 9)
    with pytest.raises(CorruptError, match=rf"{name} must not change"):
        run(2)


def test_other_files_are_not_touched(run: Run, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "thesis.tex").write_text("x")
    with pytest.raises(BundleError, match=r"found thesis.tex in it"):
        run(1)
    assert [path.name for path in (tmp_path / "study").iterdir()] == ["thesis.tex"]


def test_two_processes_do_not_share_a_study(run: Run, tmp_path: Path) -> None:
    run(1)
    lock = DirectoryLock(tmp_path / "study")
    lock.acquire()
    try:
        with pytest.raises(LockedError):
            run(2)
    finally:
        lock.release()


def test_a_trial_budget_beyond_the_budget_is_rejected(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"--trial-budget must be at most --budget; found 2 min"):
        run(1, budget=60.0, trial_budget=120.0)


def test_wrong_metrics_are_rejected(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"--metric must be one of loss, bleu; found 'bleuu'"):
        run(1, metric="bleuu")


def test_a_language_model_is_not_compared_per_token_over_vocabularies(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("words and words\n" * 9)
    config = read_config(task="language", overrides=[f"data.train={tmp_path / 'text'}"])
    with pytest.raises(ConfigError, match=r"--metric loss is per token.*bits_per_byte"):
        run(1, config=config, search=["text.vocab_size=300,400"], metric="loss")


def test_no_validation_set_is_an_error(run: Run, config: Config) -> None:
    without = config.replace(data={"valid_src": "", "valid_tgt": ""})
    with pytest.raises(ConfigError, match=r"tuning needs a validation set; found none"):
        run(1, config=without)


# Hostile journals


def _lines(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "study" / "journal.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def _damage(index: int, **fields: Any) -> Callable[[list[dict[str, Any]]], Any]:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[index] |= fields

    return change


@pytest.mark.parametrize(
    "change",
    [
        _damage(0, event="start"),
        _damage(0, format="1"),
        _damage(0, base={"model": {"width": "wide"}}),
        _damage(0, base=[]),
        _damage(0, files=[["a"]]),
        _damage(0, space=[{"name": "model.dropout", "low": 0.0, "high": 9.0}]),
        _damage(0, space=7),
        _damage(0, asked=3),
        _damage(0, seconds="long"),
        _damage(1, trial=5),
        _damage(1, values={"model.dropout": 7.0, "train.optimizer": "adam"}),
        _damage(1, values={"model.dropout": 0.1, "train.optimizer": "../../x"}),
        _damage(1, values=None),
        _damage(2, value="low"),
        _damage(2, value=None),
        _damage(2, step=[1]),
        _damage(2, trial=True),
        _damage(2, event="rm -rf"),
        _damage(6, state="won"),
        _damage(6, value=None),
        _damage(6, reason=7),
        _damage(6, trial_seconds="x"),
        _damage(0, trial_seconds=10**400),
        lambda lines: lines.pop(0),
        lambda lines: lines.pop(1),
        lambda lines: lines.insert(3, {"event": "end"}),
    ],
)
def test_hostile_journals_are_rejected_in_one_line(
    run: Run, tmp_path: Path, change: Callable[[list[dict[str, Any]]], Any]
) -> None:
    run(2)
    lines = _lines(tmp_path)
    change(lines)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "study" / "journal.jsonl").write_text(text)
    with pytest.raises(CorruptError, match=r"journal.jsonl must be the journal of a study") as bad:
        run(3)
    assert "\n" not in str(bad.value)
    assert (tmp_path / "study" / "journal.jsonl").read_text() == text


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\n", b"[]\n", b"[" * 9000 + b"\n", b"nonsense\n", b"\n", b"1e999\n"]
)
def test_lines_that_are_no_events_are_rejected(run: Run, tmp_path: Path, line: bytes) -> None:
    run(1)
    with (tmp_path / "study" / "journal.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(CorruptError, match=r"in line \d+"):
        run(2)


@pytest.mark.parametrize("journal", [b"", b'{"event": "stu', b"\xff\x00"])
def test_a_journal_without_its_first_event_is_rejected_beside_trials(
    run: Run, tmp_path: Path, journal: bytes
) -> None:
    run(1)
    path = tmp_path / "study" / "journal.jsonl"
    path.write_bytes(journal)
    with pytest.raises(CorruptError, match="found no event, beside trials of a study; restore it"):
        run(2)
    assert path.read_bytes() == journal


def test_a_later_format_names_its_version(run: Run, tmp_path: Path) -> None:
    run(1)
    lines = _lines(tmp_path)
    lines[0] |= {"format": 99, "version": "9.0"}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "study" / "journal.jsonl").write_text(text)
    with pytest.raises(BundleError, match=r"found 99, of dragoman '9.0'"):
        run(2)


def test_a_journal_that_is_a_link_is_rejected(run: Run, tmp_path: Path) -> None:
    run(1)
    journal = tmp_path / "study" / "journal.jsonl"
    journal.rename(tmp_path / "elsewhere")
    journal.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="symbolic link"):
        run(2)


def test_a_huge_journal_is_rejected(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(1)
    monkeypatch.setattr("dragoman.tune.trial_journal.MAX_JOURNAL_BYTES", 100)
    with pytest.raises(CorruptError, match=r"found [\d,]+ bytes"):
        run(2)


# What is shown


def test_lines_fit_80_columns(run: Run, tmp_path: Path) -> None:
    search = ["size", "dropout", "learning_rate", "vocab_size=1000..9000:log", "label_smoothing",
              "weight_decay", "train.optimizer=adam,adamw", "train.batch_tokens"]  # fmt: skip

    def failing(config: Config, out: Path, **options: Any) -> Path:
        if config.train.optimizer == "adam":
            raise ConfigError([f"something long must hold; found {'x' * 150}; do something else"])
        return fake_run(config, out, **options)

    captured = CapturedNotes()
    result = run(8, search=search, metric="bleu", train=failing, progress=captured)
    assert all(len(line) <= 80 for line in captured.notes)
    assert any(line.startswith("trial 0: ") for line in captured.notes)
    table = result.table()
    assert all(len(line) <= 80 for line in table)
    assert table[0].split()[:2] == ["trial", "bleu"]
    assert "in trials.csv" in table[-1]


def test_a_dry_run_shows_the_search_space_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    captured = CapturedNotes()
    run(3, dry_run=True, progress=captured, trial_budget=30.0)
    assert not (tmp_path / "study").exists()
    text = "\n".join(captured.notes)
    assert "budget: 16 min 40 s, 30 s for each trial" in text
    assert "model.dropout    0..0.4 (base 0.1)" in text
    assert "train.optimizer  adam, adamw (base adamw)" in text


def test_a_dry_run_rejects_the_directory_that_the_study_would(run: Run, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "letter.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"a study; .* is neither; found letter.txt in it"):
        run(3, dry_run=True)


def test_best_settings_are_plain_yaml(run: Run, tmp_path: Path) -> None:
    run(2)
    values = yaml.safe_load((tmp_path / "study" / "best.yaml").read_text())
    assert values["recipe"] == "tiny"
    assert "time_budget" not in values["train"]
