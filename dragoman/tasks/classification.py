"""The classification task: texts with one class, or with any number of labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.config import Config, overridden_settings
from dragoman.data.batch_plan import BatchPlan, Plan
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.collate import TensorBatch
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.errors import ConfigError
from dragoman.evaluate.classification_metrics import score_classes, tune_thresholds
from dragoman.models.classifier import (
    ClassifierModel,
    ClassifierOutput,
    ClassifierSizes,
    NgramFeatures,
    build_classifier,
)
from dragoman.tasks.classification_preprocessor import (
    ClassificationPreprocessor,
    TargetReader,
    TokenizedDocument,
    lowercased,
    tokenize_text,
)
from dragoman.tasks.non_translation_task import (
    NUM_GOLDEN_INPUTS,
    DetailedMetrics,
    ReadRecords,
    TaskScore,
    TrainingTask,
    evaluation_batches,
    padded_length,
)
from dragoman.text.special_tokens import UNK
from dragoman.text.vocabulary_and_labels import (
    Labels,
)
from dragoman.training.task_protocol import Loss

if TYPE_CHECKING:
    from dragoman.training.bf16_mixed_precision import Precision
    from dragoman.training.progress_display import Progress

UNLABELED = -1  # target of an example without this kind of label
MAX_GOLDEN_CHARACTERS = 2000


@dataclass(frozen=True, kw_only=True)
class ClassificationBatch(TensorBatch):
    """A batch of texts: tokens (B, T), or documents (B, N, W) of sentences of words."""

    words: Tensor  # (B, T) or (B, N, W)
    lengths: Tensor  # (B,), or words of each sentence (B, N)
    labels: Tensor  # (B,) class, or (B, C) one for each label of the text
    auxiliary: Tensor | None = None  # (B,) class of the second label
    attributes: Tensor | None = None  # (B, A)
    ngrams: Tensor | None = None  # (B, K)
    ngram_values: Tensor | None = None  # (B, K)
    sizes: NDArray[np.int64]  # (B,) tokens of each text, on the host
    is_full: bool = False  # whether there is no padding

    @property
    def tokens(self) -> int:
        """The number of real tokens."""
        return int(self.sizes.sum())

    @property
    def padded_tokens(self) -> int:
        """The number of tokens, padding included."""
        return self.words.numel()

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """Shapes, and whether there is padding: without, there is no mask."""
        return (*super().graph_key, self.is_full)

    @property
    def mask(self) -> Tensor | None:
        """True at real tokens, in the shape of `words`; None without padding."""
        if self.is_full:
            return None
        positions = torch.arange(self.words.size(-1), device=self.lengths.device)
        return positions < self.lengths.unsqueeze(-1)

    @property
    def features(self) -> NgramFeatures | None:
        """The n-grams of the texts, or None."""
        return None if self.ngrams is None else NgramFeatures(self.ngrams, self.ngram_values)


class ClassificationTask(TrainingTask):
    """Cross-entropy of the class, or binary cross-entropy of each label."""

    name: ClassVar[str] = "classify"
    metrics: ClassVar[Mapping[str, bool]] = {
        "accuracy": True,
        "macro_f1": True,
        "micro_f1": True,
        "calibration_error": False,
    }
    text: ClassificationPreprocessor

    def __init__(self, config: Config, text: ClassificationPreprocessor) -> None:
        super().__init__(config, text)
        weights = _class_weights(config.classify.class_weights, text)
        self._class_weights = None if weights is None else torch.from_numpy(weights)
        self._device_weights: Tensor | None = None
        self._idf = (
            text.ngrams.inverse_document_frequencies(text.examples)
            if text.ngrams is not None and config.classify.ngram_weights == "tf_idf"
            else None
        )

    # Text

    @classmethod
    def fit_text(cls, config: Config, records: ReadRecords) -> ClassificationPreprocessor:
        """Return vocabulary, labels, n-grams and word vectors of the training records."""
        return ClassificationPreprocessor.fit(config, records)

    @classmethod
    def load_text(cls, config: Config, files: Mapping[str, bytes]) -> ClassificationPreprocessor:
        """Return what `text_files` wrote; raise BundleError for a file that is not valid."""
        return ClassificationPreprocessor.load(config, files)

    def text_files(self) -> dict[str, bytes]:
        """Return the files of a bundle's text/ folder."""
        return self.text.to_files()

    def describe(self) -> str:
        """Return the sizes of the vocabulary, the labels and the n-grams."""
        text = self.text
        parts = [f"{len(text.vocabulary):,} words", f"{len(text.labels):,} labels"]
        if text.ngrams is not None:
            parts.append(f"{len(text.ngrams) - 1:,} n-grams")
        parts += [f"{len(each.ids):,} words with vectors" for each in text.vectors]
        return ", ".join(parts)

    def tokenize(self, text: str) -> TokenizedDocument:
        """Return the tokens of a text as the model reads them, in sentences if it is hierarchical.

        Texts are cut after `data.max_length` tokens.
        """
        return tokenize_text(self.config, text, self.text.sentence_end)

    # Examples

    def encode(self, records: Iterable[Record]) -> InMemoryExamples:
        """Return labelled records as arrays of ids; raise DataError for a bad one."""
        targets = TargetReader(self.config)
        labels, auxiliary, attributes = [], [], []

        def texts() -> Iterator[str]:
            for record in records:
                yield record.text(targets.text_field(record))
                labels.append(self._label_target(record, targets))
                if self.text.auxiliary is not None:
                    name = record.label(self.config.classify.auxiliary_field)
                    auxiliary.append(_index(record, self.text.auxiliary, name, "auxiliary label"))
                if self.text.attributes is not None:
                    attributes.append(self._attribute_target(record))

        sequences = self._encode_texts(texts())
        values: dict[str, NDArray[Any]] = {"labels": self._stack_labels(labels)}
        if self.text.auxiliary is not None:
            values["auxiliary"] = np.array(auxiliary, np.int64)
        if self.text.attributes is not None:
            values["attributes"] = np.array(attributes, np.float32).reshape(
                len(attributes), len(self.text.attributes)
            )
        return InMemoryExamples(sequences=sequences, values=values)

    def encode_texts(self, texts: Iterable[str]) -> InMemoryExamples:
        """Return texts without labels as arrays of ids."""
        sequences = self._encode_texts(texts)
        count = len(sequences["words"])
        shape = (count, len(self.text.labels)) if self.text.multi_label else (count,)
        return InMemoryExamples(
            sequences=sequences, values={"labels": np.full(shape, UNLABELED, np.int64)}
        )

    def _encode_texts(self, texts: Iterable[str]) -> dict[str, list[NDArray[np.int32]]]:
        """Return the sequences of a store: words, sentence lengths and n-grams."""
        vocabulary, ngrams = self.text.vocabulary, self.text.ngrams
        found: dict[str, list[NDArray[np.int32]]] = {"words": []}
        if self.config.classify.hierarchical:
            found["sentences"] = []
        if ngrams is not None:
            found |= {"ngrams": [], "ngram_counts": []}
        for text in texts:
            tokenized = self.tokenize(text)
            tokens = tokenized.tokens
            ids = vocabulary.ids(tokens)
            found["words"].append(np.array(ids, np.int32))
            if "sentences" in found:
                lengths = [len(sentence) for sentence in tokenized.sentences]
                found["sentences"].append(np.array(lengths, np.int32))
            if ngrams is not None:
                counted = ngrams.count(lowercased(self.config, tokens))
                found["ngrams"].append(counted.ids)
                found["ngram_counts"].append(counted.counts)
        return found

    def _label_target(self, record: Record, targets: TargetReader) -> int | NDArray[np.bool_]:
        """Return the index of a record's class, or which of the labels it has."""
        names = targets.label_names(record)
        what = "label"
        if not self.text.multi_label:
            if len(names) != 1:
                raise record.error(
                    "must have one label, as the training data have",
                    f"{len(names)} labels",
                    "set classify.multi_label=on to train on several",
                )
            return _index(record, self.text.labels, names[0], what)
        chosen = np.zeros(len(self.text.labels), np.bool_)
        chosen[[_index(record, self.text.labels, name, what) for name in names]] = True
        return chosen

    def _attribute_target(self, record: Record) -> NDArray[np.float32]:
        """Return which attributes a record has; -1 for all if it has no such field."""
        labels, name = self.text.attributes, self.config.classify.attribute_field
        assert labels is not None, "called for models with attributes"
        if record.fields.get(name) is None:
            return np.full(len(labels), UNLABELED, np.float32)
        target = np.zeros(len(labels), np.float32)
        for each in record.labels(name):
            target[_index(record, labels, each, "attribute")] = 1.0
        return target

    def _stack_labels(self, labels: Sequence[Any]) -> NDArray[np.int64]:
        """Return targets (N,), or (N, C) with several labels."""
        width = len(self.text.labels)
        shape = (len(labels), width) if self.text.multi_label else (len(labels),)
        return np.array(labels, np.int64).reshape(shape)

    def lengths(self, store: InMemoryExamples) -> NDArray[np.int64]:
        """Return the number of tokens of each text, or of sentences of a document."""
        return store.lengths("sentences" if self.config.classify.hierarchical else "words")

    def plan(self, store: InMemoryExamples, *, batch_tokens: int, seed: int) -> Plan:
        """Assign texts to batches of similar lengths; documents by their sentences."""
        if not self.config.classify.hierarchical:
            return super().plan(store, batch_tokens=batch_tokens, seed=seed)
        sentences = np.maximum(self.lengths(store), 1)
        return BatchPlan(
            sentences - 1,
            np.zeros_like(sentences),
            batch_tokens=max(1, batch_tokens // self.config.classify.max_sentence_words),
            seed=seed,
        )

    def collate(
        self,
        store: InMemoryExamples,
        examples: NDArray[np.int64],
        *,
        shapes: Sequence[BatchShape] = (),
        seed: int = 0,
        training: bool = False,
    ) -> ClassificationBatch:
        """Return a padded batch of texts."""
        examples = np.asarray(examples, np.int64)
        sizes = store.lengths("words")[examples]
        if self.config.classify.hierarchical:
            words, lengths = self._pad_documents(store, examples, shapes)
        else:
            width = padded_length(shapes, int(sizes.max(initial=1)))
            words, lengths = store.padded("words", examples, width), sizes
        targets = {
            name: torch.from_numpy(values[examples])
            for name, values in store.values.items()
            if name in ("labels", "auxiliary", "attributes")
        }
        ngrams, values = self._pad_ngrams(store, examples, words.size // max(len(examples), 1))
        return ClassificationBatch(
            words=torch.from_numpy(words),
            lengths=torch.from_numpy(lengths),
            **targets,
            ngrams=ngrams,
            ngram_values=values,
            examples=examples,
            sizes=sizes,
            is_full=bool(sizes.sum() == words.size),
        )

    def _pad_documents(
        self, store: InMemoryExamples, examples: NDArray[np.int64], shapes: Sequence[BatchShape]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return words (B, N, W) and the words of each sentence (B, N)."""
        counts = store.lengths("sentences")[examples]
        rows = padded_length(shapes, int(counts.max(initial=1)))
        lengths = store.padded("sentences", examples, rows)
        longest = int(lengths.max(initial=1))
        # With shapes the width is fixed too, so that CUDA graphs are captured for few of them.
        width = self.config.classify.max_sentence_words if shapes else longest
        words = np.zeros((len(examples), rows, width), np.int64)
        inside = np.arange(width) < lengths[..., None]
        words[inside] = np.concatenate(
            [store.sequence("words", int(each)) for each in examples] or [np.zeros(0, np.int32)]
        )
        return words, lengths

    def _pad_ngrams(
        self, store: InMemoryExamples, examples: NDArray[np.int64], tokens: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the n-grams (B, K) of texts of so many padded tokens, and their values."""
        if self.text.ngrams is None:
            return None, None
        width = max(1, self.text.ngrams.order * tokens)  # the most that there can be
        ids = store.padded("ngrams", examples, width)
        if self._idf is None:
            return torch.from_numpy(ids), None
        counts = store.padded("ngram_counts", examples, width)
        values = (1 + np.log(np.maximum(counts, 1))) * self._idf[ids]
        values /= np.maximum(np.sqrt((values**2).sum(axis=1, keepdims=True)), 1e-9)
        return torch.from_numpy(ids), torch.from_numpy(values.astype(np.float32))

    # Training

    def build_model(self) -> ClassifierModel:
        """Build the classifier, with word vectors and n-gram ratios where these were learned."""
        text = self.text
        sizes = ClassifierSizes(
            vocab_size=len(text.vocabulary),
            labels=len(text.labels),
            auxiliary_labels=len(text.auxiliary) if text.auxiliary is not None else 0,
            attributes=len(text.attributes) if text.attributes is not None else 0,
            ngram_features=len(text.ngrams) if text.ngrams is not None else 0,
            vector_widths=text.vector_widths,
            frozen_widths=text.frozen_widths,
            label_words=self._label_words() if self.config.classify.label_names else (),
        )
        model = build_classifier(self.config.model, self.config.classify, sizes)
        model.set_prior(torch.from_numpy(_prior_logits(text)))
        if text.vectors and model.embedding is not None:
            model.embedding.load_vectors([(each.ids, each.vectors) for each in text.vectors])
        if text.ngram_ratios is not None and model.bag is not None:
            with torch.no_grad():
                model.bag.ratios.copy_(torch.from_numpy(text.ngram_ratios))
        return model

    def _label_words(self) -> tuple[tuple[int, ...], ...]:
        """Return the ids of the words in each label's name; none if one of them is unknown."""
        found = []
        for name in self.text.labels.names:
            words = self.tokenize(re.sub(r"[\W_]+", " ", name)).tokens
            ids = tuple(map(int, self.text.vocabulary.ids(words)))
            found.append(() if UNK in ids else ids)
        return tuple(found)

    def forward(self, model: nn.Module, batch: ClassificationBatch) -> ClassifierOutput:
        """Return the logits of a batch."""
        assert isinstance(model, ClassifierModel), (
            f"classification needs a ClassifierModel; found {type(model).__name__}"
        )
        return model.classify(batch.words, batch.mask, batch.features)

    def loss(self, model: nn.Module, batch: ClassificationBatch) -> Loss:
        """Return the loss over the texts, with those of branches, second labels and attributes."""
        assert isinstance(model, ClassifierModel), (
            f"classification needs a ClassifierModel; found {type(model).__name__}"
        )
        losses: dict[str, Tensor] = {}
        output = model.classify(batch.words, batch.mask, batch.features, losses=losses)
        total = self._label_loss(output.logits, batch.labels)
        if self.config.classify.branch_loss and model.training:
            for logits in (output.encoder_logits, output.ngram_logits):
                assert logits is not None, "a model with two branches has both"
                losses[f"branch {len(losses)}"] = (
                    self.config.classify.branch_loss * self._label_loss(logits, batch.labels)
                )
        if output.auxiliary is not None and batch.auxiliary is not None:
            losses["auxiliary"] = self.config.classify.auxiliary_weight * F.cross_entropy(
                output.auxiliary.float(), batch.auxiliary, reduction="sum"
            )
        if output.attributes is not None and batch.attributes is not None:
            known = (batch.attributes >= 0).float()
            entropy = F.binary_cross_entropy_with_logits(
                output.attributes.float(), batch.attributes.clamp(min=0.0), reduction="none"
            )
            losses["attributes"] = self.config.classify.attribute_weight * (entropy * known).sum()
        with torch.no_grad():
            nll = self._plain_loss(output.logits, batch.labels)
        count = torch.full((), float(len(batch)), device=total.device)
        return Loss(sum(losses.values(), total), nll, count)

    def _label_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of the labels, with class weights and label smoothing."""
        smoothing = self.config.train.label_smoothing
        weights = self._weights_on(logits.device)
        if not self.text.multi_label:
            return F.cross_entropy(
                logits.float(), labels, weight=weights, label_smoothing=smoothing, reduction="sum"
            )
        targets = labels.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(
            logits.float(), targets, pos_weight=weights, reduction="sum"
        )

    def _plain_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of the labels."""
        if not self.text.multi_label:
            return F.cross_entropy(logits.float(), labels, reduction="sum")
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="sum")

    def _weights_on(self, device: torch.device) -> Tensor | None:
        """Return the class weights on a device, copied there once."""
        if self._class_weights is None:
            return None
        if self._device_weights is None or self._device_weights.device != device:
            self._device_weights = self._class_weights.to(device)
        return self._device_weights

    # Evaluation

    def evaluate(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, float]:
        """Return the loss and the metrics on labelled texts."""
        return self.evaluate_in_detail(
            model, store, device=device, precision=precision, progress=progress
        ).metrics

    def evaluate_in_detail(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> DetailedMetrics:
        """Return the loss, the metrics, and the scores of each class."""
        logits = self.logits(model, store, device=device, precision=precision, progress=progress)
        assert isinstance(model, ClassifierModel), "checked by `logits`"
        labels = store.values["labels"]
        nll = self._plain_loss(torch.from_numpy(logits), torch.from_numpy(labels))
        probabilities = self.probabilities(logits)
        predicted = self.decide(probabilities, model.thresholds.cpu().numpy())
        has_words = self.has_words(store)
        predicted[~has_words] = False  # as a predictor
        scores = score_classes(predicted, self.expected(store), probabilities, calibrated=has_words)
        rows: list[dict[str, str | float | int]] = [
            {"label": name, **score._asdict()}
            for name, score in zip(self.text.labels.names, scores.classes, strict=True)
        ]
        metrics = {"loss": float(nll) / max(len(labels), 1), **scores.metrics()}
        return DetailedMetrics(metrics, rows)

    @property
    def tunes_weights(self) -> bool:
        """Whether thresholds are tuned."""
        return self.text.multi_label and self.config.classify.tune_threshold != "off"

    def finish(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> dict[str, Tensor]:
        """Return the thresholds, tuned on the validation set with `classify.tune_threshold`."""
        if not self.tunes_weights or not len(store):
            return {}
        by_label = self.config.classify.tune_threshold == "labels"
        logits = self.logits(model, store, device=device, precision=precision, progress=progress)
        tuned = tune_thresholds(self.probabilities(logits), self.expected(store), by_label=by_label)
        return {"thresholds": torch.from_numpy(tuned).float()}

    def override_config(self, overrides: Sequence[str]) -> Config:
        """Return the settings of an evaluation; a threshold that is named replaces tuned ones."""
        config = super().override_config(overrides)
        if "classify.threshold" in overridden_settings(None, overrides):
            return config.replace(classify={"tune_threshold": "off"})
        found, own = (each.classify.tune_threshold for each in (config, self.config))
        if found not in ("off", own):
            raise ConfigError(
                [
                    "classify.tune_threshold tunes thresholds in training; found "
                    f"{found} in the evaluation of a model with {own}; leave it out, or set "
                    "classify.threshold"
                ]
            )
        return config

    def fixed_weights(self) -> dict[str, Tensor]:
        """Return the thresholds, unless they are tuned."""
        classify = self.config.classify
        if classify.tune_threshold != "off":
            return {}
        return {"thresholds": torch.full((len(self.text.labels),), classify.threshold)}

    def logits(
        self,
        model: nn.Module,
        store: InMemoryExamples,
        *,
        device: torch.device,
        precision: Precision,
        progress: Progress,
    ) -> NDArray[np.float32]:
        """Return the logits (N, C) of all texts, in their order."""
        found = np.zeros((len(store), len(self.text.labels)), np.float32)
        for batch in evaluation_batches(self, store, device=device, progress=progress):
            assert isinstance(batch, ClassificationBatch), "made by `collate`"
            with precision.autocast(device):
                logits = self.forward(model, batch).logits
            found[batch.examples] = logits.float().cpu().numpy()
        return found

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the probabilities (N, C) of logits: softmax, or a sigmoid for each label."""
        tensor = torch.from_numpy(logits)
        return (tensor.sigmoid() if self.text.multi_label else tensor.softmax(dim=-1)).numpy()

    def decide(
        self, probabilities: NDArray[np.float32], thresholds: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Return the predicted classes (N, C): the most probable one, or all over a threshold."""
        if self.text.multi_label:
            return np.asarray(probabilities >= thresholds)
        best = probabilities.argmax(axis=1)
        return np.asarray(np.arange(probabilities.shape[1]) == best[:, None])

    def expected(self, store: InMemoryExamples) -> NDArray[np.bool_]:
        """Return the labels of a store as (N, C)."""
        labels = store.values["labels"]
        if self.text.multi_label:
            return labels.astype(np.bool_)
        return np.asarray(np.arange(len(self.text.labels)) == labels[:, None])

    def has_words(self, store: InMemoryExamples) -> NDArray[np.bool_]:
        """Return which texts (N,) have words; the others have no label, whatever the logits."""
        return store.lengths("words") > 0

    def scores(self, metrics: Mapping[str, float]) -> list[TaskScore]:
        """Return the metrics to be reported, with signatures."""
        settings = self.config.classify
        decision = f"classes:{len(self.text.labels)}"
        if self.text.multi_label:
            threshold = settings.tune_threshold
            tuned = threshold if threshold != "off" else f"{settings.threshold:g}"
            decision = f"labels:{len(self.text.labels)}|threshold:{tuned}"
        kinds = {
            "accuracy": "exact",  # all labels of a text are right
            "macro_f1": "mean|undefined:0",  # 0 for a class that is never predicted
            "micro_f1": "pooled",  # over all decisions
            "calibration_error": "bins:15",  # of equal width
        }
        return [
            TaskScore(name, metrics[name], f"{decision}|{kinds[name]}")
            for name in self.metrics
            if name in metrics
        ]

    def golden_inputs(self, records: Iterable[Record]) -> list[str]:
        """Return a few texts, cut to a length that a bundle can record."""
        targets = TargetReader(self.config)
        found = []
        for record in records:
            found.append(record.text(targets.text_field(record))[:MAX_GOLDEN_CHARACTERS])
            if len(found) == NUM_GOLDEN_INPUTS:
                break
        return found

    def golden_outputs(self, model: nn.Module, inputs: Sequence[Any]) -> list[Any]:
        """Return the probabilities of texts, by label."""
        if not all(isinstance(text, str) for text in inputs):
            raise TypeError("inputs of classification must be texts")
        store = self.encode_texts(inputs)
        device = next(model.parameters()).device
        batch = self.collate(store, np.arange(len(store))).to(device)
        logits = self.forward(model, batch).logits.float().cpu().numpy()
        return [
            dict(zip(self.text.labels.names, row.tolist(), strict=True))
            for row in self.probabilities(logits)
        ]


def _index(record: Record, labels: Labels, name: str, what: str) -> int:
    """Return the index of a label; raise DataError if the training data do not have it."""
    if name not in labels:
        known = ", ".join(labels.names[:6]) + (", …" if len(labels) > 6 else "")
        raise record.error(
            f"must have an {what} of the training data"
            if what[0] in "ae"
            else f"must have a {what} of the training data",
            repr(name),
            f"use one of {known}, or leave the record out",
        )
    return labels.index(name)


def _class_weights(kind: str, text: ClassificationPreprocessor) -> NDArray[np.float32] | None:
    """Return the weight of each class, or of the examples that have a label; None for 1.

    Balanced classes weigh N / (C n_c), so that each has the same total; examples that have a label
    weigh (N - n_c) / n_c, so that they have the total of those that have not.
    """
    if kind == "none":
        return None
    counts = np.maximum(np.array(text.label_counts, np.float64), 1.0)
    if text.multi_label:
        return ((text.examples - counts).clip(min=1.0) / counts).astype(np.float32)
    return (text.examples / (len(counts) * counts)).astype(np.float32)


def _prior_logits(text: ClassificationPreprocessor) -> NDArray[np.float32]:
    """Return the logits of the classes' frequencies in the training data, smoothed by one half."""
    counts = np.array(text.label_counts, np.float64) + 0.5
    if text.multi_label:
        return np.log(counts / (text.examples + 1 - counts)).astype(np.float32)
    return np.log(counts / counts.sum()).astype(np.float32)
