"""Attention of one new position of every beam, for a search on a GPU: to its own past, and to its sentence.

The beams of a sentence keep keys and values side by side, and a table says which of them are a beam's past. PyTorch's fused kernels are
made for many queries and take five times as long as memory needs for these few. Here one program holds a head of all beams of a
sentence and reads what any of them sees, once. The kernels are Triton's (`beam_tiles.py`), imported at the first use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.guarded_kernel import GuardedKernel

HEAD_WIDTHS = (16, 32, 64, 128)

SELF_ATTENTION_KERNEL = GuardedKernel("beam self-attention")
CROSS_ATTENTION_KERNEL = GuardedKernel("beam cross-attention")


def attend_kv_cache(
    query: Tensor,
    key_value: Tensor,
    kv_cache: Tensor,
    history_bias: Tensor,
    *,
    step: Tensor,
    slots: Tensor,
) -> Tensor:
    """Keep the newest keys and values (N, 2, H, K, Dh) in `own` (N, 2, H, slots, Dh) at `slots`, and attend from queries (N, H, K, Dh).

    What `seen` (N, 1, K, slots) holds is added to scores; it must be nought or minus infinity, and of the newest slots, which begin
    at `step` times K, show each beam its own. The context comes as (N, K, H * Dh).
    """

    def reference() -> tuple[Tensor]:
        return (attend_kv_cache_reference(query, key_value, kv_cache, history_bias, slots=slots),)

    if not can_skip_masked_slots(query):
        return reference()[0]

    def fused() -> tuple[Tensor]:
        from dragoman.ops.triton import beam_attention_kernels

        return (
            beam_attention_kernels.attend_kv_cache(query, key_value, kv_cache, history_bias, step),
        )

    return SELF_ATTENTION_KERNEL.run((query.dtype, query.shape[1:]), fused, reference)[0]


def can_skip_masked_slots(like: Tensor) -> bool:
    """Say whether `attend_past` takes the same time whatever else there is room for, with heads of the width and type of (..., Dh)."""
    return SELF_ATTENTION_KERNEL.can_run(like) and _is_supported(like)


def attend_kv_cache_reference(
    query: Tensor, key_value: Tensor, kv_cache: Tensor, history_bias: Tensor, *, slots: Tensor
) -> Tensor:
    """Do what `attend_past` does with PyTorch's kernels."""
    kv_cache.index_copy_(3, slots, key_value)
    context = F.scaled_dot_product_attention(
        query, kv_cache[:, 0], kv_cache[:, 1], attn_mask=history_bias
    )
    return context.transpose(1, 2).flatten(2)


def attend_memory(query: Tensor, memory: Tensor, padding_bias: Tensor) -> Tensor:
    """Attend from queries (N, H, K, Dh) to the keys and values (N, 2, H, S, Dh) of their sentence: (N, K, H * Dh).

    `hidden` (N, 1, 1, S) is added to scores: nought, or minus infinity where a source is padded.
    """

    def reference() -> tuple[Tensor]:
        return (attend_memory_reference(query, memory, padding_bias),)

    if not (CROSS_ATTENTION_KERNEL.can_run(query) and _is_supported(query)):
        return reference()[0]

    def fused() -> tuple[Tensor]:
        from dragoman.ops.triton import beam_attention_kernels

        return (beam_attention_kernels.attend_memory(query, memory, padding_bias),)

    return CROSS_ATTENTION_KERNEL.run((query.dtype, query.shape[1:]), fused, reference)[0]


def attend_memory_reference(query: Tensor, memory: Tensor, padding_bias: Tensor) -> Tensor:
    """Do what `attend_sentence` does with PyTorch's kernels."""
    context = F.scaled_dot_product_attention(
        query, memory[:, 0], memory[:, 1], attn_mask=padding_bias
    )
    return context.transpose(1, 2).flatten(2)


def _is_supported(query: Tensor) -> bool:
    """Say whether the kernels take queries of this shape and type; in float32 tensor cores would round what they multiply."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.size(-1) in HEAD_WIDTHS
        and query.numel() > 0
    )
