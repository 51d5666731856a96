"""Write the built-in model: `python tools/box_card.py --model MODEL --corpus DIR`.

The weights are stored in int8, the confidence is calibrated for them on the validation sets, and
card and documentation get scores with signatures and ten translations of each direction. DIR is
what tools/box_corpus.py wrote.
"""

from __future__ import annotations

import argparse
import datetime
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dragoman.bundle import Bundle, Card, CardScore, write_bundle
from dragoman.bundle.card import write_card
from dragoman.config.translation_directions import Direction, parse_directions
from dragoman.errors import DragomanError
from dragoman.evaluate.confidence_calibration import (
    ConfidenceMap,
    TranslationTokens,
    fit_confidence,
)
from dragoman.evaluate.translation_metrics import (
    EvaluationScores,
    check_aligned,
    read_sentences,
    score_translations,
    sentence_chrf,
)
from dragoman.exchange.export import export_bundle
from dragoman.inference import Translation, Translator
from dragoman.storage.disk_space_and_errors import format_bytes

ROOT = Path(__file__).resolve().parent.parent
BOX, PAGE = ROOT / "dragoman" / "box", ROOT / "docs" / "box.md"
BEGIN, END = "<!-- written by tools/box_card.py -->", "<!-- end -->"
MAX_BYTES = 20_000_000
SHOWN, SEED = 10, 1  # translations of each direction that are shown, and how they are drawn
DATA = "Tatoeba, German-English (2018-05-13) and French-English (2019-04-07); dates and numbers"
ATTRIBUTION = (
    "sentences of the contributors of tatoeba.org, in the selection of manythings.org/anki, "
    "CC BY 2.0 FR"
)
LICENSE = "CC BY 2.0 FR, as its data"
LIMITS = (
    "Its training sentences are short and of everyday life; long sentences, technical terms and "
    "rare names are often wrong.",
    "It knows German, English and French, and translates into and out of English only.",
    "It translates sentence by sentence: what an earlier sentence said does not decide between "
    "du and Sie, tu and vous, or the gender of a pronoun.",
    "Its source language detection knows the same three languages and no others.",
)


class TestSet(NamedTuple):
    """Source sentences of one direction with their references."""

    sources: list[str]
    references: list[str]


def read_set(corpus: Path, split: str, direction: Direction) -> TestSet:
    """Return a split that tools/box_corpus.py wrote, in one of its two directions."""
    source, target = direction
    languages = f"{source}-{target}" if target == "en" else f"{target}-{source}"
    sides = [read_sentences(corpus / f"{split}.{languages}.{each}") for each in direction]
    check_aligned(*sides)
    return TestSet(*sides)


def translate(translator: Translator, sources: Sequence[str], way: Direction) -> list[Translation]:
    """Translate in one direction, with a line of progress."""
    print(f"translating {len(sources):,} sentences {way}", file=sys.stderr)
    return list(translator.stream(sources, source_language=way.source, target_language=way.target))


def write_box(model: Path, corpus: Path, *, out: Path, page: Path, device: str, date: str) -> None:
    """Write the int8 bundle with its card, and the generated part of the page."""
    bundle = Bundle.load(model)
    ways = parse_directions(bundle.config.data.directions)
    tests = {way: read_set(corpus, "test", way) for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        # What is written below: the same values in int8.
        small = export_bundle(model, Path(folder) / "int8", quantization="int8").path
        translator = Translator.load(small, device=device)
        found = {way: translate(translator, tests[way].sources, way) for way in ways}
        numbers = {way: read_set(corpus, "numbers", way) for way in ways}
        exact = {
            way: _exact(translate(translator, numbers[way].sources, way), numbers[way])
            for way in ways
        }
        calibration = _calibrate(
            {way: read_set(corpus, "dev", way) for way in ways},
            lambda sources, way: translate(translator, sources, way),
        )
    scores = {
        way: score_translations(
            [each.text for each in found[way]], tests[way].references, tgt_lang=way.target
        )
        for way in ways
    }
    listed = [
        CardScore(
            each.name, each.value, each.signature, f"Tatoeba {way}, {len(tests[way][0]):,} pairs"
        )
        for way in ways
        for each in scores[way]
    ]
    card = Card(
        title="The built-in model: German, English, French",
        scores=tuple(listed),
        limits=LIMITS,
        license=LICENSE,
    )
    text = write_card(
        card, bundle.config, parameters=bundle.parameters, calibration=calibration
    ).replace('Translator.load("this directory")', "Translator.load()")
    for title in ("Data", "Training"):
        text = _replace_section(text, title, _section(bundle.card, title))
    rows = f"\n| source | {DATA} |\n| attribution | {ATTRIBUTION} |\n| trained | {date} |"
    text = _replace_section(text, "Data", f"{_section(text, 'Data').rstrip()}{rows}\n\n")
    examples = _examples(tests, found)
    text += f"\n## Translations\n\n{_describe_examples()}\n\n{examples}"
    write_bundle(
        out,
        config=bundle.config,
        tokenizers=bundle.tokenizers,
        weights=bundle.model.state_dict(),
        card=text,
        golden=bundle.golden_inputs(),
        identifier=bundle.identifier,
        manifest_fields={
            **bundle.manifest_fields(),
            "data": DATA,
            "attribution": ATTRIBUTION,
            "license": LICENSE,
            "trained": date,
        },
        calibration=calibration,
        quantization="int8",
    )
    size = sum(each.stat().st_size for each in out.rglob("*") if each.is_file())
    print(f"{out}: {format_bytes(size)}")
    if size > MAX_BYTES:
        sys.exit(f"the built-in model must have at most {MAX_BYTES:,} bytes; found {size:,}")
    table = _score_table(scores, exact)
    facts = f"{bundle.parameters:,} parameters, {format_bytes(size)} with tokenizer and card."
    _write_page(
        page, f"{facts}\n\n{table}\n\n### Translations\n\n{_describe_examples()}\n\n{examples}"
    )


def _exact(translations: Sequence[Translation], test: TestSet) -> float:
    """Return the fraction of translations that are the reference, however spaces are encoded."""
    pairs = zip(translations, test.references, strict=True)
    return sum(one.text.split() == other.split() for one, other in pairs) / len(test.sources)


def _calibrate(
    sets: dict[Direction, TestSet],
    translate: Callable[[list[str], Direction], list[Translation]],
) -> ConfidenceMap | None:
    """Return the calibrated confidence on the validation sets of all directions."""
    tokens, chrf, sources = list[TranslationTokens](), list[float](), list[str]()
    for way, (given, references) in sets.items():
        found = translate(given, way)
        tokens += [
            TranslationTokens(each.tokens, each.log_probs, each.src_tokens) for each in found
        ]
        chrf += sentence_chrf([each.text for each in found], references)
        sources += given
    return fit_confidence(tokens, chrf, sources)


def _score_table(
    scores: dict[Direction, EvaluationScores],
    exact: dict[Direction, float],
) -> str:
    """Return a Markdown table with a row for each direction, and the signatures."""
    lines = [
        "| direction | BLEU | chrF2 | dates and numbers |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {way} | {found.bleu.value:.1f} | {found.chrf.value:.1f} | {100 * exact[way]:.1f} % |"
        for way, found in scores.items()
    ]
    first = next(iter(scores.values()))
    lines += ["", f"Signatures: `{first.bleu.signature}` and `{first.chrf.signature}`."]
    return "\n".join(lines)


def _describe_examples() -> str:
    return f"{SHOWN} sentences of each test set, drawn with seed {SEED}, good or bad:"


def _examples(tests: dict[Direction, TestSet], found: dict[Direction, list[Translation]]) -> str:
    """Return tables of source, reference and translation."""
    parts = []
    for way, test in tests.items():
        rows = sorted(random.Random(SEED).sample(range(len(test.sources)), SHOWN))
        lines = [f"| {way}: source | reference | translation |", "| --- | --- | --- |"]
        lines += [
            f"| {_cell(test.sources[at])} | {_cell(test.references[at])} "
            f"| {_cell(found[way][at].text)} |"
            for at in rows
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    """Return a text for a table; no-break spaces become plain ones."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def _section(card: str, title: str) -> str:
    """Return a section of a card with its title; empty if it has none."""
    found = re.search(rf"^## {title}\n.*?(?=^## |\Z)", card, re.DOTALL | re.MULTILINE)
    return found[0] if found else ""


def _replace_section(card: str, title: str, section: str) -> str:
    return card.replace(_section(card, title), section) if section else card


def _write_page(page: Path, part: str) -> None:
    """Replace the generated part of the page."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{page} must have lines {BEGIN!r} and {END!r}; found one or neither; add them")
    page.write_text(f"{before}{BEGIN}\n\n{part}\n{END}{after}", encoding="utf-8", newline="\n")


def main() -> None:
    """Read the arguments and write the model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the trained model")
    parser.add_argument("--corpus", type=Path, required=True, help="what box_corpus.py wrote")
    parser.add_argument("--out", type=Path, default=BOX, help="directory of the built-in model")
    parser.add_argument("--page", type=Path, default=PAGE, help="page with the generated part")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--date", default=datetime.date.today().isoformat(), help="day of the training"
    )
    chosen = parser.parse_args()
    try:
        write_box(
            chosen.model,
            chosen.corpus,
            out=chosen.out,
            page=chosen.page,
            device=chosen.device,
            date=chosen.date,
        )
    except DragomanError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
