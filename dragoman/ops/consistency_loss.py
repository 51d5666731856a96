"""Cross-entropy with a divergence between two passes over the same targets, in one operation.

R-Drop (Liang et al. 2021) and SimCut (Gao et al. 2022) compute each target's distribution twice and
draw the two together. As in `linear_cross_entropy`, logits are computed in chunks with their
gradients, so those of a whole batch are never stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.cross_entropy import IGNORE_INDEX, CrossEntropyOutput, rows_per_chunk


class _ChunkLoss(NamedTuple):
    """Sums over a chunk, and the gradients of both passes' logits (n, V)."""

    loss: Tensor
    nll: Tensor
    grad: Tensor
    grad_other: Tensor


def linear_consistency_loss(
    hidden: Tensor,
    other: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    divergence_weight: float,
    symmetric: bool,
    chunk: int | None = None,
) -> CrossEntropyOutput:
    r"""Return the loss of two passes (N, D), projected by (V, D), over targets (N,).

    With `symmetric`, R-Drop divided by two, so that the loss stays as large as a plain one:

    .. math:: \tfrac12 (H(p) + H(q)) + \tfrac{\alpha}{4} (KL(p \| q) + KL(q \| p))

    otherwise SimCut, with p from the clean pass and q from the one whose inputs were cut:

    .. math:: H(p) + \alpha\, KL(p \| q)

    H is the label-smoothed cross-entropy with the targets. Gradients flow through both passes.
    """
    chunk = chunk or max(1, rows_per_chunk(hidden.device, weight.size(0)) // 4)  # float32, twice
    loss, nll = _LinearConsistency.apply(  # type: ignore[no-untyped-call]
        hidden, other, weight, bias, targets, smoothing, divergence_weight, symmetric, chunk
    )
    return CrossEntropyOutput(loss, nll)


class _LinearConsistency(torch.autograd.Function):
    """Computes the loss and its gradients in one pass over the chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        other: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        divergence_weight: float,
        symmetric: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and nll; save the gradients."""
        device = hidden.device.type
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        total = torch.promote_types(weight.dtype, torch.float32)
        compute_weight = weight.to(dtype)
        grads = torch.empty_like(hidden), torch.empty_like(other)
        grad_weight = torch.zeros(weight.shape, dtype=total, device=weight.device)
        grad_bias = (
            None if bias is None else torch.zeros(bias.shape, dtype=total, device=bias.device)
        )
        loss, nll = (torch.zeros((), dtype=total, device=hidden.device) for _ in range(2))
        with torch.autocast(device, enabled=False):
            for first in range(0, hidden.size(0), chunk):
                rows = slice(first, first + chunk)
                both = torch.cat([hidden[rows], other[rows]]).to(dtype)
                logits = F.linear(both, compute_weight).to(total)
                if bias is not None:
                    logits += bias
                clean, cut = logits.chunk(2)
                found = _chunk_loss(
                    clean, cut, targets[rows], smoothing, divergence_weight, symmetric
                )
                loss, nll = loss + found.loss, nll + found.nll
                grad = torch.cat([found.grad, found.grad_other])
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
                grad = grad.to(dtype)
                for part, grad_rows in zip(grads, (grad @ compute_weight).chunk(2), strict=True):
                    part[rows] = grad_rows.to(part.dtype)
                grad_weight += grad.T @ both
        ctx.save_for_backward(*grads, grad_weight, grad_bias)
        ctx.types = (
            hidden.dtype, other.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        )  # fmt: skip
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _nll: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients by the gradient of the loss."""
        grads = (
            None if grad is None else (grad * grad_output.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
        )
        return *grads, *(None for _ in range(5))


def _chunk_loss(
    logits: Tensor,
    other: Tensor,
    targets: Tensor,
    smoothing: float,
    divergence_weight: float,
    symmetric: bool,
) -> _ChunkLoss:
    """Return the loss of a chunk; rows without a target count nothing."""
    counts = (targets != IGNORE_INDEX).unsqueeze(1).to(logits.dtype)  # (n, 1)
    index = targets.clamp(min=0).unsqueeze(1)
    wanted = torch.full_like(logits, smoothing / (logits.size(1) - 1))
    wanted.scatter_(1, index, 1 - smoothing)
    log_p, log_q = logits.log_softmax(dim=1), other.log_softmax(dim=1)
    p, q = log_p.exp(), log_q.exp()
    ratio = log_p - log_q
    divergence = (p * ratio).sum(dim=1, keepdim=True)  # KL(p || q)
    entropy, nll = -(wanted * log_p).sum(dim=1, keepdim=True), -log_p.gather(1, index)
    if symmetric:
        reverse = -(q * ratio).sum(dim=1, keepdim=True)  # KL(q || p)
        quarter = divergence_weight / 4
        loss = (entropy - (wanted * log_q).sum(dim=1, keepdim=True)) / 2
        loss = loss + quarter * (divergence + reverse)
        nll = (nll - log_q.gather(1, index)) / 2
        grad = (p - wanted) / 2 + quarter * (p * (ratio - divergence) + p - q)
        grad_other = (q - wanted) / 2 + quarter * (q * (-ratio - reverse) + q - p)
    else:
        loss = entropy + divergence_weight * divergence
        grad = p - wanted + divergence_weight * p * (ratio - divergence)
        grad_other = divergence_weight * (q - p)
    return _ChunkLoss(
        (loss * counts).sum(), (nll * counts).sum(), grad * counts, grad_other * counts
    )
