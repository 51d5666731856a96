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

from dragoman.attention.recording import Watched, attentions, edit, is_watched
from dragoman.decoding.beam import Beam
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.packing import pack_sources
from dragoman.decoding.search import search
from dragoman.decoding.stepping import Strategy
from dragoman.engines.cpu.compiled import Compiled
from dragoman.engines.cpu.freezing import FLOAT32, Pair, freeze
from dragoman.engines.cpu.frozen import Frozen, is_finite
from dragoman.engines.cpu.shortlist import Shortlist
from dragoman.engines.face import Request
from dragoman.engines.gpu.on_device import OnDevice
from dragoman.errors import DivergedError
from dragoman.models.encoder_decoder import EncoderDecoder

logger = logging.getLogger(__name__)

GPU_SLOTS = 100_000  # padded places of source and beam: some 1,000 sentences of 20 pieces with a beam of 5
CPU_SLOTS = 2048  # enough rows to be worth a product, few enough that their keys stay near
WIDEST_FROZEN = 32  # beams: a frozen model's beams look at one another's keys, which wider ones would pay for

_VERBS = frozenset(("encode", "start", "step", "extend", "project"))


class Native:
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
        pairs: Callable[[], Sequence[Pair]] = tuple,
        shortlist: Shortlist | None = None,
    ) -> None:
        self.precision, self.workers, self.shortlist = precision, workers, shortlist
        self._load, self._pairs = load, pairs
        self._threads = torch.get_num_threads()
        self._making, self._loading = threading.Lock(), threading.Lock()
        self._loaded: EncoderDecoder | None = None
        self._frozen: Frozen | Compiled | None = None
        self._used = precision  # that of the form
        self._made_from: Any = None
        self._is_damaged = False  # whether weights are NaN or infinite
        self._on_device = OnDevice(precision)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return "native" if self.precision == FLOAT32 else f"native-{self.precision}"

    @property
    def callers(self) -> int:
        """Ask from a thread for each worker."""
        return self.workers

    def undivided(self) -> Native:
        """Give an engine of the same model that does one batch at a time, with all threads."""
        return Native(lambda: self.model, precision=self.precision, pairs=self._pairs, shortlist=self.shortlist)

    @property
    def slots(self) -> int | None:
        """Fill a GPU, whose step takes as long for ten sentences as for hundreds; a batch that does not fit is halved."""
        return {"cuda": GPU_SLOTS, "cpu": CPU_SLOTS}.get(self.device.type)

    @property
    def model(self) -> EncoderDecoder:
        """The model, in evaluation mode; loaded once, whichever thread asks first."""
        if self._loaded is None:
            with self._loading:
                self._loaded = self._load() if self._loaded is None else self._loaded
        return self._loaded

    @property
    def is_watched(self) -> bool:
        """Whether the caller records or edits the model: then the caller's own thread must run it, as it is."""
        return self._loaded is not None and is_watched(self._loaded)

    @property
    def device(self) -> torch.device:
        """Say where the weights are."""
        return next(self.model.parameters()).device

    def refusal(self, strategy: Strategy, longest: int = 0) -> str:
        """Refuse nothing."""
        return ""

    def generate(self, request: Request) -> list[list[Hypothesis]]:
        """Encode a batch and search."""
        with self.alone(), torch.inference_mode():
            found = self._recorded(request)
            if found is not None:
                return found
            form = self._form(request.strategy)
            try:
                if not self._is_damaged:
                    return self._search(form, request)
            except DivergedError:
                if form is self.model:
                    raise
            # A packed or quantised form may overflow where the model does not, so the model decides: with attention by its
            # definition, for torch's fused kernel on a CPU gives zeros where all scores of a row are NaN.
            with edit(self.model, dict.fromkeys(attentions(self.model), lambda weights: weights)):
                found = self._search(self.model, request)
            self._give_up(form)
            return found

    def _search(self, model: Any, request: Request) -> list[list[Hypothesis]]:
        """Encode a batch and search, with a model in any of its forms."""
        return search(
            model,
            self._shortened(model, model.encode(*pack_sources(request.sources, self.device)), request),
            limits=torch.tensor(request.limits),
            strategy=request.strategy,
            prefixes=request.prefixes,
            lines=request.lines,
            at_least=request.at_least,
            scored=request.scored,
        )

    def _give_up(self, form: Any) -> None:
        """Use a form no more that overflowed where the model did not: float32 instead of int8, and then the model as it is."""
        with self._making:
            if form is None or self._frozen is not form:
                return
            if self._used == FLOAT32:
                logger.warning("packed weights overflow where the model does not, which runs as it is and takes longer")
                self._frozen = None
            else:
                logger.warning("%s is too narrow for this model, which goes on in float32", self._used)
                self._used, self._frozen = FLOAT32, freeze(self.model, FLOAT32).frozen

    def _recorded(self, request: Request) -> list[list[Hypothesis]] | None:
        """Search by recorded steps on a GPU; None where the model must do it as it is."""
        if self.device.type != "cuda" or self.model.training or _is_altered(self.model):
            return None
        with self._making:
            return self._on_device.generate(self.model, _stamp(self.model), request)

    def _shortened(self, model: Any, memory: Any, request: Request) -> Any:
        """Keep each sentence to its shortlist, where there is one and the model's form can; a prefix may be anything."""
        if self.shortlist is None:
            return memory
        if not isinstance(model, Compiled):
            _say_unlisted()
            return memory
        pairs = zip(request.sources, request.prefixes, strict=True)
        return model.shortened(memory, [self.shortlist.allowed(source, prefix) for source, prefix in pairs])

    def _form(self, strategy: Strategy) -> EncoderDecoder | Frozen | Compiled:
        """Give the model in its quickest form that does the same."""
        model = self.model
        wide = isinstance(strategy, Beam) and strategy.size > WIDEST_FROZEN
        if wide or model.training or self.device.type != "cpu" or _is_altered(model):
            return model
        with self._making:
            stamp = _stamp(model)
            if stamp != self._made_from:
                made = freeze(model, self.precision, self._pairs())
                if made.refusal and self.precision != FLOAT32:
                    logger.warning("%s is not used, and the model runs in float32: %s", self.precision, made.refusal)
                self._frozen, self._used, self._made_from = made.frozen, self.precision, stamp
                self._is_damaged = made.frozen is None and not is_finite(model)
            return model if self._frozen is None else self._frozen

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
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
def _say_unlisted() -> None:
    """Say, once, that all pieces are scored."""
    logger.warning(
        "the shortlist is not used, and all pieces are scored: only a Transformer in compiled kernels on a CPU can leave some out"
    )


def _stamp(model: EncoderDecoder) -> list[tuple[int, int]]:
    """Tell weights that have changed."""
    weights = [weight for module in _parts(model) for weight in module._parameters.values() if weight is not None]
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def _is_altered(model: EncoderDecoder) -> bool:
    """Say whether somebody records or edits attentions, hooks into a part, or put a verb of their own in a model's place."""
    if type(model) is not EncoderDecoder or not _VERBS.isdisjoint(vars(model)):
        return True
    return any(
        (isinstance(module, Watched) and module.watch is not None)
        or module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
        for module in _parts(model)
    )


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Walk through all parts, in a tenth of the time that `modules` takes: it is done for every batch."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            yield module
            waiting.extend(module._modules.values())
