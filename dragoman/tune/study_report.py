"""Results of a study: the table, trials.csv, and the figure of its trials."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dragoman.explain.plot_style import (
    FAINT,
    MARKERS,
    PALETTE,
    TWO_COLUMNS,
    figure_style,
    save_figure,
    use_log_scale,
)
from dragoman.storage.atomic_and_safe_file_io import replace_file
from dragoman.training.progress_display import format_duration
from dragoman.tune.search_space import SearchParameter, format_value
from dragoman.tune.trial_journal import COMPLETE, FAILED, PRUNED, RUNNING, TrialRecord

TABLE_COLUMNS = 80
_PANELS_PER_ROW = 3
_OUTLIER_SPREADS = 3.0  # a pruned trial further off than this does not set the scale


def rank_trials(trials: Sequence[TrialRecord], *, lower: bool) -> list[TrialRecord]:
    """Return the trials: complete ones, best first, then pruned, running and failed ones."""
    order = {COMPLETE: 0, PRUNED: 1, RUNNING: 2, FAILED: 3}

    def key(trial: TrialRecord) -> tuple[int, float, int]:
        value = trial.value if trial.value is not None else 0.0
        return order[trial.state], value if lower else -value, trial.number

    return sorted(trials, key=key)


def best_trial(trials: Sequence[TrialRecord], *, lower: bool) -> TrialRecord | None:
    """Return the complete trial with the best value; None if none is complete."""
    ranked = rank_trials(trials, lower=lower)
    return ranked[0] if ranked and ranked[0].state == COMPLETE else None


def format_metric(value: float | None) -> str:
    """Return a metric with four digits."""
    return "" if value is None else f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"


def format_table(
    trials: Sequence[TrialRecord],
    space: Sequence[SearchParameter],
    *,
    metric: str,
    lower: bool,
    columns: int = TABLE_COLUMNS,
) -> list[str]:
    """Return the lines of a table of trials, best first, at most `columns` wide.

    Settings whose columns do not fit are only in trials.csv, which the last line reports.
    """
    ranked = rank_trials(trials, lower=lower)
    first = [
        ["trial", *(str(each.number) for each in ranked)],
        [metric, *(format_metric(each.value) or "-" for each in ranked)],
    ]
    last = [
        ["time", *(format_duration(each.seconds) for each in ranked)],
        ["state", *(each.state for each in ranked)],
    ]
    chosen, width = [], sum(_width(column) for column in (*first, *last)) + 2 * 3
    for parameter in space:
        column = [parameter.label, *(format_value(each.values[parameter.name]) for each in ranked)]
        if width + 2 + _width(column) <= columns:
            chosen.append(column)
            width += 2 + _width(column)
    table = [*first, *chosen, *last]
    lines = [
        "  ".join(
            cell.ljust(_width(column)) if column is table[-1] else cell.rjust(_width(column))
            for cell, column in zip(row, table, strict=True)
        ).rstrip()
        for row in zip(*table, strict=True)
    ]
    if hidden := len(space) - len(chosen):
        lines.append(f"({hidden} more setting{'s' * (hidden > 1)} in trials.csv)")
    return lines


def _width(column: Sequence[str]) -> int:
    return max(len(cell) for cell in column)


def write_csv(
    path: Path, trials: Sequence[TrialRecord], space: Sequence[SearchParameter], *, metric: str
) -> None:
    """Write all trials in their order: values, metric, validations, time, parameters, reason."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    names = [each.name for each in space]
    head = ["trial", "state", metric, *names, "validations", "seconds", "parameters", "reason"]
    writer.writerow(head)
    for each in trials:
        value = "" if each.value is None else repr(each.value)
        settings = [each.values[name] for name in names]
        rest = [len(each.reports), f"{each.seconds:.1f}", each.parameters or "", each.reason]
        writer.writerow([each.number, each.state, value, *settings, *rest])
    replace_file(path, text.getvalue().encode("utf-8", "backslashreplace"))


def draw_trials(
    paths: Sequence[Path],
    trials: Sequence[TrialRecord],
    space: Sequence[SearchParameter],
    *,
    metric: str,
    lower: bool,
) -> bool:
    """Draw the metric over the trials and over each setting; return False without a value.

    Filled circles are complete trials, hollow squares pruned ones; the best one is marked.
    """
    from matplotlib.figure import Figure

    shown = [each for each in trials if each.value is not None]
    best = best_trial(trials, lower=lower)
    if not shown:
        return False
    panels = 1 + len(space)
    rows = math.ceil(panels / _PANELS_PER_ROW)
    columns = min(panels, _PANELS_PER_ROW)
    with figure_style():
        figure = Figure(figsize=(TWO_COLUMNS, 2.1 * rows + 0.3), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        flat = list(axes.flat)
        for unused in flat[panels:]:
            unused.set_axis_off()
        _draw_points(flat[0], [float(each.number) for each in shown], shown, best)
        _draw_best_so_far(flat[0], shown, lower=lower)
        flat[0].set(xlabel="trial")
        flat[0].xaxis.get_major_locator().set_params(integer=True)
        for parameter, each in zip(space, flat[1:], strict=False):
            _draw_parameter(each, parameter, shown, best)
        for row in axes:
            row[0].set(ylabel=metric)
        flat[0].set_ylim(*_limits(shown))
        handles, labels = flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
        for path in paths:
            save_figure(figure, path)
    return True


def _draw_points(
    axes: Any, positions: Sequence[float], trials: Sequence[TrialRecord], best: TrialRecord | None
) -> None:
    """Draw one mark for each trial."""
    for state, color, face, marker in (
        (PRUNED, FAINT, "none", MARKERS[1]),
        (COMPLETE, PALETTE[0], PALETTE[0], MARKERS[0]),
    ):
        points = [
            (position, each.value)
            for position, each in zip(positions, trials, strict=True)
            if each.state == state and each is not best
        ]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(
                xs, ys, s=18, marker=marker, edgecolors=color, facecolors=face, label=state
            )
    if best is not None:
        at = next(
            position for position, each in zip(positions, trials, strict=True) if each is best
        )
        axes.scatter(
            [at], [best.value], s=44, marker=MARKERS[3], color=PALETTE[1], zorder=3, label="best"
        )


def _draw_best_so_far(axes: Any, trials: Sequence[TrialRecord], *, lower: bool) -> None:
    """Draw the best value of the complete trials up to each trial as a line of steps."""
    best: list[tuple[int, float]] = []
    for each in trials:
        if each.state == COMPLETE and each.value is not None:
            before = best[-1][1] if best else each.value
            best.append(
                (each.number, min(before, each.value) if lower else max(before, each.value))
            )
    if len(best) > 1:
        xs, ys = zip(*best, strict=True)
        axes.step(xs, ys, where="post", color=PALETTE[1], linewidth=1.0, label="best so far")


def _draw_parameter(
    axes: Any, parameter: SearchParameter, trials: Sequence[TrialRecord], best: TrialRecord | None
) -> None:
    """Draw the metric over the values of one setting."""
    values = [each.values[parameter.name] for each in trials]
    if parameter.choices:
        positions = [float(parameter.choices.index(str(value))) for value in values]
        names = [name if len(name) <= 12 else f"{name[:11]}…" for name in parameter.choices]
        axes.set_xticks(range(len(names)), names, rotation=0 if len(names) <= 5 else 45)
        axes.set_xlim(-0.5, len(names) - 0.5)
    else:
        positions = [float(value) for value in values]
        low, high = parameter.low, parameter.high
        margin = 1.1 if parameter.log else 0.03 * (high - low)
        if parameter.log:
            use_log_scale(axes, "x")
            ticks = [low, math.sqrt(low * high), high]
            axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
            axes.set_xlim(low / margin, high * margin)
        else:
            axes.set_xlim(low - margin, high + margin)
    _draw_points(axes, positions, trials, best)
    axes.set(xlabel=parameter.label)


def _limits(trials: Sequence[TrialRecord]) -> tuple[float, float]:
    """Return the limits of the metric, which trials far off the complete ones do not set."""
    values = [each.value for each in trials if each.value is not None]
    complete = [
        each.value for each in trials if each.state == COMPLETE and each.value is not None
    ] or values
    low, high = min(complete), max(complete)
    spread = (high - low) or abs(high) * 0.1 or 1.0
    low = max(min(values), low - _OUTLIER_SPREADS * spread)
    high = min(max(values), high + _OUTLIER_SPREADS * spread)
    margin = 0.08 * ((high - low) or spread)
    return low - margin, high + margin
