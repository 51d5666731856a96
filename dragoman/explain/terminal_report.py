"""An explanation in the terminal: attention, token probabilities, and what each word relied on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from dragoman.errors import escape_unprintable
from dragoman.explain.attention_head_roles import rank_correlation
from dragoman.explain.attention_plots import (
    CLASS_TASKS,
    AttentionView,
    join_words,
    select_views,
    step_text,
    title_lines,
    word_ranges,
    word_texts,
)
from dragoman.explain.explanation import AttentionWeights, Explanation, Step
from dragoman.explain.terminal_attention_map import render_view
from dragoman.explain.terminal_text_width import (
    SPACE_SIGN,
    fit_cells,
    label_token,
    shorten_cells,
    wrap_cells,
)

MAX_VIEWS = 4  # maps of different axes that are shown
MAX_ROWS = 200  # tokens or words of a list
MAX_WORDS = 3  # source words that are named for each output word
MAX_RUNNERS_UP = 3
MAX_CLASSES = 8
_BAR_CELLS = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
METHOD_NAMES = {
    "attention_x_gradient": "attention × gradient",
    "input_x_gradient": "input × gradient",
    "integrated_gradients": "integrated gradients",
    "value_zeroing": "value zeroing",
    "occlusion": "occlusion",
}
# Words for rank correlations, each from its lower bound on.
_AGREEMENT = ((0.7, "agree"), (0.4, "agree in part"), (0.1, "agree weakly"))
# Weights of the whole input over several levels of attention, by the name of the extra.
_IMPORTANCE = {"word_importance": "attention, all levels", "element_importance": "attention"}


def render_report(
    explanation: Explanation,
    *,
    kind: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    width: int = 80,
) -> Text:
    """Return the whole report in lines of at most `width` columns.

    Styles repeat characters and numbers, so that nothing is lost without them. Raise
    ConfigError for a kind, layer or head that the model does not have.
    """
    views = select_views(explanation, kind=kind, layer=layer, head=head)
    shown = Text(no_wrap=True)
    parts = (
        _header(explanation, width).append_text(_off_part(explanation, width)),
        *(_view_part(view, width) for view in views[:MAX_VIEWS]),
        _more_views(views, width),
        _steps_part(explanation, width),
        _words_part(explanation, views, width),
        _missing_part(explanation, width),
    )
    for part in parts:
        if part.plain:
            shown.append_text(part).append("\n")
    shown.rstrip()
    return shown.append("\n")


def _header(explanation: Explanation, width: int) -> Text:
    """Return the input and the output with the score."""
    part = Text()
    for text in title_lines(explanation):
        arrow = text.startswith("→ ")
        for line in wrap_cells(escape_unprintable(text), width, indent="  " if arrow else ""):
            part.append(f"{line}\n", "bold" if arrow else "")
    for line in _score_lines(explanation):
        for each in wrap_cells(line, width, indent="  "):
            part.append(f"{each}\n", "dim")
    return part


def _score_lines(explanation: Explanation) -> Iterator[str]:
    """Yield the score of the output, and that of a reference beside it."""
    score = explanation.score
    if isinstance(score.get("sum"), float):
        normalised = score.get("normalised")
        line = f"log-probability {score['sum']:.3f}"
        if isinstance(normalised, float) and abs(normalised - score["sum"]) > 5e-4:
            line += f", with the length penalty {normalised:.3f}"
        yield line
    reference = score.get("reference")
    if isinstance(reference, dict) and isinstance(reference.get("sum"), float):
        sentence = reference.get("sentence") or reference.get("verdict") or ""
        yield f"explained is the reference{f': {sentence}' if sentence else ''}"


def _title(text: str, width: int) -> Text:
    part = Text()
    for line in wrap_cells(text, width, indent="  "):
        part.append(f"{line}\n", "bold")
    return part


def _view_part(view: AttentionView, width: int) -> Text:
    """Return a map under its title."""
    return _title(view.what[:1].upper() + view.what[1:], width).append_text(
        render_view(view, width=width)
    )


def _more_views(views: Sequence[AttentionView], width: int) -> Text:
    """Return a line about maps that are not shown."""
    more = len(views) - MAX_VIEWS
    if more <= 0:
        return Text()
    return Text(f"{more} more maps with other axes: choose a --layer, or --json has all\n", "dim")


# Probabilities


def _steps_part(explanation: Explanation, width: int) -> Text:
    """Return the probability of each token, tag or class with the runners-up."""
    steps = explanation.steps
    if not steps:
        return Text()
    task = str(explanation.model.get("task", ""))
    if task in CLASS_TASKS:
        return _classes_part(steps[0], width)
    show = label_token if task == "tag" else _show_token
    labels = [show(token.text) for token in explanation.target.tokens]
    before = list[str]()
    if task == "tag" and len(explanation.source.tokens) == len(steps):
        before = [label_token(token.text) for token in explanation.source.tokens]
    if len(labels) != len(steps):
        labels = [show(step_text(step)) for step in steps]
    noun = "Tags" if task == "tag" else "Tokens"
    part = _title(f"{noun}: probability, and the runners-up", width)
    columns = [*([before] if before else []), labels]
    cells = [min(18, max(cell_len(each) for each in column)) for column in columns]
    number = len(str(len(steps)))
    all_forced = all(step.forced for step in steps)
    for at, step in enumerate(steps[:MAX_ROWS]):
        start = f"{at + 1:>{number}}  "
        start += "  ".join(
            fit_cells(column[at], size) for column, size in zip(columns, cells, strict=True)
        )
        start += f"  {_format(math.exp(step.logprob))} {_bar(math.exp(step.logprob))} "
        part.append(start)
        notes = _step_notes(step, all_forced=all_forced)
        others = [
            f"{show(text)} {_format(math.exp(logprob))}"
            for id_, text, logprob in step.top
            if id_ != step.id and text != step_text(step)
        ][:MAX_RUNNERS_UP]
        cells_left = width - cell_len(start) - 1
        part.append(_join_that_fits([*notes, *others], cells_left).rstrip() + "\n", "dim")
    return part.append_text(_more_rows(len(steps)))


def _more_rows(count: int) -> Text:
    """Return a line about the rows of a list that are not shown."""
    more = count - MAX_ROWS
    return Text(f"and {more:,} more; --html and --json have all\n" if more > 0 else "", "dim")


def _step_notes(step: Step, *, all_forced: bool) -> list[str]:
    """Return notes on a step; of a reference every token is forced."""
    notes = []
    if step.forced and not all_forced:
        notes.append("forced")
    if step.rank > 1:
        notes.append(f"rank {step.rank:,}")
    return [f"({', '.join(notes)})"] if notes else []


def _classes_part(step: Step, width: int) -> Text:
    """Return the probabilities of classes, most probable first."""
    part = _title("Classes: probability", width)
    shown = step.top[:MAX_CLASSES]
    cells = min(30, max((cell_len(text) for _, text, _ in shown), default=0))
    for id_, text, logprob in shown:
        mark = "→" if id_ == step.id else " "
        value = math.exp(logprob)
        label = fit_cells(escape_unprintable(text), cells)
        part.append(f"{mark} {label}  {_format(value)} {_bar(value)}".rstrip() + "\n")
    more = len(step.top) - MAX_CLASSES
    if more > 0:
        part.append(f"  and {more} more\n", "dim")
    return part


def _format(probability: float) -> str:
    """Return a probability in five columns."""
    return f"{probability:.3f}" if probability >= 0.0005 else f"{probability:.0e}"


def _bar(value: float) -> str:
    """Return a bar of _BAR_CELLS columns for a fraction, in eighths of a column."""
    eighths = round(8 * _BAR_CELLS * min(1.0, max(0.0, value)))
    full, rest = divmod(eighths, 8)
    return f"{'█' * full + (_EIGHTHS[rest] if rest else ''):{_BAR_CELLS}}"


def _show_token(token: str) -> str:
    """Return a token with its space visible: a space is a part of it."""
    mark = SPACE_SIGN if token[:1] in (" ", "\u2581") and token.strip(" \u2581") else ""
    return mark + label_token(token)


def _join_that_fits(parts: Sequence[str], cells: int) -> str:
    """Join as many parts as fit into some columns."""
    joined = ""
    for part in parts:
        longer = f"{joined}  {part}" if joined else part
        if cell_len(longer) > cells:
            break
        joined = longer
    return joined


# Words


class _Inputs(NamedTuple):
    """What an output may have relied on: ranges of positions, each with its text."""

    ranges: list[tuple[int, int]]
    names: list[str]

    @property
    def size(self) -> int:
        """The number of positions."""
        return self.ranges[-1][1] if self.ranges else 0


def _words_part(explanation: Explanation, views: Sequence[AttentionView], width: int) -> Text:
    """Return for each output word the input words it relied on: attribution beside attention."""
    rows, inputs = _output_words(explanation), _input_words(explanation)
    if not rows or not inputs.ranges:
        return Text()
    sides = [
        side
        for side in (
            _attributed_words(explanation, rows, inputs),
            _attended_words(explanation, views, rows, inputs),
        )
        if side is not None
    ]
    if not sides:
        return Text()
    labels = [label_token(label) for label in _output_labels(explanation)]
    part = _title(f"What {'each word' if len(labels) > 1 else 'the output'} relied on", width)
    shown = [values for _, values in sides]
    heading = "output"
    if explanation.model.get("task") == "pairs":  # one output, and a row for each sentence
        heading, labels = "words of", ["first sentence", "second sentence"]
        shown = [_split_sentences(values, len(word_texts(explanation.source))) for values in shown]
    size = min(16, max(cell_len(heading), *(cell_len(label) for label in labels)))
    cells_left = (width - size - 2 * len(sides)) // len(sides)
    headings = "  ".join(fit_cells(name, cells_left) for name, _ in sides)
    part.append(f"{fit_cells(heading, size)}  {headings}".rstrip() + "\n", "dim")
    for at, label in enumerate(labels[:MAX_ROWS]):
        cells = "  ".join(
            fit_cells(_strongest(values[at], inputs.names, cells_left), cells_left)
            for values in shown
        )
        part.append(f"{fit_cells(label, size)}  {cells}".rstrip() + "\n")
    part.append_text(_more_rows(len(labels)))
    if sides[0][0].startswith("attribution"):
        whole = "both rows" if len(labels) > len(rows) else "the row"
        note = f"attribution: fractions of {whole}"
        if any((values < 0).any() for _, values in sides):
            note += "; a minus lowers the probability of the output"
        for line in wrap_cells(note, width):
            part.append(f"{line}\n", "dim")
    if len(sides) == 2:
        part.append_text(_agreement(sides[0][1], sides[1][1], width))
    return part


def _split_sentences(values: AttentionWeights, first: int) -> AttentionWeights:
    """Return the row (1, S + T) of a pair as two, each with zeros for the other sentence."""
    in_first = np.arange(values.shape[1]) < first
    return np.concatenate([np.where(in_first, values, 0), np.where(in_first, 0, values)])


def _input_words(explanation: Explanation) -> _Inputs:
    """Return the words of the input: of a pair both texts, of a language model what came before."""
    source, target = explanation.source, explanation.target
    inputs = _Inputs(word_ranges(source), word_texts(source))
    task = explanation.model.get("task")
    if task == "pairs":
        first = len(source.tokens)
        shifted = [(start + first, end + first) for start, end in word_ranges(target)]
        return _Inputs([*inputs.ranges, *shifted], [*inputs.names, *word_texts(target)])
    if not source.tokens:  # row t of a language model predicts token t from <s> and t tokens
        count = len(target.tokens)
        shifted = [
            (start + 1, min(end + 1, count))
            for start, end in word_ranges(target)
            if start + 1 < count
        ]
        return _Inputs([(0, 1), *shifted], ["<s>", *word_texts(target)[: len(shifted)]])
    return inputs


def _output_words(explanation: Explanation) -> list[tuple[int, int]]:
    """Return the ranges of target positions that make an output word; one for a class."""
    if explanation.model.get("task") in CLASS_TASKS:
        return [(0, 1)]
    return word_ranges(explanation.target)


def _output_labels(explanation: Explanation) -> list[str]:
    """Return the label of each range of `_output_words`."""
    if explanation.model.get("task") in CLASS_TASKS:
        return [step_text(explanation.steps[0]) if explanation.steps else explanation.translation]
    texts = word_texts(explanation.target)
    if explanation.model.get("task") == "tag" and len(texts) == len(word_texts(explanation.source)):
        pairs = zip(word_texts(explanation.source), texts, strict=True)
        return [f"{shorten_cells(word, 9)} {tag}" for word, tag in pairs]
    return texts


def _attributed_words(
    explanation: Explanation, rows: Sequence[tuple[int, int]], inputs: _Inputs
) -> tuple[str, AttentionWeights] | None:
    """Return the first method's attributions by words, each row as fractions of its total."""
    for each in explanation.attribution:
        source = explanation.arrays.get(each.source)
        target = explanation.arrays.get(each.target or "")
        if explanation.model.get("task") == "pairs" and source is not None and target is not None:
            source = np.concatenate([source, target], axis=1)
        elif not explanation.source.tokens:
            source = target
        if source is None or source.shape != (rows[-1][1], inputs.size):
            continue
        joined = join_words(source, rows, inputs.ranges, mean_rows=False)
        total = np.abs(joined).sum(axis=1, keepdims=True)
        fractions: AttentionWeights = np.divide(
            joined, total, out=np.zeros_like(joined), where=total > 0
        )
        return f"attribution, {METHOD_NAMES.get(each.method, each.method)}", fractions
    return None


def _attended_words(
    explanation: Explanation,
    views: Sequence[AttentionView],
    rows: Sequence[tuple[int, int]],
    inputs: _Inputs,
) -> tuple[str, AttentionWeights] | None:
    """Return attention from output to input by words: of the map above, or the mean."""
    found: list[tuple[str, AttentionWeights | None]] = []
    columns = "source tokens" if explanation.source.tokens else "target tokens before them"
    found += [
        ("attention above", view.weights)
        for view in views
        if view.row_axis == "target tokens" and view.column_axis.endswith(columns)
    ]
    for extra, name in _IMPORTANCE.items():
        found.append((name, explanation.arrays.get(explanation.extras.get(extra, ""))))
    found += [
        ("attention above", view.weights) for view in views if view.column_axis == "input tokens"
    ]
    found.append(("mean cross-attention", explanation.alignment))
    for name, weights in found:
        if weights is not None and weights.shape == (rows[-1][1], inputs.size):
            return name, join_words(weights, rows, inputs.ranges, mean_rows=True)
    return None


def _strongest(values: AttentionWeights, names: Sequence[str], cells: int) -> str:
    """Return the names with the largest values, with their numbers."""
    order = np.argsort(-np.abs(values), kind="stable")[:MAX_WORDS]
    parts = []
    for at in order:
        if abs(float(values[at])) < 0.005:
            break
        number = f"{float(values[at]):.2f}".replace("0.", ".")
        name = label_token(names[at])
        parts.append(f"{shorten_cells(name, max(4, cells - 5))} {number}")
    return _join_that_fits(parts, cells)


def _agreement(one: AttentionWeights, other: AttentionWeights, width: int) -> Text:
    """Return in words how well attribution and attention rank the source words alike."""
    found = [rank_correlation(np.abs(a), b) for a, b in zip(one, other, strict=True)]
    values = [each for each in found if each is not None]
    if not values:
        return Text()
    mean = sum(values) / len(values)
    word = next((name for least, name in _AGREEMENT if mean >= least), "do not agree")
    noun = "mean rank correlation" if len(values) > 1 else "rank correlation"
    text = f"attribution and attention {word}: {noun} {mean:.2f}"
    part = Text()
    for line in wrap_cells(text, width):
        part.append(f"{line}\n", "dim")
    return part


# Heads that are off, and missing parts


def _off_part(explanation: Explanation, width: int) -> Text:
    """Return a line about heads that were switched off."""
    off = explanation.request.get("off") or ()
    if not off:
        return Text()
    part = Text()
    for line in wrap_cells(f"Heads off: {', '.join(map(str, off))}", width, indent="  "):
        part.append(f"{line}\n", "bold")
    return part


def _missing_part(explanation: Explanation, width: int) -> Text:
    """Return the parts that the model lacks, a sentence each."""
    sentences = list(dict.fromkeys(explanation.missing.values()))
    if not sentences:
        return Text()
    part = _title("Not shown", width)
    for sentence in sentences:
        for line in wrap_cells(f"- {escape_unprintable(sentence)}", width, indent="  "):
            part.append(f"{line}\n")
    return part
