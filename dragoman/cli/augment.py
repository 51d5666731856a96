"""`dragoman augment`: synthetic training pairs from monolingual text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from dragoman.cli.command_progress_bar import progress
from dragoman.cli.input_lines import InputFiles, check_inputs
from dragoman.cli.options import (
    SAMPLING_PANEL,
    BatchSizeOption,
    BeamOption,
    DeviceOption,
    EngineOption,
    FromOption,
    JsonOption,
    ModelOption,
    PrecisionOption,
    SampleSeedOption,
    TemperatureOption,
    ToOption,
    TopKOption,
)
from dragoman.cli.terminal_output import format_count, print_json, print_note
from dragoman.cli.translate import CHECKED_LINES, warn_of_other_languages
from dragoman.errors import ConfigError, DataError, StoppedError, suggest_name
from dragoman.inference.back_translation_and_distillation import (
    METHODS,
    TAG,
    AugmentationRun,
    PairFilter,
)
from dragoman.storage.atomic_and_safe_file_io import hash_file
from dragoman.storage.lock import lock_output
from dragoman.storage.manifest import manifest_digest, read_manifest
from dragoman.storage.user_output_files import check_output_file

_FILTER_PANEL = "Filters"


def _check_method(context: typer.Context, name: str) -> str:
    """Raise ConfigError unless the method is known."""
    if not context.resilient_parsing and name not in METHODS:
        raise ConfigError(
            [
                f"--method must be one of {', '.join(METHODS)}; found {name!r:.60}; "
                f"{suggest_name(name, METHODS, listed=True)}"
            ]
        )
    return name


def augment(
    context: typer.Context,
    model: ModelOption,
    input_: Annotated[
        Path,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="Text to translate line by line, plain, .gz or .xz.",
            show_default=False,
        ),
    ],
    output_src: Annotated[
        Path, typer.Option(help="Source side of the pairs to write.", show_default=False)
    ],
    output_tgt: Annotated[
        Path, typer.Option(help="Target side of the pairs to write.", show_default=False)
    ],
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="back-translation (the input is target text, the model translates it to the "
            "source language), forward-translation (the input is source text) or distillation "
            "(the input is the source side of training pairs).",
            show_default=False,
            callback=_check_method,
        ),
    ],
    tag: Annotated[
        bool,
        typer.Option(
            "--tag", help=f"Begin every source with {TAG}: tagged back-translation (Caswell 2019)."
        ),
    ] = False,
    beam: BeamOption = None,
    batch_size: BatchSizeOption = None,
    to: ToOption = None,
    from_: FromOption = None,
    device: DeviceOption = "auto",
    engine: EngineOption = "auto",
    precision: PrecisionOption = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace outputs that exist, and start again.")
    ] = False,
    json: JsonOption = False,
    max_ratio: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Drop pairs with one side more than this many times as long, in tokens; 0 keeps "
            "them.",
            rich_help_panel=_FILTER_PANEL,
        ),
    ] = 3.0,
    keep_copies: Annotated[
        bool,
        typer.Option(
            "--keep-copies",
            help="Keep translations that are equal to their input.",
            rich_help_panel=_FILTER_PANEL,
        ),
    ] = False,
    sample: Annotated[
        bool,
        typer.Option(
            "--sample",
            help="Sample translations instead of searching (Edunov et al., 2018).",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = False,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    seed: SampleSeedOption = None,
) -> None:
    """Write synthetic training pairs: a text and its machine translation.

    The outputs are written block by block beside their names, as .partial, and get
    their names at the end. After an interruption the same command continues, and the
    outputs are the same to the byte. What is dropped is counted and reported.
    """
    sampling = {"temperature": temperature, "top_k": top_k, "seed": seed}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given and not sample:
        name = next(iter(given)).replace("_", "-")
        raise ConfigError([f"--{name} needs --sample; found it alone; add --sample"])
    if sample and beam is not None:
        raise ConfigError(
            [f"--sample and --beam exclude each other; found both, with --beam {beam}; keep one"]
        )
    if method == "distillation" and (sample or tag):
        found = "--sample" if sample else "--tag"
        raise ConfigError(
            [
                "distillation learns the best outputs of the model as if they were references; "
                f"found {found}; leave it out, or use --method forward-translation"
            ]
        )
    if not input_.is_file():
        check_inputs([input_])
        raise ConfigError(
            [f"--input must be a regular file, to continue from; found {input_}; write it to one"]
        )
    check_inputs([input_])
    check_output_file("--output-src", output_src, inputs=[input_, model])
    check_output_file("--output-tgt", output_tgt, inputs=[input_, model], others=[output_src])
    if next(iter(InputFiles([input_])), None) is None:
        raise DataError(
            f"{input_} must hold lines to translate",
            found="no line at all",
            fix="check the path, or what wrote the file",
        )
    run = AugmentationRun(
        output_src,
        output_tgt,
        {
            "model": manifest_digest(read_manifest(model)),
            "input": hash_file(input_).sha256,
            "method": method,
            "tag": TAG if tag else "",
            "beam": beam,
            "languages": [from_, to],
            "max_ratio": max_ratio,
            "keep_copies": keep_copies,
            "sample": sample,
            "engine": [engine, precision],
            **given,
        },
        overwrite=overwrite,
    )
    # Until the command ends: two that append to the same files would mix their pairs.
    for path in (output_src, output_tgt):
        context.with_resource(lock_output(path))
    resumed = run.open()
    if resumed:
        print_note(f"continuing after {format_count(resumed, 'line')}")

    from dragoman.inference import Translator  # imports torch

    translator = Translator.load(
        model, device=device, engine=engine, precision=precision, target_language=to
    )
    tokenizers = translator.tokenizers
    options: dict[str, Any] = {
        "beam": beam,
        "batch_size": batch_size,
        "source_language": from_,
        "target_language": to,
        "temperature": temperature,
        "top_k": top_k,
    }
    options = {name: value for name, value in options.items() if value is not None}
    lines = InputFiles([input_])
    if not resumed:
        first = list(itertools.islice(InputFiles([input_]), CHECKED_LINES))
        warn_of_other_languages(
            translator, first, input_, source_language=from_, target_language=to
        )
    try:
        with progress("translating", lines.count(), "lines") as bar:
            result = run.run(
                lines,
                lambda block, block_seed: translator.translate(
                    block, **options, **({"sample": True, "seed": block_seed} if sample else {})
                ),
                PairFilter(
                    lambda text, translation: (
                        len(tokenizers.src.encode(text)),
                        len(tokenizers.tgt.encode(translation)),
                    ),
                    max_ratio=max_ratio,
                    drop_copies=not keep_copies,
                ),
                seed=1 if seed is None else seed,
                advance=bar.advance,
            )
    except KeyboardInterrupt:
        raise StoppedError(
            f"stopped after {format_count(run.lines_done, 'line')}",
            found="",
            fix=f"run the same command {'without --overwrite' if overwrite else 'again'} to resume",
        ) from None
    if json:
        print_json({"lines": result.lines, "pairs": result.pairs, "dropped": dict(result.dropped)})
        return
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in result.dropped.items() if count)
    print_note(
        f"{format_count(result.pairs, 'pair')} of {format_count(result.lines, 'line')}"
        + (f"; dropped {dropped}" if dropped else "")
    )
