"""Counter-based random numbers (splitmix64): the same on every machine and NumPy version.

NumPy keeps its bit streams but not its methods stable, and an exact resume must survive an upgrade.
So the order of examples and BPE-dropout use these numbers.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio: splitmix64's increment
_MASK_64 = 0xFFFFFFFFFFFFFFFF


def derive_key(*parts: object, byteorder: Literal["little", "big"] = "little") -> int:
    """Return a 64-bit key hashed from numbers and strings by SHA-256."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], byteorder)


def splitmix64_outputs(key: int, numbers: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return the splitmix64 outputs at these counters (Steele, Lea and Flood, 2014)."""
    state = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(
        key & _MASK_64
    )
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """Return a permutation of `count` numbers, a pure function of the key."""
    return np.argsort(splitmix64_outputs(key, np.arange(count)), kind="stable")


class CounterRNG:
    """Stream of floats in (0, 1]; equal keys give equal streams."""

    BLOCK = 32

    def __init__(self, *key: int | str) -> None:
        self._key = derive_key(*key)
        self._used = 0
        self._block: list[float] = []

    def __call__(self) -> float:
        """Return the next number; never 0, so that its logarithm is finite."""
        if not self._block:
            bits = splitmix64_outputs(
                self._key, np.arange(self._used, self._used + self.BLOCK)
            ) >> np.uint64(11)
            self._used += self.BLOCK
            self._block = ((bits + np.uint64(1)) * 2.0**-53)[::-1].tolist()
        return self._block.pop()
