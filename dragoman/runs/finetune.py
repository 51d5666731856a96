"""Fine-tuning: training from a finished model's architecture, tokenizer and weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.bundle import format as layout
from dragoman.bundle.reader import read_bundle, require_task
from dragoman.bundle.translation_bundle_loader import read_weights
from dragoman.config import Config, to_dict
from dragoman.config.root_config import TRANSLATE, DataConfig, file_names
from dragoman.errors import ConfigError, CorruptError
from dragoman.storage.atomic_and_safe_file_io import sync_directory, temporary_name, write_file
from dragoman.storage.disk_space_and_errors import os_errors_converted
from dragoman.storage.tensor_files import read_header
from dragoman.text.imported_tokenizer import ImportedTokenizer
from dragoman.text.sentencepiece_tokenizer import Tokenizers, load_tokenizers
from dragoman.text.tokenizer_extension import original_tokenizers, segment_added_tokens

FINETUNE_EPOCHS = 10  # without train.steps and a time budget
LEARNING_RATE_TIMES_WIDTH = 0.05  # a tenth of that for a new model (auto_config.py)
INIT_WEIGHTS_FILE = "init.safetensors"  # copy of the initial weights in the run directory

_CHUNK = 1 << 22

# Settings of the model that fine-tuning may change.
REGULARIZATION_SETTINGS = {"dropout", "attention_dropout", "ffn_dropout", "layer_drop"}


class PretrainedModel(NamedTuple):
    """The pretrained model of a fine-tuning run."""

    name: str  # directory name and the first digits of its weights' SHA-256
    config: Config
    tokenizers: Tokenizers
    weights: Path


def open_pretrained(path: str | Path) -> PretrainedModel:
    """Open and verify a model directory."""
    path = Path(path)
    contents = read_bundle(path)
    require_task(contents, TRANSLATE)
    digest = str(contents.manifest["files"][layout.WEIGHTS]["sha256"])
    return PretrainedModel(
        f"{path.resolve().name}@{digest[:12]}",
        contents.config,
        load_tokenizers(path / layout.TEXT, contents.text_files),
        path / layout.WEIGHTS,
    )


def finetune_config(path: str | Path) -> Config:
    """Return a model's settings with a short schedule and a low learning rate."""
    pretrained = open_pretrained(path).config
    train: dict[str, object] = {
        "init_from": str(path),
        "schedule": "linear",
        "learning_rate": round(LEARNING_RATE_TIMES_WIDTH / pretrained.model.width, 7),
        "warmup_steps": 100,
        "max_grad_norm": 1.0,
        "label_smoothing": pretrained.train.label_smoothing,
        "checkpoint_every": 100,
        "validate_every": 100,
    }
    unset: dict[str, object] = dict.fromkeys(
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
        recipe=pretrained.recipe,
        text=pretrained.text,
        data=pretrained.data,
        model=pretrained.model,
        decode=pretrained.decode,
    )
    unset |= {"languages": (), "valid_languages": (), "direction_temperature": 1.0}
    return config.replace(data=unset, text={"bpe_dropout": 0.0}, train=train)


def name_file_languages(base: Config, named: DataConfig) -> Config:
    """Return a multilingual model's settings for files in `data.src_lang` and `data.tgt_lang`.

    They stay as they are if the model has one direction, or if the files' languages are not named
    so.
    """
    if not base.data.directions or named.directions or not (named.src_lang and named.tgt_lang):
        return base
    direction = f"{named.src_lang}-{named.tgt_lang}"
    files, valid_files = (
        max(len(file_names(getattr(named, prefix + name))) for name in ("src", "pairs"))
        for prefix in ("", "valid_")
    )
    return base.replace(
        data={
            "directions": (direction,),
            "languages": (direction,) * files,
            "valid_languages": (direction,) * valid_files,
        }
    )


def require_same_model(config: Config, origin: PretrainedModel) -> None:
    """Raise ConfigError if architecture or tokenizer settings differ from the model's.

    Raise it also where its vocabulary is to be extended and cannot be.
    """
    problems = []
    if config.train.extend_vocabulary and isinstance(origin.tokenizers.src, ImportedTokenizer):
        problems.append(
            "train.extend_vocabulary needs a tokenizer trained by Dragoman; found an imported one "
            f"in {origin.name}; leave it out"
        )
    requested, pretrained = to_dict(config), to_dict(origin.config)
    for section, free in (
        ("model", REGULARIZATION_SETTINGS),
        ("text", {"bpe_dropout", "sample_lines"}),
    ):
        for name, value in requested[section].items():
            if name not in free and value != pretrained[section][name]:
                problems.append(
                    f"{section}.{name} must be that of --init-from; found {value!r} where "
                    f"{origin.name} has {pretrained[section][name]!r}; "
                    "leave it out, or train a new model without --init-from"
                )
    if problems:
        raise ConfigError(problems)


def record_extension(config: Config, original: Tokenizers, extended: Tokenizers) -> Config:
    """Return the configuration with the number of tokens that were added, and the new size."""
    added = max(len(new) - len(old) for new, old in zip(extended, original, strict=True))
    return config.replace(
        train={"extend_vocabulary": added}, text={"vocab_size": max(map(len, extended))}
    )


def copy_init_weights(origin: PretrainedModel, training: Path) -> Path:
    """Copy the initial weights into the run directory, durably, and return their path."""
    copy = training / INIT_WEIGHTS_FILE
    with os_errors_converted(training):
        temporary = training / temporary_name(INIT_WEIGHTS_FILE)
        with origin.weights.open("rb") as source:
            write_file(temporary, iter(lambda: source.read(_CHUNK), b""))
        os.replace(temporary, copy)
        sync_directory(training)
    return copy


def load_init_weights(path: Path, config: Config, tokenizers: Tokenizers) -> Mapping[str, Tensor]:
    """Read the initial weights of a fine-tuning run.

    Tokens that were added to the vocabulary have rows of their own, see `extend_weights`.
    """
    if not path.exists():
        raise CorruptError(
            f"{path} must hold the run's initial weights",
            found="no such file",
            fix="restore it, or train in another --out",
        )
    if not config.train.extend_vocabulary:
        return read_weights(path, config, tokenizers)
    header = read_header(path)
    shared = header.get("embeddings.shared.weight")
    tables = [header.get(f"embeddings.{side}.weight", shared) for side in ("src", "tgt")]
    sizes = [table.shape[0] for table in tables if table is not None and table.shape]
    if len(sizes) < 2:
        return read_weights(path, config, tokenizers)  # raises: there is no embedding
    original = original_tokenizers(tokenizers, *sizes)
    return extend_weights(read_weights(path, config, original), tokenizers, original)


def extend_weights(
    weights: Mapping[str, Tensor], extended: Tokenizers, original: Tokenizers
) -> dict[str, Tensor]:
    """Return weights with rows for added tokens: the means of the rows of their former subwords.

    Rows of embeddings, of the output projection and of its bias.
    """
    parts = {
        side: segment_added_tokens(new, old)
        for side, new, old in zip(("src", "tgt"), extended, original, strict=True)
    }
    sides = {
        "embeddings.src.weight": "src",
        "embeddings.tgt.weight": "tgt",
        "embeddings.shared.weight": "tgt",
        "output.weight": "tgt",
        "output.bias": "tgt",
    }
    result = dict(weights)
    for name, side in sides.items():
        if name in weights and parts[side]:
            rows = [weights[name][ids].mean(dim=0) for ids in parts[side]]
            result[name] = torch.cat([weights[name], torch.stack(rows)])
    return result
