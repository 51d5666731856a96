"""How the order of tokens enters a model: position vectors, relative scores, reach.

What a model adds to its embeddings is shown as the similarity of positions; what it adds inside
self-attention as a curve for each head: the part of the score that the distance decides, averaged
over the queries (and keys) of the sentence. Convolutions and windows have a reach.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.multi_head import SelfAttention, _normalize_heads
from dragoman.attention.positions import LearnedPositions, Positions, SinusoidalPositions
from dragoman.attention.recorder import find_attentions
from dragoman.attention.relative_positions import (
    AlibiBias,
    RotaryEmbedding,
    ShawRelativeKeys,
    T5RelativeBias,
    TransformerXLBias,
)
from dragoman.explain.forced_target import ForcedTarget
from dragoman.layers.convolution import GatedConvolution
from dragoman.layers.rnn import RNN, SlicedRNN
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.stack import Stack

MAX_POSITIONS = 128  # of the similarity
MAX_DISTANCE = 32  # of the curves
SIMILARITY = "pos.sim"  # name of the array

_NOTES = {
    "sinusoidal": "Sines and cosines of the position are added to the embeddings.",
    "learned": "A trained vector for each position is added to the embeddings.",
    "recurrent": "An RNN reads the tokens one after another; it needs no positions.",
    "convolution": "Convolutions see a window of neighbors; there are no positions.",
    "none": "Nothing tells the order of the tokens but the causal mask of the decoder.",
    RotaryEmbedding: "Queries and keys are rotated by their positions. A curve is the score of "
    "the sentence's mean query and mean key at a distance.",
    AlibiBias: "A penalty that grows with the distance is added to the scores, steeper in some "
    "heads than in others.",
    T5RelativeBias: "A trained number for each range of distances is added to the scores.",
    ShawRelativeKeys: "A trained vector for each distance is added to the keys. A curve is what "
    "it adds to the score of the sentence's mean query.",
    TransformerXLBias: "A projection of sines and cosines of the distance acts as a second key. A "
    "curve is what it adds to the score of the sentence's mean query.",
}


class PositionSummary(NamedTuple):
    """How order enters a model, and the arrays that it names."""

    positions: dict[str, Any]  # kind, note, tensor, curves, reach
    arrays: dict[str, NDArray[np.float32]]


class _Curve(NamedTuple):
    """The score of each head at each distance, key position minus query position."""

    distances: list[int]
    scores: Tensor  # (H, n)


def summarize_positions(forced: ForcedTarget, site_ids: Mapping[str, str]) -> PositionSummary:
    """Return how order enters a model; `site_ids` are the sites of module paths, such as "e0"."""
    model = forced.model
    entrance = model.src_entrance if isinstance(model, EncoderDecoder) else model.entrance
    absolute = entrance.positions
    relative = {
        path: module
        for path, module in find_attentions(model).items()
        if isinstance(module, SelfAttention) and module.within is not None
    }
    length = max(forced.src_length, forced.tgt_length)
    arrays: dict[str, NDArray[np.float32]] = {}
    similarity = position_similarity(absolute, length)
    if similarity is not None:
        arrays[SIMILARITY] = similarity
    reach, reach_note = describe_reach(model)
    kind, notes = "none", list[str]()
    if isinstance(absolute, LearnedPositions):
        kind = "learned"
    elif isinstance(absolute, SinusoidalPositions):
        kind = "sinusoidal"
    if kind != "none":
        notes.append(_NOTES[kind])
    kinds = dict.fromkeys(type(module.within) for module in relative.values())
    if kinds and kind == "none":
        kind = "rotary" if RotaryEmbedding in kinds else "relative"
    notes += [_NOTES[each] for each in kinds if each in _NOTES]
    if kind == "none":
        kind = _order_of_blocks(model)
        notes.append(_NOTES[kind])
    curves = [
        {"site": site_ids[path], "head": head, "x": curve.distances, "y": row}
        for path, curve in _read_curves(forced, relative).items()
        if path in site_ids
        for head, row in enumerate(np.round(curve.scores.double().cpu().numpy(), 4).tolist())
    ]
    return PositionSummary(
        {
            "kind": kind,
            "note": " ".join([*notes, *([reach_note] if reach_note else [])]),
            "tensor": SIMILARITY if similarity is not None else None,
            "curves": curves,
            "reach": reach,
        },
        arrays,
    )


def position_similarity(positions: Positions, length: int) -> NDArray[np.float32] | None:
    """Return the cosine similarity (P, P) of the first position vectors; None if there are none.

    P is the length of the sentence, at least 32 and at most 128.
    """
    count = min(max(length, MAX_DISTANCE), MAX_POSITIONS, positions.max_positions)
    with torch.no_grad():
        vectors = positions.vectors(0, count)
        if vectors is None:
            return None
        unit = nn.functional.normalize(vectors.float(), dim=-1)
        array: NDArray[np.float32] = (unit @ unit.T).clamp(-1, 1).cpu().numpy()
    return array


def describe_reach(model: nn.Module) -> tuple[int | None, str]:
    """Return how far a position sees to a side, and a sentence; None if there is no limit.

    The number is that of the encoder if it has a limit, else of the decoder.
    """
    sides = [
        (name, stack)
        for name in ("encoder", "decoder")
        if isinstance(stack := getattr(model, name, None), Stack) and stack.depth
    ]
    found = [(name, reach) for name, stack in sides if (reach := _stack_reach(stack)) is not None]
    if not found:
        return None, ""
    said = " and ".join(f"{reach} in the {name}" for name, reach in found)
    return found[0][1], f"A position sees at most this many tokens to the left: {said}."


def _stack_reach(stack: Stack) -> int | None:
    """Return how far to the left a position of a stack sees; None if there is no limit."""
    if any(isinstance(module, (RNN, SlicedRNN)) for module in stack.modules()):
        return None
    reach = 0
    for path, module in stack.named_modules():
        if isinstance(module, GatedConvolution):
            reach += module.left_padding
        elif isinstance(module, SelfAttention):
            if not module.window:
                return None
            reach += module.window
        elif path.endswith(".self"):  # LSH attention
            return None
    return reach


def _order_of_blocks(model: nn.Module) -> str:
    """Return the kind of a model without position encodings: recurrent, convolution or none."""
    if any(isinstance(module, RNN) for module in model.modules()):
        return "recurrent"
    has_convolution = any(isinstance(module, GatedConvolution) for module in model.modules())
    return "convolution" if has_convolution else "none"


def _read_curves(
    forced: ForcedTarget, attentions: Mapping[str, SelfAttention]
) -> dict[str, _Curve]:
    """Return the curve of each self-attention with relative positions."""
    if not attentions:
        return {}
    with torch.no_grad(), _collected_inputs(attentions) as inputs:
        forced.baseline()
        curves = {}
        for path, attention in attentions.items():
            is_source = path.startswith("encoder.")
            length = forced.src_length if is_source else forced.tgt_length
            curves[path] = distance_curve(attention, inputs[path], length, causal=not is_source)
        return curves


def distance_curve(attention: SelfAttention, x: Tensor, length: int, *, causal: bool) -> _Curve:
    """Return the part of the scores that the distance decides, for inputs x (1, T, D).

    Scores are linear in the query and, with rotary embeddings, in the key: the mean over the
    sentence is the score of the mean query and key.
    """
    farthest = min(max(length - 1, 1), MAX_DISTANCE)
    distances = list(range(-farthest, 1 if causal else farthest + 1))
    within = attention.within
    assert within is not None, "the attention has relative positions"
    query, key = _mean_query_key(attention, x)  # (1, H, 1, Dh)
    if within.has_bias:
        offsets = torch.tensor([distances], device=x.device)  # (1, n)
        bias = within.bias(offsets, query)
        return _Curve(distances, bias.reshape(-1, len(distances)))  # (H, n)
    # q R(d) k for a key d positions later; for one before it the query is rotated instead.
    count = farthest + 1
    rotated = [within.rotate(part.expand(-1, -1, count, -1), None) for part in (query, key)]
    before = (rotated[0] * key).sum(-1).flip(-1)  # distances -farthest to 0
    after = (query * rotated[1]).sum(-1)[..., 1:]  # 1 to farthest
    scores = before if causal else torch.cat([before, after], dim=-1)
    return _Curve(distances, (scores * query.size(-1) ** -0.5)[0])


def _mean_query_key(attention: SelfAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean query and key (1, H, 1, Dh) of inputs (1, T, D), not rotated."""
    sizes = [attention.inner, attention.kv_inner, attention.value_inner]
    packed = torch.split(attention.query_key_value(x), sizes, dim=-1)[:2]
    query, key = (attention.split(part, 1).squeeze(1) for part in packed)
    if attention.query_norm is not None and attention.key_norm is not None:
        query = _normalize_heads(attention.query_norm, query)
        key = _normalize_heads(attention.key_norm, key)
    key = key.repeat_interleave(attention.heads // attention.kv_heads, dim=1)
    return query.mean(dim=2, keepdim=True), key.mean(dim=2, keepdim=True)


@contextmanager
def _collected_inputs(attentions: Mapping[str, SelfAttention]) -> Iterator[dict[str, Tensor]]:
    """Collect the inputs (1, T, D) of attentions within the block, in this thread only."""
    owner, inputs = threading.get_ident(), dict[str, Tensor]()

    def collect(path: str, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == owner:
            inputs[path] = args[0]

    handles = [
        module.register_forward_pre_hook(lambda _, args, path=path: collect(path, args))
        for path, module in attentions.items()
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
