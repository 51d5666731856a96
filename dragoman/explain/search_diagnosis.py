"""Add to an explanation how its output was found, and compare it with a reference.

A *search error*: the model prefers the reference, and the search did not find it. A *model error*:
the model itself prefers what was found (Stahlberg and Byrne, 2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dragoman.decoding.beam_trace import BeamTrace
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.explain.explanation import Explanation, NBestEntry
from dragoman.explain.token_spans import token_texts
from dragoman.text.special_tokens import EOS
from dragoman.text.tokenizer import Tokenizer

NO_BEAM = "Sampling draws one token after another: there is no beam to show."
# Scores from the incremental decoder and from teacher forcing differ by rounding.
SCORE_TOLERANCE = 1e-4

Verdict = Literal["same", "equal", "search_error", "model_error"]


class TracedSearch(NamedTuple):
    """The n best of one source, with the trace of the search."""

    hypotheses: Sequence[Hypothesis]  # best first
    texts: Sequence[str]
    trace: BeamTrace | None  # None if the strategy has no beam
    masked: Sequence[int]  # tokens that were forbidden at each position of the best
    max_length: int  # of an output, EOS not counted
    prefix: Sequence[int] = ()  # the forced tokens

    @property
    def best(self) -> Hypothesis:
        """The best hypothesis."""
        return self.hypotheses[0]


class Diagnosis(NamedTuple):
    """Whether the search or the model is why a reference was not the output."""

    verdict: Verdict
    sentence: str


def diagnose(
    *,
    reference: float,
    found: float,
    same_tokens: bool = False,
    finished: bool = True,
    name: str = "the reference",
) -> Diagnosis:
    """Compare the normalised score of a reference with that of what the search found.

    An output that is not `finished` ranks behind every finished one, whatever its score.
    """
    if same_tokens:
        return Diagnosis("same", f"The search found {name}, with a score of {found:.2f}.")
    scores = f"{reference:.2f} against {found:.2f}"
    if not finished:
        return Diagnosis(
            "search_error",
            f"Search error: the output was cut at its maximum length, and {name}, which ends, "
            f"would rank before it; their scores are {scores}.",
        )
    if abs(reference - found) <= SCORE_TOLERANCE:
        return Diagnosis("equal", f"The model scores {name} as it scores its own output, {scores}.")
    if reference > found:
        return Diagnosis(
            "search_error",
            f"Search error: the model scores {name} higher than its own output, {scores}, "
            "but the search did not find it; try a wider beam.",
        )
    return Diagnosis(
        "model_error",
        f"Model error: the model scores {name} lower than its own output, {scores}, "
        "so no search would prefer it.",
    )


def add_search(
    explanation: Explanation,
    searched: TracedSearch,
    tokenizer: Tokenizer,
    *,
    has_reference: bool = False,
) -> Explanation:
    """Return the explanation with its n-best list and beam trace.

    If its target is a reference, `score` also has the score of what was found (`own`) and how the
    two compare (`reference`).
    """
    own, score = searched.best, dict(explanation.score)
    if has_reference:
        found = diagnose(
            reference=score["normalised"],
            found=own.score,
            same_tokens=[token.id for token in explanation.target.tokens] == _written(own),
            finished=own.finished,
        )
        score["own"] = {"sum": own.total, "normalised": own.score}
        score["reference"] = {
            "sum": score["sum"],
            "normalised": score["normalised"],
            "verdict": found.verdict,
            "sentence": found.sentence,
        }
    trace = searched.trace
    ids = {token for each in searched.hypotheses for token in _written(each)}
    if trace is not None:
        ids |= {int(token) for token in trace.token[1:]}
    named = sorted(ids)
    return dataclasses.replace(
        explanation,
        score=score,
        nbest=list_nbest(searched),
        beam=trace,
        missing=dict(explanation.missing) | ({"beam": NO_BEAM} if trace is None else {}),
        pieces=dict(zip(named, token_texts(tokenizer, named), strict=True)),
    )


def _written(hypothesis: Hypothesis) -> list[int]:
    """Return the tokens of a hypothesis, EOS included if it is finished."""
    return [*hypothesis.tokens, EOS] if hypothesis.finished else list(hypothesis.tokens)


def list_nbest(searched: TracedSearch) -> list[NBestEntry]:
    """Return the n-best list with the last node of each in the trace."""
    trace = searched.trace
    leaves: Sequence[int | None] = (
        [None] * len(searched.hypotheses) if trace is None else trace.leaves
    )
    return [
        NBestEntry(list(each.tokens), text, each.total, each.score, leaf)
        for each, text, leaf in zip(searched.hypotheses, searched.texts, leaves, strict=True)
    ]
