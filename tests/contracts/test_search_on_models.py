"""Search over the real step contract: caches, reordered beams and dropped rows must not show in the result."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from search_kit import slow_beam
from torch import Tensor

from dragoman.config import ModelConfig
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.padded_batch import pad_sources
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search import search
from dragoman.models.factory import build_model
from dragoman.registry import catalogue
from dragoman.text.special_tokens import BOS, EOS

VOCABULARY = 12
SOURCES = [[5, 6, 7, 8], [9], [4, 10, 4], [11, 11, 6, 5, 4, 8, 9], [7, 7]]


def make(**settings):
    torch.manual_seed(11)
    stacks = {"encoder": ("transformer*2",), "decoder": ("transformer*2",)}
    config = ModelConfig(width=16, heads=2, ffn_width=32, **(stacks | settings))
    model = build_model(config, src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)  # so that it has opinions, and beams change places
    return model


def next_log_probs(model, source: list[int], words: tuple[int, ...]) -> Tensor:
    """Ask without a cache: the whole target anew."""
    with torch.no_grad():
        return model(pad_sources([source]).ids, torch.tensor([[BOS, *words]]))[0, -1].log_softmax(
            -1
        )


@pytest.mark.parametrize("residual", sorted(catalogue("residual")))
@pytest.mark.parametrize("positions", sorted(catalogue("positions")))
def test_a_batch_of_beams_equals_a_search_without_cache_or_batch(
    residual: str, positions: str
) -> None:
    check_beams(make(residual=residual, positions=positions))


def test_beams_of_a_prefix_lm_equal_a_search_without_cache_or_batch() -> None:
    check_beams(make(architecture="prefix_lm", encoder=(), residual="pre_norm"))


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
        expected = slow_beam(
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
    model = make()
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
    model = make()
    with torch.no_grad():
        memory = model.encode(*pad_sources(SOURCES))
    before = memory.values.clone()
    first = search(model, memory, limits=torch.full((5,), 6), strategy=BeamSearch(size=3))
    assert torch.equal(memory.values, before)
    assert search(model, memory, limits=torch.full((5,), 6), strategy=BeamSearch(size=3)) == first
