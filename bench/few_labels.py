"""Train classifiers on few labelled texts, as a user with one small file does, beside NB-SVM.

    python bench/few_labels.py --train sst2/train.jsonl.xz --test sst2/dev.jsonl.xz \
        --sizes 300 1500 --seeds 1 2 --variant "" --variant "--set train.final_checkpoint=best"

Every seed draws other texts of the training file. A variant is the options of one `dragoman train`
without a validation file, which therefore holds out a tenth of the texts; --valid N gives it N
further texts instead. NB-SVM (bench/nb_svm.py) trains on all texts.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nb_svm import read_examples

import dragoman
from dragoman.evaluate.nb_svm import NBSVM

Examples = list[tuple[str, str]]


def accuracy(predicted: list[str], examples: Examples) -> float:
    """Return the percentage of right labels."""
    right = sum(label == found for (_, label), found in zip(examples, predicted, strict=True))
    return 100 * right / len(examples)


def train(folder: Path, examples: Examples, valid: Examples, variant: str, seed: int) -> Path:
    """Train a classifier with the command line, and return its directory."""
    options = shlex.split(variant)
    for name, part in (("train", examples), ("valid", valid)):
        if part:
            path = folder / f"{name}.jsonl"
            lines = [json.dumps({"text": text, "label": label}) for text, label in part]
            path.write_text("".join(f"{line}\n" for line in lines))
            options += [f"--{name}", str(path)]
    out = folder / "model"
    command = [sys.executable, "-m", "dragoman", "train", "--task", "classify", "--out", str(out)]
    subprocess.run(
        [*command, *options, "--set", f"train.seed={seed}"], check=True, capture_output=True
    )
    return out


def main() -> None:
    """Print a row for each size and variant, and a line of JSON for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--test", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--label-field", default="label")
    parser.add_argument("--sizes", type=int, nargs="+", default=[300, 1500])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--valid", type=int, default=0, help="further texts, for validation")
    parser.add_argument("--test-texts", type=int, default=1000, help="the first of the test file")
    parser.add_argument("--variant", action="append", help="options of dragoman train")
    options = parser.parse_args()
    pool: Examples = list(read_examples(options.train, "text", options.label_field))
    test: Examples = list(read_examples(options.test, "text", options.label_field))
    test = test[: options.test_texts]
    texts = [text for text, _ in test]
    for size in options.sizes:
        found: dict[str, list[float]] = {}
        seconds: dict[str, list[float]] = {}
        for seed in options.seeds:
            drawn = random.Random(seed).sample(pool, size + options.valid)
            examples, valid = drawn[:size], drawn[size:]
            reference = NBSVM().fit(*zip(*examples, strict=True))
            found.setdefault("NB-SVM", []).append(accuracy(reference.predict(texts), test))
            for variant in options.variant or [""]:
                started = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    model = dragoman.load(train(Path(folder), examples, valid, variant, seed))
                    labels = [each.label for each in model.predict(texts)]
                seconds.setdefault(variant, []).append(time.monotonic() - started)
                found.setdefault(variant, []).append(accuracy(labels, test))
                row = {"bench": "few_labels", "size": size, "seed": seed, "variant": variant}
                print(json.dumps(row | {"accuracy": found[variant][-1]}), flush=True)
        for name, values in found.items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            took = f"  {statistics.mean(seconds[name]):.0f} s" if name in seconds else ""
            print(
                f"{size:,} texts  {statistics.mean(values):5.1f} ± {spread:.1f}{took}  "
                f"{name or 'dragoman train --task classify'}"
            )


if __name__ == "__main__":
    main()
