"""How the native engine searches on a GPU: in half precision and by recorded steps where that can be done, else as the model is."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty
from dragoman.decoding.search import SearchStrategy
from dragoman.errors import DivergedError
from dragoman.inference.cpu.conversion import BFLOAT16, FLOAT16, FLOAT32
from dragoman.inference.cuda.cuda_transformer import CudaTransformer, cuda_unsupported_reason
from dragoman.inference.cuda.graph_beam_search import GraphBeamSearch
from dragoman.inference.engine import SearchRequest
from dragoman.models.encoder_decoder import EncoderDecoder

logger = logging.getLogger(__name__)

DTYPES = {FLOAT32: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}
MAX_CUDA_BEAM = 32  # beams look at one another's keys, which wider ones would pay for
_MIN_FP16_CAPABILITY = (
    7,
    0,
)  # compute capability of the first GPUs that multiply float16 by themselves


class _BeamSettings(NamedTuple):
    """A way of searching that can be recorded."""

    size: int
    nbest: int
    penalty: LengthPenalty


def default_precision(device: torch.device) -> str:
    """Say what a device computes in where nobody says: float16 on a GPU that multiplies it, whose rounding is eight times finer than
    bfloat16's; what overflows is computed again in float32.
    """
    return (
        FLOAT16
        if device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _MIN_FP16_CAPABILITY
        else FLOAT32
    )


class CudaBackend:
    """A model's form for a GPU, made when it is first needed and again when weights have changed."""

    def __init__(self, precision: str) -> None:
        self._dtype = DTYPES.get(precision, torch.float32)
        self._search: GraphBeamSearch | None = None
        self._converted_from: Any = None
        self._is_disabled = False

    def generate(
        self, model: EncoderDecoder, weights_version: Any, request: SearchRequest
    ) -> list[list[Hypothesis]] | None:
        """Search for a batch; None where the model as it is must do it. The stamp tells weights that have changed."""
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
            self.release()  # whoever asked may ask for less
            raise
        except RuntimeError as error:
            self._is_disabled = True
            self.release()
            logger.warning(
                "the model runs as it is, in float32, which takes longer: %s",
                " ".join(str(error).split())[:160],
            )
            return None

    def release(self) -> None:
        """Give back all memory."""
        if self._search is not None:
            self._search.release()
        self._search = self._converted_from = None

    def _get_search(self, model: EncoderDecoder, weights_version: Any) -> GraphBeamSearch | None:
        """Give the form of these weights; None where a model has none."""
        if weights_version != self._converted_from:
            self.release()
            _configure_torch()
            unsupported_reason = cuda_unsupported_reason(model)
            if unsupported_reason:
                logger.info("the model runs in float32, step by step: %s", unsupported_reason)
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
        """Search; if half precision overflows, in float32 from then on, and if that does, None: the model itself decides."""
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
        """Compute in float32 from now on."""
        logger.warning(
            "%s is too narrow for this model, which goes on in float32",
            str(self._dtype).removeprefix("torch."),
        )
        self._dtype = torch.float32


def max_abs_weight(model: EncoderDecoder) -> float:
    """Return the largest absolute value of any weight."""
    return float(
        torch.stack([weight.detach().abs().amax().float() for weight in model.parameters()]).amax()
    )


def _configure_torch() -> None:
    """Set what is set for a whole process."""
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # half a second for the plan of each shape, on an H200 with torch 2.11
    # Sums over parts of a product stay in float32: which parts there are depends on the size of the batch, what comes out should not.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _read_beam_settings(strategy: SearchStrategy) -> _BeamSettings | None:
    """Read a strategy that can be recorded; None for others."""
    if type(strategy) is GreedySearch:
        return _BeamSettings(1, 1, strategy.penalty)
    if type(strategy) is BeamSearch and strategy.size <= MAX_CUDA_BEAM:
        return _BeamSettings(strategy.size, strategy.nbest, strategy.penalty)
    return None
