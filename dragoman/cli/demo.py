"""`dragoman demo`: the whole road in two minutes, on dates."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.durations import say_duration
from dragoman.cli.options import DeviceOption
from dragoman.cli.show import result, table
from dragoman.files.disk import require_parent_writable

if TYPE_CHECKING:
    from dragoman.demo.dates import Pair
    from dragoman.demo.run import Result
    from dragoman.translator import Translator

TRIED = "3. Mai 1979"  # what the closing lines suggest


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the model.")] = Path("demo-model"),
    seconds: Annotated[float, typer.Option(min=0.0, help="Train for so long instead; 0 for the usual number of updates.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Which dates are held out, and where chance starts.")] = 1,
    device: DeviceOption = "",
) -> None:
    """Make a corpus of dates in many languages, train on it, translate new ones, and show where the model looked."""
    from dragoman.demo.dates import LOCALES, Writer
    from dragoman.demo.run import examples, measure, train_dates
    from dragoman.training.progress import open_progress

    require_parent_writable(out / "model")
    Writer()  # tells at once when Babel is missing
    result(f"Dates as people write them, in {len({name.partition('_')[0] for name in LOCALES})} languages, to be turned into ISO dates.\n")
    began = time.monotonic()
    corpus = train_dates(out, seed=seed, seconds=seconds, device=device, progress=open_progress(sys.stderr))
    result(f"trained on {len(corpus.train):,} pairs in {say_duration(time.monotonic() - began)}, all told")

    from dragoman.translator import Translator  # here, so that a mistake is found before torch is imported

    translator = Translator.load(out, device=device or "auto")
    _show_score(measure(translator, corpus.test))
    shown = examples(corpus.test)
    table(["written", "translated", "right?"], _rows(translator, shown), title="\nNew dates, which the training text does not hold:")
    picture = out / "training" / "attention.png"
    _show_attention(translator, shown[0], picture)
    result(f'\nThe model is in {out}, the picture in {picture}. What to try next:\n\n  dragoman translate -m {out} "{TRIED}"')
    result(f"  dragoman info {out}\n  dragoman evaluate {out} --src {out}/training/dates/test.text --ref {out}/training/dates/test.iso")
    result("  dragoman train --src your.de --tgt your.en --out my-model --budget 10m")


def _show_score(found: Result) -> None:
    """Say how many held-out dates are right, and where the model is weakest."""
    result(f"held-out dates: {found.exact:.1%} of {found.dates:,} are right, letter for letter")
    weak = [f"{name} {share:.0%}" for share, name in sorted((share, name) for name, share in found.by_locale.items() if share < 1)]
    if weak:
        rest = f" and {len(weak) - 5} more" if len(weak) > 5 else "; no mistake in any other language"
        result(f"  weakest: {', '.join(weak[:5])}{rest}")
    for pair, text in found.wrong[:3]:
        result(f"  such as: {pair.text} -> {text}, which should be {pair.iso}")


def _rows(translator: Translator, pairs: list[Pair]) -> list[tuple[str, str, str]]:
    """Translate examples for a table."""
    texts = translator.translate([pair.text for pair in pairs])
    return [(pair.text, text, "yes" if text == pair.iso else f"no: {pair.iso}") for pair, text in zip(pairs, texts, strict=True)]


def _show_attention(translator: Translator, pair: Pair, picture: Path) -> None:
    """Show where the model looked while it wrote one date: in the terminal, and as a PNG."""
    from rich.console import Console

    from dragoman.explain.figures import save_attention_map
    from dragoman.explain.terminal import attention_text

    found = translator.explain(pair.text)
    src, tgt = found.src_pieces, found.tgt_pieces
    assert found.alignment is not None, "the demo's model has cross-attention"
    result(f"\nWhere the model looked (across) while it wrote (down) {found.translation}:\n")
    Console(file=sys.stdout, highlight=False).print(attention_text(found.alignment, src_pieces=src, tgt_pieces=tgt))
    save_attention_map(picture, found.alignment, src_pieces=src, tgt_pieces=tgt, title=f"{found.text} → {found.translation}")
