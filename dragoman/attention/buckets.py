"""How many buckets hashing may have; numbers only, so that a configuration is checked without tensors."""

from __future__ import annotations

from typing import NamedTuple

MOST_AT_ONCE = 128  # buckets of one hash; above, two hashes make them


class Problem(NamedTuple):
    """What a number of buckets must be, and what to do."""

    must: str
    fix: str


def factors(buckets: int) -> tuple[int, ...]:
    """Write a number of buckets as a product of even ones, at most two of them."""
    if buckets <= MOST_AT_ONCE:
        return (buckets,)
    low = max(n for n in range(2, int(buckets**0.5) + 1, 2) if buckets % (2 * n) == 0)
    return low, buckets // low


def suggested(length: int, window: int) -> int:
    """Give the paper's number for sequences of a length: half a window of tokens to a bucket."""
    return _allowed(max(2, 2 * length // window))


def problem(buckets: int) -> Problem | None:
    """Say what is wrong with a number of buckets, if anything is."""
    if buckets == _allowed(buckets):
        return None
    if buckets <= MOST_AT_ONCE:
        return Problem("even and at least 2, for each direction has its opposite", f"try buckets={_allowed(buckets)}")
    return Problem(f"a multiple of 4 above {MOST_AT_ONCE}, for two hashes make them", f"try buckets={_allowed(buckets)}")


def _allowed(buckets: int) -> int:
    """Find the next number that can be made."""
    return max(2, buckets + -buckets % (2 if buckets <= MOST_AT_ONCE else 4))
