"""`dragoman compare`: is one system better than another, and where?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dragoman.cli.options import DeviceOption, JsonOption, LowercaseOption, TargetLanguageOption, TokenizeOption
from dragoman.cli.show import as_json, note, result, table
from dragoman.errors import ConfigError

if TYPE_CHECKING:
    from dragoman.evaluate.compare import Comparison


def compare(
    systems: Annotated[list[Path], typer.Argument(help="Files of translations, or model directories; the first is the baseline.")],
    ref: Annotated[Path, typer.Option(help="Reference translations.", show_default=False)],
    src: Annotated[Path | None, typer.Option(help="Source sentences; needed for model directories.")] = None,
    by: Annotated[str, typer.Option(help="What a sentence's change is measured in: chrf or bleu.")] = "chrf",
    show: Annotated[int, typer.Option(min=0, help="Sentences to show.")] = 10,
    samples: Annotated[int, typer.Option(min=40, max=10_000, help="Resamplings of the paired bootstrap.")] = 1000,
    tgt_lang: TargetLanguageOption = "",
    lowercase: LowercaseOption = False,
    tokenize: TokenizeOption = "",
    json: JsonOption = False,
    device: DeviceOption = "auto",
) -> None:
    """Compare translations by paired bootstrap, and show the sentences that moved most."""
    from dragoman.evaluate.compare import compare as run
    from dragoman.evaluate.files import read_text

    names = [str(path) for path in systems]
    if len(set(names)) != len(names):
        raise ConfigError([f"each system must be named once; found {', '.join(names)}; name two different ones"])
    outputs = {str(path): _translated(path, src, device) if path.is_dir() else read_text(path) for path in systems}
    found = run(outputs, read_text(ref), lowercase=lowercase, tokenize=tokenize, tgt_lang=tgt_lang, by=by, show=show, samples=samples)
    if json:
        as_json(found.as_dict())
    else:
        _draw(found, by)


def _translated(model: Path, src: Path | None, device: str) -> list[str]:
    """Translate the source with a model that was named instead of its output."""
    from dragoman.evaluate.files import read_text
    from dragoman.translator import Translator

    if src is None:
        raise ConfigError(
            [f"a model directory needs --src to translate; found {model} and no --src; add it, or name a file of translations"]
        )
    note(f"translating {src} with {model}")
    return [each.text for each in Translator.load(model, device=device).stream(read_text(src))]


def _draw(found: Comparison, by: str) -> None:
    """Show the comparison to a person."""
    rows = []
    for each in found.results:
        verdict = "baseline" if each.p is None else ("clear" if each.clear else "could be chance")
        p = "" if each.p is None else f"{each.p:.4f}"
        rows.append((each.metric, each.system, f"{each.value:.2f}", f"{each.mean:.2f} ± {each.margin:.2f}", p, verdict))
    table(["metric", "system", "score", "mean ± 95 %", "p", "difference"], rows, right=["score", "p"])
    for name, signature in found.signatures.items():
        result(f"{name}: {signature}")
    for sentence in found.notes:
        note(sentence)
    if found.moved:
        result()
        result(f"Sentences that moved most from the first system to the second (change in sentence {by}):")
    for moved in found.moved:
        result(f"\nline {moved.line}  {moved.change:+.1f}")
        result(f"  reference  {moved.reference}\n  first      {moved.before}\n  second     {moved.after}")
