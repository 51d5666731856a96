"""Small tagging tasks on generated sentences, shared by tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from dragoman.config import Config, ModelConfig, TrainConfig
from dragoman.config.root_config import TextConfig
from dragoman.config.tagging import TagConfig
from dragoman.data.labeled_records import Record
from dragoman.tasks.tagging import TaggingTask
from dragoman.training.bf16_mixed_precision import Precision
from dragoman.training.progress_display import QuietProgress

CPU = torch.device("cpu")
NAMES = ("Anna", "Bert", "Carla", "Dora", "Emil", "Fritz")
PLACES = ("Aachen", "Bonn", "Celle", "Dessau")
SECOND = {"PER": ("Meier", "Schulz"), "LOC": ("Nord", "West")}  # of an entity of two tokens


def make_sentence(draw: random.Random) -> dict[str, list[str]]:
    """Draw a sentence of names, places and other words, with entities of one or two tokens."""
    tokens: list[str] = []
    tags: list[str] = []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["PER", "LOC", "", ""])
        length = draw.randint(1, 2)
        if kind:
            tokens += ["in"] * (kind == "LOC")
            tags += ["O"] * (kind == "LOC")
            tokens.append(draw.choice(NAMES if kind == "PER" else PLACES))
            tokens += [draw.choice(SECOND[kind])] * (length - 1)
            tags += [f"{'I' if at else 'B'}-{kind}" for at in range(length)]
        else:
            tokens += [draw.choice(["walks", "sees", "1999", "the", "."]) for _ in range(length)]
            tags += ["O"] * length
    pos = ["X" if token[0].isupper() else "Y" for token in tokens]
    return {"tokens": tokens, "tags": tags, "pos": pos}


def make_records(count: int, seed: int = 0) -> list[Record]:
    """Return records of generated sentences."""
    draw = random.Random(seed)
    return [Record(Path("data.jsonl"), at + 1, make_sentence(draw)) for at in range(count)]


def make_config(
    *, encoder: str = "bilstm(residual_connection=false)", width: int = 16, **tag: Any
) -> Config:
    """Return the settings of a tiny tagger."""
    defaults = {"word_width": 8, "character_width": 4, "character_features": 6}
    return Config(
        task="tag",
        text=TextConfig(tokenizer="words", lowercase=True, vocab_size=1000),
        model=ModelConfig(
            encoder=(encoder,),
            width=width,
            heads=2,
            ffn_width=2 * width,
            positions="none" if "lstm" in encoder else "sinusoidal",
            dropout=0.0,
        ),
        train=TrainConfig(label_smoothing=0.0),
        tag=TagConfig(**(defaults | {"max_characters": 8} | tag)),
    )


def make_task(records: list[Record] | None = None, **settings: Any) -> TaggingTask:
    """Return a task whose text was learned from records."""
    config = make_config(**settings)
    assert config.problems() == []
    found = make_records(40) if records is None else records
    return TaggingTask(config, TaggingTask.fit_text(config, lambda: iter(found)))


def train_task(
    task: TaggingTask, records: list[Record], *, steps: int, lr: float = 0.02
) -> torch.nn.Module:
    """Train a model for some steps on all records."""
    torch.manual_seed(1)
    model = task.build_model()
    store = task.encode(records)
    plan = task.plan(store, batch_tokens=400, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    batches = [task.collate(store, examples) for examples in plan.epoch(0)]
    for step in range(steps):
        loss = task.loss(model, batches[step % len(batches)])
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def evaluate(task: TaggingTask, model: torch.nn.Module, records: list[Record]) -> dict[str, float]:
    """Return the metrics of a model on records."""
    return task.evaluate(
        model.eval(),
        task.encode(records),
        device=CPU,
        precision=Precision(torch.float32, "test"),
        progress=QuietProgress(),
    )
