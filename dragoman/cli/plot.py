"""`dragoman plot`: figures of trained models and of their training, ready for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dragoman.cli.available_plots import (
    ENTROPY_SENTENCES,
    FIGURES,
    MAX_SENTENCES,
    PlottedModel,
)
from dragoman.cli.options import (
    BeamOption,
    DeviceOption,
    TargetLanguageOption,
    TokenizeOption,
    ToOption,
    check_run,
    check_text,
)
from dragoman.cli.terminal_output import print_note, print_result
from dragoman.errors import ConfigError, suggest_name

FORMATS = ("png", "svg", "pdf")


def check_runs(context: typer.Context, paths: list[Path]) -> list[Path]:
    """Raise BundleError unless every path has a model or a training run in it."""
    if not context.resilient_parsing:
        for path in paths:
            check_run(context, path)
    return paths


def plot(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...",
            help="Model or run directories; several are drawn side by side.",
            show_default=False,
            callback=check_runs,
        ),
    ],
    what: Annotated[
        list[str] | None,
        typer.Option(
            "--what",
            metavar="FIGURE",
            help=f"{', '.join(FIGURES)} or all, the default. May be repeated.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="File of one figure, or directory of several; created if its parent exists.",
        ),
    ] = Path("plots"),
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="png, svg or pdf; by default the suffix of --out, or png.",
            show_default=False,
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Name of a model in the figures, in their order. May be repeated."),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            "--test",
            metavar="FILE",
            help="Source sentences, or the labelled test file of another task; by default the "
            "validation data of the training, if its files are still there.",
            show_default=False,
            callback=check_text,
        ),
    ] = None,
    ref: Annotated[
        Path | None,
        typer.Option(
            help="Reference translations of --test.", show_default=False, callback=check_text
        ),
    ] = None,
    sentences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Sentences that are used; by default {ENTROPY_SENTENCES} for the entropy, at "
            f"most {MAX_SENTENCES:,} otherwise.",
            show_default=False,
        ),
    ] = None,
    to: ToOption = None,
    beam: BeamOption = None,
    tgt_lang: TargetLanguageOption = "",
    tokenize: TokenizeOption = "",
    device: DeviceOption = "auto",
) -> None:
    """Draw figures of models and of their training as PNG, SVG or PDF.

    Figures are sized for papers with two columns, text stays text, and colors are safe for
    color blindness. What a model does not have is stated; with --what all it is left out.
    """
    chosen = _parse_what(what or ["all"])
    files = _plan_files(chosen, out, format_, models)
    labels = _make_labels(models, label or [])
    if (test is None) != (ref is None) and _is_translator(models[0]):
        raise ConfigError(
            [
                "--test and --ref belong together for a translation model; found "
                f"{'--test' if ref is None else '--ref'} alone; pass both"
            ]
        )
    if to and not all(map(_is_translator, models)):
        raise ConfigError(
            [f"--to is for finished translators; found --to {to} and another model; leave it out"]
        )
    held = [
        PlottedModel(
            path=path,
            label=name,
            test=test,
            ref=ref,
            sentences=sentences,
            target_language=to,
            beam=beam,
            tgt_lang=tgt_lang,
            tokenize=tokenize,
            device=device,
        )
        for path, name in zip(models, labels, strict=True)
    ]
    if chosen != ["curves"]:  # those need no model
        for model in held:
            if model.is_finished:
                _ = model.predictor  # a damaged model is an error before anything is written
    if not out.suffix or len(chosen) > 1:
        out.mkdir(exist_ok=True)
    written, reasons = list[Path](), list[str]()
    for name in chosen:
        for group, path in _split_models(name, held, files[name]):
            reason = FIGURES[name](group, path)
            if reason is None:
                written.append(path)
                print_result(str(path))
            else:
                of = f" of {group[0].label}" if len(group) < len(held) else ""
                reasons.append(f"no figure of {name}{of}: {reason}")
    if not written:
        raise ConfigError(
            [
                f"a figure must have something to show; found {'; '.join(reasons)}; "
                "see dragoman plot --help"
            ]
        )
    for each in dict.fromkeys(reasons):
        print_note(each)


def _parse_what(names: Sequence[str]) -> list[str]:
    """Return the names of the figures to draw; raise ConfigError for any other."""
    for name in names:
        if name != "all" and name not in FIGURES:
            raise ConfigError(
                [
                    f"--what must be {', '.join(FIGURES)} or all; found {name!r:.40}; "
                    f"{suggest_name(name, [*FIGURES, 'all'], listed=True)}"
                ]
            )
    return list(FIGURES) if "all" in names else list(dict.fromkeys(names))


def _plan_files(
    chosen: Sequence[str], out: Path, format_: str | None, models: Sequence[Path]
) -> dict[str, Path]:
    """Return the file of each figure; raise ConfigError for one that cannot be written."""
    from dragoman.storage.user_output_files import check_output_file

    if format_ is not None and format_ not in FORMATS:
        raise ConfigError([f"--format must be png, svg or pdf; found {format_!r}; choose one"])
    suffix = out.suffix.lower().lstrip(".")
    if out.is_dir() or not suffix:
        if not out.parent.is_dir():
            raise ConfigError(
                [f"--out must be in an existing directory; found no {out.parent}; make it first"]
            )
        if out.exists() and not out.is_dir():
            raise ConfigError(
                [f"--out must be a directory or end in .png, .svg or .pdf; found the file {out}"]
            )
        files = {name: out / f"{name}.{format_ or 'png'}" for name in chosen}
        for path in files.values() if out.is_dir() else [out]:
            check_output_file("--out", path, inputs=models)
        return files
    if suffix not in FORMATS:
        raise ConfigError([f"--out must end in .png, .svg or .pdf; found {out}; rename it"])
    if format_ is not None and format_ != suffix:
        raise ConfigError(
            [f"--format and --out must agree; found {format_} and {out}; leave out --format"]
        )
    if len(chosen) > 1:
        raise ConfigError(
            [
                f"--out must be a directory for several figures; found the file {out} for "
                f"{len(chosen)}; name a directory, or one figure with --what"
            ]
        )
    check_output_file("--out", out, inputs=models)
    return {chosen[0]: out}


def _make_labels(models: Sequence[Path], labels: Sequence[str]) -> list[str]:
    """Return the names of the models in the figures: as given, or of their directories."""
    if labels and len(labels) != len(models):
        raise ConfigError(
            [
                f"--label must be given once for each model; found {len(labels)} for "
                f"{len(models)}; pass all or none"
            ]
        )
    if labels:
        return list(labels)
    names = [path.resolve().name for path in models]
    if len(set(names)) < len(names):
        names = [f"{path.resolve().parent.name}/{path.resolve().name}" for path in models]
    return names


def _is_translator(path: Path) -> bool:
    """Whether a path is a finished translation model."""
    from dragoman.bundle.format import read_task

    return (path / "manifest.json").exists() and read_task(path) == "translate"


def _split_models(
    name: str, held: Sequence[PlottedModel], path: Path
) -> list[tuple[Sequence[PlottedModel], Path]]:
    """Return the groups of models that share a figure, each with its file."""
    if len(held) == 1 or name not in ("positions", "entropy"):
        return [(held, path)]
    return [
        ([model], path.with_name(f"{path.stem}-{number}{path.suffix}"))
        for number, model in enumerate(held, 1)
    ]
