"""The preprocessor of tagging, fitted on training sentences: vocabularies, features, label sets."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.config.root_config import Config
from dragoman.config.tagging import FREQUENCY_TARGET, TagConfig
from dragoman.errors import BundleError, DataError
from dragoman.text.special_tokens import SPECIAL_TOKENS
from dragoman.text.tag_schemes import (
    OUTSIDE,
    SCHEMES,
    SchemeDetector,
    convert_tags,
    split_tag,
    write_word_tags,
)
from dragoman.text.vocabulary_and_labels import Labels, Vocabulary, build_vocabulary, normalize_text
from dragoman.text.word_vectors import WordVectors, read_word_vectors

logger = logging.getLogger(__name__)

PLAIN = "plain"
UNKNOWN = "<unknown>"  # type or label that training did not have
MAX_CHARACTER_KINDS = 20_000
MAX_FEATURE_VALUES = 500_000
MIN_FEATURE_COUNT = 2  # a feature value that occurs once only serves to train <unk>
_DIGIT = re.compile(r"\d")
_AFFIX = re.compile(r"(prefix|suffix)([1-9])")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggedSentence:
    """Tokens with their tags, further input column and auxiliary targets, where there are any."""

    tokens: Sequence[str]
    tags: Sequence[str] = ()
    column: Sequence[str] = ()
    auxiliary: Mapping[str, Sequence[str]] = field(default_factory=dict)


def word_shape(word: str) -> str:
    """Return a word's shape, with runs shortened to two: "Xx" for "The", "dd.d" for "1995.5"."""
    shape: list[str] = []
    for character in word:
        if character.isdigit():
            kind = "d"
        elif character.isalpha():
            kind = "X" if character.isupper() or character.istitle() else "x"
        else:
            kind = character
        if shape[-2:] != [kind, kind]:
            shape.append(kind)
    return "".join(shape[:10])


def token_feature(name: str, tokens: Sequence[str], position: int) -> str:
    """Return the value of one of `TOKEN_FEATURES` for a token."""
    word = tokens[position]
    if affix := _AFFIX.fullmatch(name):
        length = int(affix[2])
        return word[:length] if affix[1] == "prefix" else word[-length:]
    if name == "shape":
        return word_shape(word)
    if name == "previous_bigram":
        return (tokens[position - 1] if position else SPECIAL_TOKENS[1]) + word
    after = tokens[position + 1] if position + 1 < len(tokens) else SPECIAL_TOKENS[2]
    return word + after


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggingPreprocessor:
    """Vocabularies and label sets of a tagger, and how a sentence becomes ids."""

    config: TagConfig
    normalization: str
    words: Vocabulary
    characters: Vocabulary
    features: tuple[Vocabulary, ...]  # of the input column, if any, then of tag.features
    labels: Labels  # tags as they are trained: IOBES or BMES, or plain labels
    scheme: str  # of the training files
    auxiliary: Mapping[str, Labels]
    frequencies: tuple[int, ...]  # class of each word of the vocabulary, for Plank et al. (2016)
    # Of tag.vectors, for a new model; a bundle has them in its weights.
    vectors: WordVectors | None = field(default=None, repr=False, compare=False)

    @classmethod
    def build(cls, config: Config, sentences: Sequence[TaggedSentence]) -> TaggingPreprocessor:
        """Learn vocabularies, the tag scheme and label sets from the training sentences."""
        tag, form = config.tag, config.text.normalization
        normal = [[normalize_text(word, form) for word in each.tokens] for each in sentences]
        spelled = [[_word_key(word, tag) for word in tokens] for tokens in normal]
        words = build_vocabulary(spelled, config.text)
        characters = Vocabulary.build(
            ("".join(tokens) for tokens in normal), max_size=MAX_CHARACTER_KINDS
        )
        columns = [[each.column for each in sentences]] if tag.input_field else []
        columns += [
            [[token_feature(name, row, at) for at in range(len(row))] for row in normal]
            for name in tag.features
        ]
        scheme = _find_scheme(tag, sentences)
        return cls(
            config=tag,
            normalization=form,
            words=words,
            characters=characters,
            features=tuple(
                Vocabulary.build(column, max_size=MAX_FEATURE_VALUES, min_count=MIN_FEATURE_COUNT)
                for column in columns
            ),
            labels=_build_labels(scheme, sentences),
            scheme=scheme,
            auxiliary={
                name: Labels.build(label for each in sentences for label in each.auxiliary[name])
                for name in tag.auxiliary_fields
                if name != FREQUENCY_TARGET
            },
            frequencies=_frequency_classes(words, spelled)
            if FREQUENCY_TARGET in tag.auxiliary_fields
            else (),
            vectors=_read_vectors(tag, words) if tag.vectors else None,
        )

    @property
    def trained_scheme(self) -> str:
        """The scheme of the labels: IOBES for spans, BMES for words."""
        return self.scheme if self.scheme in (PLAIN, "bmes") else "iobes"

    @property
    def auxiliary_sizes(self) -> dict[str, int]:
        """The number of classes of each auxiliary target, in the order of the setting."""
        return {
            name: max(self.frequencies) + 1
            if name == FREQUENCY_TARGET
            else len(self.auxiliary[name])
            for name in self.config.auxiliary_fields
        }

    @property
    def feature_size(self) -> int:
        """The size of the table that all features share."""
        return sum(len(vocabulary) for vocabulary in self.features)

    @property
    def names(self) -> tuple[str, ...]:
        """The tags by id: the labels, then those that stand for tags not seen in training."""
        extra = (
            [UNKNOWN]
            if self.trained_scheme == PLAIN
            else [f"{prefix}-{UNKNOWN}" for prefix in "BIES"]
        )
        return (*self.labels.names, *extra)

    def word_ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the ids of words."""
        return self.words.ids(_word_key(word, self.config) for word in self._normal(tokens))

    def character_ids(self, tokens: Sequence[str]) -> NDArray[np.int32]:
        """Return the characters of words, (T, tag.max_characters), padded by 0."""
        most = self.config.max_characters
        found = np.zeros((len(tokens), most), np.int32)
        for row, word in enumerate(self._normal(tokens)):
            if len(word) > most:
                word = word[: (most + 1) // 2] + word[-(most // 2) :]
            found[row, : len(word)] = self.characters.ids(word)
        return found

    def feature_ids(self, sentence: TaggedSentence) -> NDArray[np.int32]:
        """Return the features of tokens (T, F) as ids of their common table."""
        tokens = self._normal(sentence.tokens)
        columns = [sentence.column] if self.config.input_field else []
        columns += [
            [token_feature(name, tokens, at) for at in range(len(tokens))]
            for name in self.config.features
        ]
        found = np.zeros((len(tokens), len(columns)), np.int32)
        first = 0
        for index, (vocabulary, column) in enumerate(zip(self.features, columns, strict=True)):
            found[:, index] = np.asarray(vocabulary.ids(column), np.int32) + first
            first += len(vocabulary)
        return found

    def tag_ids(self, tags: Sequence[str]) -> list[int]:
        """Return the ids of tags, which are converted to the trained scheme.

        Unknown tags have ids past the labels, as in `names`.
        """
        known = len(self.labels)
        if self.trained_scheme == PLAIN:
            return [self.labels.index(tag) if tag in self.labels else known for tag in tags]
        return [
            self.labels.index(tag)
            if tag in self.labels
            else known + "BIES".index(split_tag(tag)[0])
            for tag in convert_tags(tags, self.trained_scheme)
        ]

    def knows_tag(self, tag: str) -> bool:
        """Whether training had a tag, or a span of its type."""
        prefix, kind = split_tag(tag)
        is_span = self.trained_scheme == "iobes" and kind
        return (f"{prefix}-{kind}" if is_span else tag) in self.labels

    def tags_of(self, ids: Sequence[int]) -> list[str]:
        """Return the tags of ids in the scheme of the training files."""
        names = self.names
        tags = [names[each] for each in ids]
        return tags if self.scheme == PLAIN else convert_tags(tags, self.scheme)

    def auxiliary_ids(self, sentence: TaggedSentence) -> NDArray[np.int32]:
        """Return the auxiliary targets (T, A); -1 where a value was not seen in training."""
        columns = [
            [self.frequencies[word] for word in self.word_ids(sentence.tokens)]
            if name == FREQUENCY_TARGET
            else [
                self.auxiliary[name].index(value) if value in self.auxiliary[name] else -1
                for value in sentence.auxiliary[name]
            ]
            for name in self.config.auxiliary_fields
        ]
        return np.asarray(columns, np.int32).reshape(len(columns), len(sentence.tokens)).T

    def _normal(self, tokens: Sequence[str]) -> list[str]:
        return [normalize_text(word, self.normalization) for word in tokens]

    def to_files(self) -> dict[str, bytes]:
        """Return the files of a bundle's text/ folder."""
        rest = {
            "format": 1,
            "scheme": self.scheme,
            "features": [list(vocabulary.tokens) for vocabulary in self.features],
            "auxiliary": {name: list(labels.names) for name, labels in self.auxiliary.items()},
            "frequencies": list(self.frequencies),
        }
        return {
            "words.json": self.words.to_bytes(),
            "characters.json": self.characters.to_bytes(),
            "labels.json": self.labels.to_bytes(),
            "tagging.json": (json.dumps(rest, ensure_ascii=False) + "\n").encode(),
        }

    @classmethod
    def from_files(cls, config: Config, files: Mapping[str, bytes]) -> TaggingPreprocessor:
        """Read what `to_files` wrote; raise BundleError if a file is missing or not valid."""
        tag = config.tag
        words = Vocabulary.from_bytes(_file(files, "words.json"), "words.json")
        try:
            rest = json.loads(_file(files, "tagging.json"))
            features = tuple(Vocabulary(_texts(each)) for each in rest["features"])
            auxiliary = {name: Labels(_texts(each)) for name, each in rest["auxiliary"].items()}
            frequencies = tuple(rest["frequencies"])
            is_valid = (
                rest["format"] == 1
                and rest["scheme"] in SCHEMES
                and len(features) == bool(tag.input_field) + len(tag.features)
                and all(each.tokens[:4] == SPECIAL_TOKENS for each in features)
                and set(auxiliary) == set(tag.auxiliary_fields) - {FREQUENCY_TARGET}
                and len(frequencies)
                == (len(words) if FREQUENCY_TARGET in tag.auxiliary_fields else 0)
                and all(type(each) is int and 0 <= each < 64 for each in frequencies)
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            is_valid = False
        if not is_valid:
            raise BundleError(
                "tagging.json must have the scheme, features and auxiliary labels that "
                "config.json describes",
                found=f"{files['tagging.json'][:80]!r}",
                fix="copy the model directory again",
            )
        return cls(
            config=tag,
            normalization=config.text.normalization,
            words=words,
            characters=Vocabulary.from_bytes(_file(files, "characters.json"), "characters.json"),
            features=features,
            labels=Labels.from_bytes(_file(files, "labels.json"), "labels.json"),
            scheme=rest["scheme"],
            auxiliary=auxiliary,
            frequencies=frequencies,
        )


def segment_tags(words: Sequence[str]) -> TaggedSentence:
    """Return the characters of words as tokens, with BMES tags."""
    return TaggedSentence(tokens=list("".join(words)), tags=write_word_tags(words))


def _word_key(word: str, tag: TagConfig) -> str:
    """Return the form of a word that its embedding belongs to; the vocabulary lowercases it."""
    return _DIGIT.sub("0", word) if tag.normalize_digits else word


def _find_scheme(tag: TagConfig, sentences: Iterable[TaggedSentence]) -> str:
    """Return the tag scheme of the files, as configured or detected."""
    if tag.segmentation:
        return "bmes"
    if tag.scheme != "auto":
        return tag.scheme
    detector = SchemeDetector()
    for sentence in sentences:
        detector.add(sentence.tags)
    scheme = detector.scheme()
    if scheme == PLAIN and (wrong := detector.misfits()):
        logger.warning(
            "the tags are learned as labels without spans, because of those without a prefix and a "
            "type: %s; correct them (--set tag.scheme=iob2 names the first line), or set "
            "tag.scheme=plain",
            ", ".join(map(repr, wrong[:5])) + (", …" if len(wrong) > 5 else ""),
        )
    return scheme


def _build_labels(scheme: str, sentences: Iterable[TaggedSentence]) -> Labels:
    """Return the labels to be trained: of spans, all prefixes of every type that occurs."""
    seen = {tag for each in sentences for tag in each.tags}
    if scheme == PLAIN:
        return Labels.build(seen)
    if scheme == "bmes":
        return Labels(["B", "M", "E", "S"])
    types = sorted({split_tag(tag)[1] for tag in seen if tag != OUTSIDE})
    return Labels([OUTSIDE, *(f"{prefix}-{kind}" for kind in types for prefix in "BIES")])


def _frequency_classes(words: Vocabulary, sentences: Iterable[Iterable[str]]) -> tuple[int, ...]:
    """Return int(log(count)) of each word of a vocabulary; 0 for those that do not occur."""
    counts: Counter[int] = Counter()
    for sentence in sentences:
        counts.update(words.ids(sentence))
    return tuple(int(math.log(max(counts[word], 1))) for word in range(len(words)))


def _read_vectors(tag: TagConfig, words: Vocabulary) -> WordVectors:
    """Return the pre-trained vectors of the words; raise DataError if their width is another."""
    ids = {word: number for number, word in enumerate(words.tokens)}
    vectors = read_word_vectors(tag.vectors, ids, lowercase=words.lowercase)
    if vectors.width != tag.word_width:
        raise DataError(
            f"the vectors of {tag.vectors} must have tag.word_width={tag.word_width} dimensions",
            found=f"{vectors.width}",
            fix=f"set tag.word_width={vectors.width}",
        )
    return vectors


def _file(files: Mapping[str, bytes], name: str) -> bytes:
    """Return a file of the text/ folder; raise BundleError if it is missing."""
    if name not in files:
        raise BundleError(
            f"a tagger's text/ folder must have {name}",
            found=", ".join(sorted(files)[:8]) or "nothing",
            fix="copy the model directory again",
        )
    return files[name]


def _texts(values: Any) -> list[str]:
    """Return a list of distinct texts; raise ValueError if it is none."""
    is_list = isinstance(values, list) and bool(values)
    if (
        is_list
        and all(isinstance(each, str) for each in values)
        and len(set(values)) == len(values)
    ):
        return list(values)
    raise ValueError(f"{values!r:.60}")
