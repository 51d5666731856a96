"""Small language models for tests: text in which later words depend on earlier ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import Config, ModelConfig, TextConfig, TrainConfig
from dragoman.config.language_model import LanguageConfig
from dragoman.data.labeled_records import Record
from dragoman.tasks.language_model import LanguageTask
from dragoman.training.trainer import Trainer

MODELS: dict[str, dict[str, Any]] = {
    "transformer_xl": {
        "model": {"decoder": ("transformer*2",), "positions": "transformer_xl"},
        "language": {"memory": 8, "eval_memory": 16, "clamp_distance": 12},
    },
    "lstm": {
        "model": {
            "decoder": ("lstm(weight_dropout=0.2, locked_dropout=true)*2",),
            "positions": "none",
        },
        "language": {"locked_dropout": True, "activation_penalty": 0.1, "temporal_penalty": 0.1},
    },
    "transformer": {"model": {"decoder": ("transformer*2",)}, "language": {}},
    "reformer": {
        "model": {"decoder": ("reformer(layers=2, rounds=2, buckets=4, window=8)",)},
        "language": {},
    },
}


def config_of(name: str, **changes: dict[str, Any]) -> Config:
    """Return the settings of a model of `MODELS`, with changes by section."""
    entry = MODELS[name]
    sections: dict[str, dict[str, Any]] = {
        "text": {"tokenizer": "words"},
        "model": {"width": 16, "heads": 2, "ffn_width": 32, "dropout": 0.1, **entry["model"]},
        "language": {"segment": 8, **entry["language"]},
        "train": {
            "steps": 12,
            "batch_tokens": 32,
            "learning_rate": 3e-3,
            "warmup_steps": 4,
            "schedule": "constant",
            "label_smoothing": 0.0,
            "precision": "float32",
            "checkpoint_every": 4,
            "validate_every": 1000,
            "seed": 7,
        },
    }
    for section, values in changes.items():
        sections[section] |= values
    config = Config(
        task="language",
        text=TextConfig(**sections["text"]),
        model=ModelConfig(**sections["model"]),
        language=LanguageConfig(**sections["language"]),
        train=TrainConfig(**sections["train"]),
    )
    assert not config.problems(), config.problems()
    return config


def lines_of(count: int, seed: int = 0) -> list[str]:
    """Return lines of words a to h; each word follows from the one before it, mostly."""
    generator = np.random.default_rng(seed)
    lines, word = [], 0
    for _ in range(count):
        words = []
        for _ in range(int(generator.integers(3, 9))):
            word = (3 * word + 1) % 8 if generator.random() < 0.9 else int(generator.integers(8))
            words.append("abcdefgh"[word])
        lines.append(" ".join(words))
    return lines


def records_of(lines: Iterable[str], name: str = "train.txt") -> list[Record]:
    """Return lines as the records of a plain-text file."""
    return [Record(Path(name), number, {"text": line}) for number, line in enumerate(lines, 1)]


def task_of(config: Config, lines: Iterable[str]) -> LanguageTask:
    records = records_of(lines)
    return LanguageTask(config, LanguageTask.fit_text(config, lambda: iter(records)))


def trainer_of(path: Path, config: Config, lines: list[str], **parts: Any) -> Trainer:
    """Return a trainer of a fresh model in a run directory."""
    task = task_of(config, lines)
    store = task.encode(records_of(lines))
    plan = task.plan(store, batch_tokens=config.train.batch_tokens, seed=config.train.seed)
    torch.manual_seed(1)
    return Trainer(
        model=task.build_model(),
        task=task,
        plan=plan,
        collate=lambda examples, seed: task.collate(store, examples, seed=seed, training=True),
        config=config.train,
        run=RunDirectory(path),
        width=config.model.width,
        **parts,
    )
