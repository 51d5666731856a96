"""Measure how often a translator copies words unseen in training: names, numbers, addresses.

    python bench/unseen_names.py MODEL --from de --to en
    python bench/unseen_names.py MODEL --from de --to en --training train.de    drops names in it

Each of --count invented words of a kind stands in simple sentences of the source language. A word
counts as copied if the output has it verbatim, as close if the output has a word at most two edits
away from it; everything else is another word or none. Common names are for comparison. The mean
confidence is printed where the model has one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dragoman import Translator

SENTENCES = {
    "de": ["Kennst du {}?", "{} wohnt in Berlin.", "Ich habe gestern {} gesehen."],
    "en": ["Do you know {}?", "{} lives in Berlin.", "I saw {} yesterday."],
    "fr": ["Connais-tu {} ?", "{} habite à Berlin.", "J'ai vu {} hier."],
}
SYLLABLES = ["bra", "kel", "mor", "sti", "vun", "dra", "fip", "lor", "gan", "tez", "wim", "osk"]
SLAVIC = ["Łu", "żó", "śmi", "ęk", "ček", "ří", "ňov", "źdź"]
CYRILLIC = ["Бра", "кел", "мор", "сти", "вун", "дра", "лор", "ган"]


def draw_latin(draw: random.Random) -> str:
    """Return a name in letters that every vocabulary has."""
    return "".join(draw.choices(SYLLABLES, k=3)).capitalize()


def draw_slavic(draw: random.Random) -> str:
    """Return a name with Polish and Czech letters."""
    return "".join(draw.choices(SLAVIC, k=3)).capitalize()


def draw_cyrillic(draw: random.Random) -> str:
    """Return a name in another script."""
    return "".join(draw.choices(CYRILLIC, k=2)).capitalize()


def draw_number(draw: random.Random) -> str:
    """Return a number of five to seven digits."""
    return str(draw.randrange(10**4, 10**7))


def draw_address(draw: random.Random) -> str:
    """Return an address of electronic mail."""
    user, host = (draw_latin(draw).lower() for _ in range(2))
    return f"{user}{draw.randrange(100)}@{host}.org"


def draw_common(draw: random.Random) -> str:
    """Return a name that is the same in all three languages, and in most corpora."""
    return draw.choice(["Tom", "Boston", "Paris", "Peter", "Anna", "David", "Berlin", "Robert"])


KINDS: dict[str, Callable[[random.Random], str]] = {
    "common names": draw_common,
    "Latin letters": draw_latin,
    "Polish and Czech letters": draw_slavic,
    "Cyrillic": draw_cyrillic,
    "numbers": draw_number,
    "addresses": draw_address,
}


def main() -> None:
    """Print the fractions of every kind and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--from", dest="source", choices=list(SENTENCES), default="de")
    parser.add_argument("--to", dest="target", help="target language of a multilingual model")
    parser.add_argument("--count", type=int, default=40, help="words of each kind")
    parser.add_argument("--training", type=Path, help="text whose words are not unseen")
    options = parser.parse_args()
    seen = set(options.training.read_text("utf-8").split()) if options.training else set()
    translator = Translator.load(options.model)
    languages = {}
    if options.target:
        languages = {"source_language": options.source, "target_language": options.target}
    rows = {}
    for kind, draw_word in KINDS.items():
        draw = random.Random(1)
        words = sorted({draw_word(draw) for _ in range(options.count)} - seen)
        cases = [(word, form.format(word)) for word in words for form in SENTENCES[options.source]]
        found = list(translator.stream([text for _, text in cases], **languages))
        outputs = [each.text for each in found]
        confidences = [each.confidence for each in found if each.confidence is not None]
        distances = [
            min((edit_distance(word, each) for each in candidates(output)), default=len(word))
            if word not in output
            else 0
            for (word, _), output in zip(cases, outputs, strict=True)
        ]
        rows[kind] = {
            "sentences": len(cases),
            "copied": sum(distance == 0 for distance in distances) / len(cases),
            "close": sum(0 < distance <= 2 for distance in distances) / len(cases),
            "confidence": statistics.mean(confidences) if confidences else math.nan,
        }
        print(
            f"  {kind:26s} {rows[kind]['copied']:6.1%} copied  {rows[kind]['close']:6.1%} close  "
            f"confidence {rows[kind]['confidence']:.2f}  of {len(cases)}; "
            f"{cases[0][1]} -> {outputs[0]}",
            flush=True,
        )
    languages |= {"source_language": options.source}
    print(json.dumps({"bench": "unseen_names", "rows": rows} | languages))


def candidates(output: str) -> list[str]:
    """Return the words of an output without the marks around them."""
    return [word.strip(".,?!:;'\"") for word in output.split()]


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance."""
    row = list(range(len(other) + 1))
    for number, char in enumerate(one, 1):
        previous, row[0] = row[0], number
        for column, against in enumerate(other, 1):
            previous, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, previous + (char != against)),
            )
    return row[-1]


if __name__ == "__main__":
    main()
