"""A made-up explanation with known numbers, for tests of what is drawn from one."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len

from dragoman.explain.attention_plots import select_views
from dragoman.explain.explanation import (
    AttentionSite,
    Attribution,
    Explanation,
    Step,
    Token,
    TokenizedText,
)
from dragoman.explain.terminal_report import render_report

SRC = ["▁Das", "▁Haus", "tür", "</s>"]
TGT = ["▁The", "▁front", "▁door", "</s>"]


def text_of(tokens: Sequence[str], words: Sequence[tuple[int, int]] | None = None) -> TokenizedText:
    """Return tokens as a text, with spans; by default every token but specials is a word."""
    text, found = "", list[Token]()
    for number, token in enumerate(tokens):
        special = token.startswith("<") and token.endswith(">") and len(token) > 2
        shown = "" if special else token.replace("▁", " ")
        shown = shown if text else shown.lstrip()
        found.append(
            Token(
                number,
                token.replace("▁", " "),
                (len(text), len(text) + len(shown)),
                special,
            )
        )
        text += shown
    if words is None:
        words = [(at, at + 1) for at, token in enumerate(found) if not token.special]
    return TokenizedText(text, tokens=found, words=list(words))


def softmax_rows(rows: int, columns: int, *, heads: int = 2, seed: int = 0) -> np.ndarray:
    """Return weights (H, rows, columns) whose rows sum to 1."""
    values = np.random.default_rng(seed).random((heads, rows, columns)).astype(np.float32)
    return values / values.sum(axis=-1, keepdims=True)


def make_explanation(**changes: Any) -> Explanation:
    """Return a translation of two layers with two heads, an attribution and runners-up."""
    source, target = text_of(SRC, [(0, 1), (1, 3)]), text_of(TGT)
    size, length = len(SRC), len(TGT)
    sites = [
        AttentionSite("e0", "encoder.0.self", "self", "encoder", 0, 2, "source", "source"),
        AttentionSite(
            "d0", "decoder.0.self", "self", "decoder", 0, 2, "target", "target_in", causal=True
        ),
        AttentionSite("x0", "decoder.0.cross", "cross", "cross", 0, 2, "target", "source"),
        AttentionSite("x1", "decoder.1.cross", "cross", "cross", 1, 2, "target", "source"),
    ]
    causal = np.tril(np.ones((2, length, length), np.float32))
    arrays = {
        "e0.w": softmax_rows(size, size),
        "d0.w": causal / causal.sum(axis=-1, keepdims=True),
        "x0.w": softmax_rows(length, size, seed=1),
        "x1.w": softmax_rows(length, size, seed=2),
        "ixg.s": np.array(
            [[0.9, 0.05, 0.05, 0], [0.1, 0.5, 0.2, 0], [0, 0.1, -0.4, 0], [0, 0, 0, 1]],
            np.float32,
        ),
    }
    probabilities = [0.9, 0.4, 0.8, 0.95]
    steps = [
        Step(
            at,
            math.log(value),
            2 if at == 1 else 1,
            0.3,
            forced=at == 0,
            top=[(at, TGT[at].replace("▁", " "), math.log(value)), (77, " other", math.log(0.05))],
        )
        for at, value in enumerate(probabilities)
    ]
    fields: dict[str, Any] = {
        "model": {"task": "translate", "name": "made up"},
        "request": {"text": source.text},
        "source": source,
        "target": target,
        "steps": steps,
        "score": {"sum": -1.3, "normalised": -0.4, "penalty": "gnmt 0.6"},
        "sites": sites,
        "arrays": arrays,
        "attribution": [Attribution("input_x_gradient", "ixg.s")],
    }
    return Explanation(**(fields | changes))


def check_report(explanation: Explanation) -> None:
    """Assert that the report fits the terminal width and lists what the model lacks."""
    kinds = dict.fromkeys(site.group for site in explanation.sites)
    for width, kind in [(80, None), (40, None), *((80, kind) for kind in kinds)]:
        text = render_report(explanation, kind=kind, width=width).plain
        assert max(cell_len(line) for line in text.splitlines()) <= width
    words = " ".join(render_report(explanation).plain.split())
    for sentence in explanation.missing.values():
        assert " ".join(sentence.split()) in words
    controls = {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs")}
    assert controls <= set("\n\u200c\u200d\u200e")
    for kind in kinds:
        for layer in sorted({site.layer for site in explanation.sites if site.group == kind}):
            for view in select_views(explanation, kind=kind, layer=layer, head=0):
                assert view.weights.shape == (len(view.rows), len(view.columns))
                if view.row_sum == "each row sums to 1":
                    np.testing.assert_allclose(view.weights.sum(axis=-1), 1.0, atol=1e-4)
                assert (view.row_axis == "source tokens") <= (kind != "encoder")
    assert bool(kinds) == bool(select_views(explanation))
