"""Traces of beam search against the definition: an enumeration of all candidates, and reasons
derived from scores alone.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from beam_kit import ForbiddenReason, Words, check_trace, enumerate_beam
from hypothesis import given, settings
from hypothesis import strategies as st
from search_kit import TableModel

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.beam_trace import (
    BEAM_FULL,
    FINISHED,
    KEPT,
    MAX_NODES,
    REASONS,
    BeamObserver,
    BeamTrace,
    limit_nodes,
)
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.no_repeat_ngram import NoRepeatNgram, repeated_tokens
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import search
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK


def make_forbidden_reason(
    *, prefix: Words = (), min_length: int = 0, ngram: int = 0
) -> ForbiddenReason:
    """Return why a token may not follow, as the search defines it."""

    def forbidden_reason(words: Words, token: int) -> str | None:
        if len(words) < len(prefix):
            return None if token == prefix[len(words)] else "constraint"
        if ngram and token in repeated_tokens(words, ngram):
            return "no_repeat"
        if token in (PAD, BOS, UNK) or (token == EOS and len(words) < min_length):
            return "constraint"
        return None

    return forbidden_reason


def trace_batch(
    model: TableModel,
    sources: list[int],
    strategy: BeamSearch | GreedySearch | Sampling,
    *,
    limit: int = 4,
    max_nodes: int = MAX_NODES,
    **options: object,
) -> tuple[list[list[Hypothesis]], list[BeamTrace]]:
    observer = BeamObserver(max_nodes=max_nodes)
    found = search(
        model,
        torch.tensor(sources),
        limits=[limit] * len(sources),
        strategy=strategy,
        observer=observer,
        **options,
    )
    return found, observer.traces


@settings(max_examples=150)
@given(
    source=st.integers(0, 10_000),
    size=st.integers(1, 6),
    data=st.data(),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    limit=st.integers(1, 6),
    peak=st.sampled_from([0.0, 0.2, 1.0, 3.0]),
    end=st.sampled_from([-4.0, 0.0, 3.0]),
    vocabulary=st.sampled_from([5, 7, 12]),
    ngram=st.sampled_from([0, 0, 1, 2]),
    min_length=st.sampled_from([0, 0, 2]),
)
def test_every_node_agrees_with_a_search_over_all_candidates(
    source, size, data, alpha, limit, peak, end, vocabulary, ngram, min_length
) -> None:
    nbest = data.draw(st.integers(1, size))
    prefix = tuple(data.draw(st.lists(st.integers(UNK + 1, vocabulary - 1), max_size=limit)))
    model = TableModel(vocabulary=vocabulary, peak=peak, end=end)
    penalty, forbidden_reason = (
        WuLengthPenalty(alpha),
        make_forbidden_reason(prefix=prefix, min_length=min_length, ngram=ngram),
    )
    [found], [trace] = trace_batch(
        model,
        [source],
        BeamSearch(size, nbest, penalty),
        limit=limit,
        prefixes=[prefix],
        min_length=min_length,
        constraints=[NoRepeatNgram(ngram, vocabulary, prefix=prefix)] if ngram else [],
    )
    expected = enumerate_beam(
        lambda words: model.log_probs(source, (BOS, *words)),
        vocabulary=vocabulary,
        size=size,
        nbest=nbest,
        limit=limit,
        penalty=penalty,
        forbidden_reason=forbidden_reason,
    )
    nodes = {tuple(trace.tokens(node)): node for node in range(1, len(trace))}
    for words, node in nodes.items():
        reason, cum, cut = expected.fates[words]
        assert trace.reason_name(node) == reason, words
        assert trace.cum[node] == pytest.approx(cum, abs=1e-5)
        assert trace.cut[node] == pytest.approx(cut, abs=1e-5, nan_ok=True)
    for step in range(limit + 1):
        here = {words: fate for words, fate in expected.fates.items() if len(words) == step + 1}
        best = sorted(here, key=lambda words: -here[words].cum)[: 2 * size]
        cutoff = min((here[words].cum for words in best), default=0.0)
        recorded = [words for words in nodes if len(words) == step + 1]
        assert len(recorded) >= len(best)
        assert all(words in nodes for words in best if here[words].cum > cutoff + 1e-5)
        assert all(
            words in nodes
            for words, fate in here.items()
            if fate.reason not in ("constraint", "no_repeat", "beam_full")
        )
    assert [(*each.tokens, EOS) for each in found if each.finished] == [
        words for _, words in expected.best
    ]
    check_trace(
        trace, found, nbest=nbest, limit=limit, penalty=penalty, forbidden_reason=forbidden_reason
    )


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_traces_of_a_batch_are_those_of_its_sentences(size: int) -> None:
    model, strategy = TableModel(vocabulary=9, end=1.0), BeamSearch(size, size)
    sources = list(range(12))
    found, traces = trace_batch(model, sources, strategy, limit=6)
    for source, hypotheses, trace in zip(sources, found, traces, strict=True):
        [alone], [expected] = trace_batch(model, [source], strategy, limit=6)
        assert alone == hypotheses
        assert trace.leaves == expected.leaves
        for name in ("parent", "token", "logprob", "cum", "step", "reason", "cut"):
            np.testing.assert_array_equal(getattr(trace, name), getattr(expected, name))


@pytest.mark.parametrize("source", range(6))
def test_an_observer_does_not_change_the_result(source: int) -> None:
    model = TableModel(vocabulary=9)
    strategies = [BeamSearch(4, 3), BeamSearch(1), GreedySearch()]
    for strategy in (*strategies, GreedySearch(WuLengthPenalty(2.0))):
        found, _ = trace_batch(model, [source], strategy, limit=8)
        plain = search(model, torch.tensor([source]), limits=[8], strategy=strategy)
        for [one, *_], [other, *_] in zip(found, plain, strict=True):
            assert (one.tokens, one.finished) == (other.tokens, other.finished)
            assert one.score == pytest.approx(other.score, abs=1e-6)


def test_a_beam_of_one_and_greedy_search_trace_the_same_path() -> None:
    model = TableModel(vocabulary=9)
    [[_], [greedy]], [[_], [beam]] = (
        trace_batch(model, [3], strategy, limit=8) for strategy in (GreedySearch(), BeamSearch(1))
    )
    np.testing.assert_array_equal(greedy.parent, beam.parent)
    np.testing.assert_array_equal(greedy.token, beam.token)
    assert greedy.width == 1
    kept = [node for node in range(1, len(greedy)) if greedy.reason[node] in (KEPT, FINISHED)]
    assert kept == greedy.path(greedy.leaves[0])


def test_sampling_has_no_trace() -> None:
    _, traces = trace_batch(TableModel(), [3], Sampling(1.0, 0, 1.0, 1))
    assert traces == []


def test_a_kept_hypothesis_without_a_successor_shows_its_best_continuation() -> None:
    for source in range(30):
        _, [trace] = trace_batch(
            TableModel(vocabulary=12, peak=3.0), [source], BeamSearch(5), limit=6
        )
        parents = set(trace.parent.tolist())
        childless = [
            node for node in range(len(trace)) if node not in parents and trace.reason[node] == KEPT
        ]
        assert all(node in trace.leaves for node in childless)


def test_an_output_cut_at_the_limit_ends_at_a_kept_node_whose_continuations_exceed_it() -> None:
    [[best]], [trace] = trace_batch(TableModel(end=-50.0), [1], BeamSearch(2), limit=3)
    assert not best.finished
    [leaf] = trace.leaves
    assert trace.tokens(leaf) == best.tokens
    assert trace.reason_name(leaf) == "kept"
    children = trace.children()[leaf]
    assert children
    assert {trace.reason_name(node) for node in children} <= {
        "length_cap",
        "beam_full",
        "constraint",
    }


def test_all_reasons_of_the_search_occur() -> None:
    seen = set[str]()
    for source, end in itertools.product(range(20), (-1.0, 1.0)):
        model = TableModel(vocabulary=9, end=end)
        for ngram in (0, 1):
            _, [trace] = trace_batch(
                model,
                [source],
                BeamSearch(4, 1),
                limit=4,
                constraints=[NoRepeatNgram(1, 9)] if ngram else [],
            )
            seen |= {trace.reason_name(node) for node in range(len(trace))}
    assert seen == set(REASONS) - {"duplicate"}


def test_a_large_trace_loses_its_worst_candidates_first() -> None:
    model, strategy = TableModel(vocabulary=30), BeamSearch(8, 4)
    [found], [whole] = trace_batch(model, [5], strategy, limit=20)
    assert whole.dropped == 0
    most = len(whole) - 60
    [_], [small] = trace_batch(model, [5], strategy, limit=20, max_nodes=most)
    assert (len(small), small.dropped) == (most, 60)
    paths = {tuple(small.tokens(node)) for node in range(len(small))}
    lost = [node for node in range(len(whole)) if tuple(whole.tokens(node)) not in paths]
    assert {whole.reason[node] for node in lost} == {BEAM_FULL}
    remaining = whole.cum[
        [node for node in np.flatnonzero(whole.reason == BEAM_FULL) if node not in lost]
    ]
    assert whole.cum[lost].max() <= remaining.min()
    check_trace(
        small,
        found,
        nbest=4,
        limit=20,
        penalty=strategy.penalty,
        forbidden_reason=make_forbidden_reason(),
    )


def test_the_n_best_are_kept_with_any_limit() -> None:
    strategy = BeamSearch(4, 4)
    _, [trace] = trace_batch(TableModel(), [5], strategy, limit=6)
    smallest = limit_nodes(trace, 1)
    assert [smallest.tokens(leaf) for leaf in smallest.leaves] == [
        trace.tokens(leaf) for leaf in trace.leaves
    ]
    assert len(smallest) == len({node for leaf in trace.leaves for node in [0, *trace.path(leaf)]})
    assert smallest.dropped == len(trace) - len(smallest)


@pytest.mark.parametrize(
    ("tokens", "size", "forbidden"),
    [
        ([], 1, []),
        ([], 2, []),
        ([5], 2, []),
        ([5, 6], 1, [5, 6]),
        ([5, 6, 5], 2, [6]),
        ([5, 5, 5], 2, [5]),
        ([5, 6, 7, 5, 6], 3, [7]),
        ([5, 6, 7, 5, 6], 4, []),
        ([5, 6, 5, 7, 5], 2, [6, 7]),
    ],
)
def test_a_token_that_completes_a_known_n_gram_is_found(
    tokens: list[int], size: int, forbidden: list[int]
) -> None:
    assert repeated_tokens(tokens, size) == forbidden


@pytest.mark.parametrize("strategy", [BeamSearch(3, 3), GreedySearch(), Sampling(1.0, 0, 1.0, 1)])
def test_no_n_gram_is_written_twice(strategy: BeamSearch | GreedySearch | Sampling) -> None:
    model = TableModel(vocabulary=8, end=-3.0, peak=0.3)
    for source, size in itertools.product(range(5), (1, 2, 3)):
        [found] = search(
            model,
            torch.tensor([source]),
            limits=[12],
            strategy=strategy,
            constraints=[NoRepeatNgram(size, 8)],
        )
        for hypothesis in found:
            grams = list(zip(*(hypothesis.tokens[at:] for at in range(size)), strict=False))
            assert len(grams) == len(set(grams))


def test_a_trace_describes_itself() -> None:
    _, [trace] = trace_batch(TableModel(), [1], BeamSearch(2), limit=3)
    assert repr(trace) == f"BeamTrace(width=2, {len(trace)} nodes, {trace.step.max() + 1} steps)"
    assert trace.chosen() == {0, *trace.path(trace.leaves[0])}


def test_the_chosen_path_is_that_of_the_best_of_several() -> None:
    [found], [trace] = trace_batch(TableModel(), [1], BeamSearch(4, 4), limit=3)
    assert len(found) > 1
    assert len(set(trace.leaves)) == len(found)
    chosen = [node for node in sorted(trace.chosen()) if node]
    assert [int(trace.token[node]) for node in chosen] == [*found[0].tokens, EOS]


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_step_records_twice_as_many_allowed_candidates_as_the_beam_has(size: int) -> None:
    _, [trace] = trace_batch(TableModel(vocabulary=30), [2], BeamSearch(size), limit=4)
    is_first = trace.step == 0
    is_allowed = trace.reason != REASONS.index("constraint")
    assert (is_first & is_allowed).sum() == 2 * size


def test_a_trace_has_at_most_20000_nodes_and_counts_those_dropped_before() -> None:
    assert MAX_NODES == 20_000
    _, [trace] = trace_batch(TableModel(vocabulary=12), [5], BeamSearch(4), limit=6)
    assert limit_nodes(trace, len(trace)) is trace
    once = limit_nodes(trace, len(trace) - 5)
    twice = limit_nodes(once, len(trace) - 12)
    assert (len(twice), twice.dropped) == (len(trace) - 12, 12)


def test_the_forbidden_tokens_at_each_position_of_the_best_are_counted() -> None:
    """PAD, BOS and UNK always, EOS before the least length, and all but one within a prefix."""
    observer = BeamObserver()
    found = search(
        TableModel(vocabulary=9, end=1.0),
        torch.tensor([3, 4, 5]),
        limits=[5, 5, 5],
        strategy=BeamSearch(3, 2),
        prefixes=[[], [4, 5], [6]],
        min_length=2,
        observer=observer,
    )
    for [best, *_], prefix, masked in zip(found, ([], [4, 5], [6]), observer.masked, strict=True):
        assert best.finished
        assert masked == [
            8 if at < len(prefix) else 4 if at < 2 else 3 for at in range(len(best.tokens) + 1)
        ]
