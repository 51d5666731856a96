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
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.quality_rows import (  # noqa: E402
    CORPORA,
    DEV,
    NAMES,
    PART,
    ROWS,
    CorpusFiles,
    QualityRun,
    find_row,
)
from bench.quality_scores import Scorer, has_moses, read_lines  # noqa: E402


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


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


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
