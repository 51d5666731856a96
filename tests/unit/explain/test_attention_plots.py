"""Attention maps: which weights are shown, and figures of any script in three formats."""

from __future__ import annotations

import logging
import struct
from pathlib import Path

import numpy as np
import pytest

from dragoman.errors import ConfigError, DataError
from dragoman.explain import plot_style as figure_style
from dragoman.explain.attention_plots import (
    join_words,
    save_attention_map,
    save_attention_views,
    select_views,
    word_ranges,
    word_texts,
)
from dragoman.explain.explanation import AttentionSite
from dragoman.explain.terminal_attention_map import render_attention
from tests.explanation_kit import TGT, make_explanation, softmax_rows


def test_the_default_is_the_mean_of_cross_attention() -> None:
    explanation = make_explanation()
    [view] = select_views(explanation)
    both = np.concatenate([explanation.arrays["x0.w"], explanation.arrays["x1.w"]])
    np.testing.assert_allclose(view.weights, both.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(view.weights.sum(axis=1), 1.0, atol=1e-5)
    assert view.what == "cross-attention, mean of 2 layers and 2 heads"
    assert (view.row_axis, view.column_axis) == ("target tokens", "source tokens")


def test_one_layer_and_one_head() -> None:
    explanation = make_explanation()
    [view] = select_views(explanation, kind="cross", layer=1, head=0)
    np.testing.assert_array_equal(view.weights, explanation.arrays["x1.w"][0])
    assert view.what == "cross-attention, layer 1, head 0"
    [view] = select_views(explanation, kind="decoder")
    assert view.columns == ["<s>", *(token.replace("▁", " ") for token in TGT[:-1])]
    assert view.column_axis == "target tokens before them"
    assert view.what == "decoder self-attention, layer 0, mean of 2 heads"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 2}, r"--layer must be 0 or 1, those in the cross-attention; found 2"),
        ({"head": 5}, r"--head must be 0 or 1, those of the cross-attention.*; found 5"),
        ({"kind": "encoder", "layer": 1}, r"--layer must be 0, .* encoder.*; found 1"),
    ],
)
def test_an_index_out_of_range_names_the_range(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        select_views(make_explanation(), **options)


def test_a_kind_that_the_model_does_not_have() -> None:
    found = make_explanation()
    only = make_explanation(sites=[site for site in found.sites if site.group == "encoder"])
    assert [view.row_axis for view in select_views(only)] == ["encoder input"]
    with pytest.raises(ConfigError, match=r"found 'cross'; choose encoder"):
        select_views(only, kind="cross")
    bare = make_explanation(sites=[])
    assert select_views(bare) == []
    with pytest.raises(ConfigError, match=r"--kind .*; found a model without attention"):
        select_views(bare, kind="cross")


def test_many_layers_are_named_as_a_range() -> None:
    found = make_explanation()
    sites = [
        AttentionSite(f"x{at}", f"decoder.{at}.cross", "cross", "cross", at, 4, "target", "source")
        for at in range(6)
    ]
    arrays = {site.tensor: softmax_rows(4, 4, heads=4) for site in sites}
    many = make_explanation(sites=sites, arrays=found.arrays | arrays)
    with pytest.raises(ConfigError, match=r"--layer must be from 0 to 5, .*; found 7"):
        select_views(many, layer=7)
    with pytest.raises(ConfigError, match=r"--head must be from 0 to 3, .*; found 4"):
        select_views(many, head=4)


def test_sites_with_other_axes_are_not_averaged() -> None:
    sites = [
        AttentionSite(
            f"e{at}",
            f"words.{at}",
            "pool",
            "encoder",
            at,
            1,
            "sentence",
            "source",
            query_labels=[f"sentence {at}"],
            key_labels=["a", "b", "c"][: 2 + at],
        )
        for at in range(2)
    ]
    arrays = {site.tensor: softmax_rows(1, 2 + site.layer, heads=1) for site in sites}
    views = select_views(make_explanation(sites=sites, arrays=arrays))
    assert [view.columns for view in views] == [["a", "b"], ["a", "b", "c"]]
    assert [view.rows for view in views] == [["sentence 0"], ["sentence 1"]]
    assert views[0].what.startswith("attention pooling")


def test_rows_over_the_same_columns_are_one_map() -> None:
    sites = [
        AttentionSite(
            f"w{at}",
            "words",
            "pool",
            "encoder",
            0,
            1,
            "sentence",
            "source",
            query_labels=[f"sentence {at}"],
        )
        for at in range(3)
    ]
    arrays = {site.tensor: softmax_rows(1, 4, heads=1, seed=at) for at, site in enumerate(sites)}
    [view] = select_views(make_explanation(sites=sites, arrays=arrays))
    assert view.rows == ["sentence 0", "sentence 1", "sentence 2"]
    np.testing.assert_array_equal(view.weights[2], arrays["w2.w"][0, 0])


def test_words_join_their_subwords() -> None:
    explanation = make_explanation()
    columns = word_ranges(explanation.source)
    assert columns == [(0, 1), (1, 3), (3, 4)]
    assert word_texts(explanation.source) == ["Das", "Haustür", "</s>"]
    weights = explanation.arrays["x0.w"][0]
    rows = [(0, 2), (2, 4)]
    joined = join_words(weights, rows, columns, mean_rows=True)
    assert joined[0, 1] == pytest.approx(
        (weights[0, 1] + weights[0, 2] + weights[1, 1] + weights[1, 2]) / 2
    )
    np.testing.assert_allclose(joined.sum(axis=1), 1.0, atol=1e-5)
    summed = join_words(weights, rows, columns, mean_rows=False)
    np.testing.assert_allclose(summed, 2 * joined, atol=1e-6)


INPUT, OUTPUT = ["▁Ein", "▁Mann", "</s>"], ["▁A", "▁man", ".", "</s>"]


def weights(rows: int, columns: int) -> np.ndarray:
    values = np.random.default_rng(0).random((rows, columns)).astype(np.float32)
    return values / values.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("src", "tgt"),
    [
        (INPUT, OUTPUT),
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
    monkeypatch.setattr(figure_style, "_is_drawable", str.isascii)
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
def test_labels_that_do_not_fit_are_rejected(tmp_path: Path, draw) -> None:
    with pytest.raises(DataError, match=r"found shape \(3, 3\) for 4 target and 3 source tokens"):
        draw(tmp_path / "map.png", weights(3, 3), src_tokens=INPUT, tgt_tokens=OUTPUT)
