"""How many buckets hashing may have; numbers only, so that a configuration is checked without tensors."""

from __future__ import annotations

from typing import NamedTuple

MAX_BUCKETS_PER_HASH = 128  # buckets of one hash; above, two hashes make them


class BucketProblem(NamedTuple):
    """What a number of buckets must be, and what to do."""

    must: str
    fix: str


def factor_buckets(buckets: int) -> tuple[int, ...]:
    """Write a number of buckets as a product of even ones, at most two of them."""
    if buckets <= MAX_BUCKETS_PER_HASH:
        return (buckets,)
    low = max(n for n in range(2, int(buckets**0.5) + 1, 2) if buckets % (2 * n) == 0)
    return low, buckets // low


def default_buckets(length: int, window: int) -> int:
    """Give the paper's number for sequences of a length: half a window of tokens to a bucket."""
    return _round_up_buckets(max(2, 2 * length // window))


def bucket_problem(buckets: int) -> BucketProblem | None:
    """Say what is wrong with a number of buckets, if anything is."""
    if buckets == _round_up_buckets(buckets):
        return None
    if buckets <= MAX_BUCKETS_PER_HASH:
        return BucketProblem(
            "even and at least 2, for each direction has its opposite",
            f"try buckets={_round_up_buckets(buckets)}",
        )
    return BucketProblem(
        f"a multiple of 4 above {MAX_BUCKETS_PER_HASH}, for two hashes make them",
        f"try buckets={_round_up_buckets(buckets)}",
    )


def _round_up_buckets(buckets: int) -> int:
    """Find the next number that can be made."""
    return max(2, buckets + -buckets % (2 if buckets <= MAX_BUCKETS_PER_HASH else 4))
