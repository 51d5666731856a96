"""`dragoman info`: what a model directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.options import BundleArgument, JsonOption
from dragoman.cli.settings import differing
from dragoman.cli.show import as_json, result, size, table
from dragoman.errors import ConfigError

if TYPE_CHECKING:
    from dragoman.bundle import Bundle


def info(
    model: BundleArgument,
    card: Annotated[bool, typer.Option("--card", help="Show the model's card instead.")] = False,
    json: JsonOption = False,
) -> None:
    """Show what a model is, how it was trained, and what differs from its recipe."""
    from dragoman.bundle import Bundle

    run = _run_state(model)
    if run and not (model / "manifest.json").exists():
        _show_run(model, run, json=json)
        return
    bundle = Bundle.load(model)
    facts = _facts(bundle, run)
    changed = _changed(bundle)
    if card:
        result(bundle.card)
    elif json:
        as_json({**facts, "changed": {path: {"value": value, "was": was} for path, value, was, _ in changed}, "run": run})
    else:
        table(["", ""], facts.items())
        if changed:
            result()
            title = f"What differs from the recipe {bundle.config.recipe}" if bundle.config.recipe else "What differs from the defaults"
            table(["setting", "here", "there", "meaning"], changed, title=title)


def _facts(bundle: Bundle, run: dict[str, Any]) -> dict[str, Any]:
    """Gather what a person asks first about a model."""
    config, tokenizers = bundle.config, bundle.tokenizers
    languages = " to ".join(each or "?" for each in (config.data.src_lang, config.data.tgt_lang))
    pieces = f"{len(tokenizers.src):,} shared" if tokenizers.joint else f"{len(tokenizers.src):,} and {len(tokenizers.tgt):,}"
    facts: dict[str, Any] = {
        "model": str(bundle.path),
        "recipe": config.recipe or "none",
        "languages": languages if languages != "? to ?" else "not stated",
        "weights": f"{bundle.parameters:,}",
        "encoder": " ".join(config.model.encoder),
        "decoder": " ".join(config.model.decoder),
        "width": config.model.width,
        "pieces": f"{pieces}, {config.text.kind}",
        "size": size(sum(int(record["bytes"]) for record in bundle.manifest["files"].values())),
    }
    facts |= {
        name.replace("_", " "): value
        for name, value in bundle.facts().items()
        if isinstance(value, (str, int, float)) and name not in facts
    }
    if run:
        facts["run"] = ", ".join(f"{name} {run[name]}" for name in ("state", "update", "reason") if run.get(name))
    facts.pop("kind", None)
    facts.pop("parameters", None)
    return facts


def _changed(bundle: Bundle) -> list[tuple[str, str, str, str]]:
    """Compare a bundle's settings with those of the recipe that it names."""
    from dragoman.config import Config, read_config

    try:
        recipe = read_config(recipe=bundle.config.recipe)
    except ConfigError:  # a recipe of another release, or of somebody's own
        recipe = Config()
    return [(row.path, value, was, row.sentence) for row, value, was in differing(bundle.config, recipe)]


def _run_state(model: Path) -> dict[str, Any]:
    """Read where the training run in a model's directory stands, if there is one."""
    from dragoman.files.manifest import read_json

    path = model / "training" / "status.json"
    return read_json(path) if path.is_file() else {}


def _show_run(model: Path, run: dict[str, Any], *, json: bool) -> None:
    """Show a run that has not become a model yet."""
    if json:
        as_json({"model": str(model), "finished": False, "run": run})
        return
    table(["", ""], run.items(), title=f"{model} is a training run that has not finished")
    result("\nTo go on: the same dragoman train command with --resume")
