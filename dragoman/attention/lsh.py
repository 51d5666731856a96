"""Attention by locality-sensitive hashing: a query looks only at keys that point its way, so long sequences cost what they are long."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention import lsh_buckets as numbers
from dragoman.attention.recorder import AttentionRecord, RecordableAttention
from dragoman.errors import DragomanError
from dragoman.ops import attend, masked_softmax
from dragoman.ops.lsh_attention import attend_sorted, hash_vectors, sort_by_bucket


class HashedProjections(NamedTuple):
    """What tokens ask, answer with, and fall into."""

    query: Tensor  # (B, H, T, Dh)
    key_value: Tensor  # (B, 2, H, T, Dh), as a cache keeps them; keys are queries of length one
    buckets: Tensor  # (R, B, H, T)


class LSHAttention(RecordableAttention):
    r"""A sequence attends to itself, each token to those that share a bucket with it in one of several rounds of hashing.

    .. math:: o_i = \sum_{j \in P_i} \exp(q_i \cdot k_j - z_i)\, v_j \qquad k_j = q_j / \lVert q_j \rVert

    Kitaev et al. (2020), with one projection for queries and keys. P_i are the tokens of i's bucket in any round whose rank
    in the bucket is at most `window` from i's (before it, where attention is causal), without i itself unless there is no other.
    A pair that meets in several rounds counts once, as in the paper's equation for several rounds (its N_ij): with more rounds the
    result comes to full attention with shared queries and keys.

    It differs from the paper in two things. The paper cuts the sorted sequence into chunks, and what a token sees depends on where the
    cuts fall, that is on tokens of other buckets, later ones too; here it is counted from the token, inside its bucket. And rotations
    are drawn once, with the weights, and saved with them, where the paper draws new ones at each use. So no token changes with
    its future, with padding or with neighbours, and generating gives what training saw. A hash is a choice, though: a
    vector within rounding of a border may fall into the other bucket in another number format.

    Buckets should hold fewer tokens than the window: set `buckets` to about 2 * length / window for the longest sequences (the paper's
    rule). Their number does not follow the length of a batch, or a growing sequence would be hashed anew at each step. Sequences up to
    2 * rounds * window are masked rather than sorted, which is quicker there and gives the same. Attention weights are not dropped.
    `compiled` makes one kernel of what lies between the products of sorted sequences: worth its half minute on a GPU.
    """

    is_discrete = True  # buckets

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        head_width: int = 0,
        rounds: int = 4,
        buckets: int = 32,
        window: int = 64,
        bias: bool = True,
        torch_compile: bool = False,
    ) -> None:
        super().__init__()
        if not head_width and width % heads:
            raise DragomanError(
                "heads must divide the width",
                found=f"{heads} heads and width {width}",
                fix="change one of them",
            )
        for name, number in (("rounds", rounds), ("window", window)):
            if number < 1:
                raise DragomanError(
                    f"{name} of hashed attention must be at least 1",
                    found=str(number),
                    fix=f"try {name}=4",
                )
        if problem := numbers.bucket_problem(buckets):
            raise DragomanError(
                f"buckets of hashed attention must be {problem.must}",
                found=str(buckets),
                fix=problem.fix,
            )
        self.heads, self.head_width = heads, head_width or width // heads
        self.rounds, self.buckets, self.window, self.torch_compile = (
            rounds,
            buckets,
            window,
            torch_compile,
        )
        self.query_value = nn.Linear(
            width, 2 * heads * self.head_width, bias=bias
        )  # one projection for queries and keys
        self.output = nn.Linear(heads * self.head_width, width, bias=bias)
        self.register_buffer(
            "rotations",
            torch.randn(heads, self.head_width, rounds, sum(numbers.factor_buckets(buckets)) // 2),
        )

    rotations: Tensor

    def project(self, x: Tensor, buckets: Tensor | None = None) -> HashedProjections:
        """Make queries, keys and values of (B, T, D), and hash them unless their buckets (R, B, H, T) are known."""
        query, value = (
            self.query_value(x)
            .unflatten(-1, (2, self.heads, self.head_width))
            .permute(2, 0, 3, 1, 4)
        )
        exact = query.to(torch.promote_types(query.dtype, torch.float32))
        key = F.normalize(exact, dim=-1, eps=1e-6).to(query.dtype)
        if buckets is None:
            with torch.no_grad():
                buckets = hash_vectors(
                    query.detach(), self.rotations, numbers.factor_buckets(self.buckets)
                )
                buckets = buckets.to(
                    torch.int16 if self.buckets < 2**15 - 1 else torch.int32
                )  # small ones sort faster, and may be kept
        return HashedProjections(query, torch.stack([key, value], dim=1), buckets)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        saved: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Attend from (B, T, D) to itself; `mask` (B, T) marks real tokens.

        Buckets in `saved` are used instead of hashing; otherwise they are stored there, for the
        backward pass of a reversible layer.
        """
        saved = {} if saved is None else saved
        query, key_value, buckets = self.project(x, saved.get("buckets"))
        saved["buckets"] = buckets
        key, value = key_value.unbind(1)
        tokens = sort_by_bucket(_move_padding_last(buckets, mask), self.window)
        if self.hooks is not None or x.size(1) <= 2 * self.rounds * self.window:
            codes = tokens.codes.view(buckets.shape)
            return self.attend_heads(query, key, value, self._visible_pairs(codes, causal))
        return self._project_output(
            attend_sorted(
                query,
                key,
                value,
                tokens,
                window=self.window,
                causal=causal,
                torch_compile=self.torch_compile,
            )
        )

    def attend_heads(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """Attend from (B, H, T, Dh) to what is visible, (B, H, T, S), of (B, H, S, Dh), and join the heads: (B, T, D)."""
        if self.hooks is None:
            return self._project_output(attend(query, key, value, mask=visible, scale=1.0))
        weights = self.apply_edits(masked_softmax(query @ key.mT, visible))
        context = weights @ value
        self.noted(AttentionRecord(weights, value, context))
        return self._project_output(context)

    def _project_output(self, context: Tensor) -> Tensor:
        """Join what the heads found: (B, H, T, Dh) gives (B, T, D)."""
        return self.output(context.transpose(1, 2).flatten(2))

    def _visible_pairs(self, codes: Tensor, causal: bool) -> Tensor:
        """Say which pairs meet in any round, by codes (R, B, H, T): (B, H, T, T)."""
        met = None
        for code in codes:
            ahead = code.unsqueeze(-1) - code.unsqueeze(
                -2
            )  # by how much a query's place is behind a key's
            near = ((ahead > 0) if causal else (ahead != 0)) & (ahead.abs() <= self.window)
            met = near if met is None else met | near
        assert met is not None, "there must be at least one round"
        itself = torch.eye(codes.size(-1), dtype=torch.bool, device=codes.device)
        return met | (itself & ~met.any(dim=-1, keepdim=True))


def _move_padding_last(buckets: Tensor, mask: Tensor | None) -> Tensor:
    """Return buckets (R, B, H, T) with padding in a bucket of its own after all others."""
    if mask is None:
        return buckets
    return buckets.masked_fill(~mask[:, None, :], torch.iinfo(buckets.dtype).max)
