"""Batches of each training step: the same for any number of workers, split over ranks without
loss.
"""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import pytest
from training_kit import Corpus

from dragoman.data.batch_plan import Cursor
from dragoman.training.data_loader import DataLoader, derive_seed

START = Cursor(0, 0)


def make_feed(
    *,
    prefetch: int = 0,
    rank: int = 0,
    ranks: int = 1,
    gradient_accumulation: int = 2,
    collate=None,
) -> DataLoader:
    corpus = Corpus()
    plan = corpus.plan()
    return DataLoader(
        plan=plan,
        collate=collate or corpus.collate(plan),
        gradient_accumulation=gradient_accumulation,
        seed=3,
        rank=rank,
        ranks=ranks,
        prefetch=prefetch,
    )


def take(feed: DataLoader, count: int, number: int = 1, cursor: Cursor = START):
    updates = feed.batches(number, cursor)
    taken = [next(updates) for _ in range(count)]
    updates.close()
    return taken


def test_prefetching_changes_nothing() -> None:
    """Prefetched batches are no state: the plan decides order and position (OpenNMT-py#2006)."""
    for now, ahead in zip(
        take(make_feed(prefetch=0), 40), take(make_feed(prefetch=3), 40), strict=True
    ):
        assert (now.step, now.next_cursor) == (ahead.step, ahead.next_cursor)
        assert [part.micro_index for part in now.micro_batches] == [
            part.micro_index for part in ahead.micro_batches
        ]
        for one, other in zip(now.micro_batches, ahead.micro_batches, strict=True):
            assert one.batch.src.equal(other.batch.src)
            assert one.batch.tgt_out.equal(other.batch.tgt_out)


def test_batches_from_a_cursor_continue_the_epoch() -> None:
    whole = take(make_feed(), 30)
    rest = take(make_feed(), 20, number=11, cursor=whole[9].next_cursor)
    assert [update.step for update in rest] == list(range(11, 31))
    for one, other in zip(whole[10:], rest, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one.examples, other.examples, strict=True))


def test_every_example_occurs_once_per_epoch() -> None:
    corpus = Corpus()
    batches = corpus.plan().batches(0)
    updates = take(make_feed(gradient_accumulation=1), batches)
    seen = np.concatenate([examples for update in updates for examples in update.examples])
    assert sorted(seen.tolist()) == list(range(len(corpus.src)))
    assert updates[-1].next_cursor == Cursor(1, 0)


@pytest.mark.parametrize(
    ("ranks", "gradient_accumulation"), [(2, 2), (2, 3), (3, 1), (4, 2), (4, 8), (5, 2)]
)
def test_ranks_get_every_row_once(ranks: int, gradient_accumulation: int) -> None:
    """Rank r takes slices r, r+W, ….

    With fewer micro-batches than ranks, rows are split over ranks.
    """
    rank_steps = [
        take(make_feed(rank=rank, ranks=ranks, gradient_accumulation=gradient_accumulation), 6)
        for rank in range(ranks)
    ]
    for whole, *parts in zip(
        take(make_feed(gradient_accumulation=gradient_accumulation), 6), *rank_steps, strict=True
    ):
        expected = sorted(int(example) for examples in whole.examples for example in examples)
        got = sorted(
            int(example)
            for part in parts
            for each in part.micro_batches
            for example in each.batch.examples
        )
        assert got == expected
        slots = [
            (each.micro_index, each.split_index) for part in parts for each in part.micro_batches
        ]
        assert len(set(slots)) == len(slots)
        assert all(
            np.array_equal(a, b)
            for part in parts
            for a, b in zip(part.examples, whole.examples, strict=True)
        )


def test_more_ranks_than_rows_leave_some_without_work() -> None:
    rank_steps = [
        take(make_feed(rank=rank, ranks=64, gradient_accumulation=1), 1)[0] for rank in range(64)
    ]
    assert any(not rank_step.micro_batches for rank_step in rank_steps)
    assert all(len(each.batch) == 1 for rank_step in rank_steps for each in rank_step.micro_batches)
    assert sum(
        len(each.batch) for rank_step in rank_steps for each in rank_step.micro_batches
    ) == len(rank_steps[0].examples[0])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_the_background_is_raised_where_it_is_used(prefetch: int) -> None:
    def broken(examples, seed):
        raise OSError("the disk went away")

    updates = make_feed(prefetch=prefetch, collate=broken).batches(1, Cursor(0, 0))
    with pytest.raises(OSError, match="the disk went away"):
        next(updates)


def test_closing_ends_the_thread() -> None:
    updates = make_feed(prefetch=2).batches(1, Cursor(0, 0))
    next(updates)
    assert any(thread.name == "data-loader" for thread in threading.enumerate())
    updates.close()
    assert not any(thread.name == "data-loader" for thread in threading.enumerate())


def test_collate_gets_the_seed_of_its_position() -> None:
    seeds = []
    corpus = Corpus()
    plan = corpus.plan()

    def note(examples, seed):
        seeds.append(seed)
        return corpus.collate(plan)(examples, seed)

    take(make_feed(collate=note, gradient_accumulation=2), 2, number=5)
    assert seeds[:4] == [
        derive_seed(3, 5, 0, "text"),
        derive_seed(3, 5, 1, "text"),
        derive_seed(3, 6, 0, "text"),
        derive_seed(3, 6, 1, "text"),
    ]


def test_seed_is_a_hash_of_the_position() -> None:
    digest = hashlib.sha256(b"1/20/3/0").digest()
    assert derive_seed(1, 20, 3, 0) == int.from_bytes(digest[:8], "big") >> 1
    assert derive_seed(1, 20, 3, "0") == derive_seed(1, 20, 3, 0)


def test_seeds_fit_any_generator_and_are_distinct() -> None:
    seeds = {
        derive_seed(run, step, micro_index, stream)
        for run in (1, 2)
        for step in range(50)
        for micro_index in range(4)
        for stream in ("0", "0.1", "text")
    }
    assert len(seeds) == 2 * 50 * 4 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)
