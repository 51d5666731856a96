"""Positions told inside self-attention: queries and keys are turned, or scores get a term that depends on the distance.

Each layer has such a scheme of its own (`SelfAttention(..., within=...)`); nothing is added to the embeddings. Attention to another
sequence knows no distances and goes without.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from dragoman.attention.positions import (
    NoPositions,
    RelativePosition,
    SinusoidalHalvesPositions,
    SinusoidalPositions,
)


class RotaryEmbedding(RelativePosition):
    r"""Turn each pair of numbers of a query and of a key by an angle that grows with the place.

    .. math:: (x_{2i} + j x_{2i+1})\, e^{j t \theta_i}, \quad \theta_i = 10000^{-2i/d_h}

    Su et al. (2021), equation 15: the product of a query and a key then depends on their distance alone. Angles are computed in
    float64; pairs are neighbours, as in the paper (Llama's pairs are the two halves of the vector).
    """

    def __init__(self, head_width: int, *, max_positions: int = 1024) -> None:
        super().__init__()
        self.sinusoids = _shared_sinusoids(SinusoidalPositions, head_width, max_positions)

    def rotate(self, x: Tensor, position_ids: Tensor | None, *, first: int = 0) -> Tensor:
        """Turn queries or keys (B, H, T, Dh)."""
        if position_ids is None:
            sinusoids = self.sinusoids.vectors(first, x.size(-2))  # (T, Dh)
        else:
            sinusoids = nn.functional.embedding(
                position_ids, self.sinusoids.vectors(0, first + x.size(-2))
            ).unsqueeze(1)  # (B, 1, T, Dh)
        sine, cosine = sinusoids[..., 0::2], sinusoids[..., 1::2]
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
        return turned.flatten(-2).to(x.dtype)


class AlibiBias(RelativePosition):
    r"""Take from each score what grows with the distance, in each head at a slope of its own.

    .. math:: e_{ts} = q_t^\top k_s / \sqrt{d_h} - m_h |t - s|

    Press, Smith and Lewis (2022). Slopes are the powers of 2^(-8/H); where H is no power of two, those of the power below
    and every other one of the power above, as in the released code. The paper has decoders only. In an encoder what comes
    after gets a slope of its own, halfway to the next head's: with one for both sides a sentence equals its mirror image.
    """

    has_bias = True
    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.future_slope = 2.0 ** (-4 / heads)
        slopes = torch.tensor(alibi_slopes(heads), device=_non_meta_device())
        self.register_buffer("slopes", slopes, persistent=False)

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Give the terms (..., H, T, S) of distances (..., T, S)."""
        distance, slopes = distance.unsqueeze(-3), self.slopes.view(-1, 1, 1)
        return distance.clamp(max=0) * slopes - distance.clamp(min=0) * slopes * self.future_slope


class T5RelativeBias(RelativePosition):
    """Add to each score a trained number for its bucket of distances, in each head: Raffel et al. (2020), section 2.1.

    Half of the buckets hold one distance each, the others ever more, up to 128 and beyond; an encoder keeps half of all for what
    comes after. T5 has one table for a whole stack and does not divide scores by the root of the width; here each layer has its
    own, since blocks may differ in their heads, and scores are divided as everywhere.
    """

    has_bias = True
    bucket_ids: Tensor

    def __init__(
        self, heads: int, *, causal: bool, buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__()
        self.causal, self.buckets, self.max_distance = causal, buckets, max_distance
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        nn.init.normal_(self.weight, std=0.02)  # next to no preference until trained
        # Looked up, not computed where it is used: in another program a logarithm may round to the other side of a border.
        bucket_ids = [
            self._bucket_id(distance) for distance in range(-max_distance, max_distance + 1)
        ]
        self.register_buffer(
            "bucket_ids", torch.tensor(bucket_ids, device=_non_meta_device()), persistent=False
        )

    def bucket(self, distance: Tensor) -> Tensor:
        """Number the buckets of key place minus query place, any shape."""
        return self.bucket_ids[
            distance.clamp(-self.max_distance, self.max_distance) + self.max_distance
        ]

    def _bucket_id(self, distance: int) -> int:
        side = self.buckets if self.causal else self.buckets // 2
        after = side if distance > 0 and not self.causal else 0
        steps = max(0, -distance) if self.causal else abs(distance)
        exact = side // 2
        if steps < exact:
            return after + steps
        # Rounded up by a hair: a power of two can fall into the bucket below.
        far = math.log(steps / exact) / math.log(self.max_distance / exact) * (side - exact)
        return after + min(exact + int(far + 1e-9), side - 1)

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Give the terms (..., H, T, S) of distances (..., T, S)."""
        return nn.functional.embedding(self.bucket(distance), self.weight).movedim(-1, -3)


class ShawRelativeKeys(RelativePosition):
    r"""Compare each query also with a trained vector for the distance, one for all heads.

    .. math:: e_{ts} = q_t^\top (k_s + a_{\mathrm{clip}(s - t)}) / \sqrt{d_h}

    Shaw, Uszkoreit and Vaswani (2018), equation 4, with distances clipped at 16 as there. Their second set of vectors, added to
    the values, is left out: their table 3 finds the same BLEU without it, and with it no fused kernel would serve.
    """

    has_bias = True

    def __init__(self, head_width: int, *, max_distance: int = 16) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(2 * max_distance + 1, head_width))
        nn.init.normal_(self.weight, std=head_width**-0.5)

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Give the terms (B, H, T, S) of distances (..., T, S), dividing as the scores are."""
        index = distance.clamp(-self.max_distance, self.max_distance) + self.max_distance
        index = index.unsqueeze(0) if distance.dim() == 2 else index  # (1 or B, T, S)
        products = (
            query @ self.weight.to(query.dtype).T * query.size(-1) ** -0.5
        )  # (B, H, T, 2 * farthest + 1)
        return products.gather(-1, index.unsqueeze(1).expand(*query.shape[:3], -1))


class TransformerXLBias(RelativePosition):
    r"""Compare each query also with the sinusoid of the distance, and with trained vectors what every query asks of all.

    .. math:: e_{ts} = \big((q_t + u)^\top k_s + (q_t + v)^\top W_R R_{t-s}\big) / \sqrt{d_h}

    Dai et al. (2019), "Transformer-XL". R has all sines before all cosines, as in the released code, and the width of all heads
    together; u and v start as there. Each query meets each distance once, in one product, and what belongs to a key is then picked
    out: as linear as the released code's shift, and right also for rows whose places differ. The memory of earlier segments, the
    paper's other half, is no part of this.
    """

    has_bias = True

    def __init__(
        self, heads: int, head_width: int, *, causal: bool, max_positions: int = 1024
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        width = heads * head_width
        self.sinusoids = _shared_sinusoids(SinusoidalHalvesPositions, width, max_positions)  # R
        self.proj = nn.Linear(width, width, bias=False)  # W_R
        self.content, self.place = (nn.Parameter(torch.empty(width)) for _ in range(2))  # u, v
        for vector in (self.content, self.place):
            nn.init.normal_(vector, std=0.02)

    def shift_query(self, query: Tensor) -> Tensor:
        """Add to queries (B, H, T, Dh) what every query asks of contents."""
        return query + self._by_head(self.content).to(query.dtype)

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Give the terms (B, H, T, S) of distances (..., T, S), dividing as the scores are."""
        max_distance = distance.size(-1) - 1  # no place is farther away than there are keys
        sinusoids, back = self.sinusoids.vectors(0, max_distance + 1), -distance
        if self.causal:
            back = back.clamp(min=0)  # what comes after is hidden, whatever it gets here
        else:
            sine, cosine = sinusoids[1:].flip(0).chunk(2, dim=-1)
            sinusoids, back = (
                torch.cat([torch.cat([-sine, cosine], dim=-1), sinusoids]),
                back + max_distance,
            )
        keys = self._by_head(self.proj(sinusoids.to(self.proj.weight.dtype))).to(
            query.dtype
        )  # (H, distances, Dh)
        products = (
            (query + self._by_head(self.place).to(query.dtype)) @ keys.mT * query.size(-1) ** -0.5
        )
        back = back.unsqueeze(0) if distance.dim() == 2 else back  # (1 or B, T, S)
        return products.gather(-1, back.unsqueeze(1).expand(*query.shape[:3], -1))

    def _by_head(self, x: Tensor) -> Tensor:
        """Cut (D,) or (n, D) into heads: (H, 1 or n, Dh)."""
        return x.view(-1, self.heads, x.size(-1) // self.heads).transpose(0, 1)


class RotaryPositions(NoPositions):
    """Queries and keys are turned by their places: see `Rotation`."""

    @classmethod
    def within(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> RotaryEmbedding:
        """Build one layer's rotation."""
        return RotaryEmbedding(head_width, max_positions=max_positions)


class AlibiPositions(NoPositions):
    """Scores fall with the distance: see `LinearBias`."""

    @classmethod
    def within(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> AlibiBias:
        """Build one layer's slopes."""
        return AlibiBias(heads)


class T5Positions(NoPositions):
    """Scores get a trained term for the distance: see `BucketBias`."""

    @classmethod
    def within(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> T5RelativeBias:
        """Build one layer's table."""
        return T5RelativeBias(heads, causal=causal)


class ShawPositions(NoPositions):
    """Keys get a trained vector for their distance: see `RelativeKeys`."""

    @classmethod
    def within(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> ShawRelativeKeys:
        """Build one layer's vectors."""
        return ShawRelativeKeys(head_width)


class TransformerXLPositions(NoPositions):
    """Keys get a projected sinusoid of their distance: see `SinusoidKeys`."""

    @classmethod
    def within(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> TransformerXLBias:
        """Build one layer's projection and vectors."""
        return TransformerXLBias(heads, head_width, causal=causal, max_positions=max_positions)


def alibi_slopes(heads: int) -> list[float]:
    """Give each head its slope."""
    below = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / below) for head in range(below)]
    between = [2.0 ** (-8 * (head + 1) / (2 * below)) for head in range(0, 2 * below, 2)]
    return (slopes + between)[:heads]


def _shared_sinusoids(
    kind: type[SinusoidalPositions], width: int, rows: int
) -> SinusoidalPositions:
    """Build sines of which all layers share one table, until they are moved."""
    sinusoids = kind(width=width, max_positions=1)
    sinusoids.table = _sinusoid_table(kind, width, rows).to(_non_meta_device())  # type: ignore[arg-type] # a class is hashable
    return sinusoids


@functools.lru_cache(maxsize=8)
def _sinusoid_table(kind: type[SinusoidalPositions], width: int, rows: int) -> Tensor:
    """Make a table of sines once for all layers: a thousand layers laid out to be looked at must not cost a thousand tables."""
    with torch.inference_mode(False), torch.device("cpu"):
        return kind(width=width, max_positions=rows).table


def _non_meta_device() -> torch.device:
    """Say where a buffer that no weights fill must be: real even while a model is laid out on the meta device."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device
