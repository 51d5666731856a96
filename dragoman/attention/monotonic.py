"""Monotonic attention (Raffel et al. 2017) and monotonic chunkwise attention (MoChA).

The expected alignments of training are computed in `ops/monotonic_attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.score_functions import AdditiveScore
from dragoman.attention.softmax_and_gumbel_alignment import Alignment, AlignmentState
from dragoman.errors import DragomanError
from dragoman.ops import masked_softmax
from dragoman.ops.monotonic_attention import expected_alignment


class MonotonicAlignment(Alignment):
    r"""Monotonic alignment: scan the keys from the last attended one and stop at the first match.

    .. math:: p_{ts} = \sigma(e_{ts} + r + \xi), \quad \alpha_{ts} = p_{ts}\, q_{ts}

    .. math:: q_{ts} = (1 - p_{t,s-1})\, q_{t,s-1} + \alpha_{t-1,s}, \quad
        \alpha_0 = (1, 0, \dots, 0)

    Raffel et al. (2017). Training uses the expected weights, with noise on the scores that makes
    the probabilities nearly discrete; evaluation stops where e + r > 0, without noise. A head that
    runs past the last key stays there, and later weights are zero: rows sum to at most 1. `forward`
    and `step` score every key; `scan` reads a key only when the head is on it, at most S + T times
    for S keys and T positions, so that decoding takes linear time.

    The trained offset r starts below 0, or all attention would stay on the first keys: at -1, where
    one key in four stops the head, because a translation is about as long as its source. For speech
    the authors use -4.
    """

    is_discrete = True
    rows_sum_to_one = False
    scans_keys = True

    def __init__(
        self,
        *,
        query_width: int = 0,
        key_width: int = 0,
        score_width: int = 0,
        offset: float = -1.0,
        noise: float = 1.0,
    ) -> None:
        super().__init__(query_width=query_width, key_width=key_width, score_width=score_width)
        self.offset = nn.Parameter(torch.tensor(offset))  # r
        self.noise = noise  # standard deviation of xi

    def start(self, mask: Tensor) -> AlignmentState:
        """Return the initial state, with the head on the first key.

        In training it has the weights of the previous position, in evaluation the position of the
        head, which is the number of keys when the head has run past the last one.
        """
        if not self.training:
            positions = torch.arange(1, mask.size(1) + 1, device=mask.device)
            keys = (mask * positions).amax(dim=1)  # up to the last that may be attended to
            return {"mask": mask, "keys": keys, "position": torch.zeros_like(keys)}
        wide = torch.promote_types(self.offset.dtype, torch.float32)
        previous = torch.zeros(mask.shape, dtype=wide, device=mask.device)
        previous[:, :1] = 1
        return {"mask": mask, "previous": previous}

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the weights of one position: expected in training, one-hot or zero otherwise."""
        wide = torch.promote_types(self.offset.dtype, torch.float32)
        scores_wide = scores.to(wide) + self.offset.to(wide)
        if self.training:
            weights = self._expected(scores_wide, state["mask"], state["previous"])
            return weights.to(scores.dtype), {"mask": state["mask"], "previous": weights}
        positions = torch.arange(scores.size(1), device=scores.device)
        fits = (scores_wide > 0) & state["mask"] & (positions >= state["position"].unsqueeze(1))
        weights = (fits & (fits.cumsum(dim=-1) == 1)).to(scores.dtype)
        position = torch.where(fits.any(dim=1), fits.int().argmax(dim=1), state["keys"])
        return weights, {**state, "position": position}

    def scan(
        self, score_keys: Callable[[Tensor, Tensor], Tensor], state: AlignmentState
    ) -> tuple[Tensor, AlignmentState]:
        """Return which rows (B,) stop at their new `state["position"]`, and that state."""
        wide = torch.promote_types(self.offset.dtype, torch.float32)
        position, keys = state["position"].clone(), state["keys"]
        stopped = torch.zeros_like(position, dtype=torch.bool)
        reading = (position < keys).nonzero().squeeze(1)  # rows
        while reading.numel():
            scores = score_keys(reading, position[reading]).to(wide) + self.offset.to(wide)
            stops = (scores > 0) & state["mask"][reading, position[reading]]
            stopped[reading[stops]] = True
            reading = reading[~stops]
            position[reading] += 1
            reading = reading[position[reading] < keys[reading]]
        return stopped, {**state, "position": position}

    def stop_probabilities(self, scores: Tensor) -> Tensor:
        """Return the probability that the head stops at a key it is on, without noise: (..., S)."""
        wide = torch.promote_types(self.offset.dtype, torch.float32)
        return (scores.to(wide) + self.offset.to(wide)).sigmoid()

    def _expected(self, scores: Tensor, mask: Tensor, previous: Tensor) -> Tensor:
        """Return the probability that the head stops at each key."""
        if self.noise:
            scores = torch.add(scores, torch.randn_like(scores), alpha=self.noise)
        return expected_alignment(scores, mask, previous)


class MochaAlignment(MonotonicAlignment):
    r"""MoChA: a softmax over the last `chunk_size` keys where the head stops.

    .. math:: \beta_{ts} = \sum_{k=s}^{s+w-1} \alpha_{tk} \exp(u_{ts})
        \Big/ \sum_{l=k-w+1}^{k} \exp(u_{tl})

    Chiu and Raffel (2018); u is a separate additive score. A row has the sum of the head's row.
    """

    scans_keys = False

    def __init__(
        self,
        *,
        query_width: int = 0,
        key_width: int = 0,
        score_width: int = 0,
        offset: float = -1.0,
        noise: float = 1.0,
        chunk_size: int = 4,
    ) -> None:
        super().__init__(
            query_width=query_width,
            key_width=key_width,
            score_width=score_width,
            offset=offset,
            noise=noise,
        )
        self.require_widths(query_width=query_width, key_width=key_width, score_width=score_width)
        if chunk_size < 1:
            raise DragomanError(
                "chunk_size must be at least 1",
                found=f"chunk_size={chunk_size}",
                fix="use 2 to 8, as the paper does",
            )
        self.chunk_size = chunk_size  # w
        self.prepared_width = score_width
        self.chunk_score = AdditiveScore(
            query_width=query_width, key_width=key_width, score_width=score_width
        )

    def prepare(self, key: Tensor) -> Tensor:
        """Project the keys for the chunk score: (B, S, D) to (B, S, A)."""
        return self.chunk_score.prepare(key)

    def step(
        self,
        scores: Tensor,
        state: AlignmentState,
        query: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, AlignmentState]:
        """Return the chunkwise weights of one position."""
        assert query is not None, "the chunk score needs the query"
        assert key is not None, "the chunk score needs the prepared keys"
        stop_weights, state = super().step(scores, state)
        # Several rows may share the keys of a sentence, as beams do.
        energies = self.chunk_score(query.view(key.size(0), -1, query.size(1)), key)
        energies = energies.view_as(stop_weights)
        return spread_over_chunks(stop_weights, energies, state["mask"], self.chunk_size), state


def spread_over_chunks(
    stop_weights: Tensor, energies: Tensor, mask: Tensor, chunk_size: int
) -> Tensor:
    """Spread the weight of each stop over the `chunk_size` keys that end there; all are (B, S)."""
    keys, before = stop_weights.size(1), chunk_size - 1
    # (B, S, chunk_size); the last key of a window is the stop itself
    windows = F.pad(energies, (before, 0)).unfold(1, chunk_size, 1)
    visible = F.pad(mask, (before, 0)).unfold(1, chunk_size, 1)
    parts = masked_softmax(windows, visible) * stop_weights.unsqueeze(-1)
    shifted = [
        F.pad(parts[:, before - index :, index], (0, before - index))[:, :keys]
        for index in range(chunk_size)
    ]
    return torch.stack(shifted).sum(dim=0)
