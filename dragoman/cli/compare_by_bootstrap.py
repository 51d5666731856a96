"""`dragoman compare`: paired bootstrap significance test between systems."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.command_progress_bar import progress, track
from dragoman.cli.options import (
    DeviceOption,
    FromOption,
    JsonOption,
    LowercaseOption,
    TargetLanguageOption,
    TokenizeOption,
    ToOption,
    require_command,
)
from dragoman.cli.terminal_output import print_json, print_note, print_result, print_table
from dragoman.errors import ConfigError

if TYPE_CHECKING:
    from dragoman.evaluate.system_comparison import Comparison


def compare(
    systems: Annotated[
        list[Path],
        typer.Argument(
            help="Files of translations, or model directories; the first is the baseline."
        ),
    ],
    ref: Annotated[Path, typer.Option(help="Reference translations.", show_default=False)],
    src: Annotated[
        Path | None, typer.Option(help="Source sentences; required for model directories.")
    ] = None,
    to: ToOption = None,
    from_: FromOption = None,
    by: Annotated[
        str, typer.Option(help="Sentence metric that ranks the changes: chrf or bleu.")
    ] = "chrf",
    show: Annotated[int, typer.Option(min=0, help="Number of sentences to show.")] = 10,
    samples: Annotated[
        int, typer.Option(min=40, max=10_000, help="Samples of the paired bootstrap.")
    ] = 1000,
    tgt_lang: TargetLanguageOption = "",
    lowercase: LowercaseOption = False,
    tokenize: TokenizeOption = "",
    json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Compare systems by paired bootstrap resampling.

    The sentences whose scores changed most are shown as well.
    """
    from dragoman.evaluate.system_comparison import check_metric, check_system_count
    from dragoman.evaluate.system_comparison import compare_systems as run
    from dragoman.evaluate.translation_metrics import check_tokenizer, read_sentences

    check_tokenizer(tokenize)
    check_metric(by)
    check_system_count(len(systems))
    real = [path.resolve() for path in systems]
    if len(set(real)) != len(real):
        raise ConfigError(
            [
                f"each system must be named once; found {', '.join(map(str, systems))}; name two "
                "different ones"
            ]
        )
    if (to or from_) and not any(path.is_dir() for path in systems):
        raise ConfigError(
            [
                "--to and --from choose the direction of a model; found "
                f"{f'--to {to}' if to else f'--from {from_}'} and no model; leave it out"
            ]
        )
    references = read_sentences(ref)
    # Every model and file is opened before anything is translated.
    outputs = _open_systems(
        systems, src, references, device, source_language=from_, target_language=to
    )
    language = tgt_lang or to or next((each.language for each in outputs if each.language), "")
    texts = {name: each.texts() for name, each in zip(map(str, systems), outputs, strict=True)}
    with progress("comparing"):
        found = run(
            texts,
            references,
            lowercase=lowercase,
            tokenize=tokenize,
            tgt_lang=language,
            by=by,
            show=show,
            samples=samples,
        )
    if json:
        print_json(found.to_dict())
    else:
        _print_comparison(found, by)


@dataclass(frozen=True, slots=True)
class _SystemOutput:
    """A system's translations, read from a file or produced on demand."""

    texts: Callable[[], list[str]]
    language: str = ""


def _open_systems(
    systems: list[Path],
    src: Path | None,
    references: list[str],
    device: str,
    **languages: str | None,
) -> list[_SystemOutput]:
    """Read the files of translations and load the models; check all against the references."""
    from dragoman.evaluate.system_comparison import check_systems
    from dragoman.evaluate.translation_metrics import read_sentences

    models = [path for path in systems if path.is_dir()]
    for path in models:
        require_command(path, "compare", "translate")
    if models and src is None:
        raise ConfigError(
            [
                f"a model directory needs --src to translate; found {models[0]} and no --src; add "
                "it, or name a file of translations"
            ]
        )
    sources = read_sentences(src) if src is not None and models else []
    texts = {str(path): read_sentences(path) for path in systems if path not in models}
    check_systems({**texts, **({f"{src} (--src)": sources} if models else {})}, references)
    loaded = {path: _load_model(path, src, sources, device, **languages) for path in models}
    return [
        loaded[path]
        if path in models
        else _SystemOutput(functools.partial(texts.__getitem__, str(path)))
        for path in systems
    ]


def _load_model(
    model: Path, src: Path | None, sources: list[str], device: str, **languages: str | None
) -> _SystemOutput:
    """Load a model whose translations are compared."""
    from dragoman.inference import Translator

    translator = Translator.load(model, device=device)
    # Weights are loaded lazily: translate one sentence, so that a damaged file is reported now.
    translator.translate(sources[:1], **languages)

    def translate() -> list[str]:
        print_note(f"translating {src} with {model}")
        with progress("translating", len(sources), "lines") as bar:
            translations = translator.stream(sources, return_scores=False, **languages)
            return [each.text for each in track(translations, bar)]

    return _SystemOutput(translate, translator.config.data.tgt_lang)


def short_names(paths: list[Path]) -> list[str]:
    """Return short names: the shortest path suffixes that distinguish the systems."""
    parts = [(path if path.name not in ("", "..") else path.resolve()).parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = [str(Path(*each[-length:])) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _print_comparison(found: Comparison, by: str) -> None:
    """Print the comparison as tables."""
    rows = []
    for each in found.results:
        verdict = (
            "baseline"
            if each.p is None
            else ("significant" if each.is_significant else "not significant")
        )
        p = "" if each.p is None else f"{each.p:.4f}"
        rows.append(
            (
                each.metric,
                each.system,
                f"{each.value:.2f}",
                f"{each.mean:.2f} ± {each.margin:.2f}",
                p,
                verdict,
            )
        )
    print_table(
        ["metric", "system", "score", "mean ± 95 %", "p", "difference"], rows, right=["score", "p"]
    )
    for name, signature in found.signatures.items():
        print_result(f"{name}: {signature}")
    for sentence in found.notes:
        print_note(sentence)
    first, second = short_names(
        [Path(name) for name in dict.fromkeys(each.system for each in found.results)]
    )[:2]
    width = max(map(len, ("reference", first, second)))
    if found.moved:
        print_result()
        print_result(f"Largest changes in sentence {by} from {first} to {second}:")
    for moved in found.moved:
        print_result(f"\nline {moved.line}  {moved.change:+.1f}")
        for name, text in (
            ("reference", moved.reference),
            (first, moved.before),
            (second, moved.after),
        ):
            print_result(f"  {name:<{width}}  {text}")
