"""Train the miniature of every recipe on a toy task and count exact translations.

    python bench/mini_recipes.py --jobs 16                                           all recipes
    python bench/mini_recipes.py --jobs 2 --form spaced --only luong2015_dot wu2016  some of them

The task: 8,000 pairs of random strings of 3 to 8 letters and their reversals (copies, for monotonic
attention). In the form "spaced" the letters are separated by spaces. Each run is that of `dragoman
train --recipe NAME --mini` on one thread; then 500 unseen strings are translated. There is no peer:
the result is the fraction of recipes that reach the target.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from dragoman.recipes.catalogue import recipes_of

PAIRS, UNSEEN, SHORTEST, LONGEST = 8000, 500, 3, 8
TARGET_EXACT = 0.9
FORMS = {"plain": "", "spaced": " "}  # separator of letters


def random_strings(count: int, seed: int) -> list[str]:
    """Return distinct random strings of letters."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found["".join(draw.choices(string.ascii_lowercase, k=draw.randint(SHORTEST, LONGEST)))] = (
            None
        )
    return list(found)


def train_one(
    name: str, form: str, *, seed: int = 1, settings: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Train one miniature and translate unseen strings; return its row."""
    import torch

    torch.set_num_threads(1)
    from dragoman import Translator
    from dragoman.config import read_config
    from dragoman.recipes.recipe_miniature import mini
    from dragoman.runs.training_run import train

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="miniatures-") as folder:
        work = Path(folder)
        overrides = [
            f"data.src={work / 'src'}",
            f"data.tgt={work / 'tgt'}",
            f"data.cache_dir={work / 'cache'}",
            f"train.seed={seed}",
        ]
        config = read_config(
            recipe=name,
            overrides=[*overrides, "train.device=cpu", "train.threads=1", *settings],
            scale=mini,
        )
        forward = any("monotonic" in block or "mocha" in block for block in config.model.decoder)
        every = random_strings(PAIRS + UNSEEN, seed)
        src = [FORMS[form].join(each) for each in every]
        tgt = [FORMS[form].join(each if forward else each[::-1]) for each in every]
        for side, lines in (("src", src), ("tgt", tgt)):
            (work / side).write_text(
                "".join(f"{line}\n" for line in lines[:PAIRS]), encoding="utf-8"
            )
        out = train(config, work / "model")
        seconds = time.monotonic() - began
        outputs = Translator.load(out, device="cpu").translate(src[PAIRS:])
        steps = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["steps"]
    exact = sum(one == other for one, other in zip(outputs, tgt[PAIRS:], strict=True)) / UNSEEN
    return {
        "recipe": name,
        "form": form,
        "task": "copy" if forward else "reverse",
        "steps": steps,
        "seconds": round(seconds, 1),
        "exact": exact,
    }


def main() -> None:
    """Train the selected miniatures, several at a time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="single-threaded processes")
    parser.add_argument("--form", choices=[*FORMS, "both"], default="both")
    parser.add_argument("--only", nargs="*", default=None, metavar="RECIPE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="SETTING=VALUE"
    )
    arguments = parser.parse_args()
    names = arguments.only or list(recipes_of("translate"))
    forms = list(FORMS) if arguments.form == "both" else [arguments.form]
    rows: list[dict[str, Any]] = []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(arguments.jobs) as pool:
        waiting = {
            pool.submit(
                train_one, name, form, seed=arguments.seed, settings=tuple(arguments.settings)
            ): (name, form)
            for name in names
            for form in forms
        }
        for done in as_completed(waiting):
            name, form = waiting[done]
            error = done.exception()
            row = (
                {"recipe": name, "form": form, "error": f"{type(error).__name__}: {error}"}
                if error
                else done.result()
            )
            rows.append(row)
            print(json.dumps({"bench": "miniatures", "seed": arguments.seed, **row}), flush=True)
    print(table(rows))
    failed = [row for row in rows if row.get("exact", 0.0) < TARGET_EXACT]
    print(f"{len(rows) - len(failed)} of {len(rows)} reach {TARGET_EXACT:.0%}")
    sys.exit(1 if failed else 0)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, worst first."""
    lines = [
        "| recipe | form | task | steps | seconds | exact |",
        "| --- | --- | --- | --: | --: | --: |",
    ]
    for row in sorted(rows, key=lambda row: (row.get("exact", -1.0), row["recipe"], row["form"])):
        cells = (
            row.get("error")
            or f"{row['task']} | {row['steps']:,} | {row['seconds']:.0f} | "
            f"{100 * row['exact']:.1f} %"
        )
        lines.append(f"| {row['recipe']} | {row['form']} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
