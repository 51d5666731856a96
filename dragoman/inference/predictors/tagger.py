"""Tagger: a tag for every token of a sentence, the spans that tags form, or a text's words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from dragoman.data.in_memory_examples import InMemoryExamples
from dragoman.data.labeled_records import Record
from dragoman.errors import DataError
from dragoman.inference.predictors.base import Predictor
from dragoman.inference.translation_result import truncate_repr
from dragoman.models.tagger import TaggingModel
from dragoman.tasks.tagging_preprocessor import PLAIN, TaggedSentence
from dragoman.text.sentencepiece_tokenizer import replace_control_chars
from dragoman.text.tag_schemes import find_spans
from dragoman.text.vocabulary_and_labels import split_words

if TYPE_CHECKING:
    from dragoman.explain.task_explainers.base import TaskExplainer
    from dragoman.tasks.tagging import TaggingTask

EMPTY_NOTE = "the text has no tokens: there is nothing to tag"
# Tokens that are tagged together. Of a longer input each part is tagged by itself: the time and
# memory of self-attention grow with the square of the length.
MAX_TOKENS = 1024
TaggerInput = str | Sequence[str] | TaggedSentence
"""A text, its tokens, or tokens with the further column that the model reads.

The last may be given as a dictionary too, with the fields of a JSONL file.
"""


class TaggedSpan(NamedTuple):
    """Tokens from `start` up to, but not including, `end`, that form a chunk or an entity."""

    start: int
    end: int
    type: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagging:
    """The prediction of one sentence."""

    text: str  # as given; tokens joined by spaces if they were given
    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    probabilities: tuple[float, ...]  # of each tag, given the sentence
    spans: tuple[TaggedSpan, ...] = ()
    words: tuple[str, ...] | None = None  # of a model for word segmentation
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the text and the number of tags in one line."""
        return f"Tagging({truncate_repr(self.text)}, {len(self.tags)} tags)"

    def to_line(self, *, top: int = 1) -> str:
        """Return `token/TAG` for each token, or the words, separated by spaces."""
        parts = (
            [f"{token}/{tag}" for token, tag in zip(self.tokens, self.tags, strict=True)]
            if self.words is None
            else self.words
        )
        return replace_control_chars(" ".join(parts)).replace("\t", " ")

    def to_dict(self) -> dict[str, Any]:
        """Return tokens, tags, probabilities and spans, or words; six decimals."""
        found: dict[str, Any] = {
            "text": self.text,
            "tokens": list(self.tokens),
            "tags": list(self.tags),
            "probabilities": [round(each, 6) for each in self.probabilities],
        }
        if self.words is None:
            found["spans"] = [span._asdict() for span in self.spans]
        else:
            found["words"] = list(self.words)
        return found | {"notes": list(self.notes)}


class EncodedSentence(NamedTuple):
    """A sentence in the store of its buffer; a long one has several rows."""

    text: str | None  # None if tokens were given
    tokens: Sequence[str]
    store: InMemoryExamples
    rows: range


class Tagger(Predictor[TaggerInput, EncodedSentence, Tagging]):
    """Predicts the tags of texts or of lists of tokens.

    `Tagger.load("my-tagger").predict(["Anna lives in Bonn."])`
    """

    task_name: ClassVar[str] = "tag"
    task: TaggingTask

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of the model, in the scheme that it was trained with."""
        return self.task.text.labels.names

    def read_record(self, record: Record, *, text_field: str = "") -> TaggerInput:
        """Return the sentence of a record: its tokens, or a text to be split into tokens."""
        return self.task.read_input(record, text_field=text_field)

    def iter_inputs(self, inputs: Iterable[Any]) -> Iterator[TaggerInput]:
        """Yield the inputs; raise DataError for the first that is no sentence."""
        for number, given in enumerate(inputs, 1):
            each = given
            if isinstance(given, Mapping):
                each = self.read_record(Record(Path("input"), number, given))
            is_list = isinstance(each, (list, tuple)) and all(isinstance(x, str) for x in each)
            if not (is_list or isinstance(each, (str, TaggedSentence))):
                raise DataError(
                    f"sentence {number} must be a text or a list of tokens",
                    found=f"{type(each).__name__} {each!r:.60}",
                    fix='pass "Anna sleeps." or ["Anna", "sleeps", "."]',
                )
            if is_list and not self.config.tag.segmentation and "" in each:
                raise DataError(
                    f"sentence {number} must have no empty token",
                    found=f"one at position {list(each).index('') + 1}",
                    fix="remove it",
                )
            field = self.config.tag.input_field
            if field and not (isinstance(each, TaggedSentence) and each.column):
                raise DataError(
                    f"this model reads {field!r} of every token, its tag.input_field",
                    found=f"sentence {number} without it",
                    fix=f"pass JSONL or CoNLL with a field {field!r}, or from Python a dictionary "
                    "with its fields",
                )
            yield each

    def size(self, example: TaggerInput) -> int:
        """Return the characters of an input."""
        tokens = example.tokens if isinstance(example, TaggedSentence) else example
        return len(tokens) if isinstance(tokens, str) else sum(map(len, tokens))

    def encode(self, inputs: Sequence[TaggerInput]) -> list[EncodedSentence]:
        """Split texts into tokens and encode all in one store, long ones in parts."""
        parts: list[TaggedSentence] = []
        found: list[tuple[str | None, Sequence[str], range]] = []
        for each in inputs:
            sentence = self._sentence(each)
            tokens, column = sentence.tokens, sentence.column
            starts = range(0, len(tokens), MAX_TOKENS)
            parts += [
                TaggedSentence(
                    tokens=tokens[start : start + MAX_TOKENS],
                    column=column[start : start + MAX_TOKENS],
                )
                for start in starts
            ]
            text = each if isinstance(each, str) else None
            found.append((text, tokens, range(len(parts) - len(starts), len(parts))))
        store = self.task.encode_sentences(parts)
        return [EncodedSentence(text, tokens, store, rows) for text, tokens, rows in found]

    def _sentence(self, each: TaggerInput) -> TaggedSentence:
        """Return the tokens of an input; white space between characters is left out."""
        if isinstance(each, TaggedSentence):
            return each
        if self.config.tag.segmentation:
            joined = each if isinstance(each, str) else "".join(each)
            return TaggedSentence(tokens=[character for character in joined if character.strip()])
        return TaggedSentence(tokens=split_words(each) if isinstance(each, str) else list(each))

    def task_input(self, example: TaggerInput) -> TaskExplainer:  # type: ignore[override]
        """Return a sentence to be explained; of a long one the first part."""
        from dragoman.explain.task_explainers.tagger import TaggedText

        assert isinstance(self.model, TaggingModel), "the model of a tagging bundle"
        [checked] = self.iter_inputs([example])
        sentence = self._sentence(checked)
        is_long = len(sentence.tokens) > MAX_TOKENS
        part = TaggedSentence(
            tokens=sentence.tokens[:MAX_TOKENS], column=sentence.column[:MAX_TOKENS]
        )
        text = checked if isinstance(checked, str) and not is_long else None
        found = TaggedText(self.model, self.task, part, text=text)
        found.num_tokens = len(sentence.tokens)
        return found

    def repeat_input(self, request: Mapping[str, Any]) -> TaskExplainer:
        """Return the sentence of an explanation."""
        from dragoman.explain.task_explainers.tagger import TaggedText

        assert isinstance(self.model, TaggingModel), "the model of a tagging bundle"
        sentence = TaggedSentence(tokens=request["tokens"], column=request.get("column", ()))
        return TaggedText(self.model, self.task, sentence, text=request["text"])

    def length(self, encoded: EncodedSentence) -> int:
        """Return the padded tokens of a sentence."""
        return min(len(encoded.tokens), MAX_TOKENS) * max(1, len(encoded.rows))

    def predict_batch(
        self, model: nn.Module, encoded: Sequence[EncodedSentence], device: torch.device
    ) -> list[Tagging]:
        """Return the tags of a batch of sentences."""
        rows = [row for each in encoded for row in each.rows]
        predictions = (
            iter(
                self.task.predict(
                    model,
                    self.task.collate(encoded[0].store, np.asarray(rows, np.int64)).to(device),
                )
            )
            if rows
            else iter(())
        )
        found = []
        for each in encoded:
            parts = [next(predictions) for _ in each.rows]
            tags = [tag for part in parts for tag in part.tags]
            probabilities = [value for part in parts for value in part.probabilities]
            found.append(self._prediction(each, tags, probabilities))
        return found

    def _prediction(
        self, encoded: EncodedSentence, tags: Sequence[str], probabilities: Sequence[float]
    ) -> Tagging:
        """Return the prediction of a sentence with its spans or words."""
        tokens = encoded.tokens
        notes = [EMPTY_NOTE] * (not tokens)
        if len(encoded.rows) > 1:
            notes.append(f"tagged in {len(encoded.rows)} parts of at most {MAX_TOKENS:,} tokens")
        segmentation = self.config.tag.segmentation
        spans = find_spans(tags) if self.task.text.scheme != PLAIN else []
        joint = "" if segmentation else " "
        text = joint.join(tokens) if encoded.text is None else encoded.text
        extents = _token_extents(encoded.text, tokens) if encoded.text is not None else None
        return Tagging(
            text=text,
            tokens=tuple(tokens),
            tags=tuple(tags),
            probabilities=tuple(probabilities),
            spans=tuple(
                TaggedSpan(
                    *span,
                    joint.join(tokens[span.start : span.end])
                    if extents is None
                    else text[extents[span.start][0] : extents[span.end - 1][1]],
                )
                for span in spans
                if not segmentation
            ),
            words=tuple("".join(tokens[span.start : span.end]) for span in spans)
            if segmentation
            else None,
            notes=tuple(notes),
        )


def _token_extents(text: str, tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return where each token begins and ends in the text that it was split from."""
    found, position = [], 0
    for token in tokens:
        start = text.index(token, position)
        position = start + len(token)
        found.append((start, position))
    return found
