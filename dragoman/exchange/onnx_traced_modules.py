"""Modules to trace for ONNX: the encoder, and a decoder step with its state as named tensors.

This works for any model: a decoder state is a tree of named tensors, and their dynamic axes are
found by trying two sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.models.decoder_state import DecoderState
from dragoman.models.encoder_decoder import EncoderDecoder

BATCH, SOURCE, PAST = "batch", "source", "past"
_STATE_KINDS = ("recurrent", "cache", "memory")


class StateTensor(NamedTuple):
    """One tensor of a decoder state: its path, and its dynamic axes."""

    path: tuple[str, ...]  # such as ("decoder", "0")
    kind: str  # carried, cache or memory
    name: str
    axes: dict[int, str]  # axis -> batch, source or past

    @property
    def label(self) -> str:
        """The name of the tensor: `decoder_0_cache_key_value`."""
        return "_".join((*self.path, self.kind, self.name))

    @property
    def is_read_only(self) -> bool:
        """Whether it is constant over the steps: computed from the encoder."""
        return self.kind == "memory"


class ConcatState(DecoderState):
    """A decoder state whose caches grow by concatenation: a graph has no capacity to manage."""

    __slots__ = ()

    def append(self, name: str, new: Tensor) -> DecoderState:
        """Append new positions to a cache."""
        cache = {**self.cache, name: torch.cat([self.cache[name], new], dim=-2)}
        return replace(self.advance(new.size(-2)), cache=cache)


class TracedEncoder(nn.Module):
    """Sources and their mask in, the decoder state before the first token out."""

    def __init__(self, model: EncoderDecoder, slots: Sequence[StateTensor]) -> None:
        super().__init__()
        self.model, self.slots = model, slots

    def forward(self, src: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Encode sources (B, S), real where the mask is True."""
        return tuple(
            _get_tensor(self.model.start(self.model.encode(src, mask)), slot) for slot in self.slots
        )


class TracedDecoderStep(nn.Module):
    """One token per row and the state in, the logits of the next token and the new state out."""

    def __init__(self, model: EncoderDecoder, slots: Sequence[StateTensor]) -> None:
        super().__init__()
        self.model, self.slots = model, slots

    def forward(self, tokens: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Run one decoder step on tokens (B,) and the tensors of the state."""
        state = _rebuild_state(self.slots, tensors)
        logits, state = self.model.step(tokens, state)
        return (logits, *(_get_tensor(state, slot) for slot in self.slots if not slot.is_read_only))


def find_state_tensors(model: EncoderDecoder) -> list[StateTensor]:
    """List the tensors of a model's state, with dynamic axes found by trying two sizes."""
    found = []
    for small, large in zip(
        _iter_tensors(_make_state(model, 3, 5, 2)),
        _iter_tensors(_make_state(model, 4, 7, 6)),
        strict=True,
    ):
        (path, kind, name, before), (*_, after) = small, large
        growing_axes = {(3, 4): BATCH, (5, 7): SOURCE, (2, 6): PAST}
        axes = {
            axis: growing_axes[sizes]
            for axis, sizes in enumerate(zip(before.shape, after.shape, strict=True))
            if sizes in growing_axes
        }
        found.append(StateTensor(path, kind, name, axes))
    return found


def example_state(model: EncoderDecoder, slots: Sequence[StateTensor]) -> list[Tensor]:
    """Return the tensors of a state after two tokens, to trace a step with."""
    state = _make_state(model, 3, 5, 2)
    return [_get_tensor(state, slot).clone() for slot in slots]


def _make_state(model: EncoderDecoder, rows: int, source: int, past: int) -> DecoderState:
    """Build a state of given sizes."""
    with torch.no_grad():
        mask = torch.ones(rows, source, dtype=torch.bool)
        mask[0, -1] = False
        state = model.start(model.encode(torch.full((rows, source), 4), mask))
        for _ in range(past):
            _, state = model.step(torch.full((rows,), 4), state)
    return state


def _iter_tensors(
    state: DecoderState, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str, str, Tensor]]:
    """Yield the tensors of a state in a fixed order."""
    for kind in _STATE_KINDS:
        for name in sorted(getattr(state, kind)):
            yield (
                path,
                kind,
                name,
                state.filled(name) if kind == "cache" else getattr(state, kind)[name],
            )
    for name in state.children:
        yield from _iter_tensors(state.children[name], (*path, name))


def _get_tensor(state: DecoderState, slot: StateTensor) -> Tensor:
    """Return the tensor of a state at a path."""
    for name in slot.path:
        state = state.children[name]
    tensor: Tensor = (
        state.filled(slot.name) if slot.kind == "cache" else getattr(state, slot.kind)[slot.name]
    )
    return tensor


def _rebuild_state(slots: Sequence[StateTensor], tensors: Sequence[Tensor]) -> DecoderState:
    """Rebuild a state from its tensors; its length is that of its caches."""
    length = next(
        (
            tensor.size(-2)
            for slot, tensor in zip(slots, tensors, strict=True)
            if slot.kind == "cache"
        ),
        0,
    )

    def build(path: tuple[str, ...]) -> DecoderState:
        own = [
            (slot, tensor) for slot, tensor in zip(slots, tensors, strict=True) if slot.path == path
        ]
        below = dict.fromkeys(
            slot.path[len(path)]
            for slot in slots
            if len(slot.path) > len(path) and slot.path[: len(path)] == path
        )
        return ConcatState(
            recurrent={slot.name: tensor for slot, tensor in own if slot.kind == "recurrent"},
            cache={slot.name: tensor for slot, tensor in own if slot.kind == "cache"},
            memory={slot.name: tensor for slot, tensor in own if slot.kind == "memory"},
            children={name: build((*path, name)) for name in below},
            length=length,
        )

    return build(())
