"""The demo's work: write the corpus, train on it, and measure what was learnt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dragoman.config import Config, read_config
from dragoman.demo.dates import LOCALES, Pair, Split, split
from dragoman.errors import BundleError, StoppedError

if TYPE_CHECKING:
    from dragoman.training.progress import Progress
    from dragoman.translator import Translator

# Sized so that two CPU cores need about a minute and get nearly every date right (docs/log.md).
SETTINGS = (
    "text.kind=characters",
    "text.coverage=1.0",
    "model.encoder=[self*2]",
    "model.decoder=[self*1]",
    "model.width=128",
    "model.feedforward=512",
    "model.dropout=0",
    "train.threads=1",  # products this small gain little from a second core, and lose much where it is busy
    "train.steps=1500",
    "train.batch_tokens=1200",
    "train.learning_rate=2.5e-3",
    "train.warmup=100",
    "train.ema=0.98",
    "train.label_smoothing=0",
    "train.validate_every=250",
    "train.validate_sentences=100",
    "train.checkpoint_every=750",
    "train.keep=1",
    "train.choose=last",
    "decode.beam=1",
    "decode.max_extra=10",
    "data.tgt_lang=iso",
)
SHOWN = ("de", "fr", "en", "zh", "ru", "ar", "hi", "ja")  # languages of the examples


class Result(NamedTuple):
    """How the model did on dates it never saw."""

    exact: float  # share of dates that are right, letter for letter
    dates: int  # that were tried
    wrong: list[tuple[Pair, str]]  # what it made of those that are not
    by_locale: dict[str, float]


def make_corpus(folder: Path, *, seed: int) -> Split:
    """Write the three parts as aligned text files and return them."""
    corpus = split(seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(Split._fields, corpus, strict=True):
        _write(folder / f"{name}.text", (pair.text for pair in part))
        _write(folder / f"{name}.iso", (pair.iso for pair in part))
    return corpus


def demo_config(folder: Path, *, seed: int, seconds: float = 0.0, device: str = "") -> Config:
    """Choose the settings for a corpus that `make_corpus` wrote into a folder."""
    files = {"src": "train.text", "tgt": "train.iso", "valid_src": "valid.text", "valid_tgt": "valid.iso", "cache": "prepared"}
    overrides = [*SETTINGS, *(f"data.{name}='{folder / file}'" for name, file in files.items()), f"train.seed={seed}"]
    overrides += [f"train.budget={seconds}"] if seconds else []
    overrides += [f"train.device={device}"] if device else []
    return read_config(recipe="tiny", overrides=overrides)


def train_dates(out: Path, *, seed: int, seconds: float, device: str, progress: Progress) -> Split:
    """Train the demo's model into a directory, unless a finished one of the same seed is there; returns the corpus."""
    from dragoman.runs.place import Place

    place = Place(out)
    folder = place.training / "dates"
    if place.finished and not folder.is_dir():
        raise BundleError("the demo needs a directory of its own", found=f"another model in {out}", fix="choose another --out")
    place.check_empty_enough()
    corpus = make_corpus(folder, seed=seed)
    config = demo_config(folder, seed=seed, seconds=seconds, device=device)
    if place.finished and place.config().train.seed == seed:
        progress.note(f"{out} was trained before and is used as it is; delete it to train anew")
        return corpus

    from dragoman.runs.train import train  # here, so that a mistake is found before torch is imported

    try:
        train(config, out, progress=progress)
    except StoppedError as error:
        raise StoppedError(error.must, found=error.found, fix="run the same command again to go on") from error
    return corpus


def measure(translator: Translator, pairs: Sequence[Pair]) -> Result:
    """Translate dates and compare them with the truth, whole or wrong."""
    texts = translator.translate([pair.text for pair in pairs])
    wrong = [(pair, text) for pair, text in zip(pairs, texts, strict=True) if text != pair.iso]
    missed = {pair.locale: 0 for pair in pairs}
    total = dict(missed)
    for pair in pairs:
        total[pair.locale] += 1
    for pair, _ in wrong:
        missed[pair.locale] += 1
    return Result(1 - len(wrong) / len(pairs), len(pairs), wrong, {name: 1 - missed[name] / total[name] for name in total})


def examples(pairs: Sequence[Pair], locales: Sequence[str] = SHOWN) -> list[Pair]:
    """Pick one held-out date in each of a few languages."""
    assert set(locales) <= set(LOCALES), f"examples must be in the corpus's languages; found {locales}"
    first = {locale: next((pair for pair in pairs if pair.locale == locale), None) for locale in locales}
    return [pair for pair in first.values() if pair]


def _write(path: Path, lines: Iterable[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
