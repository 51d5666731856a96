"""An explanation of a label in the terminal: the text with shaded words, then two tables."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from dragoman.errors import escape_unprintable
from dragoman.explain.text_explanation import SentenceEffect, TextExplanation, WordEffect

MAX_WORDS_SHOWN = 10  # rows of the table of words
MAX_SENTENCES_SHOWN = 8  # rows of the table of sentences
_BAR_CELLS = 10
_WORD_CELLS = 24
# Shades of a background, weakest first, from the 256-color palette; text on them is black.
_FOR = ("color(194)", "color(157)", "color(120)", "color(83)", "color(46)")
_AGAINST = ("color(224)", "color(217)", "color(210)", "color(203)", "color(196)")
_LEAST_SHADED = 0.05  # fraction of the largest effect


def render_explanation(explanation: TextExplanation, *, width: int = 80) -> Text:
    """Return the explanation as text of at most `width` columns.

    Colors repeat what the numbers state, so that nothing is lost without them.
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


def _shade_text(explanation: TextExplanation, width: int) -> Text:
    """Return the text with each word's background shaded by its drop, wrapped to the width."""
    shown, used, at = Text("  "), 0, 0
    for word in explanation.words:
        piece = escape_unprintable(word.text)
        gap = " " if word.span.start > at and used else ""
        if used and used + cell_len(gap + piece) > width - 2:
            shown.append("\n  ")
            gap, used = "", 0
        shown.append(gap)
        shown.append(piece, _shade(word, explanation.scale))
        used += cell_len(gap + piece)
        at = word.span.end
    return shown.append("\n")


def _shade(word: WordEffect, scale: float) -> Style:
    """Return the style of a word: green where the label needs it, red where it speaks against."""
    strength = abs(word.drop or 0.0) / scale
    if strength < _LEAST_SHADED:
        return Style()
    shades = _FOR if (word.drop or 0.0) > 0 else _AGAINST
    return Style(color="black", bgcolor=shades[min(len(shades) - 1, int(strength * len(shades)))])


def _append_sentences(shown: Text, explanation: TextExplanation, width: int) -> None:
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


def _append_words(shown: Text, explanation: TextExplanation) -> None:
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
        place = _sentence_of(explanation, word)
        shown.append(f"  (sentence {place})\n" if place else "\n", "dim")
    shown.append(
        "drop: how much less probable the label is when it is left out; below 0, more\n", "dim"
    )
    if weights:
        shown.append("weight: the model's attention, which need not mean an effect\n", "dim")


def _sentence_of(explanation: TextExplanation, word: WordEffect) -> int:
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
