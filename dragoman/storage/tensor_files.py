"""Safetensors files: durable writing in bounded memory, and validated reading.

Weights may be stored in int8: the tensor of a weight has its values divided by the scale of their
row, and another tensor, with SCALE_SUFFIX at the end of its name, has the scales in float32.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dragoman.errors import BundleError, DivergedError
from dragoman.storage.atomic_and_safe_file_io import (
    Bytes,
    FileRecord,
    native_path,
    open_regular,
    write_file,
)
from dragoman.storage.int8_quantization import SCALE_SUFFIX, dequantize_tensors, is_quantizable
from dragoman.storage.manifest import corrupt_file_error, reject_duplicate_keys

_MAX_HEADER_BYTES = 16 << 20
_MAX_TENSORS = 100_000
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorInfo(NamedTuple):
    """dtype and shape of a tensor in a file's header."""

    dtype: str
    shape: tuple[int, ...]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, point: str = "publish.write.weights.safetensors"
) -> FileRecord:
    """Write a new safetensors file durably, with one tensor in host memory at a time."""
    # Not safetensors.save_file, which neither syncs nor follows the umask (mode 0600), and whose
    # writes cannot be made to fail in a test. A test compares our bytes with the library's.
    return write_file(path, _file_chunks(tensors), point=point)


def count_tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors in a file in bytes, without the header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise DivergedError if a tensor has NaN or infinite values."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            low, high = torch.aminmax(tensor.detach())  # a NaN anywhere makes both NaN
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                raise DivergedError(
                    "checkpoints must have finite values",
                    found=f"{where} {name} between {low.item()} and {high.item()}",
                    fix="lower train.learning_rate or set train.max_grad_norm, and resume from "
                    "the last checkpoint",
                )


def _stored_tensors(
    header: Mapping[str, TensorInfo], expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the expected weights as meta tensors, in int8 with scales where the file has int8."""
    stored = dict(expected)
    for name, tensor in expected.items():
        if name in header and header[name].dtype == "I8" and is_quantizable(tensor):
            # Not empty_like, which imports sympy for meta tensors.
            stored[name] = torch.empty(tensor.shape, dtype=torch.int8, device="meta")
            stored[f"{name}{SCALE_SUFFIX}"] = torch.empty(len(tensor), device="meta")
    return stored


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return dtypes and shapes by name; raise CorruptError if damaged."""
    try:
        with open_regular(path) as descriptor:
            length = int.from_bytes(os.read(descriptor, 8), "little")
            if length > _MAX_HEADER_BYTES:
                raise corrupt_file_error(path, f"a header of {length} bytes")
            text = os.read(descriptor, length)
        entries = json.loads(text, object_pairs_hook=reject_duplicate_keys)
        entries.pop("__metadata__", None)
        header = {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]))
            for name, entry in entries.items()
        }
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise corrupt_file_error(path, f"a header that cannot be read ({error})") from error
    if len(header) > _MAX_TENSORS:
        raise corrupt_file_error(path, f"{len(header)} tensors")
    for name in header:
        if "/" in name or "\0" in name or ".." in name:
            raise corrupt_file_error(path, f"the tensor name {name[:80]!r}")
    return header


def read_tensors(
    path: Path,
    *,
    expected: Mapping[str, Tensor] | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    device: str = "cpu",
) -> dict[str, Tensor]:
    """Return the tensors of a file; names, shapes and dtypes must equal those of `expected`.

    Tensors on the meta device are enough for `expected`. Names in the file are first replaced by
    those in `renamed`. Weights that are stored in int8 are returned in float32.
    """
    header = {renamed.get(name, name): info for name, info in read_header(path).items()}
    if expected is not None:
        check_tensors_match(path, header, _stored_tensors(header, expected))
    try:
        with native_path(path) as name:
            tensors = {
                renamed.get(stored, stored): tensor
                for stored, tensor in load_file(name, device=device).items()
            }
    except (SafetensorError, OSError) as error:
        raise corrupt_file_error(path, str(error)) from error
    return tensors if expected is None else dequantize_tensors(tensors, expected)


def check_tensors_match(
    path: Path, header: Mapping[str, TensorInfo], expected: Mapping[str, Tensor]
) -> None:
    """Raise BundleError if a file was written for another model configuration."""
    for name in sorted(header.keys() | expected.keys()):
        found = header.get(name)
        wanted = (
            TensorInfo(_DTYPES[expected[name].dtype], tuple(expected[name].shape))
            if name in expected
            else None
        )
        if found != wanted:
            raise BundleError(
                f"{path} must fit the model, which has {_describe_tensor(name, wanted)}",
                found=_describe_tensor(name, found),
                fix="use the configuration that it was trained with, or another directory",
            )


def _file_chunks(tensors: Mapping[str, Tensor]) -> Iterator[Bytes]:
    """Yield the file's bytes: header length, header, then tensors, widest dtype first for
    alignment.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        header[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _describe_tensor(name: str, shape: TensorInfo | None) -> str:
    return f"no {name}" if shape is None else f"{name} {shape.dtype} {list(shape.shape)}"
