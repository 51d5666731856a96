"""How the native engine searches on a GPU: in half precision and by recorded steps where that can be done, else as the model is."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch

from dragoman.decoding.beam import Beam
from dragoman.decoding.greedy import Greedy
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty
from dragoman.decoding.stepping import Strategy
from dragoman.engines.cpu.freezing import BFLOAT16, FLOAT16, FLOAT32
from dragoman.engines.face import Request
from dragoman.engines.gpu.laid_out import LaidOut, laying_out_refusal
from dragoman.engines.gpu.recorded import RecordedBeam
from dragoman.errors import DivergedError
from dragoman.models.encoder_decoder import EncoderDecoder

logger = logging.getLogger(__name__)

DTYPES = {FLOAT32: torch.float32, FLOAT16: torch.float16, BFLOAT16: torch.bfloat16}
WIDEST = 32  # beams look at one another's keys, which wider ones would pay for
_FIRST_WITH_HALVES = (7, 0)  # compute capability of the first GPUs that multiply float16 by themselves


class _Way(NamedTuple):
    """A way of searching that can be recorded."""

    size: int
    nbest: int
    penalty: Penalty


def usual_precision(device: torch.device) -> str:
    """Say what a device computes in where nobody says: float16 on a GPU that multiplies it, whose rounding is eight times finer than
    bfloat16's; what overflows is computed again in float32.
    """
    return FLOAT16 if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_HALVES else FLOAT32


class OnDevice:
    """A model's form for a GPU, made when it is first needed and again when weights have changed."""

    def __init__(self, precision: str) -> None:
        self._dtype = DTYPES.get(precision, torch.float32)
        self._search: RecordedBeam | None = None
        self._made_from: Any = None
        self._broken = False

    def generate(self, model: EncoderDecoder, stamp: Any, request: Request) -> list[list[Hypothesis]] | None:
        """Search for a batch; None where the model as it is must do it. The stamp tells weights that have changed."""
        way = _way(request.strategy)
        if self._broken or way is None or any(request.prefixes) or torch.is_autocast_enabled(model.output_weight.device.type):
            return None
        try:
            search = self._form(model, stamp)
            return None if search is None else self._run(search, model, request, way)
        except torch.OutOfMemoryError:
            self.forget()  # whoever asked may ask for less
            raise
        except RuntimeError as error:
            self._broken = True
            self.forget()
            logger.warning("the model runs as it is, in float32, which takes longer: %s", " ".join(str(error).split())[:160])
            return None

    def forget(self) -> None:
        """Give back all memory."""
        if self._search is not None:
            self._search.forget()
        self._search = self._made_from = None

    def _form(self, model: EncoderDecoder, stamp: Any) -> RecordedBeam | None:
        """Give the form of these weights; None where a model has none."""
        if stamp != self._made_from:
            self.forget()
            _prepare_torch()
            refusal = laying_out_refusal(model)
            if refusal:
                logger.info("the model runs in float32, step by step: %s", refusal)
            elif largest_weight(model) > torch.finfo(self._dtype).max:
                self._widen()
            self._search = None if refusal else RecordedBeam(LaidOut(model, self._dtype))
            self._made_from = stamp
        return self._search

    def _run(self, search: RecordedBeam, model: EncoderDecoder, request: Request, way: _Way) -> list[list[Hypothesis]] | None:
        """Search; if half precision overflows, in float32 from then on, and if that does, None: the model itself decides."""
        try:
            return search.run(request, size=way.size, nbest=way.nbest, penalty=way.penalty)
        except DivergedError:
            if self._dtype == torch.float32:
                return None
        self._widen()
        search.forget()
        self._search = RecordedBeam(LaidOut(model, self._dtype))
        return self._run(self._search, model, request, way)

    def _widen(self) -> None:
        """Compute in float32 from now on."""
        logger.warning("%s is too narrow for this model, which goes on in float32", str(self._dtype).removeprefix("torch."))
        self._dtype = torch.float32


def largest_weight(model: EncoderDecoder) -> float:
    """Return the largest absolute value of any weight."""
    return float(torch.stack([weight.detach().abs().amax().float() for weight in model.parameters()]).amax())


def _prepare_torch() -> None:
    """Set what is set for a whole process."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # half a second for the plan of each shape, on an H200 with torch 2.11
    # Sums over parts of a product stay in float32: which parts there are depends on the size of the batch, what comes out should not.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _way(strategy: Strategy) -> _Way | None:
    """Read a strategy that can be recorded; None for others."""
    if type(strategy) is Greedy:
        return _Way(1, 1, strategy.penalty)
    if type(strategy) is Beam and strategy.size <= WIDEST:
        return _Way(strategy.size, strategy.nbest, strategy.penalty)
    return None
