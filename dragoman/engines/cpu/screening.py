"""An output laid out for whoever takes only the largest logit: in eight bits, with what bounds the error of that (`source/screening.h`)."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.engines.cpu.products import byte_panels, rounded_rows
from dragoman.engines.cpu.structures import Product, Screen

MIDDLE = 128  # the whole number that stands for an input of nought
MOST_SETTLED = 1 / 16  # of the pieces, on average, that may be scored twice before the whole product is the quicker way
_LEAST_ASKED = 512  # rows, before that is judged


class Laid(NamedTuple):
    """A screen, and the tensors that it points to."""

    screen: Screen
    kept: list[Tensor]


def lay(weight: Tensor, bias: Tensor | None, *, panel: int, lanes: int) -> Laid:
    """Lay out a matrix (E, D) and a bias (E,): rows up to whole panels, columns up to whole vectors."""
    pieces, width = weight.shape
    tall, wide = -pieces % panel, -width % lanes
    exact = weight.detach().float()
    exact = F.pad(exact, (0, wide)) if wide else exact.contiguous()  # the model's own, where it is as the kernels want it
    matrix = F.pad(exact, (0, 0, 0, tall))
    whole, each = rounded_rows(matrix)
    rounded = whole * each.unsqueeze(1)
    lost, held = (matrix - rounded).double().norm(dim=1), rounded.double().norm(dim=1)
    # What float32 sums of D products may be off by, in the exact ones and in the scaling of the rough ones, several times over.
    lost += matrix.size(1) * 2.0**-22 * (matrix.double().norm(dim=1) + held)
    added = torch.zeros(pieces) if bias is None else bias.detach().float()
    finite = added[added.isfinite()].abs()
    kept = [
        byte_panels(whole, panel).contiguous(),
        each,
        -MIDDLE * each * whole.sum(dim=1),
        F.pad(added, (0, tall)),
        *((length * (1 + 1e-5)).float() for length in (lost, held)),
        exact,
    ]
    places = [tensor.data_ptr() for tensor in kept]
    rough = Product(weight=places[0], scale=places[1], bias=places[2], input_width=matrix.size(1), output_width=pieces)
    screen = Screen(rough, *places[3:])
    screen.slack = 2.0**-20 * float(finite.max()) if finite.numel() else 0.0
    return Laid(screen, kept)


class Screening:
    """A screen that is given up where it does not pay: where many pieces are so near the best that they must be scored twice."""

    def __init__(self, laid: Laid) -> None:
        self._laid, self._pieces = laid, laid.screen.rough.output_width
        self._rows = self._settled = 0
        self.pays = True

    @property
    def address(self) -> Any:
        """Where the kernels find it."""
        return ctypes.addressof(self._laid.screen)

    def note(self, rows: int, settled: int) -> None:
        """Add up what a step did; threads that add at once may lose some, which changes no result."""
        self._rows += rows
        self._settled += settled
        if self._rows >= _LEAST_ASKED and self._settled > MOST_SETTLED * self._rows * self._pieces:
            self.pays = False
