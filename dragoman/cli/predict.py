"""`dragoman predict`: labels, tags and values of texts, with explanations of a label."""

from __future__ import annotations

import contextlib
import json as json_format
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.command_progress_bar import is_terminal, progress
from dragoman.cli.input_lines import check_inputs, decode_lines, open_stream_lines
from dragoman.cli.options import (
    BatchSizeOption,
    DeviceOption,
    JsonOption,
    PredictorOption,
    TextFieldOption,
)
from dragoman.cli.terminal_output import PIPE_WIDTH, format_count, print_json, print_note
from dragoman.cli.terminal_output import print_text as write_output
from dragoman.cli.translate import line_writer, warn_about_file
from dragoman.errors import ConfigError, DataError
from dragoman.storage.user_output_files import check_output_file, open_output

if TYPE_CHECKING:
    from dragoman.data.labeled_records import Record
    from dragoman.inference.predictors.base import Predictor

NOTES_SHOWN = 3
MAX_TEXT_CHARS = 1 << 20  # of one text: a book
MAX_EXPLAINED = 1_000  # texts of an HTML page
_STDIN = Path("standard input")


def predict(
    model: PredictorOption,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Input texts; by default standard input is read."),
    ] = None,
    input_: Annotated[
        list[Path] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="Input file, one text per line or record: plain text, JSONL, CSV, TSV, "
            "CoNLL, also .gz or .xz; - is standard input. May be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write instead of standard output, atomically at the end.",
        ),
    ] = None,
    text_field: TextFieldOption = None,
    top: Annotated[
        int, typer.Option(min=1, max=1000, help="Labels per text, most probable first.")
    ] = 1,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Show the attention weight of each word and sentence, and how leaving it out "
            "changes the probability.",
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write the explanations to this file as a web page."),
    ] = None,
    batch_size: BatchSizeOption = None,
    json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Predict labels, tags or values of texts, files or standard input, one line each.

    A classifier prints `label TAB probability TAB text`, with --top several labels with their
    probabilities. A pair of sentences is a line with a tab, a set is a JSON list. Order and empty
    lines are kept. With --json each line is an object with everything that the model predicts.
    """
    if texts and input_:
        raise ConfigError(
            [
                "texts and --input exclude each other; "
                f"found {texts[0]!r:.60} and {input_[0]}; keep one"
            ]
        )
    if texts:
        check_no_text_field(text_field)
    for text in texts or ():
        warn_about_file(text, "predicted")
    inputs = check_inputs(input_ or [])
    read = [Path("/dev/stdin") if str(each) == "-" else each for each in inputs or [Path("-")]]
    target = None if output is None or str(output) == "-" else output
    for option, path in (("--output", target), ("--html", html)):
        if path is not None:
            check_output_file(option, path, inputs=[*read, model])

    from dragoman.inference.predictors.catalogue import load  # imports torch

    predictor = load(model, device=device)
    if top > 1 and not predictor.has_alternatives:
        raise ConfigError(
            [
                "--top is for models that choose among labels or tokens; found a model of the task "
                f"{predictor.task_name}; leave it out"
            ]
        )
    is_interactive = not texts and inputs in ([], [Path("-")]) and sys.stdin.isatty()
    if is_interactive:
        print_note("type or paste text, one line at a time; end with Ctrl-D")
    given = (
        predictor.read_arguments(texts)
        if texts
        else InputRecords(inputs, predictor, text_field or [], is_interactive=is_interactive)
    )
    with contextlib.ExitStack() as stack:
        write = (
            write_output
            if target is None
            else line_writer(stack.enter_context(open_output(target)))
        )
        if explain or html is not None:
            count = _explain(predictor, given, json=json, html=html, write=write, model=model)
        else:
            shown = not texts and not is_interactive
            shown = shown and (target is not None or not is_terminal(sys.stdout))
            bar = stack.enter_context(progress("predicting", None, "texts", shown=shown))
            buffer_size = {"buffer_size": 1} if is_interactive else {}
            predictions = predictor.stream(given, batch_size=batch_size, **buffer_size)
            count = print_predictions(predictions, top=top, json=json, write=write, bar=bar)
        if not count:
            raise DataError(
                f"{' and '.join(map(str, inputs)) or _STDIN} must hold texts to predict",
                found="no line at all",
                fix="check the path, or what wrote the file",
            )


def check_no_text_field(text_fields: Sequence[str] | None) -> None:
    """Raise ConfigError for --text-field beside a text, which has no fields."""
    if text_fields:
        raise ConfigError(
            [
                f"--text-field is for files with fields; found {text_fields[0]!r:.40} beside a "
                "text on the command line; leave it out"
            ]
        )


class InputRecords:
    """The inputs in files or on standard input, as the predictor reads them.

    `ready` returns whether another can be read without waiting for a writer.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        predictor: Predictor[Any, Any, Any],
        text_fields: Sequence[str],
        *,
        is_interactive: bool = False,
    ) -> None:
        if len(text_fields) > len(predictor.record_fields):
            most = "once" if len(predictor.record_fields) == 1 else "twice"
            raise ConfigError(
                [
                    f"--text-field is given at most {most} for a model of the task "
                    f"{predictor.task_name}; found {' and '.join(text_fields):.80}; leave "
                    "out the rest"
                ]
            )
        if len(set(text_fields)) < len(text_fields):
            raise ConfigError(
                [
                    "--text-field must name two different fields; found "
                    f"{text_fields[0]} twice; name the other sentence"
                ]
            )
        self._paths, self._predictor = paths, predictor
        self._fields = dict(zip(predictor.record_fields, text_fields, strict=False))
        self._is_interactive = is_interactive
        self._ready: Callable[[], bool] = lambda: False

    def ready(self) -> bool:
        """Whether another input can be read without blocking."""
        return self._ready()

    def __iter__(self) -> Iterator[Any]:
        """Yield the inputs of all files."""
        for path in self._paths or [Path("-")]:
            for record in self._records(path):
                check_length(record)
                yield self._predictor.read_record(record, **self._fields)

    def _records(self, path: Path) -> Iterator[Record]:
        """Yield the records of one file; pipes and standard input have lines of text."""
        if str(path) != "-" and path.is_file():
            self._ready = lambda: True
            from dragoman.data.labeled_records import read_records

            names = {*self._fields.values(), *self._predictor.config.record_fields}
            yield from read_records([path], fields=names, max_line_bytes=4 * MAX_TEXT_CHARS)
            return
        self._ready = lambda: False
        if str(path) == "-":
            stream: Iterable[str] = (
                decode_lines(sys.stdin.buffer)
                if self._is_interactive
                else open_stream_lines(sys.stdin.buffer)
            )
            self._ready = getattr(stream, "ready", self._ready)
            yield from number_lines(_STDIN, _note_json_lines(_STDIN, stream))
        else:
            with open(path, "rb") as file:
                lines = open_stream_lines(file, str(path))
                self._ready = getattr(lines, "ready", self._ready)
                yield from number_lines(path, _note_json_lines(path, lines))


def _note_json_lines(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of text; print a note if the first is a JSON object, whose fields are not read.

    The format of a file is known by its name, which a stream does not have.
    """
    for number, line in enumerate(lines):
        if not number and _is_json_object(line):
            print_note(
                f"warning: {path} has JSON lines but is read as plain text; to read their fields, "
                "write them to a file and pass --input FILE.jsonl"
            )
        yield line


def _is_json_object(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(json_format.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def number_lines(path: Path, lines: Iterable[str]) -> Iterator[Record]:
    """Return an iterator over lines of text as records."""
    from dragoman.data.labeled_records import TEXT, Record

    return (Record(path, number, {TEXT: line}) for number, line in enumerate(lines, 1))


def check_length(record: Record) -> None:
    """Raise DataError for a text that is too long to be one."""
    for name, value in record.fields.items():
        if isinstance(value, str) and len(value) > MAX_TEXT_CHARS:
            raise record.error(
                f"must have at most {MAX_TEXT_CHARS:,} characters in {name!r}",
                f"{len(value):,} or more",
                "put a line break between its texts",
            )


def print_predictions(
    predictions: Iterable[Any], *, top: int, json: bool, write: Callable[[str], object], bar: Any
) -> int:
    """Print predictions as they arrive, with the first few notes; return their number."""
    number = num_noted = 0
    for number, each in enumerate(predictions, start=1):
        if json:
            print_json({"line": number, **each.to_dict()}, write)
        else:
            write(each.to_line(top=top))
        bar.advance()
        num_noted += bool(each.notes)
        if each.notes and num_noted <= NOTES_SHOWN:
            print_note(f"line {number}: {'; '.join(each.notes)}")
    if num_noted > NOTES_SHOWN:
        print_note(f"{format_count(num_noted, 'line')} with notes in total; --json includes them")
    return number


def _explain(
    predictor: Predictor[Any, Any, Any],
    inputs: Iterable[Any],
    *,
    json: bool,
    html: Path | None,
    write: Callable[[str], object],
    model: Path,
) -> int:
    """Explain each input: in the terminal or as JSON, or as one page; return their number.

    An input without words is left out, unless all are.
    """
    from rich.console import Console

    from dragoman.explain.classification_occlusion import OcclusionExplanation
    from dragoman.explain.classification_occlusion_report import render_explanation, render_html

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    pages = []
    number = num_explained = 0
    empty: DataError | None = None
    for number, each in enumerate(inputs, start=1):
        if html is not None and number > MAX_EXPLAINED:
            raise ConfigError(
                [
                    f"--html takes at most {MAX_EXPLAINED:,} texts; found more; "
                    "use --explain --json for all of them"
                ]
            )
        try:
            explanation = predictor.explain_words(each)
        except DataError as error:
            empty = error
            print_note(f"line {number} is not explained: {error.must}")
            if json and html is None:
                print_json({"line": number, "notes": [error.must]}, write)
            continue
        num_explained += 1
        if html is not None and isinstance(explanation, OcclusionExplanation):
            pages.append(explanation)
        elif html is not None:
            raise ConfigError(
                [
                    "--html is for models of the task classify; found one of "
                    f"{predictor.task_name}; use --explain"
                ]
            )
        elif json:
            print_json({"line": number, **explanation.to_dict()}, write)
        elif not isinstance(explanation, OcclusionExplanation):
            write(f"{explanation.to_text()}\n")
        else:
            with console.capture() as capture:
                console.print(
                    render_explanation(explanation, width=min(80, console.width)), soft_wrap=True
                )
            write(capture.get().rstrip("\n") + "\n")
    if empty is not None and not num_explained:
        raise empty
    if html is not None and pages:
        with open_output(html) as file:
            file.write(render_html(pages, title=f"Predictions of {model.name or model}"))
        print_note(f"{format_count(len(pages), 'explanation')} written to {html}")
    return number
