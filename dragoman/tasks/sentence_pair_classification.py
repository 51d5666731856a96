"""The sentence-pair task: a label such as entailment, and a score such as relatedness."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.config import Config
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import PairFieldFinder, Record
from dragoman.errors import BundleError, ConfigError, DataError, suggest_name
from dragoman.models.sentence_pair_classifier import (
    EXACT_MATCH,
    SECOND_SENTENCE,
    STEM_MATCH,
    PairModel,
    PairOutput,
    build_pair_model,
)
from dragoman.ops import IGNORE_INDEX
from dragoman.tasks.non_translation_task import (
    NUM_GOLDEN_INPUTS,
    ReadRecords,
    TaskScore,
    TrainingTask,
    evaluation_batches,
    padded_length,
)
from dragoman.text.english_stemmer import stem
from dragoman.text.special_tokens import EOS, PAD
from dragoman.text.vocabulary_and_labels import (
    Labels,
    Vocabulary,
    build_vocabulary,
    normalize_text,
    split_words,
)
from dragoman.training.task_protocol import Loss

if TYPE_CHECKING:  # loading a model imports no trainer
    from dragoman.training.bf16_mixed_precision import Precision
    from dragoman.training.progress_display import Progress

WORDS_FILE, LABELS_FILE, FEATURES_FILE = "words.json", "labels.json", "features.json"


class PairsText(NamedTuple):
    """Vocabulary and labels of the training records."""

    words: Vocabulary
    labels: Labels | None  # None if no record has a label
    has_scores: bool


class EncodedPair(NamedTuple):
    """A pair as token ids and flags."""

    tokens: tuple[list[int], list[int]]
    flags: tuple[list[int], list[int]]
    is_empty: bool = False  # whether a sentence has no words


@dataclass(frozen=True, kw_only=True)
class PairBatch(TensorBatch):
    """A batch of padded pairs: S is 2, or 1 where a pair is one sequence."""

    token_ids: Tensor  # (B, S, T)
    flags: Tensor  # (B, S, T)
    lengths: Tensor  # (B, S)
    labels: Tensor  # (B,), IGNORE_INDEX where there is none
    scores: Tensor  # (B,), NaN where there is none
    is_copy: Tensor  # (B,), True for swapped copies of pairs
    counts: NDArray[np.int64]  # (B, S), the lengths on the host

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return int(self.counts.sum())

    @property
    def padded_tokens(self) -> int:
        """The number of tokens, padding included."""
        return self.token_ids.numel()

    @property
    def limit_tokens(self) -> int:
        """Padded tokens of one sentence of each pair."""
        return self.token_ids.size(0) * self.token_ids.size(2)


class PairsTask(TrainingTask):
    """Classification and scoring of sentence pairs."""

    name = "pairs"
    metrics = {  # noqa: RUF012 - as the base declares it
        "accuracy": True,
        "pearson": True,
        "spearman": True,
        "mse": False,
    }
    unit = "pairs"
    text: PairsText

    def __init__(self, config: Config, text: PairsText) -> None:
        super().__init__(config, text)
        self.is_sequence = config.pairs.interaction == "sequence"
        self.min_score, self.max_score = config.pairs.min_score, config.pairs.max_score

    # Text and examples

    @classmethod
    def fit_text(cls, config: Config, records: ReadRecords) -> PairsText:
        """Return the words and labels of the training records."""
        if config.text.tokenizer != "words":
            raise ConfigError(
                [f"sentence pairs need text.tokenizer=words; found {config.text.tokenizer}; set it"]
            )
        fields = PairFieldFinder(config.pairs)
        labels, scores, texts = set[str](), 0, list[list[str]]()
        record = None
        for record in records():
            found = fields(record)
            texts += (_split(config, record.text(field)) for field in (found.first, found.second))
            if found.label is not None:
                labels.add(record.label(found.label))
            scores += found.score is not None
        if record is None:
            raise DataError(
                "training needs at least one sentence pair",
                found="none in data.train",
                fix='write one {"a": ..., "b": ..., "label": ...} per line',
            )
        for setting, is_found in (("label_field", labels), ("score_field", scores)):
            if (named := getattr(config.pairs, setting)) and not is_found:
                raise record.error(
                    f"must have the field {named!r} of pairs.{setting}, as no pair before it has",
                    ", ".join(map(str, record.fields)),
                    suggest_name(named, map(str, record.fields)),
                )
        if len(labels) == 1 or (not labels and not scores):
            raise DataError(
                "training needs pairs with at least two labels, or with scores",
                found=f"only the label {labels.pop()!r}" if labels else "neither",
                fix="name the fields by pairs.label_field and pairs.score_field",
            )
        words = build_vocabulary(texts, config.text)
        return PairsText(words, Labels.build(labels) if labels else None, scores > 0)

    @classmethod
    def load_text(cls, config: Config, files: Mapping[str, bytes]) -> PairsText:
        """Return what `text_files` wrote."""
        labels = (
            Labels.from_bytes(files[LABELS_FILE], LABELS_FILE) if LABELS_FILE in files else None
        )
        has_scores = _read_features(files[FEATURES_FILE])
        return PairsText(Vocabulary.from_bytes(files[WORDS_FILE], WORDS_FILE), labels, has_scores)

    def text_files(self) -> dict[str, bytes]:
        """Return vocabulary and labels."""
        content = {"format": 1, "scores": self.text.has_scores}
        files = {
            WORDS_FILE: self.text.words.to_bytes(),
            FEATURES_FILE: (json.dumps(content) + "\n").encode(),
        }
        return files | ({LABELS_FILE: self.text.labels.to_bytes()} if self.text.labels else {})

    def encode(self, records: Iterable[Record]) -> InMemoryExamples:
        """Return the pairs as token ids and flags, with labels and scores."""
        fields = PairFieldFinder(self.config.pairs)
        pairs, labels, scores = list[EncodedPair](), list[int](), list[float]()
        for record in records:
            found = fields(record)
            pairs.append(self.encode_pair(record.text(found.first), record.text(found.second)))
            labels.append(self._encode_label(record, found.label))
            scores.append(self._encode_score(record, found.score))
        return _build_store(pairs, labels, scores)

    def words(self, text: str) -> list[str]:
        """Return the words of a sentence, at most `data.max_length`; never none."""
        return _split(self.config, text)[: self.config.data.max_length] or ["</s>"]

    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return the token ids of two sentences, and which words match the other sentence."""
        sides = self.words(first), self.words(second)
        tokens = tuple(self.text.words.ids(words) for words in sides)
        if self.config.pairs.match_features:
            flags = _match_flags(*sides), _match_flags(*reversed(sides))
        else:
            flags = [0] * len(sides[0]), [0] * len(sides[1])
        is_empty = not all(_split(self.config, text) for text in (first, second))
        return EncodedPair((tokens[0], tokens[1]), flags, is_empty)

    def _encode_label(self, record: Record, field: str | None) -> int:
        if field is None or self.text.labels is None:
            return IGNORE_INDEX
        label = record.label(field)
        if label not in self.text.labels:
            raise record.error(
                f"must have a label of the training records in {field!r}",
                label,
                f"use one of {', '.join(self.text.labels.names[:8])}",
            )
        return self.text.labels.index(label)

    def _encode_score(self, record: Record, field: str | None) -> float:
        if field is None or not self.text.has_scores:
            return math.nan
        score = record.score(field)
        if self.min_score <= score <= self.max_score:
            return score
        raise record.error(
            f"must have a number from {self.min_score} to {self.max_score} in {field!r}",
            repr(record.value(field)),
            "correct it, or set pairs.min_score and pairs.max_score",
        )

    # Training

    def build_model(self) -> PairModel:
        """Build the model, with weights from torch's random number generator."""
        return build_pair_model(
            self.config.model,
            self.config.pairs,
            vocab_size=len(self.text.words),
            labels=len(self.text.labels) if self.text.labels else 0,
            score_bins=self.max_score - self.min_score + 1 if self.text.has_scores else 0,
        )

    def lengths(self, store: InMemoryExamples) -> NDArray[np.int64]:
        """Return the length of the longer sentence, or of both as one sequence."""
        first, second = store.lengths("first"), store.lengths("second")
        return first + second + 1 if self.is_sequence else np.maximum(first, second)

    def collate(
        self,
        store: InMemoryExamples,
        examples: NDArray[np.int64],
        *,
        shapes: Sequence[BatchShape] = (),
        seed: int = 0,
        training: bool = False,
    ) -> PairBatch:
        """Return a padded batch; in training with `pairs.swap`, followed by swapped copies."""
        examples = np.asarray(examples, np.int64)
        orders = [("first", "second")]
        if training and self.config.pairs.swap:
            orders.append(("second", "first"))
        counts = np.concatenate(
            [
                np.stack([store.lengths(side)[examples] for side in order], axis=1)
                for order in orders
            ]
        )
        if self.is_sequence:
            longest = int(counts.sum(axis=1).max(initial=0)) + 1  # </s> in between
        else:
            longest = int(counts.max(initial=1))
        width = padded_length(shapes, longest)
        parts = []
        for names in ("", "_flags"):
            rows = [
                np.stack([store.padded(side + names, examples, width) for side in order], axis=1)
                for order in orders
            ]
            parts.append(np.concatenate(rows))
        tokens, flags = parts  # (B, 2, T)
        if self.is_sequence:
            tokens, flags, counts = _join(tokens, flags, counts)
        copies = len(orders) - 1
        labels = store.values["label"][examples]
        scores = store.values["score"][examples]
        return PairBatch(
            token_ids=torch.from_numpy(tokens),
            flags=torch.from_numpy(flags),
            lengths=torch.from_numpy(counts),
            # Entailment has a direction: a swapped pair has no label.
            labels=torch.from_numpy(
                np.concatenate([labels, *[np.full_like(labels, IGNORE_INDEX)] * copies])
            ),
            scores=torch.from_numpy(np.tile(scores, copies + 1)),
            is_copy=torch.arange(len(examples) * (copies + 1)) >= len(examples),
            counts=counts,
            examples=np.tile(examples, copies + 1),
        )

    def loss(self, model: nn.Module, batch: PairBatch) -> Loss:
        """Return cross-entropy of the labels plus the weighted loss of the scores, as sums."""
        output: PairOutput = model(batch.token_ids, batch.flags, batch.lengths)
        losses = self._losses(output, batch)
        count = (~batch.is_copy).sum()
        weight = self.config.pairs.score_weight / (2.0 if self.config.pairs.swap else 1.0)
        if losses.label is None:
            assert losses.score is not None, "a model has labels or scores"
            return Loss(losses.score * weight, losses.score.detach(), count)
        total = losses.label if losses.score is None else losses.label + weight * losses.score
        return Loss(total, losses.label.detach(), count)

    def _losses(self, output: PairOutput, batch: PairBatch) -> PairLosses:
        """Return the sums of both losses over a batch."""
        label = score = None
        if output.labels is not None:
            smoothing = self.config.train.label_smoothing if torch.is_grad_enabled() else 0.0
            label = F.cross_entropy(
                output.labels.float(),
                batch.labels,
                ignore_index=IGNORE_INDEX,
                reduction="sum",
                label_smoothing=smoothing,
            )
        if output.score is not None:
            score = score_divergence(output.score, batch.scores, self.min_score).sum()
        return PairLosses(label, score)

    # Evaluation and bundles

    def evaluate(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, float]:
        """Return "loss", accuracy of the labels, correlations and squared error of the scores.

        As a predictor gives a pair without words no label and no score, its label is wrong, and its
        score is not compared.
        """
        all_words = self.has_words(store)
        total, count = 0.0, 0
        rights, scores = list[Tensor](), list[Tensor]()
        for batch in evaluation_batches(self, store, device=device, progress=progress):
            assert isinstance(batch, PairBatch), "pairs are collated to a PairBatch"
            with precision.autocast(device):
                output: PairOutput = model(batch.token_ids, batch.flags, batch.lengths)
            losses = self._losses(output, batch)
            total += float(losses.label or 0.0)
            total += self.config.pairs.score_weight * float(losses.score or 0.0)
            count += len(batch)
            has_words = torch.from_numpy(all_words[batch.examples]).to(device)
            if output.labels is not None:
                known = batch.labels != IGNORE_INDEX
                is_right = (output.labels.argmax(dim=1) == batch.labels) & has_words
                rights.append(is_right[known])
            if output.score is not None:
                expected = expected_score(output.score, self.min_score)
                known = ~batch.scores.isnan() & has_words
                scores.append(torch.stack([expected[known], batch.scores[known]]))
        metrics = {"loss": total / max(count, 1)}
        if rights and len(right := torch.cat(rights)):
            metrics["accuracy"] = float(right.double().mean())
        if scores and (both := torch.cat(scores, dim=1).double().cpu().numpy()).shape[1]:
            metrics["pearson"] = correlation(both[0], both[1])
            metrics["spearman"] = correlation(_ranks(both[0]), _ranks(both[1]))
            metrics["mse"] = float(np.square(both[0] - both[1]).mean())
        return metrics

    def has_words(self, store: InMemoryExamples) -> NDArray[np.bool_]:
        """Return which pairs (N,) have words in both sentences; others are </s>, as by `words`."""
        every = np.arange(len(store))
        first, second = (store.padded(side, every, 1)[:, 0] for side in ("first", "second"))
        return np.asarray((first != EOS) & (second != EOS))

    def scores(self, metrics: Mapping[str, float]) -> list[TaskScore]:
        """Return the metrics; accuracy is a fraction."""
        return [
            TaskScore(name, metrics[name], f"interaction:{self.config.pairs.interaction}")
            for name in self.metrics
            if name in metrics
        ]

    def golden_inputs(self, records: Iterable[Record]) -> list[Any]:
        """Return a few pairs of sentences."""
        fields, found = PairFieldFinder(self.config.pairs), list[Any]()
        for record in records:
            if len(found) == NUM_GOLDEN_INPUTS:
                break
            names = fields(record)
            found.append([record.text(names.first), record.text(names.second)])
        return found

    def golden_outputs(self, model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        """Return the log-probabilities of labels and score bins, pair by pair."""
        found = []
        for first, second in inputs:
            if not isinstance(first, str) or not isinstance(second, str):
                raise TypeError(f"a pair must be two texts; found {first!r:.60}")
            batch = self.batch_pairs([self.encode_pair(first, second)])
            batch = batch.to(next(model.parameters()).device)
            with torch.no_grad():
                output: PairOutput = model(batch.token_ids, batch.flags, batch.lengths)
            found.append(
                [part[0].float().log_softmax(dim=0).tolist() for part in output if part is not None]
            )
        return found

    def batch_pairs(self, pairs: Sequence[EncodedPair]) -> PairBatch:
        """Return a batch of pairs without labels, for prediction."""
        store = _build_store(pairs, [IGNORE_INDEX] * len(pairs), [math.nan] * len(pairs))
        return self.collate(store, np.arange(len(pairs)))

    def describe(self) -> str:
        """Return the sizes of the vocabulary and the label set."""
        parts = [f"{len(self.text.words):,} words"]
        if self.text.labels:
            parts.append(f"{len(self.text.labels)} labels")
        if self.text.has_scores:
            parts.append(f"scores from {self.min_score} to {self.max_score}")
        return ", ".join(parts)


class PairLosses(NamedTuple):
    """Sums over a batch; None for a target that the model does not have."""

    label: Tensor | None
    score: Tensor | None


def score_divergence(logits: Tensor, scores: Tensor, min_score: int) -> Tensor:
    r"""Return the divergence (B,) of predicted score bins (B, R) from the scores (B,); 0 for NaN.

    .. math:: \mathrm{KL}(p \Vert \hat p), \quad
        p_i = \max(0, 1 - \lvert y - r_i \rvert)

    Tai et al. (2015), equations 16 and 17: the two integers r nearest to the score share
    its probability, so that the expected score is y.
    """
    bins = torch.arange(logits.size(1), device=logits.device) + min_score
    known = ~scores.isnan()
    target = (1.0 - (scores.nan_to_num().unsqueeze(1) - bins).abs()).clamp(min=0.0)  # (B, R)
    divergence = F.kl_div(logits.float().log_softmax(dim=1), target, reduction="none").sum(dim=1)
    return divergence.masked_fill(~known, 0.0)


def expected_score(logits: Tensor, min_score: int) -> Tensor:
    """Return the expectation (B,) of the score under its bins (B, R): Tai et al. (2015)."""
    bins = torch.arange(logits.size(1), device=logits.device) + min_score
    return logits.float().softmax(dim=1) @ bins.float()


def correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return Pearson's correlation; 0 if one side does not vary."""
    first, second = first - first.mean(), second - second.mean()
    norm = float(np.sqrt(np.square(first).sum() * np.square(second).sum()))
    return float((first * second).sum()) / norm if norm else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = (ends - (counts + 1) / 2)[inverse.reshape(-1)]
    return means


def _match_flags(words: Sequence[str], others: Sequence[str]) -> list[int]:
    """Return the flags of words that also occur in the other sentence."""
    exact, stems = {word.lower() for word in others}, {stem(word) for word in others}
    return [
        EXACT_MATCH * (word.lower() in exact) + STEM_MATCH * (stem(word) in stems) for word in words
    ]


def _split(config: Config, text: str) -> list[str]:
    """Return the words of a text."""
    return split_words(normalize_text(text, config.text.normalization))


def _build_store(
    pairs: Sequence[EncodedPair], labels: Sequence[int], scores: Sequence[float]
) -> InMemoryExamples:
    """Return a store of pairs."""
    return InMemoryExamples(
        sequences={
            "first": [pair.tokens[0] for pair in pairs],
            "second": [pair.tokens[1] for pair in pairs],
            "first_flags": [pair.flags[0] for pair in pairs],
            "second_flags": [pair.flags[1] for pair in pairs],
        },
        values={
            "label": np.array(labels, np.int64),
            "score": np.array(scores, np.float32),
        },
    )


def _join(
    tokens: NDArray[np.int64], flags: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Join both sentences (B, 2, T) with </s> in between: (B, 1, T), and lengths (B, 1)."""
    columns = np.arange(tokens.shape[2])
    first = counts[:, :1]
    total = counts.sum(axis=1, keepdims=True) + 1
    behind = np.clip(columns - first - 1, 0, None)  # column of the second sentence
    in_first, in_second = columns < first, (columns > first) & (columns < total)
    joined = np.where(in_first, tokens[:, 0], np.take_along_axis(tokens[:, 1], behind, axis=1))
    joined = np.where(in_first | in_second, joined, PAD)
    joined[columns == first] = EOS
    marks = np.where(
        in_first,
        flags[:, 0],
        np.take_along_axis(flags[:, 1], behind, axis=1) + SECOND_SENTENCE,
    )
    marks = np.where(in_first | in_second, marks, 0)
    return joined[:, None], marks[:, None], total


def _read_features(data: bytes) -> bool:
    """Return whether a model has scores; raise BundleError for a bad file."""
    try:
        values = json.loads(data)
        if isinstance(values, dict) and type(values.get("scores")) is bool:
            return bool(values["scores"])
    except (ValueError, RecursionError):
        pass
    raise BundleError(
        f"{FEATURES_FILE} must have true or false in 'scores'",
        found=f"{data[:80]!r}",
        fix="copy the model directory again",
    )
