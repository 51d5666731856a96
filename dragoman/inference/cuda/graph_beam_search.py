"""Beam search by CUDA graphs: decoder step and beam step of each shape are captured and replayed.

Launching a step kernel by kernel takes the host milliseconds, in which the GPU is mostly idle. Here
a step of each shape runs eagerly once, is captured the second time, and replayed from then on. The
host reads every few steps how many sentences are left, and compacts the batch if a smaller shape
will do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.beam_step import BeamState
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty
from dragoman.decoding.search_interface import SearchRequest, non_finite_error
from dragoman.inference.cuda.beam_step import BeamStepper
from dragoman.inference.cuda.cuda_graph_buffers import StaticBuffers, round_batch, round_length
from dragoman.inference.cuda.cuda_transformer import CudaTransformer
from dragoman.runtime.cuda_graph_capture import GraphReplay, build_graph_capturer
from dragoman.text.special_tokens import EOS, PAD

logger = logging.getLogger(__name__)

SYNC_EVERY_STEPS = 4
COMPACT_BELOW = 0.75  # fraction of active sentences at which finished ones are dropped
ENCODER_CHUNK_POSITIONS = 32_768  # padded source positions encoded together
MAX_GRAPHS = 512  # some hundred kilobytes each; beyond that all are captured again


class GraphBeamSearch:
    """Beam search with one model, one batch at a time; a beam of one is greedy search."""

    def __init__(
        self,
        model: CudaTransformer,
        *,
        graph_capturer: Callable[[Callable[[], None]], GraphReplay] | None = None,
    ) -> None:
        self._model, self._buffers = model, StaticBuffers(model)
        self._new_capturer = (
            (lambda: build_graph_capturer(model.device))
            if graph_capturer is None
            else (lambda: graph_capturer)
        )
        self._capturer = self._new_capturer()
        self._graphs: dict[Any, GraphReplay | None] = {}  # None: ran once
        self._beam_states: dict[tuple[int, int, LengthPenalty], BeamState] = {}
        self._beam_stepper = BeamStepper(self._buffers, model.device)

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return sum(each is not None for each in self._graphs.values())

    def release(self) -> None:
        """Free all device memory but the weights."""
        self._drop_graphs()
        self._beam_states.clear()
        self._buffers.release()

    def run(
        self, request: SearchRequest, *, size: int, nbest: int, penalty: LengthPenalty
    ) -> list[list[Hypothesis]]:
        """Search for every row; the hypotheses are those of `BeamSearch`."""
        order = sorted(range(len(request.sources)), key=lambda row: -len(request.sources[row]))
        limits = np.maximum([request.limits[row] for row in order], 1).astype(np.int64)
        longest = int(limits.max())
        count = round_batch(len(order))
        self._buffers.allocate(
            sentences=count,
            source=round_length(len(request.sources[order[0]]) + 1),
            max_steps=round_length(longest + 1),
            size=size,
        )
        beam_state = self._get_beam_state(count, size=size, nbest=nbest, penalty=penalty)
        self._encode_sources([request.sources[row] for row in order], count)
        self._beam_stepper.min_length.fill_(request.min_length)
        for buffer, new in zip(
            self._buffers.beams(count),
            beam_state.reset(limits, beams_per_sentence=size, rows=count),
            strict=True,
        ):
            buffer.copy_(new)
        num_steps = self._search(beam_state, count, longest)
        found = beam_state.results(len(order), num_steps)
        return [found[index] for index in np.argsort(order).tolist()]

    def _search(self, beam_state: BeamState, count: int, longest: int) -> int:
        """Run steps until no sentence is active; return their number."""
        num_steps, num_active = 0, count
        while num_active:
            self._run_step(beam_state, count, self._buffers.readable_steps(num_steps))
            num_steps += 1
            if num_steps % SYNC_EVERY_STEPS and num_steps <= longest:
                continue
            num_active, all_finite = torch.stack(
                [self._buffers.beams(count).alive.sum(), beam_state.all_finite.long()]
            ).tolist()  # waits for the device
            if not all_finite:
                self._buffers.release()  # NaN must not stay in buffers: masks do not remove it
                raise non_finite_error(num_steps - 1)
            new_count = round_batch(max(num_active, 1))
            if num_active and new_count <= COMPACT_BELOW * count:
                self._compact(beam_state, count, new_count, num_steps)
                count = new_count
        return num_steps

    def _compact(self, beam_state: BeamState, count: int, new_count: int, num_steps: int) -> None:
        """Move active sentences to the front; rows left over become padding."""
        order = torch.sort((~self._buffers.beams(count).alive).byte(), stable=True).indices[
            :new_count
        ]
        self._buffers.compact(order, count, num_steps)
        beams = self._buffers.beams(new_count)
        beams.sentences.masked_fill_(~beams.alive, beam_state.sentences)

    def _run_step(self, beam_state: BeamState, count: int, num_steps_read: int) -> None:
        """Run one step: eagerly the first time, captured the second time, then replayed."""
        buffers = self._buffers
        key = (
            count,
            num_steps_read,
            buffers.source,
            buffers.max_steps,
            beam_state.size,
            beam_state.nbest,
            beam_state.penalty,
        )
        replay = self._graphs.get(key)
        if replay is None and key in self._graphs and self._capturer is not None:
            replay = self._graphs[key] = self._capture(
                lambda: self._step(beam_state, count, num_steps_read)
            )
        if replay is not None:
            replay()
            return
        self._step(beam_state, count, num_steps_read)
        if len(self._graphs) >= MAX_GRAPHS:
            self._drop_graphs()
        self._graphs[key] = None

    def _capture(self, action: Callable[[], None]) -> GraphReplay | None:
        """Capture an action; if that fails, log it and never try again."""
        assert self._capturer is not None, "only if graphs can be captured"
        try:
            return self._capturer(action)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._capturer = None
            self._graphs.clear()
            logger.warning(
                "CUDA graphs are not used, steps are launched kernel by kernel (slower): %s",
                " ".join(str(error).split())[:160],
            )
            return None

    def _step(self, beam_state: BeamState, count: int, num_steps_read: int) -> None:
        """Run the decoder step and the beam step; all buffers are then ready for the next."""
        beams = self._buffers.beams(count)
        logits = self._model.step(
            beams.tokens, self._buffers.step_inputs(count, num_steps_read, beam_state.step)
        )
        self._beam_stepper.advance(beam_state, count, logits, self._model.bias)

    def _get_beam_state(
        self, count: int, *, size: int, nbest: int, penalty: LengthPenalty
    ) -> BeamState:
        """Return the beam state of these settings, larger if needed; drop invalid graphs."""
        key, max_steps = (size, nbest, penalty), self._buffers.max_steps
        known = self._beam_states.get(key)
        if known is None or known.sentences < count or known.steps < max_steps:
            if known is not None:
                self._drop_graphs()
            # Twice what is needed: it is small, and graphs are lost when it grows.
            sentences, steps = (
                (2 * count, 2 * max_steps)
                if known is None
                else (2 * max(count, known.sentences), 2 * max(max_steps, known.steps))
            )
            known = self._beam_states[key] = BeamState(
                sentences=sentences,
                steps=steps,
                size=size,
                nbest=nbest,
                penalty=penalty,
                device=self._model.device,
            )
        if self._buffers.has_grown:
            self._drop_graphs()
            self._buffers.has_grown = False
        return known

    def _drop_graphs(self) -> None:
        """Drop all graphs, and with them their shared memory pool: the next ones need a new one."""
        self._graphs.clear()
        if self._capturer is not None:
            self._capturer = self._new_capturer()

    def _encode_sources(self, sources: Sequence[Sequence[int]], count: int) -> None:
        """Encode sources, longest first, in chunks of similar lengths; padding rows are EOS."""
        lengths = np.ones(count, dtype=np.int64)
        lengths[: len(sources)] = [len(source) + 1 for source in sources]
        width = self._buffers.source
        ids = np.full((count, width), PAD, dtype=np.int64)
        ids[np.arange(width) < (lengths - 1)[:, None]] = np.fromiter(
            chain.from_iterable(sources), np.int64
        )
        ids[np.arange(count), lengths - 1] = EOS
        device = self._model.device
        packed, sizes = _copy_to_device(ids, device), _copy_to_device(lengths, device)
        padding_bias = self._buffers.padding_bias(count)
        padding_bias.zero_().masked_fill_(
            (torch.arange(width, device=device) >= sizes.unsqueeze(1)).view_as(padding_bias),
            -torch.inf,
        )
        memory = self._buffers.memory(count)
        first = 0
        while first < count:
            last, longest = (
                min(count, first + max(1, ENCODER_CHUNK_POSITIONS // int(lengths[first]))),
                int(lengths[first]),
            )
            padded = bool(lengths[last - 1] < longest)
            mask = padding_bias[first:last, ..., :longest] if padded else None
            memory[first:last, ..., :longest, :].copy_(
                self._model.encode(packed[first:last, :longest], mask)
            )
            first = last


def _copy_to_device(array: Any, device: torch.device) -> Tensor:
    """Copy an array to the device, asynchronously to a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
