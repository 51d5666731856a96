"""Kernels that may not run here: tried where a GPU is, compared once with what they replace, and done without from the first failure on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Made = TypeVar("Made", bound=tuple[Tensor, ...])

_APART = 0.02  # of the largest number: what half precision may differ by where sums are taken in another order


class Guarded:
    """One kernel by its name, with all shapes and types that it is compiled for."""

    def __init__(self, name: str) -> None:
        self.name, self.works = name, True
        self._agreed: set[Hashable] = set()

    def tries(self, x: Tensor) -> bool:
        """Say whether to try it on what lies where `x` does."""
        return self.works and x.is_cuda

    def run(
        self,
        kind: Hashable,
        fast: Callable[[], Made],
        plain: Callable[[], Made],
        *,
        seen_as: Callable[[Made], tuple[Tensor, ...]] = lambda made: made,
    ) -> Made:
        """Compute the fast way; the first time of each kind both ways, for a compiler may err without saying so.

        What is compared is how results are `seen_as`.
        """
        try:
            found = fast()
            if kind in self._agreed or _is_recording(found):
                return found
            expected = plain()
            wanted = seen_as(expected)
            if not all(each.isfinite().all() for each in wanted):
                return expected  # nothing to compare: whoever reads it will say so
            if not all(map(agree, seen_as(found), wanted)):
                raise ArithmeticError("it differs from what it replaces")
            self._agreed.add(kind)
            return found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a missing package, a compiler or a driver may raise
            self.give_up(error)
            return plain()

    def attempt(self, action: Callable[[], None]) -> bool:
        """Do something whose result nobody compares; say whether it could be done."""
        try:
            action()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.give_up(error)
            return False
        return True

    def give_up(self, error: Exception) -> None:
        """Tell once that the kernel does not run here, and use it no more."""
        found = " ".join(str(error).split())[:200]
        logger.warning("%s does not run here (%s: %s): PyTorch's are used, which take longer", self.name, type(error).__name__, found)
        self.works = False


def agree(found: Tensor, expected: Tensor) -> bool:
    """Say whether two results differ by no more than rounding may make them."""
    apart = (found.double() - expected.double()).abs().max()
    return bool(apart <= _APART * expected.double().abs().max() + 1e-6)


def _is_recording(found: tuple[Tensor, ...]) -> bool:
    """Say whether launches are being recorded, while nothing may be looked at."""
    return any(each.is_cuda for each in found) and torch.cuda.is_current_stream_capturing()
