"""The steps of the demo: write the corpus, train, and evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dragoman.config import Config, read_config
from dragoman.demo.date_corpus import LOCALES, DatePair, DateSplit, make_date_splits
from dragoman.errors import BundleError, ConfigError, StoppedError
from dragoman.recipes.recipe_miniature import mini

if TYPE_CHECKING:
    from dragoman.inference import Translator
    from dragoman.runs.output_directory_and_resume_checks import OutputDirectory
    from dragoman.training.progress_display import Progress

# Trains in about a minute on two CPU cores to nearly 100 % accuracy (docs/log.md).
DEMO_SETTINGS = (
    "text.tokenizer=characters",
    "text.character_coverage=1.0",
    "model.encoder=[transformer*2]",
    "model.decoder=[transformer*1]",
    "model.width=128",
    "model.ffn_width=512",
    "model.dropout=0",
    "train.threads=1",  # a model this small gains little from a second core
    "train.steps=1500",
    "train.batch_tokens=1200",
    "train.learning_rate=2.5e-3",
    "train.warmup_steps=100",
    "train.ema_decay=0.98",
    "train.label_smoothing=0",
    "train.validate_every=250",
    "train.validate_sentences=100",
    "train.checkpoint_every=750",
    "train.keep_checkpoints=1",
    "train.final_checkpoint=last",
    "decode.beam=1",
    "decode.max_length_extra=10",
    "data.tgt_lang=iso",
)
# Changes to the miniature of a recipe, which trains in minutes on two CPU cores.
RECIPE_SETTINGS = (
    "text.character_coverage=1.0",
    "model.width=128",
    "train.threads=1",
    "train.steps=3000",
    "train.target_exact=0.99",
    "train.batch_tokens=1200",
    "train.learning_rate=2.5e-3",
    "train.warmup_steps=100",
    "train.validate_every=250",
    "train.validate_sentences=100",
    "train.checkpoint_every=750",
    "train.keep_checkpoints=1",
    "train.final_checkpoint=last",
    "decode.beam=1",
    "decode.max_length_extra=10",
    "data.tgt_lang=iso",
)
EXAMPLE_LOCALES = ("de", "fr", "en", "zh", "ru", "ar", "hi", "ja")  # languages of the examples


class DemoResult(NamedTuple):
    """Evaluation on held-out dates."""

    exact: float  # fraction of exact translations
    dates: int  # number of test dates
    wrong: list[tuple[DatePair, str]]  # incorrect translations
    by_locale: dict[str, float]


def write_corpus(folder: Path, *, seed: int) -> DateSplit:
    """Write the three sets as aligned text files and return them."""
    corpus = make_date_splits(seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(DateSplit._fields, corpus, strict=True):
        _write_lines(folder / f"{name}.text", (pair.text for pair in part))
        _write_lines(folder / f"{name}.iso", (pair.iso for pair in part))
    return corpus


def demo_config(
    folder: Path, *, seed: int, seconds: float = 0.0, device: str = "", recipe: str = ""
) -> Config:
    """Return the configuration for a corpus written by `write_corpus`.

    With a recipe it is that recipe's miniature.
    """
    files = {
        "src": "train.text",
        "tgt": "train.iso",
        "valid_src": "valid.text",
        "valid_tgt": "valid.iso",
        "cache_dir": "prepared",
    }
    overrides = [
        *(RECIPE_SETTINGS if recipe else DEMO_SETTINGS),
        *(f"data.{name}='{folder / file}'" for name, file in files.items()),
        f"train.seed={seed}",
    ]
    overrides += [f"train.time_budget={seconds}"] if seconds else []
    overrides += [f"train.device={device}"] if device else []
    if not recipe:
        return read_config(recipe="tiny", overrides=overrides)
    task = read_config(recipe=recipe).task
    if task != "translate":
        raise ConfigError(
            [
                f"the demo translates dates and needs a recipe of translation; found {recipe}, "
                f"whose task is {task}; use bahdanau2015"
            ]
        )
    return read_config(recipe=recipe, overrides=overrides, scale=mini)


def check_demo(
    out: Path, *, seed: int, seconds: float, device: str, recipe: str = ""
) -> tuple[OutputDirectory, Config]:
    """Return the demo's directory and configuration; raise if a model cannot be trained there."""
    from dragoman.runs.output_directory_and_resume_checks import OutputDirectory

    output_dir = OutputDirectory(out)
    folder = output_dir.training / "dates"
    if output_dir.has_model and not folder.is_dir():
        raise BundleError(
            "the demo needs a directory of its own",
            found=f"another model in {out}",
            fix="choose another --out",
        )
    output_dir.require_usable()
    config = demo_config(folder, seed=seed, seconds=seconds, device=device, recipe=recipe)
    if output_dir.has_model and output_dir.config().recipe != config.recipe:
        raise BundleError(
            "the demo needs a directory of its own for each recipe",
            found=f"a model of {output_dir.config().recipe} in {out}",
            fix="choose another --out",
        )
    return output_dir, config


def train_demo(
    out: Path, *, seed: int, seconds: float, device: str, progress: Progress, recipe: str = ""
) -> DateSplit:
    """Train the demo's model and return the corpus.

    A finished model of the same seed and recipe is reused.
    """
    output_dir, config = check_demo(out, seed=seed, seconds=seconds, device=device, recipe=recipe)
    corpus = write_corpus(output_dir.training / "dates", seed=seed)
    if output_dir.has_model and output_dir.config().train.seed == seed:
        progress.note(f"{out} is already trained and is reused; delete it to train again")
        return corpus

    # Imported here, so that errors are reported before torch is imported.
    from dragoman.runs.training_run import train

    try:
        train(config, out, progress=progress)
    except StoppedError as error:
        raise StoppedError(
            error.must, found=error.found, fix="run the same command again to resume"
        ) from error
    return corpus


def evaluate_dates(translator: Translator, pairs: Sequence[DatePair]) -> DemoResult:
    """Translate dates and compare them with their references."""
    texts = translator.translate([pair.text for pair in pairs])
    wrong = [(pair, text) for pair, text in zip(pairs, texts, strict=True) if text != pair.iso]
    missed = {pair.locale: 0 for pair in pairs}
    total = dict(missed)
    for pair in pairs:
        total[pair.locale] += 1
    for pair, _ in wrong:
        missed[pair.locale] += 1
    return DemoResult(
        1 - len(wrong) / len(pairs),
        len(pairs),
        wrong,
        {name: 1 - missed[name] / total[name] for name in total},
    )


def pick_examples(
    pairs: Sequence[DatePair], locales: Sequence[str] = EXAMPLE_LOCALES
) -> list[DatePair]:
    """Return one held-out date in each of a few languages."""
    assert set(locales) <= set(LOCALES), (
        f"examples must be in the languages of the corpus; found {locales}"
    )
    first = {
        locale: next((pair for pair in pairs if pair.locale == locale), None) for locale in locales
    }
    return [pair for pair in first.values() if pair]


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
