"""Cut the JSON form of an explanation to a budget of bytes, and record what was cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dragoman.errors import DataError
from dragoman.explain.explanation import Array, Explanation, HeadSummary
from dragoman.explain.explanation_json import (
    BEAM_FIELDS,
    DTYPES,
    Pool,
    all_arrays,
    dump_json,
    encode_parts,
    encode_tensor,
    fixed_dtype,
    integer_dtype,
    is_exact,
    pool_edges,
    pool_matrix,
)

EXACT_HEADS = 8  # heads kept exact beside pooled matrices, if they fit
MIN_GROUPS = 16  # a matrix is not pooled to fewer groups per axis unless nothing else helps


def encode_explanation(explanation: Explanation, budget: int | None) -> dict[str, Any]:
    """Return an explanation as JSON values in at most `budget` bytes; None for no limit."""
    form = EncodedExplanation(explanation, budget)
    if budget is not None:
        form.fit(budget)
    return form.encode()


class EncodedExplanation:
    """The JSON form of one explanation while it is cut to a budget.

    It is cut in this order until it fits: contribution norms; pooled matrices, with the smallest
    factor; stored branches and ablations; the similarity of positions; extras; pooled attributions;
    nodes of the beam; the lens; all but three runners-up of each step.
    """

    def __init__(self, explanation: Explanation, budget: int | None) -> None:
        self._explanation = explanation
        self.parts = encode_parts(explanation)
        self.parts["digest"] = explanation.digest
        self.arrays = all_arrays(explanation)
        self.pools = dict(explanation.pools)
        self.limits: dict[str, Any] = {
            "budget": budget,
            "bytes": 0,
            "pooled": [],
            "dropped": [],
            "exact": [],
            "factor": 1,
        }

    def encode(self) -> dict[str, Any]:
        """Return the JSON values, with their number of bytes in `limits`."""
        values = self.parts | {
            "tensors": {
                name: encode_tensor(array, pool=self.pools.get(name), dtype=fixed_dtype(name))
                for name, array in self.arrays.items()
            },
            "limits": self.limits,
        }
        for _ in range(3):  # the number of bytes is itself written
            self.limits["bytes"] = len(dump_json(values).encode())
        return values

    def fit(self, budget: int) -> None:
        """Cut until the form has at most `budget` bytes; raise DataError if that is impossible."""
        if self._bytes() <= budget:
            return
        self._drop([site.contribution for site in self._explanation.sites])
        longest = max([1, *(max(self._matrix_shape(name)) for name in self._matrices())])
        gentle = max(1, math.ceil(longest / MIN_GROUPS))
        for cut in (lambda: None, *self._cuts()):
            cut()
            if self._pool_until(budget, gentle):
                return
        if self._pool_until(budget, longest):
            return
        raise DataError(
            f"the budget of this explanation must be at least {self._bytes():,} bytes",
            found=f"{budget:,}",
            fix="raise it, or explain a shorter text",
        )

    def _cuts(self) -> list[Callable[[], None]]:
        """Return the remaining cuts, the one that loses least first."""
        explanation = self._explanation
        position = explanation.positions.get("tensor")
        return [
            self._drop_precomputed,
            lambda: self._drop([position] if position else []),
            lambda: self._drop(list(explanation.extras.values())),
            self._pool_attributions,
            lambda: self._trim_beam(2000),
            lambda: self._trim_beam(200),
            self._drop_lens,
            self._shorten_steps,
        ]

    def _matrices(self) -> list[str]:
        """Return the names of the weights that can be pooled."""
        return [
            site.tensor
            for site in self._explanation.sites
            if site.tensor in self.arrays and site.tensor not in self._explanation.pools
        ]

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        return self.arrays[name].shape[-2], self.arrays[name].shape[-1]

    def _bytes(self, *, without: Sequence[str] = ()) -> int:
        """Return the size of the JSON form, without some tensors."""
        fixed = len(dump_json(self.parts | {"tensors": {}, "limits": self.limits}).encode())
        return (
            fixed
            + 16
            + sum(
                _tensor_bytes(name, array, self.pools.get(name))
                for name, array in self.arrays.items()
                if name not in without
            )
        )

    def _pool_until(self, budget: int, largest: int) -> bool:
        """Pool all matrices by the smallest factor that fits; whether one up to `largest` does."""
        names = self._matrices()
        # Names of the pooled matrices and the exact heads are listed in `limits`.
        bytes_left = budget - self._bytes(without=names) - sum(len(name) + 3 for name in names)
        sites = {site.tensor: site for site in self._explanation.sites}
        if sum(_tensor_bytes(name, self.arrays[name], None) for name in names) <= bytes_left:
            return True
        for factor in range(2, largest + 1):
            edges = functools.cache(functools.partial(self._edges, factor))
            pools = {
                name: {
                    axis: edges(length, label)
                    for axis, length, label in zip(
                        "qk",
                        self._matrix_shape(name),
                        (sites[name].query, sites[name].key),
                        strict=True,
                    )
                }
                for name in names
            }
            sizes = sum(
                _pooled_bytes(name, self.arrays[name].shape[0], pools[name]) for name in names
            )
            if sizes <= bytes_left:
                self._apply_pools(pools, factor, bytes_left - sizes)
                return True
        return False

    def _edges(self, factor: int, length: int, axis: str) -> list[int]:
        """Return the borders of groups of an axis."""
        return pool_edges(length, factor, self._words(axis))

    def _apply_pools(self, pools: Mapping[str, Pool], factor: int, bytes_left: int) -> None:
        """Pool matrices, and keep the strongest heads exact beside them if they fit."""
        exact = dict[str, Array]()
        for head in self._strongest_heads():
            name, weights = f"{head.name}.w", self.arrays.get(f"{head.site}.w")
            if weights is None or f"{head.site}.w" not in pools:
                continue
            bytes_left -= _tensor_bytes(name, weights[head.head], None) + len(head.name) + 3
            if bytes_left < 0:
                break
            exact[name] = weights[head.head]
            self.limits["exact"].append(head.name)
        for name, pool in pools.items():
            self.arrays[name] = pool_matrix(self.arrays[name], pool["q"], pool["k"])
            self.pools[name] = pool
        self.arrays |= exact
        self.limits["pooled"] = [*self.limits["pooled"], *pools]
        self.limits["factor"] = factor

    def _strongest_heads(self) -> list[HeadSummary]:
        """Return the heads with the largest effect; without effects, the largest contributions."""
        arrays = self._explanation.arrays

        def strength(head: HeadSummary) -> tuple[float, float]:
            effect = head.effect_exact if head.effect_exact is not None else head.effect_estimate
            contributions = arrays.get(f"{head.site}.c")
            norm = 0.0 if contributions is None else float(contributions[head.head].sum())
            return abs(effect or 0.0), norm

        return sorted(self._explanation.heads, key=strength, reverse=True)[:EXACT_HEADS]

    def _words(self, axis: str) -> list[tuple[int, int]]:
        """Return the words of an axis as ranges of its positions."""
        if axis == "source":
            return self._explanation.source.words
        words = self._explanation.target.words
        return {
            "target": words,
            "target_in": [(start + 1, end + 1) for start, end in words],
        }.get(axis, [])

    def _drop(self, names: Sequence[str]) -> None:
        """Leave tensors out, and all references to them."""
        gone = [name for name in names if name in self.arrays]
        for name in gone:
            del self.arrays[name]
        self.limits["dropped"] = [*self.limits["dropped"], *gone]
        for site in self.parts["sites"]:
            if site["contribution"] in gone:
                site["contribution"] = None
        if self.parts["positions"].get("tensor") in gone:
            self.parts["positions"] = {**self.parts["positions"], "tensor": None}
        self.parts["extras"] = {
            key: name for key, name in self.parts["extras"].items() if name not in gone
        }

    def _pool_attributions(self) -> None:
        """Pool the matrices of attributions to at most MIN_GROUPS groups per axis."""
        for each in self._explanation.attribution:
            for name, key in ((each.source, "source"), (each.target, "target_in")):
                if not name or name not in self.arrays or name in self.pools:
                    continue
                shape = self._matrix_shape(name)
                factors = [math.ceil(length / MIN_GROUPS) for length in shape]
                if max(factors) < 2:
                    continue
                pool = {
                    "q": pool_edges(shape[0], factors[0], self._words("target")),
                    "k": pool_edges(shape[1], factors[1], self._words(key)),
                }
                self.arrays[name] = pool_matrix(self.arrays[name], pool["q"], pool["k"])
                self.pools[name] = pool
                self.limits["pooled"] = [*self.limits["pooled"], name]

    def _trim_beam(self, most: int) -> None:
        """Leave out nodes that were dropped because the beam was full, those of low score first."""
        if self.parts["beam"] is None:
            return
        nodes = {name: self.arrays[f"beam.{name}"] for name in BEAM_FIELDS}
        kept = trimmed_nodes(nodes, most, self.parts["beam"]["reasons"].index("beam_full"))
        if len(kept) == len(nodes["parent"]):
            return
        new_index = {int(node): at for at, node in enumerate(kept)} | {-1: -1}
        for name in BEAM_FIELDS:
            self.arrays[f"beam.{name}"] = nodes[name][kept]
        self.arrays["beam.parent"] = np.asarray(
            [new_index[int(parent)] for parent in nodes["parent"][kept]]
        )
        for entry in self.parts["nbest"]:
            entry["leaf"] = None if entry["leaf"] is None else new_index[entry["leaf"]]
        self.parts["beam"]["dropped"] += len(nodes["parent"]) - len(kept)
        self.limits["dropped"] = sorted({*self.limits["dropped"], "beam.nodes"})

    def _drop_precomputed(self) -> None:
        """Leave out branches and ablations: they can be computed again."""
        for name in ("branches", "ablations"):
            if self.parts[name]:
                self.parts[name] = {}
                self.limits["dropped"].append(name)

    def _drop_lens(self) -> None:
        """Leave out the most probable tokens of each layer, and then their ranks."""
        if self.parts["lens"] is not None:
            self._drop([self.parts["lens"]["rank"]])
            self.parts["lens"] = None
            self.limits["dropped"] = [*self.limits["dropped"], "lens"]

    def _shorten_steps(self) -> None:
        """Keep three runners-up of each step."""
        if any(len(step["top"]) > 3 for step in self.parts["steps"]):
            self.parts["steps"] = [{**step, "top": step["top"][:3]} for step in self.parts["steps"]]
            self.limits["dropped"] = [*self.limits["dropped"], "steps.top"]


def trimmed_nodes(nodes: Mapping[str, Array], most: int, beam_full: int) -> Array:
    """Return which nodes to keep: leaves that found the beam full go first, worst first."""
    parents, reasons = np.asarray(nodes["parent"]), np.asarray(nodes["reason"])
    is_leaf = ~np.isin(np.arange(len(parents)), parents)
    dropped = np.flatnonzero(is_leaf & (reasons == beam_full))
    order = dropped[np.argsort(np.asarray(nodes["cum"])[dropped], kind="stable")]
    excess = max(0, len(parents) - most)
    return np.setdiff1d(np.arange(len(parents)), order[:excess])


def _tensor_bytes(name: str, array: Array, pool: Pool | None) -> int:
    """Return the size of a tensor in JSON, to within a few bytes above."""
    array = np.asarray(array)
    if array.dtype.kind in "biu":
        size = np.dtype(DTYPES[fixed_dtype(name) or integer_dtype(array)]).itemsize
    else:
        size = 4 if fixed_dtype(name) or is_exact(array) else 1
    return _entry_bytes(name, size * array.size, list(array.shape), pool)


def _pooled_bytes(name: str, heads: int, pool: Pool) -> int:
    """Return the size of weights once they are pooled."""
    shape = [heads, len(pool["q"]) - 1, len(pool["k"]) - 1]
    return _entry_bytes(name, math.prod(shape), shape, pool)


def _entry_bytes(name: str, raw: int, shape: list[int], pool: Pool | None) -> int:
    # 96: keys, quotes, dtype, code and a scale of 24 digits.
    return 96 + len(name) + len(dump_json([shape, pool])) + 4 * math.ceil(raw / 3)
