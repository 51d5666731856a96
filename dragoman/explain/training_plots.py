"""Training curves of one or several runs: loss, metrics, learning rate, gradient norm."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.explain.plot_style import (
    LIGHT,
    MARKERS,
    PALETTE,
    TWO_COLUMNS,
    escape_undrawable,
    figure_style,
    save_figure,
    use_log_scale,
    warn_about_glyphs,
)
from dragoman.storage.atomic_and_safe_file_io import open_run_file

MAX_POINTS = 2000  # more cannot be resolved
_MAX_VALUE = 1e30
_MAX_MARKERS = 25
# Validation metrics with the titles of their axes; the first that a log has is drawn, and whether
# larger is better.
METRICS: Mapping[str, tuple[str, bool]] = {
    "bleu": ("BLEU of the validation sample", True),
    "f1": ("F1 of the validation set", True),
    "accuracy": ("accuracy on the validation set", True),
    "pearson": ("correlation on the validation set", True),
    "mae": ("mean absolute error, validation", False),
    "perplexity": ("perplexity of the validation set", False),
}


class RunLog(NamedTuple):
    """The curves of a run, from its log.jsonl."""

    label: str
    steps: list[dict[str, Any]]
    validations: list[dict[str, Any]]


def draw_curves(log: Path, image: Path) -> bool:
    """Draw the curves of one `log.jsonl`; return False if the log has fewer than two steps."""
    steps, validations = read_log(log)
    if len(steps) < 2:
        return False
    if image.is_symlink():  # a run writes nothing outside of its directory
        image.unlink()
    save_curves(image, [RunLog("", steps, validations)])
    return True


def save_curves(path: str | Path, runs: Sequence[RunLog]) -> None:
    """Draw the curves of runs in one figure, each in its own color and marker."""
    from matplotlib.figure import Figure

    labels = [run.label for run in runs]
    warn_about_glyphs(labels)
    with figure_style(labels):
        figure = Figure(figsize=(TWO_COLUMNS, 4.4), layout="constrained")
        loss, score, rate, norm = figure.subplots(2, 2).flat
        metric = _common_metric(runs)
        for number, run in enumerate(runs):
            color = PALETTE[number % len(PALETTE)]
            marker = MARKERS[number % len(MARKERS)]
            label = escape_undrawable(run.label)
            alone = len(runs) == 1
            positions = [record["step"] for record in run.steps]
            _draw_loss(loss, run, color, marker, alone=alone, label=label)
            _draw_score(score, run, metric, color, marker, alone=alone, label=label)
            rate.plot(positions, [record["lr"] for record in run.steps], color=color)
            norms = [record["grad_norm"] for record in run.steps]
            _draw_smoothed(norm, positions, norms, color, alone=alone)
        rate.set(title="Learning rate", ylim=(0, None))
        rate.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
        norm.set(title="Gradient norm, before clipping")
        if any(record["grad_norm"] > 0 for run in runs for record in run.steps):
            use_log_scale(norm, "y")
        loss.set(title=_loss_title(runs))
        _title_score(score, metric)
        last = max(record["step"] for run in runs for record in run.steps)
        for axes in (loss, score, rate, norm):
            axes.set(xlabel="training step", xlim=(0, 1.02 * last))  # with room for the last marker
        for axes in (loss, score):
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
        save_figure(figure, path)


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


def _common_metric(runs: Sequence[RunLog]) -> str | None:
    """Return the first metric that some validation of a run has."""
    for name in METRICS:
        if any(_has_finite_numbers(each, name) for run in runs for each in run.validations):
            return name
    return None


def _loss_title(runs: Sequence[RunLog]) -> str:
    """Return the title of the losses: several runs are told apart by color, not by name."""
    if len(runs) == 1:
        return "Loss (nats)"
    return "Loss (nats): training thin, validation marked"


def _draw_loss(axes: Any, run: RunLog, color: str, marker: str, *, alone: bool, label: str) -> None:
    """Draw training and validation loss, both without label smoothing."""
    positions = [record["step"] for record in run.steps]
    nll = [record["nll"] for record in run.steps]
    _draw_smoothed(axes, positions, nll, color, alone=alone, label="training" if alone else "")
    if not run.validations:
        return
    best = min(run.validations, key=lambda record: record["loss"])
    axes.plot(
        *_column(run.validations, "loss"),
        marker=marker,
        markevery=_mark_every(run.validations),
        color=PALETTE[1] if alone else color,
        markersize=3.5,
        label=f"{'validation' if alone else label}, lowest {best['loss']:.3f}",
    )


def _draw_score(
    axes: Any,
    run: RunLog,
    metric: str | None,
    color: str,
    marker: str,
    *,
    alone: bool,
    label: str,
) -> None:
    """Draw the validation metric, or the throughput without one."""
    scored = [each for each in run.validations if metric and _has_finite_numbers(each, metric)]
    if metric and scored:
        _, larger = METRICS[metric]
        best = (max if larger else min)(scored, key=lambda record: record[metric])
        value = f"{best[metric]:.1f}" if best[metric] >= 10 else f"{best[metric]:.3f}"
        axes.plot(
            *_column(scored, metric),
            marker=marker,
            markevery=_mark_every(scored),
            color=PALETTE[1] if alone else color,
            markersize=3.5,
            label=f"{label + ', ' if label and not alone else ''}best {value} "
            f"at step {best['step']:,}",
        )
    elif not metric:
        speed = [record["tokens"] / max(record["seconds"], 1e-9) for record in run.steps]
        _draw_smoothed(axes, [record["step"] for record in run.steps], speed, color, alone=alone)


def _title_score(axes: Any, metric: str | None) -> None:
    """Name the panel of the metric."""
    if metric is None:
        axes.set(title="Throughput (tokens/s)", ylim=(0, None))
        return
    title, larger = METRICS[metric]
    axes.set(title=title[:1].upper() + title[1:])
    if larger:
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), high + 0.04 * abs(high))
    elif metric == "perplexity":
        use_log_scale(axes, "y")


def _draw_smoothed(
    axes: Any,
    steps: Sequence[int],
    values: Sequence[float],
    color: str,
    *,
    alone: bool,
    label: str = "",
) -> None:
    """Draw a moving average, of a single run over its values in a light color."""
    if alone:
        axes.plot(steps, values, color=LIGHT, linewidth=0.6)
    half = len(values) // 100
    sums = [0.0, *itertools.accumulate(values)]
    edges = [
        (max(0, index - half), min(len(values), index + half + 1)) for index in range(len(values))
    ]
    means = [(sums[last] - sums[first]) / (last - first) for first, last in edges]
    axes.plot(steps, means, color=color, label=label or None, linewidth=1.2 if alone else 0.7)


def _column(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [record[name] for record in records]


def _mark_every(records: Sequence[Any]) -> int:
    """Return the distance of markers, so that they do not merge into a line."""
    return max(1, len(records) // _MAX_MARKERS)
