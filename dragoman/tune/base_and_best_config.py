"""Configurations around a study: the base that its trials change, and the best as a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import yaml

from dragoman.config import Config, to_dict
from dragoman.config.root_config import TRANSLATE
from dragoman.errors import ConfigError
from dragoman.registry import catalogue
from dragoman.runs.auto_config import choose_config, measure_corpus
from dragoman.runs.measured_resource_estimate import measure_random_throughput
from dragoman.runs.translation_data_preparation import open_corpora, prepare_data
from dragoman.runtime.device import select_train_device
from dragoman.text.sentencepiece_trainer import VocabularyError
from dragoman.training.progress_display import QuietProgress

BEST_FILE = "best.yaml"
# Set by `apply_step_count` for the length of a run: a trial's, not those of the final training.
_LENGTH_SETTINGS = ("steps", "warmup_steps", "ema_decay", "checkpoint_every", "validate_every")


def choose_base(
    request: Config,
    override: Callable[[Config], Config] | None,
    *,
    trial_seconds: float,
    keep: Collection[str] = (),
) -> Config:
    """Return the configuration that trials change: as requested, or chosen from the corpus.

    With `override`, which applies the given settings, it is what `train` would choose for a run of
    `trial_seconds`, without settings in `keep`. Raise ConfigError if a translation model has no
    validation set.
    """
    if request.task == TRANSLATE and open_corpora(request.data).valid is None:
        raise ConfigError(
            [
                "tuning needs a validation set; found none, and too few sentence pairs to hold "
                "some out; add --valid-src and --valid-tgt"
            ]
        )
    if override is None:
        return request
    device = select_train_device(request.train.device)
    chosen = choose_config(
        measure_corpus(open_corpora(request.data).train),
        seconds=trial_seconds,
        measure=lambda config: measure_random_throughput(config, device),
        device=device.type,
        keep=keep,
    ).config
    recipe = catalogue("recipe").load(chosen.recipe)()
    length = {name: getattr(recipe.train, name) for name in _LENGTH_SETTINGS}
    base = override(chosen.replace(train=length))
    if base.text.vocab_size == chosen.text.vocab_size:
        base = _fit_vocabulary(base)
    return base


def _fit_vocabulary(base: Config, *, retries: int = 2) -> Config:
    """Return the base with a vocabulary that the corpus allows; the prepared data is cached."""
    with tempfile.TemporaryDirectory(prefix="dragoman-") as folder:
        try:
            prepare_data(base, Path(folder) / "text", QuietProgress())
        except VocabularyError as error:
            if not retries:
                raise
            fitted = base.replace(text={"vocab_size": error.allowed})
            return _fit_vocabulary(fitted, retries=retries - 1)
    return base


def format_settings(config: Config, head: str) -> str:
    """Return the settings that differ from their recipe as YAML, below a comment."""
    defaults = catalogue("recipe").load(config.recipe)() if config.recipe else Config()
    before = to_dict(defaults)
    changed = {
        section: {
            name: value
            for name, value in values.items()
            if value != before.get(section, {}).get(name)
        }
        for section, values in to_dict(config).items()
        if isinstance(values, dict)
    }
    names = {"recipe": config.recipe} if config.recipe else {}
    if config.task != TRANSLATE:
        names["task"] = config.task
    settings = names | {section: values for section, values in changed.items() if values}
    return (
        f"# {head} on the validation set.\n"
        f"# Train with: dragoman train --config {BEST_FILE} --budget TIME --out MODEL\n"
        + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    )
