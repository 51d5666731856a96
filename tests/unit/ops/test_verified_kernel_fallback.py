"""Guarded kernels: verified against the reference, disabled after a failure, not on out of
memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.ops.verified_kernel_fallback import GuardedKernel, is_close


def test_a_kernel_with_wrong_results_is_disabled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel, right = GuardedKernel("something"), torch.arange(4.0)
    for _ in range(2):
        (found,) = (
            kernel.run("kind", lambda: (right + 1,), lambda: (right,))
            if kernel.is_enabled
            else (right,)
        )
        assert torch.equal(found, right)
    assert (
        caplog.text.count("kernel for something failed (ArithmeticError: its result differs") == 1
    )


def test_each_variant_is_verified_once_on_finite_values() -> None:
    kernel, taken = GuardedKernel("something"), []

    def plain() -> tuple[Tensor]:
        taken.append(1)
        return (torch.ones(3) if len(taken) > 1 else torch.full((3,), torch.nan),)

    for kind in ("one", "one", "one", "two"):
        kernel.run(kind, lambda: (torch.ones(3),), plain)
    assert len(taken) == 3, (
        "twice for the first variant, whose first values were NaN, and once for the second"
    )
    assert kernel.is_enabled


def test_out_of_memory_does_not_disable_a_kernel() -> None:
    def fill() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernel = GuardedKernel("something")
    with pytest.raises(torch.OutOfMemoryError):
        kernel.run("kind", fill, fill)
    with pytest.raises(torch.OutOfMemoryError):
        kernel.try_run(fill)
    assert kernel.is_enabled


def test_is_close_allows_rounding() -> None:
    assert is_close(torch.tensor([1.0, -2.0]), torch.tensor([1.01, -2.0]))
    assert not is_close(torch.tensor([1.0, -2.0]), torch.tensor([1.1, -2.0]))
    assert not is_close(torch.tensor([torch.nan, -2.0]), torch.tensor([1.0, -2.0]))
