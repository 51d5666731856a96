"""Admitting new sentences to a running batch: two states become one, whose rows stand at different places."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dragoman.models.decoder_state import DecoderState


def join(first: DecoderState, second: DecoderState) -> DecoderState:
    """Put the rows of two states of one model below each other; like extending, this spends both."""
    if (
        first.rows * second.sentences != second.rows * first.sentences
    ):  # different numbers of rows a sentence
        first, second = (
            state.select(torch.arange(state.rows, device=state.device)) for state in (first, second)
        )
    return _join(first, second, first.rows, second.rows)


def _join(
    first: DecoderState, second: DecoderState, first_rows: int, second_rows: int
) -> DecoderState:
    """Join states that have as many rows a sentence as each other."""
    level = (
        first.length == second.length and first.position_ids is None and second.position_ids is None
    )
    return DecoderState(
        recurrent={
            name: _below(tensor, second.recurrent[name]) for name, tensor in first.recurrent.items()
        },
        cache={name: _below(tensor, second.cache[name]) for name, tensor in first.cache.items()},
        memory=_join_memory(first.memory, second.memory),
        children={
            name: _join(part, second.children[name], first_rows, second_rows)
            for name, part in first.children.items()
        },
        length=max(first.length, second.length),
        position_ids=None
        if level
        else torch.cat([_position_ids(first, first_rows), _position_ids(second, second_rows)]),
    )


def _position_ids(state: DecoderState, rows: int) -> Tensor:
    """Say how many positions each row has seen."""
    return (
        torch.full((rows,), state.length, device=state.device)
        if state.position_ids is None
        else state.position_ids
    )


def _join_memory(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join what was read of the sources, hiding the places that a shorter one does not have."""
    masks = [_mask(memory) for memory in (first, second)]
    joined = {
        name: _below(tensor, second[name]) for name, tensor in first.items() if name != "mask"
    }
    if masks[0] is None or masks[1] is None:
        return joined
    if "mask" in first or "mask" in second or masks[0].size(1) != masks[1].size(1):
        joined["mask"] = _below(masks[0], masks[1])
    return joined


def _mask(memory: dict[str, Tensor]) -> Tensor | None:
    """Find or make the mask (sentences, S); everything else has S on its last axis but one."""
    if not memory or "mask" in memory:
        return memory.get("mask")
    tensor = next(iter(memory.values()))
    return torch.ones(tensor.size(0), tensor.size(-2), dtype=torch.bool, device=tensor.device)


def _below(upper: Tensor, lower: Tensor) -> Tensor:
    """Concatenate rows, the smaller tensor padded at the end of its other axes with zeros."""
    sizes = [max(pair) for pair in zip(upper.shape[1:], lower.shape[1:], strict=True)]
    return torch.cat([_padded(tensor, sizes) for tensor in (upper, lower)])


def _padded(tensor: Tensor, sizes: list[int]) -> Tensor:
    """Pad all axes but the first."""
    missing = [
        amount
        for size, has in zip(reversed(sizes), reversed(tensor.shape[1:]), strict=True)
        for amount in (0, size - has)
    ]
    return F.pad(tensor, missing) if any(missing) else tensor
