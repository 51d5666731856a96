"""What stands between two products of a Transformer in one pass: the change added to the stream, the norm, and its rounding.

The stream is float32, the products read half precision. Step by step that is three kernels, each of which reads and writes it all. The
kernel is Triton's (`joining_rows.py`), imported at the first use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.kernels.guarding import Guarded

WIDEST = 4096  # a vector is held whole

JOINING = Guarded("the sum with its norm")


class Scale(NamedTuple):
    """A layer norm, or where nothing is shifted the root mean square's."""

    weight: Tensor  # (D,)
    bias: Tensor | None  # (D,)
    epsilon: float
    centred: bool  # whether the mean is taken away


class Joined(NamedTuple):
    """The stream after a change, and what the next product reads of it."""

    stream: Tensor  # (..., D) in float32
    entering: Tensor  # (..., D) in the products' format


def join(x: Tensor, change: Tensor | None, scale: Scale, dtype: torch.dtype, *, after: bool) -> Joined:
    """Add a change to a stream (..., D) in float32 and normalise what the next product reads; `after`, the stream goes on normalised."""

    def plain() -> Joined:
        return join_reference(x, change, scale, dtype, after=after)

    fits = x.size(-1) <= WIDEST and x.is_contiguous() and x.dtype == torch.float32 and x.numel() > 0
    if not (fits and (change is None or change.is_contiguous()) and JOINING.tries(x)):
        return plain()

    def fast() -> Joined:
        from dragoman.kernels import joining_rows

        return Joined(
            *joining_rows.join(x, change, scale.weight, scale.bias, dtype, epsilon=scale.epsilon, centred=scale.centred, after=after)
        )

    return JOINING.run((dtype, x.size(-1), change is None, scale.centred, scale.bias is None, after), fast, plain)


def join_reference(x: Tensor, change: Tensor | None, scale: Scale, dtype: torch.dtype, *, after: bool) -> Joined:
    """Do what `join` does with PyTorch's kernels."""
    x = x if change is None else x + change
    width = (x.size(-1),)
    if scale.centred:
        normal = F.layer_norm(x, width, scale.weight, scale.bias, scale.epsilon)
    else:
        normal = F.rms_norm(x, width, scale.weight, scale.epsilon)
    return Joined(normal if after else x, normal.to(dtype))
