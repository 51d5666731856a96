"""Tensors on disk: the library's own format, durably, and nothing but what is expected."""

from __future__ import annotations

import json
import os
import stat

import pytest
import safetensors.torch
import torch

from dragoman.errors import BundleError, CorruptError, DivergedError
from dragoman.storage.tensor_files import (
    check_finite,
    count_tensor_bytes,
    read_header,
    read_tensors,
    write_tensors,
)

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def some() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 4, generator=generator),
        "a.bias": torch.randn(5, generator=generator),
        "scale": torch.tensor(2.5),
    }


def test_bytes_equal_those_of_safetensors(tmp_path):
    write_tensors(tmp_path / "t", some())
    assert (tmp_path / "t").read_bytes() == safetensors.torch.save(
        some(), metadata={"format": "pt"}
    )


def test_every_dtype_round_trips_bit_for_bit(tmp_path):
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in TYPES} | {
        "empty": torch.zeros(0, 3)
    }
    record = write_tensors(tmp_path / "t", tensors)
    back = read_tensors(tmp_path / "t", expected=tensors)
    assert record.bytes == (tmp_path / "t").stat().st_size
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_views_are_written_as_they_look(tmp_path):
    """A transposed or aliased tensor is saved by its values (pytorch/pytorch#144657)."""
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"t": base.T, "slice": base[1:, ::2], "same": base.T, "grown": base[:1].expand(3, 4)}
    write_tensors(tmp_path / "t", tensors)
    back = read_tensors(tmp_path / "t")
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)


def test_parameters_need_no_detaching(tmp_path):
    write_tensors(tmp_path / "t", dict(torch.nn.Linear(2, 2).named_parameters()))
    assert set(read_header(tmp_path / "t")) == {"weight", "bias"}


def test_bytes_are_counted(tmp_path):
    assert count_tensor_bytes(some()) == 4 * (12 + 5 + 1)


def test_others_may_read(tmp_path):
    before = os.umask(0o022)
    write_tensors(tmp_path / "t", some())
    os.umask(before)
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda t: t.pop("scale"), r"which has no scale; found scale F32 \[\]"),
        (lambda t: t.update(more=torch.zeros(2)), r"which has more F32 \[2\]; found no more"),
        (
            lambda t: t.update({"a.bias": torch.zeros(6)}),
            r"which has a.bias F32 \[6\]; found a.bias F32 \[5\]",
        ),
        (
            lambda t: t.update({"a.bias": torch.zeros(5, dtype=torch.float16)}),
            r"which has a.bias F16 \[5\]; found a.bias F32 \[5\]",
        ),
    ],
)
def test_another_model_s_file_is_rejected(tmp_path, change, found):
    write_tensors(tmp_path / "t", some())
    expected = {name: tensor.to("meta") for name, tensor in some().items()}
    read_tensors(tmp_path / "t", expected=expected)
    change(expected)
    with pytest.raises(BundleError, match=found):
        read_tensors(tmp_path / "t", expected=expected)


def raw(path, header: str, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)


ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (f'{{"a":{ONE},"a":{ONE}}}', "the key 'a' twice"),
        (f'{{"../../etc/x":{ONE}}}', "'../../etc/x'"),
        (f'{{"a/b":{ONE}}}', "'a/b'"),
        (f'{{"a\\u0000b":{ONE}}}', "'a\\x00b'"),
        ("[" * 100_000, "cannot be read"),
        ('{"a":{"dtype":"F32"}}', "cannot be read"),
        ('{"a":3}', "cannot be read"),
        ("[]", "cannot be read"),
        ("{", "cannot be read"),
    ],
)
def test_hostile_headers_are_rejected(tmp_path, header, found):
    """safetensors itself accepts repeated names and names with `..`."""
    raw(tmp_path / "t", header, b"\0" * 4)
    with pytest.raises(CorruptError, match=r"cannot be read|the tensor name") as caught:
        read_tensors(tmp_path / "t")
    assert found in str(caught.value)
    assert str(tmp_path / "t") in str(caught.value)


def test_a_giant_header_is_not_read(tmp_path):
    (tmp_path / "t").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    with pytest.raises(CorruptError, match="a header of 1099511627776 bytes"):
        read_header(tmp_path / "t")


def test_too_many_tensors_are_rejected(tmp_path):
    raw(
        tmp_path / "t",
        json.dumps(
            {
                f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for i in range(100_001)
            }
        ),
    )
    with pytest.raises(CorruptError, match="100001 tensors"):
        read_header(tmp_path / "t")


def test_a_truncated_file_is_named(tmp_path):
    write_tensors(tmp_path / "t", some())
    os.truncate(tmp_path / "t", (tmp_path / "t").stat().st_size - 1)
    with pytest.raises(CorruptError, match=str(tmp_path / "t")):
        read_tensors(tmp_path / "t")


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_named(kind, bad):
    tensors = {
        "good": torch.ones(3, dtype=kind),
        "counts": torch.tensor([1]),
        "empty": torch.zeros(0),
        "bad": torch.ones(4, 5, dtype=kind),
    }
    tensors["bad"][2, 3] = bad
    with pytest.raises(DivergedError, match="optimizer bad between") as caught:
        check_finite(tensors, "optimizer")
    assert str(bad) in str(caught.value)
    assert caught.value.exit_code == 70


def test_large_but_finite_numbers_pass():
    check_finite(
        {"a": torch.full((8,), torch.finfo(torch.float16).max, dtype=torch.float16)}, "weights"
    )


@pytest.mark.parametrize("more", [0, 1])
def test_a_header_has_at_most_16_mib(tmp_path, more):
    length = (16 << 20) + more
    (tmp_path / "t").write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * (length - 2))
    if more:
        with pytest.raises(CorruptError, match=f"a header of {length} bytes"):
            read_header(tmp_path / "t")
    else:
        assert read_header(tmp_path / "t") == {}


def test_a_file_without_metadata_is_read(tmp_path):
    raw(tmp_path / "t", f'{{"a":{ONE}}}', b"\0" * 4)
    assert read_tensors(tmp_path / "t")["a"].tolist() == [0.0]
