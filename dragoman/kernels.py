"""The places where the time goes: pure functions on tensors, each in a fast form and in a plain form to check it by.

attend                 the fused attention of PyTorch          attend_reference
linear_cross_entropy   projection and loss, chunk by chunk     linear_cross_entropy_reference
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

NO_TARGET = -100  # a target that is not there: its row adds nothing to the loss


class Attention(NamedTuple):
    """The weighted sums of the values, and the weights."""

    context: Tensor  # (B, H, T, Dh)
    weights: Tensor  # (B, H, T, S)


class CrossEntropy(NamedTuple):
    """Sums over the rows that have a target."""

    loss: Tensor  # with label smoothing: what is minimised
    nll: Tensor  # without: what is reported; carries no gradient


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    r"""Scaled dot-product attention, fused: (B, H, T, Dh) looks at (B, H, S, Dh).

    .. math:: \mathrm{softmax}(q k^\top / \sqrt{d_h})\, v

    `mask` is broadcastable to (B, T, S), or has four axes when heads differ. With `causal` the queries are the last T
    of the S positions and none sees past itself. A query that may see nothing gets zeros. `bias`, broadcastable to
    (B, H, T, S), is added to the scores: the fused kernels take it in the mask's stead, with what is hidden pushed out of sight.
    """
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and query.requires_grad:
        # The fused kernel's way back is not vectorised in bfloat16 on CPUs: plain products train sentences of 20 to 250
        # pieces two to five times as fast (docs/log.md). In float32 it is the other way round.
        return attend_reference(query, key, value, mask=mask, causal=causal, dropout=dropout, scale=scale, bias=bias).context
    square = query.size(-2) == key.size(-2)
    if causal and mask is None and square and bias is None:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scale)
    visible = visibility(query.size(-2), key.size(-2), mask, causal, query.device)
    added = visible if bias is None else _hidden_by(bias.to(query.dtype), visible)
    context = F.scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=dropout, scale=scale)
    if visible is None or (query.device.type == "cpu" and bias is None):
        return context
    # PyTorch's own kernels give zeros to a query that sees nothing; cuDNN's, in half precision, gives the mean of all values.
    return context.masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Attention:
    """Do what `attend` does step by step, and show the weights."""
    scores = query @ key.transpose(-1, -2) * (query.size(-1) ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    visible = visibility(query.size(-2), key.size(-2), mask, causal, query.device)
    weights = masked_softmax(scores, visible)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return Attention(weights @ value, weights)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Spread each row over the places where the mask is True; a row without any gets zeros."""
    if mask is None:
        return scores.softmax(dim=-1)
    # The lowest finite number, not -inf: a row with no place left must not turn NaN on its
    # way to zero, for autograd's anomaly detection would stop there.
    hidden = ~mask
    lowest = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return lowest.softmax(dim=-1).masked_fill(hidden, 0.0)


def _hidden_by(bias: Tensor, visible: Tensor | None) -> Tensor:
    """Push what is not visible out of sight of a bias; half the lowest number, so that adding a score cannot reach -inf."""
    bias = bias.unsqueeze(0) if bias.dim() == 3 else bias  # the fused kernels know masks of two axes and of four
    return bias if visible is None else bias.masked_fill(~visible, torch.finfo(bias.dtype).min / 2)


def visibility(queries: int, keys: int, mask: Tensor | None, causal: bool, device: torch.device) -> Tensor | None:
    """Put a mask and causality together, broadcastable to (B, H, T, S); None when everything is visible."""
    if mask is not None and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if not causal or queries == 1:  # the last position sees all
        return mask
    past = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return past if mask is None else mask & past


def dropout(x: Tensor, rate: float) -> Tensor:
    """Set a share of the numbers to nought and enlarge the others to make up for it.

    A CPU's random numbers are most of the cost: here 64 bits decide about four numbers, the rate rounded to 1 / 65,536.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    dropped = round(rate * 65_536)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = bits.view(torch.int16)[: x.numel()] >= dropped - 32_768
    return x * kept.to(x.dtype).mul_(65_536 / max(65_536 - dropped, 1)).view(x.shape)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    chunk: int = 512,
) -> CrossEntropy:
    r"""Project (N, D) by (V, D) and compare with targets (N,), holding at most `chunk` rows of logits at a time.

    The wanted distribution gives 1 - smoothing to the target and smoothing / (V - 1) to each other piece, as the
    released code of the Transformer does; padding and start symbols are pieces like others (their share is one part in
    V). Rows whose target is `NO_TARGET` count nothing. Products run in autocast's type where it is on; the loss is
    summed in float32 at least. Gradients are computed on the way forward, so no logits wait for the backward pass.
    """
    loss, nll = _LinearCrossEntropy.apply(hidden, weight, bias, targets, smoothing, chunk)  # type: ignore[no-untyped-call]
    return CrossEntropy(loss, nll)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, smoothing: float = 0.0
) -> CrossEntropy:
    """Do what `linear_cross_entropy` does from its definition, with all logits at once."""
    log_probs = F.linear(hidden, weight, bias).log_softmax(dim=-1)
    counted = targets != NO_TARGET
    wanted = torch.full_like(log_probs, smoothing / (weight.size(0) - 1))
    wanted.scatter_(1, targets.where(counted, 0).unsqueeze(1), 1 - smoothing)
    loss = -(wanted * log_probs).sum(dim=-1)
    nll = -log_probs.gather(1, targets.where(counted, 0).unsqueeze(1)).squeeze(1)
    return CrossEntropy(loss[counted].sum(), nll[counted].sum().detach())


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss and its gradients in one pass over the chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Sum loss and nll; keep the gradients of the inputs that want one."""
        device = hidden.device.type
        factor = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        total = torch.promote_types(weight.dtype, torch.float32)
        small = weight.to(factor)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=total, device=weight.device) if wants_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=total, device=bias.device) if bias is not None and wants_bias else None
        loss, nll = (torch.zeros((), dtype=total, device=hidden.device) for _ in range(2))
        with torch.autocast(device, enabled=False):
            for first in range(0, hidden.size(0), chunk):
                rows = slice(first, first + chunk)
                piece = hidden[rows].to(factor)
                logits = F.linear(piece, small).to(total)
                if bias is not None:
                    logits += bias
                part, grad = _smoothed(logits, targets[rows], smoothing, any(ctx.needs_input_grad[:3]))
                loss, nll = loss + part.loss, nll + part.nll
                if grad is None:
                    continue
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
                grad = grad.to(factor)
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad @ small).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += grad.T @ piece
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.types = hidden.dtype, weight.dtype, bias.dtype if bias is not None else weight.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outer: Tensor, _nll: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the kept gradients by what stands above the loss."""
        grads = (
            None if grad is None else (grad * outer.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
        )
        return *grads, None, None, None


def _smoothed(logits: Tensor, targets: Tensor, smoothing: float, differentiate: bool) -> tuple[CrossEntropy, Tensor | None]:
    """Sum one chunk's loss, and turn its logits into their gradient, softmax minus the wanted distribution."""
    others = smoothing / (logits.size(1) - 1)
    counted = (targets != NO_TARGET).unsqueeze(1)  # (n, 1)
    index = targets.unsqueeze(1).where(counted, 0)
    gold = logits.gather(1, index)
    total = logits.sum(dim=1, keepdim=True) if smoothing else None
    highest = logits.amax(dim=1, keepdim=True)
    shares = logits.sub_(highest).exp_()  # in place, and once: the exponentials are most of the work beside the products
    norm = shares.sum(dim=1, keepdim=True)
    level = highest + norm.log()
    nll = level - gold
    # -sum_v w_v log p_v, with w = others everywhere and 1 - smoothing at the target
    loss = (1 - smoothing - others) * nll
    if total is not None:
        loss = loss + others * (logits.size(1) * level - total)
    sums = CrossEntropy(loss.where(counted, 0).sum(), nll.where(counted, 0).sum())
    if not differentiate:
        return sums, None
    there = counted.to(logits.dtype)
    grad = shares.mul_(there / norm).sub_(others * there)
    grad.scatter_add_(1, index, (others + smoothing - 1) * there)
    return sums, grad
