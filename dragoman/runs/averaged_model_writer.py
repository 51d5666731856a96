"""Checkpoint averaging: a new model from the newest checkpoints of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.bundle import Bundle, Card, TaskBundle, write_bundle, write_task_bundle
from dragoman.bundle.card import format_command
from dragoman.bundle.non_translation_bundle_loader import load_task_text, task_weights
from dragoman.bundle.translation_bundle_loader import expected_weights, read_identifier
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.checkpoint.weight_average import average_weights
from dragoman.config import Config
from dragoman.config.root_config import TRANSLATE
from dragoman.errors import BundleError
from dragoman.runs.non_translation_training_builder import TaskBuilder, prepare_task
from dragoman.runs.output_directory_and_resume_checks import OutputDirectory
from dragoman.tasks.non_translation_task import TrainingTask, load_task
from dragoman.text.sentencepiece_tokenizer import load_tokenizers
from dragoman.training.progress_display import QuietProgress


class AveragedModel(NamedTuple):
    """The directory of an averaged model and the steps averaged, newest first."""

    out: Path
    steps: list[int]


def average_checkpoints(model: str | Path, out: str | Path, *, last: int) -> AveragedModel:
    """Average the newest checkpoints of a run and write the result as a new model.

    Weights that training tunes on validation data, such as thresholds, are tuned for the average;
    only then are the files of the run read again.
    """
    output_dir, target = OutputDirectory(model), OutputDirectory(out)
    output_dir.require_run()
    target.require_no_run()
    newest = list(itertools.islice(RunDirectory(output_dir.training).verified_checkpoints(), last))
    if len(newest) < last:
        raise BundleError(
            f"{last} valid checkpoints are needed for the average",
            found=f"{len(newest)} in {output_dir.training}",
            fix=f"use --last {len(newest)}, or keep more with train.keep_checkpoints"
            if newest
            else "train until the first checkpoint",
        )
    steps = [checkpoint.step for checkpoint in newest]
    # The weights, not their EMA: an average of averages reaches too far back.
    weights = average_weights(checkpoint.load_weights() for checkpoint in newest)
    chosen = f"average of steps {', '.join(map(str, steps))}"
    card = Card(
        command=format_command(
            ["average", str(output_dir.path), "--last", str(last), "--out", str(target.path)]
        ),
        training={"weights": chosen},
    )
    config = output_dir.config()
    fields = {"steps": steps[0], "weights_from": chosen}
    if config.task != TRANSLATE:
        task = _open_task(config, output_dir.tokenizer_dir)
        for checkpoint in newest:
            checkpoint.check_shapes_match({"weights": task_weights(task)})
        golden = TaskBundle.load(model).golden_inputs() if output_dir.has_model else []
        write_task_bundle(
            target.path,
            task=task,
            weights=_tune_weights(task, weights, output_dir) if task.tunes_weights else weights,
            card=card,
            golden=golden,
            manifest_fields=fields,
        )
        return AveragedModel(target.path, steps)
    tokenizers = load_tokenizers(output_dir.tokenizer_dir)
    expected = expected_weights(config, tokenizers)
    for checkpoint in newest:
        checkpoint.check_shapes_match({"weights": expected})
    write_bundle(
        target.path,
        config=config,
        tokenizers=tokenizers,
        weights=weights,
        card=card,
        golden=Bundle.load(model).golden_inputs() if output_dir.has_model else [],
        identifier=read_identifier(output_dir.tokenizer_dir, os.listdir(output_dir.tokenizer_dir)),
        manifest_fields=fields,
    )
    return AveragedModel(target.path, steps)


def _tune_weights(
    task: TrainingTask, weights: Mapping[str, Tensor], output_dir: OutputDirectory
) -> Mapping[str, Tensor]:
    """Return the weights with those that are tuned on the validation data of the run."""
    config, progress = task.config, QuietProgress()
    prepared = prepare_task(
        config, output_dir.tokenizer_dir, progress, initial_files=output_dir.data_files()
    )
    device = torch.device("cpu")
    return TaskBuilder(config, prepared, device=device, progress=progress).finish(weights)


def _open_task(config: Config, folder: Path) -> TrainingTask:
    """Return the task of a run, with the vocabularies in its folder."""
    kind = load_task(config.task)
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    return kind(config, load_task_text(kind, config, files))
