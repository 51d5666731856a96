"""Ensembles of different architectures: the searches against ones without cache or batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from search_kit import (
    SOURCES,
    VOCABULARY,
    build_random_model,
    next_log_probs,
    reference_beam_search,
)
from torch import Tensor

from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import SearchStrategy, search
from dragoman.inference.cpu.cpu_engine_conversion import convert_model
from dragoman.inference.cuda.cuda_backend import EagerSearchBackend
from dragoman.inference.ensemble_engine import EnsembleDecoder
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import EOS

PENALTY = WuLengthPenalty(0.6)
STRATEGIES = [GreedySearch(), BeamSearch(3, 2), Sampling(seed=4, samples=3)]


@cache
def members() -> tuple[EncoderDecoder, ...]:
    """A Transformer, another one, and a recurrent model with attention."""
    recurrent = {"encoder": ("lstm",), "decoder": ("lstm(attention=additive)",)}
    return (
        build_random_model(),
        build_random_model(residual="pre_norm", positions="rotary"),
        build_random_model(**recurrent),
    )


def mean_log_probs(source: list[int], words: tuple[int, ...]) -> Tensor:
    """Return the normalized mean, each model run on the whole target anew."""
    mean = torch.stack([next_log_probs(each, source, words) for each in members()]).mean(dim=0)
    return mean.log_softmax(-1)


def run(decoder: EnsembleDecoder, strategy: SearchStrategy, **more) -> list[list[Hypothesis]]:
    with torch.inference_mode():
        memory = decoder.encode(*pad_sources(SOURCES))
    return search(decoder, memory, limits=[6, 9, 1, 6, 4], strategy=strategy, **more)


@pytest.mark.parametrize("backend", [None, EagerSearchBackend()])
def test_beams_equal_a_search_without_cache_or_batch(backend: EagerSearchBackend | None) -> None:
    strategy = BeamSearch(size=4, nbest=4, penalty=PENALTY)
    more = {} if backend is None else {"backend": backend}
    found = run(EnsembleDecoder(members()), strategy, **more)
    for source, limit, hypotheses in zip(SOURCES, [6, 9, 1, 6, 4], found, strict=True):
        expected = reference_beam_search(
            lambda words, source=source: mean_log_probs(source, words),
            range(4, VOCABULARY),
            limit=limit,
            size=4,
            penalty=PENALTY,
        )
        done = [each for each in hypotheses if each.finished]
        assert [tuple(each.tokens) for each in done] == [words for _, words in expected]
        assert [each.score for each in done] == pytest.approx(
            [score for score, _ in expected], rel=1e-5, abs=1e-4
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_log_probs_are_the_normalized_mean_of_the_members(strategy: SearchStrategy) -> None:
    for source, hypotheses in zip(SOURCES, run(EnsembleDecoder(members()), strategy), strict=True):
        for each in hypotheses:
            written = [*each.tokens, EOS] if each.finished else each.tokens
            assert each.log_probs == pytest.approx(
                [
                    float(mean_log_probs(source, tuple(written[:at]))[token])
                    for at, token in enumerate(written)
                ],
                abs=1e-4,
            )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_twice_is_the_model(strategy: SearchStrategy) -> None:
    alone, twice = (
        run(EnsembleDecoder(models), strategy)
        for models in ([members()[0]], [members()[0], members()[0]])
    )
    model = members()[0]
    with torch.inference_mode():
        memory = model.encode(*pad_sources(SOURCES))
    plain = search(model, memory, limits=[6, 9, 1, 6, 4], strategy=strategy)
    for found in (alone, twice):
        assert [[h.tokens for h in row] for row in found] == [
            [h.tokens for h in row] for row in plain
        ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_converted_members_search_the_same(strategy: SearchStrategy) -> None:
    """The compiled and the plain forms of models may be mixed."""
    converted = convert_model(members()[0], "float32", ()).model
    assert converted is not None
    found = run(EnsembleDecoder([converted, *members()[1:]]), strategy)
    plain = run(EnsembleDecoder(members()), strategy)
    assert [[h.tokens for h in row] for row in found] == [[h.tokens for h in row] for row in plain]
