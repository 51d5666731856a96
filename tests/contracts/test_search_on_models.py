"""Search over the real step contract: caches, reordered beams and dropped rows must not show in the
result.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from search_kit import (
    SOURCES,
    VOCABULARY,
    build_random_model,
    next_log_probs,
    reference_beam_search,
)

from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import search
from dragoman.registry import catalogue
from dragoman.text.special_tokens import EOS


@pytest.mark.parametrize("residual", sorted(catalogue("residual")))
@pytest.mark.parametrize("positions", sorted(catalogue("positions")))
def test_a_batch_of_beams_equals_a_search_without_cache_or_batch(
    residual: str, positions: str
) -> None:
    check_beams(build_random_model(residual=residual, positions=positions))


def test_beams_of_a_prefix_lm_equal_a_search_without_cache_or_batch() -> None:
    check_beams(build_random_model(architecture="prefix_lm", encoder=(), residual="pre_norm"))


def check_beams(model) -> None:
    """Compare beam search with one that has neither a cache nor a batch."""
    with torch.no_grad():
        memory = model.encode(*pad_sources(SOURCES))
    penalty = WuLengthPenalty(0.6)
    found = search(
        model,
        memory,
        limits=torch.full((5,), 6),
        strategy=BeamSearch(size=4, nbest=4, penalty=penalty),
    )
    for source, hypotheses in zip(SOURCES, found, strict=True):
        done = [h for h in hypotheses if h.finished]
        expected = reference_beam_search(
            partial(next_log_probs, model, source),
            range(4, VOCABULARY),
            limit=6,
            size=4,
            penalty=penalty,
        )
        assert [tuple(h.tokens) for h in done] == [words for _, words in expected]
        assert [h.score for h in done] == pytest.approx(
            [score for score, _ in expected], rel=1e-5, abs=1e-4
        )


@pytest.mark.parametrize(
    "strategy", [GreedySearch(), BeamSearch(size=3, nbest=2), Sampling(seed=4, samples=2)]
)
def test_log_probs_of_every_strategy_are_those_of_a_pass_with_the_target_known(strategy) -> None:
    """The incremental decoder and teacher forcing agree on what is shown (tensor2tensor#917)."""
    model = build_random_model()
    with torch.no_grad():
        memory = model.encode(*pad_sources(SOURCES))
    found = search(
        model,
        memory,
        limits=torch.tensor([3, 9, 1, 6, 4]),
        strategy=strategy,
        prefixes=[[4, 5], [], [6], [], [7]],
    )
    for source, hypotheses in zip(SOURCES, found, strict=True):
        for h in hypotheses:
            written = [*h.tokens, EOS] if h.finished else h.tokens
            expected = [
                float(next_log_probs(model, source, tuple(written[:at]))[token])
                for at, token in enumerate(written)
            ]
            assert h.log_probs == pytest.approx(expected, abs=1e-4)


def test_searching_leaves_the_memory_as_it_was() -> None:
    model = build_random_model()
    with torch.no_grad():
        memory = model.encode(*pad_sources(SOURCES))
    before = memory.values.clone()
    first = search(model, memory, limits=torch.full((5,), 6), strategy=BeamSearch(size=3))
    assert torch.equal(memory.values, before)
    assert search(model, memory, limits=torch.full((5,), 6), strategy=BeamSearch(size=3)) == first
