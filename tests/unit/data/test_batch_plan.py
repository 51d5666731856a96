"""The batch plan: every pair once an epoch, few shapes, little padding, a deterministic order."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.config.root_config import TextConfig
from dragoman.data import bucket_shapes
from dragoman.data.batch_plan import BatchPlan, Cursor, plan_step, smallest_fitting_shape
from dragoman.data.bucket_shapes import (
    MAX_SHAPES,
    BatchShape,
    LengthCounts,
    ShapeAllocation,
    allocate_batches,
    assign_shapes,
    choose_shapes,
)
from dragoman.errors import DataError
from dragoman.runtime.counter_rng import splitmix64_outputs
from dragoman.text.sentencepiece_tokenizer import train_tokenizers

DATA = Path(
    os.environ.get("DRAGOMAN_DATA", Path(__file__).resolve().parents[4] / "shared" / "data")
)
needs_data = pytest.mark.skipif(
    not (DATA / "multi30k").is_dir(), reason=f"no corpora at {DATA} (set DRAGOMAN_DATA)"
)


def lengths(count: int, seed: int = 0, most: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Lengths like those of a corpus: the two sides go together, loosely."""
    base = splitmix64_outputs(seed, np.arange(count)) % np.uint64(most) + np.uint64(1)
    src = base + splitmix64_outputs(seed + 1, np.arange(count)) % np.uint64(5)
    tgt = base + splitmix64_outputs(seed + 2, np.arange(count)) % np.uint64(7)
    return src.astype(np.uint16), tgt.astype(np.uint16)


def plan_of(count: int, *, batch_tokens: int = 500, seed: int = 1, **options: int) -> BatchPlan:
    return BatchPlan(*lengths(count), batch_tokens=batch_tokens, seed=seed, **options)


def as_lists(batches: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=200),
    batch_tokens=st.integers(16, 400),
    window=st.integers(1, 4),
)
def test_every_pair_is_in_exactly_one_batch_within_the_budget(
    sizes: list[tuple[int, int]], batch_tokens: int, window: int
) -> None:
    """The budget counts padded tokens; a longer pair forms a batch of its own (OpenNMT-py#1161)."""
    src, tgt = (np.array(side) for side in zip(*sizes, strict=True))
    plan = BatchPlan(src, tgt, batch_tokens=batch_tokens, seed=3, block=16, window=window)
    for epoch in (0, 1):
        batches = plan.epoch(epoch)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
        assert len(batches) == plan.batches(epoch)
        for batch in batches:
            shape = plan.shape(batch)
            assert shape.src > src[batch].max()
            assert shape.tgt > tgt[batch].max()
            assert len(batch) * max(shape) <= batch_tokens or len(batch) == 1


def test_order_is_a_pure_function_of_seed_and_epoch() -> None:
    """A resumed run reads the same batches (joeynmt#125, #172; OpenNMT-py#2006;
    transformers#11323)."""
    first, second = plan_of(2000), plan_of(2000)
    assert as_lists(first.epoch(3)) == as_lists(second.epoch(3))
    assert as_lists(first.epoch(3)) != as_lists(first.epoch(4))
    assert as_lists(first.epoch(3)) != as_lists(plan_of(2000, seed=2).epoch(3))


def test_order_never_changes_between_releases() -> None:
    plan = BatchPlan(
        np.array([3, 5, 4, 9, 3, 6]), np.array([4, 4, 5, 8, 3, 6]), batch_tokens=20, seed=7
    )
    assert as_lists(plan.epoch(0)) == [[3], [4, 0], [2, 1], [5]]
    assert as_lists(plan.epoch(1)) == [[5], [3], [1, 2], [4, 0]]


def test_batches_differ_between_epochs() -> None:
    plan = plan_of(3000)
    partners = [{frozenset(batch.tolist()) for batch in plan.epoch(epoch)} for epoch in range(3)]
    assert len(partners[0] & partners[1]) < len(partners[0]) / 20


def test_lengths_are_mixed_over_an_epoch() -> None:
    """No drift from short to long: each quarter of an epoch has the whole's mean length."""
    plan = plan_of(20_000)
    src, _ = lengths(20_000)
    batches = plan.epoch(0)
    quarter = len(batches) // 4
    means = [
        float(np.mean(src[np.concatenate(batches[at : at + quarter])]))
        for at in range(0, 4 * quarter, quarter)
    ]
    assert max(means) - min(means) < 0.25 * float(src.mean())


@pytest.mark.parametrize("batch_tokens", [300, 1000, 4000])
def test_shapes_are_few_and_all_from_the_plan(batch_tokens: int) -> None:
    plan = plan_of(20_000, batch_tokens=batch_tokens)
    used = {plan.shape(batch) for epoch in range(3) for batch in plan.epoch(epoch)}
    assert used <= set(plan.shapes)
    assert len(plan.shapes) <= MAX_SHAPES


def test_the_number_of_shapes_can_be_chosen() -> None:
    fractions = []
    for most in (1, 4, 16):
        plan = plan_of(20_000, max_shapes=most)
        assert len(plan.shapes) <= most
        fractions.append(plan.padding_fraction(0))
    assert fractions[0] > fractions[1] > fractions[2]


def test_padding_fraction_counts_both_sides() -> None:
    plan = BatchPlan(np.array([3, 3, 1]), np.array([3, 3, 3]), batch_tokens=100, seed=0)
    assert plan.shapes == [BatchShape(4, 4)]
    assert plan.padding_fraction(0) == pytest.approx(1 - 22 / 24)


def test_less_than_a_third_of_a_batch_is_passed_to_a_larger_shape() -> None:
    src = np.array([9] * 21 + [19] * 14)
    plan = BatchPlan(src, src, batch_tokens=100, seed=0)
    assert plan.shapes == [BatchShape(10, 10), BatchShape(20, 20)]
    batches = sorted((len(batch), plan.shape(batch).src) for batch in plan.epoch(0))
    # Two full batches of the small shape; the 21st short pair fills up the large one's last batch.
    assert batches == [(5, 20), (5, 20), (5, 20), (10, 10), (10, 10)]


def test_a_third_of_a_batch_stays_one() -> None:
    src = np.array([9] * 24 + [19] * 15)
    plan = BatchPlan(src, src, batch_tokens=100, seed=0)
    batches = sorted((len(batch), plan.shape(batch).src) for batch in plan.epoch(0))
    assert batches == [(4, 10), (5, 20), (5, 20), (5, 20), (10, 10), (10, 10)]


def test_remainders_pass_to_larger_shapes() -> None:
    shapes = [BatchShape(10, 10), BatchShape(12, 8), BatchShape(20, 20)]
    # 2 of 10 pass the shape that is too low for them: 5 + 2 pairs fill one batch of 5 and leave 2.
    assert allocate_batches(shapes, [12, 8, 5], 100) == [
        ShapeAllocation(1, 2, 2),
        ShapeAllocation(1, 0, -1),
        ShapeAllocation(2, 0, -1),
    ]
    assert allocate_batches(shapes, [0, 1, 0], 100) == [
        ShapeAllocation(0, 0, -1),
        ShapeAllocation(0, 1, 2),
        ShapeAllocation(1, 0, -1),
    ]


def test_long_pairs_form_their_own_batches() -> None:
    """A very long sentence neither ends the run nor widens other batches.

    See OpenNMT-py#1161 and fairseq#1191.
    """
    src, tgt = lengths(500)
    src[7], tgt[100] = 3000, 901
    plan = BatchPlan(src, tgt, batch_tokens=400, seed=1)
    alone = {
        int(batch[0]): plan.shape(batch)
        for batch in plan.epoch(0)
        if len(batch) == 1 and int(batch[0]) in (7, 100)
    }
    assert alone[7].src == 3008
    assert alone[100].tgt == 904
    assert max(max(shape) for shape in plan.shapes) <= 400


def test_only_long_pairs() -> None:
    plan = BatchPlan(np.array([50, 60]), np.array([50, 60]), batch_tokens=16, seed=1)
    assert plan.shapes == []
    assert sorted(as_lists(plan.epoch(0))) == [[0], [1]]


def test_one_pair() -> None:
    plan = BatchPlan(np.array([1]), np.array([1]), batch_tokens=100, seed=1)
    assert as_lists(plan.epoch(0)) == [[0]]
    assert plan.padding_fraction(0) == 0
    assert plan.examples == 1


def test_a_plan_needs_pairs() -> None:
    with pytest.raises(DataError, match="found 0 and 0 lengths"):
        BatchPlan(np.zeros(0, int), np.zeros(0, int), batch_tokens=10, seed=0)
    with pytest.raises(DataError, match="found 2 and 3 lengths"):
        BatchPlan(np.ones(2, int), np.ones(3, int), batch_tokens=10, seed=0)


def windowed(count: int = 5000) -> BatchPlan:
    return plan_of(count, block=256, window=4)


def test_windows_contain_every_pair_once_and_change_with_the_epoch() -> None:
    plan = windowed()
    for epoch in range(3):
        batches = plan.epoch(epoch)
        assert sorted(np.concatenate(batches).tolist()) == list(range(5000))
        assert plan.batches(epoch) == len(batches)
    firsts = [set(np.concatenate(plan.epoch(epoch)[:40]).tolist()) for epoch in range(2)]
    assert len(firsts[0] & firsts[1]) < 0.6 * len(firsts[0])


@pytest.mark.parametrize("make", [windowed, plan_of])
def test_batch_equals_the_batch_of_the_epoch(make) -> None:
    plan = make(5000)
    for epoch in (0, 2):
        batches = plan.epoch(epoch)
        for index in (0, len(batches) // 2, len(batches) - 1, 1):
            assert plan.batch(Cursor(epoch, index)).tolist() == batches[index].tolist()
    with pytest.raises(
        IndexError, match=f"epoch 0 has {plan.batches(0)} batches; found number 99999"
    ):
        plan.batch(Cursor(0, 99_999))


def test_only_the_window_in_use_is_planned() -> None:
    plan = windowed()
    plan.batch(Cursor(0, 0))
    plan.batch(Cursor(0, plan.batches(0) - 1))
    plan.batch(Cursor(1, 0))
    assert len(plan._planned_batches) == 1
    held = sum(len(batch) for batches in plan._planned_batches.values() for batch in batches)
    assert held <= 4 * 256


def test_windows_cost_little_padding() -> None:
    assert windowed(20_000).padding_fraction(0) < plan_of(20_000).padding_fraction(0) + 0.03


@pytest.mark.parametrize("gradient_accumulation", [1, 3, 7])
def test_steps_continue_over_epochs_without_loss(gradient_accumulation: int) -> None:
    plan = plan_of(400)
    per_epoch = plan.batches(0)
    expected = as_lists(plan.epoch(0)) + as_lists(plan.epoch(1)) + as_lists(plan.epoch(2))
    cursor, seen = Cursor(0, 0), []
    while len(seen) < 2 * per_epoch:
        update = plan_step(plan, cursor, gradient_accumulation)
        seen += as_lists(update.batches)
        cursor = update.cursor
    assert seen == expected[: len(seen)]


def test_a_resumed_run_continues_exactly() -> None:
    """The cursor is two numbers; nothing else is needed (mammoth#63, accelerate#4071)."""
    plan = plan_of(400)
    cursor = Cursor(0, 0)
    whole = []
    cursors = [cursor]
    for _ in range(40):
        batches, cursor = plan_step(plan, cursor, 2)
        whole.append(as_lists(batches))
        cursors.append(cursor)
    for stop in (0, 1, 13, 39):
        cursor = Cursor(*json_round_trip(cursors[stop]))
        fresh = plan_of(400)
        for expected in whole[stop:]:
            batches, cursor = plan_step(fresh, cursor, 2)
            assert as_lists(batches) == expected


def json_round_trip(cursor: Cursor) -> list[int]:
    import json

    return json.loads(json.dumps(cursor))


def test_the_cursor_moves_on_when_an_epoch_is_used_up() -> None:
    plan = plan_of(50)
    end = plan_step(plan, Cursor(0, 0), plan.batches(0))
    assert end.cursor == Cursor(1, 0)
    assert plan_step(plan, Cursor(0, plan.batches(0)), 1).cursor.epoch in (1, 2)


def test_lengths_are_counted_in_chunks() -> None:
    src, tgt = lengths(1000)
    whole, chunked = LengthCounts.of(src, tgt), LengthCounts.of(src, tgt, chunk=77)
    for one, other in zip(whole, chunked, strict=True):
        assert one.tolist() == other.tolist()
    assert int(whole.counts.sum()) == 1000
    assert whole.src.min() == src.min() + 1


def test_shapes_cover_every_pair_and_come_sorted() -> None:
    src, tgt = lengths(3000, most=150)
    shapes = choose_shapes(LengthCounts.of(src, tgt), batch_tokens=2000)
    assert shapes == sorted(shapes, key=lambda shape: (sum(shape), shape))
    chosen = assign_shapes(shapes, src.astype(np.int64) + 1, tgt.astype(np.int64) + 1)
    assert chosen.max() < len(shapes)
    for at in range(0, 3000, 97):
        fits = [shape for shape in shapes if shape.src > src[at] and shape.tgt > tgt[at]]
        assert sum(shapes[chosen[at]]) == min(map(sum, fits))


def test_thousands_of_distinct_lengths_stay_quick_and_covered() -> None:
    count = 30_000
    src = (splitmix64_outputs(5, np.arange(count)) % np.uint64(5000)).astype(np.int64)
    tgt = (splitmix64_outputs(6, np.arange(count)) % np.uint64(5000)).astype(np.int64)
    shapes = choose_shapes(LengthCounts.of(src, tgt), batch_tokens=60_000)
    assert len(shapes) <= MAX_SHAPES
    assert assign_shapes(shapes, src + 1, tgt + 1).max() < len(shapes)


def test_a_batch_without_a_shape_is_rounded_up() -> None:
    assert smallest_fitting_shape([BatchShape(4, 4), BatchShape(9, 4)], 3, 4) == BatchShape(4, 4)
    assert smallest_fitting_shape([BatchShape(4, 4), BatchShape(9, 4)], 5, 2) == BatchShape(9, 4)
    assert smallest_fitting_shape([BatchShape(4, 4)], 5, 9) == BatchShape(8, 16)


def test_rows_of_a_shape_stay_within_the_budget() -> None:
    assert BatchShape(10, 25).rows(100) == 4
    assert BatchShape(10, 250).rows(100) == 1


@pytest.fixture(scope="module")
def multi30k() -> tuple[np.ndarray, np.ndarray]:
    sides = []
    for name in ("train.de.xz", "train.en.xz"):
        with lzma.open(DATA / "multi30k" / name) as file:
            sides.append(file.read().decode().split("\n")[:-1])
    made = train_tokenizers(*sides, TextConfig(vocab_size=8000))
    src, tgt = (
        np.array([len(row) for row in made.src.encode_batch(side)], np.uint16) for side in sides
    )
    return src, tgt


@needs_data
@pytest.mark.parametrize("batch_tokens", [2500, 6000, 25600])
def test_multi30k_is_padded_by_less_than_six_percent(
    multi30k: tuple[np.ndarray, np.ndarray], batch_tokens: int
) -> None:
    """Also where an epoch is two dozen batches, and no more than a few of a shape."""
    plan = BatchPlan(*multi30k, batch_tokens=batch_tokens, seed=1)
    for epoch in (0, 1, 7):
        assert plan.padding_fraction(epoch) < 0.06
        assert len({plan.shape(batch) for batch in plan.epoch(epoch)}) <= MAX_SHAPES


@needs_data
@pytest.mark.parametrize(("batch_tokens", "fraction"), [(2500, 0.9), (25600, 0.65)])
def test_multi30k_batches_are_mostly_full(
    multi30k: tuple[np.ndarray, np.ndarray], batch_tokens: int, fraction: float
) -> None:
    plan = BatchPlan(*multi30k, batch_tokens=batch_tokens, seed=1)
    batches = plan.epoch(0)
    filled = [len(batch) * max(plan.shape(batch)) / batch_tokens for batch in batches]
    assert np.mean(filled) > fraction
    assert sum(part < 1 / 3 for part in filled) <= 2  # of shapes that have none above


@pytest.mark.parametrize("batch_tokens", [300, 3000])
def test_epoch_cost_equals_that_of_the_plan(batch_tokens: int) -> None:
    src, tgt = lengths(3000)
    plan = BatchPlan(src, tgt, batch_tokens=batch_tokens, seed=1)
    batches = plan.epoch(0)
    numbers = [
        plan._assign(batch).max() for batch in batches
    ]  # a batch is padded to the largest of its pairs' shapes
    slots = sum(
        len(batch) * sum(plan.shapes[number])
        for batch, number in zip(batches, numbers, strict=True)
    )
    expected = slots + 2 * batch_tokens * len(batches) // bucket_shapes.STEP_COST_DIVISOR
    assert bucket_shapes._epoch_cost(plan.shapes, LengthCounts.of(src, tgt), batch_tokens) == (
        expected,
        len(batches),
    )


def test_adjusting_shapes_never_raises_the_cost() -> None:
    src, tgt = lengths(600, most=60)
    found = LengthCounts.of(src, tgt)
    before = [
        BatchShape(int(found.src.max()), int(found.tgt.max())),
        BatchShape(31, 30),
        BatchShape(30, 31),
        BatchShape(12, 12),
    ]
    after = bucket_shapes._adjust_for_epoch(before, found, 2000)
    assert (
        bucket_shapes._epoch_cost(after, found, 2000)[0]
        < bucket_shapes._epoch_cost(before, found, 2000)[0]
    )
    assert assign_shapes(bucket_shapes._sort_shapes(after), found.src, found.tgt).max() < len(after)
    assert bucket_shapes._epoch_cost([BatchShape(12, 12)], found, 2000) == (
        bucket_shapes.INFINITE_COST,
        0,
    )
    assert bucket_shapes._epoch_cost([], found, 2000) == (bucket_shapes.INFINITE_COST, 0)


def test_remainders_of_large_corpora_do_not_change_shapes() -> None:
    found = LengthCounts.of(*lengths(20_000))
    shapes = [BatchShape(20, 22), found.bounding_shape()]
    assert bucket_shapes._adjust_for_epoch(shapes, found, 300) == shapes
