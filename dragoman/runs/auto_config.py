"""Automatic configuration: vocabulary, model size, batch size and schedule chosen from corpus, device and time budget."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from dragoman.config import Config
from dragoman.data.corpus import Corpus
from dragoman.errors import DataError
from dragoman.registry import catalogue
from dragoman.training.progress import format_duration

MAX_PARAMETERS_PER_WORD = 15  # at most: larger models learn a small corpus by heart
MIN_TOKENS_PER_PARAMETER = 5  # words seen for each weight, at least ...
ENOUGH_EPOCHS = 15  # ... or this many passes over the corpus
MAX_EPOCHS = 60  # more only learn it by heart
MIN_TRAIN_STEPS = 100
TRAINING_TIME_FRACTION = 0.9  # of the time; the rest is for preparing, validating and writing
MIN_BATCH_TOKENS, MAX_BATCH_TOKENS = 800, 25_000
STEPS_PER_EPOCH = {
    "cpu": 180
}  # wanted, where the corpus is large enough: small batches learn more from a small corpus ...
DEFAULT_STEPS_PER_EPOCH = (
    80  # ... but a GPU takes as long for a small batch as for one of twice its size
)


class ModelSize(NamedTuple):
    """One size of the ladder."""

    width: int
    layers: int
    heads: int

    def weights(self, vocabulary: int) -> int:
        """Count the weights: 12 squares of the width in an encoder layer, 16 in a decoder's, and the shared embedding."""
        return 28 * self.layers * self.width**2 + vocabulary * self.width


MODEL_SIZES = (
    ModelSize(128, 2, 4),
    ModelSize(192, 3, 4),
    ModelSize(256, 4, 4),
    ModelSize(384, 5, 6),
    ModelSize(512, 6, 8),
)

MeasureThroughput = Callable[
    [Config], float
]  # pieces a second, both sides, that the machine trains with a model


class AutoConfig(NamedTuple):
    """A configuration, and why it is so: a line for each choice."""

    config: Config
    reasons: list[str]
    epochs: float  # to train for; with a time budget an estimate, and the time decides


class _SizeChoice(NamedTuple):
    model_size: ModelSize
    epochs: float
    reason: str


def choose_config(
    size: CorpusSize, *, seconds: float, measure: MeasureThroughput | None, device: str = "cpu"
) -> AutoConfig:
    """Choose for a corpus; with `seconds` 0 there is no limit and nothing is measured."""
    vocabulary = choose_vocab_size(size.words)
    tokens = size.tokens or size.words * TOKENS_PER_WORD
    batch = choose_batch_tokens(tokens, device)
    allowed = [
        model_size
        for model_size in MODEL_SIZES
        if model_size.weights(vocabulary) <= MAX_PARAMETERS_PER_WORD * size.words
    ] or [MODEL_SIZES[0]]
    if seconds and measure is not None:
        choice = _largest_within_time(
            allowed,
            tokens,
            seconds,
            lambda model_size: measure(_build_config(model_size, vocabulary, batch, dropout=0.1)),
            vocabulary,
        )
    else:
        epochs = min(MAX_EPOCHS, max(ENOUGH_EPOCHS / 3, 4e8 / tokens))
        choice = _SizeChoice(
            allowed[-1], epochs, f"{epochs:.0f} epochs; give --budget for another time"
        )
    weights = choice.model_size.weights(vocabulary)
    config = _build_config(
        choice.model_size,
        vocabulary,
        batch,
        dropout=choose_dropout(choice.epochs, weights, size.words),
    )
    steps = max(MIN_TRAIN_STEPS, round(choice.epochs * tokens / 2 / batch))
    config = apply_step_count(config, steps)
    about = "" if size.exact else "about "
    reasons = [
        f"corpus: {about}{size.pairs:,} pair{'' if size.pairs == 1 else 's'}, some {size.words:,} words",
        f"vocabulary: {vocabulary:,} pieces, for {about}{size.words:,} words",
        f"size: width {choice.model_size.width}, {choice.model_size.layers}+{choice.model_size.layers} layers, {weights / 1e6:.1f} million weights: "
        + _explain_size(choice.model_size, allowed, size, vocabulary),
        f"schedule: {choice.reason}; learning rate {config.train.learning_rate:.2g}, falling to nought; dropout {config.model.dropout:g}",
    ]
    return AutoConfig(config, reasons, choice.epochs)


def choose_batch_tokens(tokens: float, device: str) -> int:
    """Return train.batch_tokens for a corpus of so many tokens, both sides."""
    wanted = 500 * round(tokens / 2 / STEPS_PER_EPOCH.get(device, DEFAULT_STEPS_PER_EPOCH) / 500)
    return int(min(MAX_BATCH_TOKENS, max(MIN_BATCH_TOKENS, wanted)))


def choose_vocab_size(words: int) -> int:
    """Seven times the square root of the words, in steps of 500, from 500 to 32,000."""
    return int(min(32_000, max(500, 500 * round(7 * math.sqrt(words) / 500))))


def choose_dropout(epochs: float, weights: int, words: int) -> float:
    """Drop more, the more often the corpus is seen and the more weights there are to learn it by heart with."""
    pressure = epochs * weights / words
    return 0.1 if pressure < 100 else 0.2 if pressure < 250 else 0.3


def _largest_within_time(
    allowed: list[ModelSize],
    tokens: float,
    seconds: float,
    throughput: Callable[[ModelSize], float],
    vocabulary: int,
) -> _SizeChoice:
    """Climb while the next rung still sees enough in the time."""
    best: _SizeChoice | None = None
    for model_size in allowed:
        seen = throughput(model_size) * seconds * TRAINING_TIME_FRACTION
        epochs = seen / tokens
        if (
            best is not None
            and seen < MIN_TOKENS_PER_PARAMETER * model_size.weights(vocabulary)
            and epochs < ENOUGH_EPOCHS
        ):
            break
        # How many epochs that makes is announced once, from the prepared data and real training steps.
        explanation = f"as many epochs as fit into {format_duration(seconds)}, {MAX_EPOCHS} at most, for more would only learn the corpus by heart"
        best = _SizeChoice(model_size, min(epochs, MAX_EPOCHS), explanation)
    assert best is not None, "the ladder has a first rung"
    return best


def _explain_size(
    model_size: ModelSize, allowed: list[ModelSize], size: CorpusSize, vocabulary: int
) -> str:
    """Say what kept the model from being larger."""
    if model_size == MODEL_SIZES[-1]:
        return "the largest on the ladder"
    if model_size == allowed[-1]:
        return (
            f"the next would have more than {MAX_PARAMETERS_PER_WORD} weights a word of the corpus"
        )
    return "the next would see too little text in the time"


def _build_config(model_size: ModelSize, vocabulary: int, batch: int, *, dropout: float) -> Config:
    """Lay a rung over the small recipe."""
    small: Config = catalogue("recipe").load("small")()
    model: dict[str, object] = {
        "encoder": (f"transformer*{model_size.layers}",),
        "decoder": (f"transformer*{model_size.layers}",),
        "width": model_size.width,
        "heads": model_size.heads,
        "ffn_width": 4 * model_size.width,
        "dropout": dropout,
    }
    config = small.replace(
        text={"vocab_size": vocabulary},
        model=model,
        train={"batch_tokens": batch, "learning_rate": 0.5 / model_size.width},
    )
    return dataclasses.replace(config, recipe="small")


def apply_step_count(config: Config, steps: int, *, keep: Collection[str] = ()) -> Config:
    """Fit what depends on the number of steps: warm-up, running average, checkpoints, validations; not what is in `keep`.

    Intervals are rounded up, so that no validation falls a few steps before the last one.
    """
    fitted = {
        "steps": steps,
        "warmup_steps": max(1, min(400, steps // 12)),
        "ema_decay": round(min(0.9995, max(0.9, 1 - 5 / steps)), 5),
        "checkpoint_every": max(10, -(-steps // 16)),
        "validate_every": max(10, -(-steps // 8)),
    }
    return config.replace(
        train={name: value for name, value in fitted.items() if f"train.{name}" not in keep}
    )


def has_default_steps(config: Config) -> bool:
    """Say whether the number of updates is the recipe's own, which a time budget may change, and not a person's."""
    plain = (
        not config.recipe or config.train.init_from
    )  # fine-tuning starts from every setting's default, not from a recipe
    recipe = Config() if plain else catalogue("recipe").load(config.recipe)()
    return config.train.steps == recipe.train.steps


MAX_SURVEYED_PAIRS = (
    200_000  # read at most; the rest is estimated from the share of the files that this was
)
TOKENS_PER_WORD = 1.25  # on the vocabularies that fitting.py chooses
BYTES_PER_WORD = (
    6  # a word and its space in UTF-8, near enough for any script: this only sizes a vocabulary
)


class CorpusSize(NamedTuple):
    """How much text there is, both sides together; estimates where the corpus is long."""

    pairs: int
    words: int
    exact: bool
    tokens: int = (
        0  # both sides with their ends, on a vocabulary of the fitted size; 0 where nobody counted
    )


def measure_corpus(corpus: Corpus, most: int = MAX_SURVEYED_PAIRS) -> CorpusSize:
    """Count pairs and words, reading no more than `most` pairs."""
    pairs = size = words = 0
    share, exact = 1.0, True
    for pair in itertools.islice(corpus.pairs(), most + 1):
        if pairs == most:
            share, exact = min(1.0, max(corpus.fraction_read(), 1e-9)), False
            break
        pairs += 1
        size += len(pair.src.encode()) + len(pair.tgt.encode())
        words += len(pair.src.split()) + len(pair.tgt.split())
    if not size:
        found = f"{pairs} pairs, all of them empty" if pairs else "no pairs"
        raise DataError(
            f"{' and '.join(map(str, corpus.files))} must hold text",
            found=found,
            fix="give files with sentences in them",
        )
    # Words of one letter are tokens too, and so is every sentence's end: in short lines these are most of the text.
    tokens = max(TOKENS_PER_WORD * size / BYTES_PER_WORD, words) + 2 * pairs
    return CorpusSize(
        int(pairs / share),
        int(size / BYTES_PER_WORD / share),
        exact=exact,
        tokens=int(tokens / share),
    )
