r"""Angular hashing: vectors that point alike fall into one bucket, and a sequence is put into the order of its buckets.

.. math:: h(x) = \arg\max\, [x R; -x R]

with R random, (d, b / 2): Andoni et al. (2015), as in Kitaev et al. (2020). Many buckets are the product of two hashes
with few each, as in the released code of the Reformer (google/trax), or the product with R would cost more than the attention.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class SortedTokens(NamedTuple):
    """Tokens of all sequences, N = B * H * T, put into the order of their buckets, in each of R rounds."""

    order: Tensor  # (R, N): the token at each place of the order
    where: Tensor  # (R, N): the place of each token in the order
    codes: Tensor  # (R, N): of each token its place, with gaps between buckets that are wider than the window


def hash_vectors(x: Tensor, rotations: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Find the buckets (R, B, H, T) of vectors (B, H, T, d) by rotations (H, d, R, K), K half the sum of `parts`."""
    heads, width, rounds, size = rotations.shape
    turned = (x @ rotations.to(x.dtype).view(heads, width, rounds * size)).view(
        *x.shape[:-1], rounds, size
    )  # (B, H, T, R, K)
    buckets, scale = None, 1
    for part, half in zip(
        parts, turned.split_with_sizes([part // 2 for part in parts], dim=-1), strict=True
    ):
        # The largest of a vector and its negative is where the magnitude is largest, on the side that its sign says.
        best = half.abs().argmax(dim=-1, keepdim=True)
        best = (best + (half.gather(-1, best) < 0) * (part // 2)).squeeze(-1)
        buckets = best if buckets is None else buckets + scale * best
        scale *= part
    assert buckets is not None, "there must be at least one hash"
    return buckets.permute(3, 0, 1, 2)


def sort_by_bucket(buckets: Tensor, window: int) -> SortedTokens:
    """Put tokens (R, B, H, T) into the order of (bucket, place) within each sequence, one sequence after the other."""
    rounds, _, _, length = buckets.shape
    found, order = buckets.reshape(rounds, -1, length).sort(dim=-1, stable=True)  # (R, B * H, T)
    new = F.pad(
        found[..., 1:] != found[..., :-1], (1, 0), value=True
    )  # the first of each bucket, and of each sequence
    order = (
        order + torch.arange(0, order.size(1) * length, length, device=order.device).unsqueeze(-1)
    ).flatten(1)
    positions = torch.arange(order.size(1), device=order.device)
    small = order.size(1) * (window + 2) < 2**31  # more than the last code
    codes = (positions + new.flatten(1).cumsum(dim=-1) * (window + 1)).to(
        torch.int32 if small else torch.int64
    )
    where = torch.empty_like(order).scatter_(1, order, positions.expand_as(order))
    return SortedTokens(order, where, codes.gather(1, where))


logger = logging.getLogger(__name__)

MAX_RECOMPILATIONS = (
    256  # one for each round, causal or not, in each type; torch gives up quietly past its own 8
)


def masked_exp(
    scores: Tensor, query_codes: Tensor, key_codes: Tensor, window: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn the scores (chunks, window, span) of a round into exponentials; give them, what was taken off, and the logs of their sums.

    Codes of queries (rounds, chunks, window) and of keys (rounds, chunks, span) say who meets in this round, the last, and in none before.
    """
    scores = scores.masked_fill_(_hidden_pairs(query_codes, key_codes, window, causal), -torch.inf)
    max_scores = scores.amax(dim=-1, keepdim=True).clamp(
        min=torch.finfo(scores.dtype).min / 4
    )  # finite, so that differences are numbers
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
    """Give the weights of a round and the gradient of its scores, by what each value would gain (chunks, window, span).

    `total` is the log of each query's sum over all rounds and `common` what the softmax takes from all its gradients, (chunks, window, 1).
    """
    weights = (
        scores.masked_fill_(_hidden_pairs(query_codes, key_codes, window, causal), -torch.inf)
        .sub_(log_sum_exp)
        .exp_()
    )
    return weights, grad_weights.sub_(softmax_delta).mul_(weights)


def _hidden_pairs(query_codes: Tensor, key_codes: Tensor, window: int, causal: bool) -> Tensor:
    """Say which keys a query does not meet, or has met in an earlier round: (chunks, window, span)."""
    query_codes, key_codes = query_codes.unsqueeze(-1), key_codes.unsqueeze(-2)
    lowest, max_scores = query_codes - window, query_codes - 1 if causal else query_codes + window
    hidden = (key_codes[-1] < lowest[-1]).logical_or_(key_codes[-1] > max_scores[-1])
    if not causal:
        hidden = hidden.logical_or_(key_codes[-1] == query_codes[-1])  # itself
    for round_index in range(query_codes.size(0) - 1):
        hidden = hidden.logical_or_(
            (key_codes[round_index] >= lowest[round_index]).logical_and_(
                key_codes[round_index] <= max_scores[round_index]
            )
        )
    return hidden


@functools.cache
def compile_with_fallback(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function at its first call; should that fail, the plain one takes over."""
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
                "compiling failed, and hashed attention goes on without it (%s); set compiled=false",
                type(error).__name__,
            )
            chosen[:] = [function]
            return function(*arguments)

    return call


def _torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for any length."""
    limits: Any = torch._dynamo.config  # torch 2.11 has no public switch for it
    limits.recompile_limit = max(limits.recompile_limit, MAX_RECOMPILATIONS)
    return torch.compile(function, dynamic=True)


EMPTY_LOG_SUM_EXP = (
    -1e30
)  # the log of a sum over no key: far below any score, and finite, so that differences are numbers
PADDING_CODE = -(2**30)  # a code that is far from all others


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
    """Attend from (B, H, T, d) to the nearby of (B, H, T, d), itself left out unless there is nothing else: (B, H, T, d).

    `compiled` compiles what lies between the products, once a process: on a GPU it is most of the time that long sequences take.
    """
    flat = [part.reshape(-1, part.size(-1)) for part in (query, key, value)]
    context: Tensor = _SortedAttention.apply(*flat, *tokens, window, causal, torch_compile)  # type: ignore[no-untyped-call]
    return context.view(query.shape)


class _SortedChunks:
    """One round: what is at hand, in its order, cut into chunks."""

    def __init__(
        self, order: Tensor, where: Tensor, codes: Tensor, window: int, causal: bool
    ) -> None:
        self.order, self.where, self.window, self.causal = order, where, window, causal
        self.span = window * (2 if causal else 3)  # keys that a chunk meets
        codes = codes.index_select(1, order)  # (rounds so far, slots)
        inner = codes[:, window:] if causal else codes[:, window:-window]
        self.codes = (
            inner.reshape(codes.size(0), -1, window),
            codes.unfold(1, self.span, window),
            window,
            causal,
        )

    @classmethod
    def rounds(cls, tokens: SortedTokens, window: int, causal: bool) -> Iterator[_SortedChunks]:
        """Go through the rounds, each with the codes of those before it."""
        count = tokens.order.size(1)
        # Slots before the first token and behind the last hold token number `count`, which is not there.
        order = F.pad(
            tokens.order, (window, -count % window + (0 if causal else window)), value=count
        )
        codes = F.pad(tokens.codes, (0, 1), value=PADDING_CODE)
        for round_index in range(order.size(0)):
            yield cls(
                order[round_index],
                tokens.where[round_index],
                codes[: round_index + 1],
                window,
                causal,
            )

    def queries(self, slots: Tensor) -> Tensor:
        """Cut (slots, ...) into chunks of queries (chunks, window, ...)."""
        inner = slots[self.window :] if self.causal else slots[self.window : -self.window]
        return inner.view(-1, self.window, *inner.shape[1:])

    def keys(self, slots: Tensor) -> Tensor:
        """Cut (slots, d) into overlapping runs of keys, as columns: (chunks, d, span), without a copy."""
        return slots.unfold(0, self.span, self.window)

    def sum_overlaps(self, runs: Tensor) -> Tensor:
        """Add up overlapping runs (chunks, span, d), where each key stands two or three times: (slots of tokens, d)."""
        before, own, *after = runs.view(runs.size(0), -1, self.window, runs.size(2)).unbind(
            1
        )  # by the chunk whose keys they are
        total = own.contiguous()
        total[:-1] += before[1:]
        if after:
            total[1:] += after[0][:-1]
        return total.flatten(0, 1)

    def unsort(self, slots: Tensor) -> Tensor:
        """Put (slots of tokens, ...) back into the order of the tokens."""
        return slots.index_select(0, self.where)


class _SortedAttention(torch.autograd.Function):
    """All rounds together, forward and back."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        order: Tensor,
        where: Tensor,
        codes: Tensor,
        window: int,
        causal: bool,
        torch_compile: bool,
    ) -> Tensor:
        """Attend in each round, and put the rounds together by the sums of their exponentials."""
        ctx.settings = window, causal, torch_compile
        tokens = SortedTokens(order, where, codes)
        wide = torch.promote_types(query.dtype, torch.float32)
        packed_qkv = query.new_zeros(
            query.size(0) + 1, 3 * query.size(1)
        )  # the last one is the token that is not there
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
        """Compute each round's weights again, and with them the gradients."""
        packed_qkv, context, total, *sorting = ctx.saved_tensors
        window, causal, torch_compile = ctx.settings
        tokens, width, kind = SortedTokens(*sorting), context.size(-1), context.dtype
        is_isolated = total <= EMPTY_LOG_SUM_EXP / 2
        # What a weight's gradient is measured against: the part that the softmax takes from all alike.
        softmax_delta = (grad_output.to(total.dtype) * context).sum(dim=-1, keepdim=True)
        grads = torch.zeros(
            context.size(0), 3 * width, dtype=total.dtype, device=grad_output.device
        )
        grads[:, 2 * width :] = torch.where(
            is_isolated, grad_output, 0
        )  # a token alone gave itself its value
        grad_output = F.pad(grad_output.to(kind), (0, 0, 0, 1))
        total, softmax_delta = (F.pad(part, (0, 0, 0, 1)) for part in (total, softmax_delta))
        for chunks in _SortedChunks.rounds(tokens, window, causal):
            sorted_query, sorted_key, sorted_value = packed_qkv.index_select(0, chunks.order).chunk(
                3, dim=-1
            )
            asked, above, level = (
                chunks.queries(part.index_select(0, chunks.order))
                for part in (grad_output, total, softmax_delta)
            )
            scores, grad_weights = (
                torch.bmm(chunks.queries(sorted_query), chunks.keys(sorted_key)),
                torch.bmm(asked, chunks.keys(sorted_value)),
            )
            weights, grad_scores = (
                compile_with_fallback(score_gradients) if torch_compile else score_gradients
            )(scores, grad_weights, above, level, *chunks.codes)
            del scores, grad_weights
            parts = [
                torch.bmm(grad_scores, chunks.keys(sorted_key).transpose(1, 2)).flatten(0, 1),
                chunks.sum_overlaps(
                    torch.bmm(grad_scores.transpose(1, 2), chunks.queries(sorted_query))
                ),
                chunks.sum_overlaps(torch.bmm(weights.transpose(1, 2), asked)),
            ]
            grads += chunks.unsort(torch.cat(parts, dim=-1))
        return *grads.to(kind).chunk(3, dim=-1), None, None, None, None, None, None
