"""Score a couplet model: perplexity per character, and second lines with and without constraints.

    python bench/couplets.py my-couplets --src test.first.xz --ref test.second.xz
    python bench/couplets.py my-couplets --src test.first.xz --ref test.second.xz --show 20

Perplexity is of the references, unconstrained: a good second line may break a rule. Second lines
are searched twice for the first `--lines` lines, freely and under equal length, mirrored
characters, none copied and punctuation in place. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

from dragoman import Translator
from dragoman.evaluate.couplet_metrics import (
    COUPLET_CONSTRAINTS,
    perplexity_per_character,
    score_couplets,
)
from dragoman.evaluate.translation_metrics import check_aligned, read_sentences

COLUMNS = 80


def measure(
    translator: Translator, first: list[str], second: list[str], **options: Any
) -> tuple[dict[str, Any], list[str]]:
    """Translate first lines and score the second lines; return the scores and the lines."""
    began = time.monotonic()
    outputs = translator.translate(first, **options)
    seconds = time.monotonic() - began
    scores = score_couplets(first, outputs, second).to_dict()
    return {**scores, "seconds": round(seconds, 2)}, outputs


def text_width(text: str) -> int:
    """Return the columns that a text takes in a terminal: two for a Chinese character."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def pad(text: str, columns: int) -> str:
    """Cut or pad a text to some columns."""
    kept = text
    while text_width(kept) > columns:
        kept = kept[:-1] if kept == text else kept[:-2]
        kept += "…"
    return kept + " " * (columns - text_width(kept))


def main() -> None:
    """Score one model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model directory")
    parser.add_argument("--src", type=Path, required=True, help="first lines")
    parser.add_argument("--ref", type=Path, required=True, help="second lines")
    parser.add_argument("--lines", type=int, default=1000, help="lines to answer")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--show", type=int, default=0, help="couplets to print")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    first, second = read_sentences(arguments.src), read_sentences(arguments.ref)
    check_aligned(first, second)
    translator = Translator.load(arguments.model, device=arguments.device)
    log_probs = [each.log_prob for each in translator.score(first, second)]
    perplexity = perplexity_per_character(log_probs, second)
    first, second = first[: arguments.lines], second[: arguments.lines]
    free, _ = measure(translator, first, second, beam=arguments.beam)
    constrained, lines = measure(
        translator, first, second, beam=arguments.beam, constraints=COUPLET_CONSTRAINTS
    )
    column = (COLUMNS - 2) // 2
    for one, other in zip(first[: arguments.show], lines, strict=False):
        print(f"{pad(one, column)}  {pad(other, column)}".rstrip())
    print(f"perplexity per character {perplexity:.2f} ({len(log_probs):,} pairs, unconstrained)")
    for name, row in (("free", free), ("constrained", constrained)):
        broken = ", ".join(f"{each} {count}" for each, count in row["violations"].items())
        print(
            f"{name}: equal length {100 * row['equal_length']:.1f} %, "
            f"BLEU {row['bleu']['score']:.2f}, {row['lines']} lines in {row['seconds']:.1f} s"
        )
        print(f"  lines that violate {broken}")
    report = {"perplexity": perplexity, "free": free, "constrained": constrained}
    print(json.dumps({"bench": "couplets", "model": arguments.model, **report}))
    if constrained["any_violation"]:
        sys.exit(f"{constrained['any_violation']} constrained lines violate a constraint")


if __name__ == "__main__":
    main()
