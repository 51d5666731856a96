"""Settings of classification: each with its default, range and description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dragoman.config.setting_declaration import setting

MAX_FILTER_WIDTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifyConfig:
    """Classification of texts: architecture, features, labels and thresholds."""

    # Metrics of validation, besides the loss.
    metrics: ClassVar[tuple[str, ...]] = (
        "accuracy",
        "macro_f1",
        "micro_f1",
        "calibration_error",
    )
    # Largest sizes of a miniature (`dragoman train --mini`), by setting.
    mini: ClassVar[dict[str, object]] = {
        "max_sentence_words": 20,
        "hops": 4,
        "score_width": 32,
        "filters": 32,
        "hidden_width": 32,
        "ngram_features": 50_000,
        "dropout": 0.1,
        "word_dropout": 0.1,
        "embedding_dropout": 0.0,
    }

    hierarchical: bool = setting(
        False, "Hierarchical attention (HAN): encode the words of each sentence, then sentences."
    )
    sentence_encoder: tuple[str, ...] = setting(
        (), "Blocks over the sentences of a hierarchical model; empty for those of model.encoder."
    )
    sentence_end: str = setting(
        "punctuation",
        "What ends a sentence: punctuation, or in anonymised text its second most frequent token.",
        choices=("punctuation", "second_most_frequent"),
    )
    max_sentence_words: int = setting(
        50, "Longest sentence of a hierarchical model; longer ones are split.", at_least=2
    )
    pooling: str = setting(
        "attention",
        "Pooling of the encoder's output; labels attends once per label, none leaves it out.",
        choices=(
            "attention",
            "structured",
            "labels",
            "mean",
            "max",
            "last",
            "last_bidirectional",
            "none",
        ),
    )
    label_names: bool = setting(
        False,
        "Label attention also reads the words of each label's name in the text, for rare labels.",
    )
    hops: int = setting(
        30, "Rows of structured self-attention (Lin et al. 2017).", at_least=1, at_most=1024
    )
    score_width: int = setting(
        0,
        "Hidden width of attention pooling; 0 for model.width, and none for labels.",
        at_least=0,
        at_most=65_536,
    )
    overlap_penalty: float = setting(
        0.0, "Weight of the penalty on overlapping rows of structured attention.", at_least=0.0
    )
    filter_widths: tuple[int, ...] = setting(
        (), "Widths of convolution filters over the words (TextCNN), such as [3, 4, 5]."
    )
    filters: int = setting(
        100, "Number of filters of each width, max-pooled.", at_least=1, at_most=65_536
    )
    filter_input: str = setting(
        "embeddings",
        "Input of the filters: embeddings, or one-hot words (Johnson and Zhang 2015).",
        choices=("embeddings", "one_hot"),
    )
    ngrams: int = setting(
        0,
        "Longest n-gram of a linear classifier beside the encoder; 0 for none.",
        at_least=0,
        at_most=5,
    )
    ngram_features: int = setting(
        1_000_000,
        "Maximum number of n-grams, by document frequency.",
        at_least=1,
        at_most=5_000_000,
    )
    ngram_min_count: int = setting(2, "Minimum document frequency of an n-gram.", at_least=1)
    ngram_weights: str = setting(
        "naive_bayes",
        "Weights of the n-grams: naive-Bayes log-count ratios, or tf-idf.",
        choices=("naive_bayes", "tf_idf"),
    )
    ngram_dropout: float = setting(
        0.0, "Probability of dropping an n-gram in training.", at_least=0.0, at_most=0.95
    )
    branch_loss: float = setting(
        0.0,
        "Weight of the loss of the encoder alone and of the n-grams alone, beside their sum's.",
        at_least=0.0,
        at_most=100.0,
    )
    feature_gate: bool = setting(
        False, "Multiply the pooled features by a softmax gate computed from them."
    )
    hidden_width: int = setting(
        0, "Width of a hidden layer before the output; 0 for none.", at_least=0, at_most=65_536
    )
    dropout: float = setting(
        0.5, "Dropout probability of the pooled features.", at_least=0.0, at_most=0.95
    )
    word_dropout: float = setting(
        0.0, "Probability of replacing a word by <unk> in training.", at_least=0.0, at_most=0.95
    )
    sentence_dropout: float = setting(
        0.0,
        "Probability of replacing all words of a sentence by <unk> in training (hierarchical).",
        at_least=0.0,
        at_most=0.95,
    )
    embedding_dropout: float = setting(
        0.0,
        "Probability of dropping all occurrences of a word in a batch.",
        at_least=0.0,
        at_most=0.95,
    )
    vectors: tuple[str, ...] = setting(
        (), "Files of word vectors that training adjusts; several are concatenated."
    )
    frozen_vectors: tuple[str, ...] = setting(
        (), "Files of word vectors that stay as they are; concatenated with the others."
    )
    multi_label: str = setting(
        "auto",
        "Whether a text has any number of labels; auto if labels are lists.",
        choices=("auto", "on", "off"),
    )
    class_weights: str = setting(
        "none",
        "Weights of the classes in the loss; balanced gives all classes the same total.",
        choices=("none", "balanced"),
    )
    threshold: float = setting(
        0.5,
        "Decision threshold: minimum probability of a predicted label (multi-label).",
        at_least=0.0,
        at_most=1.0,
    )
    tune_threshold: str = setting(
        "off",
        "Tune the threshold on the validation set for F1: one for all labels, or one each.",
        choices=("off", "global", "labels"),
    )
    auxiliary_field: str = setting(
        "", "Field with a second label that is also predicted in training, such as a finer one."
    )
    auxiliary_weight: float = setting(
        1.0, "Weight of the loss of the second label.", at_least=0.0, at_most=100.0
    )
    attribute_field: str = setting(
        "", "Field with a list of attributes, predicted by attention and used for the class."
    )
    attribute_weight: float = setting(
        1.0, "Weight of the loss of the attributes.", at_least=0.0, at_most=100.0
    )

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        wrong = [width for width in self.filter_widths if not 1 <= width <= MAX_FILTER_WIDTH]
        if wrong:
            yield (
                f"classify.filter_widths must be from 1 to {MAX_FILTER_WIDTH}; found {wrong[0]}; "
                "correct it"
            )
        if len(set(self.filter_widths)) < len(self.filter_widths):
            yield (
                "classify.filter_widths must be distinct; found "
                f"{list(self.filter_widths)}; raise classify.filters instead"
            )
        if self.pooling == "none" and not (self.filter_widths or self.ngrams):
            yield (
                "classify.pooling=none leaves out the encoder and needs other features; found "
                "neither classify.filter_widths nor classify.ngrams; set one of them"
            )
        if self.hierarchical and (self.pooling == "none" or self.filter_widths):
            found = (
                f"classify.filter_widths={list(self.filter_widths)}"
                if self.filter_widths
                else "classify.pooling=none"
            )
            yield (
                "classify.hierarchical pools words and sentences and has no filters; found "
                f"{found}; set classify.hierarchical=false"
            )
        if self.sentence_encoder and not self.hierarchical:
            yield (
                "classify.sentence_encoder needs classify.hierarchical=true; found "
                f"{list(self.sentence_encoder)}; set it, or leave the blocks out"
            )
        if self.sentence_dropout and not self.hierarchical:
            yield (
                "classify.sentence_dropout needs classify.hierarchical=true; found "
                f"{self.sentence_dropout:g}; use classify.word_dropout"
            )
        if self.filter_input == "one_hot" and not self.filter_widths:
            yield (
                "classify.filter_input=one_hot needs filters; found classify.filter_widths=[]; "
                "set them, such as [2, 3]"
            )
        if self.overlap_penalty and self.pooling != "structured":
            yield (
                "classify.overlap_penalty needs classify.pooling=structured; found "
                f"{self.pooling}; set classify.overlap_penalty=0"
            )
        if self.branch_loss and not (
            self.ngrams and (self.pooling != "none" or self.filter_widths)
        ):
            yield (
                "classify.branch_loss needs n-grams beside an encoder or filters; found "
                f"classify.ngrams={self.ngrams} and classify.pooling={self.pooling}; "
                "set classify.branch_loss=0"
            )
        if self.label_names and (self.pooling != "labels" or self.hierarchical):
            found = (
                "classify.hierarchical=true"
                if self.hierarchical
                else f"classify.pooling={self.pooling}"
            )
            yield (
                "classify.label_names needs label attention over the words of a text; found "
                f"{found}; set classify.pooling=labels and classify.hierarchical=false"
            )
        if self.attribute_field and self.pooling in ("labels", "none"):
            yield (
                "classify.attribute_field needs one pooled vector; found "
                f"classify.pooling={self.pooling}; use max, the paper's"
            )
