"""Kernels that may not run here: tried where a GPU is, compared once with what they replace, and done without from the first failure on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KernelOutputs = TypeVar("KernelOutputs", bound=tuple[Tensor, ...])

_RELATIVE_TOLERANCE = 0.02  # of the largest number: what half precision may differ by where sums are taken in another order


class GuardedKernel:
    """One kernel by its name, with all shapes and types that it is compiled for."""

    def __init__(self, name: str) -> None:
        self.name, self.is_enabled = name, True
        self._verified: set[Hashable] = set()

    def can_run(self, x: Tensor) -> bool:
        """Say whether to try it on what lies where `x` does."""
        return self.is_enabled and x.is_cuda

    def run(
        self,
        variant: Hashable,
        fused: Callable[[], KernelOutputs],
        reference: Callable[[], KernelOutputs],
        *,
        comparable: Callable[[KernelOutputs], tuple[Tensor, ...]] = lambda outputs: outputs,
    ) -> KernelOutputs:
        """Compute the fast way; the first time of each kind both ways, for a compiler may err without saying so.

        What is compared is how results are `seen_as`.
        """
        try:
            found = fused()
            if variant in self._verified or _is_capturing(found):
                return found
            expected = reference()
            wanted = comparable(expected)
            if not all(each.isfinite().all() for each in wanted):
                return expected  # nothing to compare: whoever reads it will say so
            if not all(map(is_close, comparable(found), wanted)):
                raise ArithmeticError("it differs from what it replaces")
            self._verified.add(variant)
            return found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a missing package, a compiler or a driver may raise
            self.disable(error)
            return reference()

    def try_run(self, action: Callable[[], None]) -> bool:
        """Do something whose result nobody compares; say whether it could be done."""
        try:
            action()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.disable(error)
            return False
        return True

    def disable(self, error: Exception) -> None:
        """Tell once that the kernel does not run here, and use it no more."""
        found = " ".join(str(error).split())[:200]
        logger.warning(
            "%s does not run here (%s: %s): PyTorch's are used, which take longer",
            self.name,
            type(error).__name__,
            found,
        )
        self.is_enabled = False


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Say whether two results differ by no more than rounding may make them."""
    max_difference = (found.double() - expected.double()).abs().max()
    return bool(max_difference <= _RELATIVE_TOLERANCE * expected.double().abs().max() + 1e-6)


def _is_capturing(found: tuple[Tensor, ...]) -> bool:
    """Say whether launches are being recorded, while nothing may be looked at."""
    return any(each.is_cuda for each in found) and torch.cuda.is_current_stream_capturing()
