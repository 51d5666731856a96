"""Ordered parallel map over threads."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int, *, run_ahead: bool = False
) -> Iterator[Result]:
    """Apply a function to each item in up to `workers` threads and yield the results in order.

    One worker needs no thread, unless `run_ahead` is set: then it works on an item while the
    consumer handles the one before. An error is raised in the position of its result; an error of
    the iterator after all results. When the consumer stops, items that have not started are
    cancelled.
    """
    source = iter(items)
    if workers <= 1 and not run_ahead:
        yield from map(work, source)
        return
    first = list(itertools.islice(source, 2))
    if len(first) < 2:  # nothing to run in parallel
        yield from map(work, first)
        return
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="dragoman-engine")
    failed: Exception | None = None
    try:
        source = itertools.chain(first, source)
        while True:
            try:
                waiting.append(pool.submit(work, next(source)))
            except StopIteration:
                break
            except Exception as error:  # the iterator failed: yield the results before it first
                failed = error
                break
            if len(waiting) > workers:  # one more than can run, so that no thread is idle
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        if failed is not None:
            raise failed
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
