"""Pooling against numpy on each row without its padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dragoman.ops.masked_pooling import max_pool, mean_pool, sum_pool


@pytest.mark.parametrize(
    ("pool", "reference"), [(sum_pool, np.sum), (mean_pool, np.mean), (max_pool, np.max)]
)
def test_padding_is_left_out(
    pool: Callable[[Tensor, Tensor | None], Tensor], reference: Callable[..., np.ndarray]
) -> None:
    torch.manual_seed(0)
    x, lengths = torch.randn(4, 5, 3) - 2, [5, 3, 1, 0]
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    x = x.masked_fill(~mask.unsqueeze(2), float("nan"))
    pooled = pool(x, mask)
    for row, length in enumerate(lengths):
        expected = reference(x[row, :length].numpy(), axis=0) if length else np.zeros(3)
        np.testing.assert_allclose(pooled[row], expected, rtol=1e-6)
    np.testing.assert_allclose(pool(x[:1], None)[0], pooled[0], rtol=1e-6)
