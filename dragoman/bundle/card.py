"""The model card: what a person wants to know before using somebody's model."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from dragoman._version import __version__
from dragoman.config import Config


@dataclass(frozen=True, slots=True)
class CardScore:
    """A figure with all that is needed to compare it."""

    metric: str  # BLEU
    value: float
    signature: str  # sacreBLEU's, or a sentence that says as much
    on: str = ""  # the test set


@dataclass(frozen=True, slots=True)
class Card:
    """The facts that a card is written from; what is empty is said to be unknown rather than left out."""

    title: str = ""
    command: str = ""  # what was run
    data: Mapping[str, str] = field(
        default_factory=dict
    )  # "training pairs": "29,000 (train.de, train.en)"
    training: Mapping[str, str] = field(
        default_factory=dict
    )  # "steps": "3,000", "time": "9 minutes on 2 CPU cores"
    scores: tuple[CardScore, ...] = ()
    limits: tuple[str, ...] = ()
    license: str = ""


def format_command(arguments: Iterable[str]) -> str:
    """Return a command as it was typed, but with the base names of files: where they lay is nobody else's business."""
    shown = []
    for argument in arguments:
        before, equals, value = argument.rpartition("=") if "/" in argument else ("", "", argument)
        shown.append(
            f"{before}{equals}{PurePath(value).name or value}" if "/" in value else argument
        )
    return shlex.join(["dragoman", *shown])


def write_card(card: Card, config: Config, *, parameters: int) -> str:
    """Write the card as Markdown, with the head that model collections read."""
    src, tgt = config.data.src_lang, config.data.tgt_lang
    title = card.title or (f"Translator from {src} to {tgt}" if src and tgt else "Translator")
    limits = [
        f"It was trained on sentences of up to {config.data.max_length} pieces; longer lines are split before and joined after.",
        "It knows the kind of text that it was trained on; other kinds it translates worse, and without saying so.",
        *card.limits,
    ]
    parts = [
        _front_matter(card, config),
        f"# {title}",
        f"{parameters:,} parameters, recipe `{config.recipe or 'none'}`, made with dragoman {__version__}.",
        "## Use",
        '```python\nfrom dragoman import Translator\n\nprint(Translator.load("this directory").translate(["…"]))\n```',
        "## Data",
        _table(card.data) or "Not recorded.",
        "## Training",
        f"```\n{card.command}\n```" if card.command else "The command was not recorded.",
        _table(card.training),
        "## Scores",
        _score_table(card.scores) or "None were measured.",
        "## Limits",
        "\n".join(f"- {each}" for each in limits),
        "## Licence",
        card.license or "Not stated. Ask whoever made the model, and mind the licence of its data.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(card: Card, config: Config) -> str:
    """Write the front matter: languages and licence, where they are known."""
    languages = [each for each in (config.data.src_lang, config.data.tgt_lang) if each]
    lines = ["---", "library_name: dragoman", "pipeline_tag: translation"]
    lines += ["language:", *(f"- {_quote_yaml(each)}" for each in languages)] if languages else []
    lines += [f"license: {_quote_yaml(card.license)}"] if card.license else []
    return "\n".join([*lines, "---"])


def _quote_yaml(text: str) -> str:
    """Quote a value for YAML, which would read `no`, Norwegian, as false."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _table_cell(text: object) -> str:
    """Keep a value inside its table cell."""
    return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _table(values: Mapping[str, str]) -> str:
    """Write names and values as a table."""
    if not values:
        return ""
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            *(f"| {_table_cell(name)} | {_table_cell(value)} |" for name, value in values.items()),
        ]
    )


def _score_table(scores: tuple[CardScore, ...]) -> str:
    """Write scores with their signatures: a figure without one cannot be compared (fairseq#2593, #637)."""
    if not scores:
        return ""
    rows = [
        f"| {_table_cell(s.metric)} | {s.value:.2f} | {_table_cell(s.on)} | `{_table_cell(s.signature)}` |"
        for s in scores
    ]
    return "\n".join(["| metric | score | test set | signature |", "|---|---|---|---|", *rows])
