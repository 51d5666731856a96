"""The Transformer in C++ kernels: encode, decode step, and greedy decoding in one call."""

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

from dragoman.attention.positions import Positions
from dragoman.decoding.search import LogitsBackend, non_finite_error
from dragoman.errors import DragomanError
from dragoman.inference.cpu.c_structs import CArgmax, CDecodeStep, CGreedyRun
from dragoman.inference.cpu.cpp_kv_cache import INITIAL_STEPS, CppKVCache
from dragoman.inference.cpu.linear import ActivationRange
from dragoman.inference.cpu.packed_weights import AdaptiveInt8Filter, PackedTransformer
from dragoman.inference.cpu.shortlist import BatchShortlist
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.ops.topk import TopK
from dragoman.text.special_tokens import BOS, EOS, SPECIAL_TOKENS

EXTRA_STEPS = (
    4  # pieces that an output may have more than its source before a search makes room again
)


class GreedyOutput(NamedTuple):
    """What each row took, step by step."""

    tokens: NDArray[np.int64]  # (N, T), the end among them; -1 where a row took nothing
    logits: NDArray[np.float32]  # (N, T)


class GreedyDecoder:
    """Follows the largest logit through a model that is laid out."""

    def __init__(
        self,
        kernels: ctypes.CDLL,
        packed: PackedTransformer,
        position_table: Positions,
        *,
        use_int8_filter: bool,
    ) -> None:
        self._kernels, self._packed, self._positions = kernels, packed, position_table
        self._use_int8_filter = use_int8_filter and bool(kernels.dragoman_has_int8())
        self._pack_lock = threading.Lock()
        self.int8_filter: AdaptiveInt8Filter | None = None

    def can_decode(self, state: CppKVCache) -> bool:
        """Say whether pieces are embedded by a table alone, and all of them may be used."""
        return state.shortlist is None and self._packed.model.embedding_table is not None

    def decode(
        self, state: CppKVCache, limits: NDArray[np.int64], *, min_length: int
    ) -> GreedyOutput:
        """Go on from a fresh state; before `at_least` pieces no row ends, and past its limit each takes nothing but its end."""
        assert self.can_decode(state), "who cannot walk takes single steps"
        count, first_step = len(limits), 0
        rows, tokens = np.arange(count), np.full(count, BOS)
        found = [
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
                first_step, min(capacity, int(limits[rows].max()) + 1 - first_step)
            )  # one more for the end
            state = state.reserve_steps(max_steps)
            state = replace(
                state,
                cache_ids=state.cache_ids.copy(),
                source_starts=state.source_starts.copy(),
                lengths=state.lengths.copy(),
            )
            new = GreedyOutput(
                np.full((max_steps, count), -1), np.zeros((max_steps, count), dtype=np.float32)
            )
            greedy_run = CGreedyRun(
                limits=limits.ctypes.data,
                rows=rows.ctypes.data,
                ids=new.tokens.ctypes.data,
                logits=new.logits.ctypes.data,
            )
            (
                greedy_run.num_rows,
                greedy_run.first_step,
                greedy_run.max_steps,
                greedy_run.min_length,
                greedy_run.eos,
            ) = (
                count,
                first_step,
                max_steps,
                min_length,
                EOS,
            )
            greedy_run.position_table = (
                None if position_table is None else position_table.data_ptr()
            )
            greedy_run.step, _keepalive = self._first_step(state, tokens, max_steps)
            num_active = self._run_kernel(greedy_run)
            found.append(new)
            rows, tokens = rows[:num_active], tokens[:num_active]
            state = replace(
                state,
                **{
                    each: getattr(state, each)[:num_active]
                    for each in ("cache_ids", "source_starts", "lengths")
                },
            )
            state, first_step = (
                replace(state, filled=state.filled + max_steps),
                first_step + max_steps,
            )
        return GreedyOutput(*(np.concatenate(each).T for each in zip(*found, strict=True)))

    def _position_vectors(self, first_step: int, max_steps: int) -> tuple[int, Tensor | None]:
        """Give what is added to embeddings at so many places, or at fewer where positions end before outputs have to."""
        try:
            vectors = self._positions.vectors(first_step, max_steps)
        except DragomanError:
            if max_steps == 1:
                raise
            return self._position_vectors(first_step, 1)
        return max_steps, None if vectors is None else vectors.float().contiguous()

    def _first_step(
        self, state: CppKVCache, tokens: NDArray[np.int64], max_steps: int
    ) -> tuple[CDecodeStep, Any]:
        """Say where the first step begins, and give what must live as long as the walk. Rows without beams have one past: every slot."""
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
        """Walk, and say how many rows live on."""
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
        """Give what finds the largest logit quickly, laid out when it is first wanted; None where that does not pay."""
        if not self._use_int8_filter:
            return None
        with self._pack_lock:
            self.int8_filter = self.int8_filter or AdaptiveInt8Filter(self._packed.int8_filter())
        return self.int8_filter if self.int8_filter.is_worthwhile else None


ENCODER_CHUNK_POSITIONS = 512  # source positions that go through the encoder at once: what a layer widens should stay near the processor
_STATUS_NOT_FINITE = (
    -2
)  # what kernels give back where int8 met NaN or infinity, which rounding would hide


class CppMemory(NamedTuple):
    """Encoded sources, one behind another: nothing is padded."""

    values: Tensor  # (places, D)
    lengths: NDArray[np.int64]  # (N,)
    shortlist: BatchShortlist | None = None  # where only some pieces may be used


class CppLogitsBackend(LogitsBackend):
    """The largest of a row, and what makes log-probabilities of it, each in one pass."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels

    def argmax(self, logits: Tensor) -> TopK:
        """Find the largest of each row, the first of equal ones, NaN above all: (N,) each."""
        return self._into(
            logits, 1, torch.empty(logits.size(0)), torch.empty(logits.size(0), dtype=torch.long)
        )

    def topk(self, logits: Tensor, count: int) -> TopK:
        """Find the `count` largest of each row, in falling order, of equal ones the first: (N, count) each."""
        return self._into(
            logits,
            count,
            torch.empty(logits.size(0), count),
            torch.empty(logits.size(0), count, dtype=torch.long),
        )

    def _into(self, logits: Tensor, count: int, values: Tensor, ids: Tensor) -> TopK:
        logits, (rows, width) = logits.contiguous(), logits.shape
        self._kernels.dragoman_topk(
            logits.data_ptr(), rows, width, count, values.data_ptr(), ids.data_ptr()
        )
        return TopK(values, ids)

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """Give what is to be taken from logits to make log-probabilities: (N, 1)."""
        logits, (rows, width) = logits.contiguous(), logits.shape
        found = torch.empty(rows, 1)
        self._kernels.dragoman_log_sum_exp(logits.data_ptr(), rows, width, found.data_ptr())
        return found


class CppTransformer:
    """What a model computes, from copies of its weights; `seen` are the ranges of its products' inputs, for int8."""

    def __init__(
        self,
        model: EncoderDecoder,
        kernels: ctypes.CDLL,
        ranges: Iterator[ActivationRange] | None = None,
    ) -> None:
        self._kernels, self._packed = (
            kernels,
            PackedTransformer(model, ranges, panel=kernels.dragoman_panel_width()),
        )
        self._src, self._tgt = model._embedding("src"), model._embedding("tgt")
        self._src_input, self._positions = model.src_entrance, model.tgt_entrance.positions
        self.logits_backend = CppLogitsBackend(kernels)
        self._model = ctypes.byref(self._packed.model)
        self.greedy_decoder = GreedyDecoder(
            kernels, self._packed, self._positions, use_int8_filter=ranges is None
        )

    def encode(self, src: Tensor, mask: Tensor | None = None) -> CppMemory:
        """Read sources (B, S), real where `mask` (B, S) is True."""
        placed = self._src_input(self._src(src)).float()
        values = (placed.flatten(0, 1) if mask is None else placed[mask]).contiguous()
        lengths = np.full(len(src), src.size(1)) if mask is None else mask.sum(dim=1).numpy()
        ends = np.cumsum(lengths)
        for first, last in _sentence_chunks(lengths):
            begin = ends[first] - lengths[first]
            within = ends[first:last] - begin
            if (
                self._kernels.dragoman_encode(
                    self._model, values[begin:].data_ptr(), within.ctypes.data, last - first
                )
                < 0
            ):
                raise non_finite_error(0)
        return CppMemory(values, lengths)

    def restrict_to_shortlist(
        self, memory: CppMemory, allowed: Sequence[NDArray[np.int64]]
    ) -> CppMemory:
        """Let each sentence use only some pieces (U,), its own: all of them together are scored, and no row sees another's."""
        ids = np.concatenate(allowed)
        is_allowed = np.zeros(self._packed.vocab_size, dtype=np.bool_)
        is_allowed[ids] = True
        output_subset = self._packed.pack_output_rows(torch.from_numpy(np.flatnonzero(is_allowed)))
        ends = np.cumsum([0, *map(len, allowed)])
        return memory._replace(
            shortlist=BatchShortlist(output_subset, ids, (np.cumsum(is_allowed) - 1)[ids], ends)
        )

    def start(self, memory: CppMemory) -> CppKVCache:
        """Stand before the first target position of every row."""
        packed, (values, lengths, shortlist) = self._packed, memory
        source_positions, count = values.size(0), len(lengths)
        made = torch.empty(packed.layers, 2, source_positions, packed.inner, dtype=packed.kv_dtype)
        for first in range(0, source_positions, ENCODER_CHUNK_POSITIONS):
            rows = min(ENCODER_CHUNK_POSITIONS, source_positions - first)
            if (
                self._kernels.dragoman_project_memory(
                    self._model,
                    values[first:].data_ptr(),
                    first,
                    rows,
                    made.data_ptr(),
                    source_positions,
                )
                < 0
            ):
                raise non_finite_error(0)
        kv_cache = torch.empty(packed.layers, count, 2, 0, packed.inner, dtype=packed.kv_dtype)
        past_slots, all_sentences = np.empty((count, 0), dtype=np.int32), np.arange(count)
        return CppKVCache(
            kv_cache,
            made,
            all_sentences,
            np.cumsum(lengths) - lengths,
            lengths,
            past_slots,
            all_sentences,
            shortlist,
        )

    def step(self, tokens: Tensor, state: CppKVCache) -> tuple[Tensor, CppKVCache]:
        """Take one more token a row, (N * F,), and score what comes next."""
        state, step_struct, _keepalive = self._build_step(tokens, state)
        shortlist, shape = state.shortlist, (tokens.size(0), self._packed.vocab_size)
        logits = torch.empty(shape) if shortlist is None else torch.full(shape, -torch.inf)
        step_struct.logits = logits.data_ptr()
        if shortlist is not None:
            step_struct.output_subset, step_struct.sentence_ids = (
                ctypes.addressof(shortlist.output_subset.product),
                state.sentence_ids.ctypes.data,
            )
            step_struct.ids, step_struct.subset_columns, step_struct.subset_ends = (
                each.ctypes.data
                for each in (shortlist.ids, shortlist.subset_columns, shortlist.ends)
            )
        done = self._kernels.dragoman_decode_step(self._model, ctypes.byref(step_struct))
        if done == _STATUS_NOT_FINITE:
            raise non_finite_error(state.steps - 1)
        if done < 0:
            raise IndexError(
                f"a piece must be one of the {self._packed.vocab_size} of the target vocabulary"
            )
        return logits, state

    def decode_greedy(
        self, state: CppKVCache, limits: NDArray[np.int64], *, min_length: int
    ) -> NDArray[np.int64] | None:
        """Go on from a fresh state by the largest logit each time, which is to the last bit that of `step`: (N, T), -1 past a row's last.

        Special pieces are left out, but for the end. None for what only `step` can do.
        """
        return (
            self.greedy_decoder.decode(state, limits, min_length=min_length).tokens
            if self.greedy_decoder.can_decode(state)
            else None
        )

    def _build_step(self, tokens: Tensor, state: CppKVCache) -> tuple[CppKVCache, CDecodeStep, Any]:
        """Say what is asked of the kernels: the state after the step, the step, and what must live as long as that."""
        position = state.steps
        state = state.advance()
        step_struct = state.to_c_struct(
            past_slots=state.past_slots.ctypes.data,
            past_stride=state.steps,
            steps=state.steps,
            rows=tokens.size(0),
        )
        if self._packed.model.embedding_table is None:
            hidden_states = self._embed_tokens(tokens, position)
            step_struct.hidden_states = hidden_states.data_ptr()
            return state, step_struct, hidden_states
        tokens, added = tokens.contiguous(), self._positions.vectors(position, 1)
        step_struct.tokens = tokens.data_ptr()
        if added is not None:
            added = added.float().contiguous()
            step_struct.position = added.data_ptr()
        return state, step_struct, (tokens, added)

    def _embed_tokens(self, tokens: Tensor, position: int) -> Tensor:
        """Embed tokens (N,) that all stand at one place, where that takes more than a table: (N, D)."""
        embedded, added = self._tgt.forward(tokens), self._positions.vectors(position, 1)
        return (
            (embedded if added is None else (embedded + added).to(embedded.dtype))
            .float()
            .contiguous()
        )


def _sentence_chunks(lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut sentences into runs of few positions: (first, last), the last not within."""
    first, held = 0, 0
    for number, length in enumerate(lengths.tolist()):
        if held and held + length > ENCODER_CHUNK_POSITIONS:
            yield first, number
            first, held = number, 0
        held += length
    yield first, len(lengths)
