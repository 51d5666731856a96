"""Top-k and argmax of logits: block-wise in PyTorch, or fused with log-softmax in Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.ops.verified_kernel_fallback import GuardedKernel

ARGMAX_BLOCK, TOPK_BLOCK = 256, 128  # elements per block
MIN_BLOCKS_PER_RESULT = 4  # with fewer blocks the block-wise form is not faster


class TopK(NamedTuple):
    """The largest values of each row and their ids."""

    values: Tensor
    ids: Tensor


def blocked_argmax(x: Tensor) -> TopK:
    """Return the first maximum of each row of (N, V), with NaN the largest: (N,) each."""
    rows, width = x.shape
    count = width // ARGMAX_BLOCK
    if x.device.type != "cpu" or count < MIN_BLOCKS_PER_RESULT:
        return TopK(*x.max(dim=-1))
    blocked_width = count * ARGMAX_BLOCK
    blocks = x[:, :blocked_width].view(rows, count, ARGMAX_BLOCK)
    block = blocks.amax(dim=-1).argmax(dim=-1)  # the first of equal maxima
    found = blocks[torch.arange(rows), block].max(dim=-1)
    values, ids = found.values, block * ARGMAX_BLOCK + found.indices
    if blocked_width == width:
        return TopK(values, ids)
    rest = x[:, blocked_width:].max(dim=-1)
    rest_is_larger = ~(values >= rest.values) & ~values.isnan()
    return TopK(
        torch.where(rest_is_larger, rest.values, values),
        torch.where(rest_is_larger, rest.indices + blocked_width, ids),
    )


def blocked_topk(x: Tensor, count: int) -> TopK:
    """Return the top `count` of each row of (N, V), in descending order: (N, count) each."""
    width = x.size(1)
    number = width // TOPK_BLOCK
    if number < MIN_BLOCKS_PER_RESULT * count:
        return TopK(*x.topk(count, dim=-1))
    blocked_width = number * TOPK_BLOCK
    blocks = x[:, :blocked_width].view(-1, number, TOPK_BLOCK)
    # The top `count` are in the `count` blocks with the largest maxima.
    chosen = blocks.amax(dim=-1).topk(count, dim=-1).indices  # (N, count)
    rows = torch.arange(x.size(0), device=x.device).unsqueeze(1)
    candidates = blocks[rows, chosen].flatten(1)
    candidates = (
        torch.cat([candidates, x[:, blocked_width:]], dim=1)
        if blocked_width < width
        else candidates
    )
    values, candidate_index = candidates.topk(count, dim=-1)
    block = chosen.gather(1, (candidate_index // TOPK_BLOCK).clamp_(max=count - 1))
    num_candidates = count * TOPK_BLOCK
    ids = torch.where(
        candidate_index < num_candidates,
        block * TOPK_BLOCK + candidate_index % TOPK_BLOCK,
        candidate_index - num_candidates + blocked_width,
    )
    return TopK(values, ids)


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return the log-sum-exp of each row of (N, V): (N, 1)."""
    if logits.device.type != "cpu":
        return logits.logsumexp(dim=-1, keepdim=True)
    # On a CPU torch's log_softmax takes half the time of its logsumexp; the maxima before and after
    # differ by the log-sum-exp.
    return logits.amax(dim=-1, keepdim=True) - logits.log_softmax(dim=-1).amax(dim=-1, keepdim=True)


MAX_FORBIDDEN_ID = 31  # ids below it can be forbidden, one bit each
MAX_TOPK = 16  # the kernel's loop over results is unrolled
COMPARED_ROWS = 64  # the reference takes the memory of several tensors of logits

TOPK_KERNEL = GuardedKernel("top-k log-probabilities")


class TopKLogProbs(NamedTuple):
    """The top tokens of each row, in descending order; of equal ones the lower id comes first."""

    log_probs: Tensor  # (N, K)
    ids: Tensor  # (N, K)


class ForbiddenTokens(NamedTuple):
    """Tokens that may not come next; the others are not renormalized."""

    ids: tuple[int, ...]
    eos: int  # forbidden before `min_length` steps
    step: Tensor  # ()
    min_length: Tensor  # ()


def topk_log_probs(
    logits: Tensor, count: int, forbidden: ForbiddenTokens, *, bias: Tensor | None = None
) -> TopKLogProbs | None:
    """Return the top `count` tokens of logits (N, V) plus a bias (V,); None without the kernel."""
    is_supported = (
        logits.numel() > 0
        and count <= min(MAX_TOPK, logits.size(1))
        and logits.stride(1) == 1
        and max(*forbidden.ids, forbidden.eos) < MAX_FORBIDDEN_ID
    )
    if not (is_supported and TOPK_KERNEL.can_run(logits)):
        return None

    def fused() -> TopKLogProbs:
        from dragoman.ops.triton import topk_kernel

        return TopKLogProbs(
            *topk_kernel.topk_log_probs(
                logits,
                bias,
                count,
                forbidden.ids,
                forbidden.eos,
                forbidden.step,
                forbidden.min_length,
            )
        )

    def compared_logits() -> Tensor:
        return add_bias(logits[:COMPARED_ROWS], bias)

    def values(found: TopKLogProbs) -> tuple[Tensor, ...]:
        """Return the logits at the ids: of nearly equal tokens either may come first."""
        log_probs, ids = (each[:COMPARED_ROWS] for each in found)
        return log_probs.masked_fill(log_probs == -torch.inf, 0.0), compared_logits().gather(1, ids)

    variant = (logits.dtype, logits.size(1), count, bias is None)
    found = TOPK_KERNEL.run(
        variant,
        fused,
        lambda: topk_log_probs_reference(compared_logits(), count, forbidden),
        comparable=values,
    )
    return found if TOPK_KERNEL.is_enabled and len(found.ids) == len(logits) else None


def add_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits plus a bias (V,), if there is one, in float32."""
    return logits.float() if bias is None else logits.float() + bias


def topk_log_probs_reference(
    logits: Tensor, count: int, forbidden: ForbiddenTokens
) -> TopKLogProbs:
    """Return what `topk_log_probs` returns, computed by PyTorch."""
    scores = mask_forbidden_tokens(logits.float().log_softmax(dim=-1), forbidden)
    ordered = torch.sort(scores, dim=-1, descending=True, stable=True)
    return TopKLogProbs(*(each[:, :count].contiguous() for each in ordered))


def mask_forbidden_tokens(scores: Tensor, forbidden: ForbiddenTokens) -> Tensor:
    """Set the scores (N, V) of forbidden tokens to -inf, in place."""
    for token_id in forbidden.ids:
        scores[:, token_id].fill_(-torch.inf)
    scores[:, forbidden.eos].masked_fill_(forbidden.step < forbidden.min_length, -torch.inf)
    return scores
