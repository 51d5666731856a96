"""The beam search of an explanation as an indented list, with the reason of every candidate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from dragoman.decoding.beam_trace import (
    BEAM_FULL,
    CONSTRAINT,
    DUPLICATE,
    EARLY_STOP,
    FINISHED,
    KEPT,
    LENGTH_CAP,
    NO_REPEAT,
    WORSE_FINISHED,
    BeamTrace,
)
from dragoman.decoding.length_penalty import parse_length_penalty
from dragoman.errors import DataError
from dragoman.explain.explanation import Explanation
from dragoman.explain.terminal_text_width import (
    SPACE_SIGN,
    fit_cells,
    label_token,
    shorten_cells,
    wrap_cells,
)
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

ALTERNATIVES = 3  # dropped candidates shown beside each token
_MAX_INDENT = 5  # levels; what is nested deeper is indented no further
_STEP_CELLS, _PROBABILITY_CELLS, _SCORE_CELLS = 3, 5, 8
_TOKEN_CELLS = 18
_PRUNED_REASONS = (BEAM_FULL, CONSTRAINT, NO_REPEAT, DUPLICATE)  # of nodes not in the beam


class _Line(NamedTuple):
    """One line of the list."""

    node: int  # -1 for a line about several
    depth: int
    note: str = ""


def render_beam(
    explanation: Explanation, *, width: int = 80, alternatives: int = ALTERNATIVES
) -> Text:
    """Return the beam search as an indented list of lines of at most `width` columns.

    A hypothesis stands below each other at one level; what could have come instead of a token is
    indented below it. Raise DataError for an explanation without a beam.
    """
    trace = explanation.beam
    if trace is None:
        raise DataError(
            "a beam can be shown of an explanation that has one",
            found=f"none ({explanation.missing.get('beam', 'no search').rstrip('.')})",
            fix="explain a translation with beam search",
        )
    reasons = BeamReasons(explanation)
    shown = Text(no_wrap=True)
    for line in wrap_cells(_title(trace, explanation), width):
        shown.append(f"{line}\n", "dim")
    heading = " ".join(
        [
            fit_cells("", _STEP_CELLS),
            fit_cells("token", _TOKEN_CELLS),
            fit_cells("prob", _PROBABILITY_CELLS, right=True),
            fit_cells("score", _SCORE_CELLS, right=True),
        ]
    )
    shown.append(f"{heading}\n", "dim")
    winner = trace.chosen()
    for node, depth, note in _iter_lines(trace, alternatives):
        indent = "  " * min(depth, _MAX_INDENT)
        if node < 0:
            line = " " * (_STEP_CELLS + 1) + indent + note
            shown.append(f"{shorten_cells(line, width)}\n", "dim")
            continue
        token = _label_token(explanation.token_texts.get(int(trace.token[node]), ""))
        probability = math.exp(float(trace.logprob[node]))
        mark = "*" if node in winner else " "
        numbers = fit_cells(str(trace.step[node] + 1), _STEP_CELLS, right=True) + mark
        numbers += " ".join(
            [
                fit_cells(f"{indent}{token}", _TOKEN_CELLS),
                fit_cells(f"{probability:.3f}", _PROBABILITY_CELLS, right=True),
                fit_cells(f"{trace.cum[node]:.2f}", _SCORE_CELLS, right=True),
            ]
        )
        line = f"{numbers}  {reasons.describe(node)}".rstrip()
        style = "bold" if node in winner else "" if trace.reason[node] == KEPT else "dim"
        shown.append(f"{shorten_cells(line, width)}\n", style)
    return shown


def _label_token(text: str) -> str:
    """Return a token with its leading space: " a" and "a" are two candidates."""
    label = label_token(text)
    return label if not text.startswith(" ") or label.startswith(SPACE_SIGN) else SPACE_SIGN + label


def _title(trace: BeamTrace, explanation: Explanation) -> str:
    """Return the size of the search in one sentence."""
    steps = int(trace.step.max(initial=-1)) + 1
    title = (
        f"beam of {trace.width}, {steps} step{'s' * (steps != 1)}, "
        f"{len(trace) - 1:,} candidates recorded"
    )
    if trace.dropped:
        title += f" ({trace.dropped:,} of the worst left out)"
    penalty = explanation.score.get("penalty")
    return (
        f"{title}; score: summed log-probability, where finished under the length penalty "
        f"({penalty or 'none'}); * leads to the best output"
    )


def _iter_lines(trace: BeamTrace, alternatives: int) -> Iterator[_Line]:
    """Yield the lines: a token, its alternatives indented, then the token that follows it."""
    children = trace.children()
    heights = _find_heights(trace)
    rank = {leaf: number for number, leaf in enumerate(trace.leaves)}
    best = [len(trace.leaves)] * len(trace)  # the best rank of the n best below each node
    for leaf, number in rank.items():
        for node in [0, *trace.path(leaf)]:
            best[node] = min(best[node], number)

    def main_child(nodes: Sequence[int]) -> int:
        """Return the child that continues the line: towards the n best, else the longest."""
        return min(nodes, key=lambda node: (best[node], -heights[node], node))

    # A stack of (node whose children come next, depth), or of a line to yield.
    stack: list[_Line | tuple[int, int]] = [(0, 0)]
    while stack:
        item = stack.pop()
        if isinstance(item, _Line):
            yield item
            continue
        node, depth = item
        if not children[node]:
            continue
        main = main_child(children[node])
        others = [each for each in children[node] if each != main]
        branches = [each for each in others if children[each] or trace.reason[each] == KEPT]
        leaves = [each for each in others if each not in branches]
        # Finished outputs are always shown.
        ended = [each for each in leaves if trace.reason[each] in (FINISHED, WORSE_FINISHED)]
        dropped = [each for each in leaves if each not in ended]
        shown = sorted([*branches, *ended, *dropped[:alternatives]])
        hidden = len(dropped) - min(alternatives, len(dropped))
        yield _Line(main, depth)
        stack.append((main, depth))
        if hidden:
            stack.append(_Line(-1, depth + 1, f"… {hidden} more dropped"))
        for each in reversed(shown):
            stack.append((each, depth + 1))
            stack.append(_Line(each, depth + 1))


def _find_heights(trace: BeamTrace) -> list[int]:
    """Return the number of steps below each node."""
    heights = [0] * len(trace)
    for node in range(len(trace) - 1, 0, -1):
        parent = int(trace.parent[node])
        heights[parent] = max(heights[parent], heights[node] + 1)
    return heights


class BeamReasons:
    """The reasons of an explanation's beam search in words."""

    def __init__(self, explanation: Explanation) -> None:
        assert explanation.beam is not None, "an explanation without a beam has no reasons"
        self._trace = trace = explanation.beam
        self._penalty = parse_length_penalty(str(explanation.score.get("penalty") or ""))
        self._ranks = {leaf: rank for rank, leaf in enumerate(trace.leaves, start=1)}
        self._prefix = len(explanation.request.get("prefix") or ())
        # How many candidates were in the beam at each step.
        is_in_beam = ~np.isin(trace.reason, _PRUNED_REASONS)
        self._beam_sizes = np.bincount(trace.step[1:], weights=is_in_beam[1:]).astype(int)
        finished = [leaf for leaf in trace.leaves if trace.reason[leaf] == FINISHED]
        self._last = len(finished)
        self._to_beat = min((self.normalised(leaf) for leaf in finished), default=math.nan)

    def normalised(self, node: int) -> float:
        """Return the score of a node under the length penalty."""
        trace = self._trace
        return self._penalty.score(float(trace.cum[node]), int(trace.step[node]) + 1)

    def describe(self, node: int) -> str:
        """Return the reason of a node in a few words; empty for one that continues."""
        trace, reason = self._trace, int(self._trace.reason[node])
        token, step = int(trace.token[node]), int(trace.step[node])
        cut = float(trace.cut[node])
        if reason == BEAM_FULL:
            below = _describe_distance(cut - float(trace.cum[node]))
            return f"pruned: {below} the {_name_rank(int(self._beam_sizes[step]))}"
        if reason == FINISHED:
            return f"finished: {self.normalised(node):.2f}, the {_name_rank(self._ranks[node])}"
        if reason == WORSE_FINISHED:
            score = self.normalised(node)
            below = _describe_distance(cut - score)
            return f"finished: {score:.2f}, {below} the {_name_rank(self._last)}"
        if reason == EARLY_STOP:
            below = _describe_distance(self._to_beat - cut)
            return f"stopped: at best {below} the {_name_rank(self._last)}"
        if reason == CONSTRAINT:
            return f"forbidden: {self._describe_constraint(token, step)}"
        if node in self._ranks:
            return f"cut at the length limit: the {_name_rank(self._ranks[node])}"
        return {
            KEPT: "forced by the prefix" if step < self._prefix else "",
            LENGTH_CAP: "cut: the length limit is reached",
            NO_REPEAT: "forbidden: it repeats an n-gram",
            DUPLICATE: "dropped: the text of another one",
        }[reason]

    def _describe_constraint(self, token: int, step: int) -> str:
        """Return why a token was forbidden."""
        if step < self._prefix:
            return "not in the prefix"
        if token in (PAD, BOS, UNK):
            return "never written"
        if token == EOS:
            return "it may not end here"
        return "by a constraint"


def _describe_distance(distance: float) -> str:
    """Return how far a score is below another: "0.31 below"."""
    if distance <= 0.0:
        return "level with"
    return f"{distance:.2f} below" if distance >= 0.005 else "just below"


def _name_rank(rank: int) -> str:
    """Return a rank in words: "best", "2nd best"."""
    if rank <= 1:
        return "best"
    ending = (
        "th" if rank % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    )
    return f"{rank}{ending} best"
