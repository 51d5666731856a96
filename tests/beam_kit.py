"""Beam search from its definition, over all candidates, and the reasons of a trace derived again
from its scores alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dragoman.decoding.beam_trace import REASONS, BeamTrace
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import LengthPenalty
from dragoman.text.special_tokens import EOS

Words = tuple[int, ...]
ForbiddenReason = Callable[
    [Words, int], str | None
]  # why a token may not follow these; None if it may


class Fate(NamedTuple):
    """What became of a candidate."""

    reason: str
    cum: float
    cut: float


class EnumeratedBeam(NamedTuple):
    """A beam search that remembers all it saw."""

    fates: dict[Words, Fate]  # of every candidate of every step
    best: list[tuple[float, Words]]  # finished, best first


def enumerate_beam(
    log_probs: Callable[[Words], Sequence[float]],
    *,
    vocabulary: int,
    size: int,
    nbest: int,
    limit: int,
    penalty: LengthPenalty,
    forbidden_reason: ForbiddenReason,
) -> EnumeratedBeam:
    """Run beam search by its definition: each step builds, sorts and checks all candidates."""
    fates = dict[Words, Fate]()
    unfinished: list[tuple[float, Words]] = [(0.0, ())]
    finished: list[tuple[float, Words]] = []
    for step in range(limit + 1):
        allowed = list[tuple[float, int, int, Words]]()
        for parent, (total, words) in enumerate(unfinished):
            scores = log_probs(words)
            for token in range(vocabulary):
                cum, why = total + scores[token], forbidden_reason(words, token)
                if why is None:
                    allowed.append((-cum, token, parent, (*words, token)))
                else:
                    fates[(*words, token)] = Fate(why, cum, math.nan)
        allowed.sort()
        free_slots = size - len(finished)
        inside, outside = allowed[:free_slots], allowed[free_slots:]
        fates |= {
            words: Fate("beam_full", -negated, -inside[-1][0]) for negated, _, _, words in outside
        }
        unfinished = []
        for negated, token, _, words in inside:
            if token == EOS:
                finished.append((penalty.score(-negated, step + 1), words))
                fates[words] = Fate("finished", -negated, math.nan)
            elif step == limit:
                fates[words] = Fate("length_cap", -negated, math.nan)
            else:
                unfinished.append((-negated, words))
                fates[words] = Fate("kept", -negated, math.nan)
        finished_scores = sorted((score for score, _ in finished), reverse=True)
        if unfinished and len(finished) >= nbest:
            bounds = [total / penalty.divisor(limit + 1) for total, _ in unfinished]
            if max(bounds) <= finished_scores[nbest - 1]:
                for bound, (total, words) in zip(bounds, unfinished, strict=True):
                    fates[words] = Fate("early_stop", total, bound)
                break
        if not unfinished:
            break
    ranked = sorted(finished, key=lambda pair: -pair[0])
    for _, words in ranked[nbest:]:
        fates[words] = Fate("worse_finished", fates[words].cum, ranked[nbest - 1][0])
    return EnumeratedBeam(fates, ranked[:nbest])


def derive_reasons(
    trace: BeamTrace,
    *,
    nbest: int,
    limit: int,
    penalty: LengthPenalty,
    forbidden_reason: ForbiddenReason,
) -> tuple[list[str], np.ndarray]:
    """Return the reason and the cut of every node, from scores, tokens and the tree alone."""
    reasons, cuts = [""] * len(trace), np.full(len(trace), np.nan)
    reasons[0], finished, free_slots = "kept", list[tuple[float, int]](), trace.width
    for step in range(int(trace.step.max(initial=-1)) + 1):
        allowed = []
        for node in np.flatnonzero(trace.step == step).tolist():
            *before, token = trace.tokens(node)
            why = forbidden_reason(tuple(before), token)
            if why is not None:
                reasons[node] = why
            else:
                allowed.append((-float(trace.cum[node]), token, int(trace.parent[node]), node))
        allowed.sort()
        unfinished = []
        for rank, (negated, token, _, node) in enumerate(allowed):
            if rank >= free_slots:
                reasons[node], cuts[node] = "beam_full", -allowed[free_slots - 1][0]
            elif token == EOS:
                reasons[node] = "finished"
                finished.append((penalty.score(-negated, step + 1), node))
            elif step == limit:
                reasons[node] = "length_cap"
            else:
                reasons[node] = "kept"
                unfinished.append((-negated / penalty.divisor(limit + 1), node))
        free_slots = trace.width - len(finished)
        ranked = sorted((score for score, _ in finished), reverse=True)
        if unfinished and len(ranked) >= nbest and max(unfinished)[0] <= ranked[nbest - 1]:
            for bound, node in unfinished:
                reasons[node], cuts[node] = "early_stop", bound
    best = sorted(finished, key=lambda pair: -pair[0])
    for _, node in best[nbest:]:
        reasons[node], cuts[node] = "worse_finished", best[nbest - 1][0]
    return reasons, cuts


def check_trace(
    trace: BeamTrace,
    found: Sequence[Hypothesis],
    *,
    nbest: int,
    limit: int,
    penalty: LengthPenalty,
    forbidden_reason: ForbiddenReason,
) -> None:
    """Assert what holds for every trace of one sentence."""
    size = len(trace)
    parents = trace.parent[1:]
    assert (trace.parent[0], trace.token[0], trace.step[0], trace.cum[0]) == (-1, -1, -1, 0.0)
    assert (parents < np.arange(1, size)).all(), "parents come first"
    assert (parents >= 0).all()
    assert (trace.step[1:] == trace.step[parents] + 1).all()
    assert (trace.cum[1:] == trace.cum[parents] + trace.logprob[1:]).all(), "exactly"
    kept = trace.reason == REASONS.index("kept")
    assert kept[parents].all(), "only what was kept is continued"
    for step in range(int(trace.step.max(initial=-1)) + 1):
        here = trace.step == step
        assert (here & kept).sum() <= trace.width
        order = zip(-trace.cum[here], trace.token[here], trace.parent[here], strict=True)
        assert list(order) == sorted(
            zip(-trace.cum[here], trace.token[here], trace.parent[here], strict=True)
        ), "best first; of equal ones the lower token, then parent"
    paths = [tuple(trace.tokens(node)) for node in range(size)]
    assert len(set(paths)) == size, "no candidate twice"
    if not trace.dropped:
        reasons, cuts = derive_reasons(
            trace, nbest=nbest, limit=limit, penalty=penalty, forbidden_reason=forbidden_reason
        )
        assert [REASONS[each] for each in trace.reason] == reasons
        np.testing.assert_allclose(trace.cut, cuts, rtol=0, atol=1e-9)
    assert len(trace.leaves) == len(found)
    finished = np.flatnonzero(trace.reason == REASONS.index("finished")).tolist()
    assert sorted(finished) == sorted(
        leaf for leaf, each in zip(trace.leaves, found, strict=True) if each.finished
    )
    for leaf, hypothesis in zip(trace.leaves, found, strict=True):
        tokens = trace.tokens(leaf)
        assert tokens == [*hypothesis.tokens, *([EOS] if hypothesis.finished else [])]
        score = penalty.score(float(trace.cum[leaf]), max(len(tokens), 1))
        assert score == pytest_approx(hypothesis.score)
        assert [float(trace.logprob[node]) for node in trace.path(leaf)] == hypothesis.log_probs
    if trace.width == 1:
        for step in range(int(trace.step.max(initial=-1)) + 1):
            assert (kept & (trace.step == step)).sum() <= 1, "a path"


def pytest_approx(value: float) -> object:
    """Return the value with the tolerance of a trace's scores."""
    import pytest

    return pytest.approx(value, abs=1e-5)
