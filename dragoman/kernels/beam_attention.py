"""Attention of one new position of every beam, for a search on a GPU: to its own past, and to its sentence.

The beams of a sentence keep keys and values side by side, and a table says which of them are a beam's past. PyTorch's fused kernels are
made for many queries and take five times as long as memory needs for these few. Here one program holds a head of all beams of a
sentence and reads what any of them sees, once. The kernels are Triton's (`beam_tiles.py`), imported at the first use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.kernels.guarding import Guarded

HEAD_WIDTHS = (16, 32, 64, 128)

OWN = Guarded("a beam's attention to its past")
CROSS = Guarded("a beam's attention to its sentence")


def attend_past(query: Tensor, key_value: Tensor, own: Tensor, seen: Tensor, *, step: Tensor, slots: Tensor) -> Tensor:
    """Keep the newest keys and values (N, 2, H, K, Dh) in `own` (N, 2, H, slots, Dh) at `slots`, and attend from queries (N, H, K, Dh).

    What `seen` (N, 1, K, slots) holds is added to scores; it must be nought or minus infinity, and of the newest slots, which begin
    at `step` times K, show each beam its own. The context comes as (N, K, H * Dh).
    """

    def plain() -> tuple[Tensor]:
        return (attend_past_reference(query, key_value, own, seen, slots=slots),)

    if not reads_only_what_is_seen(query):
        return plain()[0]

    def fast() -> tuple[Tensor]:
        from dragoman.kernels import beam_tiles

        return (beam_tiles.attend_past(query, key_value, own, seen, step),)

    return OWN.run((query.dtype, query.shape[1:]), fast, plain)[0]


def reads_only_what_is_seen(like: Tensor) -> bool:
    """Say whether `attend_past` takes the same time whatever else there is room for, with heads of the width and type of (..., Dh)."""
    return OWN.tries(like) and _fits(like)


def attend_past_reference(query: Tensor, key_value: Tensor, own: Tensor, seen: Tensor, *, slots: Tensor) -> Tensor:
    """Do what `attend_past` does with PyTorch's kernels."""
    own.index_copy_(3, slots, key_value)
    context = F.scaled_dot_product_attention(query, own[:, 0], own[:, 1], attn_mask=seen)
    return context.transpose(1, 2).flatten(2)


def attend_sentence(query: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
    """Attend from queries (N, H, K, Dh) to the keys and values (N, 2, H, S, Dh) of their sentence: (N, K, H * Dh).

    `hidden` (N, 1, 1, S) is added to scores: nought, or minus infinity where a source is padded.
    """

    def plain() -> tuple[Tensor]:
        return (attend_sentence_reference(query, memory, hidden),)

    if not (CROSS.tries(query) and _fits(query)):
        return plain()[0]

    def fast() -> tuple[Tensor]:
        from dragoman.kernels import beam_tiles

        return (beam_tiles.attend_sentence(query, memory, hidden),)

    return CROSS.run((query.dtype, query.shape[1:]), fast, plain)[0]


def attend_sentence_reference(query: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
    """Do what `attend_sentence` does with PyTorch's kernels."""
    context = F.scaled_dot_product_attention(query, memory[:, 0], memory[:, 1], attn_mask=hidden)
    return context.transpose(1, 2).flatten(2)


def _fits(query: Tensor) -> bool:
    """Say whether the kernels take queries of this shape and type; in float32 tensor cores would round what they multiply."""
    return query.dtype in (torch.bfloat16, torch.float16) and query.size(-1) in HEAD_WIDTHS and query.numel() > 0
