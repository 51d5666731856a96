"""`dragoman translate`: translate raw text line by line.

Options that other commands share are in cli/options.py, defaults of the search in
config/root_config.py.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from dragoman.cli.command_progress_bar import ProgressBar, is_terminal, progress
from dragoman.cli.constrained_decoding_options import (
    ConstraintOption,
    ForbidOption,
    RegexOption,
    RequireOption,
    parse_constraint_options,
)
from dragoman.cli.input_lines import InputFiles, check_inputs, decode_lines, open_stream_lines
from dragoman.cli.options import (
    SAMPLING_PANEL,
    BatchSizeOption,
    BeamOption,
    DefaultModelsOption,
    DeviceOption,
    EngineOption,
    FromOption,
    JsonOption,
    LengthPenaltyOption,
    PrecisionOption,
    QuietOption,
    SampleSeedOption,
    ShortlistOption,
    TemperatureOption,
    ToOption,
    TopKOption,
)
from dragoman.cli.terminal_output import format_count, print_json, print_note
from dragoman.cli.terminal_output import print_text as write_output
from dragoman.config.device_engine_and_precision_names import check_utility
from dragoman.errors import ConfigError, CorruptError
from dragoman.storage.user_output_files import check_output_file, open_output

if TYPE_CHECKING:
    from dragoman.inference import Translation, Translator

NOTES_SHOWN = 3
CHECKED_LINES = 100  # whose languages are compared with the direction, before a long run
LOW_CONFIDENCE = 0.05  # a note tells whoever types a text that its translation is likely wrong
_MBR_PANEL = "Minimum Bayes risk decoding"


def _check_mbr(context: typer.Context, name: str | None) -> str | None:
    """Raise ConfigError unless the utility is known."""
    if not context.resilient_parsing:
        check_utility(name)
    return name


def translate(
    model: DefaultModelsOption,
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to translate; by default standard input is read."),
    ] = None,
    input_: Annotated[
        list[Path] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="File to translate line by line, plain, .gz or .xz; - is standard input. May be "
            "repeated.",
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
    to: ToOption = None,
    from_: FromOption = None,
    beam: BeamOption = None,
    nbest: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            help="Number of translations per line: `line TAB score TAB text`, best first.",
        ),
    ] = 1,
    length_penalty: LengthPenaltyOption = None,
    batch_size: BatchSizeOption = None,
    prefix: Annotated[str, typer.Option(help="Forced prefix of every translation.")] = "",
    no_repeat_ngram_size: Annotated[
        int,
        typer.Option(min=0, help="Never repeat an n-gram of this many tokens; 0 disables it."),
    ] = 0,
    json: JsonOption = False,
    quiet: QuietOption = False,
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = None,
    shortlist: ShortlistOption = None,
    constraint: ConstraintOption = None,
    require: RequireOption = None,
    forbid: ForbidOption = None,
    regex: RegexOption = None,
    sample: Annotated[
        bool,
        typer.Option(
            "--sample",
            help="Sample translations instead of searching.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = False,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Nucleus sampling: the most probable tokens up to this total probability.",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Epsilon sampling: never draw tokens less probable than this. Default: 0.02 with "
            "--mbr, else 0.",
            show_default=False,
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    seed: SampleSeedOption = None,
    mbr: Annotated[
        str | None,
        typer.Option(
            "--mbr",
            metavar="METRIC",
            help="Minimum Bayes risk decoding: the candidate with the highest expected chrf or "
            "bleu against all candidates, which are samples or, with --beam, the beam's.",
            show_default=False,
            callback=_check_mbr,
            rich_help_panel=_MBR_PANEL,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1024,
            help="Candidates to sample. Default: 64.",
            show_default=False,
            rich_help_panel=_MBR_PANEL,
        ),
    ] = None,
) -> None:
    """Translate texts, files or standard input, line by line.

    Order and empty lines are kept. With --json each line is an object: line, text,
    score, tokens, log_probs (one per token, and one for the end of sentence),
    alignment (a row for each target token, a column for each source token; null for
    a model without cross-attention), alternatives: the --nbest translations, best
    first, constraints, if there are any, with --mbr the expected utility, and
    confidence, the probability that the translation is good, if the model has a
    calibration. A model of several directions adds source_language, detected unless
    --from names it, and target_language.
    """
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "epsilon": epsilon,
        "seed": seed,
    }
    given = {name: value for name, value in sampling.items() if value is not None}
    _check_sampling(given, sample=sample, beam=beam, mbr=mbr, samples=samples)
    constraints = parse_constraint_options(constraint, require, forbid, regex)
    if texts and input_:
        raise ConfigError(
            [
                "texts and --input exclude each other; "
                f"found {texts[0]!r:.60} and {input_[0]}; keep one"
            ]
        )
    for text in texts or ():
        warn_about_file(text, "translated")
    inputs = check_inputs(input_ or [])
    target = None if output is None or str(output) == "-" else output
    if target is not None:
        check_output_file(
            "--output",
            target,
            inputs=[
                Path("/dev/stdin") if str(each) == "-" else each for each in inputs or [Path("-")]
            ]
            + model,
        )
    options: dict[str, Any] = {
        "beam": beam,
        "length_penalty": length_penalty,
        "batch_size": batch_size,
        "nbest": nbest,
        "no_repeat_ngram_size": no_repeat_ngram_size,
    }
    options |= {
        "prefix": prefix or None,
        "alignment": json,
        "return_scores": json or nbest > 1 or bool(texts),
        "sample": sample,
        "mbr": mbr,
        "samples": samples,
        "constraints": constraints,
        "target_language": to,
        "source_language": from_,
        **given,
    }

    from dragoman.inference import Translator  # imports torch

    translator = Translator.load(
        model, device=device, engine=engine, precision=precision, measure=True, shortlist=shortlist
    )
    lines: Iterable[str] = texts or ()
    is_interactive = not texts and inputs in ([], [Path("-")]) and sys.stdin.isatty()
    if is_interactive:
        print_note("type or paste text, one line at a time; end with Ctrl-D")
        # Each typed line is translated at once, with its confidence.
        options |= {"buffer_size": 1, "return_scores": True}
        lines = decode_lines(sys.stdin.buffer)
    elif not texts:
        lines = (
            InputFiles(inputs)
            if inputs and inputs != [Path("-")]
            else open_stream_lines(sys.stdin.buffer)
        )
    given = {name: value for name, value in options.items() if value is not None}
    shown = not texts and not is_interactive and (target is not None or not is_terminal(sys.stdout))
    total = (
        lines.count()
        if shown and isinstance(lines, InputFiles) and is_terminal(sys.stderr)
        else None
    )
    with contextlib.ExitStack() as stack:
        write = (
            write_output
            if target is None
            else line_writer(stack.enter_context(open_output(target)))
        )
        bar = stack.enter_context(progress("translating", total, "lines", shown=shown))
        written = print_translations(
            translator.stream(lines, **given),
            nbest=nbest,
            json=json,
            write=write,
            bar=bar,
            unsure_below=LOW_CONFIDENCE if texts or is_interactive else 0.0,
        )
        if isinstance(lines, InputFiles) and lines.read != written:
            raise CorruptError(
                "every line that was read must be written",
                found=f"{lines.read:,} read and {written:,} written",
                fix="please report it",
            )


def _check_sampling(
    given: Mapping[str, Any],
    *,
    sample: bool,
    beam: int | None,
    mbr: str | None,
    samples: int | None,
) -> None:
    """Raise ConfigError for options of sampling that exclude or need each other."""
    if samples is not None and mbr is None:
        raise ConfigError(
            [f"--samples needs --mbr; found --samples {samples} alone; add --mbr chrf"]
        )
    if mbr is not None and sample:
        raise ConfigError(
            [f"--mbr and --sample exclude each other; found both, with --mbr {mbr}; keep --mbr"]
        )
    if beam is not None and samples is not None:
        raise ConfigError(
            [
                "--samples and --beam exclude each other; "
                f"found --samples {samples} and --beam {beam}; keep one"
            ]
        )
    if given and not sample and (mbr is None or beam is not None):
        name = f"--{next(iter(given)).replace('_', '-')}"
        raise ConfigError(
            [f"{name} needs --sample; found it alone; add --sample"]
            if mbr is None
            else [f"{name} and --beam exclude each other; found both; keep one"]
        )
    if sample and beam is not None:
        raise ConfigError(
            [f"--sample and --beam exclude each other; found both, with --beam {beam}; keep one"]
        )


def warn_about_file(text: str, done: str) -> None:
    """Warn if a text is the name of a file: --input may have been intended."""
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):  # not a valid file name
        return
    if is_file:
        print_note(
            f"warning: {text} is a file name but is {done} as text; "
            f"to use the file: --input {shlex.quote(text)}"
        )


def warn_of_other_languages(
    translator: Translator,
    texts: Sequence[str],
    name: str | Path,
    *,
    source_language: str | None,
    target_language: str | None,
) -> None:
    """Warn if most of the first texts of a file are not in the language to translate from."""
    first = texts[:CHECKED_LINES]
    misplaced = translator.misplaced_lines(
        first, source_language=source_language, target_language=target_language
    )
    if 2 * len(misplaced) > len(first):
        print_note(
            f"warning: {len(misplaced):,} of the first {format_count(len(first), 'line')} of "
            f"{name} are in another language than the one to translate from: check the file, "
            "--from and --to"
        )


def line_writer(file: TextIO) -> Callable[[str], object]:
    """Return a function that writes a line to a file."""
    return lambda text: file.write(f"{text}\n")


def print_translations(
    translations: Iterable[Translation],
    *,
    nbest: int,
    json: bool,
    write: Callable[[str], object] = write_output,
    bar: ProgressBar | None = None,
    unsure_below: float = 0.0,
) -> int:
    """Print translations as they arrive, with the first few notes; return their number.

    A confidence under `unsure_below` is noted, where nothing else is.
    """
    number = num_noted = 0
    is_language_noted = False
    for number, each in enumerate(translations, start=1):
        if json:
            print_json({"line": number, **each.to_dict()}, write)
        elif nbest > 1:
            for one in each.alternatives:
                value = one.score if one.utility is None else one.utility
                write(f"{number}\t{value:.4f}\t{one.text}")
        else:
            write(each.text)
        if bar is not None:
            bar.advance()
        if each.other_language and not is_language_noted:
            is_language_noted = True
            why = (
                "the target language"
                if each.other_language == each.target_language
                else f"which the model does not translate into {each.target_language}"
            )
            print_note(
                f"line {number} seems to be in {each.other_language}, {why}; such lines are "
                f"translated as if they were in {each.source_language}: --to names another "
                "target, --from the source"
            )
        notes = list(each.notes)
        if not notes and each.confidence is not None and each.confidence < unsure_below:
            notes = [f"its translation is likely wrong: the confidence is {each.confidence:.4f}"]
        num_noted += bool(notes)
        if notes and num_noted <= NOTES_SHOWN:
            print_note(f"line {number}: {'; '.join(notes)}")
    if num_noted > NOTES_SHOWN:
        print_note(f"{format_count(num_noted, 'line')} with notes in total; --json includes them")
    return number
