"""The places where the time goes: pure functions on tensors, each in a fast form and in a plain form to check it by.

attend                 fused attention, PyTorch's or our own   attend_reference
attend_packed          our own, straight from a layer's products
normed_sum             a sum under a norm, when compiled
positive_linear        a product cut off at nought            positive_linear_reference
linear_cross_entropy   projection and loss, chunk by chunk     linear_cross_entropy_reference

Those of a search's step on a GPU are for engines, by their modules: `beam_attention`, `joining`, `ranking` and `beam_rule`.
"""

from __future__ import annotations

from dragoman.ops.attention import AttentionOutput, attend, attend_reference
from dragoman.ops.attention_mask import build_attention_mask, masked_softmax
from dragoman.ops.cross_entropy import (
    IGNORE_INDEX,
    CrossEntropyOutput,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from dragoman.ops.dropout import dropout
from dragoman.ops.fused_linear import linear_relu, linear_relu_reference
from dragoman.ops.fused_norm import dropout_add_norm
from dragoman.ops.packed_attention import attend_packed
from dragoman.ops.short_attention import enable_short_attention

__all__ = [
    "IGNORE_INDEX",
    "AttentionOutput",
    "CrossEntropyOutput",
    "attend",
    "attend_packed",
    "attend_reference",
    "build_attention_mask",
    "dropout",
    "dropout_add_norm",
    "enable_short_attention",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_relu",
    "linear_relu_reference",
    "masked_softmax",
]
