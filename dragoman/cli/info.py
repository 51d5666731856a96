"""`dragoman info`: what a model directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.options import JsonOption, RunArgument
from dragoman.cli.output import print_json, print_result, print_table
from dragoman.cli.settings import changed_settings
from dragoman.errors import ConfigError
from dragoman.storage.disk import format_bytes

if TYPE_CHECKING:
    from dragoman.bundle import Bundle
    from dragoman.inference.engine_listing import EngineInfo


def info(
    model: RunArgument,
    card: Annotated[bool, typer.Option("--card", help="Show the model's card instead.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what a model is, how it was trained, and what differs from its recipe."""
    from dragoman.bundle import Bundle

    run = _read_run_status(model)
    if run and not (model / "manifest.json").exists():
        _print_run(model, run, json=json)
        return
    bundle = Bundle.load(model)
    changed = _changed_settings(bundle)
    if card:
        print_result(bundle.card)
    elif json:
        differences = {path: {"value": value, "was": was} for path, value, was, _ in changed}
        engines = [each.facts() for each in _list_engines(bundle)]
        print_json({**_json_values(bundle), "engines": engines, "changed": differences, "run": run})
    else:
        print_table(["", ""], _summary_rows(bundle, run).items())
        _print_engines(_list_engines(bundle))
        if changed:
            print_result()
            title = (
                f"What differs from the recipe {bundle.config.recipe}"
                if bundle.config.recipe
                else "What differs from the defaults"
            )
            print_table(["setting", "here", "there", "meaning"], changed, title=title)


def _json_values(bundle: Bundle) -> dict[str, Any]:
    """Return what `info --json` says of a model: numbers as numbers, and the same keys for every model."""
    config, tokenizers = bundle.config, bundle.tokenizers
    return {
        "model": str(bundle.path),
        "recipe": config.recipe,
        "src_lang": config.data.src_lang,
        "tgt_lang": config.data.tgt_lang,
        "parameters": bundle.parameters,
        "encoder": list(config.model.encoder),
        "decoder": list(config.model.decoder),
        "width": config.model.width,
        "tokenizer": config.text.tokenizer,
        "shared_vocabulary": tokenizers.shared_vocab,
        "src_vocabulary": len(tokenizers.src),
        "tgt_vocabulary": len(tokenizers.tgt),
        "bytes": _bundle_bytes(bundle),
        "facts": {
            name: value
            for name, value in bundle.facts().items()
            if name not in ("kind", "parameters")
        },
    }


def _bundle_bytes(bundle: Bundle) -> int:
    """Return the size of a model's files."""
    return sum(int(record["bytes"]) for record in bundle.manifest["files"].values())


def _summary_rows(bundle: Bundle, run: dict[str, Any]) -> dict[str, Any]:
    """Gather what a person asks first about a model."""
    config, tokenizers = bundle.config, bundle.tokenizers
    languages = " to ".join(each or "?" for each in (config.data.src_lang, config.data.tgt_lang))
    vocabulary = (
        f"{len(tokenizers.src):,} shared"
        if tokenizers.shared_vocab
        else f"{len(tokenizers.src):,} and {len(tokenizers.tgt):,}"
    )
    facts: dict[str, Any] = {
        "model": str(bundle.path),
        "recipe": config.recipe or "none",
        "languages": languages if languages != "? to ?" else "not stated",
        "weights": f"{bundle.parameters:,}",
        "encoder": " ".join(config.model.encoder),
        "decoder": " ".join(config.model.decoder),
        "width": config.model.width,
        "vocabulary": f"{vocabulary}, {config.text.tokenizer}",
        "size": format_bytes(_bundle_bytes(bundle)),
    }
    facts |= {
        name.replace("_", " "): value
        for name, value in bundle.facts().items()
        if isinstance(value, (str, int, float)) and name not in facts
    }
    if run:
        facts["run"] = ", ".join(
            f"{name} {run[name]}" for name in ("state", "step", "reason") if run.get(name)
        )
    facts.pop("kind", None)
    facts.pop("parameters", None)
    return facts


def _list_engines(bundle: Bundle) -> list[EngineInfo]:
    """List what could run a model, with what was measured of it here."""
    from dragoman.inference import TranslationOptions
    from dragoman.inference.engine_listing import list_engines

    return list_engines(bundle, TranslationOptions().strategy(bundle.config.decode))


def _print_engines(engines: list[EngineInfo]) -> None:
    """Show the engines, where there are more than our own."""
    if len(engines) == 1:
        return
    rows = []
    for each in engines:
        state = "chosen here" if each.chosen else ""
        rate = "" if each.rate is None else f"{each.rate:,.0f}"
        rows.append(
            (
                each.name,
                each.type,
                "" if each.bytes is None else format_bytes(each.bytes),
                each.trouble or _format_parity(each.parity),
                rate,
                state,
            )
        )
    print_result()
    print_table(
        ["engine", "type", "size", "as native", "sentences/s", ""],
        rows,
        title="What runs it",
        right=["size", "sentences/s"],
    )


def _format_parity(parity: dict[str, Any] | None) -> str:
    """Say in a few words how an export compared with the native engine."""
    if not parity:
        return ""
    line = f"{parity.get('equal', '?')!s:.20} of {parity.get('sentences', '?')!s:.20} equal"
    scores = [
        score
        for score in (parity.get("bleu"), parity.get("bleu_native"))
        if isinstance(score, float)
    ]
    if len(scores) == 2:
        line += f", BLEU {scores[0] - scores[1]:+.2f}"
    return line


def _changed_settings(bundle: Bundle) -> list[tuple[str, str, str, str]]:
    """Compare a bundle's settings with those of the recipe that it names."""
    from dragoman.config import Config, read_config

    try:
        recipe = read_config(recipe=bundle.config.recipe)
    except ConfigError:  # a recipe of another release, or of somebody's own
        recipe = Config()
    return [
        (row.path, value, was, row.sentence)
        for row, value, was in changed_settings(bundle.config, recipe)
    ]


def _read_run_status(model: Path) -> dict[str, Any]:
    """Read where the training run in a model's directory stands, if there is one."""
    from dragoman.storage.manifest import read_json

    path = model / "training" / "status.json"
    return read_json(path) if path.is_file() else {}


def _print_run(model: Path, run: dict[str, Any], *, json: bool) -> None:
    """Show a run that has not become a model yet."""
    if json:
        print_json({"model": str(model), "finished": False, "run": run})
        return
    print_table(["", ""], run.items(), title=f"{model} is a training run that has not finished")
    print_result("\nTo go on: the same dragoman train command with --resume")
