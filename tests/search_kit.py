"""Searches as one would write them on a blackboard, to compare the quick ones with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.search import REFERENCE_BACKEND, search
from dragoman.text.special_tokens import EOS

Words = tuple[int, ...]


def slow_beam(
    log_probs: Callable[[Words], Any],
    pieces: Sequence[int],
    *,
    limit: int,
    size: int,
    penalty: WuLengthPenalty,
) -> list[tuple[float, Words]]:
    """Search with a beam and no stopping rule: it always runs to the limit. `log_probs` tells of words what may follow."""
    living: list[tuple[float, Words]] = [(0.0, ())]
    finished: list[tuple[float, Words]] = []
    for step in range(limit + 1):
        grown = []
        for total, words in living:
            scores = log_probs(words)
            grown += [(total + float(scores[token]), words, token) for token in (EOS, *pieces)]
        grown.sort(key=lambda item: (-item[0], item[2]))
        living = []
        for total, words, token in grown[: size - len(finished)]:
            if token == EOS:
                finished.append((penalty.score(total, step + 1), words))
            else:
                living.append((total, (*words, token)))
    return sorted(finished, key=lambda pair: -pair[0])


def search_with_own_backend(model: Any, memory: Any, **options: Any) -> list[list[Hypothesis]]:
    """Search with the backend of a converted model, as the native engine does; else the reference."""
    backend = getattr(model, "search_backend", REFERENCE_BACKEND)
    return search(model, memory, backend=backend, **options)
