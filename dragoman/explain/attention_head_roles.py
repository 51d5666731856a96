"""Labels of attention heads: what each does in one example; `head_ablation.py` switches them off.

A label is computed, never guessed; its score is compared with a threshold.

| label       | a head has it if, averaged over the rows where it could be,                        |
| ----------- | ---------------------------------------------------------------------------------- |
| offset d    | the largest weight is d positions from the query in at least 60 % of the rows      |
| sink        | at least half of the weight is on special tokens or the first token                |
| end         | at least half of the weight is on the last token                                   |
| same token  | at least half is on other occurrences of the query's token                         |
| same word   | at least half is on the other subwords of the query's word                         |
| punctuation | at least half is on punctuation                                                    |
| rare        | at least half is on tokens of the rarest tenth of the vocabulary                   |
| align       | cross: the largest weight is that of the attribution in at least 60 % of the rows  |
| monotonic   | cross: the rank correlation of expected source and target position is at least 0.9 |
| broad       | the entropy is more than 0.85 log K, K being the keys that may be attended to      |
| focused     | the entropy is less than 0.25 log K                                                |
| dead        | its contributions are less than 1 % of its site's                                  |

A row could not have a label if no key, or every key it may attend to, has the property. "At least
half" is also at least 1.5 times what uniform weights would put there: where most tokens are rare,
reading rare tokens is no property of a head. The thresholds are starting values; nothing was tuned
on them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.explain.explanation import (
    Array,
    AttentionSite,
    HeadSummary,
    Token,
    TokenizedText,
)

MIN_ARGMAX_ROWS = 0.6  # of the rows: offset and align
MIN_MASS = 0.5  # of the weight: sink, end, same token, same word, punctuation, rare
MIN_RANK_CORRELATION = 0.9
MIN_BROAD, MAX_FOCUSED = 0.85, 0.25  # of log K
MAX_DEAD = 0.01  # of the site's contributions
MIN_LIFT = 1.5  # times the mass of uniform weights
RARE_RANK = 0.9  # of the ranks
MIN_ROWS = 3  # rows that offset and monotonic need
_TINY = 1e-9

Mask = NDArray[np.bool_]
Float64 = NDArray[np.float64]


class Axis(NamedTuple):
    """The tokens of one axis of a matrix."""

    tokens: Sequence[Token]
    words: NDArray[np.int64]  # of each token the number of its word; -1 for none

    def mask(self, chosen: Sequence[bool]) -> Mask:
        """Return booleans of the tokens as an array."""
        return np.asarray(chosen, dtype=bool)


def summarize_heads(
    sites: Sequence[AttentionSite],
    arrays: Mapping[str, Array],
    source: TokenizedText,
    target: TokenizedText,
    *,
    attribution: Array | None = None,
    ranks: Mapping[str, int] | None = None,
) -> list[HeadSummary]:
    """Return the labels, entropy and distance of every head of every site with weights.

    `attribution` is (T, S), of any method; without it no head is labelled align. `ranks` has the
    number of frequency ranks of "source" and "target"; without it no head is labelled rare.
    """
    axes = _token_axes(source, target)
    summaries = list[HeadSummary]()
    for site in sites:
        weights = arrays.get(site.tensor)
        if weights is None:
            continue
        contributions = arrays.get(site.contribution)
        totals = None if contributions is None else np.asarray(contributions).sum(axis=(1, 2))
        for head in range(weights.shape[0]):
            matrix = np.maximum(np.asarray(weights[head], dtype=np.float64), 0.0)
            labels = _label_head(site, matrix, axes, attribution, ranks or {})
            if totals is not None and len(totals) > 1 and totals.sum() > 0:
                fraction = float(totals[head] / totals.sum())
                labels += [("dead", fraction)] if fraction < MAX_DEAD else []
            summaries.append(
                HeadSummary(
                    site=site.id,
                    head=head,
                    labels=labels,
                    entropy=mean_entropy(matrix),
                    distance=mean_distance(matrix) if site.ordered else None,
                )
            )
    return summaries


def mean_entropy(weights: Float64) -> float:
    """Return the mean entropy of the rows in nats, each as a distribution; empty rows are none."""
    rows = _distributions(weights)
    if not len(rows):
        return 0.0
    return float(_row_entropies(rows).mean())


def mean_distance(weights: Float64) -> float:
    """Return the mean |i - j| of queries i and keys j, by weight."""
    queries, keys = np.indices(weights.shape)
    total = weights.sum()
    return float((weights * np.abs(queries - keys)).sum() / total) if total > _TINY else 0.0


def _label_head(
    site: AttentionSite,
    weights: Float64,
    axes: Mapping[str, Axis],
    attribution: Array | None,
    ranks: Mapping[str, int],
) -> list[tuple[str, float]]:
    """Return the labels of one head, with their scores."""
    visible = _visible_keys(site, weights.shape)
    labels = list[tuple[str, float]]()
    is_self = site.kind in ("self", "memory") and weights.shape[0] == weights.shape[1]
    labels += _offset_label(weights) if is_self and site.ordered else []
    # The tokens of a memory are earlier ones of the same text.
    keys, queries = axes.get(site.key.removeprefix("memory+")), axes.get(site.query)
    if keys is axes["target_in"] or site.query == "target":
        # A query of the decoder's self-attention is the input token at its position.
        queries = axes["target_in"] if site.kind in ("self", "memory") else axes["target"]
    if keys is not None and len(keys.tokens) == weights.shape[1]:
        labels += _key_labels(site, weights, visible, keys, ranks)
        if queries is not None and len(queries.tokens) == weights.shape[0]:
            labels += _pair_labels(site, weights, visible, queries, keys)
    if site.group == "cross":
        labels += _cross_labels(weights, attribution)
    return [*labels, *_entropy_labels(weights, visible)]


def _key_labels(
    site: AttentionSite,
    weights: Float64,
    visible: Mask,
    keys: Axis,
    ranks: Mapping[str, int],
) -> list[tuple[str, float]]:
    """Return labels of heads that read certain keys for every query."""
    count = len(keys.tokens)
    sinks = keys.mask([token.special or at == 0 for at, token in enumerate(keys.tokens)])
    kinds = {"sink": sinks}
    if not site.causal:
        kinds["end"] = np.arange(count) == count - 1
    kinds["punctuation"] = keys.mask(
        [not token.special and is_punctuation(token.text) for token in keys.tokens]
    )
    most = ranks.get("source" if site.key == "source" else "target")
    if most:
        kinds["rare"] = keys.mask(
            [token.rank is not None and token.rank > RARE_RANK * most for token in keys.tokens]
        )
    return _mass_labels(kinds, weights, visible)


def _pair_labels(
    site: AttentionSite, weights: Float64, visible: Mask, queries: Axis, keys: Axis
) -> list[tuple[str, float]]:
    """Return labels of heads that read keys related to the query."""
    is_self = site.kind == "self"
    query_texts = np.asarray([token.text.strip() for token in queries.tokens], dtype=object)
    key_texts = np.asarray([token.text.strip() for token in keys.tokens], dtype=object)
    plain = keys.mask([not token.special for token in keys.tokens])
    same = (query_texts[:, None] == key_texts[None, :]) & plain[None, :]
    elsewhere = np.not_equal(*np.indices(weights.shape))
    kinds = {"same token": (same & elsewhere if is_self else same).astype(bool)}
    if is_self:
        joined = (queries.words[:, None] == keys.words[None, :]) & (keys.words >= 0)[None, :]
        kinds["same word"] = joined & elsewhere
    return _mass_labels(kinds, weights, visible)


def _offset_label(weights: Float64) -> list[tuple[str, float]]:
    """Return "offset d" for the most common distance of the largest weight from the query."""
    queries, keys = weights.shape
    has_weight = weights.sum(axis=1) > _TINY
    distances = (weights.argmax(axis=1) - np.arange(queries))[has_weight]
    if not distances.size:
        return []
    values, counts = np.unique(distances, return_counts=True)
    found = list[tuple[float, int]]()
    for distance, count in zip(values.tolist(), counts.tolist(), strict=True):
        positions = np.arange(queries)[has_weight] + distance
        possible = int(((positions >= 0) & (positions < keys)).sum())
        if possible >= MIN_ROWS:
            found.append((count / possible, distance))
    if not found:
        return []
    score, distance = max(found, key=lambda each: (each[0], -abs(each[1])))
    return [(f"offset {distance:+d}" if distance else "offset 0", score)] * (
        score >= MIN_ARGMAX_ROWS
    )


def _cross_labels(weights: Float64, attribution: Array | None) -> list[tuple[str, float]]:
    """Return align and monotonic."""
    labels = list[tuple[str, float]]()
    rows = weights.sum(axis=1) > _TINY
    if attribution is not None and attribution.shape == weights.shape and rows.any():
        agrees = weights.argmax(axis=1)[rows] == np.asarray(attribution).argmax(axis=1)[rows]
        score = float(agrees.mean())
        labels += [("align", score)] * (score >= MIN_ARGMAX_ROWS)
    if rows.sum() >= MIN_ROWS:
        expected = _distributions(weights) @ np.arange(weights.shape[1])
        score = rank_correlation(expected, np.flatnonzero(rows).astype(np.float64)) or 0.0
        labels += [("monotonic", score)] * (score >= MIN_RANK_CORRELATION)
    return labels


def _entropy_labels(weights: Float64, visible: Mask) -> list[tuple[str, float]]:
    """Return broad or focused."""
    counts = visible.sum(axis=1)
    chosen = (counts > 1) & (weights.sum(axis=1) > _TINY)
    if not chosen.any():
        return []
    relative = _row_entropies(_distributions(weights[chosen])) / np.log(counts[chosen])
    score = float(relative.mean())
    return [("broad", score)] * (score > MIN_BROAD) + [("focused", score)] * (score < MAX_FOCUSED)


def _mass_labels(
    kinds: Mapping[str, Mask], weights: Float64, visible: Mask
) -> list[tuple[str, float]]:
    """Return the kinds of keys that a head gives much of its weight, with the mean fraction."""
    labels = list[tuple[str, float]]()
    for name, chosen in kinds.items():
        chosen = chosen & visible
        # Rows that have a choice.
        rows = chosen.any(axis=1) & (~chosen & visible).any(axis=1)
        rows &= weights.sum(axis=1) > _TINY
        if not rows.any():
            continue
        mass = float((_distributions(weights[rows]) * chosen[rows]).sum(axis=1).mean())
        uniform = float((chosen[rows].sum(axis=1) / visible[rows].sum(axis=1)).mean())
        if mass >= max(MIN_MASS, MIN_LIFT * uniform):
            labels.append((name, mass))
    return labels


def _visible_keys(site: AttentionSite, shape: tuple[int, ...]) -> Mask:
    """Return which keys each query may attend to: (Q, K)."""
    if site.causal and shape[0] == shape[1]:
        return np.tril(np.ones(shape, dtype=bool))
    return np.ones(shape, dtype=bool)


def _distributions(weights: Float64) -> Float64:
    """Return the rows that have weight, each divided by its sum."""
    totals = weights.sum(axis=1, keepdims=True)
    kept = totals[:, 0] > _TINY
    return weights[kept] / totals[kept]


def _row_entropies(rows: Float64) -> Float64:
    entropies: Float64 = -(rows * np.log(np.where(rows > 0, rows, 1.0))).sum(axis=1)
    return entropies


def rank_correlation(left: Array, right: Array) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None if a side is constant."""
    ranks = [_mean_ranks(np.asarray(each, dtype=np.float64)) for each in (left, right)]
    centered = [each - each.mean() for each in ranks]
    scale = float(np.sqrt((centered[0] ** 2).sum() * (centered[1] ** 2).sum()))
    return float((centered[0] * centered[1]).sum() / scale) if scale > 0 else None


def _mean_ranks(values: Float64) -> Float64:
    """Return the rank of each value; equal ones share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Float64 = (ends - (counts - 1) / 2.0)[inverse]
    return ranks


def _token_axes(source: TokenizedText, target: TokenizedText) -> dict[str, Axis]:
    """Return the tokens of the axes that are strips of tokens."""
    begin = Token(1, "<s>", (0, 0), special=True)
    words = _word_numbers(target)
    return {
        "source": Axis(source.tokens, _word_numbers(source)),
        "target": Axis(target.tokens, words),
        "target_in": Axis(
            [begin, *target.tokens[:-1]], np.concatenate([[-1], words[:-1]]).astype(np.int64)
        ),
    }


def _word_numbers(text: TokenizedText) -> NDArray[np.int64]:
    numbers = np.full(len(text.tokens), -1, dtype=np.int64)
    for number, (start, end) in enumerate(text.words):
        numbers[start:end] = number
    return numbers


def is_punctuation(text: str) -> bool:
    """Whether a token is punctuation or symbols alone."""
    bare = text.strip()
    return bool(bare) and all(unicodedata.category(char)[0] in "PS" for char in bare)
