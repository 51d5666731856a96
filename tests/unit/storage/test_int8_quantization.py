"""int8 weights: a scale for each row, and vectors as they are."""

from __future__ import annotations

import torch

from dragoman.storage.int8_quantization import dequantize_tensors, quantize_rows, quantize_tensors


def test_values_are_rounded_to_the_nearest_multiple_of_the_scale_of_their_row() -> None:
    weight = torch.tensor([[127.0, -126.6, 0.4, 0.6], [-0.254, 0.127, 0.001, 0.0]])
    values, scales = quantize_rows(weight)
    torch.testing.assert_close(scales, torch.tensor([1.0, 0.002]))
    assert values[0].tolist() == [127.0, -127.0, 0.0, 1.0]
    assert values[1, 0] == -127
    assert abs(float(values[1, 1])) in (63.0, 64.0)


def test_small_rows_keep_their_values_and_zeros_stay_zeros() -> None:
    weight = torch.tensor([[1e-5, -2e-5], [0.0, 0.0]])
    values, scales = quantize_rows(weight)
    torch.testing.assert_close(values * scales[:, None], weight, rtol=0, atol=1e-7)
    assert torch.isfinite(values).all()


def test_matrices_and_convolutions_are_stored_in_int8_and_other_tensors_as_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(3, 4, generator=generator),
        "convolution": torch.randn(3, 4, 2, generator=generator),
        "bias": torch.randn(3, generator=generator),
        "scalar": torch.tensor(2.5),
        "counts": torch.ones(2, 2, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
    }
    stored = quantize_tensors(tensors)
    assert {name for name in stored if stored[name].dtype == torch.int8} == {
        "matrix",
        "convolution",
    }
    assert stored.keys() == tensors.keys() | {"matrix.scale", "convolution.scale"}
    assert stored["convolution"].shape == (3, 4, 2)
    assert stored["convolution.scale"].shape == (3,)
    steps = {name: float(stored[f"{name}.scale"].max()) for name in ("matrix", "convolution")}
    back = dequantize_tensors(stored, tensors)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(
            back[name], tensor, rtol=0, atol=0.51 * steps.get(name, 0.0), msg=name
        )
