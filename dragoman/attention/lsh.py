"""Reformer self-attention by locality-sensitive hashing (Kitaev et al. 2020).

Hashing and sorted chunks are in `ops/lsh_attention.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.attention_weight_hooks import AttentionRecord, RecordableAttention
from dragoman.attention.lsh_bucket_count import bucket_problem, factor_buckets
from dragoman.errors import DragomanError
from dragoman.ops import attend, masked_softmax
from dragoman.ops.lsh_attention import attend_lsh, bucket_mask, hash_vectors


class HashedProjections(NamedTuple):
    """Queries, keys and values of a sequence, with their buckets."""

    query: Tensor  # (B, H, T, Dh)
    key_value: Tensor  # (B, 2, H, T, Dh), the layout of the KV cache; keys are normalized queries
    buckets: Tensor  # (R, B, H, T)


class LSHAttention(RecordableAttention):
    r"""LSH self-attention: a token attends to tokens in its bucket, in several rounds of hashing.

    .. math:: o_i = \sum_{j \in P_i} \exp(q_i \cdot k_j - z_i)\, v_j \qquad
        k_j = q_j / \lVert q_j \rVert

    Kitaev et al. (2020), with one projection for queries and keys. P_i are the tokens of i's bucket
    in any round whose rank in the bucket is at most `window` from i's (before it, if causal),
    without i itself unless there is no other. A pair that shares a bucket in several rounds
    counts once, as in the paper's equation for several rounds (its N_ij): with more rounds the
    result approaches full attention with shared queries and keys.

    Two things differ from the paper. The paper cuts the sorted sequence into chunks, so that the
    tokens a token attends to depend on other buckets, later tokens included; here they depend on
    its own bucket only. And rotations are drawn once, with the weights, and saved with them; the
    paper draws new ones at each use. So no token depends on its future, on padding or on other
    sentences, and decoding equals training. Hashing is discrete, though: a vector within rounding
    of a boundary may fall into another bucket in another dtype.

    Buckets should hold fewer tokens than the window: set `buckets` to about 2 * length / window for
    the longest sequences (the paper's rule). Their number does not depend on the length of a batch,
    or a growing sequence would have to be hashed again at each step. There is no attention dropout.
    `torch_compile` fuses the operations between the matmuls; on a GPU long sequences are worth the
    half minute that it takes.
    """

    is_discrete = True  # buckets are chosen by an argmax

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
                    f"{name} of LSH attention must be at least 1",
                    found=str(number),
                    fix=f"try {name}=4",
                )
        if problem := bucket_problem(buckets):
            raise DragomanError(
                f"buckets of LSH attention must be {problem.must}",
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
        # One projection for queries and keys.
        self.query_value = nn.Linear(width, 2 * heads * self.head_width, bias=bias)
        self.output = nn.Linear(heads * self.head_width, width, bias=bias)
        self.register_buffer(
            "rotations",
            torch.randn(heads, self.head_width, rounds, sum(factor_buckets(buckets)) // 2),
        )

    rotations: Tensor

    def project(self, x: Tensor, buckets: Tensor | None = None) -> HashedProjections:
        """Project (B, T, D) to queries, keys and values; hash them unless `buckets` are given."""
        query, value = (
            self.query_value(x)
            .unflatten(-1, (2, self.heads, self.head_width))
            .permute(2, 0, 3, 1, 4)
        )
        exact = query.to(torch.promote_types(query.dtype, torch.float32))
        key = F.normalize(exact, dim=-1, eps=1e-6).to(query.dtype)
        if buckets is None:
            with torch.no_grad():
                buckets = hash_vectors(query.detach(), self.rotations, factor_buckets(self.buckets))
                # int16 sorts faster, and takes less memory where buckets are saved.
                buckets = buckets.to(torch.int16 if self.buckets < 2**15 - 1 else torch.int32)
        return HashedProjections(query, torch.stack([key, value], dim=1), buckets)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        saved: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """Attend from (B, T, D) to itself; `mask` (B, T) is True for real tokens.

        Buckets in `saved` are used instead of hashing; otherwise they are stored there, for the
        backward pass of a reversible layer.
        """
        saved = {} if saved is None else saved
        query, key_value, buckets = self.project(x, saved.get("buckets"))
        saved["buckets"] = buckets
        key, value = key_value.unbind(1)
        buckets = _move_padding_last(buckets, mask)
        if self.hooks is not None:
            visible = bucket_mask(buckets, window=self.window, causal=causal)
            return self.attend_heads(query, key, value, visible)
        context = attend_lsh(
            query,
            key,
            value,
            buckets,
            window=self.window,
            causal=causal,
            torch_compile=self.torch_compile,
        )
        return self._project_output(context)

    def attend_heads(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        """Attend from (B, H, T, Dh) to the visible (B, H, T, S) of (B, H, S, Dh): (B, T, D)."""
        if self.hooks is None:
            return self._project_output(attend(query, key, value, mask=visible, scale=1.0))
        weights = self.apply_edits(masked_softmax(query @ key.mT, visible))
        context = weights @ value
        self.emit_record(AttentionRecord(weights, value, context))
        return self._project_output(context)

    def _project_output(self, context: Tensor) -> Tensor:
        """Concatenate the heads and project: (B, H, T, Dh) to (B, T, D)."""
        return self.output(context.transpose(1, 2).flatten(2))


def _move_padding_last(buckets: Tensor, mask: Tensor | None) -> Tensor:
    """Return buckets (R, B, H, T) with padding in a bucket of its own after all others."""
    if mask is None:
        return buckets
    return buckets.masked_fill(~mask[:, None, :], torch.iinfo(buckets.dtype).max)
