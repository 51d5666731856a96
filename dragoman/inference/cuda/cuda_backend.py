"""The native engine on a GPU: converts a Transformer for CUDA graphs, in half precision or float32.

`EagerSearchBackend` is for models that run as they are, launched kernel by kernel.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.beam_step import EXTRA_CANDIDATES
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty
from dragoman.decoding.search_interface import (
    IncrementalDecoder,
    SearchBackend,
    SearchRequest,
    SearchStrategy,
)
from dragoman.errors import DivergedError
from dragoman.inference.cpu.cpu_engine_conversion import BFLOAT16, FLOAT16, FLOAT32
from dragoman.inference.cuda.cuda_transformer import CudaTransformer, cuda_unsupported_reason
from dragoman.inference.cuda.graph_beam_search import GraphBeamSearch
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.ops.topk import TopK, blocked_topk

logger = logging.getLogger(__name__)

DTYPES = {FLOAT32: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}
MAX_CUDA_BEAM = 32  # every beam reads the keys of all beams of its sentence, and masks the others
_MIN_FP16_CAPABILITY = (7, 0)  # compute capability of the first GPUs with float16 tensor cores


class EagerSearchBackend(SearchBackend):
    """Search operations for a model that runs eagerly on a GPU.

    A GPU that waits for the host after every step is idle most of the time. So the host reads the
    beam state only every few steps, and rows of sentences that finished in between are computed for
    nothing.
    """

    sync_every_steps = 4
    compact_below = 0.8  # above it, dropping the finished sentences costs more than it saves

    def topk(self, logits: Tensor, count: int) -> TopK:
        """Return the largest logits of each row, some more than `count`: ties need no host."""
        return blocked_topk(logits, min(count + EXTRA_CANDIDATES, logits.size(1)))

    def decode_greedy(
        self,
        model: IncrementalDecoder,
        state: Any,
        request: SearchRequest,
        penalty: LengthPenalty,
    ) -> list[list[Hypothesis]]:
        """Decode by a beam of one, which stays on the device."""
        return BeamSearch(1, 1, penalty).run(model, state, request, self)


class _BeamSettings(NamedTuple):
    """The settings of a search that can be captured."""

    size: int
    nbest: int
    penalty: LengthPenalty


def default_precision(device: torch.device) -> str:
    """Return the default precision of a device: float16 on a GPU with tensor cores, else float32.

    float16 rounds eight times finer than bfloat16; what overflows is computed again in float32.
    """
    return (
        FLOAT16
        if device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _MIN_FP16_CAPABILITY
        else FLOAT32
    )


class CudaBackend:
    """A model converted for CUDA graphs on first use, and again when its weights change."""

    def __init__(self, precision: str) -> None:
        self._dtype = DTYPES.get(precision, torch.float32)
        self._search: GraphBeamSearch | None = None
        self._converted_from: Any = None
        self._is_disabled = False

    def generate(
        self, model: EncoderDecoder, weights_version: Any, request: SearchRequest
    ) -> list[list[Hypothesis]] | None:
        """Search for a batch; None if the model itself must run."""
        settings = _read_beam_settings(request.strategy)
        if (
            self._is_disabled
            or settings is None
            or any(request.prefixes)
            or torch.is_autocast_enabled(model.output_weight.device.type)
        ):
            return None
        try:
            search = self._get_search(model, weights_version)
            return None if search is None else self._run(search, model, request, settings)
        except torch.OutOfMemoryError:
            self.release()  # the caller retries with a smaller batch
            raise
        except RuntimeError as error:
            self._is_disabled = True
            self.release()
            logger.warning(
                "CUDA graphs are not used, and the model runs in float32, which is slower: %s",
                " ".join(str(error).split())[:160],
            )
            return None

    def release(self) -> None:
        """Free all device memory."""
        if self._search is not None:
            self._search.release()
        self._search = self._converted_from = None

    def _get_search(self, model: EncoderDecoder, weights_version: Any) -> GraphBeamSearch | None:
        """Return the search for these weights, converting them if needed; None if unsupported."""
        if weights_version != self._converted_from:
            self.release()
            _configure_torch()
            unsupported_reason = cuda_unsupported_reason(model)
            if unsupported_reason:
                logger.info("the model runs in float32 without CUDA graphs: %s", unsupported_reason)
            elif max_abs_weight(model) > torch.finfo(self._dtype).max:
                self._use_float32()
            self._search = (
                None if unsupported_reason else GraphBeamSearch(CudaTransformer(model, self._dtype))
            )
            self._converted_from = weights_version
        return self._search

    def _run(
        self,
        search: GraphBeamSearch,
        model: EncoderDecoder,
        request: SearchRequest,
        settings: _BeamSettings,
    ) -> list[list[Hypothesis]] | None:
        """Search; in float32 from now on if half precision overflows; None if that does too."""
        try:
            return search.run(
                request, size=settings.size, nbest=settings.nbest, penalty=settings.penalty
            )
        except DivergedError:
            if self._dtype == torch.float32:
                return None
        self._use_float32()
        search.release()
        self._search = GraphBeamSearch(CudaTransformer(model, self._dtype))
        return self._run(self._search, model, request, settings)

    def _use_float32(self) -> None:
        """Use float32 from now on."""
        logger.warning(
            "%s overflows for this model: it runs in float32",
            str(self._dtype).removeprefix("torch."),
        )
        self._dtype = torch.float32


def max_abs_weight(model: EncoderDecoder) -> float:
    """Return the largest absolute value of any weight."""
    return float(
        torch.stack([weight.detach().abs().amax().float() for weight in model.parameters()]).amax()
    )


def _configure_torch() -> None:
    """Set process-wide torch options."""
    # cuDNN attention takes half a second to plan each shape (H200, torch 2.11).
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Split-K sums stay in float32: how a matmul is split depends on the batch size, and results
    # should not.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _read_beam_settings(strategy: SearchStrategy) -> _BeamSettings | None:
    """Return the settings of greedy or beam search; None for others and for wide beams."""
    if strategy.beam_size is None or strategy.beam_size > MAX_CUDA_BEAM:
        return None
    return _BeamSettings(strategy.beam_size, strategy.nbest, strategy.penalty)
