"""int8 quantization of weights: a scale for each row, in files and in the CPU engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE_SUFFIX = ".scale"


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix (E, D) to int8 values and a scale for each row (E,)."""
    scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-8)
    return (weight / scales.unsqueeze(1)).round_().clamp_(-127, 127), scales


def quantize_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights for storage in int8; vectors, such as biases and norms, stay as they are."""
    stored = {}
    for name, tensor in tensors.items():
        if is_quantizable(tensor):
            rows, scales = quantize_rows(tensor.detach().float().flatten(1))
            stored[name] = rows.to(torch.int8).view(tensor.shape)
            stored[f"{name}{SCALE_SUFFIX}"] = scales
        else:
            stored[name] = tensor
    return stored


def dequantize_tensors(
    stored: dict[str, Tensor], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return stored weights in float32, one after the other, so that few are held twice."""
    for name, tensor in expected.items():
        if stored[name].dtype == torch.int8 and is_quantizable(tensor):
            values, scales = stored[name], stored.pop(f"{name}{SCALE_SUFFIX}")
            stored[name] = values * scales.view(-1, *[1] * (values.dim() - 1))
    return stored


def is_quantizable(tensor: Tensor) -> bool:
    """Whether a tensor is stored in int8: matrices are, vectors such as biases are not."""
    return tensor.is_floating_point() and tensor.dim() >= 2 and tensor.numel() > 0
