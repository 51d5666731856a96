"""Objective of a study: the validation metric that its trials are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dragoman.config import Config
from dragoman.config.root_config import TRANSLATE
from dragoman.errors import ConfigError, suggest_name
from dragoman.runs.translation_data_preparation import open_corpora
from dragoman.text.sentencepiece_tokenizer import load_tokenizers
from dragoman.training.trainer_state import LOWER_IS_BETTER
from dragoman.tune.search_space import SearchParameter

TOKENIZED_SENTENCES = 2000  # validation sentences that the tokens per character are counted on


class Objective(NamedTuple):
    """The metric that trials are compared by."""

    metric: str
    per_character: bool = False  # whether a loss per token is converted

    @property
    def label(self) -> str:
        """Name for tables and figures."""
        return "loss/char" if self.per_character else self.metric

    @property
    def lower(self) -> bool:
        """Whether lower is better."""
        return self.metric in LOWER_IS_BETTER


def choose_metric(config: Config, metric: str) -> str:
    """Return the metric that trials are compared by: the given one, or that of the recipe."""
    own = ("bleu",) if config.task == TRANSLATE else getattr(config, config.task).metrics
    metric = metric or config.train.best_metric
    if metric not in ("loss", *own):
        raise ConfigError(
            [
                f"--metric must be one of {', '.join(('loss', *own))}; found {metric!r:.60}; "
                f"{suggest_name(metric, ('loss', *own), listed=True)}"
            ]
        )
    return metric


def choose_objective(config: Config, metric: str, space: Sequence[SearchParameter]) -> Objective:
    """Return the objective; a loss per token does not compare tokenizers.

    A larger vocabulary has fewer tokens, each harder to predict. In translation the loss is then
    compared per character; language models have bits per byte.
    """
    searched = [each.name for each in space if each.name.startswith("text.")]
    if not searched or metric not in ("loss", "perplexity"):
        return Objective(metric)
    if config.task == TRANSLATE:
        return Objective(metric, per_character=True)
    if config.task == "language":
        raise ConfigError(
            [
                f"--metric {metric} is per token and does not compare tokenizers; found "
                f"--search {searched[0]}; add --metric bits_per_byte"
            ]
        )
    return Objective(metric)


def count_tokens_per_character(config: Config, tokenizer_dir: Path) -> float:
    """Return the target tokens per character of validation sentences, ends of sentence included."""
    valid = open_corpora(config.data).valid
    assert valid is not None, "a study without validation data was rejected"
    tokenizer = load_tokenizers(tokenizer_dir).tgt
    tokens = characters = 0
    for number, pair in enumerate(valid.pairs()):
        if number >= TOKENIZED_SENTENCES:
            break
        tokens += len(tokenizer.encode(pair.tgt)) + 1
        characters += len(pair.tgt) + 1
    return tokens / max(1, characters)
