"""The preprocessor of classification, fitted on training records: vocabulary, labels, n-grams.

Texts are tokenized here, and split into sentences for hierarchical models.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.config import Config
from dragoman.config.root_config import file_names
from dragoman.data.labeled_records import Record, find_label_field, find_text_field, open_records
from dragoman.errors import BundleError, ConfigError, DataError
from dragoman.tasks.non_translation_task import (
    ReadRecords,
)
from dragoman.text.ngram_features import NgramTable, log_count_ratios
from dragoman.text.sentence_splitter import split_sentences
from dragoman.text.vocabulary_and_labels import (
    Labels,
    Vocabulary,
    build_vocabulary,
    normalize_text,
    split_words,
)
from dragoman.text.word_vectors import WordVectors, read_word_vectors

if TYPE_CHECKING:
    pass

_BREAK = re.compile(r"<br\s*/?>")
FEATURES_FORMAT = 1
MAX_NGRAM_WEIGHTS = 50_000_000  # one for each n-gram and label

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ClassificationPreprocessor:
    """Vocabulary, labels and features that were learned from the training records."""

    vocabulary: Vocabulary
    labels: Labels
    multi_label: bool
    label_counts: tuple[int, ...]  # training examples of each label
    examples: int  # training examples
    auxiliary: Labels | None = None
    attributes: Labels | None = None
    ngrams: NgramTable | None = None
    sentence_end: str = ""  # the token that ends a sentence; "" for punctuation
    vector_widths: tuple[int, ...] = ()
    frozen_widths: tuple[int, ...] = ()
    # Initial values of a new model; a loaded one has them among its weights.
    vectors: tuple[WordVectors, ...] = field(default=(), repr=False)
    ngram_ratios: NDArray[np.float32] | None = field(default=None, repr=False)

    @classmethod
    def fit(cls, config: Config, records: ReadRecords) -> ClassificationPreprocessor:
        """Return vocabulary, labels, n-grams and word vectors of the training records."""
        if problems := text_problems(config):
            raise ConfigError(problems)
        classify = config.classify
        targets = TargetReader(config)
        counts: Counter[str] = Counter()
        frequent = classify.sentence_end == "second_most_frequent"
        num_tokens = 0

        def tokenized() -> Iterator[list[str]]:
            nonlocal num_tokens
            for record in records():
                targets.read(record)
                tokens = tokenize(config, record.text(targets.text_field(record)))
                num_tokens += len(tokens)
                if frequent:
                    counts.update(lowercased(config, tokens))
                yield tokens

        vocabulary = (
            _consume(tokenized(), Vocabulary.of_bytes())
            if config.text.tokenizer == "bytes"
            else build_vocabulary(tokenized(), config.text)
        )
        if config.data.hold_out and not config.data.valid:
            # A label may occur only in the examples that are held out of the training files.
            for record in open_records(config, file_names(config.data.train))():
                targets.add_names(record)
        targets.check(config)
        if not num_tokens:
            raise DataError(
                "the training texts must have words",
                found=f"none in {targets.examples:,} examples",
                fix="check data.text_field",
            )
        text = cls(
            vocabulary=vocabulary,
            labels=targets.labels(),
            multi_label=targets.multi_label,
            label_counts=(),
            examples=targets.examples,
            auxiliary=Labels.build(targets.auxiliary) if classify.auxiliary_field else None,
            attributes=Labels.build(targets.attributes) if classify.attribute_field else None,
            sentence_end=_second_most_frequent(counts) if frequent else "",
        )
        text.label_counts = tuple(targets.counts[name] for name in text.labels.names)
        if classify.ngrams:
            _fit_ngrams(config, text, records)
        _read_vectors(config, text)
        return text

    @classmethod
    def load(cls, config: Config, files: Mapping[str, bytes]) -> ClassificationPreprocessor:
        """Return what `to_files` wrote; raise BundleError for a file that is not valid."""
        described = _read_features(files["features.json"])
        labels = Labels.from_bytes(files["labels.json"], "text/labels.json")
        text = cls(
            vocabulary=Vocabulary.from_bytes(files["words.json"], "text/words.json"),
            labels=labels,
            multi_label=described["multi_label"],
            label_counts=tuple(described["label_counts"]),
            examples=described["examples"],
            sentence_end=described["sentence_end"],
            vector_widths=tuple(described["vector_widths"]),
            frozen_widths=tuple(described["frozen_widths"]),
        )
        if len(text.label_counts) != len(labels):
            raise BundleError(
                f"text/features.json must count the {len(labels)} labels of text/labels.json",
                found=f"{len(text.label_counts)} counts",
                fix="copy the model directory again",
            )
        if config.classify.auxiliary_field:
            text.auxiliary = Labels.from_bytes(files["auxiliary.json"], "text/auxiliary.json")
        if config.classify.attribute_field:
            text.attributes = Labels.from_bytes(files["attributes.json"], "text/attributes.json")
        if config.classify.ngrams:
            text.ngrams = NgramTable.from_bytes(
                files["ngrams.npy"], "text/ngrams.npy", order=config.classify.ngrams
            )
        return text

    def to_files(self) -> dict[str, bytes]:
        """Return the files of a bundle's text/ folder."""
        described = {
            "format": FEATURES_FORMAT,
            "multi_label": self.multi_label,
            "label_counts": list(self.label_counts),
            "examples": self.examples,
            "sentence_end": self.sentence_end,
            "vector_widths": list(self.vector_widths),
            "frozen_widths": list(self.frozen_widths),
        }
        files = {
            "words.json": self.vocabulary.to_bytes(),
            "labels.json": self.labels.to_bytes(),
            "features.json": (json.dumps(described, ensure_ascii=False) + "\n").encode(),
        }
        if self.auxiliary is not None:
            files["auxiliary.json"] = self.auxiliary.to_bytes()
        if self.attributes is not None:
            files["attributes.json"] = self.attributes.to_bytes()
        if self.ngrams is not None:
            files["ngrams.npy"] = self.ngrams.to_bytes()
        return files


class TokenizedDocument(NamedTuple):
    """The tokens of a text as the model reads them."""

    sentences: list[list[str]]  # of a model that is not hierarchical, one

    @property
    def tokens(self) -> list[str]:
        """All tokens in order."""
        return [token for sentence in self.sentences for token in sentence]


def text_problems(config: Config) -> list[str]:
    """Return the problems of the `text` settings: classification has its own tokenizers."""
    if config.text.tokenizer in ("words", "characters", "bytes"):
        return []
    return [
        "text.tokenizer must be words, characters or bytes for classification; found "
        f"{config.text.tokenizer}; set text.tokenizer=words"
    ]


def tokenize_text(config: Config, text: str, sentence_end: str = "") -> TokenizedDocument:
    """Return the tokens of a text as the model reads them; long sentences are split."""
    left = config.data.max_length
    if not config.classify.hierarchical:
        return TokenizedDocument([tokenize(config, text)[:left]])
    most = config.classify.max_sentence_words
    sentences = []
    for sentence in split_document(config, text, sentence_end):
        kept = sentence[:left]
        left -= len(kept)
        sentences += [kept[start : start + most] for start in range(0, len(kept), most)]
    return TokenizedDocument(sentences)


def tokenize(config: Config, text: str) -> list[str]:
    """Return the tokens of a text, not yet in lower case."""
    text = normalize_text(text, config.text.normalization)
    if config.text.tokenizer == "characters":
        return [character for character in text if not character.isspace()]
    if config.text.tokenizer == "bytes":
        return [f"<0x{byte:02X}>" for byte in text.encode(errors="surrogatepass")]
    return split_words(text)


def lowercased(config: Config, tokens: list[str]) -> list[str]:
    """Return tokens in lower case if the vocabulary is."""
    return [token.lower() for token in tokens] if config.text.lowercase else tokens


def split_document(config: Config, text: str, sentence_end: str = "") -> Iterator[list[str]]:
    """Yield the sentences of a text as tokens; empty ones are left out.

    A sentence ends at punctuation and at line breaks, `<br />` included. With a `sentence_end` it
    ends after that token: anonymised text has no punctuation to go by.
    """
    if sentence_end:
        sentence: list[str] = []
        for token in tokenize(config, text):
            sentence.append(token)
            if (token.lower() if config.text.lowercase else token) == sentence_end:
                yield sentence
                sentence = []
        if sentence:
            yield sentence
        return
    for paragraph in _BREAK.split(text):
        for line in paragraph.splitlines():
            for part in split_sentences(line).texts:
                if tokens := tokenize(config, part):
                    yield tokens


class TargetReader:
    """Finds the fields of records, and collects their labels."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._fields: dict[Any, tuple[str, str]] = {}
        self.counts: Counter[str] = Counter()
        self.auxiliary: set[str] = set()
        self.attributes: set[str] = set()
        self.examples = 0
        self.multi_label = config.classify.multi_label == "on"

    def text_field(self, record: Record) -> str:
        """Return the field with the text."""
        key = ("text", record.file)
        if key not in self._fields:
            self._fields[key] = (find_text_field(record, self._config.data.text_field), "")
        return self._fields[key][0]

    def label_field(self, record: Record) -> str:
        """Return the field with the label."""
        key = ("label", record.file)
        if key not in self._fields:
            used = (self.text_field(record),)
            field = find_label_field(record, self._config.data.label_field, used=used)
            self._fields[key] = (field, "")
        return self._fields[key][0]

    def label_names(self, record: Record) -> list[str]:
        """Return the labels of a record; one unless the data are multi-label."""
        name = self.label_field(record)
        names = record.labels(name)
        if self._config.classify.multi_label == "off" and len(names) != 1:
            raise record.error(
                f"must have one label in {name!r}, for classify.multi_label=off",
                f"{len(names)} labels",
                "set classify.multi_label=on",
            )
        return names

    def read(self, record: Record) -> None:
        """Collect and count the labels of a training record."""
        self.add_names(record)
        self.counts.update(set(self.label_names(record)))
        self.examples += 1

    def add_names(self, record: Record) -> None:
        """Collect the labels of a record without counting them."""
        if isinstance(record.value(self.label_field(record)), list):
            self.multi_label |= self._config.classify.multi_label == "auto"
        for name in self.label_names(record):
            self.counts[name] += 0
        classify = self._config.classify
        if classify.auxiliary_field:
            self.auxiliary.add(record.label(classify.auxiliary_field))
        if classify.attribute_field and record.fields.get(classify.attribute_field) is not None:
            self.attributes.update(record.labels(classify.attribute_field))

    def labels(self) -> Labels:
        """Return all labels."""
        return Labels.build(self.counts)

    def check(self, config: Config) -> None:
        """Raise DataError for too few labels, or for an attribute field without attributes."""
        least = 1 if self.multi_label else 2
        if len(self.counts) < least:
            raise DataError(
                f"the training data must have at least {least} labels",
                found=f"{len(self.counts)} in {self.examples:,} examples",
                fix="check data.train and data.label_field",
            )
        if empty := self.counts[""]:
            logger.warning(
                "%s of %s training examples have an empty label, which is learned as one more "
                "label; leave them out, or label them",
                f"{empty:,}",
                f"{self.examples:,}",
            )
        spaced = [name for name in sorted(self.counts) if name.strip() != name]
        if alike := [name for name in spaced if name.strip() in self.counts]:
            logger.warning(
                "labels that differ in white space only are learned as different ones: %r and %r; "
                "write them alike",
                alike[0],
                alike[0].strip(),
            )
        if config.classify.attribute_field and not self.attributes:
            raise DataError(
                "the training data must have attributes",
                found=f"none in the field {config.classify.attribute_field!r}",
                fix="check classify.attribute_field",
            )


def _second_most_frequent(counts: Counter[str]) -> str:
    """Return the second most frequent token, ties in order of code points."""
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    if len(ranked) < 2:
        raise DataError(
            "classify.sentence_end=second_most_frequent needs at least two different tokens",
            found=str(len(ranked)),
            fix="set classify.sentence_end=punctuation",
        )
    return ranked[1]


def _consume(tokens: Iterable[list[str]], vocabulary: Vocabulary) -> Vocabulary:
    """Run through the records, whose labels are collected, and return a fixed vocabulary."""
    for _ in tokens:
        pass
    return vocabulary


def _fit_ngrams(config: Config, text: ClassificationPreprocessor, records: ReadRecords) -> None:
    """Build the table of n-grams, and their naive-Bayes ratios."""
    classify = config.classify
    targets = TargetReader(config)

    def tokens(record: Record) -> list[str]:
        found = tokenize_text(config, record.text(targets.text_field(record)), text.sentence_end)
        return lowercased(config, found.tokens)

    text.ngrams = NgramTable.build(
        (tokens(record) for record in records()),
        order=classify.ngrams,
        max_size=min(classify.ngram_features, max(1, MAX_NGRAM_WEIGHTS // len(text.labels))),
        min_count=classify.ngram_min_count,
    )
    if classify.ngram_weights != "naive_bayes":
        return
    features = []
    member = np.zeros((text.examples, len(text.labels)), np.bool_)
    for row, record in enumerate(records()):
        features.append(text.ngrams.count(tokens(record)).ids)
        member[row, [text.labels.index(name) for name in targets.label_names(record)]] = True
    text.ngram_ratios = log_count_ratios(features, member, len(text.ngrams))


def _read_vectors(config: Config, text: ClassificationPreprocessor) -> None:
    """Read the files of word vectors for the words of the vocabulary."""
    ids = {token: number for number, token in enumerate(text.vocabulary.tokens)}
    read = [
        [read_word_vectors(path, ids, lowercase=config.text.lowercase) for path in paths]
        for paths in (config.classify.vectors, config.classify.frozen_vectors)
    ]
    text.vector_widths, text.frozen_widths = (
        tuple(each.width for each in vectors) for vectors in read
    )
    text.vectors = (*read[0], *read[1])


def _read_features(data: bytes) -> dict[str, Any]:
    """Read features.json; raise BundleError unless every field is of its type."""
    kinds = {
        "multi_label": bool,
        "label_counts": list,
        "examples": int,
        "sentence_end": str,
        "vector_widths": list,
        "frozen_widths": list,
    }
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(
            "text/features.json must be JSON",
            found=f"{error}"[:120],
            fix="copy the model directory again",
        ) from error
    if not isinstance(found, dict) or found.get("format") != FEATURES_FORMAT:
        raise BundleError(
            f"text/features.json must have format {FEATURES_FORMAT}",
            found=f"{found!r:.80}",
            fix="use the dragoman that wrote it",
        )
    for name, kind in kinds.items():
        value = found.get(name)
        numbers = isinstance(value, list) and all(
            type(each) is int and 0 <= each < 1 << 32 for each in value
        )
        if type(value) is not kind or (kind is list and not numbers):
            raise BundleError(
                f"text/features.json must have a valid {name!r}",
                found=f"{value!r:.80}",
                fix="copy the model directory again",
            )
    return found
