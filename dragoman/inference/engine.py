"""The face of an engine: batches of piece ids in, hypotheses out, whoever computes them.

The translator knows nothing else. An engine says what it cannot do before it is asked to, and the translator then asks the
native one, which can do everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search import SearchStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """One batch: what is asked of an engine, row by row. Nothing in a row depends on its neighbours."""

    sources: Sequence[Sequence[int]]  # pieces of each source, its end not among them
    limits: Sequence[
        int
    ]  # the most pieces of each output, its end not counted; a prefix longer than its limit raises it
    prefixes: Sequence[Sequence[int]]  # pieces that each output must begin with
    strategy: SearchStrategy
    lines: Sequence[int]  # each row's number in the whole input, from which sampling draws
    min_length: int = 0  # fewest pieces before an output may end
    return_scores: bool = True  # whether scores and log-probabilities are wanted: without, some engines have less to do

    @property
    def longest(self) -> int:
        """Count the pieces, an end or a beginning included, of the longest sequence that may come up."""
        outputs = (
            max(limit, len(prefix))
            for limit, prefix in zip(self.limits, self.prefixes, strict=True)
        )
        return 1 + max([*map(len, self.sources), *outputs])


class Engine(Protocol):
    """A model that can be asked for outputs, wherever and however it runs."""

    @property
    def name(self) -> str:
        """What a person calls it: `native`, `ctranslate2-int8`."""
        ...

    @property
    def workers(self) -> int:
        """How many batches it computes at once."""
        ...

    @property
    def client_threads(self) -> int:
        """From how many threads `generate` is called: one a worker, or more where an engine has a queue that should not run empty."""
        ...

    @property
    def batch_tokens(self) -> int | None:
        """How many padded places of a batch suit it; None for the model's own decode.batch_tokens."""
        ...

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        """Say why it cannot search in this way, or through sequences of so many pieces; empty where it can."""
        ...

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        """Give the best outputs for every row, best first, at least one a row."""
        ...
