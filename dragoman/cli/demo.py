"""`dragoman demo`: translate with the built-in model, then train and inspect a small one."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import DeviceOption
from dragoman.cli.terminal_output import print_result, print_table
from dragoman.storage.disk_space_and_errors import require_parent_writable
from dragoman.training.progress_display import format_duration

if TYPE_CHECKING:
    from dragoman.demo.date_corpus import DatePair
    from dragoman.demo.training_and_evaluation import DemoResult
    from dragoman.inference import Translator

# Sentences for the built-in model, with the language that they are translated into.
EXAMPLES = (
    ("Guten Morgen, wie geht es dir?", "en"),
    ("Je voudrais un café, s'il vous plaît.", "en"),
    ("Where is the station?", "de"),
    ("I have never seen such a beautiful sunset.", "fr"),
)
EXAMPLE_DATE = "3. Mai 1979"  # suggested after the demo


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Model directory to write.")] = Path(
        "demo-model"
    ),
    recipe: Annotated[
        str,
        typer.Option(
            help="Train the miniature of a recipe instead, such as bahdanau2015; takes minutes."
        ),
    ] = "",
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0, help="Time budget instead of a number of steps; 0 for the default steps."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed, also of the held-out dates.")] = 1,
    device: DeviceOption = "",
) -> None:
    """Translate with the built-in model, then train one on dates in two minutes."""
    from dragoman.demo.date_corpus import LOCALES, DateWriter
    from dragoman.demo.training_and_evaluation import (
        check_demo,
        evaluate_dates,
        pick_examples,
        train_demo,
    )
    from dragoman.training.progress_display import open_progress

    require_parent_writable(out / "model")
    DateWriter()  # raises DataError early if Babel is not installed
    check_demo(out, seed=seed, seconds=seconds, device=device, recipe=recipe)
    _print_built_in(device or "auto")
    languages = len({name.partition("_")[0] for name in LOCALES})
    print_result(f"Task: translate dates written in {languages} languages into ISO dates.\n")
    began = time.monotonic()
    corpus = train_demo(
        out,
        seed=seed,
        seconds=seconds,
        device=device,
        recipe=recipe,
        progress=open_progress(sys.stderr),
    )
    print_result(
        f"trained on {len(corpus.train):,} pairs in {format_duration(time.monotonic() - began)}"
    )

    # Imported here, so that errors are reported before torch is imported.
    from dragoman.inference import Translator

    translator = Translator.load(out, device=device or "auto")
    _print_score(evaluate_dates(translator, corpus.test))
    shown = pick_examples(corpus.test)
    print_result("")
    print_table(
        ["source", "translation", "correct"],
        _example_rows(translator, shown),
        title="Held-out dates:",
    )
    picture = out / "training" / "attention.png"
    plotted = _print_attention(translator, shown[0], picture)
    where = f"{out}, the attention plot in {picture}" if plotted else f"{out}"
    print_result(
        f'\nThe model is in {where}. Next:\n\n  dragoman translate -m {out} "{EXAMPLE_DATE}"'
    )
    print_result(
        f"  dragoman info {out}\n  dragoman evaluate {out} --src {out}/training/dates/test.text "
        f"--ref {out}/training/dates/test.iso"
    )
    print_result("  dragoman train --src your.de --tgt your.en --out my-model --budget 10m")


def _print_built_in(device: str) -> None:
    """Print translations of the built-in model; nothing if there is none."""
    from dragoman.bundle.format import BOX

    if not BOX.is_dir():
        return
    began = time.monotonic()

    # Imported here, so that errors are reported before torch is imported.
    from dragoman.inference import Translator

    translator = Translator.load(device=device)
    rows = [
        (text, translator.translate([text], target_language=language)[0])
        for text, language in EXAMPLES
    ]
    took = format_duration(time.monotonic() - began)
    print_table(["source", "translation"], rows, title=f"The built-in model, in {took}:")
    print_result('\nMore of it: dragoman translate --to en "…" and dragoman info.\n')


def _print_score(found: DemoResult) -> None:
    """Print the accuracy on held-out dates and the locales with the lowest accuracy."""
    print_result(f"held-out dates: {found.exact:.1%} of {found.dates:,} translated exactly")
    weakest = [
        f"{name} {accuracy:.0%}"
        for accuracy, name in sorted(
            (accuracy, name) for name, accuracy in found.by_locale.items() if accuracy < 1
        )
    ]
    if weakest:
        rest = (
            f" and {len(weakest) - 5} more"
            if len(weakest) > 5
            else "; no errors in other languages"
        )
        print_result(f"  lowest accuracy: {', '.join(weakest[:5])}{rest}")
    for pair, text in found.wrong[:3]:
        print_result(f"  error: {pair.text} -> {text}, reference {pair.iso}")


def _example_rows(translator: Translator, pairs: list[DatePair]) -> list[tuple[str, str, str]]:
    """Return table rows of example translations."""
    texts = translator.translate([pair.text for pair in pairs])
    return [
        (pair.text, text, "yes" if text == pair.iso else f"no: {pair.iso}")
        for pair, text in zip(pairs, texts, strict=True)
    ]


def _print_attention(translator: Translator, pair: DatePair, picture: Path) -> bool:
    """Plot the cross-attention weights of one translation in the terminal and as a PNG.

    Return False if the model has no cross-attention.
    """
    from rich.console import Console

    from dragoman.explain.attention_plots import save_attention_map
    from dragoman.explain.terminal_attention_map import render_attention

    found = translator.explain(pair.text)
    src, tgt = found.src_tokens, found.tgt_tokens
    if found.alignment is None:
        print_result("\nThe model has no cross-attention whose weights could be plotted.")
        return False
    print_result(
        f"\nCross-attention weights of {found.translation} (rows) over the source (columns):\n"
    )
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
    return True
