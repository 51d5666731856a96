"""Tensors in JSON: quantization, exact integers, pooling at word edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.errors import DataError
from dragoman.explain.explanation_json import decode_tensor, encode_tensor, pool_edges, pool_matrix

RANDOM = np.random.default_rng(3)


def weights(heads: int, queries: int, keys: int) -> np.ndarray:
    values = RANDOM.random((heads, queries, keys)) ** 4
    return (values / values.sum(-1, keepdims=True)).astype(np.float32)


def test_weights_are_u8_with_square_root_companding() -> None:
    """The worst error is 0.004 at 1 and 4e-6 near 0."""
    exact = np.linspace(0, 1, 4097, dtype=np.float32)[None]
    entry = encode_tensor(exact)
    assert (entry["dtype"], entry["code"], entry["scale"]) == ("u8", "sqrt", 1.0)
    error = np.abs(decode_tensor(entry) - exact)
    assert error.max() <= 0.004
    assert error[exact < 1e-6].max() <= 4e-6
    assert decode_tensor(encode_tensor(np.eye(3))).tolist() == np.eye(3).tolist()


def test_small_signed_matrices_are_exact() -> None:
    exact = (RANDOM.standard_normal((5, 7)) * 1e-6).astype(np.float32)
    exact[0] = 9.0
    entry = encode_tensor(exact)
    assert (entry["dtype"], entry["code"]) == ("f32", "linear")
    assert np.array_equal(decode_tensor(entry), exact)


def test_large_signed_matrices_are_i8_with_a_scale() -> None:
    exact = (RANDOM.standard_normal((150, 160)) * 3).astype(np.float32)
    entry = encode_tensor(exact)
    assert (entry["dtype"], entry["code"]) == ("i8", "linear")
    assert entry["scale"] == pytest.approx(np.abs(exact).max())
    assert np.abs(decode_tensor(entry) - exact).max() <= entry["scale"] / 254 + 1e-6


@pytest.mark.parametrize(
    ("values", "dtype"),
    [([1, 2, 255], "u8"), ([0, 256], "u16"), ([70_000], "u32"), ([-1, 5], "i32"), ([], "u8")],
)
def test_integers_are_exact(values: list[int], dtype: str) -> None:
    entry = encode_tensor(np.asarray(values, dtype=np.int64))
    assert entry["dtype"] == dtype
    assert decode_tensor(entry).tolist() == values


def test_vectors_are_exact_with_nonfinite_values() -> None:
    exact = np.asarray([1 / 3, -np.inf, 7e20], dtype=np.float32)
    entry = encode_tensor(exact)
    assert entry["dtype"] == "f32"
    np.testing.assert_array_equal(decode_tensor(entry), exact)
    assert np.isnan(decode_tensor(encode_tensor(np.asarray([np.nan], dtype=np.float32))))[0]


@pytest.mark.parametrize("shape", [(3, 4), (2, 0, 3), (1, 1)])
def test_encoding_a_decoded_explanation_changes_nothing(shape: tuple[int, ...]) -> None:
    for exact in (RANDOM.random(shape) * 7, RANDOM.standard_normal(shape)):
        entry = encode_tensor(exact.astype(np.float32))
        assert encode_tensor(decode_tensor(entry)) == entry


@pytest.mark.parametrize(
    "change",
    [{"data": "?"}, {"data": "AAAA"}, {"shape": [9]}, {"shape": [10**30]}, {"dtype": "f64"}],
)
def test_damaged_tensors_are_rejected(change: dict[str, object]) -> None:
    entry = encode_tensor(np.eye(2)) | change
    with pytest.raises(DataError, match="base64 of its dtype and shape; found"):
        decode_tensor(entry)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 40), st.randoms(use_true_random=False))
def test_edges_are_ascending_groups_of_about_the_factor(length: int, factor: int, random) -> None:
    words, at = [], 0
    while at < length:
        end = min(length, at + random.randint(1, 6))
        words.append((at, end))
        at = end
    edges = pool_edges(length, factor, words)
    assert edges[0] == 0
    assert edges[-1] == length
    assert len(edges) - 1 == -(-length // factor)
    assert all(left < right for left, right in itertools.pairwise(edges))
    assert max(np.diff(edges)) <= 2 * factor + 1


def test_edges_are_at_word_edges_where_one_is_near() -> None:
    assert pool_edges(12, 4, [(0, 3), (3, 7), (7, 12)]) == [0, 3, 7, 12]
    assert pool_edges(12, 4, [(0, 12)]) == [0, 4, 8, 12]
    assert pool_edges(3, 1) == [0, 1, 2, 3]


def test_pooling_sums_keys_and_averages_queries() -> None:
    exact = weights(2, 5, 7)
    pooled = pool_matrix(exact, [0, 2, 5], [0, 1, 4, 7])
    assert pooled.shape == (2, 2, 3)
    np.testing.assert_allclose(pooled[1, 1, 1], exact[1, 2:5, 1:4].sum(axis=-1).mean(), rtol=1e-6)
    np.testing.assert_allclose(pooled.sum(-1), 1.0, atol=1e-6)
