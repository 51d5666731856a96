"""Sampling of directions by temperature, against its definition."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dragoman.data.batch_plan import Cursor
from dragoman.data.translation_direction_sampling import (
    SampledPlan,
    direction_sizes,
    sample_examples,
)

SIZES = {"de-en": 1000, "en-de": 1000, "fr-en": 90, "en-fr": 0}


class Store(SimpleNamespace):
    """Lengths and directions, as a token store has them."""

    def __len__(self) -> int:
        return len(self.src_lengths)


def build_store(sizes: dict[str, int]) -> Store:
    ends = np.cumsum(list(sizes.values()))
    total = int(ends[-1])
    draw = np.random.default_rng(3)
    return Store(
        src_lengths=draw.integers(1, 30, total),
        tgt_lengths=draw.integers(1, 30, total),
        direction_examples=lambda: {
            name: np.arange(end - size, end)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        },
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0, 1000.0])
def test_directions_are_in_proportion_to_their_sizes_to_the_power(temperature: float) -> None:
    found = direction_sizes(SIZES, temperature)
    weights = {name: size ** (1 / temperature) if size else 0.0 for name, size in SIZES.items()}
    for name in SIZES:
        expected = weights[name] / sum(weights.values())
        assert found[name] / sum(found.values()) == pytest.approx(expected, abs=1e-3)
    assert found["de-en"] == 1000


def test_every_pair_is_there_and_small_directions_are_repeated_evenly() -> None:
    made = build_store(SIZES)
    examples = sample_examples(made, 5.0, seed=1)
    counts = Counter(examples.tolist())
    assert set(counts) == set(range(len(made)))
    assert {counts[each] for each in range(2000)} == {1}
    repeats = {counts[each] for each in range(2000, 2090)}
    assert repeats == {6, 7}
    assert sum(counts[each] for each in range(2000, 2090)) == direction_sizes(SIZES, 5.0)["fr-en"]
    assert np.array_equal(examples, sample_examples(made, 5.0, seed=1))
    assert not np.array_equal(examples, sample_examples(made, 5.0, seed=2))
    assert np.array_equal(sample_examples(made, 1.0, seed=1), np.arange(len(made)))


def test_directions_of_one_size_repeat_pairs_of_their_own_choice() -> None:
    """Both directions of a file pair repeating the same lines would see fewer sentences."""
    made = build_store({"de-en": 1000, "fr-en": 90, "en-fr": 90})
    counts = np.bincount(sample_examples(made, 5.0, seed=1))
    assert counts[1000:1090].sum() == counts[1090:].sum()
    assert not np.array_equal(counts[1000:1090], counts[1090:])


def test_a_plan_has_the_examples_as_often_as_given() -> None:
    made = build_store(SIZES)
    examples = sample_examples(made, 2.0, seed=1)
    plan = SampledPlan(made, examples, batch_tokens=400, seed=1)
    epoch = plan.epoch(3)
    assert Counter(np.concatenate(epoch).tolist()) == Counter(examples.tolist())
    assert plan.examples == len(examples)
    assert len(epoch) == plan.batches(3)
    assert all(
        np.array_equal(plan.batch(Cursor(3, number)), batch) for number, batch in enumerate(epoch)
    )
    assert 0 <= plan.padding_fraction(0) < 0.5
    longest = np.maximum(made.src_lengths, made.tgt_lengths) + 1
    assert all(len(batch) * longest[batch].max() <= 400 for batch in epoch)
    other = SampledPlan(made, examples, batch_tokens=400, seed=2)
    assert not np.array_equal(np.concatenate(other.epoch(3)), np.concatenate(epoch))
