"""Training curves of a run as a PNG: loss, BLEU, learning rate and gradient norm."""

from __future__ import annotations

import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dragoman.storage.atomic import open_run_file, replace_file

LINE_COLOR, LIGHT_COLOR, MARKER_COLOR = "#1f4e79", "#b8cde0", "#c0504d"
MAX_POINTS = 2000  # more cannot be resolved
_MAX_VALUE = 1e30


def draw_curves(log: Path, image: Path) -> bool:
    """Draw a PNG from `log.jsonl`; return False if the log has fewer than two steps."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # neither a window system nor global state
    from matplotlib.figure import Figure

    steps, validations = read_log(log)
    if len(steps) < 2:
        return False
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss, score, rate, norm = figure.subplots(2, 2).flat
    positions = [record["step"] for record in steps]
    _draw_loss(loss, steps, validations)
    _draw_score(score, steps, validations)
    rate.plot(positions, [record["lr"] for record in steps], color=LINE_COLOR)
    rate.set(title="Learning rate", xlabel="step", ylim=(0, None))
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    _draw_smoothed(norm, positions, [record["grad_norm"] for record in steps])
    norm.set(title="Gradient norm, before clipping", xlabel="step", yscale="log")
    for axes in (loss, score, rate, norm):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(min(positions), max(positions))
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    replace_file(image, drawn.getvalue())  # replaces a symbolic link instead of following it
    return True


def read_log(log: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the step records, thinned to MAX_POINTS, and the last validation of each step."""
    steps: list[dict[str, Any]] = []
    validations: dict[int, dict[str, Any]] = {}
    for record in _records(log):
        if record.get("event") == "validation" and _has_finite_numbers(record, "step", "loss"):
            validations[record["step"]] = record
        elif _has_finite_numbers(
            record, "step", "lr", "nll", "grad_norm", "tokens", "seconds"
        ) and not record.get("skipped"):
            steps.append(record)
    return steps[:: max(1, len(steps) // MAX_POINTS)], [
        validations[step] for step in sorted(validations)
    ]


def _records(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the log; incomplete lines are skipped."""
    if not log.exists():
        return
    with open(open_run_file(log, os.O_RDONLY), encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def _has_finite_numbers(record: dict[str, Any], *names: str) -> bool:
    """Whether a record has finite numbers under these names."""
    return all(
        type(record.get(name)) in (int, float) and abs(record[name]) < _MAX_VALUE for name in names
    )


def _draw_loss(axes: Any, steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> None:
    """Draw training and validation loss, both without label smoothing."""
    _draw_smoothed(
        axes,
        [record["step"] for record in steps],
        [record["nll"] for record in steps],
        label="training",
    )
    if validations:
        best = min(validations, key=lambda record: record["loss"])
        axes.plot(
            *_column(validations, "loss"),
            "o-",
            color=MARKER_COLOR,
            markersize=4,
            label=f"validation, lowest {best['loss']:.3f}",
        )
        axes.legend(frameon=False)
    axes.set(title="Loss per token (nats)", xlabel="step")


def _draw_score(axes: Any, steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> None:
    """Draw the validation BLEU, or the throughput without it."""
    scored = [record for record in validations if _has_finite_numbers(record, "bleu")]
    if scored:
        best = max(scored, key=lambda record: record["bleu"])
        axes.plot(
            *_column(scored, "bleu"),
            "o-",
            color=MARKER_COLOR,
            markersize=4,
            label=f"highest {best['bleu']:.1f} at {best['step']:,}",
        )
        axes.legend(frameon=False, loc="lower right")
        axes.set(
            title="BLEU of the validation sample", xlabel="step", ylim=(0, 1.1 * best["bleu"] + 1)
        )
        return
    speed = [record["tokens"] / max(record["seconds"], 1e-9) for record in steps]
    _draw_smoothed(axes, [record["step"] for record in steps], speed)
    axes.set(title="Tokens/s", xlabel="step", ylim=(0, None))


def _draw_smoothed(axes: Any, steps: list[int], values: list[float], label: str = "") -> None:
    """Draw the values in a light color and their moving average over them."""
    axes.plot(steps, values, color=LIGHT_COLOR, linewidth=0.8)
    half = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    edges = [
        (max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values))
    ]
    means = [(sums[last] - sums[first]) / (last - first) for first, last in edges]
    axes.plot(steps, means, color=LINE_COLOR, label=label)


def _column(records: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [record[name] for record in records]
