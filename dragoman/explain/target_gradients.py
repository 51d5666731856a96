"""Gradients of every target token with respect to token embeddings and scales of heads.

The log-odds of a target token, z = log p - log (1 - p), are differentiated, not its
log-probability: where the model is sure, p is nearly 1 and the gradient of log p vanishes, however
much the token depends on an input. The gradient of log p is that of z times 1 - p.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.explain.forced_target import ForcedTarget
from dragoman.explain.head_scales import scaled_heads
from dragoman.layers.rnn import RNN

TARGETS_PER_PASS = 16  # whose backward passes run as one batch


class TargetGradients(NamedTuple):
    """Gradients of the log-odds of T target tokens."""

    src: Tensor | None  # (T, S, D) with respect to the source's embeddings
    tgt: Tensor  # (T, T, D) with respect to those of the decoder's input
    heads: dict[str, Tensor]  # (T, H) with respect to the scale of each head, by attention
    log_odds: Tensor  # (T,)


def target_gradients(
    forced: ForcedTarget, src: Tensor | None, tgt: Tensor, heads: Mapping[str, int]
) -> TargetGradients:
    """Return the gradients at embeddings (1, S, D) and (1, T, D).

    `heads` are the numbers of heads of the attentions whose scales are wanted. Targets are taken in
    groups; a group needs the decoder's input up to its last token only.
    """
    parts = [
        _group_gradients(
            forced, src, tgt, heads, first, min(first + TARGETS_PER_PASS, forced.tgt_length)
        )
        for first in range(0, forced.tgt_length, TARGETS_PER_PASS)
    ]
    sources = [part.src for part in parts if part.src is not None]
    return TargetGradients(
        torch.cat(sources) if sources else None,
        torch.cat(
            [
                nn.functional.pad(part.tgt, (0, 0, 0, forced.tgt_length - part.tgt.size(1)))
                for part in parts
            ]
        ),
        {path: torch.cat([part.heads[path] for part in parts]) for path in heads},
        torch.cat([part.log_odds for part in parts]),
    )


def _group_gradients(
    forced: ForcedTarget,
    src: Tensor | None,
    tgt: Tensor,
    heads: Mapping[str, int],
    first: int,
    end: int,
    *,
    by_rows: bool | None = None,
) -> TargetGradients:
    """Return the gradients of targets first to end - 1.

    One forward pass of one row is followed by one backward pass that `vmap` batches over targets.
    RNN kernels have no rule for that: there the batch has one row for each target.
    """
    if by_rows is None:
        by_rows = any(isinstance(module, RNN) for module in forced.model.modules())
    count = end - first
    rows = count if by_rows else 1
    with torch.inference_mode(False), torch.enable_grad():
        embedded = [
            None if side is None else side.detach().repeat(rows, 1, 1).requires_grad_()
            for side in (src, tgt[:, :end])
        ]
        scales = {
            path: torch.ones(rows, size, device=tgt.device, requires_grad=True)
            for path, size in heads.items()
        }
        # Explicit weights also where no scale is wanted: fused kernels have no rule for vmap.
        with scaled_heads(forced.model, scales, sources=forced.src_length):
            hidden = forced.hidden(embedded[0], _given(embedded[1]))
        if by_rows:  # row t at position t
            places = torch.arange(count, device=tgt.device)
            hidden = hidden[places, first + places].unsqueeze(0)
        else:
            hidden = hidden[:, first:end]
        leaf = hidden.detach().requires_grad_()
        log_odds = forced.log_odds(leaf, first=first)  # (1, n)
        [slopes] = torch.autograd.grad(log_odds.sum(), [leaf])  # (1, n, E)
        if not by_rows:  # row t has the gradient of target t alone
            slopes = torch.diag_embed(slopes[0].T).permute(1, 2, 0).unsqueeze(1)  # (n, 1, n, E)
        leaves = [each for each in (*embedded, *scales.values()) if each is not None]
        found = torch.autograd.grad(
            hidden,
            leaves,
            slopes,
            is_grads_batched=not by_rows,
            allow_unused=True,
            materialize_grads=True,
        )
    gradients = [
        each.reshape(count, *leaf.shape[1:]) for each, leaf in zip(found, leaves, strict=True)
    ]
    num_sides = len(leaves) - len(scales)
    sides, of_heads = gradients[:num_sides], gradients[num_sides:]
    return TargetGradients(
        sides[0] if len(sides) == 2 else None,
        sides[-1],
        dict(zip(scales, of_heads, strict=True)),
        log_odds[0].detach(),
    )


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a target has tokens"
    return tensor
