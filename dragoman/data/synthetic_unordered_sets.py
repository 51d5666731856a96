"""Generated sets: maximum of numbers, unique characters, clusters of points.

Each example is a pure function of (seed, index), by counter-based random numbers: there is no end
to them, and a resumed run has the sets of the uninterrupted one. The problems are those of Lee
et al. (2019), section 5; characters are random strokes instead of Omniglot's.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.runtime.counter_rng import derive_key, splitmix64_outputs

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

_STRIDE = 1 << 13  # counters of one example: more numbers than any example draws
TRAIN_CHARACTERS, HELD_OUT_CHARACTERS = 1000, 500
STROKES, STROKE_SEGMENTS = 4, 3  # most strokes of a character, and line segments of each


class SetArrays(NamedTuple):
    """Sets as padded arrays."""

    elements: Floats  # (B, N, F), zero in padding
    sizes: Integers  # (B,)
    targets: Floats  # (B, ...), what is predicted


class ExampleRNG:
    """Uniform and normal numbers of examples, by their position in the example."""

    def __init__(self, key: int, indices: Integers) -> None:
        self._key, self._first = key, np.asarray(indices, np.int64)[:, None] * _STRIDE
        self._used = 0

    def uniform(self, *shape: int) -> Floats:
        """Return numbers (B, *shape) in [0, 1), multiples of 2**-24."""
        count = int(np.prod(shape, dtype=np.int64))
        counters = self._first + np.arange(self._used, self._used + count)
        self._used += count
        assert self._used <= _STRIDE, f"an example draws at most {_STRIDE} numbers"
        bits = splitmix64_outputs(self._key, counters) >> np.uint64(40)
        return (bits.astype(np.float32) * np.float32(2.0**-24)).reshape(len(counters), *shape)

    def integers(self, low: int, high: int | Integers, *shape: int) -> Integers:
        """Return integers (B, *shape) from `low` to `high`, both included."""
        top = np.asarray(high, np.int64)
        width = (top - low + 1).reshape(-1, *[1] * len(shape)) if top.ndim else top - low + 1
        return low + (self.uniform(*shape) * width).astype(np.int64)

    def normal(self, *shape: int) -> Floats:
        """Return standard normal numbers (B, *shape, 2), by the Box-Muller transform."""
        pairs = self.uniform(*shape, 2)
        radius = np.sqrt(-2 * np.log1p(-pairs[..., 0]))
        angle = np.float32(2 * np.pi) * pairs[..., 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)

    def seek(self, position: int) -> None:
        """Continue with the number at a position of the example."""
        self._used = position


class GeneratedProblem(ABC):
    """A problem whose examples are generated: `sets.problem`."""

    max_size: ClassVar[int]  # elements of the largest set
    features: ClassVar[int]  # numbers of an element as it is generated
    # Whether a batch has sets of similar sizes; with few sizes, batches of all sizes have more
    # varied gradients and hardly more padding.
    buckets: ClassVar[bool] = False

    def __init__(self, seed: int, *, part: str) -> None:
        self.part = part  # "train", "valid" or "test"
        self.signature = f"{type(self).__name__} {part} {seed}"
        self._key = derive_key("sets", self.signature)

    def sizes(self, indices: Integers) -> Integers:
        """Return the sizes (B,) of examples."""
        return self._draw_sizes(ExampleRNG(self._key, indices))

    @abstractmethod
    def _draw_sizes(self, draws: ExampleRNG) -> Integers:
        """Return the sizes (B,), the first numbers that an example draws."""

    @abstractmethod
    def generate(self, indices: Integers, width: int) -> SetArrays:
        """Return examples padded to `width` elements."""


class MaximumProblem(GeneratedProblem):
    """The largest of 1 to 10 numbers that are uniform in [0, 100): section 5.1."""

    max_size = 10
    features = 1

    def _draw_sizes(self, draws: ExampleRNG) -> Integers:
        return draws.integers(1, self.max_size)

    def generate(self, indices: Integers, width: int) -> SetArrays:
        """Return examples padded to `width` elements; targets are (B,)."""
        draws = ExampleRNG(self._key, indices)
        sizes = self._draw_sizes(draws)
        numbers = draws.uniform(self.max_size) * np.float32(100)
        numbers[np.arange(self.max_size) >= sizes[:, None]] = 0
        return SetArrays(_resize(numbers[..., None], width), sizes, numbers.max(axis=1))


class UniqueProblem(GeneratedProblem):
    """How many different characters 6 to 10 images show: section 5.2.

    An element is a character's line segments, (12, 5) flattened, for `render_strokes`. Validation
    and test use characters that training never shows.
    """

    max_size = 10
    features = STROKES * STROKE_SEGMENTS * 5
    min_size: ClassVar[int] = 6

    def _draw_sizes(self, draws: ExampleRNG) -> Integers:
        return draws.integers(self.min_size, self.max_size)

    def generate(self, indices: Integers, width: int) -> SetArrays:
        """Return examples padded to `width` elements; targets (B,) are counts."""
        draws = ExampleRNG(self._key, indices)
        sizes = self._draw_sizes(draws)
        unique = draws.integers(1, sizes)
        first, count = (
            (0, TRAIN_CHARACTERS)
            if self.part == "train"
            else (TRAIN_CHARACTERS, HELD_OUT_CHARACTERS)
        )
        # Sorted numbers plus 0, 1, ... are all different.
        drawn = np.sort(draws.integers(0, count - self.max_size, self.max_size), axis=1)
        characters = first + drawn + np.arange(self.max_size)
        order = np.argsort(draws.uniform(self.max_size), axis=1, kind="stable")
        characters = np.take_along_axis(characters, order, axis=1)
        # The first elements show each character once, the others any of them.
        slots = np.arange(self.max_size)
        repeats = (draws.uniform(self.max_size) * unique[:, None]).astype(np.int64)
        shown = np.where(slots < unique[:, None], slots, repeats)
        characters = np.take_along_axis(characters, shown, axis=1)  # (B, 10)
        strokes = _deform(_characters()[characters], draws)
        strokes[slots >= sizes[:, None]] = 0
        return SetArrays(_resize(strokes, width), sizes, unique.astype(np.float32))


class ClusteringProblem(GeneratedProblem):
    """100 to 500 points of a mixture of four Gaussians in the plane: section 5.3.

    Means are uniform in [-4, 4], deviations 0.3, weights Dirichlet(1). Targets are the mixture's
    parameters (B, K, 5): log-weight, mean, deviation.
    """

    max_size = 500
    features = 2
    buckets = True
    min_size: ClassVar[int] = 100
    deviation: ClassVar[float] = 0.3

    def __init__(self, seed: int, *, part: str, components: int = 4) -> None:
        super().__init__(seed, part=part)
        self.components = components
        self.signature += f" {components}"

    def _draw_sizes(self, draws: ExampleRNG) -> Integers:
        return draws.integers(self.min_size, self.max_size)

    def generate(self, indices: Integers, width: int) -> SetArrays:
        """Return examples padded to `width` elements."""
        draws = ExampleRNG(self._key, indices)
        sizes = self._draw_sizes(draws)
        # Normalized exponential numbers are Dirichlet(1).
        exponential = -np.log1p(-draws.uniform(self.components))
        weights = exponential / exponential.sum(axis=1, keepdims=True)
        means = draws.uniform(self.components, 2) * np.float32(8) - np.float32(4)
        # Fixed positions, so that the padded width does not change a point.
        count = min(width, self.max_size)
        draws.seek(1024)
        component = np.minimum(
            (draws.uniform(count)[..., None] >= np.cumsum(weights, axis=1)[:, None]).sum(axis=2),
            self.components - 1,
        )
        centers = np.take_along_axis(means, component[..., None], axis=1)
        draws.seek(2048)
        points = centers + np.float32(self.deviation) * draws.normal(count)
        points[np.arange(count) >= sizes[:, None]] = 0
        parameters = np.concatenate(
            [np.log(weights)[..., None], means, np.full_like(means, self.deviation)], axis=2
        )
        return SetArrays(
            _resize(points.astype(np.float32), width), sizes, parameters.astype(np.float32)
        )


PROBLEMS: dict[str, type[GeneratedProblem]] = {
    "maximum": MaximumProblem,
    "unique": UniqueProblem,
    "clustering": ClusteringProblem,
}


@functools.cache
def _characters() -> Floats:
    """Return the control points (C, strokes, 3, 2) and ink of all characters, as (…, 7) numbers.

    A character is two to four quadratic Bezier curves; most begin where another one is, as the
    strokes of writing do. The last number of a stroke is its ink, 0 or 1.
    """
    count = TRAIN_CHARACTERS + HELD_OUT_CHARACTERS
    draws = ExampleRNG(derive_key("characters", 1), np.arange(count))
    strokes = draws.integers(2, STROKES)
    points = draws.uniform(STROKES, 3, 2)
    joined = draws.uniform(STROKES) < 0.6
    for stroke in range(1, STROKES):
        start = np.where(joined[:, stroke, None], points[:, stroke - 1, 2], points[:, stroke, 0])
        points[:, stroke, 0] = start
    has_ink = np.arange(STROKES) < strokes[:, None]
    # Every character fills the same box.
    drawn = np.where(has_ink[..., None, None], points, np.nan).reshape(count, -1, 2)
    low, high = np.nanmin(drawn, axis=1), np.nanmax(drawn, axis=1)
    points = (points - low[:, None, None]) / (high - low + np.float32(1e-6))[:, None, None]
    points = np.float32(0.15) + np.float32(0.7) * points
    ink = has_ink.astype(np.float32)
    return np.concatenate([points.reshape(count, STROKES, 6), ink[..., None]], axis=2)


def _deform(characters: Floats, draws: ExampleRNG) -> Floats:
    """Return line segments (B, N, G * 5) of characters (B, N, strokes, 7), each drawn anew.

    Control points move a little; the whole is rotated, scaled, slanted and shifted.
    """
    batch, count = characters.shape[:2]
    points = characters[..., :6].reshape(batch, count, STROKES, 3, 2) - np.float32(0.5)
    points = points + np.float32(0.025) * draws.normal(count, STROKES, 3)
    angle, slant, wide, high, right, down = np.moveaxis(2 * draws.uniform(count, 6) - 1, -1, 0)
    angle, slant = np.float32(0.25) * angle, np.float32(0.2) * slant
    wide, high = 1 + np.float32(0.15) * wide, 1 + np.float32(0.15) * high
    cosine, sine = np.cos(angle), np.sin(angle)
    matrix = np.stack(
        [
            np.stack([wide * cosine, high * (slant * cosine - sine)], axis=-1),
            np.stack([wide * sine, high * (slant * sine + cosine)], axis=-1),
        ],
        axis=-2,
    )  # (B, N, 2, 2)
    shift = np.float32(0.06) * np.stack([right, down], axis=-1) + np.float32(0.5)
    points = np.einsum("bnij,bnskj->bnski", matrix, points) + shift[:, :, None, None]
    time = np.linspace(0, 1, STROKE_SEGMENTS + 1, dtype=np.float32)
    bezier = np.stack([(1 - time) ** 2, 2 * time * (1 - time), time**2], axis=1)  # (5, 3)
    curve = np.einsum("tk,bnski->bnsti", bezier, points)  # (B, N, strokes, segments + 1, 2)
    ink = np.broadcast_to(
        characters[..., 6][..., None, None], (batch, count, STROKES, STROKE_SEGMENTS, 1)
    )
    segments = np.concatenate([curve[..., :-1, :], curve[..., 1:, :], ink], axis=-1)
    return segments.reshape(batch, count, -1).astype(np.float32)


def _resize(elements: Floats, width: int) -> Floats:
    """Pad (B, N, F) with zeros, or cut padding off, to `width` elements."""
    count = elements.shape[1]
    if width <= count:
        return np.ascontiguousarray(elements[:, :width])
    return np.pad(elements, ((0, 0), (0, width - count), (0, 0)))
