"""Batches that do not fit in memory: halved, remembered, and a single row by a fallback."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dragoman.runtime.out_of_memory import BatchHalving


class Machine:
    """Runs batches of at most `most` rows, and remembers the sizes that it was given."""

    def __init__(self, most: int) -> None:
        self.most, self.sizes = most, list[int]()

    def run(self, batch: Sequence[int]) -> list[int]:
        self.sizes.append(len(batch))
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [each * each for each in batch]


def test_a_batch_is_halved_and_its_size_is_remembered() -> None:
    machine, halving, failed = Machine(2), BatchHalving(), list[int]()
    for _ in range(2):
        found = halving.run(
            range(7),
            machine.run,
            padded_tokens=lambda rows: 10 * len(rows),
            on_halving=failed.append,
        )
        assert found == [0, 1, 4, 9, 16, 25, 36]
    assert failed == [7, 3]
    # The second time nothing fails: 7 and 4 rows are more than 0.8 times the 3 that failed.
    assert machine.sizes == [7, 3, 1, 2, 2, 2, 1, 2, 2, 2]


def test_a_single_row_is_run_by_the_fallback_or_raises() -> None:
    machine, halving = Machine(0), BatchHalving()
    found = halving.run(
        [3, 4], machine.run, padded_tokens=len, fallback=lambda rows: [-each for each in rows]
    )
    assert found == [-3, -4]
    with pytest.raises(torch.OutOfMemoryError):
        halving.run([3], machine.run, padded_tokens=len)
    with pytest.raises(torch.OutOfMemoryError):
        halving.run(
            [3, 4],
            machine.run,
            padded_tokens=len,
            fallback=lambda rows: list(rows),
            can_fall_back=lambda: False,
        )


def test_other_errors_are_raised_at_once() -> None:
    calls = list[int]()

    def run(batch: Sequence[int]) -> list[int]:
        calls.append(len(batch))
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        BatchHalving().run([1, 2], run, padded_tokens=len, fallback=lambda rows: list(rows))
    assert calls == [2]


def test_the_limit_is_four_fifths_of_the_failed_size_and_is_not_split() -> None:
    machine, halving = Machine(90), BatchHalving()
    halving.run(range(100), machine.run, padded_tokens=len)
    assert halving.max_tokens == 80
    assert machine.sizes == [100, 50, 50]
    for count in (80, 81):
        machine.sizes.clear()
        assert len(halving.run(range(count), machine.run, padded_tokens=len)) == count
        assert machine.sizes == ([80] if count == 80 else [40, 41])


def test_a_batch_that_fits_needs_no_fallback() -> None:
    machine, queries = Machine(1), list[bool]()
    found = BatchHalving().run(
        [1, 2],
        machine.run,
        padded_tokens=len,
        fallback=lambda rows: [0] * len(rows),
        can_fall_back=lambda: bool(queries.append(True)),
    )
    assert found == [1, 4]
    assert queries == []
