"""`dragoman info`: architecture, training and settings of a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dragoman.cli.options import DefaultRunArgument, JsonOption
from dragoman.cli.settings_reference import changed_settings
from dragoman.cli.terminal_output import print_json, print_result, print_table
from dragoman.errors import ConfigError
from dragoman.storage.disk_space_and_errors import format_bytes

if TYPE_CHECKING:
    from dragoman.bundle import Bundle, TaskBundle
    from dragoman.inference.engine_throughput import EngineInfo

# Reasons in training/status.json, in words.
_END_REASONS = {
    "deadline": "its time budget was used up",
    "patience": "no better for train.patience validations",
    "target": "train.target_exact was reached",
}


def info(
    model: DefaultRunArgument,
    card: Annotated[bool, typer.Option("--card", help="Show the model card instead.")] = False,
    json: JsonOption = False,
) -> None:
    """Show a model's architecture, training, engines and settings.

    Without a model it describes the built-in one: data, command, scores and licence too.
    """
    from dragoman.bundle import Bundle, TaskBundle
    from dragoman.bundle.format import BOX, read_task

    run = _read_run_status(model)
    if run and not (model / "manifest.json").exists():
        _print_run(model, run, json=json)
        return
    bundle = Bundle.load(model) if read_task(model) == "translate" else TaskBundle.load(model)
    changed = _changed_settings(bundle)
    engines = _list_engines(bundle) if isinstance(bundle, Bundle) and not card else []
    if card:
        print_result(bundle.card)
    elif json:
        differences = {path: {"value": value, "was": was} for path, value, was, _ in changed}
        listed = [each.to_dict() for each in engines]
        print_json({**_json_values(bundle), "engines": listed, "changed": differences, "run": run})
    else:
        print_table(["", ""], _summary_rows(bundle, run).items())
        _print_engines(engines)
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
        if model == BOX:  # its card is where nobody would look for it
            print_result()
            print_result(_without_front_matter(bundle.card))


def _without_front_matter(card: str) -> str:
    """Return a card without the YAML at its beginning."""
    _, separator, rest = card.removeprefix("---").partition("\n---\n")
    return (rest if separator and card.startswith("---") else card).strip()


def _json_values(bundle: Bundle | TaskBundle) -> dict[str, Any]:
    """Return the values of `info --json`; every model of a task has the same keys."""
    from dragoman.bundle import Bundle

    config = bundle.config
    if isinstance(bundle, Bundle):
        tokenizers = bundle.tokenizers
        own = {
            "src_lang": config.data.src_lang,
            "tgt_lang": config.data.tgt_lang,
            "directions": list(config.data.directions),
            "encoder": list(config.model.encoder),
            "decoder": list(config.model.decoder),
            "shared_vocabulary": tokenizers.shared_vocab,
            "src_vocab_size": len(tokenizers.src),
            "tgt_vocab_size": len(tokenizers.tgt),
            "confidence": _confidence_values(bundle),
        }
    else:
        own = {each: list(getattr(config.model, each)) for each in config.stacks}
        own["text"] = bundle.task.describe()
    return {
        "model": str(bundle.path),
        "task": config.task,
        "recipe": config.recipe,
        "parameters": bundle.parameters,
        "width": config.model.width,
        "tokenizer": config.text.tokenizer,
        **own,
        "bytes": _bundle_bytes(bundle),
        "manifest": {
            name: value
            for name, value in bundle.manifest_fields().items()
            if name not in ("kind", "parameters")
        },
    }


def _bundle_bytes(bundle: Bundle | TaskBundle) -> int:
    """Return the size of a model's files."""
    return sum(int(record["bytes"]) for record in bundle.manifest["files"].values())


def _summary_rows(bundle: Bundle | TaskBundle, run: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the summary table."""
    from dragoman.bundle import Bundle

    rows = _translator_rows(bundle) if isinstance(bundle, Bundle) else _task_rows(bundle)
    rows |= {
        name.replace("_", " "): value
        for name, value in bundle.manifest_fields().items()
        if isinstance(value, (str, int, float)) and name not in rows and name != "kind"
    }
    if run:
        rows["run"] = _describe_run(run)
    return rows


def _describe_run(run: dict[str, Any]) -> str:
    """Return how a training run ended: state, step and reason."""
    at = f" at step {run['step']}" if run.get("step") else ""
    reason = str(run.get("reason", ""))
    return f"{run.get('state', '')}{at}" + (f": {_END_REASONS.get(reason, reason)}" * bool(reason))


def _task_rows(bundle: TaskBundle) -> dict[str, Any]:
    """Return the rows about a model of another task than translation."""
    from dragoman.bundle.format import model_command

    config = bundle.config
    command = model_command(config.task, config.language.objective)
    return {
        "model": str(bundle.path),
        "task": f"{config.task}, run by dragoman {command}",
        "recipe": config.recipe or "none",
        "parameters": f"{bundle.parameters:,}",
        **{each: " ".join(getattr(config.model, each)) for each in config.stacks},
        "width": config.model.width,
        "text": bundle.task.describe() or config.text.tokenizer,
        "size": format_bytes(_bundle_bytes(bundle)),
    }


def _translator_rows(bundle: Bundle) -> dict[str, Any]:
    """Return the rows about a translation model."""
    config, tokenizers = bundle.config, bundle.tokenizers
    languages = ", ".join(config.data.directions) or " to ".join(
        each or "?" for each in (config.data.src_lang, config.data.tgt_lang)
    )
    vocabulary = (
        f"{len(tokenizers.src):,} shared"
        if tokenizers.shared_vocab
        else f"{len(tokenizers.src):,} and {len(tokenizers.tgt):,}"
    )
    return {
        "model": str(bundle.path),
        "recipe": config.recipe or "none",
        "languages": languages if languages != "? to ?" else "not stated",
        "parameters": f"{bundle.parameters:,}",
        "encoder": " ".join(config.model.encoder),
        "decoder": " ".join(config.model.decoder),
        "width": config.model.width,
        "vocabulary": f"{vocabulary}, {config.text.tokenizer}",
        "size": format_bytes(_bundle_bytes(bundle)),
        **_confidence_row(bundle),
    }


def _confidence_row(bundle: Bundle) -> dict[str, str]:
    """Return the row about the confidence of a translation model; none without a calibration."""
    calibration = bundle.calibration
    if calibration is None:
        return {}
    return {
        "confidence": f"expected calibration error {100 * calibration.calibration_error:.1f} %, "
        f"AUROC {calibration.auroc:.2f}; good: chrF {calibration.good_chrf:.1f}+"
    }


def _confidence_values(bundle: Bundle) -> dict[str, Any] | None:
    """Return the values of a calibration that `info --json` shows; None without one."""
    calibration = bundle.calibration
    if calibration is None:
        return None
    names = (
        "good_chrf",
        "calibration_error",
        "chance_error",
        "auroc",
        "fitted_on",
        "measured_on",
    )
    return {"map": calibration.kind, **{name: getattr(calibration, name) for name in names}}


def _list_engines(bundle: Bundle) -> list[EngineInfo]:
    """Return the engines of a model with their measured throughput on this machine."""
    from dragoman.inference import TranslationOptions
    from dragoman.inference.engine_throughput import list_engines

    return list_engines(bundle, TranslationOptions().strategy(bundle.config.decode))


def _print_engines(engines: list[EngineInfo]) -> None:
    """Print the engines if there are others than the native one."""
    if len(engines) <= 1:
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


def _changed_settings(bundle: Bundle | TaskBundle) -> list[tuple[str, str, str, str]]:
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
