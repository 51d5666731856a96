"""The JSON fits its size budget; `limits` lists what was cut, and nothing else changes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from dragoman.decoding.beam_trace import REASONS, BeamTrace
from dragoman.errors import DataError
from dragoman.explain import Explanation
from dragoman.explain.explanation import (
    AttentionSite,
    Attribution,
    HeadSummary,
    NBestEntry,
    Step,
    Token,
    TokenizedText,
)
from dragoman.explain.explanation_consistency_checks import check_wire_form
from dragoman.explain.explanation_json import decode_tensor
from dragoman.explain.explanation_json_size_limit import trimmed_nodes

RANDOM = np.random.default_rng(5)


def text_of(length: int) -> TokenizedText:
    tokens = [Token(at + 4, " ab", (3 * at, 3 * at + 3)) for at in range(length)]
    return TokenizedText(
        " ab" * length, tokens=tokens, words=[(at, at + 3) for at in range(0, length - 2, 3)]
    )


def rows(heads: int, queries: int, keys: int) -> np.ndarray:
    values = RANDOM.random((heads, queries, keys)) ** 6
    return (values / values.sum(-1, keepdims=True)).astype(np.float32)


def beam_of(nodes: int) -> BeamTrace:
    """Return a path of kept nodes, each with dropped children."""
    parent, reason, kept = [-1], [0], 0
    while len(parent) < nodes:
        siblings = min(9, nodes - len(parent))
        parent += [kept] * siblings
        reason += [0, *[REASONS.index("beam_full")] * (siblings - 1)]
        kept = len(parent) - siblings
    size = len(parent)
    return BeamTrace(
        width=1,
        parent=np.asarray(parent, dtype=np.int32),
        token=np.arange(size, dtype=np.int32),
        logprob=-RANDOM.random(size),
        cum=-10 * RANDOM.random(size),
        step=np.arange(size, dtype=np.int32),
        reason=np.asarray(reason, dtype=np.uint8),
        cut=np.full(size, np.nan),
        leaves=(kept,),
    )


def explanation(length: int, *, layers: int = 2, heads: int = 4, **parts: Any) -> Explanation:
    sites, arrays = [], {}
    for layer in range(layers):
        for letter, group, query, key in (
            ("e", "encoder", "source", "source"),
            ("d", "decoder", "target", "target_in"),
            ("x", "cross", "target", "source"),
        ):
            site = AttentionSite(
                f"{letter}{layer}", f"{group}.{layer}", "self", group, layer, heads, query, key
            )
            sites.append(site)
            arrays[site.tensor] = rows(heads, length, length)
            arrays[site.contribution] = arrays[site.tensor] * 3
    arrays |= parts.pop("arrays", {})
    text = text_of(length)
    return Explanation(
        model={"task": "translate"},
        request={},
        source=text,
        target=text,
        steps=[
            Step(at, -0.5, 1, 0.5, top=[(each, " ab", -0.5) for each in range(8)])
            for at in range(length)
        ],
        score={"sum": -1.0},
        sites=sites,
        heads=[
            HeadSummary(site.id, head, effect_estimate=-float(head == 1 and site.id == "x1"))
            for site in sites
            for head in range(heads)
        ],
        arrays=arrays,
        **parts,
    )


@pytest.mark.parametrize("budget", [None, 10_000_000])
def test_an_explanation_within_the_budget_is_not_cut(budget: int | None) -> None:
    whole = explanation(20)
    values = whole.to_dict(budget)
    limits = values["limits"]
    assert (limits["pooled"], limits["dropped"], limits["factor"]) == ([], [], 1)
    assert set(values["tensors"]) == set(whole.arrays)
    assert limits["bytes"] == len(whole.to_json(budget).encode())
    assert limits["budget"] == budget


def test_contributions_go_first() -> None:
    whole = explanation(60)
    size = whole.to_dict(None)["limits"]["bytes"]
    values = whole.to_dict(size - 10)
    assert values["limits"]["dropped"] == [site.contribution for site in whole.sites]
    assert values["limits"]["pooled"] == []
    assert {site["contribution"] for site in values["sites"]} == {None}
    assert check_wire_form(whole, size - 10) == []


def test_matrices_are_pooled_by_one_factor_and_the_strongest_heads_stay() -> None:
    whole = explanation(100)
    values = whole.to_dict(190_000)
    limits = values["limits"]
    assert limits["bytes"] <= 190_000
    assert limits["factor"] == 2  # the smallest that fits
    assert limits["pooled"] == [site.tensor for site in whole.sites]
    assert {tuple(values["tensors"][name]["shape"]) for name in limits["pooled"]} == {(4, 50, 50)}
    assert limits["exact"][0] == "x1.1"
    exact = decode_tensor(values["tensors"]["x1.1.w"])
    np.testing.assert_allclose(exact, whole.arrays["x1.w"][1], atol=0.004)
    for name, words, first in (
        ("x1.w", whole.source.words, 0),
        ("d1.w", whole.target.words, 1),  # the decoder reads <s> before the target
    ):
        edges = values["tensors"][name]["pool"]["k"]
        borders = {first + edge for word in words for edge in word}
        assert np.mean([edge in borders for edge in edges[1:-1]]) > 0.6  # every third is a border
    assert check_wire_form(whole, 190_000) == []


@pytest.mark.parametrize("budget", [2_000_000, 400_000, 200_000])
def test_long_inputs_fit(budget: int) -> None:
    """512 x 512 with 48 heads is 50 MB as bytes."""
    length = 256
    parts = {
        "attribution": [Attribution("occlusion", "occ.s", "occ.t")],
        "positions": {"kind": "sinusoidal", "tensor": "pos.sim"},
        "extras": {"p_choose": "x0.p_choose"},
        "lens": {
            "layers": ["d0"],
            "rank": "lens.rank",
            "top": [[[["ab", 0.5]] * 5] * length],
            "exact_last": True,
        },
        "beam": beam_of(3000),
        "arrays": {
            "occ.s": RANDOM.standard_normal((length, length)).astype(np.float32),
            "occ.t": RANDOM.standard_normal((length, length)).astype(np.float32),
            "pos.sim": RANDOM.standard_normal((length, length)).astype(np.float32),
            "x0.p_choose": RANDOM.random((1, length, length)).astype(np.float32),
            "lens.rank": np.ones((1, length), dtype=np.int64),
        },
    }
    whole = explanation(length, layers=4, **parts)
    assert check_wire_form(whole, budget) == []
    values = whole.to_dict(budget)
    again = Explanation.from_dict(json.loads(json.dumps(values)))
    assert again.digest == whole.digest == values["digest"]
    assert set(again.pools) == set(values["limits"]["pooled"])
    second = again.to_dict(budget)
    assert second["tensors"] == values["tensors"]
    for name in values["limits"]["dropped"]:
        assert name not in values["tensors"]


def test_a_budget_that_is_too_small_is_rejected() -> None:
    with pytest.raises(DataError, match=r"must be at least [\d,]+ bytes; found 2,000; raise it"):
        explanation(30).to_dict(2_000)


def test_trimming_keeps_the_tree_and_the_best() -> None:
    beam = beam_of(100)
    nodes = {name: getattr(beam, name) for name in ("parent", "reason", "cum")}
    kept = trimmed_nodes(nodes, 40, REASONS.index("beam_full"))
    assert len(kept) == 40
    assert set(beam.parent[kept][1:].tolist()) <= set(kept.tolist())
    assert set(np.flatnonzero(beam.reason == 0).tolist()) <= set(kept.tolist())
    gone = np.setdiff1d(np.arange(100), kept)
    leaves = [node for node in kept if beam.reason[node] == 1]
    assert beam.cum[gone].max() <= beam.cum[leaves].min()


def test_a_trimmed_beam_names_its_leaves_and_counts_the_rest() -> None:
    beam = beam_of(3000)
    leaf = beam.leaves[0]
    whole = explanation(
        30, layers=1, heads=1, beam=beam, nbest=[NBestEntry([1], "a", -1.0, -1.0, leaf)]
    )
    values = whole.to_dict(40_000)
    assert values["limits"]["bytes"] <= 40_000
    again = Explanation.from_dict(json.loads(json.dumps(values)))
    assert again.beam is not None
    assert again.beam.dropped == 3000 - len(again.beam.parent) > 0
    found = again.nbest[0].leaf
    assert found is not None
    assert again.beam.token[found] == beam.token[leaf]
    assert again.beam.tokens(found) == beam.tokens(leaf)
