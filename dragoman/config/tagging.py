"""Settings of tagging: each with its default, range and description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dragoman.config.setting_declaration import setting
from dragoman.errors import suggest_name

# Categorical features that are computed from a token and its neighbours.
TOKEN_FEATURES = (
    "shape",
    "prefix2",
    "prefix3",
    "prefix4",
    "suffix1",
    "suffix2",
    "suffix3",
    "suffix4",
    "previous_bigram",
    "next_bigram",
)
# An auxiliary target that is computed from the training data, not read: Plank et al. (2016).
FREQUENCY_TARGET = "frequency"


@dataclass(frozen=True, kw_only=True, slots=True)
class TagConfig:
    """Tagging: fields of the data, inputs of a token, character features and the CRF."""

    # Metrics of validation, besides the loss.
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "f1")
    # Largest sizes of a miniature (`dragoman train --mini`), by setting.
    mini: ClassVar[dict[str, object]] = {
        "word_width": 32,
        "character_width": 16,
        "character_features": 32,
        "max_characters": 16,
        "feature_width": 16,
        "word_dropout": 0.1,
        "input_dropout": 0.1,
        "output_dropout": 0.1,
    }

    token_field: str = setting(
        "", "Field or column with the tokens; detected when empty, such as tokens."
    )
    tag_field: str = setting(
        "", "Field or column with the tags; detected when empty, such as tags or upos."
    )
    input_field: str = setting(
        "", "Field or column that is a further input of each token, such as pos; empty for none."
    )
    auxiliary_fields: tuple[str, ...] = setting(
        (),
        "Fields predicted besides the tags in training (multi-task), such as [xpos, feats]; "
        "frequency is the logarithm of the word's count.",
    )
    auxiliary_weight: float = setting(
        1.0, "Weight of the auxiliary losses.", at_least=0.0, at_most=100.0
    )
    scheme: str = setting(
        "auto",
        "Tag scheme of the files; spans are trained as IOBES. plain: labels without spans.",
        choices=("auto", "plain", "iob1", "iob2", "iobes", "bmes"),
    )
    segmentation: bool = setting(
        False, "Word segmentation: texts with spaces between words become tagged characters."
    )
    crf: bool = setting(
        True, "Score tag sequences by a conditional random field; otherwise tag by tag."
    )
    constrained: bool = setting(
        True, "Allow only legal tag sequences in prediction, such as I-X only inside a span of X."
    )
    word_width: int = setting(
        100, "Dimension of the word embeddings; 0 for none.", at_least=0, at_most=65_536
    )
    vectors: str = setting("", "File of pre-trained word vectors, of tag.word_width dimensions.")
    normalize_digits: bool = setting(
        False, "Whether every digit of a word is read as 0; characters keep their digits."
    )
    word_dropout: float = setting(
        0.0, "Probability of reading a word as <unk> in training.", at_least=0.0, at_most=0.95
    )
    input_dropout: float = setting(
        0.0,
        "Dropout probability of a token's concatenated embeddings.",
        at_least=0.0,
        at_most=0.95,
    )
    output_dropout: float = setting(
        0.0, "Dropout probability of the encoder's output.", at_least=0.0, at_most=0.95
    )
    characters: str = setting(
        "lstm",
        "Character features of a word: bidirectional LSTM, convolution, or none.",
        choices=("lstm", "cnn", "none"),
    )
    character_width: int = setting(
        25, "Dimension of the character embeddings.", at_least=1, at_most=4096
    )
    character_features: int = setting(
        50,
        "Dimension of a word's character features; both directions of an LSTM together.",
        at_least=1,
        at_most=65_536,
    )
    character_kernel: int = setting(
        3, "Kernel size of the character convolution.", at_least=1, at_most=101
    )
    max_characters: int = setting(
        24,
        "Characters of a word that are read; of a longer word, its beginning and end.",
        at_least=2,
        at_most=1024,
    )
    features: tuple[str, ...] = setting(
        (),
        f"Further features of a token: {', '.join(TOKEN_FEATURES)}.",
    )
    feature_width: int = setting(
        32, "Dimension of tag.input_field and of each feature.", at_least=1, at_most=4096
    )

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        for name in self.features:
            if name not in TOKEN_FEATURES:
                yield (
                    f"tag.features must be of {', '.join(TOKEN_FEATURES)}; found {name!r:.60}; "
                    f"{suggest_name(name, TOKEN_FEATURES, listed=True)}"
                )
        if len(set(self.features)) < len(self.features):
            yield (
                f"tag.features must be distinct; found {', '.join(self.features)}; name each once"
            )
        if not self.word_width and self.characters == "none" and not self.features:
            yield (
                "a token needs an input; found tag.word_width=0, tag.characters=none and no "
                "tag.features; set one of them"
            )
        if self.vectors and not self.word_width:
            yield (
                f"tag.vectors needs word embeddings; found tag.word_width=0 with "
                f"{self.vectors!r:.60}; set tag.word_width to the vectors' dimension"
            )
        if self.characters == "lstm" and self.character_features % 2:
            yield (
                "tag.character_features must be even for a bidirectional LSTM; found "
                f"{self.character_features}; try {self.character_features + 1}"
            )
        if self.segmentation:
            yield from self._segmentation_problems()

    def _segmentation_problems(self) -> Iterator[str]:
        """Yield settings that have no meaning for word segmentation."""
        others = {"tag.input_field": self.input_field, "tag.tag_field": self.tag_field}
        others["tag.auxiliary_fields"] = ", ".join(self.auxiliary_fields)
        for name, value in others.items():
            if value:
                yield (
                    f"{name} is for tagged tokens; found {value} with tag.segmentation=true, "
                    "which tags characters; leave it out"
                )
        if self.characters != "none":
            yield (
                "word segmentation tags single characters and needs tag.characters=none; found "
                f"{self.characters}; set tag.characters=none"
            )
        if self.scheme not in ("auto", "bmes"):
            yield (
                f"tag.scheme must be bmes for word segmentation; found {self.scheme}; leave it out"
            )
