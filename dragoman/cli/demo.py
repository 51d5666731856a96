"""`dragoman demo`: the whole road in two minutes, on dates."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.durations import format_duration
from dragoman.cli.options import DeviceOption
from dragoman.cli.output import print_result, print_table
from dragoman.storage.disk import require_parent_writable

if TYPE_CHECKING:
    from dragoman.demo.dates import DatePair
    from dragoman.demo.run import DemoResult
    from dragoman.inference import Translator

EXAMPLE_DATE = "3. Mai 1979"  # what the closing lines suggest


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the model.")] = Path(
        "demo-model"
    ),
    seconds: Annotated[
        float,
        typer.Option(min=0.0, help="Train for so long instead; 0 for the usual number of updates."),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, help="Which dates are held out, and where chance starts.")
    ] = 1,
    device: DeviceOption = "",
) -> None:
    """Make a corpus of dates in many languages, train on it, translate new ones, and show where the model looked."""
    from dragoman.demo.dates import LOCALES, DateWriter
    from dragoman.demo.run import evaluate_dates, pick_examples, train_demo
    from dragoman.training.progress import open_progress

    require_parent_writable(out / "model")
    DateWriter()  # tells at once when Babel is missing
    print_result(
        f"Dates as people write them, in {len({name.partition('_')[0] for name in LOCALES})} languages, to be turned into ISO dates.\n"
    )
    began = time.monotonic()
    corpus = train_demo(
        out, seed=seed, seconds=seconds, device=device, progress=open_progress(sys.stderr)
    )
    print_result(
        f"trained on {len(corpus.train):,} pairs in {format_duration(time.monotonic() - began)}, all told"
    )

    from dragoman.inference import (
        Translator,
    )  # here, so that a mistake is found before torch is imported

    translator = Translator.load(out, device=device or "auto")
    _print_score(evaluate_dates(translator, corpus.test))
    shown = pick_examples(corpus.test)
    print_table(
        ["written", "translated", "right?"],
        _example_rows(translator, shown),
        title="\nNew dates, which the training text does not hold:",
    )
    picture = out / "training" / "attention.png"
    _print_attention(translator, shown[0], picture)
    print_result(
        f'\nThe model is in {out}, the picture in {picture}. What to try next:\n\n  dragoman translate -m {out} "{EXAMPLE_DATE}"'
    )
    print_result(
        f"  dragoman info {out}\n  dragoman evaluate {out} --src {out}/training/dates/test.text --ref {out}/training/dates/test.iso"
    )
    print_result("  dragoman train --src your.de --tgt your.en --out my-model --budget 10m")


def _print_score(found: DemoResult) -> None:
    """Say how many held-out dates are right, and where the model is weakest."""
    print_result(
        f"held-out dates: {found.exact:.1%} of {found.dates:,} are right, letter for letter"
    )
    weakest = [
        f"{name} {share:.0%}"
        for share, name in sorted(
            (share, name) for name, share in found.by_locale.items() if share < 1
        )
    ]
    if weakest:
        rest = (
            f" and {len(weakest) - 5} more"
            if len(weakest) > 5
            else "; no mistake in any other language"
        )
        print_result(f"  weakest: {', '.join(weakest[:5])}{rest}")
    for pair, text in found.wrong[:3]:
        print_result(f"  such as: {pair.text} -> {text}, which should be {pair.iso}")


def _example_rows(translator: Translator, pairs: list[DatePair]) -> list[tuple[str, str, str]]:
    """Translate examples for a table."""
    texts = translator.translate([pair.text for pair in pairs])
    return [
        (pair.text, text, "yes" if text == pair.iso else f"no: {pair.iso}")
        for pair, text in zip(pairs, texts, strict=True)
    ]


def _print_attention(translator: Translator, pair: DatePair, picture: Path) -> None:
    """Show where the model looked while it wrote one date: in the terminal, and as a PNG."""
    from rich.console import Console

    from dragoman.explain.attention_plot import save_attention_map
    from dragoman.explain.terminal_plot import render_attention

    found = translator.explain(pair.text)
    src, tgt = found.src_tokens, found.tgt_tokens
    assert found.alignment is not None, "the demo's model has cross-attention"
    print_result(f"\nWhere the model looked (across) while it wrote (down) {found.translation}:\n")
    Console(file=sys.stdout, highlight=False).print(
        render_attention(found.alignment, src_tokens=src, tgt_tokens=tgt)
    )
    save_attention_map(
        picture,
        found.alignment,
        src_tokens=src,
        tgt_tokens=tgt,
        title=f"{found.text} → {found.translation}",
    )
