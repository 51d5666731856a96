"""Sampling of translation directions by a temperature, as a batch plan that repeats pairs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dragoman.data.batch_plan import BatchPlan, Cursor
from dragoman.data.bucket_shapes import BatchShape
from dragoman.data.token_store import TokenStore
from dragoman.runtime.counter_rng import derive_key, permutation


def direction_sizes(sizes: Mapping[str, int], temperature: float) -> dict[str, int]:
    r"""Return the pairs of each direction in an epoch.

    .. math:: m_d = \max_{d'} n_{d'} \cdot
        \left(\frac{n_d}{\max_{d'} n_{d'}}\right)^{1/T}

    Directions are then sampled in proportion to n^(1/T), Arivazhagan et al. (2019), and the largest
    has every pair once.
    """
    largest = max(sizes.values())
    return {
        name: round(largest * (size / largest) ** (1 / temperature)) if size else 0
        for name, size in sizes.items()
    }


def sample_examples(store: TokenStore, temperature: float, seed: int) -> NDArray[np.int64]:
    """Return the pairs of an epoch, in order: each at least once, of small directions more often.

    A pair is repeated as often as the others of its direction, or once more by a random choice.
    """
    examples = store.direction_examples()
    sizes = direction_sizes({name: len(each) for name, each in examples.items()}, temperature)
    chosen = [np.arange(len(store), dtype=np.int64)]
    for name, own in examples.items():
        if not len(own):
            continue
        copies, rest = divmod(sizes[name] - len(own), len(own))
        order = permutation(derive_key(seed, "directions", name), len(own))
        chosen += [own] * copies + [own[order[:rest]]]
    return np.sort(np.concatenate(chosen))


class SampledPlan:
    """A batch plan over some examples of a store, any of which may be there several times."""

    def __init__(
        self, store: TokenStore, examples: NDArray[np.int64], *, batch_tokens: int, seed: int
    ) -> None:
        self._examples = examples
        self._plan = BatchPlan(
            store.src_lengths[examples],
            store.tgt_lengths[examples],
            batch_tokens=batch_tokens,
            seed=seed,
        )

    @property
    def examples(self) -> int:
        """The number of pairs per epoch, repeated ones included."""
        return self._plan.examples

    @property
    def shapes(self) -> list[BatchShape]:
        """The shapes that batches are padded to."""
        return self._plan.shapes

    def batches(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch."""
        return self._plan.batches(epoch)

    def epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return an epoch's micro-batches as arrays of pair indices."""
        return [self._examples[each] for each in self._plan.epoch(epoch)]

    def batch(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return the pairs of one micro-batch."""
        return self._examples[self._plan.batch(cursor)]

    def padding_fraction(self, epoch: int) -> float:
        """Return the fraction of padding tokens in an epoch."""
        return self._plan.padding_fraction(epoch)
