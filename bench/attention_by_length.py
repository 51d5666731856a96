"""BLEU by source length of models without attention, with fixed weights and with attention.

Multi30k German-English, where one to four sentence pairs are joined to one, for training as for
testing: single captions are too short to study length. The systems:

    none       LSTM 2 x 512, source reversed, the decoder starts with the encoder's final states
    fixed      bidirectional GRU 512, trained weights of the positions instead of attention
    attention  bidirectional GRU 512 with additive attention (Bahdanau et al. 2015)

    python bench/attention_by_length.py --data DIR --out DIR --seconds 150

A gap is BLEU with attention minus BLEU of another system in a bucket of source lengths. Intervals
are 95 % paired bootstrap: all systems are scored on the same resampled sentences.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU

from dragoman.config import Config
from dragoman.evaluate.translation_metrics import read_sentences
from dragoman.inference import Translator
from dragoman.recipes.rnn import bahdanau2015, sutskever2014
from dragoman.runs.training_run import train

JOINED = (1, 2, 3, 4)  # pairs in an example
BUCKETS = ((1, 14), (15, 29), (30, 44), (45, 1000))  # words of the source
Pair = tuple[str, str]


def read_pairs(data: Path, part: str, limit: int) -> list[Pair]:
    """Return the sentence pairs of a part of Multi30k, or the first `limit` if it is not 0."""
    sides = [read_sentences(data / f"{part}.{language}.xz") for language in ("de", "en")]
    return list(zip(*sides, strict=True))[: limit or None]


def join_pairs(pairs: Sequence[Pair], count: int, generator: random.Random) -> list[Pair]:
    """Return examples of `count` pairs each, as many as there are without repetition."""
    order = list(pairs)
    generator.shuffle(order)
    groups = [order[start : start + count] for start in range(0, len(order) - count + 1, count)]
    return [
        (" ".join(src for src, _ in group), " ".join(tgt for _, tgt in group)) for group in groups
    ]


def write_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    """Write two aligned files."""
    for side, language in enumerate(("de", "en")):
        lines = "".join(f"{pair[side]}\n" for pair in pairs)
        path.with_suffix(f".{language}").write_text(lines, encoding="utf-8")


def systems(width: int) -> dict[str, Config]:
    """Return the models, each at one width; `fixed` differs from `attention` in its score only."""
    decoder = (
        "gru(attention={}, decoder=bahdanau, initial_state=last_backward, "
        "residual_connection=false)"
    )
    layers = "layers=2, residual_connection=false"
    none = sutskever2014().replace(
        model={
            "encoder": (f"lstm({layers}, reverse=true)",),
            "decoder": (f"lstm({layers}, initial_state=encoder)",),
        }
    )
    found = {
        "none": none,
        "fixed": bahdanau2015().replace(model={"decoder": (decoder.format("fixed"),)}),
        "attention": bahdanau2015().replace(model={"decoder": (decoder.format("additive"),)}),
    }
    return {name: config.replace(model={"width": width}) for name, config in found.items()}


def train_system(
    config: Config, out: Path, folder: Path, arguments: argparse.Namespace
) -> Translator:
    """Train a system with the setup that all have, and load it."""
    config = config.replace(
        text={"tokenizer": "bpe", "vocab_size": arguments.vocab_size, "shared_vocab": True},
        data={
            "src": (str(folder / "train.de"),),
            "tgt": (str(folder / "train.en"),),
            "valid_src": (str(folder / "valid.de"),),
            "valid_tgt": (str(folder / "valid.en"),),
            "src_lang": "de",
            "tgt_lang": "en",
            "cache_dir": str(folder / "prepared"),
            "max_length": 250,
        },
        model={"dropout": 0.3},
        train={
            "steps": arguments.steps,
            "time_budget": float(arguments.seconds),
            "batch_tokens": arguments.batch_tokens,
            "learning_rate": 1e-3,
            "schedule": "wsd",
            "cooldown_fraction": 0.3,
            "warmup_steps": 200,
            "max_grad_norm": 1.0,
            "label_smoothing": 0.1,
            "validate_every": max(1, arguments.steps // 10),
            "validate_sentences": 0,
            "checkpoint_every": max(1, arguments.steps // 2),
            "keep_checkpoints": 1,
            "device": arguments.device,
            "seed": arguments.seed,
        },
        decode={"beam": 4, "length_penalty": 1.0},
    )
    train(config, out)
    return Translator.load(out, device=arguments.device)


class SentenceStatistics:
    """BLEU's counts by sentence, which sum to the corpus score of any selection."""

    def __init__(self, hypotheses: Sequence[str], references: Sequence[str]) -> None:
        self._bleu = BLEU()
        found = self._bleu._extract_corpus_statistics(list(hypotheses), [list(references)])
        self._counts = np.array(found, dtype=np.float64)

    def score(self, sentences: NDArray[np.integer]) -> float:
        """Return the BLEU of some sentences, with repetitions."""
        counts = self._counts[sentences].sum(axis=0)
        return float(self._bleu._compute_score_from_stats(counts.astype(int).tolist()).score)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of 95 % of some values."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def compare(
    statistics: dict[str, SentenceStatistics], lengths: NDArray[np.integer], samples: int, seed: int
) -> dict[str, Any]:
    """Return BLEU and gaps by bucket, and how much the gap grows from the first to the last."""
    generator = np.random.default_rng(seed)
    buckets = [
        np.flatnonzero((lengths >= shortest) & (lengths <= longest))
        for shortest, longest in BUCKETS
    ]
    drawn = [[generator.choice(bucket, len(bucket)) for _ in range(samples)] for bucket in buckets]
    scores = {
        name: [
            [each.score(bucket), *map(each.score, resamples)]
            for bucket, resamples in zip(buckets, drawn, strict=True)
        ]
        for name, each in statistics.items()
    }  # by bucket: the score, then that of each resample
    report: dict[str, Any] = {
        "sentences": [len(bucket) for bucket in buckets],
        "bleu": {name: [round(row[0], 2) for row in rows] for name, rows in scores.items()},
    }
    for name in statistics:
        if name == "attention":
            continue
        gaps = np.array(scores["attention"]) - np.array(scores[name])  # (buckets, 1 + samples)
        growth = gaps[-1] - gaps[0]
        report[f"gap to {name}"] = [
            {"gap": round(row[0], 2), "interval": interval(row[1:])} for row in gaps
        ]
        report[f"growth of the gap to {name}"] = {
            "points": round(float(growth[0]), 2),
            "interval": interval(growth[1:]),
        }
    return report


def print_report(report: dict[str, Any], systems: Sequence[str]) -> None:
    """Print the table of a report."""
    print(f"{'source words':>14} {'sentences':>10}" + "".join(f"{name:>12}" for name in systems))
    for number, (shortest, longest) in enumerate(BUCKETS):
        label = f"{shortest}+" if number + 1 == len(BUCKETS) else f"{shortest}-{longest}"
        row = "".join(f"{report['bleu'][name][number]:12.1f}" for name in systems)
        print(f"{label:>14} {report['sentences'][number]:10}{row}")
    for name in systems:
        if name == "attention":
            continue
        for number, found in enumerate(report[f"gap to {name}"]):
            low, high = found["interval"]
            print(f"gap to {name}, bucket {number}: {found['gap']:.1f} [{low:.1f}, {high:.1f}]")
        found = report[f"growth of the gap to {name}"]
        low, high = found["interval"]
        print(f"the gap to {name} grows by {found['points']:.1f} BLEU [{low:.1f}, {high:.1f}]")


def main() -> None:
    """Train the systems, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="Multi30k: train.de.xz and others")
    parser.add_argument("--out", type=Path, required=True, help="directory of the models")
    parser.add_argument("--seconds", type=float, default=150.0, help="time budget of a training")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch-tokens", type=int, default=16_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=5500)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=1000, help="bootstrap resamples")
    parser.add_argument("--systems", nargs="+", default=["none", "fixed", "attention"])
    parser.add_argument("--limit", type=int, default=0, help="pairs of each part, to try it out")
    arguments = parser.parse_args()
    folder = arguments.out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)  # the data do not depend on the seed of the training
    pairs = read_pairs(arguments.data, "train", arguments.limit)
    # As many tokens of each kind: an example of four pairs is four times as long as one.
    write_pairs(
        folder / "train",
        [pair for count in JOINED for pair in join_pairs(pairs, count, generator)],
    )
    valid = read_pairs(arguments.data, "dev", arguments.limit)
    write_pairs(
        folder / "valid",
        [pair for count in JOINED for pair in join_pairs(valid, count, generator)],
    )
    test = [
        pair
        for part in ("test_2016_flickr", "test_2017_flickr")
        for count in JOINED
        for pair in join_pairs(read_pairs(arguments.data, part, arguments.limit), count, generator)
    ]
    sources, references = [src for src, _ in test], [tgt for _, tgt in test]
    lengths = np.array([len(src.split()) for src in sources])
    built = systems(arguments.width)
    statistics = {}
    for name in arguments.systems:
        out = arguments.out / name
        translator = (
            Translator.load(out, device=arguments.device)
            if (out / "manifest.json").exists()
            else train_system(built[name], out, folder, arguments)
        )
        hypotheses = translator.translate(sources)
        (out / "training" / "by_length.txt").write_text(
            "".join(f"{line}\n" for line in hypotheses), encoding="utf-8"
        )
        statistics[name] = SentenceStatistics(hypotheses, references)
        print(f"{name}: {statistics[name].score(np.arange(len(sources))):.1f} BLEU in all")
    report = compare(statistics, lengths, arguments.samples, arguments.seed)
    print_report(report, arguments.systems)
    signature = {"seconds": arguments.seconds, "width": arguments.width, "seed": arguments.seed}
    print(json.dumps({"bench": "attention_by_length", **report, **signature}))


if __name__ == "__main__":
    main()
