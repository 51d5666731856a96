"""Classifier: the label of a text with its probability, or any number of labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dragoman.attention.attention_weight_hooks import find_attentions, record
from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record, find_text_field
from dragoman.errors import DataError, escape_unprintable
from dragoman.inference.long_line_segments import check_unicode, iter_texts
from dragoman.inference.predictors.base import Predictor
from dragoman.inference.translation_result import truncate_repr
from dragoman.models.classifier import ClassifierModel
from dragoman.tasks.classification import ClassificationTask
from dragoman.tasks.classification_preprocessor import tokenize
from dragoman.tasks.non_translation_task import check_finite_outputs
from dragoman.text.sentencepiece_tokenizer import replace_control_chars

if TYPE_CHECKING:
    from dragoman.explain.classification_occlusion import OcclusionExplanation, SentenceSpans
    from dragoman.explain.task_explainers.base import TaskExplainer

EMPTY_NOTE = "the text has no words: it has no label"


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """The prediction of one text."""

    text: str
    labels: tuple[str, ...]  # one; of a multi-label model those above their thresholds
    names: tuple[str, ...]  # all labels of the model
    values: NDArray[np.float32]  # their probabilities, in the same order
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The most probable predicted label; "" if there is none."""
        return self.labels[0] if self.labels else ""

    @property
    def probability(self) -> float:
        """The probability of `label`; 0 if there is none."""
        return float(self.values[self.names.index(self.label)]) if self.labels else 0.0

    @property
    def probabilities(self) -> dict[str, float]:
        """The probability of every label, most probable first."""
        order = np.argsort(-self.values, kind="stable")
        return {self.names[index]: float(self.values[index]) for index in order}

    @property
    def _is_empty(self) -> bool:
        """Whether the text has no words, and so no probabilities."""
        return EMPTY_NOTE in self.notes

    def __repr__(self) -> str:
        """Return the text and the labels in one line."""
        found = ", ".join(f"{name} {self.probabilities[name]:.3f}" for name in self.labels)
        return f"Classification({truncate_repr(self.text)}, {found or 'no label'})"

    def to_line(self, *, top: int = 1) -> str:
        """Return `label TAB probability TAB text`; with `top`, several labels.

        Those of a multi-label model are separated by commas, as are their probabilities. Tabs and
        control characters of labels are escaped.
        """
        text = replace_control_chars(self.text).replace("\t", " ")
        if top > 1:
            best = list(self.probabilities.items())[:top] if not self._is_empty else []
            pairs = [f"{escape_unprintable(name)}\t{value:.4f}" for name, value in best]
            return "\t".join([*pairs, text])
        found = self.probabilities if len(self.labels) > 1 else {self.label: self.probability}
        names = ",".join(map(escape_unprintable, self.labels))
        values = ",".join(f"{found[name]:.4f}" for name in self.labels) or "0.0000"
        return f"{names}\t{values}\t{text}"

    def to_dict(self) -> dict[str, Any]:
        """Return the labels and the probabilities of all labels, rounded to six decimals."""
        return {
            "text": self.text,
            "label": self.label,
            "probability": round(self.probability, 6),
            "labels": list(self.labels),
            "probabilities": {
                name: round(value, 6)
                for name, value in (self.probabilities if not self._is_empty else {}).items()
            },
            "notes": list(self.notes),
        }


class StoredText(NamedTuple):
    """A text in the store of its buffer."""

    text: str
    store: InMemoryExamples
    row: int
    tokens: int  # 0 for a text without words
    padded_tokens: int
    notes: tuple[str, ...] = ()


class Classifier(Predictor[str, StoredText, Classification]):
    """Predicts the labels of texts.

    `Classifier.load("my-classifier").predict(["A wonderful film."])`
    """

    task_name: ClassVar[str] = "classify"
    task: ClassificationTask

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the model."""
        return self.task.text.labels.names

    @property
    def has_alternatives(self) -> bool:
        """Whether a prediction is a label: always."""
        return True

    def read_record(self, record: Record, *, text_field: str = "") -> str:
        """Return the text of a record; the column is `text_field`, or that of training."""
        trained = self.config.data.text_field
        wanted = text_field or (trained if trained in record.fields else "")
        return record.text(find_text_field(record, wanted, setting="--text-field"))

    def iter_inputs(self, inputs: Iterable[Any]) -> Iterator[str]:
        """Yield texts; raise DataError for the first value that is none."""
        return iter_texts(inputs)

    def encode(self, inputs: Sequence[str]) -> list[StoredText]:
        """Encode texts as arrays of ids, all in one store."""
        store = self.task.encode_texts(inputs)
        tokens = store.lengths("words")
        padded = tokens
        if self.config.classify.hierarchical:
            padded = self.task.lengths(store) * self.config.classify.max_sentence_words
        return [
            StoredText(
                text, store, row, int(tokens[row]), int(padded[row]), self._notes(text, tokens[row])
            )
            for row, text in enumerate(inputs)
        ]

    def _notes(self, text: str, tokens: int) -> tuple[str, ...]:
        """Return notes on a text: that it is empty or was cut."""
        longest = self.config.data.max_length
        if not tokens:
            return (EMPTY_NOTE,)
        if tokens < longest or (count := len(tokenize(self.config, text))) <= longest:
            return ()
        return (
            f"only its first {longest:,} of {count:,} tokens were read (data.max_length of the "
            "training)",
        )

    def length(self, encoded: StoredText) -> int:
        """Return the padded tokens of a text."""
        return encoded.padded_tokens

    def predict_batch(
        self, model: nn.Module, encoded: Sequence[StoredText], device: torch.device
    ) -> list[Classification]:
        """Return the labels of a batch of texts; one without words has none."""
        full = [each for each in encoded if each.tokens]
        values = self._probabilities(model, full, device)
        assert isinstance(model, ClassifierModel), "the model of a classification bundle"
        chosen = self.task.decide(values, model.thresholds.float().cpu().numpy())  # (B, C)
        names = self.labels
        nothing = np.zeros(len(names), np.float32)
        found = iter(zip(values, chosen, strict=True))
        predictions = []
        for each in encoded:
            if not each.tokens:
                predictions.append(
                    Classification(
                        text=each.text, labels=(), names=names, values=nothing, notes=each.notes
                    )
                )
                continue
            row, is_chosen = next(found)
            order = np.argsort(-row, kind="stable")
            labels = tuple(names[index] for index in order if is_chosen[index])
            predictions.append(
                Classification(
                    text=each.text, labels=labels, names=names, values=row, notes=each.notes
                )
            )
        return predictions

    def task_input(self, example: str, *, label: str = "") -> TaskExplainer:  # type: ignore[override]
        """Return a text to be explained, by its most probable label or another one."""
        from dragoman.explain.task_explainers.classifier import ClassifiedText

        assert isinstance(self.model, ClassifierModel), "the model of a classification bundle"
        [text] = self.iter_inputs([example])
        return ClassifiedText(self.model, self.task, text, label=label)

    def repeat_input(self, request: Mapping[str, Any]) -> TaskExplainer:
        """Return the text of an explanation."""
        return self.task_input(request["text"], label=request.get("label", ""))

    def explain_words(self, example: str, *, label: str = "") -> OcclusionExplanation:
        """Explain the label of a text, or another label's probability, by its words.

        Each word and each sentence is left out in turn, and the drop in the label's probability is
        reported beside the attention weights.
        """
        from dragoman.explain.classification_occlusion import explain_text

        [text] = self.iter_inputs([example])
        check_unicode(text)
        [encoded] = self.encode([text])
        if not encoded.tokens:
            raise DataError(
                "a text to explain must hold words",
                found=repr(example),
                fix="pass a text with words",
            )
        [prediction] = self._predict_buffer([text], None)
        probabilities = prediction.probabilities
        label = label or prediction.label or next(iter(probabilities))
        if label not in probabilities:
            raise DataError(
                "a label to explain must be one of the model's",
                found=repr(label),
                fix=f"choose one of {', '.join(self.labels[:12])}",
            )
        index = self.labels.index(label)

        def predict(texts: Sequence[str]) -> list[float]:
            return [float(found.values[index]) for found in self.stream(list(texts))]

        found = explain_text(
            example, self._weigh_words(encoded, index), probabilities, label, predict
        )
        return replace(found, notes=[*encoded.notes, *found.notes])

    def _probabilities(
        self, model: nn.Module, encoded: Sequence[StoredText], device: torch.device
    ) -> NDArray[np.float32]:
        """Return the probabilities (B, C) of texts of one store."""
        if not encoded:
            return np.zeros((0, len(self.labels)), np.float32)
        rows = np.array([each.row for each in encoded], np.int64)
        batch = self.task.collate(encoded[0].store, rows).to(device)
        logits = self.task.forward(model, batch).logits.float().cpu()
        check_finite_outputs(logits)
        return self.task.probabilities(logits.numpy())

    @torch.inference_mode()
    def _weigh_words(self, encoded: StoredText, label: int) -> list[SentenceSpans]:
        """Return the words of a text by sentence, with the attention weights of the pooling."""
        from dragoman.explain.classification_occlusion import (
            CharacterSpan,
            SentenceSpans,
            find_spans,
            merge_into_words,
        )

        sentences = self.task.tokenize(encoded.text).sentences
        by_words = self.config.text.tokenizer == "words"
        attentions = find_attentions(self.model)
        names = [name for name in ("pooling", "words", "sentences") if name in attentions]
        with record(self.model, names) as records:
            self._probabilities(self.model, [encoded], self.device)
        recorded = set(records)
        # Documents are pooled by label over their sentences, not over the words of each.
        row = label if self.config.classify.pooling == "labels" else None
        tokens = [token for sentence in sentences for token in sentence]
        found = iter(
            _byte_spans(encoded.text, len(tokens))
            if self.config.text.tokenizer == "bytes"
            else find_spans(encoded.text, tokens)
        )
        result = []
        for number, sentence in enumerate(sentences):
            spans = [next(found) for _ in sentence]
            known = [at for at, span in enumerate(spans) if span is not None]
            weights: list[float] | None = None
            if "words" in recorded:
                weights = _pooled_row(records["words"].weights[number], None)[: len(sentence)]
            elif "pooling" in recorded:
                weights = _pooled_row(records["pooling"].weights[0], row)[: len(sentence)]
            located: list[CharacterSpan] = [span for span in spans if span is not None]
            if weights is not None:
                weights = [weights[at] for at in known]
            words = (
                SentenceSpans(words=located, word_weights=weights)
                if by_words
                else merge_into_words(encoded.text, located, weights)
            )
            weight = (
                _pooled_row(records["sentences"].weights[0], row)[number]
                if "sentences" in recorded
                else None
            )
            result.append(
                SentenceSpans(words=words.words, word_weights=words.word_weights, weight=weight)
            )
        return result


def _pooled_row(weights: torch.Tensor, label: int | None) -> list[float]:
    """Return the weights (1, R, S) of one pooling as S numbers.

    Of one query per label, those of the label; of several hops their mean.
    """
    hops = weights[0].float().cpu()  # (R, S)
    row: list[float] = (hops.mean(dim=0) if label is None else hops[label]).tolist()
    return row


def _byte_spans(text: str, count: int) -> list[Any]:
    """Return the character that each of the first bytes belongs to; None past the last."""
    from dragoman.explain.classification_occlusion import CharacterSpan

    spans: list[Any] = []
    for at, char in enumerate(text):
        # Later bytes of a character add their weight to it.
        spans += [CharacterSpan(at, at + 1)] * len(char.encode(errors="surrogatepass"))
    return (spans + [None] * count)[:count]
