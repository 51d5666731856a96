"""Random masks of the language-model objectives."""

from __future__ import annotations

import numpy as np

from dragoman.data.masked_and_permuted_inputs import (
    draw_swaps,
    factorization_ranks,
    join_segments,
    mask_tokens,
    predicted_count,
    segment_columns,
)

MASK = 1000


def rows(count: int = 400, length: int = 100) -> np.ndarray:
    return np.random.default_rng(0).integers(4, MASK, (count, length))


def test_fifteen_percent_are_predicted_and_replaced_as_in_bert() -> None:
    tokens = rows()
    masked = mask_tokens(tokens, np.arange(100), rate=0.15, mask_token=MASK, key=(7,))
    assert masked.positions.shape == masked.targets.shape == (400, 15)
    assert all(len(set(row)) == 15 for row in masked.positions.tolist())
    inside = np.take_along_axis(masked.tokens, masked.positions, 1)
    assert np.array_equal(np.take_along_axis(tokens, masked.positions, 1), masked.targets)
    outside = np.ones_like(tokens, bool)
    np.put_along_axis(outside, masked.positions, False, 1)
    assert np.array_equal(masked.tokens[outside], tokens[outside])
    kept, hidden = (inside == masked.targets).mean(), (inside == MASK).mean()
    # 6,000 draws: four standard deviations are 0.02 and 0.016
    assert abs(hidden - 0.8) < 0.02
    assert abs(kept - 0.1) < 0.016
    random = inside[(inside != MASK) & (inside != masked.targets)]
    assert random.min() >= 4
    assert random.max() < MASK
    # every token is as likely, here by tenths of the vocabulary
    tenths = np.histogram(random, bins=10, range=(4, MASK))[0]
    assert abs(tenths - len(random) / 10).max() < 5 * np.sqrt(len(random) / 10)
    # every position is as likely
    counts = np.bincount(masked.positions.ravel(), minlength=100)
    assert abs(counts - 60).max() < 5 * np.sqrt(60)


def test_masks_depend_on_the_key_and_on_nothing_else() -> None:
    tokens = rows(8)
    first, again, other = (
        mask_tokens(tokens, np.arange(100), rate=0.15, mask_token=MASK, key=(key,))
        for key in (1, 1, 2)
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.positions, other.positions)


def test_masked_token_is_indistinguishable_from_another() -> None:
    """At a masked position the input does not depend on the token."""
    tokens = rows(50)
    changed = (tokens - 4 + 1) % (MASK - 4) + 4  # another token everywhere
    one, other = (
        mask_tokens(each, np.arange(100), rate=0.15, mask_token=MASK, key=(3,))
        for each in (tokens, changed)
    )
    hidden = one.tokens == MASK
    assert hidden.any()
    assert np.array_equal(hidden, other.tokens == MASK)
    assert not (one.targets == other.targets).any()


def test_at_least_one_token_is_predicted() -> None:
    assert [predicted_count(length, 0.15) for length in (1, 3, 10, 20)] == [1, 1, 2, 3]


def test_ranks_are_an_order_of_the_predicted_tokens() -> None:
    ranks = factorization_ranks(5, np.array([[3, 0], [1, 4]]))
    assert ranks.tolist() == [[2, 0, 0, 1, 0], [0, 1, 0, 0, 2]]


def test_segments_are_swapped_half_the_time() -> None:
    tokens = np.arange(10, 18).reshape(2, 4)
    joined = join_segments(tokens, np.array([False, True]))
    assert joined.tokens.tolist() == [
        [1, 10, 11, 2, 12, 13, 2],
        [1, 16, 17, 2, 14, 15, 2],
    ]
    assert joined.in_order.tolist() == [1, 0]
    assert np.array_equal(joined.tokens[0, segment_columns(4)], tokens[0])
    assert abs(draw_swaps(4000, 5).mean() - 0.5) < 0.035
