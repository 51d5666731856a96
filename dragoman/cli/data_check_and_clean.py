"""`dragoman data`: check a parallel corpus or labelled files, and clean a parallel corpus."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.command_progress_bar import ProgressBar, progress
from dragoman.cli.options import (
    JsonOption,
    PairsOption,
    PairsSrcOption,
    PairsTgtOption,
    SrcFieldOption,
    SrcLangOption,
    TextFieldOption,
    TgtFieldOption,
    TgtLangOption,
)
from dragoman.cli.parallel_corpus_opener import open_corpus
from dragoman.cli.terminal_output import (
    format_count,
    print_json,
    print_note,
    print_result,
    print_table,
)
from dragoman.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dragoman.data.parallel_corpus import Corpus
    from dragoman.data.task_data_checks import RecordReport

MAX_LABELS_SHOWN = 20  # rows of the table of labels; --json has all
MAX_LINES_SHOWN = 5  # line numbers in a row of the table; --json has all
FINDINGS_EXIT_CODE = 1  # the exit code of --strict where something was found

TestSrcOption = Annotated[
    str,
    typer.Option(
        "--test-src",
        help="Source sentences of a test set, to find leakage into the corpus.",
        metavar="FILE",
    ),
]
TestTgtOption = Annotated[
    str, typer.Option("--test-tgt", help="Target sentences of the test set.", metavar="FILE")
]
TestPairsOption = Annotated[
    str, typer.Option("--test-pairs", help="Test set in one file instead.", metavar="FILE")
]

app = typer.Typer(name="data", help="Check and clean a corpus before training.")


@app.callback(invoke_without_command=True)
def group(context: typer.Context) -> None:
    """Check and clean a corpus before training."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def check(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE", help="Files of --task: JSONL, CSV, TSV or text.", show_default=False
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="What the files are for: translate, classify, tag, pairs, language or sets.",
        ),
    ] = "translate",
    valid: Annotated[
        list[Path] | None,
        typer.Option(
            "--valid",
            metavar="FILE",
            help="Validation or test files of --task, to find their texts in FILE.",
        ),
    ] = None,
    text_field: TextFieldOption = None,
    label_field: Annotated[
        str, typer.Option("--label-field", help="Column with the label.", show_default=False)
    ] = "",
    src: PairsSrcOption = "",
    tgt: PairsTgtOption = "",
    pairs: PairsOption = "",
    src_field: SrcFieldOption = "",
    tgt_field: TgtFieldOption = "",
    src_lang: SrcLangOption = "",
    tgt_lang: TgtLangOption = "",
    test_src: TestSrcOption = "",
    test_tgt: TestTgtOption = "",
    test_pairs: TestPairsOption = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 if any check found something.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check a corpus for misalignment, empty lines, duplicates, bad UTF-8 and test-set leakage.

    With another --task, check its files: the distribution of labels, duplicates, texts with
    two labels, and texts that --valid has too.

    The exit code is 0 if the corpus could be read, whatever was found in it;
    with --strict it is 1 if any check found something.
    """
    if task != "translate" or files:
        options = {"--src": src, "--tgt": tgt, "--pairs": pairs}
        texts = _name_text_fields(task, text_field or [])
        _check_labeled(
            task,
            files or [],
            valid or [],
            fields={**texts, "label_field": label_field},
            parallel=[name for name, value in options.items() if value],
            strict=strict,
            json=json,
        )
        return
    from dragoman.data.corpus_checks import check_corpus
    from dragoman.training.progress_display import open_progress

    fields = {
        "src_field": src_field,
        "tgt_field": tgt_field,
        "src_lang": src_lang,
        "tgt_lang": tgt_lang,
    }
    corpus = open_corpus(src=src, tgt=tgt, pairs=pairs, **fields)
    held_out = _open_test_set(test_src, test_tgt, test_pairs, fields)
    seen = 0

    def advance(total: int) -> None:
        nonlocal seen
        phase.advance(total - seen)
        seen = total

    with open_progress(sys.stderr).phase("checking", None, "pairs") as phase:
        findings = check_corpus(corpus, held_out=held_out, progress=advance)
    if not seen:
        names = " and ".join(map(str, corpus.files))
        raise DataError(
            f"{names} must hold text to check",
            found="no line at all",
            fix="check the path, or what wrote the file",
        )
    bad = [each for each in findings if not each.ok]
    if json:
        rows = [
            {
                "check": each.check,
                "code": each.code,
                "count": each.count,
                "lines": each.lines,
                "advice": each.advice,
            }
            for each in findings
        ]
        print_json(
            {
                "files": [str(path) for path in corpus.files],
                **_column_info(corpus),
                "pairs": seen,
                "findings": rows,
            }
        )
    else:
        _print_columns(corpus)
        print_table(
            ["check", "found", "first lines", "advice"],
            [
                (
                    each.check,
                    f"{each.count:,}" if each.count else "-",
                    _format_lines(each.lines, each.count),
                    each.advice,
                )
                for each in findings
            ],
            right=["found"],
        )
        verdict = (
            f"{format_count(len(bad), 'check')} found something" if bad else "no problems found"
        )
        print_result(f"\n{format_count(seen, 'pair')}: {verdict}")
    if strict and bad:
        raise typer.Exit(FINDINGS_EXIT_CODE)


def _name_text_fields(task: str, fields: list[str]) -> dict[str, str]:
    """Return the columns that --text-field names, two for sentence pairs."""
    names = ("text_field", "second_field") if task == "pairs" else ("text_field",)
    if len(fields) > len(names):
        raise ConfigError(
            [
                f"--text-field is given at most {'twice' if len(names) > 1 else 'once'} for "
                f"--task {task:.40}; found {' and '.join(fields):.80}; leave out the rest"
            ]
        )
    return dict(zip(names, fields, strict=False))


def _check_task_arguments(task: str, files: list[Path], parallel: list[str]) -> None:
    """Raise ConfigError unless the task has labelled files, and only those are named."""
    from dragoman.data.task_data_checks import READERS

    if task not in READERS:
        found = f"--task {task!r:.40}" + (f" and {files[0]}" if files else "")
        if task == "translate":
            raise ConfigError(
                [
                    f"a parallel corpus must be named by options; found {' '.join(map(str, files))}"
                    "; use --pairs FILE, or --src FILE --tgt FILE, or name another --task"
                ]
            )
        raise ConfigError(
            [
                "--task must be translate, with --src and --tgt, or one of "
                f"{', '.join(READERS)}, with FILE; found {found}; name the right one"
            ]
        )
    if parallel or not files:
        raise ConfigError(
            [
                f"--task {task} checks its own files; found "
                f"{parallel[0] if parallel else 'no FILE'}; "
                f"write: dragoman data check --task {task} FILE"
            ]
        )


def _check_labeled(
    task: str,
    files: list[Path],
    valid: list[Path],
    *,
    fields: dict[str, str],
    parallel: list[str],
    strict: bool,
    json: bool,
) -> None:
    """Check labelled files and print their labels and findings."""
    from dragoman.data.compressed_input_streams import open_input_file
    from dragoman.data.labeled_records import read_records, read_rows
    from dragoman.data.task_data_checks import check_labels
    from dragoman.training.progress_display import open_progress

    _check_task_arguments(task, files, parallel)
    for path in [*files, *valid]:
        open_input_file(path).close()
    seen = 0

    def advance(total: int) -> None:
        nonlocal seen
        phase.advance(total - seen)
        seen = total

    with open_progress(sys.stderr).phase("checking", None, "texts") as phase:
        report = check_labels(
            read_rows(files, fields=fields.values()),
            held_out=read_records(valid, fields=fields.values()),
            task=task,
            progress=advance,
            **fields,
        )
    if not report.examples:
        raise DataError(
            f"{' and '.join(map(str, files))} must hold examples to check",
            found="none that can be read",
            fix="check the path, or what wrote the file",
        )
    bad = [each for each in report.findings if not each.ok]
    if json:
        print_json(
            {
                "files": [str(path) for path in files],
                "examples": report.examples,
                "labels": report.labels,
                "multi_label": report.multi_label,
                "mean_words": round(report.mean_words, 2),
                "findings": [dataclasses.asdict(each) for each in report.findings],
            }
        )
    else:
        if report.labels:
            _print_labels(report, "words" if task == "tag" else "texts")
        print_table(
            ["check", "found", "first lines", "advice"],
            [
                (
                    each.check,
                    f"{each.count:,}" if each.count else "-",
                    _format_lines(each.lines, each.count),
                    each.advice,
                )
                for each in report.findings
            ],
            right=["found"],
        )
        verdict = (
            f"{format_count(len(bad), 'check')} found something" if bad else "no problems found"
        )
        print_result(
            f"\n{format_count(report.examples, 'text')} of {report.mean_words:.1f} words on "
            f"average: {verdict}"
        )
    if strict and bad:
        raise typer.Exit(FINDINGS_EXIT_CODE)


def _print_labels(report: RecordReport, unit: str) -> None:
    """Print the distribution of the labels, the most frequent first."""
    shown = list(report.labels.items())[:MAX_LABELS_SHOWN]
    most = max((count for _, count in shown), default=1)
    # Of all words, or of all texts, which may have several labels.
    total = sum(report.labels.values()) if unit == "words" else report.examples
    rows = [
        (label, f"{count:,}", f"{count / total:.3f}", "█" * max(1, 20 * count // most))
        for label, count in shown
    ]
    more = len(report.labels) - len(shown)
    print_table(["label", unit, "fraction", ""], rows, right=[unit, "fraction"])
    if more:
        print_result(f"and {format_count(more, 'label')} more; --json has all")
    if report.multi_label:
        print_result("texts have any number of labels (multi-label)")
    print_result()


@app.command()
def clean(
    src: PairsSrcOption = "",
    tgt: PairsTgtOption = "",
    out_src: Annotated[
        Path | None,
        typer.Option(
            "--out-src", help="File for the cleaned source sentences; .gz and .xz compress."
        ),
    ] = None,
    out_tgt: Annotated[
        Path | None, typer.Option("--out-tgt", help="File for the cleaned target sentences.")
    ] = None,
    pairs: PairsOption = "",
    out_pairs: Annotated[
        Path | None,
        typer.Option("--out-pairs", help="File for the cleaned pairs, of the same format."),
    ] = None,
    src_field: SrcFieldOption = "",
    tgt_field: TgtFieldOption = "",
    src_lang: SrcLangOption = "",
    tgt_lang: TgtLangOption = "",
    test_src: TestSrcOption = "",
    test_tgt: TestTgtOption = "",
    test_pairs: TestPairsOption = "",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            help="Finding to keep: empty, duplicate, length-ratio, copy, tokenised, source-leak …",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Remove the pairs that `data check` reports and count them by reason.

    The input files are not changed; the output files are written atomically.
    Files with different numbers of lines are rejected, because the missing
    line cannot be located.
    """
    fields = {
        "src_field": src_field,
        "tgt_field": tgt_field,
        "src_lang": src_lang,
        "tgt_lang": tgt_lang,
    }
    corpus = open_corpus(src=src, tgt=tgt, pairs=pairs, what="cleaning", **fields)
    outputs = _output_files(pairs, out_src, out_tgt, out_pairs)
    held_out = _open_test_set(test_src, test_tgt, test_pairs, fields)

    from dragoman.data.corpus_cleaner import clean_corpus

    with progress("cleaning", None, "pairs") as bar:
        found = clean_corpus(
            corpus, outputs, held_out=held_out, keep=keep or (), progress=_progress_callback(bar)
        )
    if json:
        remaining = [
            {"code": each.code, "lines": each.lines, "advice": each.advice}
            for each in found.remaining
        ]
        numbers = {
            "read": found.read,
            "kept": found.kept,
            "removed": found.reasons,
            "remaining": remaining,
        }
        print_json({"files": [str(path) for path in outputs], **_column_info(corpus), **numbers})
        return
    _print_columns(corpus)
    print_table(
        ["reason", "removed"],
        [(code, f"{number:,}") for code, number in found.reasons.items()],
        right=["removed"],
    )
    removed = found.read - found.kept
    print_result(
        f"{format_count(found.read, 'pair')} read, {removed:,} removed, {found.kept:,} written to "
        f"{' and '.join(map(str, outputs))}"
    )
    for each in found.remaining:
        print_note(
            f"warning: {each.check} near line {each.lines[0]}: {each.advice}; removing single "
            "lines does not fix this"
        )


def _output_files(
    pairs: str, out_src: Path | None, out_tgt: Path | None, out_pairs: Path | None
) -> list[Path]:
    """Return the output files; raise ConfigError unless there is one for each input file."""
    if pairs and out_pairs and not out_src and not out_tgt:
        return [out_pairs]
    if not pairs and out_src and out_tgt and not out_pairs:
        return [out_src, out_tgt]
    flags = {"--out-src": out_src, "--out-tgt": out_tgt, "--out-pairs": out_pairs}
    given = ", ".join(flag for flag, path in flags.items() if path) or "none"
    wanted, of = (
        ("--out-pairs", "--pairs") if pairs else ("--out-src and --out-tgt", "--src and --tgt")
    )
    raise ConfigError([f"cleaning {of} needs {wanted}; found {given}; name them"])


def _open_test_set(src: str, tgt: str, pairs: str, fields: dict[str, str]) -> Corpus | None:
    """Open the test set if one was named; it has the same columns as the corpus."""
    if not (src or tgt or pairs):
        return None
    own = (
        fields
        if pairs
        else {name: value for name, value in fields.items() if name.endswith("lang")}
    )
    return open_corpus(src=src, tgt=tgt, pairs=pairs, prefix="test-", **own)


def _progress_callback(bar: ProgressBar) -> Callable[[int], None]:
    """Return a callback that takes the number of pairs read so far."""
    return lambda total: bar.advance(total - bar.done)


def _column_info(corpus: Corpus) -> dict[str, Any]:
    """Return the columns and header of a file of pairs; empty for two files."""
    from dragoman.data.parallel_corpus import TabularCorpus

    if not isinstance(corpus, TabularCorpus) or corpus.columns is None:
        return {}
    taken = corpus.columns
    named = [
        corpus.header[each] if isinstance(each, int) and corpus.header else each
        for each in (taken.src, taken.tgt)
    ]
    src, tgt = (each + 1 if isinstance(each, int) else each for each in named)
    return {"columns": {"src": src, "tgt": tgt, "header": corpus.header if taken.header else None}}


def _print_columns(corpus: Corpus) -> None:
    """Print which columns were read."""
    for taken in _column_info(corpus).values():
        header = (
            f"; the first row is a header: {', '.join(taken['header'])}" if taken["header"] else ""
        )
        print_note(f"source from column {taken['src']}, target from column {taken['tgt']}{header}")


def _format_lines(lines: Sequence[int | str], total: int) -> str:
    """Return the first line numbers, with an ellipsis if there are more."""
    return ", ".join(map(str, lines[:MAX_LINES_SHOWN])) + (
        ", …" if total > MAX_LINES_SHOWN and lines else ""
    )
