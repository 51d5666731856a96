"""Dropout, from random numbers that cost little."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dropout(x: Tensor, rate: float) -> Tensor:
    """Set a share of the numbers to nought and enlarge the others to make up for it.

    A CPU's random numbers are most of the cost: here 64 bits decide about four numbers, the rate rounded to 1 / 65,536.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    dropped = round(rate * 65_536)
    bits = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = bits.view(torch.int16)[: x.numel()] >= dropped - 32_768
    return x * kept.to(x.dtype).mul_(65_536 / max(65_536 - dropped, 1)).view(x.shape)
