"""Measure training throughput of two classifiers against the same models in plain PyTorch.

    python bench/classification.py                     about three minutes on a GPU
    python bench/classification.py --only han          one member
    python bench/classification.py --size tiny --steps 4 --device cpu    a smoke test

The models are HAN (yang2016) and the Transformer encoder (vaswani2017_classifier). Ours is the
trainer of `dragoman train`, data loading included. The plain models are written with torch.nn and
compiled by torch.compile, with bfloat16 autocast and fused AdamW, on batches that are ready in
pinned memory. "shuffled" pads random batches of as many texts to their longest, as most tutorials
do; "our batches" are those of our trainer, of similar lengths. Throughput counts words without
padding. Texts are generated with the lengths of IMDB reviews.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.timing_helpers import device_name
from bench.training_throughput import (
    PlainTraining,
    Row,
    list_systems,
    throughput_parser,
    time_systems,
)
from dragoman.config import Config, read_config
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.recipes.recipe_miniature import mini
from dragoman.tasks.classification import ClassificationBatch, ClassificationTask
from dragoman.training.torch_compile import configure_backends

MEMBERS = {"han": "yang2016", "transformer": "vaswani2017_classifier"}
LENGTH_MEAN, LENGTH_DEVIATION = 5.2, 0.65  # of the logarithm of IMDB's lengths in words
WORDS_PER_SENTENCE = 18


def main() -> None:
    """Time every system, print the ratios and one line of JSON."""
    options = parse_arguments()
    device = torch.device(options.device)
    configure_backends(device, deterministic=False)
    rows: list[Row] = []
    for member in options.only:
        config = read_config(
            recipe=MEMBERS[member],
            scale=mini if options.size == "tiny" else None,
            overrides=["train.precision=float32"] if device.type == "cpu" else [],
        )
        task, store = build_task(config, options)
        print(
            f"{device_name(device)}, torch {torch.__version__}; {member}, {len(store):,} texts, "
            f"{options.steps} steps per round",
            flush=True,
        )
        systems = list_systems(task, store, plain_training(member, task), options, device)
        rows += time_systems(member, systems, device, unit="words")
    print(json.dumps({"bench": "classification", "device": device_name(device), "rows": rows}))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = throughput_parser(__doc__, MEMBERS, steps=100)
    parser.add_argument("--texts", type=int, default=0, help="generated texts; 0 for the size's")
    options = parser.parse_args()
    options.texts = options.texts or (64 if options.size == "tiny" else 8000)
    return options


def build_task(
    config: Config, options: argparse.Namespace
) -> tuple[ClassificationTask, InMemoryExamples]:
    """Return the task and its examples, of generated texts."""
    generator = np.random.default_rng(0)
    vocabulary = np.array([f"word{number}" for number in range(20_000)])
    ranks = np.arange(1, len(vocabulary) + 1)
    frequencies = (1 / ranks) / (1 / ranks).sum()
    lengths = np.exp(generator.normal(LENGTH_MEAN, LENGTH_DEVIATION, options.texts)).astype(int)
    if options.size == "tiny":
        lengths //= 8
    records = []
    for number, length in enumerate(np.clip(lengths, 4, 1000)):
        words = generator.choice(vocabulary, length, p=frequencies)
        parts = [words[at : at + WORDS_PER_SENTENCE] for at in range(0, length, WORDS_PER_SENTENCE)]
        text = ". ".join(" ".join(part).capitalize() for part in parts)
        records.append(Record(Path("texts"), number, {"text": text, "label": number % 2}))
    text = ClassificationTask.fit_text(config, lambda: iter(records))
    task = ClassificationTask(config, text)
    return task, task.encode(records)


def plain_training(member: str, task: ClassificationTask) -> PlainTraining[ClassificationBatch]:
    """Return how the plain model is built and trained."""
    kind = PlainHAN if member == "han" else PlainTransformer
    return PlainTraining(lambda: kind(task), plain_inputs, plain_loss)


def plain_inputs(batch: ClassificationBatch, device: torch.device) -> tuple[Tensor, ...]:
    """Return words, mask and labels on a device."""
    batch = batch.to(device)
    positions = torch.arange(batch.words.size(-1), device=device)
    return batch.words, positions < batch.lengths.unsqueeze(-1), batch.labels


def plain_loss(model: nn.Module, words: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(words, mask), labels)


class PlainPooling(nn.Module):
    """Attention pooling as in Yang et al. (2016)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.query = nn.Linear(width, hidden), nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Pool (B, T, D) to (B, D)."""
        scores = self.query(torch.tanh(self.hidden(x))).squeeze(-1)
        weights = scores.masked_fill(~mask, -1e4).softmax(dim=-1).to(x.dtype)
        return (weights.unsqueeze(-1) * x).sum(dim=1)


class PlainHAN(nn.Module):
    """HAN in torch.nn, with the sizes of the task's configuration."""

    def __init__(self, task: ClassificationTask) -> None:
        super().__init__()
        width, classify = task.config.model.width, task.config.classify
        score_width = classify.score_width or width
        self.embedding = nn.Embedding(len(task.text.vocabulary), width, padding_idx=0)
        self.words = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.sentences = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.word_pooling = PlainPooling(width, score_width)
        self.sentence_pooling = PlainPooling(width, score_width)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(width, len(task.text.labels))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Return logits (B, C) of documents (B, N, W)."""
        rows, count, width = words.shape
        embedded = self.dropout(self.embedding(words.view(rows * count, width)))
        hidden, _ = self.words(embedded)
        vectors = self.word_pooling(hidden, mask.view(rows * count, width)).view(rows, count, -1)
        hidden, _ = self.sentences(vectors)
        return self.output(self.dropout(self.sentence_pooling(hidden, mask.any(dim=-1))))


class PlainTransformer(nn.Module):
    """A Transformer encoder in torch.nn, with the sizes of the task's configuration."""

    def __init__(self, task: ClassificationTask) -> None:
        super().__init__()
        model = task.config.model
        self.embedding = nn.Embedding(len(task.text.vocabulary), model.width, padding_idx=0)
        self.positions = nn.Embedding(4096, model.width)
        layer = nn.TransformerEncoderLayer(
            model.width,
            model.heads,
            model.ffn_width,
            dropout=model.dropout,
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooling = PlainPooling(model.width, task.config.classify.score_width or model.width)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(model.width, len(task.text.labels))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        """Return logits (B, C) of texts (B, T)."""
        positions = self.positions(torch.arange(words.size(1), device=words.device))
        hidden = self.encoder(self.embedding(words) + positions, src_key_padding_mask=~mask)
        return self.output(self.dropout(self.pooling(hidden, mask)))


if __name__ == "__main__":
    main()
