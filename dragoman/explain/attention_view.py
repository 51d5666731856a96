"""One attention map of an explanation: chosen weights, with names of both axes and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dragoman.errors import ConfigError
from dragoman.explain.explanation import (
    AttentionSite,
    AttentionWeights,
    Explanation,
    TokenizedText,
)

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


class AttentionView(NamedTuple):
    """Weights (Q, K) of one head, or their mean, with what stands on the axes."""

    weights: AttentionWeights
    rows: list[str]
    columns: list[str]
    row_axis: str  # such as "target tokens"
    column_axis: str
    what: str  # such as "cross-attention, layer 3, head 2"
    row_sum: str  # such as "each row sums to 1"

    @property
    def title(self) -> str:
        """What is shown, on one line."""
        return f"{self.what}: {self.row_axis} over {self.column_axis}"


def title_lines(explanation: Explanation) -> list[str]:
    """Return the input and the output, an arrow before what the model wrote itself."""
    texts = [" ".join(text.split()) for text in (explanation.text, explanation.translation)]
    is_output = bool(texts[0]) and explanation.model.get("task") != "pairs"
    lines = [texts[0]] if texts[0] else []
    if texts[1] and texts[1] != texts[0]:
        lines.append(f"→ {texts[1]}" if is_output else texts[1])
    return lines


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
    """Return what stands on an axis: self-attention has the input of its own stack on both."""
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


def rank_correlation(one: AttentionWeights, other: AttentionWeights) -> float | None:
    """Return Spearman's correlation of two rows, ties at their mean rank; None if one is flat."""
    ranks = [_mean_ranks(each) - (len(each) + 1) / 2 for each in (one, other)]
    norm = float(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float((ranks[0] * ranks[1]).sum()) / norm if norm > 0 else None


def _mean_ranks(values: AttentionWeights) -> AttentionWeights:
    """Return ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: AttentionWeights = ((last - counts + 1 + last) / 2)[inverse].astype(np.float32)
    return ranks
