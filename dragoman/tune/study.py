"""Hyperparameter search: trials of a training run within a time budget, sampled by Optuna.

A study is a directory:

    journal.jsonl      what was decided and measured, in order; a study resumes from it
    trials/0007/       the run of a trial; only the best are kept
    best.yaml          settings of the best trial, for `dragoman train --config`
    trials.csv, trials.png, trials.svg

Optuna samples the values (TPE, Bergstra et al. 2011) and decides which trials are hopeless (median
pruning, Golovin et al. 2017); it keeps nothing itself. The values of a trial are a function of the
seed, its number and the trials before it, so a study that was killed samples what it would have
sampled.
"""

from __future__ import annotations

import logging
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dragoman._version import __version__
from dragoman.config import Config, from_dict, require_config, to_dict
from dragoman.config.root_config import CORPUS_SETTINGS, TRANSLATE, file_names
from dragoman.errors import (
    BundleError,
    ConfigError,
    CorruptError,
    DivergedError,
    DragomanError,
    StoppedError,
)
from dragoman.models.factory import build_meta_model, count_parameters
from dragoman.runs.auto_config import apply_step_count
from dragoman.runs.output_directory_and_resume_checks import (
    DataFile,
    OutputDirectory,
    require_same_files,
)
from dragoman.runs.training_run import train
from dragoman.runtime import signals
from dragoman.runtime.optional_package_checks import require_packages
from dragoman.runtime.out_of_memory import is_out_of_memory, release_memory
from dragoman.storage.atomic_and_safe_file_io import replace_file
from dragoman.storage.disk_space_and_errors import os_errors_converted, require_writable
from dragoman.storage.lock import DirectoryLock
from dragoman.text.sentencepiece_trainer import VocabularyError
from dragoman.training.data_loader import derive_seed
from dragoman.training.progress_display import (
    LiveProgress,
    Progress,
    QuietProgress,
    TrainingDisplay,
    format_duration,
)
from dragoman.tune.base_and_best_config import BEST_FILE, choose_base, format_settings
from dragoman.tune.objective_metric import (
    Objective,
    choose_metric,
    choose_objective,
    count_tokens_per_character,
)
from dragoman.tune.optuna_sampler import build_optuna_study, suggest_value
from dragoman.tune.search_space import (
    SearchParameter,
    Value,
    apply_values,
    format_value,
    parse_search,
)
from dragoman.tune.study_report import (
    best_trial,
    draw_trials,
    format_metric,
    format_table,
    rank_trials,
    write_csv,
)
from dragoman.tune.trial_journal import (
    COMPLETE,
    FAILED,
    FORMAT,
    PRUNED,
    RUNNING,
    TrialJournal,
    TrialRecord,
)

if TYPE_CHECKING:
    import optuna

logger = logging.getLogger(__name__)

TRIALS_DIRECTORY = "trials"
CSV_FILE, FIGURE_FILES = "trials.csv", ("trials.png", "trials.svg")
LINE_COLUMNS = 80
TRIALS_PER_BUDGET = 20  # a trial gets this part of the budget by default ...
MIN_TRIAL_SECONDS = 60.0  # ... but at least this
VALIDATIONS_PER_TRIAL = 8
MAX_CRASHES = 3  # of one trial without a validation in between
MAX_FAILURES = 5  # of the first trials in a row


class TrialStopped(Exception):  # noqa: N818 - a decision, not an error
    """Ends the run of a trial from inside: it is hopeless, or the study's time is over."""

    def __init__(self, state: str, reason: str) -> None:
        super().__init__(state, reason)
        self.state, self.reason = state, reason


class StudyResult(NamedTuple):
    """The trials of a study so far."""

    path: Path
    space: tuple[SearchParameter, ...]
    objective: Objective
    trials: list[TrialRecord]
    stopped: bool  # whether a stop was requested; the same call resumes the study

    @property
    def best(self) -> TrialRecord | None:
        """The best complete trial."""
        return best_trial(self.trials, lower=self.objective.lower)

    def table(self) -> list[str]:
        """Return the lines of the table, best trial first."""
        label, lower = self.objective.label, self.objective.lower
        return format_table(self.trials, self.space, metric=label, lower=lower)


def tune(
    config: Config,
    out: str | Path,
    *,
    budget: float,
    trial_budget: float = 0.0,
    trials: int = 0,
    search: Sequence[str] = (),
    metric: str = "",
    keep: int = 1,
    prune: bool = True,
    override: Callable[[Config], Config] | None = None,
    explicit_settings: Collection[str] = (),
    progress: Progress | None = None,
    dry_run: bool = False,
) -> StudyResult:
    """Search settings for `budget` seconds in a directory; a study in it is resumed.

    Each trial trains for `trial_budget` seconds, by default a twentieth of the budget; not if
    "train.steps" or "train.epochs" is one of the `explicit_settings`. At most so many `trials` are
    run, if not 0. With `override`, the base configuration is chosen from the corpus, as `train`
    does. `keep` is the number of best trials whose models are kept. To resume, everything must be
    the same but `budget`, `trials` and `keep`.
    """
    require_packages("optuna")
    config = require_config(config) or Config()
    study = Study(
        config,
        Path(out),
        budget=budget,
        trial_budget=trial_budget,
        search=tuple(search),
        metric=metric,
        prune=prune,
        override=override,
        explicit_settings=frozenset(explicit_settings),
        progress=progress or QuietProgress(),
    )
    if dry_run:
        study.require_usable()
        study.choose_header()
        study.describe()
        return study.result(stopped=False)
    with study.opened():
        return study.run(most=trials, keep=max(1, keep))


class Study:
    """A study in its directory."""

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        budget: float,
        trial_budget: float,
        search: tuple[str, ...],
        metric: str,
        prune: bool,
        override: Callable[[Config], Config] | None,
        explicit_settings: frozenset[str],
        progress: Progress,
    ) -> None:
        self.request, self.path, self.progress = config, path, progress
        self.prune, self._override, self._explicit = prune, override, explicit_settings
        self._search = search
        self.objective = Objective(choose_metric(config, metric))
        self.budget, self._trial_budget = budget, trial_budget
        self.trial_seconds = self._choose_trial_seconds(trial_budget)
        OutputDirectory(path)  # raises if it cannot be a directory
        self.journal = TrialJournal(path)
        self.trials: list[TrialRecord] = []
        self.base, self.space = config, tuple[SearchParameter, ...]()
        self._began, self._spent = time.monotonic(), 0.0

    # Time

    def _choose_trial_seconds(self, given: float) -> float:
        """Return the time budget of a trial; 0 if its steps are given."""
        if given > self.budget:
            raise ConfigError(
                [
                    f"--trial-budget must be at most --budget; found {format_duration(given)} and "
                    f"{format_duration(self.budget)}; lower it"
                ]
            )
        if given or self._explicit & {"train.steps", "train.epochs"}:
            return given
        return min(self.budget, max(MIN_TRIAL_SECONDS, self.budget / TRIALS_PER_BUDGET))

    def elapsed(self) -> float:
        """Return the seconds that the study has used, over all its processes."""
        return self._spent + time.monotonic() - self._began

    def _has_time(self) -> bool:
        """Whether there is time for another trial, judged by the time that trials took."""
        left = self.budget - self.elapsed()
        ended = sorted(each.seconds for each in self.trials if each.state == COMPLETE)
        needed = self.trial_seconds or (ended[len(ended) // 2] if ended else 0.0)
        return left > 0 and (left >= needed or not self.trials)

    # Start

    def require_usable(self) -> None:
        """Raise BundleError unless the directory is new, empty or a study's."""
        files = sorted(each.name for each in self.path.iterdir()) if self.path.exists() else []
        if files and not self.journal.path.exists() and set(files) - {"lock"}:
            raise BundleError(
                f"--out must be a new or empty directory, or one with a study; {self.path} is "
                "neither",
                found=f"{', '.join(files[:3])}{' …' if len(files) > 3 else ''} in it",
                fix="choose another directory",
            )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Lock the directory and read its journal, or begin one."""
        self.require_usable()
        with os_errors_converted(self.path):
            require_writable(self.path)
            (self.path / TRIALS_DIRECTORY).mkdir(exist_ok=True)
        lock = DirectoryLock(self.path)
        lock.acquire()
        try:
            has_trials = any((self.path / TRIALS_DIRECTORY).iterdir())
            has_trials |= (self.path / CSV_FILE).exists()
            events = self.journal.read(has_trials=has_trials)
            if events:
                self._resume(events)
            else:
                header = self.choose_header()
                self.describe()
                self._append("study", **header)
            yield
        finally:
            self.journal.close()
            lock.release()

    def choose_header(self) -> dict[str, Any]:
        """Choose the base configuration and the search space; return the journal's first event."""
        self.base = choose_base(
            self.request,
            self._override,
            trial_seconds=self.trial_seconds,
            keep=self._explicit,
        )
        self.space = parse_search(self._search, self.base)
        self.objective = choose_objective(self.base, self.objective.metric, self.space)
        return {
            "format": FORMAT,
            "version": __version__,
            "asked": self._request_fields(),
            "files": [list(each) for each in self._data_files()],
            "base": to_dict(self.base),
            "space": [each.to_dict() for each in self.space],
            "trial_seconds": self.trial_seconds,
        }

    def _request_fields(self) -> dict[str, Any]:
        """Return what must be the same when a study is resumed."""
        sections = to_dict(self.request)
        flat = {
            f"{section}.{name}": value
            for section, values in sections.items()
            if isinstance(values, dict)
            for name, value in values.items()
        }
        return flat | {
            "--task": self.request.task,
            "--recipe": self.request.recipe,
            "--search": list(self._search),
            "--metric": self.objective.metric,
            "--trial-budget": self._trial_budget,
            "--pruning": self.prune,
            # Intervals and other settings of a trial are chosen unless they are given, even if
            # they are given as their defaults.
            "explicit settings": sorted(
                name for name in self._explicit if name.startswith("train.")
            ),
        }

    def _data_files(self) -> list[DataFile]:
        """Return the corpus files with their hashes."""
        return [
            DataFile.of(name, Path(path))
            for name in CORPUS_SETTINGS
            for path in file_names(getattr(self.request.data, name))
        ]

    def describe(self) -> None:
        """Show the search space, the metric and the times."""
        direction = "lowest" if self.objective.lower else "highest"
        self._note(f"metric: {direction} {self.objective.metric} of the validation set")
        if self.objective.per_character:
            self._note("the loss is compared per character: per token it depends on the vocabulary")
        each = (
            f"{format_duration(self.trial_seconds)} for each trial"
            if self.trial_seconds
            else "the configured number of steps for each trial"
        )
        self._note(f"budget: {format_duration(self.budget)}, {each}")
        width = max(len(parameter.name) for parameter in self.space)
        for parameter in self.space:
            value = parameter.nearest(self.base)
            base = f" (base {format_value(value)})" if value is not None else ""
            self._note(f"search {parameter.name:<{width}}  {parameter.describe()}{base}")

    def _resume(self, events: Sequence[dict[str, Any]]) -> None:
        """Restore the study from its journal."""
        header = events[0]
        if header.get("event") != "study" or type(header.get("format")) is not int:
            raise self.journal.corrupt(1, f"event {header.get('event')!r:.60}")
        if header["format"] > FORMAT:
            raise BundleError(
                f"the study in {self.path} must have format {FORMAT} or lower",
                found=f"{header['format']}, of dragoman {header.get('version')!r:.20}",
                fix="use that version, or choose another --out directory",
            )
        try:
            self.base = from_dict(header["base"])
            before = [DataFile(*each) for each in header["files"]]
            asked, self.trial_seconds = dict(header["asked"]), float(header["trial_seconds"])
            space = tuple(SearchParameter(**_parameter(each)) for each in header["space"])
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            AttributeError,
            ConfigError,
        ) as error:
            raise self.journal.corrupt(1, f"{type(error).__name__}: {error!s:.60}") from error
        self._require_same_request(asked)
        require_same_files(before, self._data_files())
        self.space = parse_search(self._search, self.base)
        if self.space != space:
            raise self.journal.corrupt(1, "another search space than its base configuration has")
        self.objective = choose_objective(self.base, self.objective.metric, self.space)
        self.trials = self.journal.trials(events[1:], self.space)
        self._spent = max(float(each["seconds"]) for each in events)
        ended = sum(each.state != RUNNING for each in self.trials)
        self._note(
            f"resuming the study in {self.path}: {ended} trial{'s' * (ended != 1)} so far, "
            f"{format_duration(self._spent)} used"
        )

    def _require_same_request(self, before: Mapping[str, Any]) -> None:
        """Raise ConfigError if a study was begun with other settings."""
        now = self._request_fields()
        # What the journal of an earlier version does not have is not compared.
        names = [name for name in now if name in before and before[name] != now[name]]
        if names:
            name = names[0]
            then, found = (
                " ".join(map(str, value)) or "none" if isinstance(value, list) else repr(value)
                for value in (before[name], now[name])
            )
            raise ConfigError(
                [
                    f"{self.path} holds a study with {name}={then:.200}; found {found:.200}; "
                    "repeat the same command, or choose another --out"
                ]
            )

    # Trials

    def run(self, *, most: int, keep: int) -> StudyResult:
        """Run trials until the time budget, the number of trials or a stop request ends it."""
        stopped = False
        self._clean(keep)
        try:
            while True:
                signals.raise_if_stop_requested()
                trial = self._running()
                is_over = not self._has_time() or (most and len(self.trials) >= most)
                if self.elapsed() >= self.budget or (trial is None and is_over):
                    break
                self._run_trial(trial)
                self._require_progress()
                self._clean(keep)
        except StoppedError:
            stopped = True
            if (trial := self._running()) is not None:
                self._append("stop", trial=trial.number)
        finally:
            self._write_results(figures=True)
        return self.result(stopped=stopped)

    def result(self, *, stopped: bool) -> StudyResult:
        """Return the trials so far."""
        return StudyResult(self.path, self.space, self.objective, list(self.trials), stopped)

    def _running(self) -> TrialRecord | None:
        """Return the trial that has begun and not ended."""
        last = self.trials[-1] if self.trials else None
        return last if last is not None and last.state == RUNNING else None

    def _run_trial(self, record: TrialRecord | None) -> None:
        """Sample and run a trial, or resume one; record how it ended."""
        if record is not None and record.crashes >= MAX_CRASHES:
            self._end(record, FAILED, f"its process ended {record.crashes} times", record.seconds)
            return
        sampled = self._next_trial(record)
        values = {each.name: suggest_value(sampled, each) for each in self.space}
        if record is None:
            record = TrialRecord(len(self.trials), values)
            self.trials.append(record)
        for number, value in enumerate(record.reports, 1):
            sampled.report(value, number)
        self._append("start", trial=record.number, values=record.values)
        shown = ", ".join(
            f"{each.label} {format_value(record.values[each.name])}" for each in self.space
        )
        self._note(f"trial {record.number}: {shown}")
        began = time.monotonic() - record.seconds
        try:
            state, reason = self._train(record, sampled)
        except StoppedError:
            raise
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            state, reason = FAILED, "out of memory"
        release_memory()
        if state == RUNNING:
            record.seconds = time.monotonic() - began
            self._append("stop", trial=record.number)
            self._note(f"trial {record.number}: interrupted, {reason}")
        else:
            self._end(record, state, reason, time.monotonic() - began)

    def _next_trial(self, record: TrialRecord | None) -> optuna.trial.Trial:
        """Return Optuna's trial: the running one, the base configuration first, or a sampled one.

        Because the base configuration is a trial, the best one is at least as good.
        """
        number = record.number if record is not None else len(self.trials)
        first: Mapping[str, Value] = {}
        if record is not None:
            first = record.values
        elif not number:
            base = {each.name: each.nearest(self.base) for each in self.space}
            first = {name: value for name, value in base.items() if value is not None}
        seed = derive_seed(self.base.train.seed, number, 0, "tune") % 2**32
        return build_optuna_study(
            self.trials, self.space, lower=self.objective.lower, seed=seed, first=first
        ).ask()

    def _train(self, record: TrialRecord, sampled: optuna.trial.Trial) -> tuple[str, str]:
        """Train; return how the trial ended, and why it was pruned or failed."""
        try:
            config = self._trial_config(record.values)
            if config.task == TRANSLATE:
                size = config.text.vocab_size
                model = build_meta_model(config.model, src_vocab_size=size, tgt_vocab_size=size)
                record.parameters = count_parameters(model)
            train(
                config,
                self._run_directory(record.number),
                explicit_settings=self._explicit | {each.name for each in self.space},
                progress=_TrialProgress(self.progress),
                on_record=lambda entry: self._on_record(entry, record, sampled),
                cpu_fallback=False,
            )
        except TrialStopped as stopped:
            return stopped.state, stopped.reason
        except (ConfigError, DivergedError, VocabularyError, CorruptError) as error:
            return FAILED, _first_line(error)
        if not record.reports:
            raise ConfigError(
                [
                    "tuning needs validations; found none in a whole trial; add validation data, "
                    "or lower train.validate_every"
                ]
            )
        return COMPLETE, ""

    def _on_record(
        self, entry: Mapping[str, Any], record: TrialRecord, sampled: optuna.trial.Trial
    ) -> None:
        """Record a validation; raise TrialStopped if the trial is hopeless or time is over."""
        if not self.trial_seconds and self.elapsed() > self.budget:
            raise TrialStopped(RUNNING, "the time budget is used up")
        step = entry.get("step", 0)
        if entry.get("event") != "validation" or step in record.steps:
            return  # a resumed run may repeat a validation
        value = entry.get(self.objective.metric)
        if value is None:
            raise ConfigError(
                [
                    f"--metric must be one that validations measure; found "
                    f"{self.objective.metric}; choose loss"
                ]
            )
        if not abs(value) < float("inf"):
            raise TrialStopped(FAILED, f"diverged: validation {self.objective.metric} {value}")
        if self.objective.per_character:
            value *= self._tokens_per_character(record)
        record.steps.append(step)
        record.reports.append(float(value))
        self._append("value", trial=record.number, step=step, value=float(value))
        sampled.report(float(value), len(record.reports))
        if self.prune and sampled.should_prune():
            raise TrialStopped(PRUNED, f"at step {step:,}: worse than the median")

    def _tokens_per_character(self, record: TrialRecord) -> float:
        """Return the target tokens per character of the validation set in a trial's tokenizer."""
        folder = OutputDirectory(self._run_directory(record.number)).tokenizer_dir
        return count_tokens_per_character(self.base, folder)

    def _trial_config(self, values: Mapping[str, Any]) -> Config:
        """Return the configuration of a trial; raise ConfigError if its values do not fit."""
        config = apply_values(self.base, values)
        explicit = self._explicit | values.keys()
        train: dict[str, object] = {"best_metric": self.objective.metric}
        if self.trial_seconds:
            train["time_budget"] = self.trial_seconds
        elif not config.train.epochs:
            steps = config.train.steps
            if self._override is not None:
                config = apply_step_count(config, steps, keep=explicit)
            interval = max(1, -(-steps // VALIDATIONS_PER_TRIAL))
            for name in ("validate_every", "checkpoint_every"):
                if f"train.{name}" not in explicit:
                    train[name] = min(getattr(config.train, name), interval)
        if "train.validate_sentences" not in explicit and self.objective.metric != "bleu":
            train["validate_sentences"] = 0  # translating them would take time from training
        if "train.keep_checkpoints" not in explicit:
            train["keep_checkpoints"] = max(1, config.train.average_checkpoints)
        config = config.replace(train=train)
        if problems := config.problems():
            raise ConfigError(problems)
        return config

    def _end(self, record: TrialRecord, state: str, reason: str, seconds: float) -> None:
        """Record the end of a trial, and show it."""
        before = best_trial(self.trials, lower=self.objective.lower)
        pick = min if self.objective.lower else max
        record.state, record.reason = state, reason
        record.value = pick(record.reports) if state != FAILED else None
        record.seconds = round(seconds, 3)  # as in the journal, for equal tables after a resume
        self._append(
            "end",
            trial=record.number,
            state=state,
            value=record.value,
            reason=reason,
            trial_seconds=record.seconds,
            parameters=record.parameters,
        )
        shown = [f"{self.objective.label} {format_metric(record.value)}"] * (state != FAILED)
        shown += [f"{state} ({reason})" if reason else f"in {format_duration(seconds)}"]
        if state == COMPLETE:
            best = best_trial(self.trials, lower=self.objective.lower)
            shown += ["best so far"] if best is record and before is not None else []
            if best is not None and best is not record:
                shown += [f"best {format_metric(best.value)} in trial {best.number}"]
        self._note(f"trial {record.number}: {', '.join(shown)}")
        self._write_results()

    def _require_progress(self) -> None:
        """Raise ConfigError if none of the first trials could be trained."""
        if len(self.trials) >= MAX_FAILURES and all(each.state == FAILED for each in self.trials):
            raise ConfigError(
                [
                    f"some trial must train; found {len(self.trials)} that failed, the last with: "
                    f"{self.trials[-1].reason}; correct the settings or the search, and use a new "
                    "--out"
                ]
            )

    # Files

    def _run_directory(self, number: int) -> Path:
        return self.path / TRIALS_DIRECTORY / f"{number:04d}"

    def _clean(self, keep: int) -> None:
        """Remove the runs of ended trials but the best, and the checkpoints of those."""
        ranked = rank_trials(self.trials, lower=self.objective.lower)
        kept = {each.number for each in ranked[:keep] if each.state == COMPLETE}
        for each in self.trials:
            folder = self._run_directory(each.number)
            if each.state == RUNNING or not folder.is_dir() or folder.is_symlink():
                continue
            with os_errors_converted(folder):
                if each.number not in kept:
                    shutil.rmtree(folder)
                    continue
                for checkpoint in (folder / "training").glob("**/step-*"):
                    if checkpoint.is_dir() and not checkpoint.is_symlink():
                        shutil.rmtree(checkpoint)

    def _write_results(self, *, figures: bool = False) -> None:
        """Write best.yaml, trials.csv and the figures; the study is resumable without them."""
        label, lower = self.objective.label, self.objective.lower
        with os_errors_converted(self.path):
            write_csv(self.path / CSV_FILE, self.trials, self.space, metric=label)
            best = best_trial(self.trials, lower=lower)
            if best is not None:
                found = f"{label} {format_metric(best.value)}"
                head = f"Trial {best.number} of {len(self.trials)}: {found}"
                text = format_settings(apply_values(self.base, best.values), head)
                replace_file(self.path / BEST_FILE, text.encode())
            if figures:
                paths = [self.path / name for name in FIGURE_FILES]
                draw_trials(paths, self.trials, self.space, metric=label, lower=lower)

    def _append(self, event: str, **fields: Any) -> None:
        self.journal.append({"event": event, **fields, "seconds": round(self.elapsed(), 3)})

    def _note(self, text: str) -> None:
        """Show a text in lines of at most 80 columns."""
        for line in textwrap.wrap(text, LINE_COLUMNS, subsequent_indent="  "):
            self.progress.note(line)


def _parameter(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a parameter from the journal."""
    return {**values, "choices": tuple(values.get("choices", ()))}


def _first_line(error: DragomanError) -> str:
    """Return an error in one line, for the table's reasons."""
    problems = error.problems if isinstance(error, ConfigError) else (str(error),)
    return re.sub(r"\s+", " ", problems[0])[:300]


class _TrialProgress(QuietProgress):
    """Shows the progress bar of a trial's run, where there is a live display, but no lines."""

    def __init__(self, inner: Progress) -> None:
        self._inner = inner if isinstance(inner, LiveProgress) else QuietProgress()

    @contextmanager
    def training(self, *, steps: int, done: int = 0) -> Iterator[TrainingDisplay]:
        """Show the steps; validations are not shown as lines."""
        with self._inner.training(steps=steps, done=done) as display:
            yield _StepDisplay(display)


class _StepDisplay(QuietProgress):
    """Passes steps on to a display, and no validations."""

    def __init__(self, inner: TrainingDisplay) -> None:
        self._inner = inner

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the log record of a step."""
        self._inner.update(record)

    def set_max_steps(self, steps: int) -> None:
        """Change the number of planned steps."""
        self._inner.set_max_steps(steps)
