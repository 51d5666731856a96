"""Fine-tuning: training that starts from a finished model, with its architecture, tokenizer and weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dragoman.bundle import format as layout
from dragoman.bundle.bundle import read_weights
from dragoman.bundle.reader import read_bundle
from dragoman.config import Config, to_dict
from dragoman.errors import ConfigError, CorruptError
from dragoman.storage.atomic import sync_directory, temporary_name, write_file
from dragoman.storage.disk import os_errors_converted
from dragoman.text.tokenizer import Tokenizers

FINETUNE_EPOCHS = 10  # over the new corpus, where neither steps nor a time budget are given
LEARNING_RATE_TIMES_WIDTH = 0.05  # peak learning rate times the width: a tenth of what a new model is trained with (fitting.py)
INIT_WEIGHTS_FILE = "init.safetensors"  # the starting weights in the run's directory: the model may go once the run has begun

_CHUNK = 1 << 22

# Settings of the model that change how it is trained, not what it is.
REGULARIZATION_SETTINGS = {"dropout", "attention_dropout", "ffn_dropout", "layer_drop"}


class PretrainedModel(NamedTuple):
    """The model that a run starts from."""

    name: str  # its base name and the first digits of its weights' SHA-256
    config: Config
    tokenizers: Tokenizers
    weights: Path


def open_pretrained(path: str | Path) -> PretrainedModel:
    """Verify a model directory; raise BundleError or CorruptError if it is not a whole one."""
    path = Path(path)
    contents = read_bundle(path)
    digest = str(contents.manifest["files"][layout.WEIGHTS]["sha256"])
    return PretrainedModel(
        f"{path.resolve().name}@{digest[:12]}",
        contents.config,
        contents.tokenizers,
        path / layout.WEIGHTS,
    )


def finetune_config(path: str | Path) -> Config:
    """Return the settings that fine-tuning a model starts from: its own, with a short schedule at a low learning rate."""
    before = open_pretrained(path).config
    train: dict[str, object] = {
        "init_from": str(path),
        "schedule": "linear",
        "learning_rate": round(LEARNING_RATE_TIMES_WIDTH / before.model.width, 7),
        "warmup_steps": 100,
        "max_grad_norm": 1.0,
        "label_smoothing": before.train.label_smoothing,
        "checkpoint_every": 100,
        "validate_every": 100,
    }
    blank: dict[str, object] = dict.fromkeys(
        (
            "src",
            "tgt",
            "pairs",
            "valid_src",
            "valid_tgt",
            "valid_pairs",
            "src_field",
            "tgt_field",
            "cache_dir",
        ),
        "",
    )
    config = Config(
        recipe=before.recipe,
        text=before.text,
        data=before.data,
        model=before.model,
        decode=before.decode,
    )
    return config.replace(data=blank, text={"bpe_dropout": 0.0}, train=train)


def require_same_model(config: Config, origin: PretrainedModel) -> None:
    """Raise ConfigError if the settings ask for another architecture or tokenizer than the model has."""
    problems = []
    wanted, has = to_dict(config), to_dict(origin.config)
    for section, free in (
        ("model", REGULARIZATION_SETTINGS),
        ("text", {"bpe_dropout", "sample_lines"}),
    ):
        for name, value in wanted[section].items():
            if name not in free and value != has[section][name]:
                problems.append(
                    f"{section}.{name} must be that of the model that --init-from names; found {value!r} where {origin.name} has "
                    f"{has[section][name]!r}; leave it out, or train a new model without --init-from"
                )
    if problems:
        raise ConfigError(problems)


def copy_init_weights(origin: PretrainedModel, training: Path) -> Path:
    """Copy the starting weights into the run's directory, durably, and return where they are."""
    copy = training / INIT_WEIGHTS_FILE
    with os_errors_converted(training):
        temporary = training / temporary_name(INIT_WEIGHTS_FILE)
        with origin.weights.open("rb") as source:
            write_file(temporary, iter(lambda: source.read(_CHUNK), b""))
        os.replace(temporary, copy)
        sync_directory(training)
    return copy


def load_init_weights(path: Path, config: Config, tokenizers: Tokenizers) -> Mapping[str, Tensor]:
    """Read the weights that training starts from."""
    if not path.exists():
        raise CorruptError(
            f"{path} must hold the weights that the run started from",
            found="no such file",
            fix="restore it, or train in another --out",
        )
    return read_weights(path, config, tokenizers)
