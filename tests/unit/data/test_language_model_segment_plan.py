"""Segments of a language model: each once per epoch, in order where states are carried."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman.data.batch_plan import Cursor
from dragoman.data.language_model_segment_plan import SegmentPlan
from dragoman.errors import DataError


def located(plan: SegmentPlan, epoch: int) -> list[int]:
    """Return where the segments of an epoch begin, in order."""
    return [
        int(start)
        for number in range(plan.batches(epoch))
        for start in plan.locate(plan.batch(Cursor(epoch, number))).starts
    ]


def build(*, seed: int = 1, carried: bool = False) -> SegmentPlan:
    return SegmentPlan(103, segment=7, batch_tokens=30, seed=seed, carried=carried)


def test_every_segment_is_in_one_batch_of_an_epoch() -> None:
    plan = build()
    assert (plan.rows, plan.examples, plan.batches(0)) == (4, 14, 4)
    sizes = [len(plan.batch(Cursor(1, number))) for number in range(4)]
    assert sizes == [4, 4, 4, 2]
    for epoch in range(2):
        starts = located(plan, epoch)
        assert sorted(starts) == list(range(min(starts), min(starts) + 14 * 7, 7))
        assert starts != sorted(starts)
        assert 0 <= min(starts) < 103


def test_epochs_and_seeds_begin_elsewhere_in_another_order() -> None:
    plan = build()
    epochs = [located(plan, epoch) for epoch in range(4)]
    epochs.append(located(build(seed=2), 0))
    assert len({min(starts) for starts in epochs}) > 1
    orders = {tuple(np.argsort(starts).tolist()) for starts in epochs}
    assert len(orders) == 5
    assert located(plan, 0) == epochs[0] == located(build(), 0)


def test_carried_segments_continue_their_rows_to_the_end() -> None:
    plan = build(carried=True)
    assert (plan.rows, plan.row_length, plan.batches(0), plan.examples) == (4, 25, 4, 16)
    spans = [plan.locate(plan.batch(Cursor(2, number))) for number in range(4)]
    assert [span.length for span in spans] == [7, 7, 7, 4]
    for number, span in enumerate(spans):
        assert span.streams.tolist() == [0, 1, 2, 3]
        assert span.segments.tolist() == [number] * 4
        assert (span.starts - spans[0].starts).tolist() == [7 * number] * 4
    assert np.diff(spans[0].starts).tolist() == [25] * 3
    offsets = {
        int(build(seed=seed, carried=True).locate(np.array([16 * epoch])).starts[0])
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(offsets) == 4


def test_short_texts_are_one_segment_and_too_short_ones_an_error() -> None:
    plan = SegmentPlan(5, segment=7, batch_tokens=30, seed=1, carried=False)
    assert (plan.segment, plan.rows, plan.examples, plan.batches(0)) == (5, 1, 1, 1)
    with pytest.raises(DataError, match="at least 2 tokens of text; found 1"):
        SegmentPlan(1, segment=7, batch_tokens=30, seed=1, carried=False)
