"""Figures of statistics over sentences: BLEU by length, head entropy, calibration, distribution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.evaluate.bleu_by_length import LengthScores
from dragoman.evaluate.classification_metrics import expected_calibration_error
from dragoman.explain.calibration_and_output_distribution import (
    TokenStatistics,
    reliability_bins,
    smoothed_target,
)
from dragoman.explain.explanation import Explanation
from dragoman.explain.plot_style import (
    FAINT,
    HEAT_MAP,
    LIGHT,
    MARKERS,
    ONE_COLUMN,
    PALETTE,
    TWO_COLUMNS,
    escape_undrawable,
    figure_style,
    save_figure,
    use_log_scale,
)

GROUPS = ("encoder", "decoder", "cross")
_MAX_RANK = 1000  # of the output distribution that is drawn


# BLEU by length


def save_length_scores(path: str | Path, runs: Sequence[tuple[str, LengthScores]]) -> None:
    """Draw BLEU of each bucket of source lengths with its 95 % interval, for several models."""
    from matplotlib.figure import Figure

    with figure_style([label for label, _ in runs]):
        figure = Figure(figsize=(ONE_COLUMN, 2.4), layout="constrained")
        axes = figure.subplots()
        buckets = runs[0][1].buckets
        for number, (label, scores) in enumerate(runs):
            shift = 0.16 * (number - (len(runs) - 1) / 2)
            at = np.arange(len(scores.buckets)) + shift
            values = np.array([bucket.bleu for bucket in scores.buckets])
            lower = np.array([bucket.bleu - bucket.low for bucket in scores.buckets])
            upper = np.array([bucket.high - bucket.bleu for bucket in scores.buckets])
            axes.errorbar(
                at,
                values,
                yerr=np.clip([lower, upper], 0.0, None),
                fmt=f"{MARKERS[number % len(MARKERS)]}-",
                color=PALETTE[number % len(PALETTE)],
                markersize=3.5,
                linewidth=1.0,
                elinewidth=0.8,
                capsize=2,
                label=escape_undrawable(label),
            )
        names = [
            f"{b.shortest}–{b.longest}\n({b.sentences:,})"
            if b.longest > b.shortest
            else f"{b.shortest}\n({b.sentences:,})"
            for b in buckets
        ]
        axes.set_xticks(range(len(buckets)), names)
        axes.set(
            xlabel=f"source length in {runs[0][1].unit} (sentences)",
            ylabel="BLEU with 95 % interval",
            ylim=(0, None),
        )
        axes.grid(axis="x", visible=False)
        if len(runs) > 1:
            axes.legend()
        save_figure(figure, path)


# Entropy of heads


class SiteEntropy(NamedTuple):
    """Mean entropy of the rows of one attention site, by head."""

    site: str
    group: str
    layer: int
    entropy: NDArray[np.float64]  # (H,), in nats
    fraction: NDArray[np.float64]  # (H,), of the largest entropy that the rows' keys allow


def row_entropies(weights: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the entropy of each row of weights (..., K) in nats; rows are normalized first.

    A row without any weight is NaN.
    """
    values = weights.astype(np.float64)
    total = values.sum(axis=-1, keepdims=True)
    normal = np.divide(values, total, out=np.zeros_like(values), where=total > 0)
    logs = np.log(normal, out=np.zeros_like(normal), where=normal > 0)
    entropy = np.asarray(-(normal * logs).sum(axis=-1), np.float64)
    return np.where(total[..., 0] > 0, np.maximum(entropy, 0.0), np.nan)


def measure_entropies(explanations: Iterable[Explanation]) -> list[SiteEntropy]:
    """Return the mean entropy of every head over the rows of all explanations.

    The largest entropy of a row is the logarithm of the keys that it may attend to: of causal
    attention those up to its own position, of a sentence's words its own.
    """
    sums: dict[str, list[Any]] = {}
    for explanation in explanations:
        for site in explanation.sites:
            weights = explanation.arrays.get(site.tensor)
            if weights is None or weights.ndim != 3 or not weights.size:
                continue
            entropy = row_entropies(weights)  # (H, Q)
            allowed = (weights > 0).any(axis=0).sum(axis=-1)  # (Q,); masked keys are exactly 0
            with np.errstate(divide="ignore", invalid="ignore"):
                fraction = np.where(allowed > 1, entropy / np.log(allowed), np.nan)
            group = site.kind if site.kind in ("pool", "set") else site.group
            known = sums.setdefault(
                site.id, [group, site.layer, *(np.zeros(site.heads) for _ in range(4))]
            )
            for at, values in ((2, entropy), (4, fraction)):
                finite = np.isfinite(values)
                known[at] = known[at] + np.where(finite, values, 0.0).sum(axis=1)
                known[at + 1] = known[at + 1] + finite.sum(axis=1)
    return [
        SiteEntropy(name, group, layer, _ratio(entropy, rows), _ratio(fraction, counted))
        for name, (group, layer, entropy, rows, fraction, counted) in sums.items()
    ]


def _ratio(total: NDArray[np.float64], count: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return total / count, 0 where nothing was counted."""
    return np.divide(total, count, out=np.zeros_like(total), where=count > 0)


def save_entropies(path: str | Path, sites: Sequence[SiteEntropy], *, sentences: int) -> None:
    """Draw the mean entropy of each head: a row per layer, a column per head, for each group."""
    from matplotlib.figure import Figure

    groups = [
        (group, found)
        for group in GROUPS
        if (found := [site for site in sites if site.group == group])
    ]
    groups += [
        (group, [site for site in sites if site.group == group])
        for group in dict.fromkeys(site.group for site in sites)
        if group not in GROUPS
    ]
    heads = max(len(site.entropy) for site in sites)
    layers = max(len(found) for _, found in groups)
    with figure_style():
        width = TWO_COLUMNS if len(groups) > 1 or heads > 8 else ONE_COLUMN
        figure = Figure(figsize=(width, max(1.5, 0.28 * layers + 1.0)), layout="constrained")
        panels = figure.subplots(1, len(groups), squeeze=False)[0]
        image: Any = None
        for axes, (group, found) in zip(panels, groups, strict=True):
            most = max(len(site.entropy) for site in found)
            table = np.full((len(found), most), np.nan)
            for row, site in enumerate(found):
                table[row, : len(site.fraction)] = site.fraction
            image = axes.imshow(table, cmap=HEAT_MAP, vmin=0.0, vmax=1.0, aspect="auto")
            for row, site in enumerate(found):
                for head, value in enumerate(site.entropy):
                    dark = site.fraction[head] > 0.6
                    axes.text(
                        head,
                        row,
                        f"{value:.1f}",
                        ha="center",
                        va="center",
                        fontsize=6 if most <= 8 else 5,
                        color="white" if dark else "black",
                    )
            axes.set_xticks(range(most))
            axes.set_yticks(range(len(found)), [site.site for site in found])
            axes.set(title=_GROUP_TITLES.get(group, group), xlabel="head")
            axes.grid(False)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        panels[0].set_ylabel("attention of each layer")
        bar = figure.colorbar(image, ax=list(panels), pad=0.02, fraction=0.05, aspect=12)
        bar.set_label("fraction of the largest", fontsize=7)
        bar.outline.set_visible(False)
        noun = "sentence" if sentences == 1 else "sentences"
        figure.suptitle(f"Mean entropy of attention rows in nats, {sentences:,} {noun}", fontsize=9)
        save_figure(figure, path)


_GROUP_TITLES = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "Cross-attention",
    "pool": "Attention pooling",
    "set": "Attention among elements",
}


# Calibration


class Calibration(NamedTuple):
    """Predictions of one model for a reliability diagram."""

    label: str
    confidence: NDArray[np.float64]
    right: NDArray[np.bool_]
    what: str  # what is predicted: "tokens", "labels"

    @property
    def error(self) -> float:
        """The expected calibration error (Guo et al., 2017)."""
        return expected_calibration_error(self.confidence, self.right)


def save_calibration(path: str | Path, runs: Sequence[Calibration]) -> None:
    """Draw a reliability diagram over the histogram of confidences."""
    from matplotlib.figure import Figure

    with figure_style([run.label for run in runs]):
        figure = Figure(figsize=(ONE_COLUMN, 3.3), layout="constrained")
        axes, counts = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (3.2, 1)})
        axes.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
        for number, run in enumerate(runs):
            bins = reliability_bins(run.confidence, run.right)
            color = PALETTE[number % len(PALETTE)]
            accuracy = float(run.right.mean())
            label = f"{escape_undrawable(run.label)}: " if len(runs) > 1 else ""
            axes.plot(
                [each.confidence for each in bins],
                [each.accuracy for each in bins],
                marker=MARKERS[number % len(MARKERS)],
                markersize=3.5,
                color=color,
                label=f"{label}ECE {100 * run.error:.1f} %, accuracy {100 * accuracy:.1f} %",
            )
            if len(runs) == 1:
                for each in bins:
                    axes.plot([each.confidence] * 2, [each.confidence, each.accuracy], color=LIGHT)
            counts.step(
                [0.0, *(each.high for each in bins)],
                [0.0, *(each.predictions / len(run.right) for each in bins)],
                where="pre",
                color=color,
            )
        axes.text(0.03, 0.9, "less sure than right", color=FAINT, transform=axes.transAxes)
        axes.text(0.97, 0.06, "surer than right", color=FAINT, ha="right", transform=axes.transAxes)
        axes.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
        axes.legend(loc="upper left", bbox_to_anchor=(0.0, 1.16), borderaxespad=0.0)
        counts.set(
            xlabel=f"probability of the most probable {runs[0].what[:-1]}",
            ylabel=f"fraction of\n{runs[0].what}",
            ylim=(0, None),
        )
        save_figure(figure, path)


# Output distribution


def save_distribution(path: str | Path, runs: Sequence[tuple[str, TokenStatistics, float]]) -> None:
    """Draw the mean sorted output distribution beside the target of label smoothing.

    Each run has a label, its statistics, and the label smoothing that it was trained with.
    """
    from matplotlib.figure import Figure

    with figure_style([label for label, _, _ in runs]):
        figure = Figure(figsize=(ONE_COLUMN, 2.8), layout="constrained")
        axes = figure.subplots()
        targets = {(len(found.sorted_mean), smoothing) for _, found, smoothing in runs}
        for number, (label, found, smoothing) in enumerate(runs):
            color = PALETTE[number % len(PALETTE)]
            vocabulary = len(found.sorted_mean)
            shown = min(vocabulary, _MAX_RANK)
            ranks = np.arange(1, shown + 1)
            start = f"{escape_undrawable(label)}: " if len(runs) > 1 else ""
            axes.plot(
                ranks,
                found.sorted_mean[:shown],
                color=color,
                marker=MARKERS[number % len(MARKERS)],
                markersize=3,
                markevery=_powers(shown),
                label=f"{start}output, mean of {len(found.right):,} tokens",
            )
            if len(targets) > 1 or number == 0:
                _draw_target(
                    axes,
                    smoothed_target(vocabulary, smoothing)[:shown],
                    smoothing,
                    color=color if len(targets) > 1 else FAINT,
                    start=start if len(targets) > 1 else "",
                )
        use_log_scale(axes, "x")
        use_log_scale(axes, "y")
        axes.set(
            xlabel="rank of the token",
            ylabel="probability",
            xlim=(0.9, None),
        )
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.3)
        save_figure(figure, path)


def _draw_target(
    axes: Any, target: NDArray[np.float64], smoothing: float, *, color: str, start: str
) -> None:
    """Draw the target of label smoothing; without any it is a single point."""
    if smoothing > 0:
        axes.plot(
            np.arange(1, len(target) + 1),
            target,
            color=color,
            linestyle=(0, (4, 2)),
            linewidth=1.0,
            label=f"{start}target, label smoothing {smoothing:g}",
        )
        return
    axes.plot(
        [1],
        [1.0],
        marker="*",
        color=color,
        linestyle="none",
        label=f"{start}target, no label smoothing",
    )


def _powers(shown: int) -> list[int]:
    """Return indices at 1, 2, 5, 10, 20, 50, … for markers on a logarithmic axis."""
    ranks = [base * 10**power for power in range(4) for base in (1, 2, 5)]
    return [rank - 1 for rank in ranks if rank <= shown]
