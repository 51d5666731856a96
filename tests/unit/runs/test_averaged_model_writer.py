"""Checkpoint averaging of models of other tasks than translation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dragoman.config import Config
from dragoman.errors import CorruptError
from dragoman.runs.averaged_model_writer import average_checkpoints
from dragoman.runs.training_run import train
from tests.classify_kit import make_fields


def train_classifier(folder: Path, *, several: bool, **classify: Any) -> Path:
    """Train a small classifier whose final model is the average of its two checkpoints."""
    files = {}
    for seed, part in enumerate(("train", "valid")):
        fields = make_fields(60, seed=seed, several=several)
        files[part] = folder / f"{part}.jsonl"
        files[part].write_text("".join(f"{json.dumps(each)}\n" for each in fields))
    config = Config(task="classify").replace(
        text={"tokenizer": "words"},
        data={name: str(path) for name, path in files.items()},
        model={"width": 8, "heads": 2, "encoder": ("bigru",)},
        train={
            "steps": 8, "warmup_steps": 1, "checkpoint_every": 4, "validate_every": 4,
            "keep_checkpoints": 2, "average_checkpoints": 2, "ema_decay": 0.0,
            "device": "cpu", "threads": 1,
        },
        classify=classify,
    )  # fmt: skip
    return train(config, folder / "model")


def test_an_averaged_classifier_has_the_thresholds_that_training_tunes(tmp_path: Path) -> None:
    model = train_classifier(tmp_path, several=True, tune_threshold="labels")
    averaged = average_checkpoints(model, tmp_path / "averaged", last=2)
    assert averaged.steps == [8, 4]
    trained, found = (load_file(path / "weights.safetensors") for path in (model, averaged.out))
    assert not torch.equal(trained["thresholds"], torch.full((2,), 0.5)), "they were tuned"
    torch.testing.assert_close(found, trained)


def test_thresholds_are_tuned_on_the_files_of_the_run(tmp_path: Path) -> None:
    model = train_classifier(tmp_path, several=True, tune_threshold="global")
    (tmp_path / "valid.jsonl").write_text('{"text": "a goal", "label": ["sport"]}\n')
    with pytest.raises(CorruptError, match=r"valid\.jsonl must not change after the start"):
        average_checkpoints(model, tmp_path / "averaged", last=2)
    assert not (tmp_path / "averaged").exists()


def test_a_model_without_tuned_weights_is_averaged_without_its_data(tmp_path: Path) -> None:
    model = train_classifier(tmp_path, several=False, tune_threshold="global")
    (tmp_path / "train.jsonl").unlink()
    averaged = average_checkpoints(model, tmp_path / "averaged", last=2)
    trained, found = (load_file(path / "weights.safetensors") for path in (model, averaged.out))
    torch.testing.assert_close(found, trained)
