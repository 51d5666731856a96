"""`dragoman explain`: how a model came to its output, in the terminal, as JSON or as a figure."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.input_lines import InputFiles, check_inputs, decode_lines, open_stream_lines
from dragoman.cli.options import (
    AblationsOption,
    BeamOption,
    BranchesOption,
    DefaultBundleOption,
    DeviceOption,
    FromOption,
    JsonOption,
    LengthPenaltyOption,
    QuietOption,
    TextFieldOption,
    ToOption,
    check_value,
)
from dragoman.cli.predict import check_length, check_no_text_field, number_lines
from dragoman.cli.terminal_output import print_note, print_text
from dragoman.cli.translate import warn_about_file
from dragoman.errors import ConfigError, DataError, escape_json_controls, suggest_name
from dragoman.storage.user_output_files import check_output_file

if TYPE_CHECKING:
    from dragoman.explain.explanation import Explanation

KINDS = ("encoder", "decoder", "cross")
METHODS = (
    "attention_x_gradient",
    "input_x_gradient",
    "integrated_gradients",
    "value_zeroing",
    "occlusion",
)
MIN_WIDTH = 40  # columns; narrower terminals wrap by themselves
# Heads, and parts of some models: a memory, the levels of hierarchical attention, pooling seeds.
_HEAD = re.compile(r"[a-z]+[0-9]+[a-z]?\.[0-9]+|memory|words|sentences|seed\.[0-9]+")
_TOP_HEADS = re.compile(r"top([1-9][0-9]?)")
_FIGURES_PANEL = "Files"
_SEARCH_PANEL = "What is explained"


def explain(
    model: DefaultBundleOption,
    text: Annotated[
        str | None,
        typer.Argument(help="Input text; by default the first line of standard input."),
    ] = None,
    input_: Annotated[
        Path | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="File whose first line is explained, with --json every line; plain, .gz or .xz; "
            "- is standard input.",
        ),
    ] = None,
    text_field: TextFieldOption = None,
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Attention to draw: encoder, decoder (self-attention) or cross. By default "
            "cross, if the model has it.",
            show_default=False,
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(min=0, help="Layer to draw, from 0; by default the mean.", show_default=False),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(min=0, help="Head to draw, from 0; by default the mean.", show_default=False),
    ] = None,
    beam: BeamOption = None,
    length_penalty: LengthPenaltyOption = None,
    to: ToOption = None,
    from_: FromOption = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="Forced prefix of the output.",
            rich_help_panel=_SEARCH_PANEL,
            callback=check_value,
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="Explain this target text instead of the model's own output, and compare their "
            "scores.",
            rich_help_panel=_SEARCH_PANEL,
            callback=check_value,
        ),
    ] = None,
    off: Annotated[
        str | None,
        typer.Option(
            metavar="HEADS",
            help="Heads to switch off, such as x3.2,d0.1: attention, layer and head, with e, d "
            "and x for encoder, decoder and cross.",
            rich_help_panel=_SEARCH_PANEL,
            callback=check_value,
        ),
    ] = None,
    attribution: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help=f"Attribution method: {', '.join(METHODS)}.",
            rich_help_panel=_SEARCH_PANEL,
            show_default=False,
        ),
    ] = None,
    beam_tree: Annotated[
        bool,
        typer.Option(
            "--beam-tree", help="Also show the beam search, and why each candidate was dropped."
        ),
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    png: Annotated[
        Path | None,
        typer.Option(help="Write the attention map as PNG.", rich_help_panel=_FIGURES_PANEL),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(help="Write the attention map as SVG.", rich_help_panel=_FIGURES_PANEL),
    ] = None,
    pdf: Annotated[
        Path | None,
        typer.Option(help="Write the attention map as PDF.", rich_help_panel=_FIGURES_PANEL),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write the explorer page with this explanation as one self-contained file.",
            rich_help_panel=_FIGURES_PANEL,
        ),
    ] = None,
    branches: BranchesOption = 0,
    ablations: AblationsOption = "",
    device: DeviceOption = "auto",
) -> None:
    """Explain one output: attention map, token probabilities, what each word relied on.

    Works for models of every task; what a model does not have is stated. Layers and heads are
    counted from 0. With --json the whole explanation is printed, one object per input line. With
    --png, --svg or --pdf the attention map is written instead of printed, and with --html the
    explorer page.
    """
    _check_names(kind, off or "", attribution)
    check_ablations(ablations)
    if text is not None and input_ is not None:
        raise ConfigError(
            [f"a text and --input exclude each other; found {text!r:.60} and {input_}; keep one"]
        )
    if text is not None:
        check_no_text_field(text_field)
        warn_about_file(text, "explained")
    inputs = check_inputs([] if input_ is None else [input_])
    figures = {"--png": png, "--svg": svg, "--pdf": pdf}
    files = {option: path for option, path in figures.items() if path is not None}
    _check_files(files, html, inputs, model)
    options: dict[str, Any] = {
        "beam": beam,
        "length_penalty": length_penalty,
        "prefix": prefix,
        "reference": reference,
        "off": off.split(",") if off else None,
        "attribution": attribution,
        "target_language": to,
        "source_language": from_,
    }
    given = {name: value for name, value in options.items() if value is not None}
    others = {"branches": branches, "beam_tree": beam_tree, "text_field": text_field}
    check_task(model, given | {name: value for name, value in others.items() if value})
    if branches and not json and html is None:
        raise ConfigError(
            [f"--branches needs --html or --json; found --branches {branches} alone; add one"]
        )
    if ablations and not json and html is None:
        raise ConfigError(
            [
                "--ablations needs --html or --json; found --ablations "
                f"{ablations:.40} alone; add one, or switch heads off with --off"
            ]
        )

    from dragoman.inference.predictors.catalogue import load  # imports torch

    predictor = load(model, device=device)
    examples = _read_examples(predictor, text, inputs, text_field or [])
    writes = bool(files) or html is not None
    found: Explanation | None = None
    for example in examples:
        found = predictor.explain(example, **given)
        assert found is not None, "a predictor returns an explanation"
        found = add_branches_and_ablations(predictor, found, branches, ablations).with_path(
            model, share=True
        )
        if "text" in found.missing:
            print_note(found.missing["text"])
        if json:
            print_text(escape_json_controls(found.to_json()))
        elif not writes:
            _print_report(found, kind=kind, layer=layer, head=head, beam_tree=beam_tree)
        if not json or writes:
            break
    if found is None:
        raise DataError(
            f"{input_ or 'standard input'} must hold a text to explain",
            found="no line at all",
            fix="check the path, or what wrote the file",
        )
    for path in files.values():
        _write_figure(found, path, kind=kind, layer=layer, head=head)
        print_note(f"written to {path}")
    if html is not None:
        from dragoman.explore.html_export import export_html

        export_html(found, html, title=f"{model.resolve().name}: {found.text[:60]}")
        print_note(f"written to {html}")
    if (writes or not json) and _has_more(examples, inputs):
        print_note("only the first line is explained; --json explains every line")


def _check_names(kind: str | None, off: str, attribution: str | None) -> None:
    """Raise ConfigError for a name that no model has."""
    if kind is not None and kind not in KINDS:
        raise ConfigError(
            [f"--kind must be encoder, decoder or cross; found {kind!r}; choose one of them"]
        )
    for name in off.split(",") if off else ():
        if not _HEAD.fullmatch(name):
            raise ConfigError(
                [
                    f"--off must name heads such as x3.2,d0.1; found {name!r:.40}; write the "
                    "attention (e, d or x), its layer, a dot and the head"
                ]
            )
    if attribution is not None and attribution not in METHODS:
        raise ConfigError(
            [
                f"--attribution must be {', '.join(METHODS[:-1])} or {METHODS[-1]}; found "
                f"{attribution!r}; {suggest_name(attribution, METHODS, listed=True)}"
            ]
        )


def check_ablations(ablations: str) -> None:
    """Raise ConfigError unless the heads are a number of the best ones, or names."""
    if not ablations or _TOP_HEADS.fullmatch(ablations):
        return
    for name in ablations.split(","):
        if not _HEAD.fullmatch(name):
            raise ConfigError(
                [
                    "--ablations must be top1 to top99, or heads such as x3.2,d0.1; found "
                    f"{name!r:.40}; write top8"
                ]
            )


def add_branches_and_ablations(
    predictor: Any, explanation: Explanation, branches: int, ablations: str
) -> Explanation:
    """Return the explanation with branches and ablations that a file then holds."""
    if branches:
        explanation = predictor.add_branches(explanation, branches)
    if ablations:
        from dragoman.inference.forced_token_branches_and_head_ablation import (
            add_ablations,
            list_heads,
        )

        top = _TOP_HEADS.fullmatch(ablations)
        heads = list_heads(explanation, int(top[1])) if top else ablations.split(",")
        explanation = add_ablations(predictor, explanation, heads)
    return explanation


def _check_files(
    files: dict[str, Path], html: Path | None, inputs: list[Path], model: Path
) -> None:
    """Raise an error unless every file can be written."""
    read = [Path("/dev/stdin") if str(each) == "-" else each for each in inputs]
    if html is not None:
        check_output_file("--html", html, inputs=[*read, model])
    if not files:
        return
    from dragoman.explain.plot_style import check_figure_file

    for option, path in files.items():
        check_figure_file(option, path, kind=option.lstrip("-"), inputs=[*read, model])


def check_task(model: Path, given: dict[str, Any]) -> None:
    """Raise ConfigError for options that the model's task does not have."""
    from dragoman.bundle.format import read_task

    task = read_task(model)
    languages = {"target_language": "to", "source_language": "from"}
    search = ("beam", "length_penalty", "prefix", "reference", "branches", "beam_tree", *languages)
    allowed = {"translate": set(search), "language": {"prefix"}}.get(task, set())
    if task == "translate" and "text_field" in given:
        raise ConfigError(
            [
                "--text-field is for records with fields; found a model of the task translate, "
                "which reads lines of text; leave it out"
            ]
        )
    for name in search:
        if name in given and name not in allowed:
            option = languages.get(name, name.replace("_", "-"))
            raise ConfigError(
                [
                    f"--{option} is for translation models; found a model of the "
                    f"task {task:.40}; leave it out"
                ]
            )


def _read_examples(
    predictor: Any, text: str | None, inputs: list[Path], text_fields: list[str]
) -> Iterator[Any]:
    """Return an iterator over the inputs, as the predictor takes them."""
    if hasattr(predictor, "read_record"):
        from dragoman.cli.predict import InputRecords

        if text is not None:
            return iter(predictor.read_arguments([text]))
        if not inputs and sys.stdin.isatty():
            print_note("type or paste a text and press Enter")
        return iter(InputRecords(inputs, predictor, text_fields, is_interactive=not inputs))
    if text is not None:
        return iter([text])
    if inputs and inputs != [Path("-")]:
        return _check_lengths(inputs[0], InputFiles(inputs))
    lines: Iterable[str] = (
        decode_lines(sys.stdin.buffer)
        if sys.stdin.isatty()
        else open_stream_lines(sys.stdin.buffer)
    )
    if sys.stdin.isatty():
        print_note("type or paste a text and press Enter")
    return _check_lengths(Path("standard input"), lines)


def _check_lengths(path: Path, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines; raise DataError for one that is too long, as records are checked."""
    for record in number_lines(path, lines):
        check_length(record)
        yield record.fields["text"]


def _has_more(examples: Iterator[Any], inputs: list[Path]) -> bool:
    """Whether a file has another line; standard input might have to be waited for."""
    if not all(path.is_file() for path in inputs):
        return False
    try:
        return next(examples, None) is not None
    except DataError:  # a line that is not explained need not be right
        return True


def _print_report(
    explanation: Explanation,
    *,
    kind: str | None,
    layer: int | None,
    head: int | None,
    beam_tree: bool,
) -> None:
    """Print the report, styled only on a terminal."""
    from rich.console import Console

    from dragoman.explain.terminal_report import render_report

    console = Console(file=sys.stdout, highlight=False)
    width = max(MIN_WIDTH, console.width)
    shown = render_report(explanation, kind=kind, layer=layer, head=head, width=width)
    if beam_tree:
        from dragoman.explain.beam_trace_report import render_beam

        shown.append("\n").append_text(render_beam(explanation, width=width))
    console.print(shown, soft_wrap=True, end="")


def _write_figure(
    explanation: Explanation,
    path: Path,
    *,
    kind: str | None,
    layer: int | None,
    head: int | None,
) -> None:
    """Write the attention map."""
    from dragoman.explain.attention_plots import save_attention_views, select_views, title_lines

    views = select_views(explanation, kind=kind, layer=layer, head=head)
    if not views:
        reason = explanation.missing.get("head") or explanation.missing.get("heads") or "none"
        raise ConfigError(
            [
                f"a figure needs attention weights; found a model without any ({reason}); "
                "leave out the option, the report shows what there is"
            ]
        )
    save_attention_views(path, views, title=title_lines(explanation))
