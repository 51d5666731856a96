r"""Attention to what is near in one of several orders: linear in memory, whatever the number of rounds.

A query sees the keys whose code, in at least one round, differs from its own by `window` at most. In each round the tokens are cut
into chunks of `window`, in that round's order; the queries of a chunk meet the keys of their own chunk, of the one before and, where
the future may be seen, of the one after. A pair that met in an earlier round is left out. So each pair counts once, and the sum
over rounds is one softmax over all keys that a query sees in any round.

Nothing of size (tokens x keys) is kept: going back, each round's weights are computed again from the sums of the exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.attention.fusing import fused, share, slope
from dragoman.attention.hashing import Sorted

NOTHING = -1e30  # the log of a sum over no key: far below any score, and finite, so that differences are numbers
NOWHERE = -(2**30)  # a code that is far from all others


def attend_nearby(
    query: Tensor, key: Tensor, value: Tensor, tokens: Sorted, *, window: int, causal: bool, compiled: bool = False
) -> Tensor:
    """Attend from (B, H, T, d) to the nearby of (B, H, T, d), itself left out unless there is nothing else: (B, H, T, d).

    `compiled` compiles what lies between the products, once a process: on a GPU it is most of the time that long sequences take.
    """
    flat = [part.reshape(-1, part.size(-1)) for part in (query, key, value)]
    context: Tensor = _Nearby.apply(*flat, *tokens, window, causal, compiled)  # type: ignore[no-untyped-call]
    return context.view(query.shape)


class _Chunks:
    """One round: what is at hand, in its order, cut into chunks."""

    def __init__(self, order: Tensor, where: Tensor, codes: Tensor, window: int, causal: bool) -> None:
        self.order, self.where, self.window, self.causal = order, where, window, causal
        self.span = window * (2 if causal else 3)  # keys that a chunk meets
        codes = codes.index_select(1, order)  # (rounds so far, slots)
        inner = codes[:, window:] if causal else codes[:, window:-window]
        self.codes = inner.reshape(codes.size(0), -1, window), codes.unfold(1, self.span, window), window, causal

    @classmethod
    def rounds(cls, tokens: Sorted, window: int, causal: bool) -> Iterator[_Chunks]:
        """Go through the rounds, each with the codes of those before it."""
        count = tokens.order.size(1)
        # Slots before the first token and behind the last hold token number `count`, which is not there.
        order = F.pad(tokens.order, (window, -count % window + (0 if causal else window)), value=count)
        codes = F.pad(tokens.codes, (0, 1), value=NOWHERE)
        for turn in range(order.size(0)):
            yield cls(order[turn], tokens.where[turn], codes[: turn + 1], window, causal)

    def queries(self, slots: Tensor) -> Tensor:
        """Cut (slots, ...) into chunks of queries (chunks, window, ...)."""
        inner = slots[self.window :] if self.causal else slots[self.window : -self.window]
        return inner.view(-1, self.window, *inner.shape[1:])

    def keys(self, slots: Tensor) -> Tensor:
        """Cut (slots, d) into overlapping runs of keys, as columns: (chunks, d, span), without a copy."""
        return slots.unfold(0, self.span, self.window)

    def gathered(self, runs: Tensor) -> Tensor:
        """Add up overlapping runs (chunks, span, d), where each key stands two or three times: (slots of tokens, d)."""
        before, own, *after = runs.view(runs.size(0), -1, self.window, runs.size(2)).unbind(1)  # by the chunk whose keys they are
        total = own.contiguous()
        total[:-1] += before[1:]
        if after:
            total[1:] += after[0][:-1]
        return total.flatten(0, 1)

    def returned(self, slots: Tensor) -> Tensor:
        """Put (slots of tokens, ...) back into the order of the tokens."""
        return slots.index_select(0, self.where)


class _Nearby(torch.autograd.Function):
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
        compiled: bool,
    ) -> Tensor:
        """Attend in each round, and put the rounds together by the sums of their exponentials."""
        ctx.settings = window, causal, compiled
        tokens = Sorted(order, where, codes)
        wide = torch.promote_types(query.dtype, torch.float32)
        together = query.new_zeros(query.size(0) + 1, 3 * query.size(1))  # the last one is the token that is not there
        torch.cat([query, key, value], dim=-1, out=together[:-1])
        context = query.new_zeros(query.shape, dtype=wide)
        total = query.new_full((query.size(0), 1), NOTHING, dtype=wide)
        with torch.autocast(query.device.type, enabled=False):
            for chunks in _Chunks.rounds(tokens, window, causal):
                mine, theirs, values = together.index_select(0, chunks.order).chunk(3, dim=-1)
                scores = torch.bmm(chunks.queries(mine), chunks.keys(theirs))
                shares, highest, logs = (fused(share) if compiled else share)(scores, *chunks.codes)
                found = torch.bmm(shares, chunks.keys(values).transpose(1, 2))
                logs, highest, found = (chunks.returned(part.flatten(0, 1)) for part in (logs, highest, found))
                grown = torch.logaddexp(total, logs)
                context = context.mul_((total - grown).exp_()).addcmul_(found, (highest.to(wide) - grown).exp_())
                total = grown
        alone = total <= NOTHING / 2
        context = torch.where(alone, value, context.to(query.dtype))
        ctx.save_for_backward(together, context, total, *tokens)
        return context

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        """Compute each round's weights again, and with them the gradients."""
        together, context, total, *sorting = ctx.saved_tensors
        window, causal, compiled = ctx.settings
        tokens, width, kind = Sorted(*sorting), context.size(-1), context.dtype
        alone = total <= NOTHING / 2
        # What a weight's gradient is measured against: the part that the softmax takes from all alike.
        common = (outer.to(total.dtype) * context).sum(dim=-1, keepdim=True)
        grads = torch.zeros(context.size(0), 3 * width, dtype=total.dtype, device=outer.device)
        grads[:, 2 * width :] = torch.where(alone, outer, 0)  # a token alone gave itself its value
        outer = F.pad(outer.to(kind), (0, 0, 0, 1))
        total, common = (F.pad(part, (0, 0, 0, 1)) for part in (total, common))
        for chunks in _Chunks.rounds(tokens, window, causal):
            mine, theirs, values = together.index_select(0, chunks.order).chunk(3, dim=-1)
            asked, above, level = (chunks.queries(part.index_select(0, chunks.order)) for part in (outer, total, common))
            scores, gains = torch.bmm(chunks.queries(mine), chunks.keys(theirs)), torch.bmm(asked, chunks.keys(values))
            weights, slopes = (fused(slope) if compiled else slope)(scores, gains, above, level, *chunks.codes)
            del scores, gains
            parts = [
                torch.bmm(slopes, chunks.keys(theirs).transpose(1, 2)).flatten(0, 1),
                chunks.gathered(torch.bmm(slopes.transpose(1, 2), chunks.queries(mine))),
                chunks.gathered(torch.bmm(weights.transpose(1, 2), asked)),
            ]
            grads += chunks.returned(torch.cat(parts, dim=-1))
        return *grads.to(kind).chunk(3, dim=-1), None, None, None, None, None, None
