"""The mean of weights: exact sums, the dtype of the weights, and nothing changed in place."""

from __future__ import annotations

import pytest
import torch

from dragoman.checkpoint.weight_average import average_weights


def test_sums_are_in_float64() -> None:
    models = [{"a": torch.tensor([value])} for value in (1e8, 3.0, -1e8)]
    assert average_weights(models)["a"].tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mean_has_the_dtype_of_the_weights(dtype: torch.dtype) -> None:
    models = [{"a": torch.tensor([value], dtype=dtype)} for value in (1.0, 2.0)]
    found = average_weights(models)["a"]
    assert found.dtype == dtype
    assert found.tolist() == [1.5]
    assert [model["a"].tolist() for model in models] == [[1.0], [2.0]]
