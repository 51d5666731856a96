"""Explanations of labels as one self-contained HTML page, in light and dark.

No script and no outside resource; every text is escaped. Two radio buttons choose by style sheet
alone whether words are colored by what leaving them out changes or by attention weight.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from dragoman.errors import escape_unprintable
from dragoman.explain.text_explanation import SentenceEffect, TextExplanation, WordEffect

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


def render_html(explanations: Iterable[TextExplanation], *, title: str = "Explanation") -> str:
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
        "green words support the label, red words speak against it."
        + (
            " Weight: the model's attention; a large weight need not mean a large effect."
            if weights
            else " This model has no attention weights over words."
        )
        + f"</p>\n{choice}\n{body}\n</body>\n</html>\n"
    )


def _article(number: int, explanation: TextExplanation) -> str:
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


def _sentence(sentence: SentenceEffect, explanation: TextExplanation, most_weight: float) -> str:
    """Return a sentence with its numbers and its shaded words."""
    alone = len(explanation.sentences) < 2
    most_word = max((word.weight or 0.0 for word in sentence.words), default=0.0)
    text, at = [], sentence.words[0].span.start
    for word in sentence.words:
        text.append(_escape(explanation.text[at : word.span.start]))
        text.append(_word(word, explanation.scale, most_word))
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


def _word_table(explanation: TextExplanation) -> str:
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
