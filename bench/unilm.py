"""Compare a prefix LM (UniLM) with an encoder-decoder on Multi30k German-English.

    python bench/unilm.py --data DIR --work /tmp/unilm                   train what is missing
    python bench/unilm.py --data DIR --work /tmp/unilm --seeds 2         one seed a call
    python bench/unilm.py --data DIR --work /tmp/unilm --jobs 6          all at once on one GPU
    python bench/unilm.py --work /tmp/unilm --table                      print the table

DIR has multi30k/. Both models have the width, vocabulary, optimizer, schedule, dropout and decoding
of architectures.py, as many weights outside the embeddings to 4 %, and the same training time. With
--jobs models share the GPU, each in its own process; the time is equal if all start together, so
give as many jobs as there are models. 4 + 4 layers against 9 layers without cross-attention.
Checkpoints are chosen by validation loss; both test sets are translated once, at the end.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from architecture_configs import TRANSLATION, Architecture, scale_recipe
from architectures import read, read_rows, slug, train_architecture

from dragoman.registry import catalogue

TESTS = ("test_2016_flickr", "test_2017_flickr")
RECIPES = {"encoder-decoder": "small", "prefix LM": "dong2019"}


def architectures() -> list[Architecture]:
    """Return both models."""
    recipes = catalogue("recipe")
    return [
        Architecture(name, "UniLM", scale_recipe(recipes.load(recipe)()))
        for name, recipe in RECIPES.items()
    ]


def unpack(data: Path, work: Path) -> None:
    """Write Multi30k as text files."""
    out = work / TRANSLATION.folder
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev", *TESTS):
        for side in TRANSLATION.sides:
            packed = data / TRANSLATION.folder / f"{split}.{side}.xz"
            if not (plain := out / f"{split}.{side}").exists():
                plain.write_bytes(lzma.decompress(packed.read_bytes()))


def run(architecture: Architecture, seed: int, seconds: float, work: Path) -> dict[str, Any]:
    """Train one model and score both tests."""
    import sacrebleu

    from dragoman.inference import Translator

    row = train_architecture(architecture, seed=seed, seconds=seconds, work=work)
    translator = Translator.load(work / "models" / f"{slug(architecture.name)}-{seed}" / "model")
    model, data = translator.model, work / TRANSLATION.folder
    tables = sum(weight.numel() for weight in model.embeddings.parameters())
    row["non_embedding"] = row["parameters"] - tables
    for test in TESTS:
        source, reference = (read(data / f"{test}.{side}") for side in TRANSLATION.sides)
        row[test] = round(sacrebleu.corpus_bleu(translator.translate(source), [reference]).score, 2)
    return {"name": architecture.name, "seed": seed, "budget": seconds, **row}


def run_process(name: str, seed: int, options: argparse.Namespace) -> None:
    """Train and score one model in a process of its own, which appends its row to the file."""
    command = [sys.executable, __file__, "--data", str(options.data), "--work", str(options.work)]
    command += ["--seconds", str(options.seconds), "--seeds", str(seed), "--only", name]
    subprocess.run(command, check=True)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows as a Markdown table with means, and their difference."""
    yield "| model | weights without embeddings | steps | tokens/s | 2016 | 2017 | seeds |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    means: dict[str, list[float]] = {}
    for name in RECIPES:
        own = [row for row in rows if row["name"] == name]
        if not own:
            continue
        means[name] = [statistics.mean(row[test] for row in own) for test in TESTS]
        spread = [statistics.stdev(row[test] for row in own) if own[1:] else 0.0 for test in TESTS]
        cells = [f"{mean:.2f} ± {each:.2f}" for mean, each in zip(means[name], spread, strict=True)]
        yield (
            f"| {name} | {own[0]['non_embedding']:,} | "
            f"{statistics.mean(row['steps'] for row in own):,.0f} | "
            f"{statistics.mean(row['tokens_a_second'] for row in own):,.0f} | "
            f"{' | '.join(cells)} | {len(own)} |"
        )
    if len(means) == len(RECIPES):
        gaps = [one - two for one, two in zip(*means.values(), strict=True)]
        yield ""
        yield f"the prefix LM is behind by {gaps[0]:.2f} and {gaps[1]:.2f} BLEU"


def main() -> None:
    """Train what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="directory with multi30k/")
    parser.add_argument("--work", type=Path, required=True, help="working directory")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of a model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=sorted(RECIPES), help="one of the models")
    parser.add_argument("--jobs", type=int, default=1, help="models at the same time")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    file = options.work / "rows.jsonl"
    if not options.table:
        if options.data is None:
            parser.error("--data is needed to train")
        unpack(options.data, options.work)
        done = {(row["name"], row["seed"]) for row in read_rows(file)}
        missing = [
            (architecture, seed)
            for seed in options.seeds
            for architecture in architectures()
            if (architecture.name, seed) not in done and options.only in (None, architecture.name)
        ]
        if options.jobs > 1:
            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(lambda one: run_process(one[0].name, one[1], options), missing))
            missing = []
        for architecture, seed in missing:
            row = run(architecture, seed, options.seconds, options.work)
            with file.open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    print("\n".join(table(read_rows(file))))


if __name__ == "__main__":
    main()
