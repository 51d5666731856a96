"""The Transformer on the C++ kernels: encoding, decoder steps, greedy decoding, search backend."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dragoman.attention.absolute_position_encodings import MAX_TABLE_ROWS, Positions
from dragoman.decoding.beam_step import ActiveBeams, BeamState, BeamStepOutput
from dragoman.decoding.greedy import build_hypotheses
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty
from dragoman.decoding.search_interface import (
    SearchBackend,
    SearchRequest,
    non_finite_error,
)
from dragoman.errors import DragomanError
from dragoman.inference.cpu.c_structs import CArgmax, CBeamStep, CDecodeStep, CGreedyRun
from dragoman.inference.cpu.cpp_kv_cache import INITIAL_STEPS, CppKVCache
from dragoman.inference.cpu.cpp_weight_packing import (
    PackedInt8Filter,
    PackedTransformer,
    is_plain_table,
)
from dragoman.inference.cpu.lexical_shortlist import BatchShortlist
from dragoman.inference.cpu.packed_linear import ActivationRange
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.ops.topk import TopK
from dragoman.text.special_tokens import BOS, EOS, SPECIAL_TOKENS

EXTRA_STEPS = 4  # output tokens beyond the source length before the KV cache grows
ENCODER_CHUNK_POSITIONS = (
    512  # source positions encoded together: activations stay in the CPU cache
)
MAX_RESCORED_FRACTION = 1 / 16  # of the vocabulary: above it, one float32 matmul is faster
_MIN_OBSERVED_ROWS = 512  # decoder rows before the int8 filter is judged
_STATUS_NOT_FINITE = -2  # returned by int8 kernels for NaN or infinity, which rounding would hide


class CppMemory(NamedTuple):
    """Encoder output of all sentences, concatenated without padding."""

    values: Tensor  # (source positions, D)
    lengths: NDArray[np.int64]  # (N,)
    shortlist: BatchShortlist | None = None  # restricts the output vocabulary


class CppTransformer:
    """A Transformer that runs in the C++ kernels on packed copies of a model's weights.

    With activation ranges, its linear layers are computed in int8.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        kernels: ctypes.CDLL,
        ranges: Iterator[ActivationRange] | None = None,
    ) -> None:
        self._kernels = kernels
        self._packed = PackedTransformer(model, ranges, panel=kernels.dragoman_panel_width())
        self._model = ctypes.byref(self._packed.model)
        self._embeddings = model._embedding("src"), model._embedding("tgt")
        self._src_positions = CachedPositionVectors(model.src_input.positions)
        self._tgt_positions = CachedPositionVectors(model.tgt_input.positions)
        self.search_backend = CppSearchBackend(kernels)
        self.greedy_decoder = GreedyDecoder(
            kernels, self._packed, self._tgt_positions, use_int8_filter=ranges is None
        )

    def encode(self, src: Tensor, mask: Tensor | None = None) -> CppMemory:
        """Encode sources (B, S), real where `mask` (B, S) is True."""
        embedding, positions = self._embeddings[0], self._src_positions.vectors(0, src.size(1))
        if is_plain_table(embedding):
            embedded = F.embedding(src, embedding.weight) * embedding.scale
        else:
            embedded = embedding(src)
        x = (embedded if positions is None else (embedded + positions).to(embedded.dtype)).float()
        values = (x.flatten(0, 1) if mask is None else x[mask]).contiguous()
        lengths = np.full(len(src), src.size(1)) if mask is None else mask.sum(dim=1).numpy()
        ends = np.cumsum(lengths)
        for first, last in _sentence_chunks(lengths):
            begin = ends[first] - lengths[first]
            chunk_ends = ends[first:last] - begin
            status = self._kernels.dragoman_encode(
                self._model, values[begin:].data_ptr(), chunk_ends.ctypes.data, last - first
            )
            if status < 0:
                raise non_finite_error(0)
        return CppMemory(values, lengths)

    def restrict_to_shortlist(
        self, memory: CppMemory, allowed: Sequence[NDArray[np.int64]]
    ) -> CppMemory:
        """Restrict the output tokens of each sentence to a list of ids (U,) of its own.

        The logits of all lists together are computed; each sentence sees those of its own list.
        """
        ids = np.concatenate(allowed)
        is_allowed = np.zeros(self._packed.vocab_size, dtype=np.bool_)
        is_allowed[ids] = True
        output_subset = self._packed.pack_output_rows(torch.from_numpy(np.flatnonzero(is_allowed)))
        ends = np.cumsum([0, *map(len, allowed)])
        return memory._replace(
            shortlist=BatchShortlist(output_subset, ids, (np.cumsum(is_allowed) - 1)[ids], ends)
        )

    def start(self, memory: CppMemory) -> CppKVCache:
        """Return the KV cache before the first target position: cross-attention keys and values."""
        packed, (values, lengths, shortlist) = self._packed, memory
        source_positions, count = values.size(0), len(lengths)
        cross_kv = torch.empty(
            packed.layers, 2, source_positions, packed.inner, dtype=packed.kv_dtype
        )
        for first in range(0, source_positions, ENCODER_CHUNK_POSITIONS):
            rows = min(ENCODER_CHUNK_POSITIONS, source_positions - first)
            status = self._kernels.dragoman_project_memory(
                self._model,
                values[first:].data_ptr(),
                first,
                rows,
                cross_kv.data_ptr(),
                source_positions,
            )
            if status < 0:
                raise non_finite_error(0)
        kv_cache = torch.empty(packed.layers, count, 2, 0, packed.inner, dtype=packed.kv_dtype)
        past_slots, all_sentences = np.empty((count, 0), dtype=np.int32), np.arange(count)
        return CppKVCache(
            kv_cache,
            cross_kv,
            all_sentences,
            np.cumsum(lengths) - lengths,
            lengths,
            past_slots,
            all_sentences,
            shortlist,
        )

    def step(self, tokens: Tensor, state: CppKVCache) -> tuple[Tensor, CppKVCache]:
        """Append one token per row (N * F,); return the logits (N * F, V) of the next."""
        state, step_struct, _keepalive = self._build_step(tokens, state)
        shortlist, shape = state.shortlist, (tokens.size(0), self._packed.vocab_size)
        logits = torch.empty(shape) if shortlist is None else torch.full(shape, -torch.inf)
        step_struct.logits = logits.data_ptr()
        if shortlist is not None:
            step_struct.output_subset = ctypes.addressof(shortlist.output_subset.linear)
            step_struct.sentence_ids = state.sentence_ids.ctypes.data
            step_struct.ids = shortlist.ids.ctypes.data
            step_struct.subset_columns = shortlist.subset_columns.ctypes.data
            step_struct.subset_ends = shortlist.ends.ctypes.data
        status = self._kernels.dragoman_decode_step(self._model, ctypes.byref(step_struct))
        if status == _STATUS_NOT_FINITE:
            raise non_finite_error(state.steps - 1)
        if status < 0:
            raise IndexError(
                f"a token id must be below the target vocabulary size, {self._packed.vocab_size}"
            )
        return logits, state

    def decode_greedy(
        self, state: CppKVCache, max_lengths: NDArray[np.int64], *, min_length: int
    ) -> NDArray[np.int64] | None:
        """Decode greedily in one call from a fresh state: tokens (N, T), -1 past the end of a row.

        The logits are bit-identical to those of `step`. Special tokens other than EOS are left out.
        Return None if only `step` can do it.
        """
        if not self.greedy_decoder.can_decode(state):
            return None
        return self.greedy_decoder.decode(state, max_lengths, min_length=min_length).tokens

    def _build_step(self, tokens: Tensor, state: CppKVCache) -> tuple[CppKVCache, CDecodeStep, Any]:
        """Return the state after the step, the kernel's arguments, and what must outlive them."""
        position = self._tgt_positions.vectors(state.steps, 1)
        state = state.advance()
        step_struct = state.to_c_struct(
            past_slots=state.past_slots.ctypes.data,
            past_stride=state.steps,
            steps=state.steps,
            rows=tokens.size(0),
        )
        if self._packed.model.embedding_table is None:
            embedded = self._embeddings[1](tokens)  # (N, D)
            x = embedded if position is None else (embedded + position).to(embedded.dtype)
            x = x.float().contiguous()
            step_struct.hidden_states = x.data_ptr()
            return state, step_struct, x
        tokens = tokens.contiguous()
        step_struct.tokens = tokens.data_ptr()
        step_struct.position = None if position is None else position.data_ptr()
        return state, step_struct, (tokens, position)


class CachedPositionVectors:
    """The vectors that a model's positions add to embeddings, computed once."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        table = positions.vectors(0, min(positions.max_positions, MAX_TABLE_ROWS))
        self._table = None if table is None else table.detach().float().contiguous()

    def vectors(self, first: int, count: int) -> Tensor | None:
        """Return the vectors (T, D) of `count` positions from `first` on."""
        if self._table is None or first + count <= len(self._table):
            return None if self._table is None else self._table[first : first + count]
        vectors = self._positions.vectors(first, count)  # raises where learned positions end
        return None if vectors is None else vectors.float().contiguous()


class CppSearchBackend(SearchBackend):
    """Search operations in C++: ranking, log-sum-exp, the beam search step, greedy decoding."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels

    def argmax(self, logits: Tensor) -> TopK:
        """Return the largest logit of each row, the first of equal ones, NaN above all: (N,)."""
        values, ids = self.topk(logits, 1)
        return TopK(values.squeeze(1), ids.squeeze(1))

    def topk(self, logits: Tensor, count: int) -> TopK:
        """Return the `count` largest logits of each row, of equal ones the first: (N, count)."""
        logits, (rows, width) = logits.contiguous(), logits.shape
        count = min(count, width)
        values, ids = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.long)
        self._kernels.dragoman_topk(
            logits.data_ptr(), rows, width, count, values.data_ptr(), ids.data_ptr()
        )
        return TopK(values, ids)

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """Return the log-sum-exp of each row: (N, 1)."""
        logits, (rows, width) = logits.contiguous(), logits.shape
        found = torch.empty(rows, 1)
        self._kernels.dragoman_log_sum_exp(logits.data_ptr(), rows, width, found.data_ptr())
        return found

    def beam_step(
        self, beam_state: BeamState, beams: ActiveBeams, log_probs: Tensor, ids: Tensor
    ) -> BeamStepOutput:
        """Advance the beams by one step in C++ (csrc/beam_step.h), as `BeamState.advance` does."""
        count, beams_per_sentence = beams.tokens.shape
        candidates = ids.size(1)
        width = min(beam_state.size, beams_per_sentence * candidates)
        tokens, parents = torch.empty(2, count, width, dtype=torch.long).unbind()
        sums = torch.empty(count, width, dtype=torch.float64)
        alive = torch.empty(count, dtype=torch.bool)
        given = (log_probs, ids, beams.sentences, beams.log_prob_sums, beams.alive)
        inputs = [each.contiguous() for each in given]
        buffers = (
            beam_state.all_finite, beam_state.limits, beam_state.active_beams, beam_state.finished,
            beam_state.truncated, beam_state.truncated_at, beam_state.parents, beam_state.tokens,
            beam_state.log_probs, beam_state.length_divisors,
        )  # fmt: skip
        tensors = (*inputs, *buffers, tokens, parents, sums, alive)
        step_struct = CBeamStep(
            *(each.data_ptr() for each in tensors),
            count, beams_per_sentence, candidates, beam_state.size, beam_state.nbest, EOS,
            int(beam_state.step), beam_state.sentences + 1,
        )  # fmt: skip
        self._kernels.dragoman_beam_step(ctypes.byref(step_struct))
        beam_state.step += 1
        return BeamStepOutput(ActiveBeams(beams.sentences, tokens, sums, alive), parents)

    def decode_greedy(
        self, model: Any, state: Any, request: SearchRequest, penalty: LengthPenalty
    ) -> list[list[Hypothesis]] | None:
        """Decode the whole batch in one call; None if scores or prefixes are requested."""
        if request.return_scores or any(request.prefixes):
            return None
        tokens = model.decode_greedy(state, request.max_lengths, min_length=request.min_length)
        if tokens is None:
            return None
        lengths = (tokens >= 0).sum(axis=1)
        return [[each] for each in build_hypotheses(tokens, None, lengths, penalty)]


class GreedyOutput(NamedTuple):
    """The tokens of each row, step by step."""

    tokens: NDArray[np.int64]  # (N, T), EOS included; -1 past the end of a row
    logits: NDArray[np.float32]  # (N, T)


class AdaptiveInt8Filter:
    """An int8 filter of the output projection that is disabled when it rescores too many tokens."""

    def __init__(self, packed: PackedInt8Filter) -> None:
        self._packed, self._vocab_size = packed, packed.int8_filter.quantized_linear.out_features
        self._rows = self._rescored = 0
        self.is_worthwhile = True
        self.address: Any = ctypes.addressof(packed.int8_filter)

    def record(self, rows: int, rescored: int) -> None:
        """Count the decoder rows and rescored tokens of a call.

        Threads may lose counts of one another, which changes no result.
        """
        self._rows += rows
        self._rescored += rescored
        if (
            self._rows >= _MIN_OBSERVED_ROWS
            and self._rescored > MAX_RESCORED_FRACTION * self._rows * self._vocab_size
        ):
            self.is_worthwhile = False


class GreedyDecoder:
    """Greedy decoding of a batch in few calls: the loop over steps is in C++."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        packed: PackedTransformer,
        positions: CachedPositionVectors,
        *,
        use_int8_filter: bool,
    ) -> None:
        self._kernels, self._packed, self._positions = kernels, packed, positions
        self._use_int8_filter = use_int8_filter and bool(kernels.dragoman_has_int8())
        self._pack_lock = threading.Lock()
        self.int8_filter: AdaptiveInt8Filter | None = None

    def can_decode(self, state: CppKVCache) -> bool:
        """Whether embeddings are a plain table, and the output vocabulary is not restricted."""
        return state.shortlist is None and self._packed.model.embedding_table is not None

    def decode(
        self, state: CppKVCache, max_lengths: NDArray[np.int64], *, min_length: int
    ) -> GreedyOutput:
        """Decode from a fresh state; EOS may come after `min_length` tokens.

        A row at its maximum length can only take EOS. The KV cache grows between calls of the
        kernel.
        """
        assert self.can_decode(state), "otherwise `step` must be used"
        count, first_step = len(max_lengths), 0
        rows, tokens = np.arange(count), np.full(count, BOS)
        outputs = [
            GreedyOutput(
                np.empty((0, count), dtype=np.int64), np.empty((0, count), dtype=np.float32)
            )
        ]
        while rows.size:
            capacity = (
                INITIAL_STEPS
                if first_step
                else max(INITIAL_STEPS, int(state.lengths.max()) + EXTRA_STEPS)
            )
            max_steps, position_table = self._position_vectors(
                first_step, min(capacity, int(max_lengths[rows].max()) + 1 - first_step)
            )  # one more than the maximum length, for EOS
            state = state.reserve_steps(max_steps)
            # The kernel writes over the arrays of the active rows.
            state = replace(
                state,
                cache_ids=state.cache_ids.copy(),
                source_starts=state.source_starts.copy(),
                lengths=state.lengths.copy(),
            )
            new = GreedyOutput(
                np.full((max_steps, count), -1), np.zeros((max_steps, count), dtype=np.float32)
            )
            step_struct, _keepalive = self._first_step(state, tokens, max_steps)
            greedy_run = CGreedyRun(
                step=step_struct,
                position_table=None if position_table is None else position_table.data_ptr(),
                limits=max_lengths.ctypes.data,
                rows=rows.ctypes.data,
                ids=new.tokens.ctypes.data,
                logits=new.logits.ctypes.data,
                num_rows=count,
                first_step=first_step,
                max_steps=max_steps,
                min_length=min_length,
                eos=EOS,
            )
            num_active = self._run_kernel(greedy_run)
            outputs.append(new)
            rows, tokens = rows[:num_active], tokens[:num_active]
            state = replace(
                state,
                cache_ids=state.cache_ids[:num_active],
                source_starts=state.source_starts[:num_active],
                lengths=state.lengths[:num_active],
                filled=state.filled + max_steps,
            )
            first_step += max_steps
        return GreedyOutput(*(np.concatenate(each).T for each in zip(*outputs, strict=True)))

    def _position_vectors(self, first_step: int, max_steps: int) -> tuple[int, Tensor | None]:
        """Return the position vectors of the next steps, of one step if learned positions end."""
        try:
            return max_steps, self._positions.vectors(first_step, max_steps)
        except DragomanError:
            if max_steps == 1:
                raise
            return 1, self._positions.vectors(first_step, 1)

    def _first_step(
        self, state: CppKVCache, tokens: NDArray[np.int64], max_steps: int
    ) -> tuple[CDecodeStep, Any]:
        """Return the arguments of the first step, and what must live until the kernel returns.

        Without beams, the past of every row is all slots of its cache in order.
        """
        past_slots = np.arange(state.filled + max_steps, dtype=np.int32)
        values, ids = np.empty(tokens.size, dtype=np.float32), np.empty(tokens.size, dtype=np.int64)
        argmax = CArgmax(
            values=values.ctypes.data,
            ids=ids.ctypes.data,
            num_special=len(SPECIAL_TOKENS),
            vocab_size=self._packed.vocab_size,
        )
        step = state.to_c_struct(
            tokens=tokens.ctypes.data,
            rows=tokens.size,
            past_slots=past_slots.ctypes.data,
            steps=state.filled + 1,
            argmax=argmax,
        )
        return step, (past_slots, values, ids)

    def _run_kernel(self, greedy_run: CGreedyRun) -> int:
        """Run the steps; return the number of rows that are not finished."""
        int8_filter = self._get_int8_filter()
        greedy_run.step.int8_filter = None if int8_filter is None else int8_filter.address
        num_active: int = self._kernels.dragoman_decode_greedy(
            ctypes.byref(self._packed.model), ctypes.byref(greedy_run)
        )
        if num_active < 0:
            raise non_finite_error(-1 - num_active)
        if int8_filter is not None:
            int8_filter.record(greedy_run.rows_stepped, greedy_run.rescored)
        return num_active

    def _get_int8_filter(self) -> AdaptiveInt8Filter | None:
        """Return the int8 filter, packed on first use; None if it is unavailable or too slow."""
        if not self._use_int8_filter:
            return None
        if self.int8_filter is None:
            with self._pack_lock:
                if self.int8_filter is None:
                    self.int8_filter = AdaptiveInt8Filter(self._packed.int8_filter())
        return self.int8_filter if self.int8_filter.is_worthwhile else None


def _sentence_chunks(lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last + 1) of sentences with few source positions together."""
    first, held = 0, 0
    for number, length in enumerate(lengths.tolist()):
        if held and held + length > ENCODER_CHUNK_POSITIONS:
            yield first, number
            first, held = number, 0
        held += length
    yield first, len(lengths)
