"""The projection onto the vocabulary and the loss behind it, together: chunk by chunk, and all at once."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100  # a target that is not there: its row adds nothing to the loss

_fused_enabled = True  # until Triton's kernel has failed


class CrossEntropyOutput(NamedTuple):
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
) -> CrossEntropyOutput:
    r"""Project (N, D) by (V, D) and compare with targets (N,), holding at most `chunk` rows of logits at a time.

    The wanted distribution gives 1 - smoothing to the target and smoothing / (V - 1) to each other piece, as the
    released code of the Transformer does; padding and start symbols are pieces like others (their share is one part in
    V). Rows whose target is `NO_TARGET` count nothing. Products run in autocast's type where it is on; the loss is
    summed in float32 at least. Gradients are computed on the way forward, so no logits wait for the backward pass.
    """
    loss, nll = _LinearCrossEntropy.apply(hidden, weight, bias, targets, smoothing, chunk)  # type: ignore[no-untyped-call]
    return CrossEntropyOutput(loss, nll)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, smoothing: float = 0.0
) -> CrossEntropyOutput:
    """Do what `linear_cross_entropy` does from its definition, with all logits at once."""
    log_probs = F.linear(hidden, weight, bias).log_softmax(dim=-1)
    has_target = targets != IGNORE_INDEX
    target_probs = torch.full_like(log_probs, smoothing / (weight.size(0) - 1))
    target_probs.scatter_(1, targets.where(has_target, 0).unsqueeze(1), 1 - smoothing)
    loss = -(target_probs * log_probs).sum(dim=-1)
    nll = -log_probs.gather(1, targets.where(has_target, 0).unsqueeze(1)).squeeze(1)
    return CrossEntropyOutput(loss[has_target].sum(), nll[has_target].sum().detach())


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss and its gradients in one pass over the chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """Sum loss and nll; keep the gradients of the inputs that want one."""
        device = hidden.device.type
        compute_dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        total = torch.promote_types(weight.dtype, torch.float32)
        compute_weight = weight.to(compute_dtype)
        needs_grad_hidden, needs_grad_weight, needs_grad_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_grad_hidden else None
        is_single_chunk = (
            0 < hidden.size(0) <= chunk
        )  # then nothing is summed up: what the product gives, rounded once, is the gradient
        grad_weight = (
            torch.zeros(weight.shape, dtype=total, device=weight.device)
            if needs_grad_weight and not is_single_chunk
            else None
        )
        grad_bias = (
            torch.zeros(bias.shape, dtype=total, device=bias.device)
            if bias is not None and needs_grad_bias
            else None
        )
        loss, nll = (torch.zeros((), dtype=total, device=hidden.device) for _ in range(2))
        with torch.autocast(device, enabled=False):
            for first in range(0, hidden.size(0), chunk):
                rows = slice(first, first + chunk)
                hidden_chunk = hidden[rows].to(compute_dtype)
                logits = F.linear(hidden_chunk, compute_weight)
                chunk_output, grad = _chunk_cross_entropy(
                    logits, bias, targets[rows], smoothing, total, any(ctx.needs_input_grad[:3])
                )
                loss, nll = loss + chunk_output.loss, nll + chunk_output.nll
                if grad is None:
                    continue
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
                grad = grad.to(compute_dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = (grad @ compute_weight).to(hidden.dtype)
                if needs_grad_weight:
                    grad_weight_chunk = grad.T @ hidden_chunk
                    grad_weight = (
                        grad_weight_chunk
                        if grad_weight is None
                        else grad_weight.add_(grad_weight_chunk)
                    )
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.types = hidden.dtype, weight.dtype, bias.dtype if bias is not None else weight.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _nll: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the kept gradients by what stands above the loss."""
        grads = (
            None if grad is None else (grad * grad_output.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
        )
        return *grads, None, None, None


def _chunk_cross_entropy(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    total: torch.dtype,
    differentiate: bool,
) -> tuple[CrossEntropyOutput, Tensor | None]:
    """Sum one chunk's loss and make the gradient of its logits, which are given up: by Triton's kernel where it runs, or step by step."""
    if bias is None and total == torch.float32 and _can_run_fused(logits):
        try:
            from dragoman.ops.triton import cross_entropy_kernel

            loss, nll = cross_entropy_kernel.cross_entropy_rows(
                logits,
                targets,
                smoothing=smoothing,
                no_target=IGNORE_INDEX,
                differentiate=differentiate,
            )
            return CrossEntropyOutput(loss.sum(), nll.sum()), logits if differentiate else None
        except Exception as error:  # whatever a missing package, a compiler or a driver may raise: nothing has been written yet
            _disable_fused(error)
    wide_logits = logits.to(total)
    if bias is not None:
        wide_logits += bias
    return _chunk_reference(wide_logits, targets, smoothing, differentiate)


def _can_run_fused(logits: Tensor) -> bool:
    """Say whether to try Triton's kernel."""
    return _fused_enabled and logits.is_cuda and logits.numel() > 0


def _disable_fused(error: Exception) -> None:
    """Tell once that the kernel does not run here, and use it no more."""
    global _fused_enabled
    found = " ".join(str(error).split())[:200]
    logger.warning(
        "the loss's own kernel does not run here (%s: %s): PyTorch's are used, which take longer",
        type(error).__name__,
        found,
    )
    _by_rows = False


def _chunk_reference(
    logits: Tensor, targets: Tensor, smoothing: float, differentiate: bool
) -> tuple[CrossEntropyOutput, Tensor | None]:
    """Sum one chunk's loss, and turn its logits into their gradient, softmax minus the wanted distribution."""
    off_target_prob = smoothing / (logits.size(1) - 1)
    has_target = (targets != IGNORE_INDEX).unsqueeze(1)  # (n, 1)
    index = targets.unsqueeze(1).where(has_target, 0)
    target_logit = logits.gather(1, index)
    total = logits.sum(dim=1, keepdim=True) if smoothing else None
    max_logit = logits.amax(dim=1, keepdim=True)
    exp_logits = logits.sub_(
        max_logit
    ).exp_()  # in place, and once: the exponentials are most of the work beside the products
    norm = exp_logits.sum(dim=1, keepdim=True)
    log_sum_exp = max_logit + norm.log()
    nll = log_sum_exp - target_logit
    # -sum_v w_v log p_v, with w = others everywhere and 1 - smoothing at the target
    loss = (1 - smoothing - off_target_prob) * nll
    if total is not None:
        loss = loss + off_target_prob * (logits.size(1) * log_sum_exp - total)
    sums = CrossEntropyOutput(loss.where(has_target, 0).sum(), nll.where(has_target, 0).sum())
    if not differentiate:
        return sums, None
    there = has_target.to(logits.dtype)
    grad = exp_logits.mul_(there / norm).sub_(off_target_prob * there)
    grad.scatter_add_(1, index, (off_target_prob + smoothing - 1) * there)
    return sums, grad
