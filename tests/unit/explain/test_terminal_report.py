"""The report in the terminal: its parts, its numbers, its width, gaps."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rich.cells import cell_len

from dragoman.explain.attention_plots import title_lines
from dragoman.explain.explanation import Attribution, Step
from dragoman.explain.terminal_report import render_report
from tests.explanation_kit import make_explanation, text_of


def test_every_part_is_there_with_the_models_numbers() -> None:
    text = render_report(make_explanation()).plain
    assert text.startswith("Das Haustür\n→ The front door\n")
    assert "log-probability -1.300, with the length penalty -0.400" in text
    assert "Cross-attention, mean of 2 layers and 2 heads" in text
    assert "1  ␣The    0.900 █████████  (forced)  ␣other 0.050" in text
    assert "2  ␣front  0.400 ████       (rank 2)  ␣other 0.050" in text
    assert "attribution, input × gradient" in text
    # front: 0.1, 0.5 + 0.2, 0 of 0.8; door: 0, 0.1 - 0.4, 0 of 0.3
    assert "Haustür .88  Das .12" in text
    assert "Haustür -1.00" in text
    assert "mean rank correlation" in text


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(
    "tokens",
    [
        ["▁word"] * 50,
        ["年", "月", "</s>"] * 25,
        ["مرحبا", "▁سلام"] * 12,
        ["👨\u200d👩\u200d👧"] * 30,
    ],
)
def test_it_fits_the_window(width: int, tokens: list[str]) -> None:
    source = text_of(tokens)
    missing = {"beam": "this model has no beam, and a sentence about it that is rather long " * 2}
    found = make_explanation(source=source, sites=[], attribution=[], missing=missing)
    drawn = render_report(found, width=width).plain.splitlines()
    assert max(cell_len(line) for line in drawn) <= width


def test_missing_parts_are_reported_once_each() -> None:
    missing = {"head": "no attention here", "heads": "no attention here", "beam": "no beam here"}
    found = make_explanation(sites=[], attribution=[], missing=missing)
    text = render_report(found).plain
    assert text.count("no attention here") == 1
    assert text.rstrip().endswith("- no beam here")
    assert "relied on" not in text


def test_a_label_shows_its_classes_and_a_tag_its_token() -> None:
    step = Step(1, -0.1, 1, 0.2, top=[(1, "good", -0.1), (0, "bad", -2.4)])
    label = make_explanation(
        model={"task": "classify"}, steps=[step], sites=[], attribution=[], score={}
    )
    text = render_report(label).plain
    assert "→ good, probability 0.905\n" in text
    assert "→ good  0.905" in text
    assert "  bad   0.091" in text
    steps = [Step(0, -0.1, 1, 0.2, top=[(0, "NOUN", -0.1), (1, "VERB", -2.4)])] * 4
    tags = make_explanation(
        model={"task": "tag"},
        steps=steps,
        target=text_of(["NOUN"] * 4),
        sites=[],
        attribution=[],
        score={},
    )
    assert "2  Haus  NOUN  0.905 █████████  VERB 0.091" in render_report(tags).plain


def test_a_pair_shows_the_words_of_both_sentences_and_its_label() -> None:
    step = Step(1, -0.1, 1, 0.2, top=[(1, "same", -0.1), (0, "other", -2.4)])
    found = make_explanation(
        model={"task": "pairs"},
        steps=[step],
        source=text_of(["a", "▁good", "▁film"]),
        target=text_of(["bad", "▁film"]),
        sites=[],
        attribution=[Attribution("occlusion", "occ.s", "occ.t", signed=True)],
        arrays={
            "occ.s": np.array([[0.1, 0.3, 0.2]], np.float32),
            "occ.t": np.array([[-0.3, 0.1]], np.float32),
        },
    )
    text = render_report(found).plain
    assert "→ same, probability 0.905\n" in text
    assert "first sentence   good .30  film .20  a .10\n" in text
    assert "second sentence  bad -.30  film .10\n" in text


@pytest.mark.parametrize("translation", ["", "\n ", "a"])
def test_every_translation_has_its_line(translation: str) -> None:
    target = dataclasses.replace(text_of(["a"]), text=translation)
    found = make_explanation(
        model={"task": "translate"}, source=text_of(["a"]), target=target, sites=[], attribution=[]
    )
    assert title_lines(found) == ["a", f"→ {translation.strip() or '(no words)'}"]


def test_a_long_list_is_cut_with_a_note() -> None:
    size = 300
    step = Step(0, -0.1, 1, 0.2, top=[(0, "a", -0.1)])
    found = make_explanation(
        source=text_of(["a"]),
        target=text_of(["a"] * size),
        steps=[step] * size,
        sites=[],
        attribution=[],
    )
    assert "and 100 more; --html and --json have all" in render_report(found).plain


def test_heads_that_are_off_are_named() -> None:
    text = render_report(make_explanation(request={"off": ["x0.1", "d0.0"]})).plain
    assert "Heads off: x0.1, d0.0" in text


def test_a_pair_relies_on_both_texts_and_a_language_model_on_earlier_tokens() -> None:
    arrays = {
        "ixg.s": np.array([[0.5, 0.1, 0.1, 0.0]], np.float32),
        "ixg.t": np.array([[0.0, 0.0, -0.3, 0.0]], np.float32),
    }
    found = [Attribution("input_x_gradient", "ixg.s", "ixg.t")]
    step = Step(1, -0.1, 1, 0.2, top=[(1, "same", -0.1)])
    pair = make_explanation(
        model={"task": "pairs"}, steps=[step], sites=[], arrays=arrays, attribution=found
    )
    text = render_report(pair).plain
    assert text.startswith("Das Haustür\nThe front door\n")
    assert "first sentence   Das .50  Haustür .20\n" in text
    assert "second sentence  door -.30\n" in text

    arrays = {"ixg.s": np.zeros((4, 0), np.float32), "ixg.t": np.tril(np.ones((4, 4), np.float32))}
    language = make_explanation(
        model={"task": "language"},
        source=text_of([]),
        sites=[],
        arrays=arrays,
        attribution=found,
    )
    text = render_report(language).plain
    assert text.startswith("The front door\n")
    assert "The     <s> 1.00" in text
    assert "door    <s> .33  The .33  front .33" in text
