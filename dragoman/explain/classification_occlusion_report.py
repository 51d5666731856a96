"""Effects of left-out words and sentences on a label, in the terminal and as an HTML page.

The HTML page is self-contained, in light and dark: no script and no outside resource; every text is
escaped. Two radio buttons choose by style sheet alone whether words are colored by what leaving
them out changes or by attention weight.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from dragoman.errors import escape_unprintable
from dragoman.explain.classification_occlusion import (
    OcclusionExplanation,
    SentenceEffect,
    WordEffect,
)

MAX_WORDS_SHOWN = 10  # rows of the table of words
MAX_SENTENCES_SHOWN = 8  # rows of the table of sentences
_BAR_CELLS = 10
_WORD_CELLS = 24
# Shades of a background, weakest first, from the 256-color palette; text on them is black.
_FOR = ("color(194)", "color(157)", "color(120)", "color(83)", "color(46)")
_AGAINST = ("color(224)", "color(217)", "color(210)", "color(203)", "color(196)")
_LEAST_SHADED = 0.05  # fraction of the largest effect
MAX_TABLE_WORDS = 15
_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1d1f21; --faint: #62676c;
  --line: #d8dadd; --for: 26, 127, 55; --against: 207, 34, 46; --weight: 9, 105, 218; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --ink: #e6e8ea; --faint: #9aa1a8;
  --line: #3a3f45; --for: 63, 185, 80; --against: 248, 81, 73; --weight: 88, 166, 255; } }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem; background: var(--page);
  color: var(--ink); font: 16px/1.65 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; border-top: 1px solid var(--line);
  padding-top: 1.2rem; }
p, td, th, label { font-size: .92rem; }
p.note, .numbers, caption { color: var(--faint); }
.labels span { margin-right: 1.2em; white-space: nowrap; }
.labels meter { width: 6em; vertical-align: middle; }
.sentence { display: grid; grid-template-columns: 8.5rem 1fr; gap: .8rem;
  border-left: .35rem solid rgba(var(--weight), var(--s, 0)); padding: .1rem 0 .1rem .7rem;
  margin: .25rem 0; }
.sentence.one { grid-template-columns: 1fr; border-left: 0; padding-left: 0; }
.numbers { font-size: .8rem; font-variant-numeric: tabular-nums; line-height: 1.35;
  padding-top: .25rem; }
.text { overflow-wrap: anywhere; white-space: pre-wrap; }
.text b { font-weight: inherit; border-radius: .2rem; padding: .05rem 0;
  background: rgba(var(--c, var(--for)), var(--e, 0)); }
#by-weight:checked ~ article .text b { background: rgba(var(--weight), var(--w, 0)); }
table { border-collapse: collapse; margin-top: .8rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-size: .85rem; padding-bottom: .2rem; }
th, td { padding: .12rem .9rem .12rem 0; text-align: left; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; }
""".strip()


def render_explanation(explanation: OcclusionExplanation, *, width: int = 80) -> Text:
    """Return the explanation as text of at most `width` columns.

    Colors repeat the numbers, so that nothing is lost without them.
    """
    shown = Text()
    others = [
        f"{escape_unprintable(label)} {value:.3f}"
        for label, value in list(explanation.probabilities.items())[:5]
        if label != explanation.label
    ]
    shown.append(f"{escape_unprintable(explanation.label)} {explanation.probability:.3f}", "bold")
    shown.append(f"   ({', '.join(others)})\n" if others else "\n", "dim")
    shown.append("\n")
    shown.append_text(_shade_text(explanation, width))
    shown.append("\n")
    if len(explanation.sentences) > 1:
        _append_sentences(shown, explanation, width)
    _append_words(shown, explanation)
    for note in explanation.notes:
        shown.append(f"{note}\n", "dim")
    return shown


def _shade_text(explanation: OcclusionExplanation, width: int) -> Text:
    """Return the text with each word's background shaded by its drop, wrapped to the width."""
    shown, used, at, scale = Text("  "), 0, 0, explanation.scale
    for word in explanation.words:
        shown_text = escape_unprintable(word.text)
        gap = " " if word.span.start > at and used else ""
        if used and used + cell_len(gap + shown_text) > width - 2:
            shown.append("\n  ")
            gap, used = "", 0
        shown.append(gap)
        shown.append(shown_text, _shade(word, scale))
        used += cell_len(gap + shown_text)
        at = word.span.end
    return shown.append("\n")


def _shade(word: WordEffect, scale: float) -> Style:
    """Return the style of a word: green where it supports the label, red where it opposes it."""
    strength = abs(word.drop or 0.0) / scale
    if strength < _LEAST_SHADED:
        return Style()
    shades = _FOR if (word.drop or 0.0) > 0 else _AGAINST
    return Style(color="black", bgcolor=shades[min(len(shades) - 1, int(strength * len(shades)))])


def _append_sentences(shown: Text, explanation: OcclusionExplanation, width: int) -> None:
    """Append the table of sentences, most important first."""
    two_levels = explanation.has_sentence_weights
    ranked = sorted(
        enumerate(explanation.sentences, 1),
        key=lambda each: (-abs(each[1].drop or 0.0), -(each[1].weight or 0.0)),
    )
    weight = "weight  " if two_levels else ""
    shown.append(f"{weight}  drop  sentence\n", "bold")
    for number, sentence in ranked[:MAX_SENTENCES_SHOWN]:
        start = f"{_format_weight(sentence.weight)}  " if two_levels else ""
        start += f"{_format_drop(sentence.drop)}  {number}. "
        shown.append(start)
        shown.append(_shorten(" ".join(sentence.text.split()), width - cell_len(start)) + "\n")
    more = len(ranked) - MAX_SENTENCES_SHOWN
    if more > 0:
        shown.append(f"and {more:,} more\n", "dim")
    shown.append("\n")


def _append_words(shown: Text, explanation: OcclusionExplanation) -> None:
    """Append the table of words, largest effect first, with a bar for the drop."""
    weights = explanation.has_word_weights
    ranked = explanation.ranked_words()[:MAX_WORDS_SHOWN]
    shown.append(f"{'weight  ' if weights else ''}  drop  {'':{_BAR_CELLS}}  word\n", "bold")
    for word in ranked:
        if weights:
            shown.append(f"{_format_weight(word.weight)}  ")
        shown.append(f"{_format_drop(word.drop)}  ")
        length = round(_BAR_CELLS * abs(word.drop or 0.0) / explanation.scale)
        supports = (word.drop or 0.0) > 0
        bar = ("█" if supports else "░") * length
        shown.append(f"{bar:{_BAR_CELLS}}", "green" if supports else "red")
        shown.append(f"  {_shorten(escape_unprintable(word.text), _WORD_CELLS)}")
        number = _sentence_of(explanation, word)
        shown.append(f"  (sentence {number})\n" if number else "\n", "dim")
    shown.append(
        "drop: how much less probable the label is when it is left out; below 0, more\n", "dim"
    )
    if weights:
        shown.append("weight: the model's attention, which need not mean an effect\n", "dim")


def _sentence_of(explanation: OcclusionExplanation, word: WordEffect) -> int:
    """Return the number of a word's sentence; 0 if there is only one."""
    if len(explanation.sentences) < 2:
        return 0
    return next(
        number
        for number, sentence in enumerate(explanation.sentences, 1)
        if _contains(sentence, word)
    )


def _contains(sentence: SentenceEffect, word: WordEffect) -> bool:
    return any(each.span == word.span for each in sentence.words)


def _format_weight(weight: float | None) -> str:
    return "     -" if weight is None else f"{weight:6.3f}"


def _format_drop(drop: float | None) -> str:
    if drop is None:
        return "     -"
    return f"{drop:+6.3f}" if abs(drop) >= 0.0005 else " 0.000"


def _shorten(text: str, cells: int) -> str:
    """Return a text cut to a number of columns, with an ellipsis."""
    text = escape_unprintable(text)
    return (
        text if cell_len(text) <= cells else set_cell_size(text, max(1, cells - 1)).rstrip() + "…"
    )


def render_html(explanations: Iterable[OcclusionExplanation], *, title: str = "Explanation") -> str:
    """Return a page with each explanation: labels, sentences, shaded words and a table."""
    articles = list(explanations)
    weights = any(each.has_word_weights for each in articles)
    choice = (
        '<input type="radio" name="by" id="by-drop" checked> <label for="by-drop">color by what '
        'leaving a word out changes</label> <input type="radio" name="by" id="by-weight"> '
        '<label for="by-weight">color by attention weight</label>'
        if weights
        else ""
    )
    body = "\n".join(_article(number, each) for number, each in enumerate(articles, 1))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # Nothing is loaded, whatever a text contains.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{_escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        f"<h1>{_escape(title)}</h1>\n"
        '<p class="note">Drop: how much less probable the label is when the word is left out; '
        "green words support the label, red words oppose it."
        + (
            " Weight: the model's attention; a large weight need not mean a large effect."
            if weights
            else " This model has no attention weights over words."
        )
        + f"</p>\n{choice}\n{body}\n</body>\n</html>\n"
    )


def _article(number: int, explanation: OcclusionExplanation) -> str:
    """Return one explanation."""
    labels = "".join(
        f"<span>{_escape(label)} {value:.3f} <meter value='{value:.3f}'></meter></span>"
        for label, value in list(explanation.probabilities.items())[:5]
    )
    most_sentence = max((each.weight or 0.0 for each in explanation.sentences), default=0.0)
    sentences = "\n".join(
        _sentence(each, explanation, most_sentence) for each in explanation.sentences
    )
    notes = "".join(f'<p class="note">{_escape(note)}</p>' for note in explanation.notes)
    return (
        f"<article>\n<h2>{number}. {_escape(explanation.label)} {explanation.probability:.3f}"
        f'</h2>\n<p class="labels">{labels}</p>\n{sentences}\n{_word_table(explanation)}\n'
        f"{notes}</article>"
    )


def _sentence(
    sentence: SentenceEffect, explanation: OcclusionExplanation, most_weight: float
) -> str:
    """Return a sentence with its numbers and its shaded words."""
    alone = len(explanation.sentences) < 2
    most_word = max((word.weight or 0.0 for word in sentence.words), default=0.0)
    text, at, scale = [], sentence.words[0].span.start, explanation.scale
    for word in sentence.words:
        text.append(_escape(explanation.text[at : word.span.start]))
        text.append(_word(word, scale, most_word))
        at = word.span.end
    shown = "".join(text)
    if alone:
        return f'<div class="sentence one"><div class="text">{shown}</div></div>'
    numbers = [f"drop {_format(sentence.drop)}"]
    if sentence.weight is not None:
        numbers.insert(0, f"weight {sentence.weight:.3f}")
    strength = (sentence.weight or 0.0) / most_weight if most_weight else 0.0
    return (
        f'<div class="sentence" style="--s:{strength:.2f}"><div class="numbers">'
        f'{"<br>".join(numbers)}</div><div class="text">{shown}</div></div>'
    )


def _word(word: WordEffect, scale: float, most_weight: float) -> str:
    """Return a word; its numbers are shown under the pointer."""
    drop = word.drop or 0.0
    effect = abs(drop) / scale
    weight = (word.weight or 0.0) / most_weight if most_weight else 0.0
    numbers = f"drop {_format(word.drop)}"
    if word.weight is not None:
        numbers = f"weight {word.weight:.3f}, {numbers}"
    color = "" if drop >= 0 else "--c:var(--against);"
    return (
        f'<b style="{color}--e:{0.75 * effect:.2f};--w:{0.75 * weight:.2f}" title="{numbers}">'
        f"{_escape(word.text)}</b>"
    )


def _word_table(explanation: OcclusionExplanation) -> str:
    """Return the words with the largest effects as a table."""
    weights = explanation.has_word_weights
    rows = "".join(
        f"<tr><td>{_escape(word.text)}</td>"
        + (f'<td class="number">{_format(word.weight, sign=False)}</td>' if weights else "")
        + f'<td class="number">{_format(word.drop)}</td></tr>'
        for word in explanation.ranked_words()[:MAX_TABLE_WORDS]
    )
    return (
        "<table><caption>words by effect</caption><tr><th>word</th>"
        + ('<th class="number">weight</th>' if weights else "")
        + f'<th class="number">drop</th></tr>{rows}</table>'
    )


def _format(value: float | None, *, sign: bool = True) -> str:
    """Return a number with three decimals; a dash for none."""
    if value is None:
        return "–"
    return f"{value:+.3f}" if sign and abs(value) >= 0.0005 else f"{abs(value):.3f}"


def _escape(text: str) -> str:
    """Return a text as HTML, its control characters as Python writes them."""
    return html.escape(escape_unprintable(text, lines=True))
