"""The beam as an indented list: reasons in words, at 80 columns, in any script."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rich.cells import cell_len

from dragoman.decoding.beam_trace import REASONS, BeamTrace
from dragoman.errors import DataError
from dragoman.explain.beam_trace_report import BeamReasons, render_beam
from dragoman.explain.explanation import Explanation, TokenizedText
from dragoman.text.special_tokens import EOS, UNK

TOKEN_TEXTS = {
    EOS: "</s>",
    UNK: "<unk>",
    4: " Das",
    5: " Haus",
    6: "家",
    7: "\u0301",
    8: "ab\u202ecd",
}


def build(
    nodes: list[tuple[int, int, float, str, float]],
    *,
    leaves: tuple[int, ...],
    width: int = 2,
    dropped: int = 0,
    prefix: tuple[int, ...] = (),
    missing: str = "",
) -> Explanation:
    """Build an explanation from nodes (parent, token, cum, reason, cut); all but the root."""
    parents = [-1, *(node[0] for node in nodes)]
    steps = [-1]
    for parent in parents[1:]:
        steps.append(steps[parent] + 1)
    cum = np.array([0.0, *(node[2] for node in nodes)])
    trace = BeamTrace(
        width=width,
        parent=np.array(parents, np.int32),
        token=np.array([-1, *(node[1] for node in nodes)], np.int32),
        logprob=np.array([0.0, *(cum[at + 1] - cum[node[0]] for at, node in enumerate(nodes))]),
        cum=cum,
        step=np.array(steps, np.int32),
        reason=np.array([0, *(REASONS.index(node[3]) for node in nodes)], np.uint8),
        cut=np.array([math.nan, *(node[4] for node in nodes)]),
        leaves=leaves,
        dropped=dropped,
    )
    return Explanation(
        model={"task": "translate"},
        request={"prefix": list(prefix)},
        source=TokenizedText("x"),
        target=TokenizedText("y"),
        score={"penalty": "none"},
        beam=None if missing else trace,
        missing={"beam": missing} if missing else {},
        token_texts=TOKEN_TEXTS,
    )


NODES = [
    (0, 4, -0.5, "kept", math.nan),  # 1
    (0, 6, -1.0, "kept", math.nan),  # 2
    (0, 5, -1.31, "beam_full", -1.0),  # 3
    (0, UNK, -0.2, "constraint", math.nan),  # 4
    (1, EOS, -0.7, "finished", math.nan),  # 5
    (2, EOS, -1.2, "worse_finished", -0.7),  # 6
    (1, 5, -1.2, "beam_full", -1.2),  # 7
    (1, 8, -1.203, "beam_full", -1.2),  # 8
]


def test_every_candidate_is_listed_below_its_alternative() -> None:
    shown = render_beam(build(NODES, leaves=(5,))).plain.splitlines()
    assert shown == [
        "beam of 2, 2 steps, 8 candidates recorded; score: summed log-probability, where",
        "finished under the length penalty (none); * leads to the best output",
        "    token               prob    score",
        "  1*␣Das               0.607    -0.50",
        "  1   家               0.368    -1.00",
        "  2   </s>             0.819    -1.20  finished: -1.20, 0.50 below the best",
        "  1   ␣Haus            0.270    -1.31  pruned: 0.31 below the 2nd best",
        "  1   <unk>            0.819    -0.20  forbidden: never written",
        "  2*</s>               0.819    -0.70  finished: -0.70, the best",
        "  2   ␣Haus            0.497    -1.20  pruned: level with the 2nd best",
        "  2   ab<202E>cd       0.495    -1.20  pruned: just below the 2nd best",
    ]
    assert all(cell_len(line) <= 80 for line in shown)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_lines_fit_any_width(width: int) -> None:
    deep = [(at, 6, -0.1 * (at + 1), "kept", math.nan) for at in range(12)]
    deep += [(at, 5, -0.1 * (at + 1) - 9, "beam_full", -0.1 * (at + 1)) for at in range(12)]
    deep.append((12, EOS, -3.0, "finished", math.nan))
    shown = render_beam(build(deep, leaves=(25,)), width=width).plain.splitlines()
    assert all(cell_len(line) <= width for line in shown)


def test_omitted_lines_are_counted() -> None:
    nodes = [(0, 4, -0.5, "kept", math.nan), (1, EOS, -0.6, "finished", math.nan)]
    nodes += [(0, 5, -2.0 - at, "beam_full", -0.5) for at in range(6)]
    shown = render_beam(build(nodes, leaves=(2,), width=1, dropped=1234)).plain
    assert "… 3 more dropped" in shown
    assert "(1,234 of the worst left out)" in shown
    assert "beam of 1, 2 steps" in shown
    assert "more dropped" not in render_beam(build(nodes, leaves=(2,)), alternatives=6).plain


def test_an_explanation_without_a_beam_reports_why() -> None:
    with pytest.raises(DataError, match=r"found none \(Sampling has no beam\); "):
        render_beam(build(NODES, leaves=(5,), missing="Sampling has no beam."))


@pytest.mark.parametrize(
    ("reason", "token", "cut", "words"),
    [
        ("length_cap", 5, math.nan, "cut: the length limit is reached"),
        ("no_repeat", 5, math.nan, "forbidden: it repeats an n-gram"),
        ("duplicate", 5, math.nan, "dropped: the text of another one"),
        ("early_stop", 5, -0.85, "stopped: at best 0.15 below the best"),
        ("constraint", EOS, math.nan, "forbidden: it may not end here"),
        ("constraint", 5, math.nan, "forbidden: by a constraint"),
        ("kept", 5, math.nan, ""),
    ],
)
def test_a_reason_in_words(reason: str, token: int, cut: float, words: str) -> None:
    explanation = build(
        [(0, EOS, -0.7, "finished", math.nan), (0, token, -0.9, reason, cut)], leaves=(1,)
    )
    assert BeamReasons(explanation).describe(2) == words


def test_tokens_outside_a_forced_prefix_are_forbidden_by_it() -> None:
    explanation = build(
        [(0, 4, -0.7, "kept", math.nan), (0, 5, -0.2, "constraint", math.nan)],
        leaves=(1,),
        prefix=(4,),
    )
    reasons = BeamReasons(explanation)
    assert reasons.describe(2) == "forbidden: not in the prefix"
    assert reasons.describe(1) == "cut at the length limit: the best"
    longer = build(
        [(0, 4, -0.7, "kept", math.nan), (1, EOS, -0.8, "finished", math.nan)],
        leaves=(2,),
        prefix=(4,),
    )
    assert BeamReasons(longer).describe(1) == "forced by the prefix"
