"""The projection onto the vocabulary and the loss behind it, together: chunk by chunk, and all at once."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

NO_TARGET = -100  # a target that is not there: its row adds nothing to the loss

_by_rows = True  # until Triton's kernel has failed


class CrossEntropy(NamedTuple):
    """Sums over the rows that have a target."""

    loss: Tensor  # with label smoothing: what is minimised
    nll: Tensor  # without: what is reported; carries no gradient


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
        whole = 0 < hidden.size(0) <= chunk  # then nothing is summed up: what the product gives, rounded once, is the gradient
        grad_weight = torch.zeros(weight.shape, dtype=total, device=weight.device) if wants_weight and not whole else None
        grad_bias = torch.zeros(bias.shape, dtype=total, device=bias.device) if bias is not None and wants_bias else None
        loss, nll = (torch.zeros((), dtype=total, device=hidden.device) for _ in range(2))
        with torch.autocast(device, enabled=False):
            for first in range(0, hidden.size(0), chunk):
                rows = slice(first, first + chunk)
                piece = hidden[rows].to(factor)
                logits = F.linear(piece, small)
                part, grad = _compare(logits, bias, targets[rows], smoothing, total, any(ctx.needs_input_grad[:3]))
                loss, nll = loss + part.loss, nll + part.nll
                if grad is None:
                    continue
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
                grad = grad.to(factor)
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad @ small).to(hidden.dtype)
                if wants_weight:
                    product = grad.T @ piece
                    grad_weight = product if grad_weight is None else grad_weight.add_(product)
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


def _compare(
    logits: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, total: torch.dtype, differentiate: bool
) -> tuple[CrossEntropy, Tensor | None]:
    """Sum one chunk's loss and make the gradient of its logits, which are given up: by Triton's kernel where it runs, or step by step."""
    if bias is None and total == torch.float32 and _runs_rows(logits):
        try:
            from dragoman.kernels import loss_rows

            loss, nll = loss_rows.smooth_rows(logits, targets, smoothing=smoothing, no_target=NO_TARGET, differentiate=differentiate)
            return CrossEntropy(loss.sum(), nll.sum()), logits if differentiate else None
        except Exception as error:  # whatever a missing package, a compiler or a driver may raise: nothing has been written yet
            _give_up(error)
    wide = logits.to(total)
    if bias is not None:
        wide += bias
    return _smoothed(wide, targets, smoothing, differentiate)


def _runs_rows(logits: Tensor) -> bool:
    """Say whether to try Triton's kernel."""
    return _by_rows and logits.is_cuda and logits.numel() > 0


def _give_up(error: Exception) -> None:
    """Tell once that the kernel does not run here, and use it no more."""
    global _by_rows
    found = " ".join(str(error).split())[:200]
    logger.warning("the loss's own kernel does not run here (%s: %s): PyTorch's are used, which take longer", type(error).__name__, found)
    _by_rows = False


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
