"""Relative positions inside self-attention: rotary embeddings and biases on the scores.

Each layer has its own (`SelfAttention(..., relative_position=...)`); nothing is added to the
embeddings. Cross-attention has no positions.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from dragoman.attention.absolute_position_encodings import (
    NoPositions,
    RelativePosition,
    SinusoidalHalvesPositions,
    SinusoidalPositions,
)


class RotaryEmbedding(RelativePosition):
    r"""Rotary position embedding (RoPE): rotate pairs of features by an angle per position.

    .. math:: (x_{2i} + j x_{2i+1})\, e^{j t \theta_i}, \quad \theta_i = 10000^{-2i/d_h}

    Su et al. (2021), equation 15: the dot product of a query and a key then depends on their
    distance alone. Angles are computed in float64. Pairs are adjacent features, as in the paper;
    Llama pairs the two halves of the vector.
    """

    def __init__(self, head_width: int, *, max_positions: int = 1024) -> None:
        super().__init__()
        self.sinusoids = _shared_sinusoids(SinusoidalPositions, head_width, max_positions)

    def rotate(self, x: Tensor, position_ids: Tensor | None, *, first: int = 0) -> Tensor:
        """Rotate queries or keys (B, H, T, Dh)."""
        if position_ids is None:
            sinusoids = self.sinusoids.vectors(first, x.size(-2))  # (T, Dh)
        else:
            sinusoids = nn.functional.embedding(
                position_ids, self.sinusoids.vectors(0, first + x.size(-2))
            ).unsqueeze(1)  # (B, 1, T, Dh)
        sine, cosine = sinusoids[..., 0::2], sinusoids[..., 1::2]
        even, odd = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
        return rotated.flatten(-2).to(x.dtype)


class AlibiBias(RelativePosition):
    r"""ALiBi: a linear penalty on the distance, with a slope for each head.

    .. math:: e_{ts} = q_t^\top k_s / \sqrt{d_h} - m_h |t - s|

    Press, Smith and Lewis (2022). Slopes are the powers of 2^(-8/H); if H is not a power of two,
    those of the power below and every other one of the power above, as in the released code. The
    paper has decoders only. In an encoder later positions get another slope, halfway to the next
    head's; otherwise a sentence would equal its mirror image.
    """

    has_bias = True
    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.future_slope = 2.0 ** (-4 / heads)
        slopes = torch.tensor(alibi_slopes(heads), device=_non_meta_device())
        self.register_buffer("slopes", slopes, persistent=False)

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Return the bias (..., H, T, S) of distances (..., T, S)."""
        distance, slopes = distance.unsqueeze(-3), self.slopes.view(-1, 1, 1)
        return distance.clamp(max=0) * slopes - distance.clamp(min=0) * slopes * self.future_slope


class T5RelativeBias(RelativePosition):
    """T5's relative position bias: a trained scalar per head and bucket of distances.

    Raffel et al. (2020), section 2.1. Half of the buckets hold one distance each, the others
    logarithmically more, up to 128 and beyond; an encoder uses half of all for later positions. T5
    shares one table in a stack and does not scale scores by the square root of the width; here each
    layer has its own, since blocks may differ in their heads, and scores are scaled.
    """

    has_bias = True
    bucket_ids: Tensor

    def __init__(
        self, heads: int, *, causal: bool, buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__()
        self.causal, self.buckets, self.max_distance = causal, buckets, max_distance
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        nn.init.normal_(self.weight, std=0.02)  # nearly no bias at first
        # A table, not computed in `bias`: an exported program might round a logarithm differently.
        bucket_ids = [
            self._bucket_id(distance) for distance in range(-max_distance, max_distance + 1)
        ]
        self.register_buffer(
            "bucket_ids", torch.tensor(bucket_ids, device=_non_meta_device()), persistent=False
        )

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance, key position minus query position."""
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
        # The 1e-9 keeps exact powers of two out of the bucket below.
        far = math.log(steps / exact) / math.log(self.max_distance / exact) * (side - exact)
        return after + min(exact + int(far + 1e-9), side - 1)

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Return the bias (..., H, T, S) of distances (..., T, S)."""
        return nn.functional.embedding(self.bucket(distance), self.weight).movedim(-1, -3)


class ShawRelativeKeys(RelativePosition):
    r"""Shaw's relative positions: a trained key vector for each distance, shared by all heads.

    .. math:: e_{ts} = q_t^\top (k_s + a_{\mathrm{clip}(s - t)}) / \sqrt{d_h}

    Shaw, Uszkoreit and Vaswani (2018), equation 4, with distances clipped at 16 as there. Their
    vectors added to the values are left out: their table 3 finds the same BLEU without them, and
    fused kernels do not support them.
    """

    has_bias = True

    def __init__(self, head_width: int, *, max_distance: int = 16) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.weight = nn.Parameter(torch.empty(2 * max_distance + 1, head_width))
        nn.init.normal_(self.weight, std=head_width**-0.5)

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Return the bias (B, H, T, S) of distances (..., T, S), scaled as the scores are."""
        index = distance.clamp(-self.max_distance, self.max_distance) + self.max_distance
        index = index.unsqueeze(0) if distance.dim() == 2 else index  # (1 or B, T, S)
        # (B, H, T, 2 * max_distance + 1)
        scores = query @ self.weight.to(query.dtype).T * query.size(-1) ** -0.5
        return scores.gather(-1, index.unsqueeze(1).expand(*query.shape[:3], -1))


class TransformerXLBias(RelativePosition):
    r"""Transformer-XL's relative positions: sinusoids of the distance as keys, two trained biases.

    .. math:: e_{ts} = \big((q_t + u)^\top k_s + (q_t + v)^\top W_R R_{t-s}\big) / \sqrt{d_h}

    Dai et al. (2019), "Transformer-XL". R has all sines before all cosines, as in the released
    code, and the width of all heads together; u and v are initialized as there. Each query is
    multiplied with each distance once; `ops.attend` shifts the scores if they are causal, otherwise
    they are gathered by key. Distances above `max_distance`, if it is not 0, count as that one, as
    `clamp_len` in the released code. The recurrence is `TransformerLayer.forward_segment`.
    """

    has_bias = True
    max_distance = 0

    def __init__(
        self, heads: int, head_width: int, *, causal: bool, max_positions: int = 1024
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.scores_distances = causal
        width = heads * head_width
        self.sinusoids = _shared_sinusoids(SinusoidalHalvesPositions, width, max_positions)  # R
        self.proj = nn.Linear(width, width, bias=False)  # W_R
        self.content_bias, self.position_bias = (
            nn.Parameter(torch.empty(width)) for _ in range(2)
        )  # u, v
        for vector in (self.content_bias, self.position_bias):
            nn.init.normal_(vector, std=0.02)

    def shift_query(self, query: Tensor) -> Tensor:
        """Return q + u (B, H, T, Dh)."""
        return query + self._by_head(self.content_bias).to(query.dtype)

    def bias(self, distance: Tensor, query: Tensor) -> Tensor:
        """Return the bias (B, H, T, S) of distances (..., T, S), scaled as the scores are."""
        max_distance = distance.size(-1) - 1  # an upper bound
        if self.max_distance:
            distance = distance.clamp(-self.max_distance, self.max_distance)
            max_distance = min(max_distance, self.max_distance)
        sinusoids, back = self.sinusoids.vectors(0, max_distance + 1), -distance
        if self.causal:
            back = back.clamp(min=0)  # later positions are masked anyway
        else:
            sine, cosine = sinusoids[1:].flip(0).chunk(2, dim=-1)
            sinusoids, back = (
                torch.cat([torch.cat([-sine, cosine], dim=-1), sinusoids]),
                back + max_distance,
            )
        keys = self._by_head(self.proj(sinusoids.to(self.proj.weight.dtype))).to(query.dtype)
        query = query + self._by_head(self.position_bias).to(query.dtype)
        scores = query @ keys.mT * query.size(-1) ** -0.5  # keys are (H, distances, Dh)
        back = back.unsqueeze(0) if distance.dim() == 2 else back  # (1 or B, T, S)
        return scores.gather(-1, back.unsqueeze(1).expand(*query.shape[:3], -1))

    def distance_scores(self, query: Tensor, keys: int) -> Tensor:
        """Return the scores (B, H, T, S) by distance, S - 1 down to 0, scaled as the scores are.

        `ops.attend` moves row t left by T - 1 - t, the relative shift of the paper's appendix B.
        """
        farthest = min(keys - 1, self.max_distance) if self.max_distance else keys - 1
        sinusoids = self.sinusoids.vectors(0, farthest + 1).flip(0)  # of S - 1 down to 0
        key = self._by_head(self.proj(sinusoids.to(self.proj.weight.dtype))).to(query.dtype)
        if farthest < keys - 1:
            key = torch.cat([key[:, :1].expand(-1, keys - 1 - farthest, -1), key], dim=1)
        query = (query + self._by_head(self.position_bias).to(query.dtype)) * query.size(-1) ** -0.5
        scores: Tensor = query @ key.mT
        return scores

    def _by_head(self, x: Tensor) -> Tensor:
        """Split (D,) or (n, D) into heads: (H, 1 or n, Dh)."""
        return x.view(-1, self.heads, x.size(-1) // self.heads).transpose(0, 1)


class RotaryPositions(NoPositions):
    """Rotary position embeddings: see `RotaryEmbedding`."""

    @classmethod
    def build_relative_position(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> RotaryEmbedding:
        """Return one layer's rotary embedding."""
        return RotaryEmbedding(head_width, max_positions=max_positions)


class AlibiPositions(NoPositions):
    """ALiBi: see `AlibiBias`."""

    @classmethod
    def build_relative_position(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> AlibiBias:
        """Return one layer's bias."""
        return AlibiBias(heads)


class T5Positions(NoPositions):
    """T5's relative position bias: see `T5RelativeBias`."""

    @classmethod
    def build_relative_position(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> T5RelativeBias:
        """Return one layer's bias."""
        return T5RelativeBias(heads, causal=causal)


class ShawPositions(NoPositions):
    """Shaw's relative positions: see `ShawRelativeKeys`."""

    @classmethod
    def build_relative_position(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> ShawRelativeKeys:
        """Return one layer's relative keys."""
        return ShawRelativeKeys(head_width)


class TransformerXLPositions(NoPositions):
    """Transformer-XL's relative positions: see `TransformerXLBias`."""

    @classmethod
    def build_relative_position(
        cls, *, heads: int, head_width: int, causal: bool, max_positions: int = 1024
    ) -> TransformerXLBias:
        """Return one layer's bias."""
        return TransformerXLBias(heads, head_width, causal=causal, max_positions=max_positions)


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slope of each head."""
    below = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8 * (head + 1) / below) for head in range(below)]
    between = [2.0 ** (-8 * (head + 1) / (2 * below)) for head in range(0, 2 * below, 2)]
    return (slopes + between)[:heads]


def _shared_sinusoids(
    kind: type[SinusoidalPositions], width: int, rows: int
) -> SinusoidalPositions:
    """Return sinusoids whose table is shared by all layers, until a module is moved."""
    sinusoids = kind(width=width, max_positions=1)
    sinusoids.table = _sinusoid_table(kind, width, rows).to(_non_meta_device())  # type: ignore[arg-type] # a class is hashable
    return sinusoids


@functools.lru_cache(maxsize=8)
def _sinusoid_table(kind: type[SinusoidalPositions], width: int, rows: int) -> Tensor:
    """Return a table of sinusoids, computed once for all layers."""
    with torch.inference_mode(False), torch.device("cpu"):
        return kind(width=width, max_positions=rows).table


def _non_meta_device() -> torch.device:
    """Return the default device, or the CPU for meta: loading weights would not fill a buffer."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device
