r"""Attention by locality-sensitive hashing: hash vectors, sort by bucket, attend in chunks.

.. math:: h(x) = \arg\max\, [x R; -x R]

with R random, (d, b / 2): the angular hash of Andoni et al. (2015), as in Kitaev et al. (2020).
Many buckets are combined from two hashes with few each, as in the released code of the Reformer
(google/trax); otherwise the matmul with R would cost more than the attention.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.attention import attend

logger = logging.getLogger(__name__)


class SortedTokens(NamedTuple):
    """Tokens of all sequences, N = B * H * T, sorted by bucket in each of R rounds."""

    order: Tensor  # (R, N): the token at each sorted index
    inverse_order: Tensor  # (R, N): the sorted index of each token
    codes: Tensor  # (R, N): inverse_order, with gaps wider than the window between buckets


def hash_vectors(x: Tensor, rotations: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Return the buckets (R, B, H, T) of vectors (B, H, T, d).

    `rotations` are (H, d, R, K), with K half the sum of `parts`, the bucket counts of the hashes.
    """
    heads, width, rounds, size = rotations.shape
    rotated = (x @ rotations.to(x.dtype).view(heads, width, rounds * size)).view(
        *x.shape[:-1], rounds, size
    )  # (B, H, T, R, K)
    buckets, scale = None, 1
    for part, half in zip(
        parts, rotated.split_with_sizes([part // 2 for part in parts], dim=-1), strict=True
    ):
        # The argmax of [x; -x] is the largest magnitude, in the half given by its sign.
        best = half.abs().argmax(dim=-1, keepdim=True)
        best = (best + (half.gather(-1, best) < 0) * (part // 2)).squeeze(-1)
        buckets = best if buckets is None else buckets + scale * best
        scale *= part
    assert buckets is not None, "there must be at least one hash"
    return buckets.permute(3, 0, 1, 2)


def sort_by_bucket(buckets: Tensor, window: int) -> SortedTokens:
    """Sort the tokens (R, B, H, T) of each sequence by bucket, then by position."""
    rounds, _, _, length = buckets.shape
    found, order = buckets.reshape(rounds, -1, length).sort(dim=-1, stable=True)  # (R, B * H, T)
    # The first token of each bucket, and of each sequence.
    is_first = F.pad(found[..., 1:] != found[..., :-1], (1, 0), value=True)
    order = (
        order + torch.arange(0, order.size(1) * length, length, device=order.device).unsqueeze(-1)
    ).flatten(1)
    positions = torch.arange(order.size(1), device=order.device)
    fits_int32 = order.size(1) * (window + 2) < 2**31  # an upper bound of the codes
    codes = (positions + is_first.flatten(1).cumsum(dim=-1) * (window + 1)).to(
        torch.int32 if fits_int32 else torch.int64
    )
    inverse_order = torch.empty_like(order).scatter_(1, order, positions.expand_as(order))
    return SortedTokens(order, inverse_order, codes.gather(1, inverse_order))


# One graph for each round, causal or not, in each dtype; torch stops compiling after its own 8.
MAX_RECOMPILATIONS = 256


def masked_exp(
    scores: Tensor, query_codes: Tensor, key_codes: Tensor, window: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return exponentials of the scores (chunks, window, span), their shift, and log-sum-exp.

    The codes of queries (rounds, chunks, window) and of keys (rounds, chunks, span) decide which
    pairs share a bucket in this round, the last, and in none before.
    """
    scores = scores.masked_fill_(_hidden_pairs(query_codes, key_codes, window, causal), -torch.inf)
    # Finite, so that differences are not NaN.
    lowest = torch.finfo(scores.dtype).min / 4
    max_scores = scores.amax(dim=-1, keepdim=True).clamp(min=lowest)
    exp_scores = scores.sub_(max_scores).exp_()
    wide = torch.promote_types(scores.dtype, torch.float32)
    return (
        exp_scores,
        max_scores,
        exp_scores.sum(dim=-1, keepdim=True, dtype=wide).log_() + max_scores,
    )


def score_gradients(
    scores: Tensor,
    grad_weights: Tensor,
    log_sum_exp: Tensor,
    softmax_delta: Tensor,
    query_codes: Tensor,
    key_codes: Tensor,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return the weights of a round and the gradient of its scores, (chunks, window, span) each.

    `log_sum_exp` is over all rounds; `softmax_delta` is what softmax subtracts from every gradient
    of a query, (chunks, window, 1) each.
    """
    weights = (
        scores.masked_fill_(_hidden_pairs(query_codes, key_codes, window, causal), -torch.inf)
        .sub_(log_sum_exp)
        .exp_()
    )
    return weights, grad_weights.sub_(softmax_delta).mul_(weights)


def _hidden_pairs(query_codes: Tensor, key_codes: Tensor, window: int, causal: bool) -> Tensor:
    """Whether a key is not visible, or was in an earlier round: (chunks, window, span)."""
    query_codes, key_codes = query_codes.unsqueeze(-1), key_codes.unsqueeze(-2)
    lowest, highest = query_codes - window, query_codes - 1 if causal else query_codes + window
    hidden = (key_codes[-1] < lowest[-1]).logical_or_(key_codes[-1] > highest[-1])
    if not causal:
        hidden = hidden.logical_or_(key_codes[-1] == query_codes[-1])  # itself
    for round_index in range(query_codes.size(0) - 1):
        hidden = hidden.logical_or_(
            (key_codes[round_index] >= lowest[round_index]).logical_and_(
                key_codes[round_index] <= highest[round_index]
            )
        )
    return hidden


@functools.cache
def compile_with_fallback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is compiled at its first call, and run uncompiled if that fails."""
    chosen: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        try:
            chosen[:] = chosen or [_torch_compile(function)]
            return chosen[0](*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if chosen == [function]:
                raise
            logger.warning(
                "torch.compile failed, LSH attention runs without it (%s); set torch_compile=false",
                type(error).__name__,
            )
            chosen[:] = [function]
            return function(*arguments)

    return call


def _torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for any length."""
    limits: Any = torch._dynamo.config  # torch 2.11 has no public option for it
    limits.recompile_limit = max(limits.recompile_limit, MAX_RECOMPILATIONS)
    return torch.compile(function, dynamic=True)


# The log-sum-exp over no key: far below any score, and finite, so that differences are not NaN.
EMPTY_LOG_SUM_EXP = -1e30
PADDING_CODE = -(2**30)  # far from all other codes


def attend_lsh(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    buckets: Tensor,
    *,
    window: int,
    causal: bool,
    torch_compile: bool = False,
) -> Tensor:
    """Return attention within buckets (R, B, H, T), for (B, H, T, d): (B, H, T, d).

    Sequences up to 2 * rounds * window are masked, longer ones sorted: each is faster there, and
    the result is the same. `bucket_mask` defines which pairs attend.
    """
    if query.size(2) <= 2 * buckets.size(0) * window:
        visible = bucket_mask(buckets, window=window, causal=causal)
        return attend(query, key, value, mask=visible, scale=1.0)
    tokens = sort_by_bucket(buckets, window)
    return attend_sorted(
        query, key, value, tokens, window=window, causal=causal, torch_compile=torch_compile
    )


def bucket_mask(buckets: Tensor, *, window: int, causal: bool) -> Tensor:
    """Return which pairs share a bucket in any round, at most `window` ranks apart: (B, H, T, T).

    A token attends to itself only if there is no other.
    """
    codes = sort_by_bucket(buckets, window).codes.view(buckets.shape)  # (R, B, H, T)
    mask = None
    for code in codes:
        rank_difference = code.unsqueeze(-1) - code.unsqueeze(-2)  # query minus key
        near = (rank_difference > 0) if causal else (rank_difference != 0)
        near = near & (rank_difference.abs() <= window)
        mask = near if mask is None else mask | near
    assert mask is not None, "there must be at least one round"
    itself = torch.eye(codes.size(-1), dtype=torch.bool, device=codes.device)
    return mask | (itself & ~mask.any(dim=-1, keepdim=True))


def attend_sorted(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tokens: SortedTokens,
    *,
    window: int,
    causal: bool,
    torch_compile: bool = False,
) -> Tensor:
    """Return attention of (B, H, T, d) to nearby tokens of the same bucket: (B, H, T, d).

    `torch_compile` compiles the operations between the matmuls, most of the time on a GPU.
    """
    flat = [part.reshape(-1, part.size(-1)) for part in (query, key, value)]
    context: Tensor = _SortedAttention.apply(*flat, *tokens, window, causal, torch_compile)  # type: ignore[no-untyped-call]
    return context.view(query.shape)


class _SortedChunks:
    """One round of hashing: sorted tokens cut into chunks."""

    def __init__(
        self, order: Tensor, inverse_order: Tensor, codes: Tensor, window: int, causal: bool
    ) -> None:
        self.order, self.inverse_order = order, inverse_order
        self.window, self.causal = window, causal
        self.span = window * (2 if causal else 3)  # keys per chunk
        codes = codes.index_select(1, order)  # (rounds so far, padded tokens)
        inner = codes[:, window:] if causal else codes[:, window:-window]
        self.codes = (
            inner.reshape(codes.size(0), -1, window),
            codes.unfold(1, self.span, window),
            window,
            causal,
        )

    @classmethod
    def rounds(cls, tokens: SortedTokens, window: int, causal: bool) -> Iterator[_SortedChunks]:
        """Yield the rounds, each with the codes of those before it."""
        count = tokens.order.size(1)
        # The padding before the first token and after the last refers to token `count`, a zero row.
        order = F.pad(
            tokens.order, (window, -count % window + (0 if causal else window)), value=count
        )
        codes = F.pad(tokens.codes, (0, 1), value=PADDING_CODE)
        for round_index in range(order.size(0)):
            yield cls(
                order[round_index],
                tokens.inverse_order[round_index],
                codes[: round_index + 1],
                window,
                causal,
            )

    def queries(self, x: Tensor) -> Tensor:
        """Cut (padded tokens, ...) into chunks of queries (chunks, window, ...)."""
        inner = x[self.window :] if self.causal else x[self.window : -self.window]
        return inner.view(-1, self.window, *inner.shape[1:])

    def keys(self, x: Tensor) -> Tensor:
        """Return overlapping windows of keys (padded tokens, d) as a view: (chunks, d, span)."""
        return x.unfold(0, self.span, self.window)

    def sum_overlaps(self, windows: Tensor) -> Tensor:
        """Sum overlapping windows (chunks, span, d) for each key: (tokens, d)."""
        parts = windows.view(windows.size(0), -1, self.window, windows.size(2))
        before, own, *after = parts.unbind(1)  # by the chunk that the keys belong to
        total = own.contiguous()
        total[:-1] += before[1:]
        if after:
            total[1:] += after[0][:-1]
        return total.flatten(0, 1)

    def unsort(self, x: Tensor) -> Tensor:
        """Put sorted tokens (tokens, ...) back into their original order."""
        return x.index_select(0, self.inverse_order)


class _SortedAttention(torch.autograd.Function):
    """Attention over all rounds, with its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        order: Tensor,
        inverse_order: Tensor,
        codes: Tensor,
        window: int,
        causal: bool,
        torch_compile: bool,
    ) -> Tensor:
        """Attend in each round and combine the rounds by their log-sum-exp."""
        ctx.settings = window, causal, torch_compile
        tokens = SortedTokens(order, inverse_order, codes)
        wide = torch.promote_types(query.dtype, torch.float32)
        packed_qkv = query.new_zeros(
            query.size(0) + 1, 3 * query.size(1)
        )  # the last row is padding
        torch.cat([query, key, value], dim=-1, out=packed_qkv[:-1])
        context = query.new_zeros(query.shape, dtype=wide)
        total = query.new_full((query.size(0), 1), EMPTY_LOG_SUM_EXP, dtype=wide)
        with torch.autocast(query.device.type, enabled=False):
            for chunks in _SortedChunks.rounds(tokens, window, causal):
                sorted_query, sorted_key, sorted_value = packed_qkv.index_select(
                    0, chunks.order
                ).chunk(3, dim=-1)
                scores = torch.bmm(chunks.queries(sorted_query), chunks.keys(sorted_key))
                exp_scores, max_scores, logs = (
                    compile_with_fallback(masked_exp) if torch_compile else masked_exp
                )(scores, *chunks.codes)
                found = torch.bmm(exp_scores, chunks.keys(sorted_value).transpose(1, 2))
                logs, max_scores, found = (
                    chunks.unsort(part.flatten(0, 1)) for part in (logs, max_scores, found)
                )
                grown = torch.logaddexp(total, logs)
                context = context.mul_((total - grown).exp_()).addcmul_(
                    found, (max_scores.to(wide) - grown).exp_()
                )
                total = grown
        is_isolated = total <= EMPTY_LOG_SUM_EXP / 2
        context = torch.where(is_isolated, value, context.to(query.dtype))
        ctx.save_for_backward(packed_qkv, context, total, *tokens)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Recompute the weights of each round, and from them the gradients."""
        packed_qkv, context, total, *sorting = ctx.saved_tensors
        window, causal, torch_compile = ctx.settings
        tokens, width, dtype = SortedTokens(*sorting), context.size(-1), context.dtype
        is_isolated = total <= EMPTY_LOG_SUM_EXP / 2
        # What the softmax subtracts from the gradient of every weight of a query.
        softmax_delta = (grad_output.to(total.dtype) * context).sum(dim=-1, keepdim=True)
        grads = torch.zeros(
            context.size(0), 3 * width, dtype=total.dtype, device=grad_output.device
        )
        # A token alone in its bucket returned its own value.
        grads[:, 2 * width :] = torch.where(is_isolated, grad_output, 0)
        grad_output = F.pad(grad_output.to(dtype), (0, 0, 0, 1))
        total, softmax_delta = (F.pad(part, (0, 0, 0, 1)) for part in (total, softmax_delta))
        for chunks in _SortedChunks.rounds(tokens, window, causal):
            sorted_query, sorted_key, sorted_value = packed_qkv.index_select(0, chunks.order).chunk(
                3, dim=-1
            )
            chunk_grad, log_sum_exp, delta = (
                chunks.queries(part.index_select(0, chunks.order))
                for part in (grad_output, total, softmax_delta)
            )
            scores, grad_weights = (
                torch.bmm(chunks.queries(sorted_query), chunks.keys(sorted_key)),
                torch.bmm(chunk_grad, chunks.keys(sorted_value)),
            )
            weights, grad_scores = (
                compile_with_fallback(score_gradients) if torch_compile else score_gradients
            )(scores, grad_weights, log_sum_exp, delta, *chunks.codes)
            del scores, grad_weights
            parts = [
                torch.bmm(grad_scores, chunks.keys(sorted_key).transpose(1, 2)).flatten(0, 1),
                chunks.sum_overlaps(
                    torch.bmm(grad_scores.transpose(1, 2), chunks.queries(sorted_query))
                ),
                chunks.sum_overlaps(torch.bmm(weights.transpose(1, 2), chunk_grad)),
            ]
            grads += chunks.unsort(torch.cat(parts, dim=-1))
        return *grads.to(dtype).chunk(3, dim=-1), None, None, None, None, None, None
