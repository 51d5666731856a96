"""Choosing a model for a corpus, a machine and a time: what `dragoman train` does when no recipe is named.

The rules were found on the validation sets of small corpora (docs/log.md) and are few enough to be told in a sentence each:

- vocabulary: seven times the square root of the corpus's words;
- size: the largest rung of the ladder with at most fifteen weights for each word of the corpus that, in the time there is,
  sees five words for each weight or the whole corpus fifteen times;
- learning rate: half a unit over the width, falling to nought at the end of the time;
- dropout: more, the more often the corpus is seen and the more weights there are to learn it by heart with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from dragoman.config import Config
from dragoman.registry import catalogue
from dragoman.runs.survey import TOKENS_A_WORD, Survey
from dragoman.training.meter import duration

WEIGHTS_A_WORD = 15  # at most: larger models learn a small corpus by heart
SEEN_A_WEIGHT = 5  # words seen for each weight, at least ...
ENOUGH_PASSES = 15  # ... or this many passes over the corpus
MOST_PASSES = 60  # more only learn it by heart
FEWEST_STEPS = 100
TRAINING_SHARE = 0.9  # of the time; the rest is for preparing, validating and writing
SMALLEST_BATCH, LARGEST_BATCH = 800, 25_000
UPDATES_A_PASS = {"cpu": 180}  # wanted, where the corpus is large enough: small batches learn more from a small corpus ...
UPDATES_ELSEWHERE = 80  # ... but a GPU takes as long for a small batch as for one of twice its size


class Rung(NamedTuple):
    """One size of the ladder."""

    width: int
    layers: int
    heads: int

    def weights(self, vocabulary: int) -> int:
        """Count the weights: 12 squares of the width in an encoder layer, 16 in a decoder's, and the shared embedding."""
        return 28 * self.layers * self.width**2 + vocabulary * self.width


LADDER = (Rung(128, 2, 4), Rung(192, 3, 4), Rung(256, 4, 4), Rung(384, 5, 6), Rung(512, 6, 8))

Measure = Callable[[Config], float]  # pieces a second, both sides, that the machine trains with a model


class Fitted(NamedTuple):
    """A configuration, and why it is so: a line for each choice."""

    config: Config
    reasons: list[str]
    epochs: float  # to train for; with a time budget an estimate, and the time decides


class _Choice(NamedTuple):
    rung: Rung
    passes: float
    reason: str


def fit(size: Survey, *, seconds: float, measure: Measure | None, device: str = "cpu") -> Fitted:
    """Choose for a corpus; with `seconds` 0 there is no limit and nothing is measured."""
    vocabulary = fitting_vocabulary(size.words)
    pieces = size.tokens or size.words * TOKENS_A_WORD
    batch = fitting_batch(pieces, device)
    allowed = [rung for rung in LADDER if rung.weights(vocabulary) <= WEIGHTS_A_WORD * size.words] or [LADDER[0]]
    if seconds and measure is not None:
        choice = _within(allowed, pieces, seconds, lambda rung: measure(_configured(rung, vocabulary, batch, dropout=0.1)), vocabulary)
    else:
        passes = min(MOST_PASSES, max(ENOUGH_PASSES / 3, 4e8 / pieces))
        choice = _Choice(allowed[-1], passes, f"{passes:.0f} epochs; give --budget for another time")
    weights = choice.rung.weights(vocabulary)
    config = _configured(choice.rung, vocabulary, batch, dropout=fitting_dropout(choice.passes, weights, size.words))
    updates = max(FEWEST_STEPS, round(choice.passes * pieces / 2 / batch))
    config = paced(config, updates)
    about = "" if size.exact else "about "
    reasons = [
        f"corpus: {about}{size.pairs:,} pair{'' if size.pairs == 1 else 's'}, some {size.words:,} words",
        f"vocabulary: {vocabulary:,} pieces, for {about}{size.words:,} words",
        f"size: width {choice.rung.width}, {choice.rung.layers}+{choice.rung.layers} layers, {weights / 1e6:.1f} million weights: "
        + _why_size(choice.rung, allowed, size, vocabulary),
        f"schedule: {choice.reason}; learning rate {config.train.learning_rate:.2g}, falling to nought; dropout {config.model.dropout:g}",
    ]
    return Fitted(config, reasons, choice.passes)


def fitting_batch(tokens: float, device: str) -> int:
    """Return train.batch_tokens for a corpus of so many tokens, both sides."""
    wanted = 500 * round(tokens / 2 / UPDATES_A_PASS.get(device, UPDATES_ELSEWHERE) / 500)
    return int(min(LARGEST_BATCH, max(SMALLEST_BATCH, wanted)))


def fitting_vocabulary(words: int) -> int:
    """Seven times the square root of the words, in steps of 500, from 500 to 32,000."""
    return int(min(32_000, max(500, 500 * round(7 * math.sqrt(words) / 500))))


def fitting_dropout(passes: float, weights: int, words: int) -> float:
    """Drop more, the more often the corpus is seen and the more weights there are to learn it by heart with."""
    pressure = passes * weights / words
    return 0.1 if pressure < 100 else 0.2 if pressure < 250 else 0.3


def _within(allowed: list[Rung], pieces: float, seconds: float, pace: Callable[[Rung], float], vocabulary: int) -> _Choice:
    """Climb while the next rung still sees enough in the time."""
    best: _Choice | None = None
    for rung in allowed:
        seen = pace(rung) * seconds * TRAINING_SHARE
        passes = seen / pieces
        if best is not None and seen < SEEN_A_WEIGHT * rung.weights(vocabulary) and passes < ENOUGH_PASSES:
            break
        # How many epochs that makes is announced once, from the prepared data and real training steps.
        told = f"as many epochs as fit into {duration(seconds)}, {MOST_PASSES} at most, for more would only learn the corpus by heart"
        best = _Choice(rung, min(passes, MOST_PASSES), told)
    assert best is not None, "the ladder has a first rung"
    return best


def _why_size(rung: Rung, allowed: list[Rung], size: Survey, vocabulary: int) -> str:
    """Say what kept the model from being larger."""
    if rung == LADDER[-1]:
        return "the largest on the ladder"
    if rung == allowed[-1]:
        return f"the next would have more than {WEIGHTS_A_WORD} weights a word of the corpus"
    return "the next would see too little text in the time"


def _configured(rung: Rung, vocabulary: int, batch: int, *, dropout: float) -> Config:
    """Lay a rung over the small recipe."""
    small: Config = catalogue("recipe").load("small")()
    model: dict[str, object] = {
        "encoder": (f"self*{rung.layers}",),
        "decoder": (f"self*{rung.layers}",),
        "width": rung.width,
        "heads": rung.heads,
        "feedforward": 4 * rung.width,
        "dropout": dropout,
    }
    config = small.replace(text={"vocabulary": vocabulary}, model=model, train={"batch_tokens": batch, "learning_rate": 0.5 / rung.width})
    return dataclasses.replace(config, recipe="small")


def paced(config: Config, updates: int, *, keep: Collection[str] = ()) -> Config:
    """Fit what depends on the number of steps: warm-up, running average, checkpoints, validations; not what is in `keep`.

    Intervals are rounded up, so that no validation falls a few steps before the last one.
    """
    fitted = {
        "steps": updates,
        "warmup": max(1, min(400, updates // 12)),
        "ema": round(min(0.9995, max(0.9, 1 - 5 / updates)), 5),
        "checkpoint_every": max(10, -(-updates // 16)),
        "validate_every": max(10, -(-updates // 8)),
    }
    return config.replace(train={name: value for name, value in fitted.items() if f"train.{name}" not in keep})


def steps_are_open(config: Config) -> bool:
    """Say whether the number of updates is the recipe's own, which a time budget may change, and not a person's."""
    plain = not config.recipe or config.train.init_from  # fine-tuning starts from every setting's default, not from a recipe
    recipe = Config() if plain else catalogue("recipe").load(config.recipe)()
    return config.train.steps == recipe.train.steps
