"""The native engine: our own search over our own model. It can do everything, and is what others are compared with."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dragoman.attention.recorder import RecordableAttention, edit, find_attentions, has_hooks
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.padded_batch import pad_sources
from dragoman.decoding.search import SearchStrategy, search
from dragoman.errors import DivergedError
from dragoman.inference.cpu.conversion import FLOAT32, TokenPair, convert_model
from dragoman.inference.cpu.cpp_transformer import CppTransformer
from dragoman.inference.cpu.shortlist import Shortlist
from dragoman.inference.cpu.torch_transformer import TorchTransformer, has_finite_weights
from dragoman.inference.cuda.cuda_backend import CudaBackend
from dragoman.inference.engine import SearchRequest
from dragoman.models.encoder_decoder import EncoderDecoder

logger = logging.getLogger(__name__)

CUDA_BATCH_TOKENS = (
    100_000  # padded places of source and beam: some 1,000 sentences of 20 pieces with a beam of 5
)
CPU_BATCH_TOKENS = 2048  # enough rows to be worth a product, few enough that their keys stay near
MAX_CPU_BEAM = (
    32  # beams: a frozen model's beams look at one another's keys, which wider ones would pay for
)

_MODEL_METHODS = frozenset(("encode", "start", "step", "extend", "project"))


class NativeEngine:
    """The model itself, loaded when it is first needed: where another engine does all the work, it never is.

    On a CPU a Transformer is frozen first: the same function in a quicker form, and with `precision` int8 nearly the same in a much
    quicker one. On a GPU its steps are recorded, in float32 or with `precision` float16 or bfloat16. Whatever has no such form or is
    being watched runs as it is, and weights that change are frozen again.
    """

    def __init__(
        self,
        load: Callable[[], EncoderDecoder],
        *,
        precision: str = FLOAT32,
        workers: int = 1,
        pairs: Callable[[], Sequence[TokenPair]] = tuple,
        shortlist: Shortlist | None = None,
    ) -> None:
        self.precision, self.workers, self.shortlist = precision, workers, shortlist
        self._load, self._calibration_pairs = load, pairs
        self._threads = torch.get_num_threads()
        self._convert_lock, self._load_lock = threading.Lock(), threading.Lock()
        self._loaded: EncoderDecoder | None = None
        self._converted: TorchTransformer | CppTransformer | None = None
        self._active_precision = precision  # that of the form
        self._converted_from: Any = None
        self._has_nonfinite_weights = False  # whether weights are NaN or infinite
        self._cuda = CudaBackend(precision)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return "native" if self.precision == FLOAT32 else f"native-{self.precision}"

    @property
    def client_threads(self) -> int:
        """Ask from a thread for each worker."""
        return self.workers

    def single_worker(self) -> NativeEngine:
        """Give an engine of the same model that does one batch at a time, with all threads."""
        return NativeEngine(
            lambda: self.model,
            precision=self.precision,
            pairs=self._calibration_pairs,
            shortlist=self.shortlist,
        )

    @property
    def batch_tokens(self) -> int | None:
        """Fill a GPU, whose step takes as long for ten sentences as for hundreds; a batch that does not fit is halved."""
        return {"cuda": CUDA_BATCH_TOKENS, "cpu": CPU_BATCH_TOKENS}.get(self.device.type)

    @property
    def model(self) -> EncoderDecoder:
        """The model, in evaluation mode; loaded once, whichever thread asks first."""
        if self._loaded is None:
            with self._load_lock:
                self._loaded = self._load() if self._loaded is None else self._loaded
        return self._loaded

    @property
    def has_hooks(self) -> bool:
        """Whether the caller records or edits the model: then the caller's own thread must run it, as it is."""
        return self._loaded is not None and has_hooks(self._loaded)

    @property
    def device(self) -> torch.device:
        """Say where the weights are."""
        return next(self.model.parameters()).device

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Refuse nothing."""
        return ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Encode a batch and search."""
        with self.single_threaded(), torch.inference_mode():
            found = self._search_cuda(request)
            if found is not None:
                return found
            inference_model = self._inference_model(request.strategy)
            try:
                if not self._has_nonfinite_weights:
                    return self._search(inference_model, request)
            except DivergedError:
                if inference_model is self.model:
                    raise
            # A packed or quantised form may overflow where the model does not, so the model decides: with attention by its
            # definition, for torch's fused kernel on a CPU gives zeros where all scores of a row are NaN.
            with edit(
                self.model, dict.fromkeys(find_attentions(self.model), lambda weights: weights)
            ):
                found = self._search(self.model, request)
            self._drop_converted(inference_model)
            return found

    def _search(self, model: Any, request: SearchRequest) -> list[list[Hypothesis]]:
        """Encode a batch and search, with a model in any of its forms."""
        return search(
            model,
            self._apply_shortlist(
                model, model.encode(*pad_sources(request.sources, self.device)), request
            ),
            limits=torch.tensor(request.limits),
            strategy=request.strategy,
            prefixes=request.prefixes,
            lines=request.lines,
            min_length=request.min_length,
            return_scores=request.return_scores,
        )

    def _drop_converted(self, inference_model: Any) -> None:
        """Use a form no more that overflowed where the model did not: float32 instead of int8, and then the model as it is."""
        with self._convert_lock:
            if inference_model is None or self._converted is not inference_model:
                return
            if self._active_precision == FLOAT32:
                logger.warning(
                    "packed weights overflow where the model does not, which runs as it is and takes longer"
                )
                self._converted = None
            else:
                logger.warning(
                    "%s is too narrow for this model, which goes on in float32",
                    self._active_precision,
                )
                self._active_precision, self._converted = (
                    FLOAT32,
                    convert_model(self.model, FLOAT32).frozen,
                )

    def _search_cuda(self, request: SearchRequest) -> list[list[Hypothesis]] | None:
        """Search by recorded steps on a GPU; None where the model must do it as it is."""
        if self.device.type != "cuda" or self.model.training or _is_modified(self.model):
            return None
        with self._convert_lock:
            return self._cuda.generate(self.model, _weights_version(self.model), request)

    def _apply_shortlist(self, model: Any, memory: Any, request: SearchRequest) -> Any:
        """Keep each sentence to its shortlist, where there is one and the model's form can; a prefix may be anything."""
        if self.shortlist is None:
            return memory
        if not isinstance(model, CppTransformer):
            _warn_shortlist_unused()
            return memory
        pairs = zip(request.sources, request.prefixes, strict=True)
        return model.restrict_to_shortlist(
            memory, [self.shortlist.allowed_tokens(source, prefix) for source, prefix in pairs]
        )

    def _inference_model(
        self, strategy: SearchStrategy
    ) -> EncoderDecoder | TorchTransformer | CppTransformer:
        """Give the model in its quickest form that does the same."""
        model = self.model
        is_too_wide = isinstance(strategy, BeamSearch) and strategy.size > MAX_CPU_BEAM
        if is_too_wide or model.training or self.device.type != "cpu" or _is_modified(model):
            return model
        with self._convert_lock:
            weights_version = _weights_version(model)
            if weights_version != self._converted_from:
                made = convert_model(model, self.precision, self._calibration_pairs())
                if made.unsupported_reason and self.precision != FLOAT32:
                    logger.warning(
                        "%s is not used, and the model runs in float32: %s",
                        self.precision,
                        made.unsupported_reason,
                    )
                self._converted, self._active_precision, self._converted_from = (
                    made.frozen,
                    self.precision,
                    weights_version,
                )
                self._has_nonfinite_weights = made.frozen is None and not has_finite_weights(model)
            return model if self._converted is None else self._converted

    @contextlib.contextmanager
    def single_threaded(self) -> Iterator[None]:
        """Compute in one thread where several batches are computed at once; the number is each thread's own.

        Whoever runs the model beside the workers does so within this too: sums over several threads round differently.
        """
        if self.workers <= 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)  # what threads that are yet to come begin with


@functools.cache
def _warn_shortlist_unused() -> None:
    """Say, once, that all pieces are scored."""
    logger.warning(
        "the shortlist is not used, and all pieces are scored: only a Transformer in compiled kernels on a CPU can leave some out"
    )


def _weights_version(model: EncoderDecoder) -> list[tuple[int, int]]:
    """Tell weights that have changed."""
    weights = [
        weight
        for module in _iter_modules(model)
        for weight in module._parameters.values()
        if weight is not None
    ]
    return [
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights
    ]


def _is_modified(model: EncoderDecoder) -> bool:
    """Say whether somebody records or edits attentions, hooks into a part, or put a verb of their own in a model's place."""
    if type(model) is not EncoderDecoder or not _MODEL_METHODS.isdisjoint(vars(model)):
        return True
    return any(
        (isinstance(module, RecordableAttention) and module.hooks is not None)
        or module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        for module in _iter_modules(model)
    )


def _iter_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Walk through all parts, in a tenth of the time that `modules` takes: it is done for every batch."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting.extend(module._modules.values())
