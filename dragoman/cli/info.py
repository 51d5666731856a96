"""`dragoman info`: architecture, training and settings of a model directory."""

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
    from dragoman.inference.engine_benchmark import EngineInfo


def info(
    model: RunArgument,
    card: Annotated[bool, typer.Option("--card", help="Show the model card instead.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a model's architecture, training, engines and settings."""
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
        engines = [each.to_dict() for each in _list_engines(bundle)]
        print_json({**_json_values(bundle), "engines": engines, "changed": differences, "run": run})
    else:
        print_table(["", ""], _summary_rows(bundle, run).items())
        _print_engines(_list_engines(bundle))
        if changed:
            print_result()
            title = (
                f"Settings that differ from the recipe {bundle.config.recipe}"
                if bundle.config.recipe
                else "Settings that differ from the defaults"
            )
            print_table(
                ["setting", "value", "recipe" if bundle.config.recipe else "default", "meaning"],
                changed,
                title=title,
            )


def _json_values(bundle: Bundle) -> dict[str, Any]:
    """Return the values of `info --json`; every model has the same keys."""
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
        "src_vocab_size": len(tokenizers.src),
        "tgt_vocab_size": len(tokenizers.tgt),
        "bytes": _bundle_bytes(bundle),
        "manifest": {
            name: value
            for name, value in bundle.manifest_fields().items()
            if name not in ("kind", "parameters")
        },
    }


def _bundle_bytes(bundle: Bundle) -> int:
    """Return the size of a model's files."""
    return sum(int(record["bytes"]) for record in bundle.manifest["files"].values())


def _summary_rows(bundle: Bundle, run: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the summary table."""
    config, tokenizers = bundle.config, bundle.tokenizers
    languages = " to ".join(each or "?" for each in (config.data.src_lang, config.data.tgt_lang))
    vocabulary = (
        f"{len(tokenizers.src):,} shared"
        if tokenizers.shared_vocab
        else f"{len(tokenizers.src):,} and {len(tokenizers.tgt):,}"
    )
    rows: dict[str, Any] = {
        "model": str(bundle.path),
        "recipe": config.recipe or "none",
        "languages": languages if languages != "? to ?" else "not stated",
        "parameters": f"{bundle.parameters:,}",
        "encoder": " ".join(config.model.encoder),
        "decoder": " ".join(config.model.decoder),
        "width": config.model.width,
        "vocabulary": f"{vocabulary}, {config.text.tokenizer}",
        "size": format_bytes(_bundle_bytes(bundle)),
    }
    rows |= {
        name.replace("_", " "): value
        for name, value in bundle.manifest_fields().items()
        if isinstance(value, (str, int, float)) and name not in rows and name != "kind"
    }
    if run:
        rows["run"] = ", ".join(
            f"{name} {run[name]}" for name in ("state", "step", "reason") if run.get(name)
        )
    return rows


def _list_engines(bundle: Bundle) -> list[EngineInfo]:
    """Return the engines of a model with their measured throughput on this machine."""
    from dragoman.inference import TranslationOptions
    from dragoman.inference.engine_benchmark import list_engines

    return list_engines(bundle, TranslationOptions().strategy(bundle.config.decode))


def _print_engines(engines: list[EngineInfo]) -> None:
    """Print the engines if there are others than the native one."""
    if len(engines) == 1:
        return
    rows = []
    for each in engines:
        state = "default" if each.chosen else ""
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
        ["engine", "type", "size", "outputs as native", "sentences/s", ""],
        rows,
        title="Engines",
        right=["size", "sentences/s"],
    )


def _format_parity(parity: dict[str, Any] | None) -> str:
    """Return how many outputs of an export equal those of the native engine."""
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
    """Return the settings that differ from the bundle's recipe."""
    from dragoman.config import Config, read_config

    try:
        recipe = read_config(recipe=bundle.config.recipe)
    except ConfigError:  # a recipe of another release or a custom one
        recipe = Config()
    return [
        (row.path, value, was, row.sentence)
        for row, value, was in changed_settings(bundle.config, recipe)
    ]


def _read_run_status(model: Path) -> dict[str, Any]:
    """Return the status of the training run in a model directory; empty without a run."""
    from dragoman.storage.manifest import read_json

    path = model / "training" / "status.json"
    return read_json(path) if path.is_file() else {}


def _print_run(model: Path, run: dict[str, Any], *, json: bool) -> None:
    """Print the status of an unfinished run."""
    if json:
        print_json({"model": str(model), "finished": False, "run": run})
        return
    print_table(["", ""], run.items(), title=f"{model}: unfinished training run")
    print_result(f"\nResume with: dragoman train --out {model} --resume")
