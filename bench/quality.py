"""Train translators on public corpora with several seeds, translate their test sets and score them.

    python bench/quality.py --data DATA --work models --out results --only m30k_ende --jobs 3
    python bench/quality.py --data DATA --out results --table

A row (bench/quality_rows.py) is `dragoman train` with some arguments and `dragoman translate` of
the development and test sets, each in its own process. Nothing is selected on test sets:
checkpoints and settings are selected on the development set. With --jobs several trainings share
one GPU: the results of rows with a number of epochs stay the same, times do not, and a row with
--budget trains for fewer epochs.

Each run leaves a JSON file and its translations in --out; its model is in --work. Finished runs are
skipped and interrupted trainings resumed. --table needs no models and no GPU: it scores the
translations, as cased sacreBLEU, chrF and, for Multi30k, as its literature does: lower-cased,
punctuation normalised, tokenised as by Moses (python -m pip install sacremoses). Rows are compared
with their baseline by the paired bootstrap: each of 1,000 samples of the sentences gives a score of
every seed, whose means are compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.quality_rows import CORPORA, NAMES, PART, ROWS, CorpusFiles, QualityRow  # noqa: E402

SAMPLES, BOOTSTRAP_SEED = 1000, 12345  # sacreBLEU's defaults
DEV = "dev"


class QualityRun(NamedTuple):
    """A row with one seed."""

    row: QualityRow
    seed: int

    @property
    def key(self) -> str:
        """Name of the run's files."""
        return f"{self.row.name}-{self.seed}"


class FailedRunError(Exception):
    """A command of a run failed; the message has the end of its output."""


class Runner:
    """Runs rows whose results are not there yet, after the rows whose models they use."""

    def __init__(
        self, *, data: Path, work: Path, out: Path, jobs: int, extra: Sequence[str] = ()
    ) -> None:
        self.data, self.work, self.out, self.jobs = data, work, out, jobs
        self.extra = list(extra)
        self._locks: dict[str, threading.Lock] = {}
        self._registry = threading.Lock()

    def finish(self, run: QualityRun) -> dict[str, Any]:
        """Train and translate unless that was done; return the run's record."""
        with self._registry:
            lock = self._locks.setdefault(run.key, threading.Lock())
        with lock:
            record = self.out / f"{run.key}.json"
            if record.exists():
                return json.loads(record.read_text())
            fields: dict[str, str] = {}
            for field, (name, seed) in sorted(run.row.needs(run.seed).items()):
                other = QualityRun(find_row(name), seed)
                if not self.model(other).exists():  # its results come from another run
                    (self.out / f"{other.key}.json").unlink(missing_ok=True)
                self.finish(other)
                fields[field] = str(self.model(other))
            found = self._execute(run, fields)
            write_text(record, json.dumps(found, indent=1, ensure_ascii=False))
            return found

    def model(self, run: QualityRun) -> Path:
        """Return the directory of a run's model."""
        return self.work / run.key

    def _execute(self, run: QualityRun, fields: dict[str, str]) -> dict[str, Any]:
        """Run the commands of a row; return its record."""
        row, corpus, model = run.row, CORPORA[run.row.corpus], self.model(run)
        fields = fields | self._fields(corpus, run)
        found: dict[str, Any] = {"row": row.name, "seed": run.seed, "jobs": self.jobs}
        if "{part}" in row.train:
            self._split(corpus)
        if row.augment:
            arguments = ["augment", *fill(row.augment, fields)]
            found["augment"], found["augment_seconds"] = self._dragoman(run, arguments)
        if row.train:
            arguments = ["train", *fill(row.train, fields), "--out", str(model)]
            arguments += ["--set", f"train.seed={run.seed}", *self.extra]
            if (model / "training").exists():
                arguments.append("--resume")
            found["train"], found["seconds"] = self._dragoman(run, arguments)
            found |= describe_training(model)
            shutil.rmtree(model / "training")  # checkpoints take more space than the rest
        parts = (DEV, *corpus.tests)
        if row.program:
            hypotheses = self.out / f"{run.key}.txt"
            arguments = [*fill(row.program, fields), str(run.seed), str(hypotheses)]
            found["program"], found["seconds"] = self._run(run, arguments)
        else:
            hypotheses = self.out / f"{run.key}.all"
            arguments = ["translate", *(fill(row.models, fields) or ["-m", str(model)])]
            arguments += fill(row.translate, fields)
            for part in parts:
                arguments += ["--input", str(self.data / corpus.file(part, corpus.source))]
            arguments += ["--output", str(hypotheses)]
            found["translate"], found["translate_seconds"] = self._dragoman(run, arguments)
            if "--json" in row.translate:
                calibration = Path(fill(row.models, fields)[-1]) / "calibration.json"
                found["calibration"] = json.loads(calibration.read_text())
        lines = read_lines(hypotheses)
        for part in parts:
            count = len(read_lines(self.data / corpus.file(part, corpus.source)))
            some, lines = lines[:count], lines[count:]
            if "--json" in row.translate:
                decoded = [json.loads(line) for line in some]
                some = [each["text"] for each in decoded]
                confidences = [each.get("confidence") for each in decoded]
                found.setdefault("confidences", {})[part] = confidences
            write_text(self.out / f"{run.key}.{part}", "".join(f"{line}\n" for line in some))
        if lines:
            raise FailedRunError(f"{run.key}: {len(lines)} more translations than sources")
        hypotheses.unlink()
        return found

    def _fields(self, corpus: CorpusFiles, run: QualityRun) -> dict[str, str]:
        """Return the values of the fields of arguments, besides models of other rows."""
        source, target = corpus.source, corpus.target
        train, valid = (
            [shlex.quote(str(self.data / corpus.file(part, each))) for each in (source, target)]
            for part in ("train", DEV)
        )
        validation = "--valid-src {} --valid-tgt {}".format(*valid)
        validation += f" --src-lang {source} --tgt-lang {target}"
        pairs = " ".join(["--pair", f"{source}-{target}", *train])
        return {
            "files": "--src {} --tgt {} ".format(*train) + validation,
            "pair": " ".join([pairs, "--valid-pair", f"{source}-{target}", *valid]),
            "valid": validation,
            "train": str(self.data / corpus.folder / "train"),
            "part": str(self.work / f"{corpus.folder}.part"),
            "rest": str(self.work / f"{corpus.folder}.rest"),
            "source": source,
            "target": target,
            "out": str(self.model(run)),
            "results": str(self.out),
            "data": str(self.data),
            "root": str(ROOT),
            "seed": str(run.seed),
        }

    def _split(self, corpus: CorpusFiles) -> None:
        """Write the first PART pairs of a training set, and the others, to two files a language."""
        with self._registry:
            for language in (corpus.source, corpus.target):
                lines = read_lines(self.data / corpus.file("train", language))
                for name, some in (("part", lines[:PART]), ("rest", lines[PART:])):
                    path = self.work / f"{corpus.folder}.{name}.{language}"
                    if not path.exists():
                        write_text(path, "".join(f"{line}\n" for line in some))

    def _dragoman(self, run: QualityRun, arguments: Sequence[str]) -> tuple[str, float]:
        return self._run(run, ["-m", "dragoman", *arguments])

    def _run(self, run: QualityRun, arguments: Sequence[str]) -> tuple[str, float]:
        """Run Python; return the command without folders, and its seconds."""
        threads = str(max(1, (os.cpu_count() or 1) // self.jobs))
        environment = {"OMP_NUM_THREADS": threads, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment['PYTHONPATH']}"
        began = time.monotonic()
        log = self.out / f"{run.key}.log"
        with log.open("a") as file:
            print("$", *arguments, file=file, flush=True)
            ended = subprocess.run(
                [sys.executable, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                check=False,
            )
        if ended.returncode:
            raise FailedRunError(f"{shlex.join(arguments)}\n{log.read_text()[-3000:]}")
        shown = shlex.join(arguments).replace("-m dragoman", "dragoman", 1)
        for folder in (self.data, self.work, self.out):
            shown = shown.replace(f"{folder}/", "")
        return shown, round(time.monotonic() - began, 1)


def fill(arguments: str, fields: dict[str, str]) -> list[str]:
    """Return arguments with their fields filled in, split as by a shell."""
    return shlex.split(arguments.format_map(fields))


def find_row(name: str) -> QualityRow:
    """Return a row by its name."""
    return next(row for row in ROWS if row.name == name)


def describe_training(model: Path) -> dict[str, Any]:
    """Return the outcome of a training: settings, steps, validations and the best of them."""
    lines = [json.loads(line) for line in (model / "training/log.jsonl").read_text().splitlines()]
    validations = [line for line in lines if line.get("event") == "validation"]
    config = json.loads((model / "config.json").read_text())
    config.pop("data", None)
    best = min(validations, key=lambda each: each["loss"], default={})
    calibration = model / "calibration.json"
    return {
        "config": config,
        "steps": max((line["step"] for line in lines if "step" in line), default=0),
        "best_step": best.get("step"),
        "validations": [
            {name: line.get(name) for name in ("step", "loss", "bleu")} for line in validations
        ],
        "calibration": json.loads(calibration.read_text()) if calibration.exists() else None,
    }


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, plain or .xz."""
    content = path.read_bytes()
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    return text.split("\n")[:-1]


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


# Scores


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


def main() -> None:
    """Run the rows that are not finished, or print their scores."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--work", type=Path, default=Path("models"), help="folder of the models")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="*", default=[], help="names of rows")
    parser.add_argument("--seeds", type=int, default=0, help="at most so many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time")
    parser.add_argument("--set", action="append", default=[], help="setting of every training")
    parser.add_argument("--table", action="store_true", help="score what is finished and exit")
    parser.add_argument("--sample", type=int, default=0, help="also print so many translations")
    parser.add_argument("--list", action="store_true", help="print the rows and exit")
    options = parser.parse_args()
    if unknown := sorted(set(options.only) - NAMES):
        parser.error(f"there is no row {unknown[0]}; there are {', '.join(sorted(NAMES))}")
    rows = [row for row in ROWS if not options.only or row.name in options.only]
    if options.list:
        for row in rows:
            print(f"{row.name}: {row.train or row.models or row.program}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        options.work.mkdir(parents=True, exist_ok=True)
        runner = Runner(
            data=options.data,
            work=options.work,
            out=options.out,
            jobs=options.jobs,
            extra=[part for each in options.set for part in ("--set", each)],
        )
        seeds = options.seeds or None
        runs = [QualityRun(row, seed) for row in rows for seed in row.seeds[:seeds]]
        with ThreadPoolExecutor(options.jobs) as pool:
            waiting = {pool.submit(runner.finish, run): run for run in runs}
            for future in as_completed(waiting):
                key, error = waiting[future].key, future.exception()
                print(f"{key}: {f'failed: {error}' if error else 'finished'}", flush=True)
    if any(CORPORA[row.corpus].is_multi30k for row in rows) and not has_moses():
        print("BLEU of lower-cased tokens needs sacremoses: python -m pip install sacremoses")
    scorer = Scorer(options.data, options.out)
    results = scorer.table(rows)
    for row in rows if options.sample else ():
        scorer.sample(row, options.sample)
    write_text(options.out / "table.json", json.dumps(results, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
