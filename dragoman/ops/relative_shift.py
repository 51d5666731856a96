"""Transformer-XL's relative shift: scores by distance become a causal bias by key.

Dai et al. (2019), appendix B. On a GPU one kernel moves each row and masks later positions, where
PyTorch would need a copy each for padding, shifting, masking and aligning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.ops.verified_kernel_fallback import GuardedKernel

RELATIVE_SHIFT_KERNEL = GuardedKernel("relative shift")
ALIGNMENT = 8  # elements; attention kernels copy a bias whose rows are not aligned


def shift_causal(scores: Tensor) -> Tensor:
    """Return the causal bias (..., T, S) of scores by distance (..., T, S), S - 1 down to 0.

    Row t is moved left by T - 1 - t; entries of later positions are half the lowest finite number,
    so that adding a score to it cannot reach -inf.
    """
    if scores.dtype == torch.float64 or not RELATIVE_SHIFT_KERNEL.can_run(scores):
        return _reference(scores)  # the masked value of float64 is no float32 of a kernel
    shifted: Tensor = torch.ops.dragoman.relative_shift(scores)
    return shifted


def shift_rows(scores: Tensor) -> Tensor:
    """Move row t of (..., T, S) left by T - 1 - t; entries of later positions are arbitrary.

    A column of zeros in front makes each row one longer than the stride it is read with.
    """
    *batch, queries, keys = scores.shape
    padded = F.pad(scores, (1, 0)).view(*batch, keys + 1, queries)
    return padded[..., 1:, :].reshape(*batch, queries, keys)


def masked_value(dtype: torch.dtype) -> float:
    """Return the bias of a masked position."""
    return torch.finfo(dtype).min / 2


def _later(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return True where a key comes after the query, (T, S)."""
    positions = torch.arange(keys, device=device)
    return positions > positions[keys - queries :].unsqueeze(-1)


def _reference(scores: Tensor) -> Tensor:
    later = _later(scores.size(-2), scores.size(-1), scores.device)
    return shift_rows(scores).masked_fill(later, masked_value(scores.dtype))


def shift_back(grad: Tensor) -> Tensor:
    """Move row t of the gradient (..., T, S) right by T - 1 - t, with zeros for the rest."""
    *batch, queries, keys = grad.shape
    grad = grad.masked_fill(_later(queries, keys, grad.device), 0.0)
    flat = F.pad(grad.reshape(*batch, queries * keys), (queries, 0))
    return flat.view(*batch, queries, keys + 1)[..., 1:].contiguous()


def _aligned(like: Tensor) -> Tensor:
    """Return an empty tensor of a shape (..., T, S) whose rows begin at aligned addresses.

    Attention kernels read whole vectors, past the end of a row: what fills the tensor also writes
    zeros behind each row, for a NaN there would spread to the gradients of all queries.
    """
    keys = like.size(-1)
    return like.new_empty(*like.shape[:-1], -(-keys // ALIGNMENT) * ALIGNMENT)[..., :keys]


def _forward(scores: Tensor) -> Tensor:
    def fused() -> tuple[Tensor]:
        from dragoman.ops.triton import relative_shift_kernel

        found = _aligned(scores)
        relative_shift_kernel.shift(scores.contiguous(), found, masked_value(scores.dtype))
        return (found,)

    variant = ("forward", scores.dtype, *scores.shape[-2:])
    return RELATIVE_SHIFT_KERNEL.run(variant, fused, lambda: (_copy(_reference(scores)),))[0]


def _backward(grad: Tensor) -> Tensor:
    def fused() -> tuple[Tensor]:
        from dragoman.ops.triton import relative_shift_kernel

        found = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        rows = grad if grad.stride(-1) == 1 and _has_even_rows(grad) else grad.contiguous()
        relative_shift_kernel.shift_back(rows, found)
        return (found,)

    variant = ("backward", grad.dtype, *grad.shape[-2:])
    return RELATIVE_SHIFT_KERNEL.run(variant, fused, lambda: (shift_back(grad),))[0]


def _has_even_rows(x: Tensor) -> bool:
    """Whether all rows of (..., T, S) are one stride apart, as in an aligned tensor."""
    expected = x.stride(-2)
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


def _copy(x: Tensor) -> Tensor:
    """Copy into aligned rows, as the operator's outputs are declared, with zeros behind them."""
    return F.pad(x, (0, -x.size(-1) % ALIGNMENT))[..., : x.size(-1)]


def _autograd_backward(ctx: Any, grad: Tensor) -> Tensor:
    result: Tensor = torch.ops.dragoman.relative_shift_backward(grad)
    return result


_operator = torch.library.custom_op(
    "dragoman::relative_shift", _forward, mutates_args=(), schema="(Tensor scores) -> Tensor"
)
_operator.register_fake(_aligned)
_operator.register_autograd(_autograd_backward)
_backward_operator = torch.library.custom_op(
    "dragoman::relative_shift_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad) -> Tensor",
)
_backward_operator.register_fake(
    lambda grad: torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
)
