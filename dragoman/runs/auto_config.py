"""Automatic configuration: vocabulary, model and batch size, schedule.

They are chosen from the corpus size, the device and the time budget. With a budget the epochs are
an estimate: the steps are planned by training_run.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from dragoman.config import Config
from dragoman.data.parallel_corpus import Corpus
from dragoman.errors import DataError
from dragoman.registry import catalogue
from dragoman.training.progress_display import format_duration

MAX_PARAMETERS_PER_WORD = 15  # larger models overfit a small corpus
MIN_TOKENS_PER_PARAMETER = 5  # training tokens per parameter, at least ...
ENOUGH_EPOCHS = 15  # ... or this many epochs
MAX_EPOCHS = 60  # more overfit ...
# ... and half of them do already. With time for so many, R-Drop (Liang et al. 2021), whose steps
# take twice as long, is better after half as many epochs, and overfits much later; after few it is
# worse.
MIN_EPOCHS_FOR_R_DROP = 80
OVERFITTING_EPOCHS = 30
MAX_R_DROP_EPOCHS = 160
R_DROP_WEIGHT = 5.0  # the paper's, for translation
# Where many epochs overfit, the validation loss rises long before BLEU falls, if it falls at all:
# the checkpoint is selected by BLEU of so many sentences. A GPU translates them in a second; a CPU
# would spend a tenth of its time on them.
SELECTION_SENTENCES = 1000
MIN_SELECTION_SENTENCES = 500  # BLEU of fewer differs by chance more than between checkpoints
MIN_TRAIN_STEPS = 100
TRAINING_TIME_FRACTION = 0.9  # of the time budget; the rest is preparation, validation, writing
MIN_BATCH_TOKENS, MAX_BATCH_TOKENS = 800, 25_000
# Target for large enough corpora: small batches are better for a small corpus, but a GPU needs
# as long for a small batch as for one of twice its size.
STEPS_PER_EPOCH = {"cpu": 180}
DEFAULT_STEPS_PER_EPOCH = 80


class ModelSize(NamedTuple):
    """One of the model sizes to choose from."""

    width: int
    layers: int
    heads: int

    def num_parameters(self, vocab_size: int) -> int:
        """Return the parameters: 12 D² per encoder and 16 D² per decoder layer, and embeddings."""
        return 28 * self.layers * self.width**2 + vocab_size * self.width


MODEL_SIZES = (
    ModelSize(128, 2, 4),
    ModelSize(192, 3, 4),
    ModelSize(256, 4, 4),
    ModelSize(384, 5, 6),
    ModelSize(512, 6, 8),
)

MeasureThroughput = Callable[[Config], float]  # training tokens/s of both sides


class AutoConfig(NamedTuple):
    """A configuration with the reason of each choice."""

    config: Config
    reasons: list[str]
    epochs: float  # planned; an estimate under a time budget


class _SizeChoice(NamedTuple):
    model_size: ModelSize
    epochs: float  # that fit into the time budget, without R-Drop


def choose_config(
    size: CorpusSize,
    *,
    seconds: float,
    measure: MeasureThroughput | None,
    device: str = "cpu",
    keep: Collection[str] = (),
) -> AutoConfig:
    """Return a configuration for a corpus; `seconds` is the time budget, 0 for none.

    Without a time budget no throughput is measured. Settings in `keep` are not chosen.
    """
    vocab_size = choose_vocab_size(size.words)
    tokens = size.tokens or size.words * TOKENS_PER_WORD
    batch = choose_batch_tokens(tokens, device)
    allowed = [
        model_size
        for model_size in MODEL_SIZES
        if model_size.num_parameters(vocab_size) <= MAX_PARAMETERS_PER_WORD * size.words
    ] or [MODEL_SIZES[0]]
    if seconds and measure is not None:
        choice = _largest_within_time(
            allowed,
            tokens,
            seconds,
            lambda model_size: measure(_build_config(model_size, vocab_size, batch, dropout=0.1)),
            vocab_size,
        )
    else:
        choice = _SizeChoice(allowed[-1], min(MAX_EPOCHS, max(ENOUGH_EPOCHS / 3, 4e8 / tokens)))
    parameters = choice.model_size.num_parameters(vocab_size)
    use_r_drop = (
        bool(seconds)
        and choice.epochs >= MIN_EPOCHS_FOR_R_DROP
        and not {"train.r_drop", "train.simcut"} & set(keep)
    )
    epochs = (
        min(choice.epochs / 2, MAX_R_DROP_EPOCHS) if use_r_drop else min(choice.epochs, MAX_EPOCHS)
    )
    dropout = choose_dropout(epochs, parameters, size.words, use_r_drop=use_r_drop)
    config = _build_config(choice.model_size, vocab_size, batch, dropout=dropout)
    if use_r_drop:
        config = config.replace(train={"r_drop": R_DROP_WEIGHT})
    select_by_bleu = (
        device != "cpu"
        and epochs > OVERFITTING_EPOCHS
        and not {"train.best_metric", "train.validate_sentences"} & set(keep)
    )
    if select_by_bleu:
        config = config.replace(
            train={"best_metric": "bleu", "validate_sentences": SELECTION_SENTENCES}
        )
    steps = max(MIN_TRAIN_STEPS, round(epochs * tokens / 2 / batch))
    config = apply_step_count(config, steps)
    about = "" if size.exact else "about "
    width, layers = choice.model_size.width, choice.model_size.layers
    reasons = [
        f"corpus: {about}{size.pairs:,} sentence pair{'' if size.pairs == 1 else 's'}, "
        f"about {size.words:,} words",
        f"vocabulary size: {vocab_size:,}",
        f"model size: width {width}, {layers}+{layers} layers, {parameters / 1e6:.1f}M parameters: "
        + _explain_size(choice.model_size, allowed),
        f"schedule: {_explain_epochs(epochs, seconds, max_epochs(config))}; "
        f"learning rate {config.train.learning_rate:.2g}, decaying to 0",
        f"regularization: dropout {config.model.dropout:g}"
        + (_explain_r_drop(choice.epochs) if use_r_drop else ""),
    ]
    if select_by_bleu:
        reasons.append(
            f"checkpoint: of the best BLEU on {SELECTION_SENTENCES:,} validation sentences: after "
            f"about {OVERFITTING_EPOCHS} epochs the loss rises while BLEU does not fall"
        )
    return AutoConfig(config, reasons, epochs)


def max_epochs(config: Config) -> int:
    """Return the epochs after which training overfits a corpus for which they are many."""
    return MAX_R_DROP_EPOCHS if config.train.r_drop or config.train.simcut else MAX_EPOCHS


def _explain_epochs(epochs: float, seconds: float, most: int) -> str:
    """Return how long the run is; its epochs are reported later, by the measured throughput."""
    if not seconds:
        return f"{epochs:.0f} epochs (no --budget given)"
    return f"as many epochs as fit into {format_duration(seconds)}, at most {most}"


def _explain_r_drop(epochs: float) -> str:
    """Return why R-Drop is used."""
    found = f"{epochs:.0f}" if epochs < 1000 else "over 1,000"
    return (
        f", R-Drop {R_DROP_WEIGHT:g}: there is time for {found} epochs, and without it "
        f"more than about {OVERFITTING_EPOCHS} overfit"
    )


def choose_batch_tokens(tokens: float, device: str) -> int:
    """Return train.batch_tokens for a corpus of `tokens` tokens on both sides."""
    target = 500 * round(tokens / 2 / STEPS_PER_EPOCH.get(device, DEFAULT_STEPS_PER_EPOCH) / 500)
    return int(min(MAX_BATCH_TOKENS, max(MIN_BATCH_TOKENS, target)))


def choose_vocab_size(words: int) -> int:
    """Return 7 times the square root of the words, rounded to 500, from 500 to 32,000."""
    return int(min(32_000, max(500, 500 * round(7 * math.sqrt(words) / 500))))


def choose_dropout(
    epochs: float, parameters: int, words: int, *, use_r_drop: bool = False
) -> float:
    """Return a dropout probability that grows with the epochs and the parameters per word.

    R-Drop regularizes as well, so with it the same dropout is for four times as many.
    """
    overfitting_risk = epochs * parameters / words / (4 if use_r_drop else 1)
    return 0.1 if overfitting_risk < 100 else 0.2 if overfitting_risk < 250 else 0.3


def _largest_within_time(
    allowed: list[ModelSize],
    tokens: float,
    seconds: float,
    throughput: Callable[[ModelSize], float],
    vocab_size: int,
) -> _SizeChoice:
    """Return the largest size that sees enough tokens within the time budget."""
    best: _SizeChoice | None = None
    for model_size in allowed:
        seen = throughput(model_size) * seconds * TRAINING_TIME_FRACTION
        epochs = seen / tokens
        if (
            best is not None
            and seen < MIN_TOKENS_PER_PARAMETER * model_size.num_parameters(vocab_size)
            and epochs < ENOUGH_EPOCHS
        ):
            break
        best = _SizeChoice(model_size, epochs)
    assert best is not None, "at least one size is allowed"
    return best


def _explain_size(model_size: ModelSize, allowed: list[ModelSize]) -> str:
    """Return why the model is not larger."""
    if model_size == MODEL_SIZES[-1]:
        return "the largest size"
    if model_size == allowed[-1]:
        return f"the next would exceed {MAX_PARAMETERS_PER_WORD} parameters per word of the corpus"
    return "the next would see too few tokens within the time budget"


def _build_config(model_size: ModelSize, vocab_size: int, batch: int, *, dropout: float) -> Config:
    """Return the recipe `small` with a model size, vocabulary size and batch size."""
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
        text={"vocab_size": vocab_size},
        model=model,
        train={"batch_tokens": batch, "learning_rate": 0.5 / model_size.width},
    )
    return dataclasses.replace(config, recipe="small")


def select_by_loss_of_few(config: Config, sentences: int) -> Config:
    """Return the configuration that selects by loss if there are few sentences to translate."""
    if sentences >= MIN_SELECTION_SENTENCES:
        return config
    recipe: Config = catalogue("recipe").load(config.recipe)()
    return config.replace(
        train={name: getattr(recipe.train, name) for name in ("best_metric", "validate_sentences")}
    )


def apply_step_count(config: Config, steps: int, *, keep: Collection[str] = ()) -> Config:
    """Set steps, warm-up, EMA decay and intervals for a number of steps; not those in `keep`.

    Intervals are rounded up, so that no validation is only a few steps before the last one.
    """
    values = {
        "steps": steps,
        "warmup_steps": max(1, min(400, steps // 12)),
        "ema_decay": round(min(0.9995, max(0.9, 1 - 5 / steps)), 5),
        "checkpoint_every": max(10, -(-steps // 16)),
        "validate_every": max(10, -(-steps // 8)),
    }
    return config.replace(
        train={name: value for name, value in values.items() if f"train.{name}" not in keep}
    )


def apply_epochs(config: Config, steps_per_epoch: int, *, keep: Collection[str] = ()) -> Config:
    """Set steps for `train.epochs`, and intervals of an epoch, or of a tenth of a shorter run."""
    steps = max(1, round(config.train.epochs * steps_per_epoch))
    interval = max(1, min(steps_per_epoch, -(-steps // 10)))
    return _limit_intervals(config, steps, interval, keep)


def limit_steps(
    config: Config, steps: int, *, validations: int = 10, keep: Collection[str] = ()
) -> Config:
    """Set a lower number of steps, warm-up and intervals to fit; validate and save so often."""
    if steps >= config.train.steps:
        return config
    interval = max(1, -(-steps // validations))
    config = config.replace(
        train={
            name: interval
            for name in ("checkpoint_every", "validate_every")
            if f"train.{name}" not in keep
        }
    )
    return _limit_intervals(config, steps, interval, keep)


def _limit_intervals(config: Config, steps: int, interval: int, keep: Collection[str]) -> Config:
    """Set the steps; warm-up takes at most a tenth of them, intervals at most `interval`."""
    train = config.train
    values = {
        "steps": steps,
        "warmup_steps": min(train.warmup_steps, steps // 10),
        "checkpoint_every": min(train.checkpoint_every, interval),
        "validate_every": min(train.validate_every, interval),
    }
    return config.replace(
        train={name: value for name, value in values.items() if f"train.{name}" not in keep}
    )


def has_default_steps(config: Config) -> bool:
    """Whether steps and epochs are the recipe's default, which a time budget may change."""
    # Fine-tuning starts from the defaults, not from a recipe.
    has_recipe = config.recipe and not config.train.init_from
    recipe = catalogue("recipe").load(config.recipe)() if has_recipe else Config()
    return (config.train.steps, config.train.epochs) == (recipe.train.steps, recipe.train.epochs)


MAX_SAMPLED_PAIRS = 200_000  # the total is extrapolated from the fraction of the files read
TOKENS_PER_WORD = 1.25  # with the vocabulary sizes of choose_vocab_size
BYTES_PER_WORD = 6  # a word and its space in UTF-8: accurate enough to choose a vocabulary size


class CorpusSize(NamedTuple):
    """Size of a parallel corpus, both sides together; extrapolated for a large one."""

    pairs: int
    words: int
    exact: bool
    tokens: int = 0  # estimate for the chosen vocabulary size, with end-of-sentence tokens


def measure_corpus(corpus: Corpus, most: int = MAX_SAMPLED_PAIRS) -> CorpusSize:
    """Count pairs and words, reading at most `most` pairs."""
    pairs = size = words = 0
    fraction, exact = 1.0, True
    for pair in itertools.islice(corpus.pairs(), most + 1):
        if pairs == most:
            fraction, exact = min(1.0, max(corpus.fraction_read(), 1e-9)), False
            break
        pairs += 1
        size += len(pair.src.encode()) + len(pair.tgt.encode())
        words += len(pair.src.split()) + len(pair.tgt.split())
    if not size:
        found = f"{pairs} pairs, all of them empty" if pairs else "no pairs"
        raise DataError(
            f"{' and '.join(map(str, corpus.files))} must hold text",
            found=found,
            fix="pass files with sentences in them",
        )
    # Every word and every end of sentence is at least one token, which matters for short lines.
    tokens = max(TOKENS_PER_WORD * size / BYTES_PER_WORD, words) + 2 * pairs
    return CorpusSize(
        int(pairs / fraction),
        int(size / BYTES_PER_WORD / fraction),
        exact=exact,
        tokens=int(tokens / fraction),
    )
