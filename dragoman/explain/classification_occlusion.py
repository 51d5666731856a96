"""Why a text got its label, as data, in the terminal and as an HTML page.

Attention weights alone are no explanation: a word may get much weight and change nothing (Jain and
Wallace, 2019, "Attention is not Explanation"). So each word and each sentence is left out of the
text in turn, the model predicts again, and the drop in the label's probability is reported.

The HTML page is self-contained, in light and dark: no script and no outside resource; every text is
escaped. Two radio buttons choose by style sheet alone whether words are colored by what leaving
them out changes or by attention weight.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from dragoman.errors import escape_unprintable

MAX_LEFT_OUT = 512  # words of a text that are left out in turn; the model runs once for each
MAX_RUN_WORDS = 1 << 19  # of all those runs together: fewer words of a long text are left out
MIN_SCALE = 0.1  # a text whose words all change less than this is drawn in pale colors
_MAX_SKIPPED = 256  # characters, such as markup, that a tokenizer may drop between two tokens
_SPACES = re.compile(r"[ \t\r\n]+")
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


class CharacterSpan(NamedTuple):
    """A part of a text: characters from `start` up to `end`."""

    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceSpans:
    """The words of one sentence with the model's attention weights."""

    words: Sequence[CharacterSpan]
    word_weights: Sequence[float] | None = None  # sum to 1 in the sentence; None without attention
    weight: float | None = None  # of the sentence; None without a second level of attention


@dataclass(frozen=True, kw_only=True, slots=True)
class WordEffect:
    """A word, its attention weight, and the drop in probability without it."""

    text: str
    span: CharacterSpan
    weight: float | None  # None for a model without attention weights over words
    drop: float | None  # p(label | text) - p(label | text without the word); None if not computed

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, rounded to six decimals."""
        return {
            "word": self.text,
            "start": self.span.start,
            "end": self.span.end,
            "weight": round_or_none(self.weight),
            "drop": round_or_none(self.drop),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceEffect:
    """A sentence with its words, its attention weight, and the drop in probability without it."""

    text: str
    words: list[WordEffect]
    weight: float | None  # None for a model without attention weights over sentences
    drop: float | None  # None for the only sentence of a text

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "sentence": self.text,
            "weight": round_or_none(self.weight),
            "drop": round_or_none(self.drop),
            "words": [word.to_dict() for word in self.words],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class OcclusionExplanation:
    """The label of a text, and what each of its words and sentences has to do with it."""

    text: str
    label: str
    probability: float
    probabilities: dict[str, float]  # of every label, most probable first
    sentences: list[SentenceEffect]
    notes: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[WordEffect]:
        """All words in the order of the text."""
        return [word for sentence in self.sentences for word in sentence.words]

    @property
    def has_word_weights(self) -> bool:
        """Whether the model has attention weights over words."""
        return any(word.weight is not None for word in self.words)

    @property
    def has_sentence_weights(self) -> bool:
        """Whether the model has attention weights over sentences too: two levels."""
        return any(sentence.weight is not None for sentence in self.sentences)

    @property
    def scale(self) -> float:
        """The drop that is drawn at full strength: the largest, and at least MIN_SCALE."""
        return max([MIN_SCALE, *(abs(word.drop or 0.0) for word in self.words)])

    def ranked_words(self) -> list[WordEffect]:
        """Return the words by the size of their effect, then by weight; undecided ones last."""
        return sorted(
            self.words,
            key=lambda word: (
                word.drop is None,
                -abs(word.drop or 0.0),
                -(word.weight or 0.0),
                word.span,
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "text": self.text,
            "label": self.label,
            "probability": round(self.probability, 6),
            "probabilities": {
                label: round(value, 6) for label, value in self.probabilities.items()
            },
            "sentences": [sentence.to_dict() for sentence in self.sentences],
            "notes": self.notes,
        }


def explain_text(
    text: str,
    sentences: Sequence[SentenceSpans],
    probabilities: dict[str, float],
    label: str,
    predict: Callable[[Sequence[str]], Sequence[float]],
    *,
    max_left_out: int = MAX_LEFT_OUT,
) -> OcclusionExplanation:
    """Explain a label of a text by leaving out each word, and each sentence, in turn.

    `predict` returns the label's probability for each of several texts. Of more than `max_left_out`
    words, those with the largest weights are left out, or the first ones without weights; of a
    text of thousands of words fewer, so that the model reads at most MAX_RUN_WORDS.
    """
    words = [
        (span, None if sentence.word_weights is None else sentence.word_weights[at], sentence)
        for sentence in sentences
        for at, span in enumerate(sentence.words)
    ]
    max_left_out = min(max_left_out, max(1, MAX_RUN_WORDS // max(1, len(words))))
    chosen = sorted(
        range(len(words)), key=lambda at: (-_joint_weight(words[at][1], words[at][2].weight), at)
    )[:max_left_out]
    # A text of one sentence without it is empty, which says nothing about the sentence.
    whole = [_hull(sentence) for sentence in sentences if sentence.words]
    num_sentences = len(whole)
    whole = whole[:max_left_out] if num_sentences > 1 else []
    changed = [leave_out(text, words[at][0]) for at in chosen]
    changed += [leave_out(text, span) for span in whole]
    left = list(predict(changed)) if changed else []
    probability = probabilities[label]
    word_drops = {
        words[at][0]: probability - value for at, value in zip(chosen, left, strict=False)
    }
    sentence_drops = {
        span: probability - value for span, value in zip(whole, left[len(chosen) :], strict=True)
    }
    notes = []
    if len(chosen) < len(words):
        notes.append(
            f"{len(chosen):,} of {len(words):,} words were left out in turn: those with the "
            "largest weights"
            if any(weight is not None for _, weight, _ in words)
            else f"the first {len(chosen):,} of {len(words):,} words were left out in turn"
        )
    if 0 < len(whole) < num_sentences:
        notes.append(
            f"the first {len(whole):,} of {num_sentences:,} sentences were left out in turn"
        )
    return OcclusionExplanation(
        text=text,
        label=label,
        probability=probability,
        probabilities=probabilities,
        sentences=[
            SentenceEffect(
                text=text[_hull(sentence).start : _hull(sentence).end],
                weight=sentence.weight,
                drop=sentence_drops.get(_hull(sentence)),
                words=[
                    WordEffect(
                        text=text[span.start : span.end],
                        span=span,
                        weight=None if sentence.word_weights is None else sentence.word_weights[at],
                        drop=word_drops.get(span),
                    )
                    for at, span in enumerate(sentence.words)
                ],
            )
            for sentence in sentences
            if sentence.words
        ],
        notes=notes,
    )


def leave_out(text: str, span: CharacterSpan) -> str:
    """Return a text without a part; the spaces around it become one, or none at the ends."""
    before, after = text[: span.start], text[span.end :]
    if before[-1:].isspace() and after[:1].isspace():
        after = _SPACES.sub("", after, count=1)
    return (before.rstrip() if not after.strip() else before) + (
        after.lstrip() if not before.strip() else after
    )


def find_spans(text: str, tokens: Sequence[str]) -> list[CharacterSpan | None]:
    """Return where each token is found in a text, one after the other; None if it is not there.

    Case is ignored, as a tokenizer may lowercase.
    """
    # Lowercasing may change the length of a text ("İ"), and then its positions.
    lowered = "".join(char.lower() if len(char.lower()) == 1 else char for char in text)
    spans = list[CharacterSpan | None]()
    at = 0
    for token in tokens:
        wanted = token.lower()
        found = lowered.find(wanted, at, at + _MAX_SKIPPED + len(wanted)) if wanted else -1
        spans.append(None if found < 0 else CharacterSpan(found, found + len(wanted)))
        at = at if found < 0 else found + len(wanted)
    return spans


def merge_into_words(
    text: str, spans: Sequence[CharacterSpan], weights: Sequence[float] | None
) -> SentenceSpans:
    """Return subwords or characters merged into words, whose weights are the sums of theirs.

    A word is a run of letters and digits without a space; other characters stand alone.
    """
    words, sums = list[CharacterSpan](), list[float]()
    for at, span in enumerate(spans):
        piece = text[span.start : span.end]
        stripped = CharacterSpan(
            span.start + len(piece) - len(piece.lstrip()),
            span.end - len(piece) + len(piece.rstrip()),
        )
        weight = 0.0 if weights is None else weights[at]
        if stripped.start >= stripped.end:  # only a space: its weight goes to the word before it
            if sums:
                sums[-1] += weight
            continue
        if words and words[-1].end >= stripped.end:  # another byte of the same character
            sums[-1] += weight
        elif (
            words
            and words[-1].end == stripped.start
            and _is_word_char(text[stripped.start - 1])
            and _is_word_char(text[stripped.start])
        ):
            words[-1] = CharacterSpan(words[-1].start, stripped.end)
            sums[-1] += weight
        else:
            words.append(stripped)
            sums.append(weight)
    return SentenceSpans(words=words, word_weights=None if weights is None else sums)


def _is_word_char(char: str) -> bool:
    """Whether a character belongs to a word of a script with spaces."""
    return (char.isalnum() or char in "'’_-") and not "\u2e80" <= char <= "\u9fff"


def _joint_weight(word: float | None, sentence: float | None) -> float:
    """Return a word's weight in its text: that in its sentence times the sentence's."""
    return (0.0 if word is None else word) * (1.0 if sentence is None else sentence)


def _hull(sentence: SentenceSpans) -> CharacterSpan:
    """Return the part of the text from the sentence's first word to its last."""
    return CharacterSpan(sentence.words[0].start, sentence.words[-1].end)


def round_or_none(value: float | None) -> float | None:
    """Return a number rounded to six decimals; None stays None."""
    return None if value is None else round(float(value), 6)


def render_explanation(explanation: OcclusionExplanation, *, width: int = 80) -> Text:
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


def _shade_text(explanation: OcclusionExplanation, width: int) -> Text:
    """Return the text with each word's background shaded by its drop, wrapped to the width."""
    shown, used, at, scale = Text("  "), 0, 0, explanation.scale
    for word in explanation.words:
        piece = escape_unprintable(word.text)
        gap = " " if word.span.start > at and used else ""
        if used and used + cell_len(gap + piece) > width - 2:
            shown.append("\n  ")
            gap, used = "", 0
        shown.append(gap)
        shown.append(piece, _shade(word, scale))
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
        place = _sentence_of(explanation, word)
        shown.append(f"  (sentence {place})\n" if place else "\n", "dim")
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
        "green words support the label, red words speak against it."
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
