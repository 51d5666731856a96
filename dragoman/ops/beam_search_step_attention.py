"""Attention of a beam search step on a GPU: self-attention to the KV cache, and cross-attention.

The beams of a sentence share a KV cache, and a bias masks slots outside a beam's history.
PyTorch's fused kernels are made for many queries and take five times as long as the memory traffic
needs. Here one program holds a head of all beams of a sentence and loads each key once. The Triton
kernels (`triton/beam_attention_kernels.py`) are imported on first use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.verified_kernel_fallback import GuardedKernel

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
    """Write new keys and values (N, 2, H, K, Dh) to the KV cache and attend from (N, H, K, Dh).

    The cache is (N, 2, H, slots, Dh), written at `slots`. `history_bias` (N, 1, K, slots) is added
    to the scores: zero or -inf; of the newest slots, which begin at step * K, each beam sees its
    own. Returns the context (N, K, H * Dh).
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
    """Whether unused slots cost `attend_kv_cache` no time, for heads like (..., Dh)."""
    return SELF_ATTENTION_KERNEL.can_run(like) and _is_supported(like)


def attend_kv_cache_reference(
    query: Tensor, key_value: Tensor, kv_cache: Tensor, history_bias: Tensor, *, slots: Tensor
) -> Tensor:
    """Return what `attend_kv_cache` returns, computed by PyTorch's kernels."""
    kv_cache.index_copy_(3, slots, key_value)
    context = F.scaled_dot_product_attention(
        query, kv_cache[:, 0], kv_cache[:, 1], attn_mask=history_bias
    )
    return context.transpose(1, 2).flatten(2)


def attend_memory(query: Tensor, memory: Tensor, padding_bias: Tensor) -> Tensor:
    """Return cross-attention from (N, H, K, Dh) to memory (N, 2, H, S, Dh): (N, K, H * Dh).

    `padding_bias` (N, 1, 1, S) is added to the scores: zero, or -inf at padding.
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
    """Return what `attend_memory` returns, computed by PyTorch's kernels."""
    context = F.scaled_dot_product_attention(
        query, memory[:, 0], memory[:, 1], attn_mask=padding_bias
    )
    return context.transpose(1, 2).flatten(2)


def _is_supported(query: Tensor) -> bool:
    """Whether the kernels support such queries; in float32 tensor cores would round the inputs."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.size(-1) in HEAD_WIDTHS
        and query.numel() > 0
    )
