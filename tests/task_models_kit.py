"""Untrained miniatures of the recipes of all tasks but translation, with inputs to explain."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import classify_kit
import numpy as np
import tagging_kit
import torch

from dragoman.config import Config, read_config
from dragoman.data.labeled_records import Record
from dragoman.inference.predictors.base import Predictor
from dragoman.inference.predictors.catalogue import PREDICTORS
from dragoman.recipes.recipe_miniature import mini
from dragoman.tasks.non_translation_catalogue import TASKS

TEXT = "The goal was new. Some bank of the team was old today and it was very new."
LINES = ["The goal was new.", "Some bank of the old team was here today.", "It was."] * 8


class Subject(NamedTuple):
    """A predictor and an input."""

    predictor: Predictor[Any, Any, Any]
    example: Any


def subject_of(recipe: str, **changes: dict[str, Any]) -> Subject:
    """Build the miniature of a recipe with random weights."""
    return build_subject(read_config(recipe=recipe, scale=mini), changes)


def build_subject(config: Config, changes: dict[str, dict[str, Any]] | None = None) -> Subject:
    """Build a predictor with random weights."""
    config = config.replace(**(changes or {}))
    if config.text.tokenizer in ("bpe", "unigram"):
        config = config.replace(text={"vocab_size": 320})
    records, example = records_of(config)

    def read() -> Iterator[Record]:
        return iter(records)

    kind = TASKS.load(config.task)
    task = kind(config, kind.fit_text(config, read))
    torch.manual_seed(3)
    model = task.build_model().eval()
    for parameter in model.parameters():  # so that nothing starts at zero
        with torch.no_grad():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.requires_grad_(False)  # as the weights of a loaded model
    return Subject(PREDICTORS.load(config.task)(model, task), example)


@functools.cache
def _image() -> list[list[float]]:
    return np.random.default_rng(1).random((3, 28 * 28)).round(2).tolist()


def records_of(config: Config) -> tuple[list[Record], Any]:
    """Return records to learn the vocabulary from, and an input."""
    if config.task == "classify":
        several = config.classify.multi_label == "on"
        return classify_kit.make_records(30, seed=1, several=several), TEXT
    if config.task == "tag":
        return tagging_kit.make_records(20), ["Anna", "Meier", "walks", "in", "Bonn", "Nord", "."]
    if config.task == "language":
        lines = [
            Record(Path("lines.txt"), number, {"text": line}) for number, line in enumerate(LINES)
        ]
        return lines, "The goal was very new.\nSome bank of it."
    if config.task == "pairs":
        fields = [
            {"first": "a man sleeps", "second": "he is awake", "label": "no", "score": 1.5},
            {"first": "a dog runs", "second": "it moves", "label": "yes", "score": 4.0},
        ]
        rows = [Record(Path("pairs.jsonl"), at, each) for at, each in enumerate(fields * 4, 1)]
        return rows, ("A man sleeps here.", "He is a man.")
    if config.sets.problem == "unique":
        return [], _image()
    if config.sets.problem == "clustering":
        return [], [[0.5, 1.0], [2.0, -1.5], [0.25, 3.0], [1.0, 1.0], [-2.0, 0.5]]
    fields = [{"set": [1, 5, 2.5], "target": 5}, {"set": [7, 3], "target": 7}]
    rows = [Record(Path("sets.jsonl"), at, each) for at, each in enumerate(fields * 4, 1)]
    return rows, [12.5, 71.0, 3.25, 98.5, 55.5]
