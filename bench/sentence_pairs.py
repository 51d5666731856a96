"""Measure training throughput of two models of sentence pairs against the same in plain PyTorch.

    python bench/sentence_pairs.py                     both members, on a GPU if there is one
    python bench/sentence_pairs.py --only esim         one member
    python bench/sentence_pairs.py --size tiny --steps 4 --device cpu    a smoke test, not compiled

The models are ESIM, with co-attention (chen2017), and InferSent (conneau2017). Ours is the trainer
of `dragoman train`, data loading included. The plain models are written with torch.nn, with the
weights of ours, and compiled by torch.compile, with fused AdamW, on batches that are ready in
pinned memory. Both compute in bfloat16 on a GPU; `--precision float32` is that of the recipes.
"shuffled" pads random batches of as many pairs to their longest, as most tutorials do; "our
batches" are those of our trainer, of similar lengths. Throughput counts words without padding.
Sentences are generated with the lengths of those of SICK.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.plain_layers import (
    PackedLSTM,
    copy_bilstm,
    copy_embedding,
    copy_linear,
    copy_residual_norm,
)
from bench.timing_helpers import device_name
from bench.training_throughput import (
    PlainTraining,
    Row,
    allow_recompiles,
    list_systems,
    throughput_parser,
    time_systems,
)
from dragoman.config import read_config
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.models.sentence_pair_classifier import (
    ComparedAlignment,
    MLPHead,
    PairModel,
    PairOutput,
)
from dragoman.recipes.recipe_miniature import mini
from dragoman.tasks.sentence_pair_classification import PairBatch, PairsTask, score_divergence
from dragoman.training.torch_compile import configure_backends

MEMBERS = {"esim": "chen2017", "infersent": "conneau2017"}
# The training pairs of SICK: the logarithm of their lengths in words, and its correlation between
# the sentences of a pair.
LENGTH_MEAN, LENGTH_DEVIATION, LENGTH_CORRELATION = 2.2, 0.37, 0.66
SHORTEST, LONGEST = 3, 32
PAIRS, TYPES = 4500, 2291
LABELS = ("entailment", "neutral", "contradiction")


def main() -> None:
    """Time every system, print the ratios and one line of JSON."""
    options = parse_arguments()
    device = torch.device(options.device)
    configure_backends(device, deterministic=False)
    allow_recompiles()
    rows: list[Row] = []
    for member in options.only:
        task, store = build_task(MEMBERS[member], options)
        print(
            f"{device_name(device)}, torch {torch.__version__}; {member}, {len(store):,} pairs, "
            f"{options.steps} steps per round",
            flush=True,
        )
        systems = list_systems(task, store, plain_training(member, task), options, device)
        rows += time_systems(member, systems, device, unit="words")
    print(
        json.dumps(
            {
                "bench": "sentence_pairs",
                "device": device_name(device),
                "precision": options.precision,
                "rows": rows,
            }
        )
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = throughput_parser(__doc__, MEMBERS, steps=100)
    parser.add_argument("--pairs", type=int, default=0, help="generated pairs; 0 for the size's")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default=None)
    options = parser.parse_args()
    is_tiny = options.size == "tiny"
    options.pairs = options.pairs or (64 if is_tiny else PAIRS)
    options.no_compile = options.no_compile or is_tiny
    if options.precision is None:
        options.precision = "float32" if options.device == "cpu" else "bfloat16"
    return options


def build_task(recipe: str, options: argparse.Namespace) -> tuple[PairsTask, InMemoryExamples]:
    """Return the task and its examples, of generated sentences."""
    config = read_config(
        recipe=recipe,
        scale=mini if options.size == "tiny" else None,
        overrides=[f"train.precision={options.precision}"],
    )
    records = generate_pairs(options.pairs)
    task = PairsTask(config, PairsTask.fit_text(config, lambda: iter(records)))
    return task, task.encode(records)


def generate_pairs(count: int) -> list[Record]:
    """Return pairs as long as those of SICK, with words by Zipf's law, labels and scores."""
    generator = np.random.default_rng(0)
    vocabulary = np.array([f"word{number}" for number in range(TYPES)])
    frequencies = 1 / np.arange(1, TYPES + 1)
    frequencies /= frequencies.sum()
    common, own = generator.normal(size=(count, 1)), generator.normal(size=(count, 2))
    normal = LENGTH_CORRELATION**0.5 * common + (1 - LENGTH_CORRELATION) ** 0.5 * own
    lengths = np.exp(LENGTH_MEAN + LENGTH_DEVIATION * normal).round().astype(int)
    records = []
    for number, pair in enumerate(lengths.clip(SHORTEST, LONGEST)):
        first, second = (
            " ".join(generator.choice(vocabulary, length, p=frequencies)) for length in pair
        )
        fields = {
            "a": first,
            "b": second,
            "label": LABELS[number % len(LABELS)],
            "relatedness": int(generator.integers(10, 51)) / 10,
        }
        records.append(Record(Path("generated"), number + 1, fields))
    return records


def plain_training(member: str, task: PairsTask) -> PlainTraining[PairBatch]:
    """Return how the plain model is built and trained."""
    kind = PlainESIM if member == "esim" else PlainInferSent

    def loss(model: nn.Module, *inputs: Tensor) -> Tensor:
        *sentences, labels, scores = inputs
        output: PairOutput = model(*sentences)
        assert output.labels is not None, "the plain model has labels"
        assert output.score is not None, "the plain model has scores"
        divergence = score_divergence(output.score, scores, task.min_score).mean()
        weight = task.config.pairs.score_weight
        return F.cross_entropy(output.labels, labels) + weight * divergence

    return PlainTraining(lambda: kind(task.build_model()), plain_inputs, loss)


def plain_inputs(batch: PairBatch, device: torch.device) -> tuple[Tensor, ...]:
    """Return the inputs of a plain model on a device, host lengths for packing, and targets."""
    host_lengths = batch.lengths.T.flatten()
    batch = batch.to(device)
    sentences = batch.token_ids, batch.flags, batch.lengths
    return *sentences, host_lengths, batch.labels, batch.scores


class PlainPairModel(nn.Module):
    """BiLSTM over packed sequences and classifiers of two vectors, with the weights of ours."""

    def __init__(self, ours: PairModel) -> None:
        super().__init__()
        self.embedding = copy_embedding(ours.embedding)
        self.flags = copy_embedding(ours.flag_embedding)
        encoder: Any = next(block for _, block in ours.encoder.blocks())
        self.encoder = PackedLSTM(copy_bilstm([encoder.rnn]))
        self.encoder_norm = copy_residual_norm(encoder.residual)
        self.encoder_residual = hasattr(encoder.residual, "norm")
        label, score = ours.label_classifier, ours.score_classifier
        assert label is not None, "the plain model has labels"
        assert score is not None, "the plain model has scores"
        self.label, self.score = plain_classifier(label), plain_classifier(score)
        self.dropout = nn.Dropout(ours.stack_input.dropout)

    def forward(
        self, tokens: Tensor, flags: Tensor, lengths: Tensor, host_lengths: Tensor | None = None
    ) -> PairOutput:
        """Classify pairs (B, 2, T); both sentences run through the encoder as one batch.

        The lengths on the host (2 B,), the first sentences' before the second's, spare a
        synchronization.
        """
        tokens, flags, lengths = (
            part.transpose(0, 1).flatten(0, 1) for part in (tokens, flags, lengths)
        )
        if host_lengths is None:
            host_lengths = lengths.cpu()
        mask = torch.arange(tokens.size(1), device=tokens.device) < lengths.unsqueeze(1)
        embedded = self.dropout(self.embedding(tokens) + self.flags(flags))
        states = self.encoder(embedded, host_lengths)
        states = self.dropout(states)
        if self.encoder_residual:
            states = self.encoder_norm(embedded + states)
        vectors = self.pool(states, mask, host_lengths)
        first, second = vectors.chunk(2)
        symmetric = torch.cat([(first - second).abs(), first * second], dim=-1)
        directed = torch.cat([first, second, symmetric], dim=-1)
        return PairOutput(self.label(directed), self.score(symmetric))

    def pool(self, states: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return the vectors (2 B, P) of states (2 B, T, D), the first sentences first."""
        raise NotImplementedError


class PlainInferSent(PlainPairModel):
    """InferSent: the maximum of each sentence's states."""

    def pool(self, states: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return the maxima (2 B, D)."""
        return max_over_words(states, mask)


class PlainESIM(PlainPairModel):
    """ESIM: co-attention, comparison, a second BiLSTM, mean and maximum."""

    def __init__(self, ours: PairModel) -> None:
        super().__init__(ours)
        interaction = ours.interaction
        assert isinstance(interaction, ComparedAlignment), "the plain model has co-attention"
        assert interaction.composition is not None, "the plain model has a composition"
        composition: Any = next(block for _, block in interaction.composition.blocks())
        self.composition = PackedLSTM(copy_bilstm([composition.rnn]))
        compare: Any = interaction.compare
        self.compare = copy_linear(compare.linears[0])

    def pool(self, states: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return mean and maximum (2 B, 2 D) of the compared words."""
        (a, b), (a_mask, b_mask) = states.chunk(2), mask.chunk(2)
        scores = a @ b.mT
        lowest = torch.finfo(scores.dtype).min
        to_b = scores.masked_fill(~b_mask.unsqueeze(1), lowest).softmax(dim=-1)
        to_a = scores.mT.masked_fill(~a_mask.unsqueeze(1), lowest).softmax(dim=-1)
        found = torch.cat([to_b @ b, to_a @ a])
        joined = torch.cat([states, found, states - found, states * found], dim=-1)
        compared = torch.relu(self.compare(self.dropout(joined)))
        composed = self.composition(compared, lengths)
        composed = self.dropout(composed)
        real = mask.unsqueeze(2)
        mean = (composed * real).sum(dim=1) / real.sum(dim=1)
        return torch.cat([mean, max_over_words(composed, mask)], dim=-1)


def max_over_words(states: Tensor, mask: Tensor) -> Tensor:
    """Return the maxima (B, D) of states (B, T, D) where the mask (B, T) is true."""
    return states.masked_fill(~mask.unsqueeze(2), torch.finfo(states.dtype).min).amax(dim=1)


def plain_classifier(ours: MLPHead) -> nn.Sequential:
    """Return a classifier with the weights of ours."""
    dropout = nn.Dropout(ours.dropout)
    return nn.Sequential(
        dropout, copy_linear(ours.hidden), nn.Tanh(), dropout, copy_linear(ours.output)
    )


if __name__ == "__main__":
    main()
