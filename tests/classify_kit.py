"""Generated texts whose keywords decide their labels, and a short training for classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman.config import Config
from dragoman.data.batch_plan import BatchPlan, Cursor
from dragoman.data.labeled_records import Record
from dragoman.evaluate.classification_metrics import score_classes
from dragoman.models.classifier import ClassifierModel
from dragoman.tasks.classification import ClassificationTask

KEYWORDS = {"sport": ("goal", "match", "team"), "money": ("bank", "stock", "price")}
FILLERS = ("the", "a", "of", "and", "was", "it", "that", "very", "some", "today", "new", "old")


def make_fields(count: int, *, seed: int, several: bool = False) -> list[dict[str, Any]]:
    """Return texts of one or several sentences; each label has its keywords in them."""
    generator = np.random.default_rng(seed)
    names = list(KEYWORDS)
    found = []
    for _ in range(count):
        labels = [name for name in names if generator.random() < 0.5] if several else []
        if not several:
            labels = [names[int(generator.integers(2))]]
        words = list(generator.choice(FILLERS, int(generator.integers(5, 20))))
        for label in labels:
            keyword = str(generator.choice(KEYWORDS[label]))
            words.insert(int(generator.integers(len(words) + 1)), keyword)
        for _ in range(int(generator.integers(3))):
            words.insert(int(generator.integers(1, len(words))), ". It")
        fine = [keyword for keyword in words if any(keyword in each for each in KEYWORDS.values())]
        found.append(
            {
                "text": " ".join(words) + ".",
                "label": labels if several else labels[0],
                "coarse": labels if several else labels[0],
                "fine": fine[0] if fine else "none",
                "attributes": fine[:1],
            }
        )
    return found


def make_records(count: int, *, seed: int, several: bool = False) -> list[Record]:
    """Return generated texts as the records of a file."""
    return [
        Record(Path("texts.jsonl"), number, fields)
        for number, fields in enumerate(make_fields(count, seed=seed, several=several), 1)
    ]


def fit_task(config: Config, records: list[Record]) -> ClassificationTask:
    """Return the task with the vocabularies of some records."""
    return ClassificationTask(config, ClassificationTask.fit_text(config, lambda: iter(records)))


def train_steps(
    task: ClassificationTask, records: list[Record], *, steps: int, seed: int = 0
) -> ClassifierModel:
    """Train a new model for some steps."""
    torch.manual_seed(seed)
    model = task.build_model()
    store = task.encode(records)
    train = task.config.train
    plan = task.plan(store, batch_tokens=train.batch_tokens, seed=seed)
    assert isinstance(plan, BatchPlan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.learning_rate)
    cursor = Cursor(0, 0)
    for _ in range(steps):
        batch = task.collate(store, plan.batch(cursor), shapes=plan.shapes, training=True)
        loss = task.loss(model, batch)
        (loss.total / loss.count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = cursor.batch + 1 == plan.batches(cursor.epoch)
        cursor = Cursor(cursor.epoch + 1, 0) if last else Cursor(cursor.epoch, cursor.batch + 1)
    return model.eval()


@torch.no_grad()
def micro_f1(task: ClassificationTask, model: ClassifierModel, records: list[Record]) -> float:
    """Return micro F1 of the predictions for some records."""
    store = task.encode(records)
    logits = task.forward(model, task.collate(store, np.arange(len(store)))).logits.numpy()
    probabilities = task.probabilities(logits)
    predicted = task.decide(probabilities, model.thresholds.numpy())
    return score_classes(predicted, task.expected(store), probabilities).micro_f1
