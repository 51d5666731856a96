"""Kernels under guard: compared with what they replace, given up where they differ or fail, and not for a full memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.ops.guarded_kernel import GuardedKernel, is_close


def test_a_kernel_that_computes_something_else_is_found_out(
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
    assert caplog.text.count("something does not run here (ArithmeticError: it differs") == 1


def test_a_kernel_is_compared_once_for_each_kind_and_never_where_there_is_no_number() -> None:
    kernel, taken = GuardedKernel("something"), []

    def plain() -> tuple[Tensor]:
        taken.append(1)
        return (torch.ones(3) if len(taken) > 1 else torch.full((3,), torch.nan),)

    for kind in ("one", "one", "one", "two"):
        kernel.run(kind, lambda: (torch.ones(3),), plain)
    assert len(taken) == 3, (
        "twice for the first kind, whose first numbers were none, and once for the second"
    )
    assert kernel.is_enabled


def test_a_full_memory_is_no_reason_to_give_a_kernel_up() -> None:
    def fill() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernel = GuardedKernel("something")
    with pytest.raises(torch.OutOfMemoryError):
        kernel.run("kind", fill, fill)
    with pytest.raises(torch.OutOfMemoryError):
        kernel.try_run(fill)
    assert kernel.is_enabled


def test_rounding_is_no_difference() -> None:
    assert is_close(torch.tensor([1.0, -2.0]), torch.tensor([1.01, -2.0]))
    assert not is_close(torch.tensor([1.0, -2.0]), torch.tensor([1.1, -2.0]))
    assert not is_close(torch.tensor([torch.nan, -2.0]), torch.tensor([1.0, -2.0]))
