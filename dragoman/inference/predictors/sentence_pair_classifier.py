"""Predictor of sentence pairs: a label, a score, or both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import record as record_attention
from dragoman.data.labeled_records import TEXT, Record, find_pair_fields
from dragoman.errors import ConfigError, DataError, escape_unprintable
from dragoman.inference.long_line_segments import check_unicode
from dragoman.inference.predictors.base import Predictor
from dragoman.models.sentence_pair_classifier import PairModel, PairOutput
from dragoman.tasks.non_translation_task import check_finite_outputs
from dragoman.tasks.sentence_pair_classification import EncodedPair, PairsTask, expected_score

if TYPE_CHECKING:
    from dragoman.explain.task_explainers.base import TaskExplainer

InputPair = tuple[str, str]
EMPTY_NOTE = "a sentence has no words: the pair has no label and no score"


@dataclass(frozen=True, slots=True)
class PairPrediction:
    """The label and the score of a sentence pair, where the model has them."""

    label: str | None = None
    probabilities: dict[str, float] | None = None  # by label
    score: float | None = None
    notes: tuple[str, ...] = ()

    def to_line(self, *, top: int = 1) -> str:
        """Return labels with their probabilities, then the score, separated by tabs."""
        parts = []
        if self.probabilities is not None:
            ranked = sorted(self.probabilities.items(), key=lambda each: -each[1])[: max(1, top)]
            ranked = ranked or [("", 0.0)]
            parts += [f"{escape_unprintable(label)}\t{value:.4f}" for label, value in ranked]
        if self.score is not None:
            parts.append(f"{self.score:.3f}")
        return "\t".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that the model has, as JSON values."""
        values = {
            "label": self.label,
            "probabilities": self.probabilities,
            "score": self.score,
            "notes": list(self.notes) or None,
        }
        return {name: value for name, value in values.items() if value is not None}


class PairExplanation(NamedTuple):
    """Co-attention of a pair: which words of the other sentence each word attended to."""

    prediction: PairPrediction
    first: list[str]  # T words
    second: list[str]  # S words
    first_weights: Tensor  # (T, S); a row sums to 1
    second_weights: Tensor  # (S, T)

    def to_dict(self) -> dict[str, Any]:
        """Return words and weights as JSON values."""
        return {
            **self.prediction.to_dict(),
            "first": self.first,
            "second": self.second,
            "first_weights": self.first_weights.tolist(),
            "second_weights": self.second_weights.tolist(),
        }

    def to_text(self) -> str:
        """Return each word with the word that it attended to most, one per line."""
        lines = [self.prediction.to_line()]
        for words, others, weights in (
            (self.first, self.second, self.first_weights),
            (self.second, self.first, self.second_weights),
        ):
            lines.append("")
            best = weights.max(dim=1)
            lines += [
                f"{word}\t{others[index]}\t{weight:.2f}"
                for word, index, weight in zip(
                    words, best.indices.tolist(), best.values.tolist(), strict=True
                )
            ]
        return "\n".join(lines)


class PairClassifier(Predictor[InputPair, EncodedPair, PairPrediction]):
    """Predicts for pairs: `PairClassifier.load("dir").predict([("A man sleeps.", "He runs.")])`."""

    task_name = "pairs"
    record_fields = ("text_field", "second_field")
    task: PairsTask

    @property
    def has_alternatives(self) -> bool:
        """Whether the model was trained with labels."""
        return self.task.text.labels is not None

    def read_record(
        self, record: Record, *, text_field: str = "", second_field: str = ""
    ) -> InputPair:
        """Return the pair in a record: a line with a tab between the sentences, or two fields."""
        if set(record.fields) == {TEXT} and not text_field:
            line = str(record.fields[TEXT])
            if not line.strip():
                return "", ""
            first, *others = line.split("\t")
            if len(others) != 1:
                raise record.error(
                    "must have two sentences with a tab in between",
                    f"{len(others) + 1} columns in {line!r}" if others else repr(line),
                    "remove the others" if others else "add the second",
                )
            return first, others[0]
        pairs = self.config.pairs
        trained = (pairs.first_field, pairs.second_field)
        first, second = (
            wanted or (name if name in record.fields else "")
            for wanted, name in zip((text_field, second_field), trained, strict=True)
        )
        option = "--text-field"
        first, second = find_pair_fields(record, first, second, settings=(option, option))
        return record.text(first), record.text(second)

    def check_inputs(self, inputs: Iterable[Any]) -> Iterable[InputPair]:
        """Raise DataError for what is not an iterable of pairs."""
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Iterable):
            raise DataError(
                "inputs must be a list of pairs",
                found=f"{inputs!r:.80}",
                fix='write [("one", "other")]',
            )
        return inputs

    def size(self, example: InputPair) -> int:
        """Return the characters of both sentences."""
        texts = example if isinstance(example, (tuple, list)) else ()
        return sum(len(text) for text in texts if isinstance(text, str))

    def encode(self, inputs: Sequence[InputPair]) -> list[EncodedPair]:
        """Return pairs of token ids; raise DataError for inputs that are not pairs of texts."""
        for each in inputs:
            if (
                not isinstance(each, (tuple, list))
                or len(each) != 2
                or not all(isinstance(text, str) for text in each)
            ):
                raise DataError(
                    "an input must be a pair of texts",
                    found=f"{each!r:.80}",
                    fix='write ("one", "other")',
                )
        return [self.task.encode_pair(first, second) for first, second in inputs]

    def length(self, encoded: EncodedPair) -> int:
        """Return the padded tokens of a pair."""
        return 2 * max(map(len, encoded.tokens))

    def predict_batch(
        self, model: nn.Module, encoded: Sequence[EncodedPair], device: torch.device
    ) -> list[PairPrediction]:
        """Return the predictions of a batch; a pair with an empty sentence has no label."""
        batch = self.task.batch_pairs(encoded).to(device)
        output: PairOutput = model(batch.token_ids, batch.flags, batch.lengths)
        for each in (output.labels, output.score):
            if each is not None:
                check_finite_outputs(each)
        labels, scores = list[dict[str, Any]](), list[dict[str, Any]]()
        if output.labels is not None and self.task.text.labels is not None:
            names = self.task.text.labels.names
            for row in output.labels.float().softmax(dim=1).tolist():
                best = max(range(len(row)), key=row.__getitem__)
                labels.append(
                    {"label": names[best], "probabilities": dict(zip(names, row, strict=True))}
                )
        if output.score is not None:
            expected = expected_score(output.score, self.task.min_score).tolist()
            scores = [{"score": score} for score in expected]
        nothing: list[dict[str, Any]] = [{}] * len(encoded)
        unlabeled: dict[str, Any] = {"label": "", "probabilities": {}} if labels else {}
        return [
            PairPrediction(**unlabeled, notes=(EMPTY_NOTE,))
            if each.is_empty
            else PairPrediction(**one, **other)
            for each, one, other in zip(encoded, labels or nothing, scores or nothing, strict=True)
        ]

    def task_input(self, example: InputPair) -> TaskExplainer:  # type: ignore[override]
        """Return a pair to be explained."""
        from dragoman.explain.task_explainers.sentence_pair_classifier import ComparedPair

        assert isinstance(self.model, PairModel), "the model of a bundle of pairs"
        if isinstance(example, str) and "\t" in example:
            [example] = self.read_arguments([example])
        self._check_words(example)
        return ComparedPair(self.model, self.task, *example)

    def _check_words(self, example: InputPair) -> EncodedPair:
        """Return an encoded pair to be explained; raise DataError if a sentence has no words."""
        [encoded] = self.encode([example])
        if encoded.is_empty:
            raise DataError(
                "both sentences of a pair to explain must hold words",
                found=f"{example!r:.80}",
                fix="pass two sentences with words",
            )
        return encoded

    def repeat_input(self, request: Mapping[str, Any]) -> TaskExplainer:
        """Return the pair of an explanation."""
        return self.task_input((request["first"], request["second"]))

    def explain_words(self, example: InputPair) -> PairExplanation:
        """Return the prediction and the co-attention weights of one pair."""
        if self.config.pairs.interaction not in ("co_attention", "decomposable"):
            raise ConfigError(
                [
                    "--explain shows co-attention, and needs a model that has it; found "
                    f"pairs.interaction={self.config.pairs.interaction}; leave it out"
                ]
            )
        check_unicode(example)
        encoded = self._check_words(example)
        paths = ["interaction.cross.a", "interaction.cross.b"]
        with torch.inference_mode(), record_attention(self.model, paths) as records:
            (prediction,) = self.predict_batch(self.model, [encoded], self.device)
        first, second = self.task.words(example[0]), self.task.words(example[1])
        weights = [records[path].weights[0, 0].float().cpu() for path in paths]
        return PairExplanation(
            prediction,
            first,
            second,
            weights[0][: len(first), : len(second)],
            weights[1][: len(second), : len(first)],
        )
