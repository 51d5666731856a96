"""Search against exhaustive enumeration and against a slow reference, on models small enough to
enumerate.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from search_kit import TableModel, TableState, reference_beam_search

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import search, select_rows
from dragoman.errors import ConfigError, DivergedError
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

WORDS = [token for token in range(7) if token not in (PAD, BOS, EOS, UNK)]


def run(model, sources, strategy, limit=4, **options) -> list[list[Hypothesis]]:
    limits = torch.tensor([limit] * len(sources)) if isinstance(limit, int) else torch.tensor(limit)
    return search(model, torch.tensor(sources), limits=limits, strategy=strategy, **options)


def every_output(
    model: TableModel, source: int, limit: int, penalty: WuLengthPenalty
) -> list[tuple[float, tuple[int, ...]]]:
    """Score every finished sequence of up to `limit` words."""
    return_scores = []
    for length in range(limit + 1):
        for words in itertools.product(WORDS, repeat=length):
            total = sum(
                model.log_probs(source, (BOS, *words[:i]))[token]
                for i, token in enumerate((*words, EOS))
            )
            return_scores.append((penalty.score(total, length + 1), words))
    return sorted(return_scores, key=lambda pair: -pair[0])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("source", range(4))
def test_a_beam_that_drops_nothing_finds_the_n_best_of_all_sequences(
    source: int, alpha: float
) -> None:
    """With any length penalty: the stopping criterion must not stop early (OpenNMT-py#1320,
    xnmt#572, transformers#20901).
    """
    model, penalty = TableModel(), WuLengthPenalty(alpha)
    expected = every_output(model, source, 4, penalty)[:5]
    [found] = run(model, [source], BeamSearch(size=3**5, nbest=5, penalty=penalty))
    assert [tuple(h.tokens) for h in found] == [words for _, words in expected]
    assert [h.score for h in found] == pytest.approx([score for score, _ in expected], abs=1e-5)
    assert all(h.finished for h in found)


@settings(max_examples=60, deadline=None)
@given(
    source=st.integers(0, 10_000),
    limit=st.integers(1, 8),
    size=st.integers(1, 6),
    data=st.data(),
    alpha=st.sampled_from([0.0, 0.6, 1.5]),
    end=st.sampled_from([-3.0, 0.0, 3.0]),
)
def test_beam_search_equals_a_slow_reference_that_never_stops_early(
    source, limit, size, data, alpha, end
) -> None:
    """Stopping early changes nothing in the n best (OpenNMT-py#1320, transformers#38778)."""
    nbest = data.draw(st.integers(1, size))
    model, penalty = TableModel(end=end), WuLengthPenalty(alpha)
    expected = reference_beam_search(
        lambda words: model.log_probs(source, (BOS, *words)),
        WORDS,
        limit=limit,
        size=size,
        penalty=penalty,
    )[:nbest]
    [found] = run(model, [source], BeamSearch(size=size, nbest=nbest, penalty=penalty), limit=limit)
    done = [h for h in found if h.finished]
    assert [tuple(h.tokens) for h in done] == [words for _, words in expected]
    assert [h.score for h in done] == pytest.approx([score for score, _ in expected], abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    source=st.integers(0, 10_000), limit=st.integers(1, 10), end=st.sampled_from([-3.0, 0.0, 2.0])
)
def test_a_beam_of_one_is_greedy(source: int, limit: int, end: float) -> None:
    model = TableModel(end=end)
    assert run(model, [source], BeamSearch(size=1), limit=limit) == run(
        model, [source], GreedySearch(), limit=limit
    )


STRATEGIES = {
    "greedy": GreedySearch(),
    "beam": BeamSearch(size=3, nbest=2),
    "sampling": Sampling(temperature=0.8, top_k=4, top_p=0.9, seed=7, samples=2),
}


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=25, deadline=None)
@given(sources=st.lists(st.integers(0, 500), min_size=1, max_size=8), data=st.data())
def test_other_rows_of_the_batch_change_nothing(name: str, sources: list[int], data) -> None:
    """Any composition and order of a batch, the same output (OpenNMT-py#2208, #1909, #318,
    transformers#38778, sockeye#907).
    """
    limits = data.draw(st.lists(st.integers(1, 9), min_size=len(sources), max_size=len(sources)))
    prefixes = data.draw(
        st.lists(
            st.lists(st.sampled_from(WORDS), max_size=3),
            min_size=len(sources),
            max_size=len(sources),
        )
    )
    order = data.draw(st.permutations(range(len(sources))))
    together = run(
        TableModel(),
        [sources[i] for i in order],
        STRATEGIES[name],
        limit=[limits[i] for i in order],
        prefixes=[prefixes[i] for i in order],
        sample_ids=order,
    )
    for row, i in enumerate(order):
        [alone] = run(
            TableModel(),
            [sources[i]],
            STRATEGIES[name],
            limit=[limits[i]],
            prefixes=[prefixes[i]],
            sample_ids=[i],
        )
        assert together[row] == alone


@pytest.mark.parametrize("name", STRATEGIES)
def test_specials_are_never_produced(name: str) -> None:
    """Padding, begin and unknown stay out even when the model wants them most (OpenNMT-py#2602)."""
    model = TableModel()
    plain = model.logits
    model.logits = lambda source, history: [
        9.0 if t in (PAD, BOS, UNK) else v for t, v in enumerate(plain(source, history))
    ]
    for hypotheses in run(model, list(range(20)), STRATEGIES[name], limit=6):
        assert hypotheses
        assert all(token in WORDS for h in hypotheses for token in h.tokens)


@pytest.mark.parametrize("name", STRATEGIES)
def test_log_probs_are_the_models_own(name: str) -> None:
    """One a token and one for the end, not renormalised over what was allowed: they equal a
    separate pass (tensor2tensor#917).
    """
    model = TableModel()
    for source, hypotheses in enumerate(run(model, list(range(10)), STRATEGIES[name], limit=5)):
        for h in hypotheses:
            tokens = [*h.tokens, EOS] if h.finished else h.tokens
            expected = [
                model.log_probs(source, (BOS, *tokens[:i]))[token] for i, token in enumerate(tokens)
            ]
            assert h.log_probs == pytest.approx(expected, abs=1e-5)
            assert h.score == pytest.approx(WuLengthPenalty().score(h.total, len(tokens)), abs=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_row_that_reaches_its_limit_is_returned_and_marked(name: str) -> None:
    model = TableModel(end=-1000.0)
    for limit, hypotheses in zip(
        [1, 3, 5], run(model, [1, 2, 3], STRATEGIES[name], limit=[1, 3, 5]), strict=True
    ):
        assert hypotheses
        assert all(
            not h.finished and len(h.tokens) == len(h.log_probs) == limit for h in hypotheses
        )
        for h in hypotheses:
            assert h.score == pytest.approx(WuLengthPenalty().score(h.total, limit), abs=1e-6)


def test_finished_hypotheses_come_before_those_that_reached_the_limit() -> None:
    model = TableModel(end=-1.0)
    for hypotheses in run(model, list(range(30)), BeamSearch(size=4, nbest=4), limit=3):
        flags = [h.finished for h in hypotheses]
        assert flags == sorted(flags, reverse=True)


@pytest.mark.parametrize("name", STRATEGIES)
def test_prefixes_are_forced_row_by_row_with_the_models_probability(name: str) -> None:
    model = TableModel()
    prefixes = [[4, 5, 6], [], [6], [5, 5]]
    for source, hypotheses in enumerate(
        run(model, [0, 1, 2, 3], STRATEGIES[name], limit=6, prefixes=prefixes)
    ):
        prefix = prefixes[source]
        for h in hypotheses:
            assert h.tokens[: len(prefix)] == prefix
            expected = [
                model.log_probs(source, (BOS, *prefix[:i]))[token] for i, token in enumerate(prefix)
            ]
            assert h.log_probs[: len(prefix)] == pytest.approx(expected, abs=1e-5)


def test_a_prefix_longer_than_the_limit_is_kept_whole() -> None:
    [[h]] = run(TableModel(end=50.0), [3], GreedySearch(), limit=1, prefixes=[[4, 5, 6]])
    assert (h.tokens, h.finished) == ([4, 5, 6], True)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("limit", "length"), [(1, 3), (2, 3), (3, 3), (4, 4), (6, 6)])
def test_a_limit_counts_the_prefix_and_is_never_below_it(
    name: str, limit: int, length: int
) -> None:
    for hypothesis in run(
        TableModel(end=-1000.0), [3], STRATEGIES[name], limit=limit, prefixes=[[4, 5, 6]]
    )[0]:
        assert (len(hypothesis.tokens), hypothesis.finished) == (length, False)


@pytest.mark.parametrize("name", STRATEGIES)
def test_min_length_forbids_eos(name: str) -> None:
    """What a retry of an empty output relies on (OpenNMT-py#2039)."""
    model = TableModel(end=50.0)
    assert all(hs[0].tokens == [] for hs in run(model, [0, 1, 2], STRATEGIES[name]))
    assert all(
        len(h.tokens) == 1 for hs in run(model, [0, 1, 2], GreedySearch(), min_length=1) for h in hs
    )
    assert all(h.tokens for hs in run(model, [0, 1, 2], STRATEGIES[name], min_length=1) for h in hs)


def test_finished_sentences_leave_the_batch() -> None:
    model = TableModel(end=50.0)
    plain = model.logits
    model.logits = lambda source, history: [
        v - 1000.0 * (t == EOS and source == 0) for t, v in enumerate(plain(source, history))
    ]
    run(model, [0, 1, 2, 3, 4], GreedySearch(), limit=9)
    assert model.rows_seen == 5 + 9  # all of them once, then only the unfinished row


def test_rows_are_reordered_unless_the_order_is_unchanged() -> None:
    state = TableState(torch.tensor([7, 8, 9]), torch.tensor([[1], [2], [3]]))
    assert select_rows(state, np.array([0, 1, 2]), 3) is state
    for rows in ([0, 2, 1], [0, 1], [2, 2, 2]):
        assert select_rows(state, np.array(rows), 3).history.flatten().tolist() == [
            row + 1 for row in rows
        ]


def test_n_best_costs_no_second_pass() -> None:
    """Asking for all hypotheses of a beam takes no step more than the beam has
    (tensor2tensor#1122).
    """
    one, many = TableModel(), TableModel()
    run(one, [5], BeamSearch(size=4, nbest=1, penalty=WuLengthPenalty(0.0)), limit=8)
    run(many, [5], BeamSearch(size=4, nbest=4, penalty=WuLengthPenalty(0.0)), limit=8)
    assert one.steps <= many.steps <= 9


def test_ties_go_to_the_lower_token_then_to_the_better_parent() -> None:
    model = TableModel(vocabulary=50)
    model.logits = lambda source, history: [0.0] * 50  # every token equally likely
    [found] = run(model, [0], BeamSearch(size=3, nbest=3, penalty=WuLengthPenalty(0.0)), limit=1)
    assert [h.tokens for h in found] == [[], [4], [5]]
    [[greedy]] = run(model, [0], GreedySearch(), limit=3, min_length=2)
    assert greedy.tokens == [4, 4]


def test_ties_of_several_parents_go_to_the_lower_token_then_to_the_better_parent() -> None:
    model = TableModel(vocabulary=7)
    model.logits = lambda source, history: [0.0] * 7  # three words, equally likely
    for size in (3, 4, 5, 9):
        [found] = run(
            model,
            [0],
            BeamSearch(size=size, nbest=size, penalty=WuLengthPenalty(0.0)),
            limit=2,
            min_length=2,
        )
        assert [h.tokens for h in found] == [
            [first, second] for second in WORDS for first in WORDS
        ][:size]
    tables = {(BOS,): {4: 3.0, 5: 2.0}, (BOS, 4): {6: 2.0, 7: 3.0}, (BOS, 5): {6: 3.0, 7: 2.0}}
    model.logits = lambda source, history: [
        tables.get(history, {}).get(token, -9.0) for token in range(8)
    ]
    [found] = run(
        model, [0], BeamSearch(size=3, nbest=3, penalty=WuLengthPenalty(0.0)), limit=2, min_length=2
    )
    assert [h.tokens for h in found] == [
        [4, 7],
        [4, 6],
        [5, 6],
    ]  # the last two are equal, and 4 was the better beginning


def test_a_beam_wider_than_the_vocabulary_works() -> None:
    [found] = run(TableModel(), [1], BeamSearch(size=200, nbest=200), limit=2)
    assert len(found) == 1 + 3 + 9


def test_nothing_possible_still_gives_a_hypothesis() -> None:
    model = TableModel()
    model.logits = lambda source, history: (
        [0.0] + [-math.inf] * 6
    )  # only padding, which is never produced
    for strategy in STRATEGIES.values():
        [[h]] = run(model, [0], strategy)
        assert (h.tokens, h.finished) == ([], False)


def test_nan_logits_raise() -> None:
    model = TableModel()
    model.logits = lambda source, history: [math.nan] * 7
    for strategy in STRATEGIES.values():
        with pytest.raises(DivergedError, match="NaN at output position 1"):
            run(model, [0], strategy)


@pytest.mark.parametrize("return_scores", [True, False])
def test_an_infinite_logit_is_an_error(return_scores: bool) -> None:
    """With log-probabilities requested or not; it has none."""
    model = TableModel()
    model.logits = lambda source, history: (
        [0.0] * 5 + [math.inf] + [0.0] if len(history) > 1 else [0.0] * 7
    )
    for strategy in STRATEGIES.values():
        with pytest.raises(DivergedError, match=r"found (NaN|infinity) at output position 2"):
            run(model, [0], strategy, limit=5, min_length=3, return_scores=return_scores)


def test_sampling_depends_on_seed_and_line_only() -> None:
    model = TableModel(peak=0.1, end=-2.0)
    first = run(model, [7] * 40, Sampling(seed=1), limit=6)
    again = run(model, [7] * 40, Sampling(seed=1), limit=6)
    other = run(model, [7] * 40, Sampling(seed=2), limit=6)
    assert first == again
    assert first != other
    assert len({tuple(h[0].tokens) for h in first}) > 20  # lines differ


def test_sampling_follows_the_distribution() -> None:
    """Frequencies of 4,000 draws lie within four standard deviations of the model's
    probabilities.
    """
    model, count = TableModel(), 4000
    wanted = torch.tensor(model.log_probs(3, (BOS,))).exp()
    wanted[[PAD, BOS, UNK]] = 0
    wanted /= wanted.sum()
    drawn = [
        h[0].tokens[0] if h[0].tokens else EOS
        for h in run(model, [3] * count, Sampling(seed=5), limit=1)
    ]
    for token in (EOS, *WORDS):
        p = float(wanted[token])
        assert abs(drawn.count(token) / count - p) < 4 * math.sqrt(p * (1 - p) / count) + 1e-9


def test_sampling_cuts_to_the_likeliest() -> None:
    model = TableModel(peak=0.05)
    best = [
        sorted(range(7), key=lambda t: (t in (PAD, BOS, UNK), -model.log_probs(s, (BOS,))[t]))
        for s in range(60)
    ]
    for strategy, width in [
        (Sampling(top_k=2, seed=1), 2),
        (Sampling(top_p=1e-6, seed=1), 1),
        (Sampling(temperature=1e-4, seed=1), 1),
    ]:
        for source, [h] in enumerate(run(model, list(range(60)), strategy, limit=1)):
            assert (h.tokens[0] if h.tokens else EOS) in best[source][:width]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: BeamSearch(size=0), "found 0"),
        (lambda: BeamSearch(size=2, nbest=3), "found 3"),
        (lambda: BeamSearch(size=2, nbest=0), "found 0"),
        (lambda: WuLengthPenalty(-0.5), "found -0.5"),
        (lambda: WuLengthPenalty(math.nan), "found nan"),
        (lambda: Sampling(temperature=0.0), "found 0.0"),
        (lambda: Sampling(temperature=math.inf), "found inf"),
        (lambda: Sampling(top_k=-1), "found -1"),
        (lambda: Sampling(top_p=0.0), "found 0.0"),
        (lambda: Sampling(top_p=1.5), "found 1.5"),
        (lambda: Sampling(seed=-3), "found -3"),
        (lambda: Sampling(samples=0), "found 0"),
    ],
)
def test_invalid_settings_are_rejected(make, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        make()


def test_all_problems_of_sampling_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        Sampling(temperature=-1, top_k=-1, top_p=2)
    assert len(caught.value.problems) == 3


def test_beam_search_keeps_four_hypotheses_and_returns_one_by_default() -> None:
    assert BeamSearch() == BeamSearch(size=4, nbest=1, penalty=WuLengthPenalty(0.6))


def test_greedy_search_without_scores_finds_the_same_tokens() -> None:
    model, sources = TableModel(), list(range(6))
    scored = run(model, sources, GreedySearch(), limit=5)
    plain = run(model, sources, GreedySearch(), limit=5, return_scores=False)
    for [one], [other] in zip(plain, scored, strict=True):
        assert (one.tokens, one.finished) == (other.tokens, other.finished)
        assert (one.log_probs, one.score) == ([], 0.0)
        assert other.log_probs


@pytest.mark.parametrize("special", [PAD, BOS, EOS])
def test_a_prefix_with_a_special_token_is_refused(special: int) -> None:
    with pytest.raises(AssertionError, match="a prefix must not hold PAD, BOS or EOS"):
        run(TableModel(), [0], GreedySearch(), prefixes=[[4, special]])
