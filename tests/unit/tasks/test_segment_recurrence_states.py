"""States that segments leave to the next: double-buffered, forgotten at a stream's beginning."""

from __future__ import annotations

import torch

from dragoman.tasks.segment_recurrence_states import SegmentStates

SHAPES = {"hidden": (2, 3)}


def carried(value: float, rows: int = 2) -> dict[str, torch.Tensor]:
    return {"hidden": torch.full((rows, 2, 3), value)}


def test_the_first_segment_reads_zeros_after_any_earlier_state() -> None:
    states = SegmentStates(SHAPES, rows=2)
    streams, first = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    assert not states.read(0, streams, first)["hidden"].any()
    states.write(1, streams, first + 1, carried(float("nan")))  # the last of an epoch
    found = states.read(0, streams, first)["hidden"]
    assert found.shape == (2, 2, 3)
    assert not found.any()


def test_a_segment_reads_the_state_of_the_previous_one() -> None:
    states = SegmentStates(SHAPES, rows=2)
    streams, first = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    states.write(0, streams, first, carried(5.0))
    assert states.read(1, streams, first + 1)["hidden"].eq(5.0).all()
    # Rows of a batch may begin at different times.
    mixed = states.read(1, streams, torch.tensor([1, 0]))["hidden"]
    assert mixed[0].eq(5.0).all()
    assert not mixed[1].any()


def test_computing_a_segment_again_reads_the_same() -> None:
    states = SegmentStates(SHAPES, rows=2)
    streams, first = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    states.write(0, streams, first, carried(5.0))
    before = states.read(1, streams, first + 1)["hidden"].clone()
    states.write(1, streams, first + 1, carried(7.0))
    assert states.read(1, streams, first + 1)["hidden"].equal(before)
    assert states.read(0, streams, first + 2)["hidden"].eq(7.0).all()


def test_nonfinite_states_are_not_carried() -> None:
    states = SegmentStates(SHAPES, rows=2)
    streams, first = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    left = carried(5.0)
    left["hidden"][1, 0] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    states.write(0, streams, first, left)
    found = states.read(1, streams, first + 1)["hidden"]
    assert found[0].eq(5.0).all()
    assert found[1].tolist() == [[0.0, 0.0, 0.0], [5.0, 5.0, 5.0]]
    assert left["hidden"][1, 0].isnan()[0]  # the segment's own tensor is not changed


def test_rows_are_found_by_their_stream() -> None:
    states = SegmentStates(SHAPES, rows=3)
    first = torch.zeros(1, dtype=torch.int64)
    for stream, value in enumerate((1.0, 2.0, 3.0)):
        states.write(0, torch.tensor([stream]), first, carried(value, rows=1))
    found = states.read(1, torch.tensor([2, 0]), torch.ones(2, dtype=torch.int64))["hidden"]
    assert found[:, 0, 0].tolist() == [3.0, 1.0]


def test_the_state_dict_has_the_state_of_the_next_segment() -> None:
    states = SegmentStates(SHAPES, rows=2)
    streams, first = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    assert states.state_dict() == {}
    for segment in range(3):
        states.write(segment % 2, streams, first + segment, carried(float(segment)))
    saved = {name: tensor.clone() for name, tensor in states.state_dict().items()}
    assert saved["segment"].tolist() == [3]
    restored = SegmentStates(SHAPES, rows=2)
    restored.load_state_dict(saved, torch.device("cpu"))
    assert restored.read(1, streams, first + 3)["hidden"].eq(2.0).all()
    assert restored.state_dict()["segment"].tolist() == [3]
