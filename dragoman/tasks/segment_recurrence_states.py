"""States that segments of a stream carry over: Transformer-XL's memory and RNN states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SEGMENT = "segment"  # name, in a checkpoint, of the index of the next segment


class SegmentStates:
    """Carried tensors of all rows of a batch, double-buffered.

    Segment k reads buffer k % 2 and writes the other. So computing a batch again, after running out
    of memory or to warm up a CUDA graph, gives the same result; and a captured graph, which reads
    and writes fixed tensors, belongs to one parity of k. Which segment was computed last is known
    on the device only, since a replayed graph runs no Python.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], rows: int) -> None:
        self._shapes, self._rows = dict(shapes), rows
        self._buffers: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self._next: Tensor | None = None  # () index of the segment to be computed next

    def read(self, segment_parity: int, streams: Tensor, segments: Tensor) -> dict[str, Tensor]:
        """Return the states carried to these segments; zeros at a stream's first segment."""
        buffer, has_previous = self._buffers[segment_parity], segments > 0
        found = {}
        for name, shape in self._shapes.items():
            if name not in buffer:
                found[name] = torch.zeros(len(streams), *shape, device=streams.device)
                continue
            tensor = buffer[name].index_select(0, streams)
            keep = has_previous.view(-1, *(1 for _ in shape))
            found[name] = torch.where(keep, tensor, torch.zeros_like(tensor))
        return found

    @torch.no_grad()
    def write(
        self, segment_parity: int, streams: Tensor, segments: Tensor, carried: Mapping[str, Tensor]
    ) -> None:
        """Store the states of these segments, for the next ones of their streams.

        Zeros take the place of NaN and infinity. The step of a segment that overflows is skipped,
        but every later one of the epoch would read its states, and none would be finite.
        """
        target = 1 - segment_parity
        for name, tensor in carried.items():
            for buffer in self._buffers:
                if name not in buffer:
                    buffer[name] = tensor.new_zeros(self._rows, *self._shapes[name])
            finite = torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)
            self._buffers[target][name].index_copy_(0, streams, finite)
        if self._next is None:
            self._next = torch.zeros((), dtype=torch.int64, device=segments.device)
        self._next.copy_(segments[0] + 1)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states for the next segment, and its index; empty before the first."""
        if self._next is None:
            return {}
        buffer = self._buffers[int(self._next) % 2]
        return {SEGMENT: self._next.view(1), **buffer}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore `state_dict`; with an empty mapping, start from zero.

        Existing tensors are kept: captured CUDA graphs read and write them.
        """
        if not state:
            return  # the first segment reads zeros, not the buffers
        parity = int(state[SEGMENT]) % 2
        if self._next is None:
            self._next = torch.zeros((), dtype=torch.int64, device=device)
        self._next.copy_(state[SEGMENT].view(()))
        for name in self._shapes:
            for buffer in self._buffers:
                if name not in buffer:
                    buffer[name] = torch.zeros_like(state[name], device=device)
            self._buffers[parity][name].copy_(state[name])
