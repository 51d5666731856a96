"""`dragoman doctor`: is a model sound?"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import BundleArgument, DeviceOption, JsonOption
from dragoman.cli.output import format_count, print_json, print_result, print_table
from dragoman.errors import BundleError, CorruptError, DataError

if TYPE_CHECKING:
    from dragoman.doctor import CheckResult

MAX_NOTE_CHARS = (
    40  # characters, with which the table fits a narrow terminal; longer notes stand below it
)
_STYLES = {"PASS": "green", "FAIL": "bold red", "SKIP": "yellow"}


def doctor(
    model: BundleArgument,
    src: Annotated[
        Path | None,
        typer.Option(help="Sentences to try it on; by default those that the model carries."),
    ] = None,
    sentences: Annotated[
        int, typer.Option(min=1, max=10_000, help="How many of them, from the first on.")
    ] = 16,
    export: Annotated[
        list[Path] | None,
        typer.Option(
            help="A directory that dragoman export made, to compare as well; may be given several times."
        ),
    ] = None,
    json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Check that a model is sound: batches, caches, beams, masks, precisions and engines change nothing but rounding.

    Each check has its largest error and what a sound model may have, in log-probability of a piece where nothing else is said.
    """
    from dragoman.evaluate.metrics import read_sentences

    texts = [text for text in read_sentences(src) if text.strip()] if src else []
    if src and not texts:
        raise DataError(
            "the sentences to try a model on must be some",
            found=f"none in {src}",
            fix="give a file with text",
        )

    for directory in export or ():
        if not directory.is_dir():
            found = f"the file {directory}" if directory.exists() else f"nothing at {directory}"
            raise BundleError(
                "--export must be a directory that dragoman export made",
                found=found,
                fix="check the path",
            )

    from dragoman.doctor import (
        load_model_under_test,
        run_checks,
    )  # here, so that a mistake is found before torch is imported

    with _status_line() as on_check:
        on_check("reading the model")
        subject = load_model_under_test(
            model, texts=texts, sentences=sentences, exports=export or (), device=device
        )
        findings = list(run_checks(subject, on_check=on_check))
    failed = [finding.name for finding in findings if finding.passed is False]
    if json:
        facts = {"model": str(model), "sentences": len(subject.sources), "origin": subject.origin}
        print_json({**facts, "checks": [finding.facts() for finding in findings], "ok": not failed})
    else:
        print_table(
            ["check", "result", "error", "at most", "note"],
            map(_table_row, findings),
            title=f"{model}, on {subject.origin}",
            right=["error", "at most"],
        )
        for finding in findings:
            if len(finding.note) > MAX_NOTE_CHARS:
                print_result(f"{finding.name}: {finding.note}")
    if failed:
        raise CorruptError(
            f"every check of {model} must pass",
            found=f"{len(failed)} of {len(findings)} failed: {', '.join(failed)}",
            fix="docs/doctor.md says what each one means",
        )
    if not json:
        done = sum(bool(finding.passed) for finding in findings)
        print_result(
            f"{format_count(done, 'check')} passed"
            + (f", {len(findings) - done} did not apply" if done < len(findings) else "")
        )


def _table_row(finding: CheckResult) -> tuple[object, ...]:
    """Write a finding as a row: whole numbers are counts, others are shown by their size."""
    from rich.text import Text

    return (
        finding.name,
        Text(finding.verdict, style=_STYLES[finding.verdict]),
        _format_number(finding.error),
        _format_number(finding.tolerance),
        finding.note if len(finding.note) <= MAX_NOTE_CHARS else "see below",
    )


def _format_number(value: float | None) -> str:
    """Write an error as a person would: a count whole, a tiny one in powers of ten."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value) or isinstance(value, int):
        return str(value if value else 0)
    return f"{value:.3f}" if value >= 0.01 else f"{value:.0e}"


@contextmanager
def _status_line() -> Iterator[Callable[[str], None]]:
    """Show on a terminal's stderr what is being checked; elsewhere stay silent."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda name: status.update(f"checking: {name}") if sys.stderr.isatty() else None
