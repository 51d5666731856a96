"""Output projection and label-smoothed cross-entropy loss in one operation, without storing all
logits.

One loop over chunks serves the plain loss and the losses of two passes over the same targets,
R-Drop and SimCut. The tasks of translation and language modeling call it; taggers smooth their
labels in `layers/crf_and_token_softmax.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.verified_kernel_fallback import GuardedKernel

IGNORE_INDEX = -100  # a target with this id does not count
MIN_CHUNK_ROWS = 512
LOGITS_MEMORY_DIVISOR = 32  # 1/32 of a GPU's memory may hold logits in half precision
ALIGNMENT = 16  # elements: cuBLAS and Triton have fast kernels for multiples

CROSS_ENTROPY_KERNEL = GuardedKernel("cross-entropy")
CONSISTENCY_KERNEL = GuardedKernel("the cross-entropy and divergence of two passes")


class CrossEntropyOutput(NamedTuple):
    """Sums over the positions that have a target."""

    loss: Tensor  # with label smoothing, to minimize
    nll: Tensor  # without label smoothing, to report; carries no gradient


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    chunk: int | None = None,
) -> CrossEntropyOutput:
    r"""Return the cross-entropy of (N, D) projected by (V, D) and targets (N,), in chunks.

    .. math:: -\sum_n \sum_v w_{nv} \log p_{nv}

    Label smoothing puts 1 - smoothing on the target and smoothing / (V - 1) on every other token,
    as the released code of Vaswani et al. (2017) does; padding and start symbols count as tokens.
    Rows whose target is `IGNORE_INDEX` do not count. Matmuls run in autocast's dtype; the loss is
    summed in float32 at least. Gradients are computed in the forward pass, so no logits are kept
    for the backward pass. A chunk has `chunk` rows, by default as many as suit the device.
    """
    if chunk is None:
        chunk = rows_per_chunk(hidden.device, weight.size(0))
    chunk_loss = _ChunkLoss(
        CROSS_ENTROPY_KERNEL,
        partial(_launch_cross_entropy, smoothing=smoothing),
        partial(_chunk_reference, smoothing=smoothing),
    )
    loss, nll = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.unsqueeze(0), weight, bias, targets, chunk_loss, chunk
    )
    return CrossEntropyOutput(loss, nll)


class ConsistencyWeights(NamedTuple):
    r"""Weights of the loss of two passes, whose distributions are p and q.

    .. math:: c_p H(p) + c_q H(q) + d\, KL(p \| q) + r\, KL(q \| p)

    H is the label-smoothed cross-entropy with the targets.
    """

    cross_entropy: float  # c_p
    other_cross_entropy: float  # c_q
    divergence: float  # d
    reverse_divergence: float  # r

    @classmethod
    def r_drop(cls, alpha: float) -> ConsistencyWeights:
        """Return those of R-Drop, Liang et al. (2021), equation 4.

        Divided by two, so that the loss stays as large as a plain one.
        """
        return cls(0.5, 0.5, alpha / 4, alpha / 4)

    @classmethod
    def simcut(cls, alpha: float) -> ConsistencyWeights:
        """Return those of SimCut, Gao et al. (2022): p is clean, the inputs of q are cut."""
        return cls(1.0, 0.0, alpha, 0.0)


def linear_consistency_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    weights: ConsistencyWeights,
    smoothing: float = 0.0,
    chunk: int | None = None,
) -> CrossEntropyOutput:
    """Return the loss of two passes (2, N, D), projected by (V, D), over targets (N,).

    Gradients flow through both passes. All else is as in `linear_cross_entropy`; `nll` is weighted
    as the two cross-entropies are.
    """
    if chunk is None:
        # The plain form needs several float32 tensors as large as the logits of both passes.
        copies = 2 if CONSISTENCY_KERNEL.can_run(hidden) else 8
        chunk = max(1, rows_per_chunk(hidden.device, weight.size(0)) // copies)
    chunk_loss = _ChunkLoss(
        CONSISTENCY_KERNEL,
        partial(_launch_consistency, smoothing=smoothing, weights=weights),
        partial(_consistency_reference, smoothing=smoothing, weights=weights),
    )
    loss, nll = _LinearCrossEntropy.apply(hidden, weight, bias, targets, chunk_loss, chunk)  # type: ignore[no-untyped-call]
    return CrossEntropyOutput(loss, nll)


def rows_per_chunk(device: torch.device, vocab_size: int) -> int:
    """Return how many rows of logits are computed at a time: on a 128 GiB GPU 65,536 of 32k."""
    if device.type != "cuda":
        return MIN_CHUNK_ROWS
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(MIN_CHUNK_ROWS, memory // (2 * LOGITS_MEMORY_DIVISOR * vocab_size))


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, smoothing: float = 0.0
) -> CrossEntropyOutput:
    """Return what `linear_cross_entropy` returns, computed from all logits."""
    log_probs = F.linear(hidden, weight, bias).log_softmax(dim=-1)
    has_target = targets != IGNORE_INDEX
    target_probs = torch.full_like(log_probs, smoothing / (weight.size(0) - 1))
    target_probs.scatter_(1, targets.where(has_target, 0).unsqueeze(1), 1 - smoothing)
    loss = -(target_probs * log_probs).sum(dim=-1)
    nll = -log_probs.gather(1, targets.where(has_target, 0).unsqueeze(1)).squeeze(1)
    return CrossEntropyOutput(loss[has_target].sum(), nll[has_target].sum().detach())


class _ChunkLoss(NamedTuple):
    """Computes the loss of a chunk from logits (P n, V) of P passes over targets (n,)."""

    kernel: GuardedKernel
    # Return loss and nll (n,), and overwrite the logits by their gradient if the bool is True.
    launch: Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    # Return the sums and the gradient of the logits, which it may overwrite.
    reference: Callable[[Tensor, Tensor, bool], tuple[CrossEntropyOutput, Tensor | None]]

    def fused(
        self, logits: Tensor, targets: Tensor, differentiate: bool
    ) -> tuple[CrossEntropyOutput, Tensor | None]:
        """Return the reference's result, by the kernel unless it fails."""
        rows: tuple[Tensor, Tensor] | None = None

        def launch() -> None:
            nonlocal rows
            rows = self.launch(logits, targets, differentiate)

        # A kernel that cannot be compiled or launched has not overwritten the logits.
        if self.kernel.try_run(launch) and rows is not None:
            loss, nll = rows
            return CrossEntropyOutput(loss.sum(), nll.sum()), logits if differentiate else None
        return self.reference(logits.float(), targets, differentiate)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the loss and its gradients in one loop over the chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk_loss: _ChunkLoss,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and nll of P passes (P, N, D); save the gradients that are needed."""
        device = hidden.device.type
        compute_dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        total = torch.promote_types(weight.dtype, torch.float32)
        vocab_size, compute_weight, compute_bias = weight.size(0), weight.to(compute_dtype), bias
        # Tokens of weight zero for the largest matmuls of a model: their logits stay zero, and that
        # is their gradient. A vocabulary of 33,278 words, WikiText-2's, then takes half the time.
        padding = 0
        if total == torch.float32 and chunk_loss.kernel.can_run(hidden):
            padding = -vocab_size % ALIGNMENT
            compute_weight = F.pad(compute_weight, (0, 0, 0, padding))
            compute_bias = None if bias is None else F.pad(bias.to(compute_dtype), (0, padding))
        needs_grad_hidden, needs_grad_weight, needs_grad_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_grad_hidden else None
        # With a single chunk nothing is accumulated: the matmul's result, rounded once, is the
        # gradient.
        passes, count, width = hidden.shape
        is_single_chunk = 0 < count <= chunk
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
        differentiate = any(ctx.needs_input_grad[:3])
        with torch.autocast(device, enabled=False):
            for first in range(0, count, chunk):
                rows, padded_grad = slice(first, first + chunk), None
                hidden_chunk = hidden[:, rows].flatten(0, 1).to(compute_dtype)
                if total == torch.float32 and chunk_loss.kernel.can_run(hidden):
                    padded = F.linear(hidden_chunk, compute_weight, compute_bias)
                    logits = padded[:, :vocab_size]
                    chunk_output, grad = chunk_loss.fused(logits, targets[rows], differentiate)
                    padded_grad = padded if grad is logits else None
                else:
                    logits = F.linear(hidden_chunk, compute_weight[:vocab_size]).to(total)
                    logits = logits if bias is None else logits.add_(bias)
                    chunk_output, grad = chunk_loss.reference(logits, targets[rows], differentiate)
                loss, nll = loss + chunk_output.loss, nll + chunk_output.nll
                if grad is None:
                    continue
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0, dtype=total)
                grad = F.pad(grad, (0, padding)) if padded_grad is None else padded_grad
                grad = grad.to(compute_dtype)
                if grad_hidden is not None:
                    grad_rows = (grad @ compute_weight).to(hidden.dtype)
                    grad_hidden[:, rows] = grad_rows.view(passes, -1, width)
                if needs_grad_weight:
                    grad_weight_chunk = (grad.T @ hidden_chunk)[:vocab_size]
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
        """Scale the saved gradients by the gradient of the loss."""
        grads = (
            None if grad is None else (grad * grad_output.to(grad.dtype)).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
        )
        return *grads, None, None, None


def _launch_cross_entropy(
    logits: Tensor, targets: Tensor, differentiate: bool, *, smoothing: float
) -> tuple[Tensor, Tensor]:
    from dragoman.ops.triton import cross_entropy_kernels

    return cross_entropy_kernels.cross_entropy_rows(
        logits,
        targets,
        smoothing=smoothing,
        ignore_index=IGNORE_INDEX,
        differentiate=differentiate,
    )


def _launch_consistency(
    logits: Tensor,
    targets: Tensor,
    differentiate: bool,
    *,
    smoothing: float,
    weights: ConsistencyWeights,
) -> tuple[Tensor, Tensor]:
    from dragoman.ops.triton import cross_entropy_kernels

    return cross_entropy_kernels.consistency_rows(
        logits,
        targets,
        weights=weights,
        smoothing=smoothing,
        ignore_index=IGNORE_INDEX,
        differentiate=differentiate,
    )


def _chunk_reference(
    logits: Tensor, targets: Tensor, differentiate: bool, *, smoothing: float
) -> tuple[CrossEntropyOutput, Tensor | None]:
    """Return the loss of a chunk and its gradient, softmax minus target distribution."""
    off_target_prob = smoothing / (logits.size(1) - 1)
    has_target = (targets != IGNORE_INDEX).unsqueeze(1)  # (n, 1)
    index = targets.unsqueeze(1).where(has_target, 0)
    target_logit = logits.gather(1, index)
    total = logits.sum(dim=1, keepdim=True) if smoothing else None
    max_logit = logits.amax(dim=1, keepdim=True)
    # In place and only once: the exponentials are most of the work beside the matmuls.
    exp_logits = logits.sub_(max_logit).exp_()
    norm = exp_logits.sum(dim=1, keepdim=True)
    log_sum_exp = max_logit + norm.log()
    nll = log_sum_exp - target_logit
    # -sum_v w_v log p_v, with w = off_target_prob everywhere but 1 - smoothing at the target
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


def _consistency_reference(
    logits: Tensor,
    targets: Tensor,
    differentiate: bool,
    *,
    smoothing: float,
    weights: ConsistencyWeights,
) -> tuple[CrossEntropyOutput, Tensor | None]:
    """Return the loss of two passes (2 n, V) and the gradient of their logits."""
    counts = (targets != IGNORE_INDEX).unsqueeze(1).to(logits.dtype)  # (n, 1)
    index = targets.clamp(min=0).unsqueeze(1)
    wanted = torch.full_like(logits[: len(targets)], smoothing / (logits.size(1) - 1))
    wanted.scatter_(1, index, 1 - smoothing)
    log_p, log_q = logits.log_softmax(dim=1).chunk(2)
    p, q = log_p.exp(), log_q.exp()
    ratio = log_p - log_q
    divergence = (p * ratio).sum(dim=1, keepdim=True)  # KL(p || q)
    reverse = -(q * ratio).sum(dim=1, keepdim=True)  # KL(q || p)
    mixed = weights.cross_entropy * log_p + weights.other_cross_entropy * log_q
    loss = weights.divergence * divergence + weights.reverse_divergence * reverse
    loss = loss - (wanted * mixed).sum(dim=1, keepdim=True)
    nll = -mixed.gather(1, index)
    sums = CrossEntropyOutput((loss * counts).sum(), (nll * counts).sum())
    if not differentiate:
        return sums, None
    drawn = q - p  # each divergence's term in the gradient of its second argument
    grad = weights.cross_entropy * (p - wanted) + weights.divergence * p * (ratio - divergence)
    grad = grad - weights.reverse_divergence * drawn
    grad_other = weights.other_cross_entropy * (q - wanted) + weights.divergence * drawn
    grad_other = grad_other - weights.reverse_divergence * q * (ratio + reverse)
    return sums, torch.cat([grad * counts, grad_other * counts])
