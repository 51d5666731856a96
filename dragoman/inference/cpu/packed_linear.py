"""Linear layers with packed weights for the CPU, x W^T + b: float32 by oneDNN, int8 by fbgemm.

They serve packed_weight_torch_transformer.py; the C++ kernels, preferred where a model fits them,
pack theirs in cpp_weight_packing.py. Both take the int8 scale of each row of a weight from
`quantize_rows` in `storage/int8_quantization.py`.
"""

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
from dragoman.storage.int8_quantization import quantize_rows

LinearFunction = Callable[[Tensor], Tensor]  # (N, D) gives (N, E)

PACKED_ROWS = 128  # batch rows that oneDNN packs a matrix for; others run as well
MIN_PACKED_ELEMENTS = 1 << 17  # smaller matrices do not win back the 40 us that oneDNN's call takes
MIN_ONEDNN_ELEMENTS = 1 << 20  # above it, oneDNN's int8 matmul is faster than fbgemm's
_PACKED_TOLERANCE = 1e-3  # between the packed and the plain matmul, on numbers of about one


class ActivationRange(NamedTuple):
    """The smallest and the largest input of a linear layer."""

    low: float
    high: float


def plain_linear(weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> LinearFunction:
    """Return a linear layer with a matrix (E, D) as it is."""

    def multiply(x: Tensor) -> Tensor:
        found = F.linear(x, weight, bias)
        return found.relu_() if relu else found

    return multiply


def packed_linear(weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> LinearFunction:
    """Return a linear layer with a matrix (E, D) packed by oneDNN, or a plain one without it.

    The operators are those of torch's compiler and not public, so the result is compared once with
    the plain one.
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
    """Return the input of an int8 matmul; raise DivergedError for NaN or infinity."""
    if not math.isfinite(float(x.sum())) and not x.isfinite().all():
        raise DivergedError(
            "the activations of a layer must be finite numbers",
            found=f"{int((~x.isfinite()).sum()):,} of {x.numel():,} that are NaN or infinite",
            fix="its weights are damaged or training diverged: use an earlier checkpoint",
        )
    return x


def int8_unsupported_reason() -> str:
    """Return why torch cannot run int8 matmuls here; empty if it can."""
    return (
        ""
        if "fbgemm" in torch.backends.quantized.supported_engines
        else "needs a processor that torch's fbgemm supports"
    )


class QuantizationParams(NamedTuple):
    """Quantization of activations: round(x / scale) + zero_point."""

    scale: float
    zero_point: int


def quantization_params(activation_range: ActivationRange, levels: int = 255) -> QuantizationParams:
    """Return the quantization of a range, extended to include zero, to `levels` steps."""
    low, high = min(activation_range.low, 0.0), max(activation_range.high, 0.0)
    scale = max((high - low) / levels, 1e-8)
    return QuantizationParams(scale, round(-low / scale))


def pack_int8_panels(int_values: Tensor, panel: int) -> Tensor:
    """Pack int8 values (E, D) in the layout of the kernels in `csrc/`: (E / P, D / 4, P, 4)."""
    return int_values.to(torch.int8).view(-1, panel, int_values.size(1) // 4, 4).transpose(1, 2)


def int8_linear(
    weight: Tensor, bias: Tensor | None, activation_range: ActivationRange, *, relu: bool = False
) -> LinearFunction:
    r"""Return a linear layer in int8 with a scale for each row of its matrix (E, D).

    .. math:: y = s_x s_e\, (q_x - z) \cdot q_e + b_e

    The scale of the inputs is fixed by calibration and the sums are integers, so the result of a
    row is bit-identical in every batch. Processors without VNNI add pairs of products in 16 bits,
    which inputs of 7 bits cannot overflow.
    """
    levels = 255 if torch.cpu._is_vnni_supported() else 127
    low, high = min(activation_range.low, 0.0), max(activation_range.high, 0.0)
    scale, zero_point = quantization_params(activation_range, levels)
    if weight.numel() >= MIN_ONEDNN_ELEMENTS and levels == 255 and not relu:
        return _int8_linear_onednn(weight, bias, scale, zero_point)
    _, scales = quantize_rows(weight)
    with warnings.catch_warnings():  # deprecations of torch.ao
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

    # The matmul quantizes to 8 bits: where only 7 are allowed its input is clamped.
    return multiply if levels == 255 else lambda x: multiply(_require_finite(x).clamp(low, high))


def _int8_linear_onednn(
    weight: Tensor, bias: Tensor | None, scale: float, zero_point: int
) -> LinearFunction:
    """Return an int8 linear layer by oneDNN: for large matrices two thirds of fbgemm's time."""
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
