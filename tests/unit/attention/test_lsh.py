"""LSH attention against a quadratic definition; hashes against another implementation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dragoman.attention import record
from dragoman.attention.lsh import LSHAttention
from dragoman.attention.lsh_bucket_count import (
    MAX_BUCKETS_PER_HASH,
    bucket_problem,
    default_buckets,
    factor_buckets,
)
from dragoman.errors import DragomanError
from dragoman.ops.lsh_attention import attend_sorted, hash_vectors, sort_by_bucket

SIZES = [
    (40, 3, 3, 4),
    (41, 4, 2, 2),
    (7, 1, 2, 2),
    (64, 8, 3, 6),
    (1, 2, 2, 2),
]  # tokens, window, rounds, buckets


def make(
    *, rounds: int, buckets: int, window: int, width: int = 16, heads: int = 2
) -> LSHAttention:
    torch.manual_seed(0)
    return LSHAttention(width, heads, rounds=rounds, buckets=buckets, window=window).double()


def defined(
    attention: LSHAttention,
    x: Tensor,
    real: Tensor,
    *,
    causal: bool,
) -> Tensor:
    """Reference: for each token, one softmax over the tokens that share a bucket with it in any
    round.
    """
    query, key_value, buckets = attention.project(x)
    value = key_value[:, 1]
    rows = []
    for row in range(x.size(0)):
        heads = []
        for head in range(attention.heads):
            q, v = query[row, head], value[row, head]
            outputs = []
            for i in range(x.size(1)):
                met: set[int] = set()
                for round_ in range(attention.rounds):
                    address = [
                        int(buckets[round_, row, head, j]) if real[row, j] else -1
                        for j in range(x.size(1))
                    ]
                    members = [j for j in range(x.size(1)) if address[j] == address[i]]
                    rank = members.index(i)
                    last = rank if causal else rank + attention.window
                    met |= set(members[max(0, rank - attention.window) : last + 1])
                met = met - {i} or {i}
                chosen = torch.tensor(sorted(met))
                scores = torch.stack([q[i] @ q[j] / q[j].norm() for j in chosen])
                outputs.append(scores.softmax(0) @ v[chosen])
            heads.append(torch.stack(outputs))
        rows.append(torch.cat(heads, dim=-1))
    return attention.output(torch.stack(rows))


def tensors(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    real = torch.arange(tokens) < torch.tensor([[tokens], [max(1, tokens // 2)]])
    return (
        torch.randn(2, tokens, 16, dtype=torch.float64, requires_grad=True),
        real,
        torch.randn(2, tokens, 16, dtype=torch.float64),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "window", "rounds", "buckets"), SIZES)
def test_outputs_and_gradients_are_those_of_the_definition(
    tokens: int, window: int, rounds: int, buckets: int, causal: bool
) -> None:
    attention = make(rounds=rounds, buckets=buckets, window=window)
    x, real, outer = tensors(tokens)
    found, wanted = (
        attention(x, mask=real, causal=causal),
        defined(attention, x, real, causal=causal),
    )
    torch.testing.assert_close(found, wanted)
    leaves = [x, *attention.parameters()]
    for one, other in zip(
        torch.autograd.grad((found * outer).sum(), leaves),
        torch.autograd.grad((wanted * outer).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [True, False])
def test_sorting_and_masking_are_one_attention(causal: bool) -> None:
    """Short sequences are masked, long ones without a recorder are sorted: both compute the
    same.
    """
    attention = make(rounds=3, buckets=4, window=5)
    x, real, _ = tensors(150)
    with record(attention) as notes:
        masked = attention(x, mask=real, causal=causal)
    torch.testing.assert_close(attention(x, mask=real, causal=causal), masked)
    weights = notes[""].weights
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    torch.testing.assert_close(weights @ notes[""].values, notes[""].output)
    assert (weights > 0).sum(-1).max() <= 3 * (5 if causal else 10)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_and_other_rows_change_nothing_in_sorted_sequences(causal: bool) -> None:
    attention = make(rounds=2, buckets=4, window=3)
    x, real, _ = tensors(60)
    whole = attention(x, mask=real, causal=causal)
    torch.testing.assert_close(attention(x[1:, :30], causal=causal), whole[1:, :30])
    torch.testing.assert_close(
        attention(x[[1, 1, 0]], mask=real[[1, 1, 0]], causal=causal), whole[[1, 1, 0]]
    )


def test_no_token_of_a_sorted_sequence_sees_its_future() -> None:
    attention = make(rounds=3, buckets=4, window=3)
    x, _, _ = tensors(60)
    changed = x.detach().clone()
    changed[:, 40:] += 1
    torch.testing.assert_close(
        attention(changed, causal=True)[:, :40], attention(x, causal=True)[:, :40]
    )


def test_more_rounds_come_to_full_attention() -> None:
    errors = []
    for rounds in (1, 4, 16, 64):
        attention = make(rounds=rounds, buckets=4, window=256)
        x, _, _ = tensors(256)
        with torch.no_grad():
            query, key_value, buckets = attention.project(x)
            key, value = key_value.unbind(1)
            tokens = sort_by_bucket(buckets, attention.window)
            found = attend_sorted(query, key, value, tokens, window=256, causal=False)
            scores = (query @ key.mT).masked_fill(torch.eye(256, dtype=torch.bool), -torch.inf)
            wanted = scores.softmax(-1) @ value
        errors.append(float((found - wanted).norm() / wanted.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


@pytest.mark.parametrize("buckets", [8, 256])
def test_hashes_are_those_of_transformers(buckets: int) -> None:
    modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    parts = factor_buckets(buckets)
    config = modeling.ReformerConfig(
        num_attention_heads=2,
        attention_head_size=8,
        hidden_size=16,
        num_buckets=list(parts) if len(parts) > 1 else buckets,
        hash_seed=3,
    )
    theirs = modeling.LSHSelfAttention(config)
    torch.manual_seed(0)
    vectors = torch.randn(2, 2, 50, 8)
    expected = theirs._hash_vectors(vectors, 3, None).view(2, 2, 3, 50) - buckets * torch.arange(
        3
    ).view(3, 1)
    torch.manual_seed(3)  # as it does itself
    rotations = torch.randn(2, 8, 3, sum(parts) // 2)
    assert torch.equal(hash_vectors(vectors, rotations, parts).permute(1, 2, 0, 3), expected)


def test_a_hash_is_the_nearest_of_the_rotated_axes() -> None:
    """Equation and loop: the bucket of a vector is where [xR; -xR] is largest, and opposites fall
    into opposite ones.
    """
    torch.manual_seed(0)
    vectors, rotations = torch.randn(1, 1, 20, 4), torch.randn(1, 4, 2, 3)
    found = hash_vectors(vectors, rotations, (6,))
    for round_ in range(2):
        for token in range(20):
            rotated = vectors[0, 0, token] @ rotations[0, :, round_]
            assert found[round_, 0, 0, token] == torch.cat([rotated, -rotated]).argmax()
    assert torch.equal(hash_vectors(-vectors, rotations, (6,)), (found + 3) % 6)


def test_codes_are_near_in_a_bucket_and_far_between_buckets() -> None:
    buckets = torch.tensor(
        [[[[1, 0, 1, 1, 0]], [[0, 0, 0, 0, 2]]]]
    )  # one round, two rows, one head
    order, where, codes = sort_by_bucket(buckets, 3)
    assert order.tolist() == [[1, 4, 0, 2, 3, 5, 6, 7, 8, 9]]
    assert torch.equal(order.gather(1, where), torch.arange(10).unsqueeze(0))
    assert (codes[0, 4] - codes[0, 1], codes[0, 3] - codes[0, 0]) == (1, 2)
    assert codes[0, 0] - codes[0, 4] > 3
    assert codes[0, 5] - codes[0, 3] > 3
    assert codes.dtype == torch.int32


def test_large_numbers_of_tokens_get_long_codes() -> None:
    assert (
        sort_by_bucket(torch.zeros(1, 1, 1, 4, dtype=torch.int16), 2**30).codes.dtype == torch.int64
    )


@pytest.mark.parametrize("causal", [True, False])
def test_half_precision_stays_close_and_finite(causal: bool) -> None:
    attention = make(rounds=3, buckets=4, window=4).float()
    x = torch.randn(2, 100, 16, requires_grad=True)
    saved: dict[str, Tensor] = {}
    exact = attention(x, causal=causal, saved=saved)
    (wanted,) = torch.autograd.grad(exact.square().sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        half = attention(
            x, causal=causal, saved=saved
        )  # in the same buckets: one that flips is another function
    (found,) = torch.autograd.grad(half.float().square().sum(), x)
    assert (half.float() - exact).norm() < 0.03 * exact.norm()
    assert (found - wanted).norm() < 0.05 * wanted.norm()


def test_nothing_saved_for_backward_is_larger_than_the_tokens() -> None:
    """Four times the length keeps four times as much, and more rounds hardly more."""
    kept: dict[tuple[int, int], int] = {}
    for tokens, rounds in ((256, 2), (1024, 2), (1024, 8)):
        attention = LSHAttention(32, 2, rounds=rounds, buckets=16, window=8)
        total = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            attention(torch.randn(1, tokens, 32), causal=True)
        kept[tokens, rounds] = total
    assert kept[1024, 2] < 4.2 * kept[256, 2]
    assert kept[1024, 8] < 3 * kept[1024, 2]


@pytest.mark.parametrize(
    ("buckets", "parts"),
    [(2, (2,)), (128, (128,)), (132, (6, 22)), (512, (16, 32)), (1024, (32, 32)), (2000, (40, 50))],
)
def test_many_buckets_are_the_product_of_few(buckets: int, parts: tuple[int, ...]) -> None:
    assert factor_buckets(buckets) == parts
    assert math.prod(parts) == buckets
    assert all(part % 2 == 0 for part in parts)


def test_the_papers_number_of_buckets() -> None:
    assert default_buckets(1024, 64) == 32
    assert default_buckets(16_384, 64) == 512
    assert default_buckets(10, 64) == 2
    assert all(
        bucket_problem(default_buckets(length, window)) is None
        for length in range(8, 20_000, 97)
        for window in (3, 16, 64)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 5}, "even and at least 2.*found 5; try buckets=6"),
        ({"buckets": 0}, "even and at least 2.*found 0; try buckets=2"),
        (
            {"buckets": MAX_BUCKETS_PER_HASH + 2},
            "a multiple of 4 above 128.*found 130; try buckets=132",
        ),
        ({"rounds": 0}, "rounds of LSH attention must be at least 1; found 0"),
        ({"window": -1}, "window of LSH attention must be at least 1; found -1"),
        ({"heads": 3}, "heads must divide the width; found 3 heads and width 16"),
    ],
)
def test_invalid_sizes_are_rejected(options: dict[str, int], message: str) -> None:
    with pytest.raises(DragomanError, match=message):
        LSHAttention(16, **{"heads": 2, **options})
