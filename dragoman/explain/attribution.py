"""Attribution: how much each source token and each earlier target token changed each target token.

Every method returns one number per pair of tokens, (T, S) for the source and (T, T) for the
decoder's input, whose column 0 is `<s>`. Below, f_t is the log-probability of target token t under
teacher forcing and z_t its log-odds, w_s an attention weight of s, x_s the embedding of token s
without its position, and b the mean of all embeddings of its vocabulary: an average word.

| method               | number for (t, s)                                                | cost  |
| -------------------- | ---------------------------------------------------------------- | ----- |
| attention_x_gradient | sum of (w_s dz_t/dw_s)+ of cross-attention: what reading s adds   | T     |
| input_x_gradient     | x_s . df_t/dx_s: the change, to first order, if it fades out     | T     |
| integrated_gradients | (x_s - b) . df_t/dx_s, averaged on the straight path from b to x | T n   |
| value_zeroing        | cosine distance of the last hidden state with s's values zeroed  | S + T |
| occlusion            | f_t - f_t with x_s = b: what is lost without the token           | S + T |

The cost is in backward passes, or forward passes for the last two. `attention_x_gradient` and
`value_zeroing` have no sign; of the others, a positive number favors the target token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import WeightsEdit, edit, find_attentions
from dragoman.attention.softmax_and_gumbel_alignment import Alignment
from dragoman.errors import DataError, suggest_name
from dragoman.explain.explanation import Array, Attribution, is_cross_attention
from dragoman.explain.head_ablation import head_estimates
from dragoman.explain.teacher_forced_pass import (
    TargetGradients,
    TeacherForcedPair,
    attention_parts,
    target_gradients,
)
from dragoman.layers.embedding_and_output_projection import Embedding
from dragoman.models.prefix_language_model import PrefixLM

GRADIENT_METHODS = ("attention_x_gradient", "input_x_gradient")  # from one backward pass per token
METHODS = (*GRADIENT_METHODS, "integrated_gradients", "value_zeroing", "occlusion")
ARRAY_PREFIXES = {
    "attention_x_gradient": "axg",
    "input_x_gradient": "ixg",
    "integrated_gradients": "ig",
    "value_zeroing": "vz",
    "occlusion": "occ",
}
MAX_GAP = 0.05  # of integrated gradients' completeness; more points are taken until it holds
PATH_POINTS = (9, 17, 33, 65, 129)  # each set contains the one before it
EMBEDDINGS_PER_SUM = 8192


class TokenAttribution(NamedTuple):
    """The attribution of T target tokens to S source tokens and to the decoder's T input tokens."""

    method: str
    source: NDArray[np.float32] | None  # (T, S); None for a language model
    target: NDArray[np.float32]  # (T, T): column 0 is <s>; zero above the diagonal
    signed: bool
    # Of integrated gradients: |sum of the attributions - (f(x) - f(b))|, summed over the target
    # tokens and divided by the sum of |f(x) - f(b)|.
    gap: float | None = None


class _Embeddings(NamedTuple):
    """Embeddings of both sides, or something of their shapes."""

    src: Tensor | None  # (B, S, D)
    tgt: Tensor  # (B, T, D)


def attribute_tokens(pair: TeacherForcedPair, method: str) -> TokenAttribution:
    """Return the attribution of each target token by a method of `METHODS`."""
    if method not in METHODS:
        raise DataError(
            f"an attribution method must be one of {', '.join(METHODS)}",
            found=repr(method),
            fix=suggest_name(method, METHODS, listed=True),
        )
    functions: dict[str, Callable[[TeacherForcedPair], TokenAttribution]] = {
        "attention_x_gradient": attention_x_gradient,
        "input_x_gradient": input_x_gradient,
        "integrated_gradients": integrated_gradients,
        "value_zeroing": value_zeroing,
        "occlusion": occlusion,
    }
    return functions[method](pair)


def attribution_fields(found: TokenAttribution) -> tuple[Attribution, dict[str, Array]]:
    """Return an attribution as an explanation has it, and the arrays that it names."""
    prefix = ARRAY_PREFIXES[found.method]
    arrays: dict[str, Array] = {f"{prefix}.t": found.target}
    if found.source is not None:
        arrays[f"{prefix}.s"] = found.source
    fields = Attribution(
        method=found.method,
        source=f"{prefix}.s",
        target=f"{prefix}.t",
        signed=found.signed,
        gap=found.gap,
    )
    return fields, arrays


def attribution_note(pair: TeacherForcedPair) -> str:
    """Return a sentence about what the gradient methods leave out in this model, or "".

    A hard choice of source positions has no gradient: the numbers are then those of the choice that
    was made.
    """
    kinds = sorted(
        {
            type(module).__name__
            for module in pair.model.modules()
            if isinstance(module, Alignment) and module.is_discrete
        }
        | {
            type(module).__name__
            for module in find_attentions(pair.model).values()
            if getattr(module, "is_discrete", False)
        }
    )
    if not kinds:
        return ""
    return (
        f"{' and '.join(kinds)} chooses positions by comparison, which has no gradient: input x "
        "gradient and integrated gradients show the positions that were chosen, not why; "
        "occlusion and value zeroing compare whole runs."
    )


def input_x_gradient(pair: TeacherForcedPair) -> TokenAttribution:
    r"""Return the dot product of each token's embedding and the gradient there.

    .. math:: a_{ts} = x_s^\top\, \partial f_t / \partial x_s

    Shrikumar et al. (2016), Denil et al. (2014). It is exact for a function that is linear in the
    embeddings; elsewhere it is the first-order change from fading the token out.
    """
    inputs = _embed(pair)
    found = _log_prob_products(pair, inputs, inputs)
    return _attribution("input_x_gradient", pair, found, signed=True)


def attention_x_gradient(pair: TeacherForcedPair) -> TokenAttribution:
    r"""Return what reading each token adds to the log-odds of each target token, to first order.

    .. math:: a_{ts} = \sum_{l, h} \max\Bigl(0,\;
        \sum_q w^{lh}_{qs}\, \frac{\partial z_t}{\partial w^{lh}_{qs}}\Bigr)

    The sum is over the layers and heads of cross-attention for the source, of the decoder's
    self-attention for its input; q are the decoder's positions. A head that reads s against the
    target token counts zero, as in Chefer, Gur and Wolf (2021), "Generic Attention-model
    Explainability", where such maps are also multiplied through the layers.
    """
    if not has_cross_attention(pair.model):
        raise DataError(
            "attention_x_gradient needs a decoder with cross-attention",
            found="a model without any",
            fix="use occlusion or input_x_gradient",
        )
    return _attention_products(pair, _all_gradients(pair, _embed(pair)))


def has_cross_attention(model: nn.Module) -> bool:
    """Whether a decoder reads a source by attention."""
    return any(is_cross_attention(path) for path in attention_parts(model))


def known_methods(model: nn.Module) -> list[str]:
    """Return the methods that a model allows."""
    needs = {"value_zeroing": bool(find_attentions(model))}
    needs["attention_x_gradient"] = has_cross_attention(model)
    return [each for each in METHODS if needs.get(each, True)]


def attribute_one(pair: TeacherForcedPair, method: str, at: int) -> TokenAttribution:
    """Return an attribution by a gradient method of target token `at`; other rows are zero."""
    if method not in GRADIENT_METHODS:
        raise DataError(
            "the attribution of one token needs a gradient method",
            found=repr(method),
            fix=f"use {' or '.join(GRADIENT_METHODS)}",
        )
    rows = range(at, at + 1)
    inputs, by_attention = _embed(pair), method == "attention_x_gradient"
    heads = {path: part.heads for path, part in attention_parts(pair.model).items()}
    gradients = target_gradients(pair, *inputs, heads if by_attention else {}, targets=rows)
    found = (
        _attention_products(pair, gradients)
        if by_attention
        else _attribution(method, pair, _products(gradients, inputs), signed=True)
    )
    around = ((at, pair.tgt_length - at - 1), (0, 0))
    return found._replace(
        source=None if found.source is None else np.pad(found.source, around),
        target=np.pad(found.target, around),
    )


def attribute_with_heads(
    pair: TeacherForcedPair,
) -> tuple[list[TokenAttribution], dict[str, NDArray[np.float32]]]:
    """Return two attributions and `head_estimates` from the same backward passes.

    `attention_x_gradient` comes first if the model has cross-attention, then `input_x_gradient`.
    """
    inputs = _embed(pair)
    gradients = _all_gradients(pair, inputs)
    attributions = [
        _attribution("input_x_gradient", pair, _products(gradients, inputs), signed=True)
    ]
    if has_cross_attention(pair.model):
        attributions.insert(0, _attention_products(pair, gradients))
    return attributions, head_estimates(gradients)


def _all_gradients(pair: TeacherForcedPair, inputs: _Embeddings) -> TargetGradients:
    """Return the gradients with respect to embeddings and to the weights of every attention."""
    heads = {path: part.heads for path, part in attention_parts(pair.model).items()}
    return target_gradients(pair, *inputs, heads)


def _attention_products(pair: TeacherForcedPair, gradients: TargetGradients) -> TokenAttribution:
    """Return `attention_x_gradient` from the gradients of scales of keys."""
    sources, targets, rows = pair.src_length, pair.tgt_length, len(gradients.tgt)
    first = sources if isinstance(pair.model, PrefixLM) else 0  # key of the decoder's input
    found = gradients.tgt.new_zeros(rows, sources), gradients.tgt.new_zeros(rows, targets)
    for path, slopes in gradients.keys.items():
        added = slopes.clamp_min(0.0).sum(1)  # (T, S + T)
        if is_cross_attention(path):
            found[0].add_(added[:, :sources])
        elif path.startswith("decoder."):
            found[1].add_(added[:, first : first + targets])
    return _attribution("attention_x_gradient", pair, _Embeddings(*found), signed=False)


def integrated_gradients(pair: TeacherForcedPair, *, max_gap: float = MAX_GAP) -> TokenAttribution:
    r"""Return the gradients averaged on the path from the mean embedding to the real ones.

    .. math:: a_{ts} = (x_s - b)^\top \int_0^1
        \frac{\partial f_t(b + \alpha (x - b))}{\partial x_s}\, d\alpha

    Sundararajan, Taly and Yan (2017). All tokens, of both sides, fade in together, so a row sums
    to f_t(x) - f_t(b) over source and target (completeness). The baseline b is the mean embedding
    and not zero, where normalization layers have no useful gradient. The integral is a
    Clenshaw-Curtis sum; its points are doubled until `gap` is at most `max_gap`, or 129 are used.
    """
    inputs = _embed(pair)
    with torch.no_grad():
        means = _mean_embeddings(pair)
        change = (_run(pair, inputs) - _run(pair, _mix(means, inputs, 0.0)))[0]  # (T,)
        difference = _mix(means, inputs, 1.0, origin=0.0)
    known: dict[float, _Embeddings] = {}
    total, gap = _Embeddings(None, torch.empty(0)), float("inf")
    for points in PATH_POINTS:
        positions, weights = clenshaw_curtis(points)
        for position in positions:
            if position not in known:
                at = _mix(means, inputs, position)
                known[position] = _log_prob_products(pair, at, difference)
        total = _weighted_sum([known[position] for position in positions], weights)
        sums = total.tgt.sum(1) + (0.0 if total.src is None else total.src.sum(1))
        gap = float((sums - change).abs().sum() / change.abs().sum().clamp_min(1e-12))
        if gap <= max_gap:
            break
    return _attribution("integrated_gradients", pair, total, signed=True, gap=gap)


@torch.no_grad()
def occlusion(pair: TeacherForcedPair) -> TokenAttribution:
    r"""Return the log-probability that is lost when a token becomes an average word.

    .. math:: a_{ts} = f_t(x) - f_t(x \mid x_s = b)

    One forward pass for each token, whose embedding is replaced by the mean embedding b of its
    vocabulary. Its position stays, and so do all other tokens: the sentence keeps its length.
    Zeiler and Fergus (2014); Li, Monroe and Jurafsky (2016).
    """
    inputs, means = _embed(pair), _mean_embeddings(pair)
    before = _run(pair, inputs)[0]  # (T,)

    def occlude(positions: Tensor) -> Tensor:
        rows = len(positions)
        src = None if inputs.src is None else inputs.src.repeat(rows, 1, 1)
        tgt = inputs.tgt.repeat(rows, 1, 1)
        for row, position in enumerate(positions.tolist()):
            if src is not None and means.src is not None and position < pair.src_length:
                src[row, position] = means.src[0, 0]
            else:
                tgt[row, position - pair.src_length] = means.tgt[0, 0]
        return before - _run(pair, _Embeddings(src, tgt))

    return _attribution("occlusion", pair, _by_token(pair, occlude), signed=True)


@torch.no_grad()
def value_zeroing(pair: TeacherForcedPair) -> TokenAttribution:
    r"""Return the cosine distance of each last hidden state with a token's values zeroed.

    .. math:: a_{ts} = 1 - \cos(h_t,\, h_t^{\neg s})

    h_t is the decoder's last hidden state, which the output matrix reads. In the other pass the
    value vectors of token s are zero in every self-attention of its side and in every
    cross-attention, with attention weights as they come. Mohebbi et al. (2023), "Quantifying
    Context Mixing in Transformers", where single layers are compared and then combined; here the
    whole model runs, so that nothing is assumed about how layers combine. Models of which a side
    has no attention have zeros there.
    """
    if not find_attentions(pair.model):
        raise DataError(
            "value zeroing needs a model with attention",
            found="a model without any",
            fix="use occlusion or input_x_gradient",
        )
    inputs = _embed(pair)
    is_prefix_lm = isinstance(pair.model, PrefixLM)

    def last_hidden(rows: int) -> Tensor:
        src = None if inputs.src is None else inputs.src.expand(rows, -1, -1)
        return pair.hidden(src, inputs.tgt.expand(rows, -1, -1)).float()

    with _explicit_attention(pair):
        before = last_hidden(1)

    def zero_values(positions: Tensor) -> Tensor:
        tokens = pair.src_length + pair.tgt_length
        kept = (torch.arange(tokens, device=positions.device) != positions.unsqueeze(1)).to(
            before.dtype
        )
        src_kept, tgt_kept = kept[:, : pair.src_length], kept[:, pair.src_length :]

        def scale_columns(path: str) -> WeightsEdit:
            reads_source = path.startswith("encoder.") or not path.endswith(".self")
            columns = kept if is_prefix_lm else src_kept if reads_source else tgt_kept
            return lambda weights: weights * columns[:, None, None, : weights.size(-1)]

        with edit(pair.model, {path: scale_columns(path) for path in paths}):
            after = last_hidden(len(positions))
        return 1.0 - torch.cosine_similarity(before, after, dim=-1)

    paths = list(find_attentions(pair.model))
    found = _by_token(pair, zero_values)
    # Rounding leaves a few 1e-7 of either sign where nothing changed.
    clamped = _Embeddings(
        None if found.src is None else found.src.clamp_min(0.0), found.tgt.clamp_min(0.0)
    )
    return _attribution("value_zeroing", pair, clamped, signed=False)


def clenshaw_curtis(points: int) -> tuple[list[float], list[float]]:
    """Return the positions on [0, 1] and weights of the Clenshaw-Curtis rule of n + 1 points."""
    intervals = points - 1
    angles = np.pi * np.arange(points) / intervals
    weights = np.ones(points)
    for k in range(1, intervals // 2 + 1):
        factor = 1.0 if 2 * k == intervals else 2.0
        weights -= factor * np.cos(2 * k * angles) / (4 * k**2 - 1)
    weights /= intervals
    weights[0] /= 2
    weights[-1] /= 2
    # Rounded, so that a point has the same key in every set that contains it.
    return [round(float(each), 12) for each in (1 - np.cos(angles)) / 2], weights.tolist()


def _embed(pair: TeacherForcedPair) -> _Embeddings:
    """Return the embeddings of both sides."""
    with torch.inference_mode(False), torch.no_grad():
        return _Embeddings(pair.embed_source(), pair.embed_target())


def _mean_embeddings(pair: TeacherForcedPair) -> _Embeddings:
    """Return the mean embedding of each side's vocabulary, (1, 1, D)."""
    src, tgt = (None if table is None else _mean_embedding(table) for table in pair.tables())
    assert tgt is not None, "a target has an embedding"
    return _Embeddings(src, tgt)


@torch.no_grad()
def _mean_embedding(table: Embedding) -> Tensor:
    """Return the mean (1, 1, D) of all embeddings of a table."""
    ids = torch.arange(table.weight.size(0), device=table.weight.device)
    total = sum(table(part).double().sum(0) for part in torch.split(ids, EMBEDDINGS_PER_SUM))
    assert isinstance(total, Tensor), "a vocabulary has tokens"
    return (total / len(ids)).to(table.weight.dtype).view(1, 1, -1)


def _mix(
    means: _Embeddings, inputs: _Embeddings, fraction: float, *, origin: float = 1.0
) -> _Embeddings:
    """Return origin b + fraction (x - b) for the embeddings x and the means b."""
    src, tgt = (
        None if side is None or mean is None else origin * mean + fraction * (side - mean)
        for side, mean in zip(inputs, means, strict=True)
    )
    assert tgt is not None, "a target has tokens"
    return _Embeddings(src, tgt)


def _run(pair: TeacherForcedPair, inputs: _Embeddings) -> Tensor:
    """Return the log-probability (B, T) of each target token."""
    return pair.log_probs(pair.hidden(inputs.src, inputs.tgt))


def _log_prob_products(
    pair: TeacherForcedPair, at: _Embeddings, factors: _Embeddings
) -> _Embeddings:
    """Return the dot products of factors and gradients of log-probabilities: (T, S) and (T, T)."""
    return _products(target_gradients(pair, *at, {}), factors)


def _products(gradients: TargetGradients, factors: _Embeddings) -> _Embeddings:
    """Return the dot products of factors and the gradients of the log-probabilities."""
    # d log p = (1 - p) dz
    scale = torch.sigmoid(-gradients.log_odds).unsqueeze(1)
    src, tgt = (
        None if side is None or gradient is None else (side * gradient).sum(-1) * scale
        for side, gradient in ((factors.src, gradients.src), (factors.tgt, gradients.tgt))
    )
    assert tgt is not None, "a target has tokens"
    return _Embeddings(src, tgt)


def _weighted_sum(parts: list[_Embeddings], weights: list[float]) -> _Embeddings:
    """Return the weighted sum of several attributions, in float64."""
    scale = torch.tensor(weights, dtype=torch.float64)

    def total(sides: list[Tensor]) -> Tensor:
        stacked = torch.stack(sides)
        factors = scale.to(stacked.device).view(-1, 1, 1)
        return (stacked.double() * factors).sum(0).to(stacked.dtype)

    sources = [part.src for part in parts if part.src is not None]
    return _Embeddings(total(sources) if sources else None, total([part.tgt for part in parts]))


def _by_token(pair: TeacherForcedPair, effect: Callable[[Tensor], Tensor]) -> _Embeddings:
    """Return `effect` of every token, (T, S) and (T, T), in batches of bounded memory.

    `effect` takes positions (n,), source tokens before target tokens, and returns (n, T).
    """
    device = pair.tgt_in.device
    positions = torch.arange(pair.src_length + pair.tgt_length, device=device)
    rows = torch.cat(
        [effect(part) for part in torch.split(positions, pair.max_rows())]
    ).T  # (T, S + T)
    src, tgt = rows[:, : pair.src_length], rows[:, pair.src_length :]
    # A token cannot change what was predicted before it was read.
    return _Embeddings(src if pair.src_length else None, tgt.tril())


def _attribution(
    method: str,
    pair: TeacherForcedPair,
    found: _Embeddings,
    *,
    signed: bool,
    gap: float | None = None,
) -> TokenAttribution:
    """Return the result as arrays."""
    src, tgt = (
        None if side is None else side.detach().float().cpu().numpy().astype(np.float32)
        for side in found
    )
    assert tgt is not None, "a target has tokens"
    return TokenAttribution(method, src, tgt, signed, gap)


@contextmanager
def _explicit_attention(pair: TeacherForcedPair) -> Iterator[None]:
    """Compute explicit attention weights within the block, unchanged."""
    unchanged: dict[str, WeightsEdit] = dict.fromkeys(
        find_attentions(pair.model), lambda weights: weights
    )
    with edit(pair.model, unchanged):
        yield
