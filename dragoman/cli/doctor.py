"""`dragoman doctor`: consistency checks of a model, or of the installation."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import DeviceOption, JsonOption, OptionalBundleArgument
from dragoman.cli.terminal_output import format_count, print_json, print_result, print_table
from dragoman.errors import BundleError, ConfigError, CorruptError, DataError, DragomanError

if TYPE_CHECKING:
    from rich.text import Text

    from dragoman.doctor import CheckResult

MAX_NOTE_CHARS = 32  # longer notes are printed below the table, which then fits 80 columns
_STYLES = {"PASS": "green", "FAIL": "bold red", "SKIP": "yellow"}


def doctor(
    model: OptionalBundleArgument = None,
    src: Annotated[
        Path | None,
        typer.Option(help="Source sentences to check on; by default the model's golden sentences."),
    ] = None,
    sentences: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of sentences, from the first.")
    ] = 16,
    export: Annotated[
        list[Path] | None,
        typer.Option(
            help="Directory written by dragoman export, to compare as well. May be repeated."
        ),
    ] = None,
    json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Check a model's batching, KV cache, masks and engines, or the installation.

    Each check of a model reports its largest error and its tolerance, as differences of
    token log-probabilities unless the note says otherwise; for other tasks than translation
    the outputs are checked. Without a model, PyTorch, GPUs, the C++ engine, the cache
    directory, optional packages and the built-in model are checked.
    """
    if model is None:
        if src or export:
            raise ConfigError(
                [f"--{'src' if src else 'export'} is for the checks of a model; name its directory"]
            )
        _check_installation(json)
        return

    from dragoman.evaluate.translation_metrics import read_sentences

    texts = [text for text in read_sentences(src) if text.strip()] if src else []
    if src and not texts:
        raise DataError(
            "--src must hold at least one sentence",
            found=f"none in {src}",
            fix="pass a file with text",
        )

    for directory in export or ():
        if not directory.is_dir():
            found = f"the file {directory}" if directory.exists() else f"nothing at {directory}"
            raise BundleError(
                "--export must be a directory written by dragoman export",
                found=found,
                fix="check the path",
            )

    # Imported here, so that errors in the arguments are reported before torch is imported.
    from dragoman.bundle.format import read_task, require_bundle
    from dragoman.config.root_config import TRANSLATE
    from dragoman.doctor import (
        TaskModelUnderTest,
        load_model_under_test,
        run_checks,
        run_task_checks,
    )

    with _status_line() as on_check:
        on_check("loading the model")
        values: dict[str, object] = {"model": str(model)}
        require_bundle(model)
        if read_task(model) == TRANSLATE:
            subject = load_model_under_test(
                model, texts=texts, sentences=sentences, exports=export or (), device=device
            )
            origin, findings = subject.origin, list(run_checks(subject, on_check=on_check))
            values |= {"sentences": len(subject.sources), "origin": origin}
        elif src or export:
            raise ConfigError(
                [
                    f"--{'src' if src else 'export'} is for translators; found it for a model of "
                    f"the task {read_task(model)}; leave it out"
                ]
            )
        else:
            other = TaskModelUnderTest(model, device=device)
            origin, findings = other.origin, list(run_task_checks(other, on_check=on_check))
            values |= {"task": other.task.name, "inputs": len(other.inputs), "origin": origin}
    failed = [finding.name for finding in findings if finding.passed is False]
    if json:
        print_json(
            {**values, "checks": [finding.to_dict() for finding in findings], "ok": not failed}
        )
    else:
        print_table(
            ["check", "result", "error", "tolerance", "note"],
            map(_table_row, findings),
            title=f"{model}, on {origin}",
            right=["error", "tolerance"],
        )
        for finding in findings:
            if len(finding.note) > MAX_NOTE_CHARS:
                print_result(f"{finding.name}: {finding.note}")
    if failed:
        raise CorruptError(
            f"every check of {model} must pass",
            found=f"{len(failed)} of {len(findings)} failed: {', '.join(failed)}",
            fix="see docs/doctor.md for each check",
        )
    if not json:
        _print_summary(findings)


def _check_installation(json: bool) -> None:
    """Print the checks of the installation; raise DragomanError if one fails."""
    from dragoman._version import __version__
    from dragoman.doctor.installation_checks import run_installation_checks

    with _status_line() as on_check:
        results = list(run_installation_checks(on_check=on_check))
    failed = [result.name for result in results if result.passed is False]
    if json:
        checks = [result.to_dict() for result in results]
        print_json({"version": __version__, "checks": checks, "ok": not failed})
    else:
        print_table(
            ["check", "result", "found"],
            [(result.name, _verdict(result), result.note) for result in results],
            title=f"Dragoman {__version__}",
        )
    if failed:
        raise DragomanError(
            "every check of the installation must pass or be skipped",
            found=f"{len(failed)} of {len(results)} failed: {', '.join(failed)}",
            fix="see what was found above",
        )
    if not json:
        _print_summary(results)


def _print_summary(results: list[CheckResult]) -> None:
    """Print how many checks passed and how many were skipped."""
    passed = sum(bool(result.passed) for result in results)
    skipped = f", {len(results) - passed} skipped" if passed < len(results) else ""
    print_result(f"{format_count(passed, 'check')} passed{skipped}")


def _verdict(result: CheckResult) -> Text:
    """Return PASS, FAIL or SKIP in its color."""
    from rich.text import Text

    return Text(result.verdict, style=_STYLES[result.verdict])


def _table_row(finding: CheckResult) -> tuple[object, ...]:
    """Return a check result as a table row."""
    return (
        finding.name,
        _verdict(finding),
        _format_number(finding.error),
        _format_number(finding.tolerance),
        finding.note if len(finding.note) <= MAX_NOTE_CHARS else "see below",
    )


def _format_number(value: float | None) -> str:
    """Format an error: counts as integers, small values in scientific notation."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value) or isinstance(value, int):
        return str(value if value else 0)
    return f"{value:.3f}" if value >= 0.01 else f"{value:.0e}"


@contextmanager
def _status_line() -> Iterator[Callable[[str], None]]:
    """Show the current check on stderr if it is a terminal."""
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda name: status.update(f"checking: {name}") if sys.stderr.isatty() else None
