"""Spreading work over threads while keeping its order."""

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
    """Do the work on each item in up to `workers` threads and give the results in order.

    One worker needs no thread, unless it is to go `ahead`: then it works on an item while its listener is busy with the one before.
    An error comes out where its result would have; one of the items' own comes after all results.
    Whoever stops listening stops the work: what has not begun never does.
    """
    source = iter(items)
    if workers <= 1 and not run_ahead:
        yield from map(work, source)
        return
    first = list(itertools.islice(source, 2))
    if len(first) < 2:  # nobody to be beside
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
            except (
                Exception
            ) as error:  # the items ended badly: what was given before is answered first
                failed = error
                break
            if len(waiting) > workers:  # one more than can run, so that none waits for us
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        if failed is not None:
            raise failed
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
