"""Attention maps in the terminal: labels of any script, shades, their scale."""

from __future__ import annotations

import numpy as np
import pytest
from rich.cells import cell_len

from dragoman.explain.attention_plots import AttentionView, select_views
from dragoman.explain.terminal_attention_map import render_attention, render_view, shade_scale
from tests.explanation_kit import make_explanation

FAMILY, HEART, FLAG = "👨\u200d👩\u200d👧", "❤\ufe0f", "🇩🇪"


def weights(rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(0).random((rows, columns)).astype(np.float32)
    return values / values.sum(axis=1, keepdims=True)


def lines(rows: int, columns: list[str], width: int = 80) -> list[str]:
    return render_attention(
        weights(rows, len(columns)), src_tokens=columns, tgt_tokens=["t"] * rows, width=width
    ).plain.splitlines()


def test_the_terminal_picture_has_a_row_a_token_and_fits_the_window() -> None:
    drawn = lines(5, ["a"] * 60, width=50)
    assert max(len(line) for line in drawn) <= 50
    assert sum(line.startswith("t │") for line in drawn) == 5 * 3  # sixty columns in three bands


def test_terminal_map_darkens_with_the_attention_weights() -> None:
    text = render_attention(
        np.eye(3, dtype=np.float32), src_tokens=["a", "▁b", "年"], tgt_tokens=["x", "yy", "</s>"]
    ).plain
    rows = text.splitlines()[-3:]
    assert [row.split("│")[1].rstrip() for row in rows] == ["██", "  ██", "    ██"]
    assert [row.split("│")[0].strip() for row in rows] == ["x", "yy", "</s>"]
    assert "年" in text.splitlines()[0]
    assert render_attention(
        np.zeros((1, 1), dtype=np.float32), src_tokens=["a"], tgt_tokens=["b"]
    ).plain.strip()


@pytest.mark.parametrize(
    "columns",
    [
        ["年", "月", "日", "</s>"],
        [FAMILY, HEART, FLAG, "नि", "e\u0301", "ก็", "</s>"],
        ["السلام", "عليكم", "</s>"] * 20,
        ["x" * 50, "\U0001f642" * 30],
    ],
)
def test_rows_of_wide_characters_line_up(columns: list[str]) -> None:
    drawn = render_attention(
        np.ones((2, len(columns)), np.float32),
        src_tokens=columns,
        tgt_tokens=["年年" * 20, FAMILY],
        width=60,
    ).plain.splitlines()
    assert max(cell_len(line) for line in drawn) <= 60
    starts = {cell_len(line.split("│")[0]) for line in drawn if "│" in line}
    assert starts == {17}  # sixteen columns of a label and a space


def test_letters_that_join_are_numbered_and_explained() -> None:
    drawn = lines(2, ["السلام", "عليكم", "</s>"])
    assert drawn[0].split() == ["1", "2", "3"]
    assert drawn[-1].replace("\u200e", "").split() == ["1", "السلام", "2", "عليكم", "3", "</s>"]


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = render_attention(weights(1, 2), src_tokens=["\x1b[2J", "\n"], tgt_tokens=["\r"]).plain
    assert "\x1b" not in text
    assert "\r" not in text


def test_the_axes_are_named_and_the_scale_is_given() -> None:
    [view] = select_views(make_explanation(), kind="encoder")
    text = render_view(view).plain
    assert text.startswith("rows: encoder input; columns: encoder input\n")
    scale = np.median(view.weights.max(axis=1))
    assert f"up to {scale:.2f} and more; each row sums to 1" in text


def test_a_first_row_of_one_key_does_not_fade_the_others() -> None:
    causal = np.tril(np.ones((8, 8), np.float32))
    text = render_attention(
        causal / causal.sum(axis=1, keepdims=True), src_tokens=["a"] * 8, tgt_tokens=["b"] * 8
    ).plain
    assert shade_scale(causal / causal.sum(axis=1, keepdims=True)) == pytest.approx(0.225)
    assert all(
        "░" in row or "▒" in row or "▓" in row or "█" in row for row in text.split("\n")[1:-1]
    )


def test_a_long_map_is_cut_with_a_note() -> None:
    size = 300
    view = AttentionView(
        weights(size, size), ["r"] * size, ["c"] * size, "target", "source", "", ""
    )
    text = render_view(view, width=80).plain
    assert "the first 64 of 300 rows and 64 of 300 columns; --html and --json have all" in text
    assert text.count("r │") == 128  # in two bands
