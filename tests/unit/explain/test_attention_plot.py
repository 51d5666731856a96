"""Attention maps as figures: any script, three formats, axes that name what is on them."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import numpy as np
import pytest

from dragoman.errors import DataError
from dragoman.explain import figures
from dragoman.explain.attention_plot import save_attention_map, save_attention_views, select_views
from dragoman.explain.terminal_report import render_attention
from tests.explanation_kit import make_explanation

SRC, TGT = ["▁Ein", "▁Mann", "</s>"], ["▁A", "▁man", ".", "</s>"]


def weights(rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(0).random((rows, columns)).astype(np.float32)
    return values / values.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("src", "tgt"),
    [
        (SRC, TGT),
        (["1", "9", "年", "月", "日", "</s>"], ["▁", "1", "$x$", "{", "\\", "_"]),
        (["مرحبا", "नमस्ते", "<0xE4>", "\n", "\u200b", "🙂"], ["a"]),
        (["x" * 200] * 130, ["y"] * 3),
    ],
)
def test_pictures_of_any_script_draw_without_a_warning(
    tmp_path: Path, src: list[str], tgt: list[str]
) -> None:
    """Warnings are errors here: a missing glyph would fail (bertviz#82 for the size)."""
    path = tmp_path / "map.png"
    save_attention_map(
        path, weights(len(tgt), len(src)), src_tokens=src, tgt_tokens=tgt, title="年 $a$ → b"
    )
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">2I", head[16:24])
    assert width > 100
    assert height > 100


def test_svg_keeps_its_text_and_names_the_axes(tmp_path: Path) -> None:
    """The maps of self-attention are not labelled as source and target."""
    explanation = make_explanation()
    for kind, axes in {
        "cross": ["source tokens", "target tokens", "cross-attention, mean of 2 layers"],
        "encoder": ["encoder input", "encoder self-attention, layer 0"],
        "decoder": ["target tokens before them", "decoder self-attention"],
    }.items():
        path = tmp_path / f"{kind}.svg"
        save_attention_views(path, select_views(explanation, kind=kind), title=["Das", "→ The"])
        text = path.read_text(encoding="utf-8")
        assert all(name in text for name in axes), kind
        assert ("source tokens" in text) == (kind == "cross")
        assert "→ The" in text


def test_equal_figures_are_equal_files(tmp_path: Path) -> None:
    views = select_views(make_explanation(), kind="cross")
    for kind, start in {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}.items():
        one, two = tmp_path / f"one.{kind}", tmp_path / f"two.{kind}"
        save_attention_views(one, views)
        save_attention_views(two, views)
        assert one.read_bytes() == two.read_bytes()
        assert one.read_bytes().startswith(start)


def test_undrawable_characters_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_is_drawable", str.isascii)
    with caplog.at_level(logging.WARNING):
        save_attention_map(
            tmp_path / "map.svg",
            weights(1, 2),
            src_tokens=["年", "年月"],
            tgt_tokens=["a"],
        )
    [record] = caplog.records
    assert "no installed font has 年 U+5E74, 月 U+6708: written" in record.getMessage()
    text = (tmp_path / "map.svg").read_text(encoding="utf-8")
    assert "&lt;5E74&gt;&lt;6708&gt;" in text


@pytest.mark.parametrize(
    "draw", [save_attention_map, lambda path, values, **labels: render_attention(values, **labels)]
)
def test_labels_that_do_not_fit_are_refused(tmp_path: Path, draw) -> None:
    with pytest.raises(DataError, match=r"found shape \(3, 3\) for 4 target and 3 source tokens"):
        draw(tmp_path / "map.png", weights(3, 3), src_tokens=SRC, tgt_tokens=TGT)
