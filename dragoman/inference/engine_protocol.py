"""The engine interface: batches of source token ids in, hypotheses out.

The translator knows nothing else of an engine. It calls `unsupported_reason` first, and falls back
to the native engine, which supports every request.
"""

from __future__ import annotations

from typing import Protocol

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search_interface import SearchRequest, SearchStrategy


class Engine(Protocol):
    """Runs a model: the native engine, CTranslate2, ONNX Runtime."""

    @property
    def name(self) -> str:
        """The name that users write: `native`, `ctranslate2-int8`."""
        ...

    @property
    def workers(self) -> int:
        """How many batches it computes concurrently."""
        ...

    @property
    def client_threads(self) -> int:
        """How many threads should call `generate`: one per worker, more to keep a queue filled."""
        ...

    @property
    def batch_tokens(self) -> int | None:
        """The padded tokens per batch that suit it; None for the model's decode.batch_tokens."""
        ...

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Return why a strategy or `longest` tokens are unsupported; empty if they are not."""
        ...

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Return at least one hypothesis for every row, best first."""
        ...
