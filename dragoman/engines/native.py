"""The native engine: our own search over our own model. It can do everything, and is what others are compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.packing import pack_sources
from dragoman.decoding.search import search
from dragoman.decoding.stepping import Strategy
from dragoman.engines.face import Request
from dragoman.models.encoder_decoder import EncoderDecoder

GPU_SLOTS = 200_000  # padded places of source and beam: some 2,000 sentences of 20 pieces with a beam of 5


class Native:
    """The model itself, loaded when it is first needed: where another engine does all the work, it never is."""

    name = "native"
    workers = 1

    def __init__(self, load: Callable[[], EncoderDecoder]) -> None:
        self._load = load

    @functools.cached_property
    def model(self) -> EncoderDecoder:
        """The model, in evaluation mode."""
        return self._load()

    @property
    def device(self) -> torch.device:
        """Say where the weights are."""
        return next(self.model.parameters()).device

    @property
    def slots(self) -> int | None:
        """Fill a GPU, whose step takes as long for ten sentences as for hundreds; a batch that does not fit is halved."""
        return GPU_SLOTS if self.device.type == "cuda" else None

    def refusal(self, strategy: Strategy, longest: int = 0) -> str:
        """Refuse nothing."""
        return ""

    def generate(self, request: Request) -> list[list[Hypothesis]]:
        """Encode a batch and search."""
        with torch.inference_mode():
            memory = self.model.encode(*pack_sources(request.sources, self.device))
        return search(
            self.model,
            memory,
            limits=torch.tensor(request.limits),
            strategy=request.strategy,
            prefixes=request.prefixes,
            lines=request.lines,
            at_least=request.at_least,
        )
