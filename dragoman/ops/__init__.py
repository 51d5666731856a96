"""Tensor operations that layers call; each picks a fused kernel where one exists.

operation              fused forms                                    plain reference
attend                 SDPA, short sequences, windows, distances      attend_reference
attend_packed          packed short sequences                         attend
dropout                hashed dropout under torch.compile             F.dropout
dropout_add_norm       one backward kernel under torch.compile        layer_norm(x + dropout(y))
layer_norm, rms_norm   bf16 kernels without autocast's casts          F.layer_norm, F.rms_norm
linear_consistency_loss  logits of two passes chunk by chunk          autograd through log_softmax
linear_cross_entropy   logits and their gradient chunk by chunk       linear_cross_entropy_reference
linear_relu            cuBLAS epilogue, one backward kernel           linear_relu_reference
lsh_attention          sorted chunks                                  masked attention
monotonic_attention    closed-form gradients                          the recurrence
shift_causal           one kernel that shifts and masks               pad, view, masked_fill
rnn                    cuDNN, fused LSTM and GRU cells                the cells' equations
sru_scan               one kernel for all positions                   the recurrence

A caller always gets a tensor, whichever form ran. Kernels that pay only when a CUDA graph replays
their launches are used where the caller passes `cuda_graphs=True`. Operations of a decoding step on
a GPU are imported by the inference engines from their modules: `beam_search_step_attention`,
`fused_norm`, `topk`.
"""

from __future__ import annotations

from dragoman.ops import packed_qkv_short_sequence_attention, short_sequence_attention  # noqa: F401 - register operators
from dragoman.ops.attention import (
    AttentionOutput,
    attend,
    attend_packed,
    attend_reference,
    build_attention_mask,
    masked_softmax,
)
from dragoman.ops.dropout import dropout, locked_dropout
from dragoman.ops.fused_linear_cross_entropy import (
    IGNORE_INDEX,
    ConsistencyWeights,
    CrossEntropyOutput,
    linear_consistency_loss,
    linear_cross_entropy,
    linear_cross_entropy_reference,
)
from dragoman.ops.fused_linear_relu import linear_relu, linear_relu_reference
from dragoman.ops.fused_norm import dropout_add_norm, layer_norm, rms_norm
from dragoman.ops.relative_shift import shift_causal

__all__ = [
    "IGNORE_INDEX",
    "AttentionOutput",
    "ConsistencyWeights",
    "CrossEntropyOutput",
    "attend",
    "attend_packed",
    "attend_reference",
    "build_attention_mask",
    "dropout",
    "dropout_add_norm",
    "layer_norm",
    "linear_consistency_loss",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_relu",
    "linear_relu_reference",
    "locked_dropout",
    "masked_softmax",
    "rms_norm",
    "shift_causal",
]
