"""The model card: data, training, scores and limits of a model as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from dragoman._version import __version__
from dragoman.config import Config
from dragoman.config.root_config import TRANSLATE
from dragoman.config.translation_directions import list_languages, parse_directions
from dragoman.evaluate.confidence_calibration import ConfidenceMap

TASK_TITLES = {
    "language": "Language model",
    "classify": "Classifier",
    "tag": "Tagger",
    "pairs": "Sentence-pair model",
    "sets": "Set model",
}
PIPELINE_TAGS = {
    TRANSLATE: "translation",
    "language": "text-generation",
    "classify": "text-classification",
    "tag": "token-classification",
    "pairs": "text-classification",
}


@dataclass(frozen=True, slots=True)
class CardScore:
    """A score with its signature and test set."""

    metric: str  # BLEU
    value: float
    signature: str  # sacreBLEU's, or a description
    on: str = ""  # the test set


@dataclass(frozen=True, slots=True)
class Card:
    """The contents of a model card; empty fields are written as unknown."""

    title: str = ""
    command: str = ""  # the training command
    # "training pairs": "29,000 (train.de, train.en)"
    data: Mapping[str, str] = field(default_factory=dict)
    # "steps": "3,000", "time": "9 minutes on 2 CPU cores"
    training: Mapping[str, str] = field(default_factory=dict)
    scores: tuple[CardScore, ...] = ()
    limits: tuple[str, ...] = ()
    license: str = ""


def format_command(arguments: Iterable[str]) -> str:
    """Return a command line with file paths reduced to their base names, for privacy."""
    shown = []
    for argument in arguments:
        before, equals, value = argument.rpartition("=") if "/" in argument else ("", "", argument)
        shown.append(
            f"{before}{equals}{PurePath(value).name or value}" if "/" in value else argument
        )
    return shlex.join(["dragoman", *shown])


def write_card(
    card: Card, config: Config, *, parameters: int, calibration: ConfidenceMap | None = None
) -> str:
    """Return the card as Markdown with YAML front matter."""
    src, tgt = config.data.src_lang, config.data.tgt_lang
    title = card.title or (
        f"Multilingual translator: {', '.join(config.data.directions)}"
        if config.data.directions
        else f"Translator from {src} to {tgt}"
        if src and tgt
        else "Translator"
    )
    limits = ["Quality drops on text unlike the training data.", *card.limits]
    use = (
        "from dragoman import Translator\n\n"
        'print(Translator.load("this directory").translate(["…"]))'
    )
    if directions := parse_directions(config.data.directions):
        use = use.replace('["…"]', f'["…"], target_language="{directions[0].target}"')
    if config.task == TRANSLATE:
        limits.insert(
            0,
            f"It was trained on sentences of up to {config.data.max_length} tokens; longer lines "
            "are split before translation and joined after.",
        )
    else:
        title = card.title or TASK_TITLES[config.task]
        call = 'predict(["…"])'
        if config.task == "language":
            causal = config.language.objective == "causal"
            call = 'complete("…")[0].text' if causal else 'fill_mask("… <mask> …")'
        use = f'import dragoman\n\nprint(dragoman.load("this directory").{call})'
    parts = [
        _front_matter(card, config),
        f"# {title}",
        f"{parameters:,} parameters, recipe `{config.recipe or 'none'}`, "
        f"trained with dragoman {__version__}.",
        "## Use",
        f"```python\n{use}\n```",
        "## Data",
        _table(card.data) or "Not recorded.",
        "## Training",
        f"```\n{card.command}\n```" if card.command else "The command was not recorded.",
        _table(card.training),
        "## Scores",
        _score_table(card.scores) or "None were measured.",
        *(() if calibration is None else ("## Confidence", _describe_confidence(calibration))),
        "## Limits",
        "\n".join(f"- {each}" for each in limits),
        "## Licence",
        card.license or "Not stated. Ask whoever made the model, and mind the licence of its data.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _describe_confidence(calibration: ConfidenceMap) -> str:
    """Return the definition of a translation's confidence, and how reliable it is."""
    return (
        "`dragoman translate --json` states a confidence: the probability that a translation is "
        f"good, which means a sentence chrF of at least {calibration.good_chrf:.1f}, the median of "
        f"the validation set. It was fitted on {calibration.fitted_on:,} validation sentences and "
        f"measured on {calibration.measured_on:,} others; on text unlike them it may be wrong.\n\n"
        + _table(
            {
                "expected calibration error": f"{100 * calibration.calibration_error:.1f} % in 10 "
                "bins of equal mass; a perfectly calibrated one would measure about "
                f"{100 * calibration.chance_error:.1f} % on as many sentences",
                "AUROC": f"{calibration.auroc:.3f}, the probability that a good translation has a "
                "higher confidence than another one; 0.5 is chance",
                "map": f"{calibration.kind}",
            }
        )
    )


def _front_matter(card: Card, config: Config) -> str:
    """Return the YAML front matter: languages and licence, if known."""
    languages = list_languages(config.data.directions) or [
        each for each in (config.data.src_lang, config.data.tgt_lang) if each
    ]
    tag = PIPELINE_TAGS.get(config.task, "other")  # as on the Hugging Face hub
    lines = ["---", "library_name: dragoman", f"pipeline_tag: {tag}"]
    lines += ["language:", *(f"- {_quote_yaml(each)}" for each in languages)] if languages else []
    lines += [f"license: {_quote_yaml(card.license)}"] if card.license else []
    return "\n".join([*lines, "---"])


def _quote_yaml(text: str) -> str:
    """Quote a value for YAML, which reads `no` (Norwegian) as false."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _table_cell(text: object) -> str:
    """Escape a value for a Markdown table cell."""
    return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _table(values: Mapping[str, str]) -> str:
    """Return names and values as a Markdown table."""
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
    """Return scores with their signatures as a Markdown table (fairseq#2593, #637)."""
    if not scores:
        return ""
    rows = [
        f"| {_table_cell(s.metric)} | {s.value:.2f} | {_table_cell(s.on)} "
        f"| `{_table_cell(s.signature)}` |"
        for s in scores
    ]
    return "\n".join(["| metric | score | test set | signature |", "|---|---|---|---|", *rows])
