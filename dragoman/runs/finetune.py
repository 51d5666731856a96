"""Fine-tuning: training that starts from a finished model, with its architecture, tokenizer and weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dragoman.bundle import format as layout
from dragoman.bundle.contents import read_contents
from dragoman.bundle.loading import read_weights
from dragoman.config import Config, to_dict
from dragoman.errors import ConfigError, CorruptError
from dragoman.files.atomic import sync_directory, temporary_name, write_file
from dragoman.files.disk import explaining
from dragoman.text.tokenizer import Tokenizers

EPOCHS = 10  # over the new corpus, where neither steps nor a time budget are given
RATE_A_WIDTH = 0.05  # peak learning rate times the width: a tenth of what a new model is trained with (fitting.py)
COPY = "init.safetensors"  # the starting weights in the run's directory: the model may go once the run has begun

_CHUNK = 1 << 22

# Settings of the model that change how it is trained, not what it is.
REGULARISERS = {"dropout", "attention_dropout", "feedforward_dropout", "layer_drop"}


class Origin(NamedTuple):
    """The model that a run starts from."""

    name: str  # its base name and the first digits of its weights' SHA-256
    config: Config
    tokenizers: Tokenizers
    weights: Path


def open_origin(path: str | Path) -> Origin:
    """Verify a model directory; raise BundleError or CorruptError if it is not a whole one."""
    path = Path(path)
    contents = read_contents(path)
    digest = str(contents.manifest["files"][layout.WEIGHTS]["sha256"])
    return Origin(f"{path.resolve().name}@{digest[:12]}", contents.config, contents.tokenizers, path / layout.WEIGHTS)


def finetune_config(path: str | Path) -> Config:
    """Return the settings that fine-tuning a model starts from: its own, with a short schedule at a low learning rate."""
    before = open_origin(path).config
    train: dict[str, object] = {
        "init_from": str(path),
        "schedule": "linear",
        "learning_rate": round(RATE_A_WIDTH / before.model.width, 7),
        "warmup": 100,
        "clip": 1.0,
        "label_smoothing": before.train.label_smoothing,
        "checkpoint_every": 100,
        "validate_every": 100,
    }
    blank: dict[str, object] = dict.fromkeys(
        ("src", "tgt", "pairs", "valid_src", "valid_tgt", "valid_pairs", "src_field", "tgt_field", "cache"), ""
    )
    config = Config(recipe=before.recipe, text=before.text, data=before.data, model=before.model, decode=before.decode)
    return config.replace(data=blank, text={"dropout": 0.0}, train=train)


def require_same_model(config: Config, origin: Origin) -> None:
    """Raise ConfigError if the settings ask for another architecture or tokenizer than the model has."""
    problems = []
    wanted, has = to_dict(config), to_dict(origin.config)
    for section, free in (("model", REGULARISERS), ("text", {"dropout", "sample_lines"})):
        for name, value in wanted[section].items():
            if name not in free and value != has[section][name]:
                problems.append(
                    f"{section}.{name} must be that of the model that --init-from names; found {value!r} where {origin.name} has "
                    f"{has[section][name]!r}; leave it out, or train a new model without --init-from"
                )
    if problems:
        raise ConfigError(problems)


def keep_weights(origin: Origin, training: Path) -> Path:
    """Copy the starting weights into the run's directory, durably, and return where they are."""
    copy = training / COPY
    with explaining(training):
        temporary = training / temporary_name(COPY)
        with origin.weights.open("rb") as source:
            write_file(temporary, iter(lambda: source.read(_CHUNK), b""))
        os.replace(temporary, copy)
        sync_directory(training)
    return copy


def starting_weights(path: Path, config: Config, tokenizers: Tokenizers) -> Mapping[str, Tensor]:
    """Read the weights that training starts from."""
    if not path.exists():
        raise CorruptError(
            f"{path} must hold the weights that the run started from", found="no such file", fix="restore it, or train in another --out"
        )
    return read_weights(path, config, tokenizers)
