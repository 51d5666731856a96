"""Scores of translations for bench/quality.py: metrics, paired bootstrap over seeds, confidence."""

from __future__ import annotations

import functools
import json
import lzma
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.quality_rows import (  # noqa: E402
    CORPORA,
    DEV,
    CorpusFiles,
    QualityRow,
    QualityRun,
    find_row,
)

SAMPLES, BOOTSTRAP_SEED = 1000, 12345  # sacreBLEU's defaults


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, plain or .xz."""
    content = path.read_bytes()
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    return text.split("\n")[:-1]


@functools.cache
def moses_tokenizer(language: str) -> Any:
    """Return a function that tokenises as task1-tokenize.sh of the Multi30k repository does."""
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer, tokenizer = MosesPunctNormalizer(language), MosesTokenizer(language)

    def tokenize(line: str) -> str:
        return tokenizer.tokenize(normalizer.normalize(line.lower()), return_str=True)

    return tokenize


def has_moses() -> bool:
    """Whether sacremoses is installed."""
    try:
        import sacremoses  # noqa: F401
    except ImportError:
        return False
    return True


class Metric(NamedTuple):
    """A corpus score with its preparation of text."""

    name: str
    metric: Any  # of sacreBLEU
    tokenized: bool = False

    def statistics(self, lines: list[str], references: list[str], language: str) -> Any:
        """Return the sufficient statistics of each sentence (N, statistics)."""
        if self.tokenized:
            tokenize = moses_tokenizer(language)
            lines, references = [[tokenize(x) for x in side] for side in (lines, references)]
        found = self.metric._extract_corpus_statistics(lines, [references])
        return np.array(found, dtype=np.float64)

    def score(self, statistics: Any) -> float:
        """Return the score of summed statistics."""
        return float(self.metric._compute_score_from_stats(list(statistics)).score)


@functools.cache
def metrics_of(corpus: CorpusFiles) -> list[Metric]:
    """Return BLEU and chrF of sacreBLEU and, for Multi30k, BLEU of lower-cased tokens."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    found = [
        Metric("BLEU", BLEU(tokenize="zh" if corpus.target == "zh" else "13a")),
        Metric("chrF", CHRF()),
    ]
    if corpus.is_multi30k and has_moses():
        found.insert(1, Metric("tokenised", BLEU(tokenize="none", force=True), tokenized=True))
    return found


def bootstrap(
    metric: Metric, systems: Sequence[Any], baselines: Sequence[Any]
) -> tuple[float, float]:
    """Return difference and p-value of mean scores over seeds, by sacreBLEU's paired bootstrap.

    Sentences are drawn once for all seeds; with one seed each it is sacreBLEU's PairedTest.
    """
    sentences = len(systems[0])
    drawn = np.random.default_rng(BOOTSTRAP_SEED).choice(
        sentences, size=(SAMPLES, sentences), replace=True
    )
    counts = np.stack([np.bincount(each, minlength=sentences) for each in drawn]).astype(float)

    def means(each: Sequence[Any], weights: Any) -> Any:
        scores = [[metric.score(total) for total in weights @ statistics] for statistics in each]
        return np.mean(scores, axis=0)

    once = np.ones((1, sentences))
    difference = float((means(systems, once) - means(baselines, once))[0])
    sampled = np.abs(means(systems, counts) - means(baselines, counts))
    larger = int(np.sum(sampled - sampled.mean() > abs(difference)))
    return difference, (larger + 1) / (SAMPLES + 1)


class Scorer:
    """Scores the translations of finished runs."""

    def __init__(self, data: Path, out: Path) -> None:
        self._data, self._out = data, out
        self.statistics = functools.cache(self._statistics)

    def finished(self, row: QualityRow) -> list[dict[str, Any]]:
        """Return the records of a row's finished runs, by seed."""
        records = [self._out / f"{QualityRun(row, seed).key}.json" for seed in row.seeds]
        return [json.loads(path.read_text()) for path in records if path.exists()]

    def _statistics(self, row: QualityRow, part: str, metric: Metric) -> list[Any]:
        corpus = CORPORA[row.corpus]
        references = read_lines(self._data / corpus.file(part, corpus.target))
        return [
            metric.statistics(
                read_lines(self._out / f"{QualityRun(row, each['seed']).key}.{part}"),
                references,
                corpus.target,
            )
            for each in self.finished(row)
        ]

    def table(self, rows: Sequence[QualityRow]) -> dict[str, Any]:
        """Print rows with their scores; return them as JSON values."""
        results: dict[str, Any] = {}
        for row in rows:
            done = self.finished(row)
            if not done:
                continue
            corpus = CORPORA[row.corpus]
            seconds = [each["seconds"] for each in done if "seconds" in each]
            found: dict[str, Any] = {
                "about": row.about,
                "seeds": [each["seed"] for each in done],
                "jobs": sorted({each["jobs"] for each in done}),
                "seconds": seconds,
                "steps": [each.get("steps") for each in done],
                "best_step": [each.get("best_step") for each in done],
                "scores": {},
            }
            print(f"{row.name}: {row.about}, {len(done)} seeds, {mean_and_deviation(seconds)} s")
            for part in (DEV, *corpus.tests):
                for metric in metrics_of(corpus):
                    entry = self._score(row, part, metric)
                    found["scores"][f"{part} {metric.name}"] = entry
                    print(
                        f"  {part:17} {metric.name:10} {mean_and_deviation(entry['values']):>12}",
                        "  {difference:+.2f}, p = {p:.3f}, against {against}".format(**entry)
                        if "against" in entry
                        else "",
                    )
            if "confidences" in done[0]:
                found["confidence"] = {part: self._confidence(row, part) for part in corpus.tests}
                for part, each in found["confidence"].items():
                    print(f"  {part:17} " + ", ".join(f"{k} {v:.3f}" for k, v in each.items()))
            results[row.name] = found
        return results

    def _confidence(self, row: QualityRow, part: str) -> dict[str, float]:
        """Return calibration error and AUROC of confidences on a test set, as means over seeds."""
        from sacrebleu.metrics.chrf import CHRF

        from dragoman.evaluate.classification_metrics import (
            calibration_chance_error,
            expected_calibration_error,
        )
        from dragoman.evaluate.confidence_calibration import MEASURED_BINS, area_under_roc

        corpus, chrf = CORPORA[row.corpus], CHRF()
        references = read_lines(self._data / corpus.file(part, corpus.target))
        found = []
        for record in self.finished(row):
            lines = read_lines(self._out / f"{QualityRun(row, record['seed']).key}.{part}")
            scores = [
                chrf.sentence_score(line, [reference]).score
                for line, reference in zip(lines, references, strict=True)
            ]
            good = np.array(scores) >= record["calibration"]["good_chrf"]
            # Without a confidence there is no translation: the line was blank.
            confidence = np.array([each or 0.0 for each in record["confidences"][part]])
            found.append(
                {
                    "mean confidence": float(confidence.mean()),
                    "good": float(good.mean()),
                    "calibration error": expected_calibration_error(
                        confidence, good, bins=MEASURED_BINS, equal_mass=True
                    ),
                    "chance": calibration_chance_error(confidence, bins=MEASURED_BINS),
                    "AUROC": area_under_roc(confidence, good),
                }
            )
        return {name: statistics.mean(each[name] for each in found) for name in found[0]}

    def sample(self, row: QualityRow, count: int) -> None:
        """Print translations drawn by seed, with source and reference."""
        corpus = CORPORA[row.corpus]
        for record in self.finished(row)[:1]:
            part = corpus.tests[0]
            files = [self._data / corpus.file(part, each) for each in corpus[1:3]]
            sides = [
                read_lines(path)
                for path in (*files, self._out / f"{QualityRun(row, record['seed']).key}.{part}")
            ]
            drawn = np.random.default_rng(record["seed"]).choice(len(sides[0]), count, False)
            for at in sorted(drawn.tolist()):
                print(f"{row.name} {part} line {at + 1}", *(side[at] for side in sides), sep="\n  ")

    def _score(self, row: QualityRow, part: str, metric: Metric) -> dict[str, Any]:
        """Return the scores of a row on a set, and the difference from its baseline."""
        statistics_of = self.statistics(row, part, metric)
        metric.metric.corpus_score(["a b c d"], [["a b c d"]])  # the signature counts references
        entry: dict[str, Any] = {
            "values": [metric.score(each.sum(axis=0)) for each in statistics_of],
            "signature": str(metric.metric.get_signature()),
        }
        baseline = find_row(row.baseline) if row.baseline else None
        others = self.statistics(baseline, part, metric) if baseline else []
        if baseline and others:
            difference, p = bootstrap(metric, statistics_of, others)
            entry |= {"against": baseline.name, "difference": difference, "p": p}
        return entry


def mean_and_deviation(values: Sequence[float]) -> str:
    """Return the mean with the standard deviation, of more than one value."""
    if not values:
        return "-"
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean
