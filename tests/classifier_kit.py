"""Small classifiers trained on reviews of three classes, written as bundles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman.bundle import write_task_bundle
from dragoman.config import Config
from dragoman.data.labeled_records import Record
from dragoman.tasks.classification import ClassificationTask

GOOD, BAD = ("wonderful", "great", "moving"), ("boring", "dull", "awful")
FILLER = ("the", "film", "is", "a", "story", "of", "two", "men", "and", "it", "was")


def draw_review(rng: random.Random) -> tuple[str, str]:
    """Return a review of one to three sentences; one has a word that decides, or none has."""
    label = rng.choice(["negative", "neutral", "positive"])
    sentences = [rng.choices(FILLER, k=rng.randint(3, 7)) for _ in range(rng.randint(1, 3))]
    chosen = rng.choice(sentences)
    if label != "neutral":
        chosen[rng.randrange(len(chosen))] = rng.choice(GOOD if label == "positive" else BAD)
    return " ".join(" ".join(words).capitalize() + "." for words in sentences), label


def reviews(count: int, *, seed: int = 0, multi_label: bool = False) -> list[Record]:
    """Return labelled records; with several labels also "short" for those of few words."""
    rng = random.Random(seed)
    found = []
    for number in range(1, count + 1):
        text, label = draw_review(rng)
        labels: Any = label
        if multi_label:
            labels = [label, "short"] if len(text.split()) < 9 else [label]
        found.append(Record(Path("reviews.jsonl"), number, {"text": text, "label": labels}))
    return found


def train_classifier(
    *,
    seed: int = 0,
    steps: int = 100,
    multi_label: bool = False,
    text_tokenizer: str = "words",
    **classify: Any,
) -> tuple[ClassificationTask, torch.nn.Module]:
    """Train a small model for a second or two."""
    config = Config(task="classify").replace(
        text={"tokenizer": text_tokenizer, "lowercase": True, "vocab_size": 200},
        model={"width": 32, "heads": 2, "encoder": ("bigru",), "dropout": 0.0},
        classify={"dropout": 0.0, **classify},
    )
    assert config.problems() == []
    records = reviews(400, seed=seed, multi_label=multi_label)

    def read() -> Iterator[Record]:
        return iter(records)

    task = ClassificationTask(config, ClassificationTask.fit_text(config, read))
    store = task.encode(records)
    torch.manual_seed(seed)
    model = task.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rng = np.random.default_rng(seed)
    model.train()
    for _ in range(steps):
        batch = task.collate(store, rng.choice(len(store), 64, replace=False))
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        (loss.total / loss.count).backward()
        optimizer.step()
    return task, model.eval()


def write_classifier(path: Path, **options: Any) -> Path:
    """Train a classifier and write its bundle."""
    task, model = train_classifier(**options)
    write_task_bundle(
        path,
        task=task,
        weights=model.state_dict(),
        golden=task.golden_inputs(reviews(3, seed=9)),
    )
    return path
