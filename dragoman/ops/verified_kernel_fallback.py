"""Fused kernels with a fallback: verified against a reference, disabled after a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KernelOutputs = TypeVar("KernelOutputs", bound=tuple[Tensor, ...])

# Of the largest value: the tolerance in half precision for sums in another order.
_RELATIVE_TOLERANCE = 0.02


class GuardedKernel:
    """A fused kernel, for all shapes and dtypes it is compiled for.

    Its only state is what was found out on this machine: whether the kernel has failed, and which
    variants agreed with the reference.
    """

    def __init__(self, name: str) -> None:
        self.name, self.is_enabled = name, True
        self._verified: set[Hashable] = set()

    def can_run(self, x: Tensor) -> bool:
        """Whether to try the kernel on tensors on the device of `x`."""
        return self.is_enabled and x.is_cuda

    def run(
        self,
        variant: Hashable,
        fused: Callable[[], KernelOutputs],
        reference: Callable[[], KernelOutputs],
        *,
        comparable: Callable[[KernelOutputs], tuple[Tensor, ...]] = lambda outputs: outputs,
    ) -> KernelOutputs:
        """Return the fused result; on the first call of each variant, compare with the reference.

        A compiler may generate wrong code without an error. `comparable` maps outputs to the
        tensors that must agree.
        """
        try:
            found = fused()
            if variant in self._verified or _is_capturing(found):
                return found
            expected = reference()
            wanted = comparable(expected)
            if not all(each.isfinite().all() for each in wanted):
                return expected  # NaN cannot be compared; the caller's own checks report it
            if not all(map(is_close, comparable(found), wanted)):
                raise ArithmeticError("its result differs from the reference")
            self._verified.add(variant)
            return found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a missing package, a compiler or a driver may raise
            self.disable(error)
            return reference()

    def try_run(self, action: Callable[[], None]) -> bool:
        """Run the kernel without comparing its result; return whether it succeeded."""
        try:
            action()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.disable(error)
            return False
        return True

    def disable(self, error: Exception) -> None:
        """Log a warning that the kernel failed, and use the reference from now on."""
        logger.warning(
            "the fused kernel for %s failed (%s: %s); falling back to PyTorch, which is slower",
            self.name,
            type(error).__name__,
            " ".join(str(error).split())[:200],
        )
        self.is_enabled = False


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by no more than rounding."""
    max_difference = (found.double() - expected.double()).abs().max()
    return bool(max_difference <= _RELATIVE_TOLERANCE * expected.double().abs().max() + 1e-6)


def _is_capturing(found: tuple[Tensor, ...]) -> bool:
    """Whether a CUDA graph is being captured, when no value may be read."""
    return any(each.is_cuda for each in found) and torch.cuda.is_current_stream_capturing()
