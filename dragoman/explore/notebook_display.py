"""The explorer in a notebook: the page in a frame, and a table for hosts that remove frames."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from dragoman.errors import ConfigError
from dragoman.explain.explanation import Explanation
from dragoman.explore.html_export import export_html

FRAME_HEIGHT = 720  # pixels
MAX_TABLE_ROWS = 60
MAX_SHOWN_CHARS = 300  # of a text above the table


def explore(
    model: Explanation | str | Path | Any, text: str | None = None, **options: Any
) -> Explanation:
    """Return the explanation of a text, which a notebook shows as the explorer page.

    `model` is a predictor, a model directory or an explanation, which is returned as it is.
    Options are those of `explain`, such as beam=4.
    """
    if isinstance(model, Explanation):
        if text is not None or options:
            raise ConfigError(
                [
                    "an explanation is shown as it is; found a text or options beside it; pass the "
                    "model to explain another text"
                ]
            )
        return model
    predictor = model
    if isinstance(model, (str, Path)):
        from dragoman.inference.predictors.catalogue import load  # imports torch

        predictor = load(model)
    if not hasattr(predictor, "explain"):
        raise ConfigError(
            [
                "explore needs an explanation, a predictor or a model directory; found "
                f"{type(model).__name__}; pass dragoman.load(path)"
            ]
        )
    if text is None:
        raise ConfigError(
            ["explore needs a text to explain; found none; write dragoman.explore(model, text)"]
        )
    if isinstance(text, str) and hasattr(predictor, "read_arguments"):
        [text] = predictor.read_arguments([text])
    explanation: Explanation = predictor.explain(text, **options)
    return explanation


def render_cell(explanation: Explanation, *, height: int = FRAME_HEIGHT) -> str:
    """Return the HTML of a notebook's cell.

    The frame is sandboxed: its scripts run, but reach neither the notebook nor the network. Hosts
    that remove frames show the table instead, which a style hides while the frame is there.
    """
    title = "Dragoman explorer"
    page = export_html(explanation, None, title=title)
    name = f"dragoman-{explanation.digest[:12]}"
    return (
        f'<div class="{name}">'
        f'<iframe sandbox="allow-scripts" title="{title}" width="100%" height="{height}" '
        f'frameborder="0" srcdoc="{html.escape(page, quote=True)}"></iframe>'
        f'<div class="dragoman-table">{render_table(explanation)}</div>'
        f"<style>.{name} iframe + .dragoman-table {{ display: none; }}</style>"
        "</div>"
    )


def render_table(explanation: Explanation) -> str:
    """Return a plain HTML table: each output token, its probability and what it was read from."""
    source, target = (
        f"<p><bdi dir='auto' lang='{_escape(text.lang)}'>{_escape(_shorten(text.text))}</bdi></p>"
        for text in (explanation.source, explanation.target)
    )
    rows = [
        "<tr>"
        f"<th scope='row'><bdi dir='auto'>{_escape(label)}</bdi></th>"
        f"<td>{probability:.3f}</td>"
        f"<td><bdi dir='auto'>{_escape(runner_up)}</bdi></td>"
        f"<td><bdi dir='auto'>{_escape(read_from)}</bdi></td>"
        "</tr>"
        for label, probability, runner_up, read_from in table_rows(explanation)
    ]
    more = len(explanation.steps) - len(rows)
    rest = f"<p>and {more} more</p>" if more > 0 else ""
    return (
        f"{source}{target}<table><thead><tr><th scope='col'>output</th>"
        "<th scope='col'>probability</th><th scope='col'>runner-up</th>"
        "<th scope='col'>most attended source token</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{rest}"
    )


def table_rows(explanation: Explanation) -> list[tuple[str, float, str, str]]:
    """Return the output token, its probability, the runner-up and the strongest source token."""
    alignment = explanation.alignment
    sources = explanation.source.tokens
    rows = []
    for number, step in enumerate(explanation.steps[:MAX_TABLE_ROWS]):
        texts = {token: text for token, text, _ in step.top}
        targets = explanation.target.tokens
        is_aligned = len(targets) == len(explanation.steps)
        label = targets[number].text if is_aligned else texts.get(step.id, str(step.id))
        others = [text for token, text, _ in step.top if token != step.id]
        runner_up = next((text for text in others if text != texts.get(step.id)), "")
        read_from = ""
        if alignment is not None and alignment.shape == (len(explanation.steps), len(sources)):
            read_from = sources[int(alignment[number].argmax())].text
        label, runner_up, read_from = map(show_spaces, (label, runner_up, read_from))
        rows.append((label, math.exp(step.logprob), runner_up, read_from))
    return rows


def show_spaces(token: str) -> str:
    """Return a token of nothing but spaces with a sign for each."""
    return token if token.strip() else "␣" * len(token)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def _escape(text: str) -> str:
    return html.escape(text, quote=True)
