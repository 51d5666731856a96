"""Generated sets are functions of seed and index, and have their distributions."""

import numpy as np
import pytest

from dragoman.data import synthetic_unordered_sets
from dragoman.data.batch_plan import Cursor
from dragoman.data.synthetic_unordered_sets import (
    PROBLEMS,
    ClusteringProblem,
    MaximumProblem,
    UniqueProblem,
)
from dragoman.data.unordered_set_examples import FileSets, GeneratedPlan, GeneratedSets


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_example_depends_on_seed_and_index_alone(name):
    kind = PROBLEMS[name]
    together = kind(1, part="train").generate(np.arange(20), kind.max_size)
    for width in (kind.max_size, kind.max_size + 5):
        alone = kind(1, part="train").generate(np.array([13]), width)
        np.testing.assert_array_equal(alone.elements[0, : kind.max_size], together.elements[13])
        assert not alone.elements[0, kind.max_size :].any()
        np.testing.assert_array_equal(alone.targets[0], together.targets[13])
    np.testing.assert_array_equal(kind(1, part="train").sizes(np.arange(20)), together.sizes)
    other = kind(2, part="train").generate(np.arange(20), kind.max_size)
    valid = kind(1, part="valid").generate(np.arange(20), kind.max_size)
    assert not np.array_equal(other.elements, together.elements)
    assert not np.array_equal(valid.elements, together.elements)
    padding = np.arange(kind.max_size) >= together.sizes[:, None]
    assert not together.elements[padding].any()


def test_maximum_is_of_one_to_ten_uniform_numbers():
    found = MaximumProblem(1, part="train").generate(np.arange(20_000), 10)
    assert set(found.sizes) == set(range(1, 11))
    np.testing.assert_array_equal(found.targets, found.elements[..., 0].max(axis=1))
    numbers = found.elements[..., 0][np.arange(10) < found.sizes[:, None]]
    assert numbers.min() >= 0
    assert numbers.max() < 100
    assert abs(numbers.mean() - 50) < 0.5
    assert abs(numbers.std() - 100 / 12**0.5) < 0.5


def test_unique_counts_characters_and_parts_share_none(monkeypatch):
    import dragoman.data.synthetic_unordered_sets as module

    shown = []
    monkeypatch.setattr(
        module, "_characters", lambda: np.arange(1500, dtype=np.float32)[:, None, None]
    )

    def note(characters, draws):
        shown.append(characters[..., 0, 0].astype(int))
        return np.zeros((*characters.shape[:2], UniqueProblem.features), np.float32)

    monkeypatch.setattr(module, "_deform", note)
    for part in ("train", "valid"):
        found = UniqueProblem(1, part=part).generate(np.arange(2000), 10)
        assert set(found.sizes) == set(range(6, 11))
        assert set(found.targets) == set(range(1, 11))
        for row, size, count in zip(shown[-1], found.sizes, found.targets, strict=True):
            assert len(set(row[:size])) == count
    assert shown[0].max() < 1000 <= shown[1].min()


def test_clusters_have_the_distribution_of_their_parameters():
    found = ClusteringProblem(1, part="train").generate(np.arange(400), 512)
    assert found.sizes.min() >= 100
    assert found.sizes.max() <= 500
    log_weights, means, deviations = np.split(found.targets, [1, 3], axis=2)
    np.testing.assert_allclose(np.exp(log_weights).sum(axis=1), 1, rtol=1e-5)
    assert 3.9 < np.abs(means).max() <= 4
    assert np.all(deviations == np.float32(0.3))
    residuals = []
    for points, size, centers in zip(found.elements, found.sizes, means, strict=True):
        offsets = points[:size, None] - centers
        nearest = np.square(offsets).sum(axis=2).argmin(axis=1)
        residuals.append(offsets[np.arange(size), nearest])
    # A few points lie nearer to another component's mean.
    assert abs(np.concatenate(residuals).std() - 0.3) < 0.01
    assert abs(found.elements[:, :100].mean()) < 0.2


def test_epochs_differ_and_a_batch_has_one_padded_size():
    store = GeneratedSets(ClusteringProblem(1, part="train"), 300)
    plan = GeneratedPlan(store, batch_tokens=4096, seed=1)
    seen = []
    for epoch in range(2):
        batches = [plan.batch(Cursor(epoch, index)) for index in range(plan.batches(epoch))]
        seen += [np.concatenate(batches)]
        for batch in batches:
            sizes = store.sizes(batch)
            width = store.padded_size(int(sizes.max()))
            assert len(batch) * width <= 4096
            assert sizes.min() > width - 64
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(600))
    again = GeneratedPlan(store, batch_tokens=4096, seed=1)
    np.testing.assert_array_equal(again.batch(Cursor(1, 2)), plan.batch(Cursor(1, 2)))
    other = GeneratedPlan(store, batch_tokens=4096, seed=2)
    order = [other.batch(Cursor(1, index)) for index in range(other.batches(1))]
    assert not np.array_equal(np.concatenate(order), seen[1])
    assert 0 < plan.padding_fraction(0) < 0.3


def test_sets_of_files_are_padded_and_selected():
    sets = [np.ones((size, 2), np.float32) * size for size in (3, 1, 2)]
    store = FileSets(sets, np.array([3, 1, 2], np.float32), features=2)
    arrays = store.arrays(np.array([1, 0]), 3)
    np.testing.assert_array_equal(arrays.sizes, [1, 3])
    np.testing.assert_array_equal(arrays.elements[0], [[1, 1], [0, 0], [0, 0]])
    np.testing.assert_array_equal(arrays.targets, [1, 3])
    assert len(store) == 3
    assert len(store.select([2])) == 1
    assert store.digest != store.select([0, 1]).digest
    np.testing.assert_array_equal(store.select([2]).arrays(np.array([0]), 2).elements[0], 2)


def test_the_digest_of_sets_covers_how_they_are_divided():
    elements, targets = np.arange(12, dtype=np.float32).reshape(6, 2), np.ones(2, np.float32)
    digests = {
        FileSets(np.split(elements, [size]), targets, features=2).digest for size in range(7)
    }
    assert len(digests) == 7
    changed = FileSets(np.split(elements + 1, [3]), targets, features=2)
    assert changed.digest not in digests


def test_the_digest_of_generated_sets_covers_their_parameters():
    stores = [
        GeneratedSets(problem, count)
        for problem in (
            ClusteringProblem(1, part="train"),
            ClusteringProblem(2, part="train"),
            ClusteringProblem(1, part="valid"),
            ClusteringProblem(1, part="train", components=5),
            MaximumProblem(1, part="train"),
        )
        for count in (50, 60)
    ]
    assert len({store.digest for store in stores}) == 10


def test_every_character_fills_the_same_box():
    for character in synthetic_unordered_sets._characters():
        points = character[character[:, 6] > 0, :6].reshape(-1, 2)
        np.testing.assert_allclose(points.min(axis=0), 0.15, atol=1e-4)
        np.testing.assert_allclose(points.max(axis=0), 0.85, atol=1e-4)


def test_selected_generated_sets_have_no_padding():
    store = GeneratedSets(MaximumProblem(1, part="train"), 50)
    examples = np.array([7, 3, 11])
    chosen, whole = store.select(examples), store.arrays(examples, 10)
    np.testing.assert_array_equal(chosen.sizes(np.arange(3)), whole.sizes)
    found = chosen.arrays(np.arange(3), 10)
    np.testing.assert_array_equal(found.elements, whole.elements)
    np.testing.assert_array_equal(found.targets, whole.targets)


def test_a_problem_without_buckets_has_one_padded_size():
    store = GeneratedSets(MaximumProblem(1, part="train"), 50)
    plan = GeneratedPlan(store, batch_tokens=80, seed=1)
    batches = [plan.batch(Cursor(0, index)) for index in range(plan.batches(0))]
    assert sorted(map(len, batches)) == [2, *[8] * 6]  # of ten elements each
    real = store.sizes(np.arange(50)).sum()
    assert plan.padding_fraction(0) == pytest.approx(1 - real / 500)
