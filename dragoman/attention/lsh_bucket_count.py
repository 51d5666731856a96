"""Valid and default numbers of LSH buckets; hashing is in `ops/lsh_attention.py`.

Importing it needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_BUCKETS_PER_HASH = 128  # more are combined from two hashes


class BucketProblem(NamedTuple):
    """The rule that a number of buckets breaks, and how to fix it."""

    must: str
    fix: str


def factor_buckets(buckets: int) -> tuple[int, ...]:
    """Return one or two even factors of a number of buckets, one for each hash."""
    if buckets <= MAX_BUCKETS_PER_HASH:
        return (buckets,)
    low = max(n for n in range(2, int(buckets**0.5) + 1, 2) if buckets % (2 * n) == 0)
    return low, buckets // low


def default_buckets(length: int, window: int) -> int:
    """Return the paper's number of buckets for a length: half a window of tokens in each."""
    return _round_up_buckets(max(2, 2 * length // window))


def bucket_problem(buckets: int) -> BucketProblem | None:
    """Return the problem with a number of buckets, or None."""
    if buckets == _round_up_buckets(buckets):
        return None
    if buckets <= MAX_BUCKETS_PER_HASH:
        return BucketProblem(
            "even and at least 2, because each direction has an opposite",
            f"try buckets={_round_up_buckets(buckets)}",
        )
    return BucketProblem(
        f"a multiple of 4 above {MAX_BUCKETS_PER_HASH}, because two hashes are combined",
        f"try buckets={_round_up_buckets(buckets)}",
    )


def _round_up_buckets(buckets: int) -> int:
    """Return the next valid number of buckets."""
    return max(2, buckets + -buckets % (2 if buckets <= MAX_BUCKETS_PER_HASH else 4))
