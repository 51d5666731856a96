"""Products with a fixed matrix, laid out once for the CPU that they run on: x W^T + b, in float32 or from int8."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.errors import DivergedError

LinearFunction = Callable[[Tensor], Tensor]  # (N, D) gives (N, E)

PACKED_ROWS = 128  # rows that oneDNN lays a matrix out for; others run as well
MIN_PACKED_ELEMENTS = (
    1 << 17
)  # numbers: a call to oneDNN takes 40 microseconds more, which a small matrix does not win back
MIN_ONEDNN_ELEMENTS = (
    1 << 20
)  # numbers, from which oneDNN's product from int8 is quicker than fbgemm's
_PACKED_TOLERANCE = (
    1e-3  # how far a packed product may be from a plain one, on numbers of about one
)


class ActivationRange(NamedTuple):
    """The least and the greatest number that a product met."""

    low: float
    high: float


def plain_linear(weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> LinearFunction:
    """Multiply by a matrix (E, D) as it is."""

    def multiply(x: Tensor) -> Tensor:
        found = F.linear(x, weight, bias)
        return found.relu_() if relu else found

    return multiply


def packed_linear(weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> LinearFunction:
    """Multiply by a matrix (E, D) that oneDNN laid out once; where torch has none of that, by the matrix as it is.

    The calls are those of torch's own compiler and not public, so the result is compared once with the plain one.
    """
    reference = plain_linear(weight, bias, relu=relu)
    if weight.numel() < MIN_PACKED_ELEMENTS:
        return reference
    try:
        packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_ROWS)
        multiply = functools.partial(_run_packed_linear, weight=packed_weight, bias=bias, relu=relu)
        sample = torch.linspace(-1.0, 1.0, 2 * weight.size(1)).view(2, -1)
        is_close = torch.allclose(
            multiply(sample), reference(sample), atol=_PACKED_TOLERANCE, rtol=_PACKED_TOLERANCE
        )
    except (RuntimeError, AttributeError, TypeError):
        return reference
    return multiply if is_close else reference


def _run_packed_linear(x: Tensor, *, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Call oneDNN's matmul; its own ReLU would turn NaN into zero."""
    found = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found.relu_() if relu else found


def _require_finite(x: Tensor) -> Tensor:
    """Return what a matmul in int8 is to round, or raise DivergedError if that would hide NaN or infinity."""
    if not math.isfinite(float(x.sum())) and not x.isfinite().all():
        raise DivergedError(
            "what a layer computes must be finite numbers",
            found=f"{int((~x.isfinite()).sum()):,} of {x.numel():,} numbers that are NaN or infinite",
            fix="its weights are damaged or training diverged: use an earlier checkpoint",
        )
    return x


def int8_unsupported_reason() -> str:
    """Say why products from int8 cannot run here; empty where they can."""
    return (
        ""
        if "fbgemm" in torch.backends.quantized.supported_engines
        else "needs a processor that torch's fbgemm knows"
    )


class QuantizationParams(NamedTuple):
    """How numbers become whole ones: x / scale + zero."""

    scale: float
    zero_point: int


def quantization_params(activation_range: ActivationRange, levels: int = 255) -> QuantizationParams:
    """Spread a range, nought always within, over so many steps."""
    low, high = min(activation_range.low, 0.0), max(activation_range.high, 0.0)
    scale = max((high - low) / levels, 1e-8)
    return QuantizationParams(scale, round(-low / scale))


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix (E, D) to whole numbers of eight bits, each row with a scale of its own (E,)."""
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-8)
    return (weight / scales.unsqueeze(1)).round_().clamp_(-127, 127), scales


def pack_int8_panels(int_values: Tensor, panel: int) -> Tensor:
    """Lay whole numbers (E, D) out as the kernels in `source/` read them: (E / P, D / 4, P, 4)."""
    return int_values.to(torch.int8).view(-1, panel, int_values.size(1) // 4, 4).transpose(1, 2)


def int8_linear(
    weight: Tensor, bias: Tensor | None, activation_range: ActivationRange, *, relu: bool = False
) -> LinearFunction:
    r"""Multiply by a matrix (E, D) in eight bits, each of its rows with a scale of its own.

    .. math:: y = s_x s_e\, (q_x - z) \cdot q_e + b_e

    The scale of the inputs is fixed, from the range that was seen before: what stands beside a row never changes it, and the
    sums are whole numbers, so that a row's result is the same to the last bit in every batch. Processors without VNNI add pairs
    of products in 16 bits, which inputs of 7 bits cannot fill.
    """
    levels = 255 if torch.cpu._is_vnni_supported() else 127
    low, high = min(activation_range.low, 0.0), max(activation_range.high, 0.0)
    scale, zero_point = quantization_params(activation_range, levels)
    if weight.numel() >= MIN_ONEDNN_ELEMENTS and levels == 255 and not relu:
        return _int8_linear_onednn(weight, bias, scale, zero_point)
    _, scales = quantize_rows(weight)
    with warnings.catch_warnings():  # that torch will one day keep int8 elsewhere
        warnings.simplefilter("ignore")
        quantized_weight = torch.quantize_per_channel(
            weight.float(), scales.double(), torch.zeros_like(scales).long(), 0, torch.qint8
        )
        before = torch.backends.quantized.engine
        try:
            torch.backends.quantized.engine = "fbgemm"
            packed_weight = torch.ops.quantized.linear_prepack(quantized_weight, bias)
        finally:
            torch.backends.quantized.engine = before
    name = (
        "linear_with_input_q_dq_qweight_dq_relu_output_fp32"
        if relu
        else "linear_with_input_q_dq_qweight_dq_output_fp32"
    )
    call = getattr(torch.ops.quantized, name).default

    def multiply(x: Tensor) -> Tensor:
        return call(_require_finite(x), scale, zero_point, packed_weight)

    # The product itself rounds into 8 bits: where that is too much it must not meet more than 7.
    return multiply if levels == 255 else lambda x: multiply(_require_finite(x).clamp(low, high))


def _int8_linear_onednn(
    weight: Tensor, bias: Tensor | None, scale: float, zero_point: int
) -> LinearFunction:
    """Multiply through oneDNN, which for large matrices takes two thirds of fbgemm's time."""
    quantized_weight, scales = quantize_rows(weight)
    packed_weight = torch.ops.onednn.qlinear_prepack(quantized_weight.to(torch.int8), None)
    zeros = torch.zeros(weight.size(0), dtype=torch.int32)
    call, inverse = torch.ops.onednn.qlinear_pointwise.default, 1.0 / scale

    def multiply(x: Tensor) -> Tensor:
        int_values = (
            torch.mul(_require_finite(x), inverse)
            .add_(zero_point)
            .round_()
            .clamp_(0, 255)
            .to(torch.uint8)
        )
        return call(
            int_values,
            scale,
            zero_point,
            packed_weight,
            scales,
            zeros,
            bias,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )

    return multiply
