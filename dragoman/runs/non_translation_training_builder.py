"""Data preparation and run building of the tasks other than translation."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.bundle import Card, CardScore, write_task_bundle
from dragoman.bundle.format import model_command
from dragoman.bundle.non_translation_bundle_loader import (
    build_loaded_task_model,
    load_task_text,
    task_text_files,
)
from dragoman.config import Config
from dragoman.config.root_config import file_names
from dragoman.data.batch_plan import Cursor, Plan
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record, RecordFiles, open_records
from dragoman.errors import ConfigError, DataError
from dragoman.registry import catalogue
from dragoman.runs.auto_config import MIN_TRAIN_STEPS
from dragoman.runs.base_training_builder import DataSummary, RunBuilder
from dragoman.runs.output_directory_and_resume_checks import DataFile, require_same_files
from dragoman.runs.time_budget import TimeBudget
from dragoman.runs.validation_split import is_held_out
from dragoman.runtime import signals
from dragoman.runtime.random_generators import isolated_rng
from dragoman.storage.atomic_and_safe_file_io import replace_file
from dragoman.storage.disk_space_and_errors import os_errors_converted
from dragoman.storage.manifest import canonical_json
from dragoman.tasks.non_translation_task import (
    NUM_GOLDEN_INPUTS,
    ReadRecords,
    TrainingTask,
    load_task,
)
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.data_loader import CollateFunction
from dragoman.training.progress_display import Progress, QuietProgress
from dragoman.training.trainer import ValidateFunction

TEXT_PART = "text"  # DataFile.part of the vocabularies and label sets
MAX_EXAMPLE_FEATURES = 8  # of an element of a set in the example command
MAX_HELD_OUT = 1000  # examples held out for validation
# Recipes plan epochs, of which a small data set would make a handful of steps.
MIN_STEPS_PER_EPOCH, MIN_BATCH_EXAMPLES = 40, 4
MIN_SCORED_EXAMPLES = 500  # an accuracy on fewer has a standard error of 2 points
PROBE_VALIDATION_EXAMPLES = (128, 512)
SLOW_PROBE_SECONDS = 2.0  # after which a validation is extrapolated from the first examples
PROBE_STEP_TOKENS = 256  # enough to keep a CPU core busy
MAX_BATCHING_GAIN = 2.0  # a CPU's throughput with a whole batch, over that with so many tokens


class PreparedTask(NamedTuple):
    """The task of a run with its encoded examples."""

    task: TrainingTask
    train: InMemoryExamples
    valid: InMemoryExamples | None
    golden: list[Any]  # inputs of the golden vectors
    files: list[DataFile]  # the files read, with their hashes
    written: list[Path]  # new folders of a cache: none

    @property
    def digest(self) -> str:
        """Hash of the data, compared on resume."""
        parts = [self.train.digest, self.valid.digest if self.valid is not None else ""]
        return hashlib.sha256(canonical_json(parts)).hexdigest()


def prepare_task(
    config: Config,
    text_folder: Path,
    progress: Progress,
    *,
    initial_files: Sequence[DataFile] | None = None,
) -> PreparedTask:
    """Read the files, learn vocabularies and label sets, and encode all examples.

    A resumed run passes the files that it started with: none of them may have changed.
    """
    kind = load_task(config.task)
    names = {part: file_names(getattr(config.data, part)) for part in ("train", "valid")}
    generated = kind.is_generated(config)
    if not names["train"] and not generated:
        raise ConfigError(
            ["data.train must name files; found none; pass --train FILE, or --resume"]
        )
    if names["valid"] and generated:
        raise ConfigError(
            [
                "data.valid needs data.train, because generated examples are also validated on "
                f"generated ones; found only data.valid={', '.join(names['valid'])}; leave it out"
            ]
        )
    files = [DataFile.of(part, Path(name)) for part in ("train", "valid") for name in names[part]]
    if initial_files:
        parts = ("train", "valid")
        require_same_files([each for each in initial_files if each.part in parts], files)
    reader = open_records(config, names["train"])
    train, valid = _split_records(config, names, reader)
    with progress.phase("reading the vocabulary"):
        task = _open_task(config, kind, text_folder, train, resumed=initial_files is not None)
    text = [
        DataFile.of(TEXT_PART, path) for path in sorted(text_folder.iterdir()) if path.is_file()
    ]
    if initial_files:
        require_same_files([each for each in initial_files if each.part == TEXT_PART], text)
    signals.raise_if_stop_requested()
    with progress.phase("encoding the training examples"):
        train_store = task.generate("train") if generated else task.encode(train())
    if not len(train_store):
        raise _no_examples(names["train"], train_store)
    train_store.skipped |= reader.skipped
    if train_store.skipped:
        progress.note(f"training {task.unit}: skipped {_describe_skipped(train_store)}")
    signals.raise_if_stop_requested()
    valid_store = None
    if generated:
        valid_store = task.generate("valid")
    elif valid is not None:
        with progress.phase("encoding the validation examples"):
            valid_store = task.encode(valid())
        if isinstance(valid, RecordFiles) and valid.skipped:
            valid_store.skipped |= valid.skipped
            progress.note(f"validation {task.unit}: skipped {_describe_skipped(valid_store)}")
        if not len(valid_store):
            if names["valid"]:
                raise _no_examples(names["valid"], valid_store)
            valid_store, valid = None, None  # none of those held out can be scored
    golden = task.golden_inputs(itertools.islice((valid or train)(), 50 * NUM_GOLDEN_INPUTS))
    return PreparedTask(task, train_store, valid_store, golden, [*files, *text], [])


def _open_task(
    config: Config, kind: type[TrainingTask], folder: Path, train: ReadRecords, *, resumed: bool
) -> TrainingTask:
    """Return the task with the vocabularies of the run, learning them at its start."""
    if resumed and (folder / "text.json").exists():
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        return kind(config, load_task_text(kind, config, files))
    task = kind(config, kind.fit_text(config, train))
    with os_errors_converted(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in task_text_files(task).items():  # text.json comes last
            replace_file(folder / name, data)
    return task


def _split_records(
    config: Config, names: Mapping[str, Sequence[str]], train: ReadRecords
) -> tuple[ReadRecords, ReadRecords | None]:
    """Return readers of training and validation records; without a file, some are held out."""
    if names["valid"]:
        return train, open_records(config, names["valid"])
    every = config.data.hold_out
    if not every or not names["train"]:
        return train, None
    total = sum(1 for _ in itertools.islice(train(), 2 * every))
    if total < 2 * every:  # too few to hold any out
        return train, None

    within, seed = every * MAX_HELD_OUT, config.train.seed

    def select(*, held_out: bool) -> Iterator[Record]:
        for number, record in enumerate(train(), 1):
            if is_held_out(number, every=every, within=within, seed=seed) == held_out:
                yield record
            elif held_out and number > within:
                return

    return partial(select, held_out=False), partial(select, held_out=True)


def _no_examples(names: Sequence[str], store: InMemoryExamples) -> DataError:
    """Return the error of files without an example, with the counts of skipped records."""
    return DataError(
        f"{', '.join(names)} must hold examples",
        found=_describe_skipped(store) or "none",
        fix="check the file",
    )


def _describe_skipped(store: InMemoryExamples) -> str:
    """Return how many examples were left out, and why."""
    return ", ".join(f"{count:,} {reason}" for reason, count in store.skipped.items() if count)


def fit_to_few_examples(
    config: Config, prepared: PreparedTask, *, keep: Collection[str], progress: Progress
) -> Config:
    """Return a recipe's settings for its data: few examples are trained on in smaller batches.

    Few validation examples do not choose a checkpoint, which would be chance. Settings in `keep`
    are not changed, nor those that differ from the recipe's.
    """
    train = config.train
    if not config.recipe or not train.epochs:
        return config
    recipe = catalogue("recipe").load(config.recipe)().train
    if train.batch_tokens == recipe.batch_tokens and "train.batch_tokens" not in keep:
        config = _fit_batch_tokens(config, prepared, progress)
    scored = prepared.task.num_scored(prepared.valid) if prepared.valid is not None else 0
    chosen = {"train.best_metric", "train.final_checkpoint", "train.patience"} & set(keep)
    if (
        0 < scored < MIN_SCORED_EXAMPLES
        and not chosen
        and (train.best_metric, train.final_checkpoint) == (recipe.best_metric, "best")
        and train.best_metric != "loss"
    ):
        progress.note(
            f"final model: the last checkpoint, because {scored} validation {prepared.task.unit} "
            "are too few to choose one"
        )
        config = config.replace(train={"final_checkpoint": "last"})
    return config


def _fit_batch_tokens(config: Config, prepared: PreparedTask, progress: Progress) -> Config:
    """Return the settings with batches that are small enough for MIN_STEPS_PER_EPOCH."""
    train = config.train
    examples, batch_tokens = len(prepared.train), train.batch_tokens

    def steps(batch_tokens: int) -> int:
        plan = prepared.task.plan(prepared.train, batch_tokens=batch_tokens, seed=train.seed)
        return plan.batches(0) // train.gradient_accumulation

    while (
        steps(batch_tokens) < MIN_STEPS_PER_EPOCH
        and examples >= 2 * MIN_BATCH_EXAMPLES * steps(batch_tokens)
        and batch_tokens >= 32
    ):
        batch_tokens //= 2
    if batch_tokens == train.batch_tokens:
        return config
    progress.note(
        f"batch size: {batch_tokens:,} tokens, {steps(batch_tokens)} steps per epoch, "
        f"because {examples:,} {prepared.task.unit} are few"
    )
    return config.replace(train={"batch_tokens": batch_tokens})


class TaskBuilder(RunBuilder):
    """Builds the parts of the training run of a task other than translation."""

    prepared: PreparedTask

    def __init__(
        self, config: Config, prepared: PreparedTask, *, device: torch.device, progress: Progress
    ) -> None:
        super().__init__(config, device=device, progress=progress)
        self.prepared = prepared

    @property
    def task(self) -> TrainingTask:
        """The task, with its vocabularies."""
        return self.prepared.task

    @cached_property
    def plan(self) -> Plan:
        """Assignment of examples to batches."""
        train = self.config.train
        return self.task.plan(self.prepared.train, batch_tokens=train.batch_tokens, seed=train.seed)

    def build_model(self) -> nn.Module:
        """Build the model, with random weights from the seed."""
        torch.manual_seed(self.config.train.seed)
        return self.task.build_model().to(self.device)

    def collate_function(self) -> CollateFunction:
        """Return the function that makes a training batch of examples."""
        task, store = self.task, self.prepared.train
        shapes = getattr(self.plan, "shapes", ())

        def collate(examples: NDArray[np.int64], /, *, seed: int) -> TensorBatch:
            return task.collate(store, examples, shapes=shapes, seed=seed, training=True)

        return collate

    def tokens_per_step(self) -> float:
        """Return the mean tokens per step, of a few batches."""
        count = min(8, self.plan.batches(0))
        task, store = self.task, self.prepared.train
        batches = [self.plan.batch(Cursor(0, index)) for index in range(count)]
        tokens = sum(task.collate(store, examples).tokens for examples in batches)
        return tokens * self.config.train.gradient_accumulation / count

    def max_useful_steps(self) -> int:
        """Return the steps of the recipe, or of its epochs; fewer for a small text."""
        train, most = self.config.train, self.task.max_epochs
        if train.epochs:
            return self.steps_of(train.epochs)
        return min(train.steps, max(MIN_TRAIN_STEPS, self.steps_of(most))) if most else train.steps

    def data_summary(self) -> DataSummary:
        """Return the numbers of examples, and the sizes of vocabularies and label sets."""
        prepared = self.prepared
        valid = len(prepared.valid) if prepared.valid is not None else 0
        return DataSummary(len(prepared.train), valid, self.task.unit, self.task.describe())

    @cached_property
    def validator(self) -> ValidateFunction | None:
        """The task's metrics on the validation examples."""
        store = self.prepared.valid
        return None if store is None else lambda model: self._evaluate(model, store)

    def _evaluate(
        self, model: nn.Module, store: InMemoryExamples, *, quiet: bool = False
    ) -> dict[str, float]:
        return self.task.evaluate(
            model,
            store,
            device=self.device,
            precision=choose_precision(self.config.train.precision, self.device),
            progress=QuietProgress() if quiet else self.progress,
        )

    def min_step_seconds(self, model: nn.Module) -> float:
        """Return seconds that a training step on a CPU takes at least, from a part of its batch.

        A step of a large language model takes minutes on a CPU, which a short time budget does not
        have. On a GPU it is 0: a step is quickly measured there.
        """
        if self.device.type != "cpu":
            return 0.0
        batch = self.plan.batch(Cursor(0, 0))
        collate = self.collate_function()
        each = collate(batch[:1], seed=0).tokens
        part = collate(batch[: max(1, PROBE_STEP_TOKENS // max(each, 1))], seed=0)
        with isolated_rng(0):
            seconds = min(self._time_gradients(model, part) for _ in range(2))
        self.task.load_carried_state({})
        return seconds * max(1.0, len(batch) / len(part.examples) / MAX_BATCHING_GAIN)

    def _time_gradients(self, model: nn.Module, batch: TensorBatch) -> float:
        """Return the seconds of the gradients of a batch, which are discarded."""
        began = time.monotonic()
        precision = choose_precision(self.config.train.precision, self.device)
        with precision.autocast(self.device):
            loss = self.task.loss(model, batch)
        torch.autograd.backward(loss.total)
        seconds = time.monotonic() - began
        model.zero_grad()
        return seconds

    def validation_seconds(self, model: nn.Module) -> float:
        """Return the estimated seconds of one validation, measured on some examples."""
        store = self.prepared.valid
        if store is None:
            return 0.0
        fewest, most = (min(len(store), count) for count in PROBE_VALIDATION_EXAMPLES)
        first = store.select(range(fewest))
        model.eval()
        try:
            with isolated_rng(0), torch.no_grad():
                few = self._time_evaluation(model, first)  # with warm-up
                if few > SLOW_PROBE_SECONDS:
                    return few * len(store) / fewest
                few = self._time_evaluation(model, first)
                more = max(
                    few, self._time_evaluation(model, store.select(range(most)), warm_up=True)
                )
        finally:
            model.train()
        # A part of the time does not depend on the number of examples.
        each = (more - few) / max(1, most - fewest)
        return more + each * (len(store) - most)

    def _time_evaluation(
        self, model: nn.Module, store: InMemoryExamples, *, warm_up: bool = False
    ) -> float:
        """Return the seconds of an evaluation; with `warm_up`, of its second run."""
        if warm_up:
            self._evaluate(model, store, quiet=True)
        began = time.monotonic()
        self._evaluate(model, store, quiet=True)
        return time.monotonic() - began

    def finish(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the final weights, with those that are tuned on validation data."""
        store = self.prepared.valid
        if store is None or not self.task.tunes_weights:
            return weights
        model = build_loaded_task_model(self.task, _float32(weights)).to(self.device)
        with torch.no_grad():
            decided = self.task.finish(
                model,
                store,
                device=self.device,
                precision=choose_precision(self.config.train.precision, self.device),
                progress=self.progress,
            )
        return {**weights, **decided}

    def score(self, weights: Mapping[str, Tensor], time_budget: TimeBudget) -> list[CardScore]:
        """Return the task's metrics on the validation examples."""
        store = self.prepared.valid
        if store is None:
            return []
        model = build_loaded_task_model(self.task, _float32(weights)).to(self.device)
        with torch.no_grad():
            found = self.task.scores(self._evaluate(model, store))
        on = f"validation set, {len(store):,} {self.task.unit}"
        self.progress.note(f"{on}: {', '.join(f'{each.name} {each.value:.4g}' for each in found)}")
        return [CardScore(each.name, each.value, each.signature, on) for each in found]

    def data_rows(self) -> dict[str, str]:
        """Return the rows of the model card about the examples."""
        prepared, data, unit = self.prepared, self.config.data, self.task.unit
        named = {
            part: ", ".join(Path(name).name for name in file_names(getattr(data, part)))
            for part in ("train", "valid")
        }
        rows = {f"training {unit}": f"{len(prepared.train):,} ({named['train'] or 'generated'})"}
        if prepared.train.skipped:
            rows[f"skipped {unit}"] = _describe_skipped(prepared.train)
        if prepared.valid is not None:
            rows[f"validation {unit}"] = (
                f"{len(prepared.valid):,} ({named['valid'] or 'held out of the training data'})"
            )
        if details := self.task.describe():
            rows["text"] = details
        return rows

    def write(
        self, path: Path, weights: Mapping[str, Tensor], card: Card, fields: Mapping[str, Any]
    ) -> str:
        """Write the bundle."""
        task = type(self.task)(self.config, self.task.text)  # with the resolved settings
        write_task_bundle(
            path,
            task=task,
            weights=weights,
            card=card,
            golden=self.prepared.golden,
            manifest_fields=fields,
        )
        command = model_command(self.config.task, self.config.language.objective)
        return f"dragoman {command} -m {{model}} {self._example_argument(command)}"

    def _example_argument(self, command: str) -> str:
        """Return an input of the model as it is typed in a shell."""
        if self.config.task == "pairs":
            return r"$'A man sleeps.\tHe is awake.'"
        if self.config.task == "sets":
            features = self.task.text.features
            if features > MAX_EXAMPLE_FEATURES:  # such as images, which nobody types
                return "-i FILE.jsonl"
            element: Any = 1 if features == 1 else [1] * features
            return f"'{json.dumps([element, element])}'"
        if self.config.task == "tag" and self.config.tag.input_field:
            return "-i FILE.conll"
        if self.config.task == "language" and command == "predict":
            return '"… <mask> …"'
        return '--prompt "…"' if command == "generate" else '"…"'


def _float32(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().float().cpu() for name, tensor in weights.items()}
