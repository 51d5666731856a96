"""Attention maps of an explanation: choosing one, and saving it as PNG, SVG or PDF.

An `AttentionView` is chosen weights with the names of both axes and their labels, for any script;
`terminal_attention_map.py` draws it in a terminal.
"""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dragoman.errors import ConfigError
from dragoman.explain.explanation import (
    AttentionSite,
    AttentionWeights,
    Explanation,
    Step,
    TokenizedText,
    check_labels,
)
from dragoman.explain.plot_style import (
    DOTS_PER_INCH,
    FAINT,
    HEAT_MAP,
    escape_undrawable,
    figure_style,
    save_figure,
    warn_about_glyphs,
)

CLASS_TASKS = ("classify", "pairs", "sets")  # whose output is one class
KINDS = ("cross", "decoder", "encoder")  # the first that a model has is shown by default
_GROUP_NAMES = {
    "cross": "cross-attention",
    "decoder": "decoder self-attention",
    "encoder": "encoder self-attention",
}
_KIND_NAMES = {
    "pool": "attention pooling",
    "set": "attention over a set",
    "memory": "attention to a memory",
    "conv": "convolution",
}
# Names of axes in the plural, rows attend to columns.
_AXIS_NAMES = {
    "source": "source tokens",
    "target": "target tokens",
    "target_in": "target tokens before them",
    "sentence": "sentences",
    "class": "classes",
    "seed": "pooling queries",
    "inducing": "inducing points",
    "element": "set elements",
}
_ROW_SUMS = {
    "one": "each row sums to 1",
    "sub": "a row sums to at most 1",
    "none": "rows have no fixed sum",
}
_CELL_INCHES = 0.2  # side of a cell: a line of its label
_MIN_CELL_INCHES = 0.08
_MAX_CELLS = 120  # rows and columns; larger maps are truncated
_MAX_LABEL_CHARS = 24  # characters of a label
_MAX_INCHES = 10.0  # side of the map; large maps get smaller cells
_MAX_PIXELS = 2400.0  # side of a PNG
_GAP_INCHES = 0.25  # between two maps


class AttentionView(NamedTuple):
    """Weights (Q, K) of one head, or their mean, with the names of its axes."""

    weights: AttentionWeights
    rows: list[str]
    columns: list[str]
    row_axis: str  # such as "target tokens"
    column_axis: str
    what: str  # such as "cross-attention, layer 3, head 2"
    row_sum: str  # such as "each row sums to 1"

    @property
    def title(self) -> str:
        """A description of the map, on one line."""
        return f"{self.what}: {self.row_axis} over {self.column_axis}"


def title_lines(explanation: Explanation) -> list[str]:
    """Return the input and the output, an arrow before the model's own output."""
    texts = [" ".join(text.split()) for text in (explanation.text, explanation.translation)]
    task = explanation.model.get("task")
    is_output = bool(texts[0]) and task != "pairs"
    lines = [texts[0]] if texts[0] else []
    if task == "translate":
        return [*lines, f"→ {texts[1] or '(no words)'}"]
    if texts[1] and texts[1] != texts[0]:
        lines.append(f"→ {texts[1]}" if is_output else texts[1])
    if task in CLASS_TASKS and explanation.steps:
        step = explanation.steps[0]
        is_chosen = not explanation.request.get("label")
        label = f"{step_text(step)}, probability {math.exp(step.logprob):.3f}"
        lines.append(f"→ {label}" if is_chosen else f"explained label: {label}")
    return lines


def step_text(step: Step) -> str:
    """Return the text of a step's token, where its runners-up have it."""
    return next((text for id_, text, _ in step.top if id_ == step.id), f"#{step.id}")


def select_views(
    explanation: Explanation,
    *,
    kind: str | None = None,
    layer: int | None = None,
    head: int | None = None,
) -> list[AttentionView]:
    """Return the maps of a kind of attention: the mean over layers and heads, or one of them.

    Sites with different axes cannot be averaged and give a view each, such as the words of each
    sentence and the sentences of a document. Without `kind`, the first of KINDS that the model
    has. Raise ConfigError for a kind, layer or head that the model does not have.
    """
    sites = [site for site in explanation.sites if site.tensor in explanation.arrays]
    if not sites:
        given = {"kind": kind, "layer": layer, "head": head}
        wrong = next((name for name, value in given.items() if value is not None), None)
        if wrong:
            raise ConfigError(
                [
                    f"--{wrong} chooses among a model's attentions; found a model without "
                    "attention; leave it out"
                ]
            )
        return []
    present = [each for each in KINDS if any(site.group == each for site in sites)]
    if kind is not None and kind not in present:
        raise ConfigError(
            [
                f"--kind must be an attention that the model has; found {kind!r}; "
                f"choose {' or '.join(present)}"
            ]
        )
    chosen = [site for site in sites if site.group == (kind or present[0])]
    what = _GROUP_NAMES[kind or present[0]]
    layers = sorted({site.layer for site in chosen})
    if layer is not None and layer not in layers:
        raise ConfigError([_range_error("--layer", layer, layers, f"in the {what}")])
    if layer is not None:
        chosen = [site for site in chosen if site.layer == layer]
    heads = min(site.heads for site in chosen)
    if head is not None and not 0 <= head < heads:
        raise ConfigError(
            [_range_error("--head", head, range(heads), f"of the {what}, counted from 0")]
        )
    groups: dict[object, list[AttentionSite]] = {}
    for site in chosen:
        shape = explanation.arrays[site.tensor].shape[1:]
        labels = [tuple(each or ()) for each in (site.query_labels, site.key_labels)]
        key = (site.query, site.key, shape, *labels, tuple(site.segments), site.kind, site.sum)
        groups.setdefault(key, []).append(site)
    return _stack_rows([_view(explanation, group, head) for group in groups.values()])


def _stack_rows(views: Sequence[AttentionView]) -> list[AttentionView]:
    """Join views of one row each over the same columns, such as the words of every sentence."""
    stacked = list[AttentionView]()
    for view in views:
        last = stacked[-1] if stacked else None
        if (
            last is not None
            and len(view.rows) == 1
            and (last.columns, last.what, last.row_axis) == (view.columns, view.what, view.row_axis)
        ):
            stacked[-1] = last._replace(
                weights=np.concatenate([last.weights, view.weights]), rows=[*last.rows, *view.rows]
            )
        else:
            stacked.append(view)
    return stacked


def _view(
    explanation: Explanation, sites: Sequence[AttentionSite], head: int | None
) -> AttentionView:
    """Return the mean of sites with the same axes, or of one head of them."""
    stacked = [explanation.arrays[site.tensor] for site in sites]
    weights = np.concatenate(
        [each if head is None else each[head : head + 1] for each in stacked]
    ).mean(axis=0, dtype=np.float32)
    first = sites[0]
    rows, columns = weights.shape
    return AttentionView(
        weights=weights.astype(np.float32),
        rows=_axis_labels(explanation, first, first.query, first.query_labels, rows),
        columns=_axis_labels(explanation, first, first.key, first.key_labels, columns),
        row_axis=axis_name(explanation, first, first.query),
        column_axis=axis_name(explanation, first, first.key),
        what=_describe(sites, head),
        row_sum=_ROW_SUMS[first.sum],
    )


def axis_name(explanation: Explanation, site: AttentionSite, axis: str) -> str:
    """Return the name of an axis; in self-attention both axes are the input of its own stack."""
    if explanation.model.get("task") == "pairs" and axis in ("source", "target"):
        return "first sentence" if axis == "source" else "second sentence"
    if site.group == "encoder" and axis == "source":
        return "encoder input" if explanation.model.get("task") == "translate" else "input tokens"
    if axis.startswith("memory") and not _memory_length(site):
        axis = "target_in"
    if axis.startswith("memory"):
        return "memory and target tokens before them"
    return _AXIS_NAMES.get(axis, axis)


def _describe(sites: Sequence[AttentionSite], head: int | None) -> str:
    """Return the kind of attention with its layers and heads."""
    first = sites[0]
    name = _KIND_NAMES.get(first.kind, _GROUP_NAMES.get(first.group, first.group))
    layers = sorted({site.layer for site in sites})
    where = f"layer {layers[0]}" if len(layers) == 1 else f"mean of {len(layers)} layers"
    if head is not None:
        return f"{name}, {where}, head {head}"
    if len(layers) == 1 and len(sites) > 1:
        where = f"mean of {len(sites)} attentions of {where}"
    most = max(site.heads for site in sites)
    if most > 1:
        where += f" and {most} heads" if where.startswith("mean") else f", mean of {most} heads"
    return f"{name}, {where}"


def _axis_labels(
    explanation: Explanation,
    site: AttentionSite,
    axis: str,
    labels: Sequence[str] | None,
    count: int,
) -> list[str]:
    """Return a label for each position of an axis; numbers where nothing better is known."""
    if labels is not None and len(labels) == count:
        return list(labels)
    source, target = (
        [token.text for token in text.tokens] for text in (explanation.source, explanation.target)
    )
    known = {
        "source": source,
        "element": source,
        "target": target,
        "class": target,
        "target_in": ["<s>", *target][:count],
    }.get(axis, [])
    if axis.startswith("memory"):
        current = ["<s>", *target][: count - _memory_length(site)]
        known = [f"-{at}" for at in range(count - len(current), 0, -1)] + current
    return known if len(known) == count else [str(number) for number in range(1, count + 1)]


def _memory_length(site: AttentionSite) -> int:
    """Return how many of the keys are memory of earlier segments."""
    return sum(end - start for name, start, end in site.segments if "memory" in name)


def _range_error(option: str, found: int, values: Sequence[int], where: str) -> str:
    """Return the message of a number outside its range."""
    listed = (
        f"from {values[0]} to {values[-1]}"
        if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1))
        else " or ".join(map(str, values))
    )
    return f"{option} must be {listed}, those {where}; found {found}; choose one of them"


# Words: subwords joined, special tokens alone.


def word_ranges(text: TokenizedText) -> list[tuple[int, int]]:
    """Return ranges of tokens that cover a text: its words, every other token alone."""
    ranges, at = list[tuple[int, int]](), 0
    for start, end in sorted(text.words):
        ranges += [(each, each + 1) for each in range(at, start)]
        ranges.append((start, end))
        at = end
    return ranges + [(each, each + 1) for each in range(at, len(text.tokens))]


def word_texts(text: TokenizedText) -> list[str]:
    """Return the text of each range of `word_ranges`, as it stands in the text."""
    texts = []
    for start, end in word_ranges(text):
        spans = [token.span for token in text.tokens[start:end] if token.span[0] < token.span[1]]
        joined = text.text[spans[0][0] : spans[-1][1]] if spans else ""
        texts.append(joined.strip() or "".join(token.text for token in text.tokens[start:end]))
    return texts


def join_words(
    values: AttentionWeights,
    rows: Sequence[tuple[int, int]],
    columns: Sequence[tuple[int, int]],
    *,
    mean_rows: bool,
) -> AttentionWeights:
    """Return values (T, S) by words: columns are summed, rows are averaged or summed.

    With `mean_rows` attention weights keep their row sums.
    """
    by_column = np.stack(
        [values[:, start:end].sum(axis=1) for start, end in columns], axis=1
    )  # (T, source words)
    reduce = np.mean if mean_rows else np.sum
    joined: AttentionWeights = np.stack(
        [reduce(by_column[start:end], axis=0) for start, end in rows]
    ).astype(np.float32)
    return joined


def save_attention_map(
    path: str | Path,
    weights: AttentionWeights | None,
    *,
    src_tokens: Sequence[str],
    tgt_tokens: Sequence[str],
    title: str = "",
) -> None:
    """Save weights (T, S) as a heat map: a row per target token, a column per source token."""
    check_labels(weights, src_tokens, tgt_tokens)
    assert weights is not None, "check_labels rejects it"
    view = AttentionView(
        weights, list(tgt_tokens), list(src_tokens), "target tokens", "source tokens", "", ""
    )
    save_attention_views(path, [view], title=[title] if title else [])


def save_attention_views(
    path: str | Path, views: Sequence[AttentionView], *, title: Sequence[str] = ()
) -> None:
    """Save maps below each other in one figure, each with its title and the names of its axes.

    The title is a line or several, such as the input and the output.
    """
    from matplotlib.figure import Figure

    views = [_cut_view(view) for view in views]
    texts = [*title, *(each for view in views for each in (*view.rows, *view.columns))]
    warn_about_glyphs(texts)
    with figure_style(texts):
        sizes = [_map_inches(view.weights.shape) for view in views]
        width = max(width for width, _ in sizes)
        longest = [_label_inches(view.columns) for view in views]
        heights = [height + extra + 0.65 for (_, height), extra in zip(sizes, longest, strict=True)]
        total = sum(heights) + _GAP_INCHES * (len(views) - 1)
        figure = Figure(figsize=(width, total), dpi=_dots_per_inch(width, total))
        top = total
        for view, (map_width, map_height), height in zip(views, sizes, heights, strict=True):
            bottom = top - height
            axes = figure.add_axes(  # labels stand outside; saving enlarges the page
                (0, bottom / total, map_width / width, map_height / total)
            )
            _draw_map(axes, view)
            _draw_scale(figure, view, map_width, map_height, bottom, width, total)
            top = bottom - _GAP_INCHES
        if title:
            lines = [line for text in title for line in _wrap(text, width)]
            figure.axes[0].set_title("\n".join(lines), loc="left", pad=8)
        save_figure(figure, path, tight=True)


def _dots_per_inch(width: float, height: float) -> float:
    """Return the resolution of a PNG, lower for large maps."""
    return min(DOTS_PER_INCH, _MAX_PIXELS / max(width, height))


def _cut_view(view: AttentionView) -> AttentionView:
    """Return the first rows and columns of a map that is too large to draw."""
    return view._replace(
        weights=view.weights[:_MAX_CELLS, :_MAX_CELLS],
        rows=view.rows[:_MAX_CELLS],
        columns=view.columns[:_MAX_CELLS],
    )


def _map_inches(shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the width and the height of a map."""
    rows, columns = (max(2, size) for size in shape)
    cell = max(_MIN_CELL_INCHES, min(_CELL_INCHES, _MAX_INCHES / max(rows, columns)))
    return cell * columns, cell * rows


def _label_inches(labels: Sequence[str]) -> float:
    """Return the height that labels need above a map, once turned."""
    longest = max((len(_label_text(label)) for label in labels), default=1)
    return 0.12 if longest <= 2 else 0.056 * longest


def _draw_map(axes: Any, view: AttentionView) -> None:
    """Draw one map with its labels."""
    axes.imshow(
        view.weights,
        cmap=HEAT_MAP,
        vmin=0.0,
        vmax=max(1e-6, _color_scale(view.weights)),
        aspect="auto",
        interpolation="nearest",
    )
    columns = [_label_text(token) for token in view.columns]
    rows = [_label_text(token) for token in view.rows]
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xticks(range(len(columns)), columns)
    is_wide = [unicodedata.east_asian_width(label[:1] or " ") in "WF" for label in columns]
    is_turned = sum(len(label) > 2 for label in columns) > len(columns) / 2
    for tick, label, wide in zip(axes.get_xticklabels(), columns, is_wide, strict=True):
        tick.set_rotation(90 if len(label) > 2 or (is_turned and not wide) else 0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(np.arange(-0.5, len(columns)), minor=True)
    axes.set_yticks(np.arange(-0.5, len(rows)), minor=True)
    axes.grid(False)
    axes.grid(which="minor", color="#E2E2E2", linewidth=0.4)
    cell = _height(axes) / max(2, len(rows))
    axes.tick_params(which="both", length=0, pad=2, labelsize=min(7.0, 72 * cell * 0.8))
    axes.spines[:].set_visible(True)
    for spine in axes.spines.values():
        spine.set_color("#BBBBBB")
    axes.set_xlabel(view.column_axis, color=FAINT)
    axes.set_ylabel(view.row_axis, color=FAINT)
    if view.what:
        inches = axes.get_position().width * axes.figure.get_figwidth()
        wrapped = textwrap.fill(f"{view.what}; {view.row_sum}", _line_chars(inches))
        axes.text(
            0,
            -0.06 / _height(axes),
            wrapped,
            transform=axes.transAxes,
            va="top",
            fontsize=7,
            color=FAINT,
        )


def _wrap(text: str, inches: float) -> list[str]:
    """Return the lines of a title."""
    return textwrap.wrap(escape_undrawable(" ".join(text.split())), _line_chars(inches))


def _line_chars(inches: float) -> int:
    """Return the characters of a line of text above or below a map."""
    return max(36, int(inches * 15))


def _color_scale(weights: AttentionWeights) -> float:
    """Return the weight of the darkest color: exceeded by the largest of one row in five at most.

    The first row of causal attention has one key and the weight 1, beside which all others pale.
    """
    largest = weights.max(axis=-1, initial=0.0)
    return float(np.quantile(largest, 0.8, method="higher")) if len(largest) else 0.0


def _height(axes: Any) -> float:
    """Return the height of axes in inches."""
    return float(axes.get_position().height * axes.figure.get_figheight())


def _draw_scale(
    figure: Any,
    view: AttentionView,
    map_width: float,
    map_height: float,
    bottom: float,
    width: float,
    total: float,
) -> None:
    """Draw the scale of the colors to the right of a map."""
    tall = min(map_height, 1.2)
    side = figure.add_axes(
        (
            (map_width + 0.08) / width,
            (bottom + map_height - tall) / total,
            0.07 / width,
            tall / total,
        )
    )
    is_cut = float(view.weights.max(initial=0.0)) > _color_scale(view.weights) + 1e-6
    image = figure.axes[-2].images[0]
    bar = figure.colorbar(image, cax=side, extend="max" if is_cut else "neither")
    bar.outline.set_visible(False)
    bar.locator = _ticks(map_height)
    side.tick_params(labelsize=6, length=1.5, pad=1.5)


def _ticks(height: float) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4 if height > 0.7 else 1)


def _label_text(token: str) -> str:
    """Return a token as a label of at most _MAX_LABEL_CHARS characters."""
    text = token.replace("\u2581", " ")
    text = text.lstrip(" ") or "\u2423" * len(text)
    return escape_undrawable(
        text if len(text) <= _MAX_LABEL_CHARS else f"{text[: _MAX_LABEL_CHARS - 1]}…"
    )
