"""Train NB-SVM (Wang and Manning, 2012) and print its test accuracy: the reference of a classifier.

    python bench/nb_svm.py --train imdb/train.jsonl.xz imdb/dev.jsonl.xz --test imdb/test.jsonl.xz
    python bench/nb_svm.py --train train.jsonl --test test.jsonl --label-field coarse

The paper has 91.22 on IMDB with unigrams and bigrams. Accuracy is also printed without the test
texts that occur in the training text (letters and digits compared).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dragoman.data.compressed_input_streams import FileStream
from dragoman.data.corpus_checks import overlap_key
from dragoman.evaluate.nb_svm import COST, INTERPOLATION, NBSVM, SMOOTHING


def read_examples(paths: Sequence[Path], text_field: str, label_field: str) -> Iterator[Any]:
    """Yield the text and the label of each JSON line."""
    for path in paths:
        content = b"".join(FileStream(path).chunks()).decode()
        for line in filter(None, content.split("\n")):
            record = json.loads(line)
            yield record[text_field], str(record[label_field])


def main() -> None:
    """Train, predict and print one row and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--test", type=Path, nargs="+", required=True, help="JSONL files")
    parser.add_argument("--text-field", default="text")
    parser.add_argument("--label-field", default="label")
    parser.add_argument("--cost", type=float, default=COST)
    parser.add_argument("--interpolation", type=float, default=INTERPOLATION)
    options = parser.parse_args()
    texts, labels = zip(
        *read_examples(options.train, options.text_field, options.label_field), strict=True
    )
    test_texts, test_labels = zip(
        *read_examples(options.test, options.text_field, options.label_field), strict=True
    )
    started = time.monotonic()
    model = NBSVM(cost=options.cost, interpolation=options.interpolation).fit(texts, labels)
    trained = time.monotonic()
    predicted = model.predict(test_texts)
    seen = {overlap_key(text) for text in texts}
    right = [found == label for found, label in zip(predicted, test_labels, strict=True)]
    unseen = [
        each for each, text in zip(right, test_texts, strict=True) if overlap_key(text) not in seen
    ]
    accuracy, on_unseen = 100 * sum(right) / len(right), 100 * sum(unseen) / len(unseen)
    print(
        f"NB-SVM: {len(texts):,} training texts, {len(model.labels)} labels; accuracy "
        f"{accuracy:.2f} on {len(right):,} test texts, {on_unseen:.2f} on the {len(unseen):,} that "
        f"are not in the training text; {trained - started:.0f} s to train"
    )
    print(
        json.dumps(
            {
                "bench": "nb_svm",
                "accuracy": accuracy,
                "accuracy_unseen": on_unseen,
                "test": len(right),
                "unseen": len(unseen),
                "labels": len(model.labels),
                "train_seconds": round(trained - started, 1),
                "cost": options.cost,
                "interpolation": options.interpolation,
                "smoothing": SMOOTHING,
            }
        )
    )


if __name__ == "__main__":
    main()
