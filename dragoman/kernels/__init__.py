"""The places where the time goes: pure functions on tensors, each in a fast form and in a plain form to check it by.

attend                 fused attention, PyTorch's or our own   attend_reference
attend_packed          our own, straight from a layer's products
normed_sum             a sum under a norm, when compiled
positive_linear        a product cut off at nought            positive_linear_reference
linear_cross_entropy   projection and loss, chunk by chunk     linear_cross_entropy_reference

Those of a search's step on a GPU are for engines, by their modules: `beam_attention`, `joining`, `ranking` and `beam_rule`.
"""

from dragoman.kernels.attention import Attention, attend, attend_reference
from dragoman.kernels.dropout import dropout
from dragoman.kernels.loss import NO_TARGET, CrossEntropy, linear_cross_entropy, linear_cross_entropy_reference
from dragoman.kernels.masking import masked_softmax, visibility
from dragoman.kernels.normed_sum import normed_sum
from dragoman.kernels.packed_attention import attend_packed
from dragoman.kernels.positive import positive_linear, positive_linear_reference
from dragoman.kernels.short_attention import enable_short_attention

__all__ = [
    "NO_TARGET",
    "Attention",
    "CrossEntropy",
    "attend",
    "attend_packed",
    "attend_reference",
    "dropout",
    "enable_short_attention",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "masked_softmax",
    "normed_sum",
    "positive_linear",
    "positive_linear_reference",
    "visibility",
]
