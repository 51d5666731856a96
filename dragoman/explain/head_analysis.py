"""What attention heads do in one example, and what changes when they are switched off.

A label is computed, never guessed; its score is what the threshold is compared with.

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
reading rare tokens says nothing about a head. The thresholds are starting values; nothing was tuned
on them.

Head ablation: a head that is off contributes nothing; its slice is zero before the output
projection, the bias of its values included. An attention with all heads off writes the bias of its
output projection alone; an RNN's context vector is zero. Michel, Levy and Neubig (2019), "Are
Sixteen Heads Really Better than One?", whose head masks also give estimates of all effects at once.
Effects are changes of log-probability under teacher forcing: negative where the head helps the
target token.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.errors import DataError
from dragoman.explain.explanation import (
    Array,
    AttentionSite,
    HeadSummary,
    Token,
    TokenizedText,
)
from dragoman.explain.teacher_forcing import (
    TargetGradients,
    TeacherForcedPair,
    attention_parts,
    scaled_heads,
    target_gradients,
)
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.prefix_language_model import PrefixLM

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
HeadSelection = Mapping[str, Sequence[int]]  # path of an attention -> heads


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
    """Return labels of heads that read certain keys, whatever the query."""
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
        places = np.arange(queries)[has_weight] + distance
        possible = int(((places >= 0) & (places < keys)).sum())
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


class HeadEffect(NamedTuple):
    """The effect of one head that is off."""

    path: str  # of the attention: "decoder.3.cross"
    head: int
    changes: NDArray[np.float32]  # (T,) of each target token's log-probability

    @property
    def total(self) -> float:
        """The change of the target's log-probability."""
        return float(self.changes.sum())


def select_heads(sites: Sequence[AttentionSite], names: Sequence[str]) -> dict[str, list[int]]:
    """Return the heads of names such as "x3.2", by the path of their site.

    Raise DataError for a name that is no head of the sites.
    """
    by_id = {site.id: site for site in sites}
    chosen: dict[str, list[int]] = {}
    for name in names:
        site_id, _, number = str(name).rpartition(".")
        site = by_id.get(site_id)
        if site is None or not number.isascii() or not number.isdigit():
            raise DataError(
                "a head must be written as a site and a number, such as "
                f"{sites[0].id + '.0' if sites else 'x0.0'}",
                found=repr(name),
                fix=f"the sites are {', '.join(by_id)}" if by_id else "this model has no attention",
            )
        if int(number) >= site.heads:
            raise DataError(
                f"{site_id} has {site.heads} head{'' if site.heads == 1 else 's'}, "
                f"{site_id}.0 to {site_id}.{site.heads - 1}",
                found=repr(name),
                fix="heads are counted from 0",
            )
        heads = chosen.setdefault(site.path, [])
        if int(number) not in heads:
            heads.append(int(number))
    return chosen


@contextmanager
def heads_switched_off(model: nn.Module, off: HeadSelection, *, sources: int = 0) -> Iterator[None]:
    """Switch heads off within the block, for this thread; attentions compute explicit weights.

    `sources` is the number of source tokens, which a prefix LM needs. With nothing off, all is as
    in the unchanged model with explicit weights, bit for bit.
    """
    parts = attention_parts(model)
    device = next(model.parameters()).device
    scales = {}
    for path, heads in off.items():
        if path not in parts:
            raise DataError(
                "a head to switch off must be in an attention of the model",
                found=repr(path),
                fix=f"its attentions are {', '.join(parts) or 'none'}",
            )
        count = parts[path].heads
        wrong = [head for head in heads if not 0 <= head < count]
        if wrong:
            raise DataError(
                f"a head of {path} must be from 0 to {count - 1}",
                found=str(wrong[0]),
                fix="heads are counted from 0",
            )
        scale = torch.ones(1, count, device=device)
        scale[0, list(heads)] = 0.0
        scales[path] = scale
    with scaled_heads(model, scales, sources=sources):
        yield


@torch.no_grad()
def ablate_heads(forced: TeacherForcedPair, off: HeadSelection) -> NDArray[np.float32]:
    """Return the change (T,) of each target token's log-probability with some heads off."""
    with heads_switched_off(forced.model, {}):
        before = forced.baseline()
    with heads_switched_off(forced.model, off, sources=forced.src_length):
        after = forced.baseline()
    return _to_numpy(after - before)


def estimate_head_effects(forced: TeacherForcedPair) -> dict[str, NDArray[np.float32]]:
    """Return estimates of the effect of every head: (H,) for each attention; see `head_estimates`.

    It takes as many backward passes as the target has tokens, batched.
    """
    parts = attention_parts(forced.model)
    if not parts:
        return {}
    with torch.inference_mode(False), torch.no_grad():
        embedded = forced.embed_source(), forced.embed_target()
    heads = {path: part.heads for path, part in parts.items()}
    return head_estimates(target_gradients(forced, *embedded, heads))


def head_estimates(gradients: TargetGradients) -> dict[str, NDArray[np.float32]]:
    r"""Return estimates of the effect of every head from its slopes: (H,) for each attention.

    .. math:: \sum_t \log \sigma(z_t - \partial z_t / \partial m_h) - \log \sigma(z_t)

    z_t are the log-odds of target token t and m_h the scale of head h, which is 1: the log-odds are
    taken to change linearly as the head fades out. Far from the truth where a head saturates or
    others take over; the order of heads is more reliable than the size.
    """
    log_odds = gradients.log_odds.double().unsqueeze(1)
    before = nn.functional.logsigmoid(log_odds)
    return {
        path: _to_numpy((nn.functional.logsigmoid(log_odds - slopes.sum(-1)) - before).sum(0))
        for path, slopes in gradients.keys.items()
    }


def measure_head_effects(forced: TeacherForcedPair) -> Iterator[HeadEffect]:
    """Yield the effect of each head that is off alone, decoder's heads first."""
    for batch in head_batches(forced):
        yield from measure_head_batch(forced, batch)


def head_batches(forced: TeacherForcedPair) -> list[list[tuple[str, int]]]:
    """Return all heads in batches of bounded memory, the decoder's before the encoder's."""
    parts = attention_parts(forced.model)
    heads = [(path, head) for path, part in parts.items() for head in range(part.heads)]
    groups = [
        [each for each in heads if each[0].startswith("encoder.") == in_encoder]
        for in_encoder in (False, True)
    ]
    rows = forced.max_rows()
    return [group[first : first + rows] for group in groups for first in range(0, len(group), rows)]


def measure_head_batch(
    forced: TeacherForcedPair, heads: Sequence[tuple[str, int]]
) -> list[HeadEffect]:
    """Return the effect of each of some heads that is off alone, in one batch with a row for each.

    If all are the decoder's, they share one encoder pass.
    """
    with heads_switched_off(forced.model, {}):
        before = forced.baseline()
    changes = _to_numpy(_run_without(forced, heads) - before)
    return [HeadEffect(*each, row) for each, row in zip(heads, changes, strict=True)]


@torch.no_grad()
def _run_without(forced: TeacherForcedPair, heads: Sequence[tuple[str, int]]) -> Tensor:
    """Return the log-probability (n, T) of each target token without each of n heads."""
    model, parts, rows = forced.model, attention_parts(forced.model), len(heads)
    shares_encoder = not isinstance(model, PrefixLM) and not any(
        path.startswith("encoder.") for path, _ in heads
    )
    scales: dict[str, Tensor] = {}
    for row, (path, head) in enumerate(heads):
        if path not in scales:
            scales[path] = torch.ones(rows, parts[path].heads, device=forced.tgt_in.device)
        scales[path][row, head] = 0.0
    src, tgt = forced.embed_source(), forced.embed_target().expand(rows, -1, -1)
    if shares_encoder and src is not None and isinstance(model, EncoderDecoder):
        with heads_switched_off(model, {}):
            memory = model.encode_embedded(src)
        copies = memory.select(torch.zeros(rows, dtype=torch.long, device=src.device))
        with scaled_heads(model, scales):
            return forced.log_probs(model.decode_embedded(tgt, copies))
    src = None if src is None else src.expand(rows, -1, -1)
    with scaled_heads(model, scales, sources=forced.src_length):
        return forced.log_probs(forced.hidden(src, tgt))


def _to_numpy(values: Tensor) -> NDArray[np.float32]:
    """Return float32 values on the host."""
    array: NDArray[np.float32] = values.detach().float().cpu().numpy()
    return array
