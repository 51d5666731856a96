"""The native engine: Dragoman's search over Dragoman's model. It supports every request.

It chooses how a model runs: the C++ kernels or PyTorch on a CPU, CUDA graphs on a GPU, or the model
itself if its attention is recorded or edited.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dragoman.attention import attention_weight_hooks
from dragoman.attention.attention_weight_hooks import RecordableAttention, edit, find_attentions
from dragoman.bundle.translation_bundle_loader import build_loaded_model
from dragoman.config import Config
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search_interface import (
    REFERENCE_BACKEND,
    SearchBackend,
    SearchRequest,
    SearchStrategy,
)
from dragoman.errors import DivergedError
from dragoman.inference.cpu.cpp_transformer import CppTransformer
from dragoman.inference.cpu.cpu_engine_conversion import FLOAT32, TokenPair, convert_model
from dragoman.inference.cpu.lexical_shortlist import Shortlist
from dragoman.inference.cpu.packed_weight_torch_transformer import (
    TorchTransformer,
    has_finite_weights,
)
from dragoman.inference.cuda.cuda_backend import CudaBackend, EagerSearchBackend
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.sentencepiece_tokenizer import Tokenizers

logger = logging.getLogger(__name__)

# Padded tokens of a batch, sources times beams. On a GPU a step takes as long for ten sentences as
# for hundreds: these are about 1,000 sentences of 20 tokens with a beam of 5.
CUDA_BATCH_TOKENS = 100_000
CPU_BATCH_TOKENS = 2048  # enough rows for efficient matmuls, few enough for the CPU cache
MAX_CPU_BEAM = 32  # wider beams run the model itself: the packed KV cache holds all beams of a step

_MODEL_METHODS = frozenset(("encode", "start", "step", "extend", "project"))


class _InferenceModel(NamedTuple):
    """A model with `encode`, `start` and `step`, and its search backend."""

    model: Any
    backend: SearchBackend


class NativeEngine:
    """Runs the model, which is loaded when first needed: never if another engine does all the work.

    On a CPU a Transformer is converted to packed float32 or, with `precision` int8, to quantized
    weights. On a GPU its steps are captured as CUDA graphs, in float32 or with `precision` float16
    or bfloat16. A model without such a form, or one that is recorded or edited, runs as it is.
    Weights that change are converted again.
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
        self._active_precision = precision  # of the converted model
        self._converted_from: Any = None  # the version of the weights
        self._has_nonfinite_weights = False
        self._cuda = CudaBackend(precision)

    @property
    def name(self) -> str:
        """The name of the engine: `native`, `native-int8`."""
        return "native" if self.precision == FLOAT32 else f"native-{self.precision}"

    @property
    def client_threads(self) -> int:
        """The number of threads that should call `generate`: one per worker."""
        return self.workers

    def single_worker(self) -> NativeEngine:
        """Return an engine of the same model that runs one batch at a time on all threads."""
        return NativeEngine(
            lambda: self.model,
            precision=self.precision,
            pairs=self._calibration_pairs,
            shortlist=self.shortlist,
        )

    @property
    def batch_tokens(self) -> int | None:
        """The padded tokens per batch that suit the device; a batch that does not fit is halved."""
        return {"cuda": CUDA_BATCH_TOKENS, "cpu": CPU_BATCH_TOKENS}.get(self.device.type)

    @property
    def overlaps_host(self) -> bool:
        """Whether the device computes a batch while the host prepares another: a GPU does."""
        return self.device.type == "cuda"

    @property
    def model(self) -> EncoderDecoder:
        """The model in evaluation mode, loaded on first use; thread-safe."""
        if self._loaded is None:
            # Not as inference tensors, even if a search loads it: attribution needs gradients.
            with self._load_lock, torch.inference_mode(False):
                self._loaded = self._load() if self._loaded is None else self._loaded
        return self._loaded

    @property
    def models(self) -> list[EncoderDecoder]:
        """All models that decide an output: one, or several of an ensemble."""
        return [self.model]

    def copy_to_cpu(self, config: Config, tokenizers: Tokenizers) -> NativeEngine:
        """Return an engine of the same weights on the CPU."""
        weights = {name: tensor.cpu() for name, tensor in self.model.state_dict().items()}
        model = build_loaded_model(config, tokenizers, weights)
        return NativeEngine(lambda: model)

    @property
    def has_hooks(self) -> bool:
        """Whether the calling thread records or edits the model: then it must run it itself."""
        return (
            attention_weight_hooks.any_scope_open
            and self._loaded is not None
            and attention_weight_hooks.has_hooks(self._loaded)
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Return an empty string: the native engine supports every request."""
        return ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Encode a batch and search; return at least one hypothesis per row, best first."""
        with self.single_threaded(), torch.inference_mode():
            found = self._generate_on_cuda(request)
            if found is not None:
                return found
            inference_model = self.inference_model(request.strategy)
            try:
                if not self._has_nonfinite_weights:
                    return self._search(inference_model, request)
            except DivergedError:
                if inference_model.model is self.model:
                    raise
            # Packed or quantized weights may overflow where the model does not, so the model
            # decides. It runs with unfused attention: on a CPU torch's fused kernel returns zeros
            # for a row whose scores are all NaN.
            unchanged = dict.fromkeys(find_attentions(self.model), lambda weights: weights)
            with edit(self.model, unchanged):
                found = self._search(self._plain_model(), request)
            self._drop_converted(inference_model.model)
            return found

    def _search(self, running: _InferenceModel, request: SearchRequest) -> list[list[Hypothesis]]:
        """Encode a batch and run the request's strategy."""
        model, backend = running
        memory = model.encode(*pad_sources(request.sources, self.device))
        if self.shortlist is not None and not request.constraints:  # it may lack what they need
            memory = self._apply_shortlist(model, memory, request)
        return request.strategy.run(model, model.start(memory), request, backend)

    def _generate_on_cuda(self, request: SearchRequest) -> list[list[Hypothesis]] | None:
        """Search by CUDA graphs; None if the model itself must run."""
        if (
            self.device.type != "cuda"
            or self.model.training
            or request.observer is not None
            or _is_modified(self.model)
        ):
            return None
        if request.constraints:
            _log_graphs_unused()
            return None
        with self._convert_lock:
            return self._cuda.generate(self.model, _weights_version(self.model), request)

    def _plain_model(self) -> _InferenceModel:
        """Return the model as it is, with the search backend of its device."""
        on_cuda = self.device.type == "cuda"
        return _InferenceModel(self.model, EagerSearchBackend() if on_cuda else REFERENCE_BACKEND)

    def inference_model(self, strategy: SearchStrategy) -> _InferenceModel:
        """Return the fastest form of the model that computes the same, converting it if needed."""
        model = self.model
        is_too_wide = (strategy.beam_size or 1) > MAX_CPU_BEAM
        if is_too_wide or self.device.type != "cpu" or model.training or _is_modified(model):
            return self._plain_model()
        with self._convert_lock:
            weights_version = _weights_version(model)
            if weights_version != self._converted_from:
                result = convert_model(model, self.precision, self._calibration_pairs())
                if result.unsupported_reason and self.precision != FLOAT32:
                    logger.warning(
                        "%s is not used, and the model runs in float32: %s",
                        self.precision,
                        result.unsupported_reason,
                    )
                self._converted, self._converted_from = result.model, weights_version
                self._active_precision = self.precision
                self._has_nonfinite_weights = result.model is None and not has_finite_weights(model)
            converted = self._converted
        if converted is None:
            return self._plain_model()
        return _InferenceModel(converted, converted.search_backend)

    def _drop_converted(self, converted: Any) -> None:
        """Replace a conversion that overflowed: int8 by float32, and float32 by the model."""
        with self._convert_lock:
            if converted is None or self._converted is not converted:
                return
            if self._active_precision == FLOAT32:
                logger.warning(
                    "packed weights overflow where the model does not: "
                    "the model itself runs, which is slower"
                )
                self._converted = None
            else:
                logger.warning(
                    "%s overflows for this model: it runs in float32", self._active_precision
                )
                self._active_precision = FLOAT32
                self._converted = convert_model(self.model, FLOAT32).model

    def _apply_shortlist(self, model: Any, memory: Any, request: SearchRequest) -> Any:
        """Restrict each sentence to its shortlist and prefix, if the C++ kernels run."""
        if not isinstance(model, CppTransformer):
            _warn_shortlist_unused()
            return memory
        assert self.shortlist is not None, "checked by the caller"
        pairs = zip(request.sources, request.prefixes, strict=True)
        return model.restrict_to_shortlist(
            memory, [self.shortlist.allowed_tokens(source, prefix) for source, prefix in pairs]
        )

    @contextlib.contextmanager
    def single_threaded(self) -> Iterator[None]:
        """Use one torch thread per batch if several workers run batches concurrently.

        The setting belongs to the calling thread. Whoever runs the model beside the workers must
        use this too: sums over several threads round differently.
        """
        if self.workers <= 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self._threads)  # the default of threads started later


@functools.cache
def _warn_shortlist_unused() -> None:
    """Log once that the shortlist is ignored."""
    logger.warning(
        "the shortlist is not used, and all tokens are scored: "
        "it needs a Transformer in the compiled kernels on a CPU"
    )


@functools.cache
def _log_graphs_unused() -> None:
    """Log once that CUDA graphs are not used."""
    logger.info(
        "constrained decoding runs without CUDA graphs and in float32: "
        "the host decides between steps which tokens may follow"
    )


def _weights_version(model: EncoderDecoder) -> list[tuple[int, int]]:
    """Return a value that changes when weights are replaced or written."""
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
    """Whether attention is recorded or edited, or hooks or replaced methods change the model."""
    if type(model) is not EncoderDecoder or not _MODEL_METHODS.isdisjoint(vars(model)):
        return True
    any_scope_open = attention_weight_hooks.any_scope_open
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        or (any_scope_open and isinstance(module, RecordableAttention) and module.hooks is not None)
        for module in _iter_modules(model)
    )


def _iter_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all modules, in a tenth of the time of `modules()`: this runs for every batch."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting.extend(module._modules.values())
