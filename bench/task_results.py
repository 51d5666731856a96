"""Train and test the recipes of every task on real data, with several seeds, and print a table.

    python bench/task_results.py --data DATA --out results.json --only imdb_han trec --jobs 4

Each row is `dragoman train` with a recipe and `dragoman evaluate` on the test set, which selects
nothing: settings were selected on validation data or a split of the training data. DATA is the
folder of corpora (imdb/, wikitext2/, …). With --jobs several runs share one GPU: results are the
same, times are not, and rows with a time budget train for fewer steps. --budget replaces that of
the rows. Finished runs in the results file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple


class TaskRow(NamedTuple):
    """One line of the table: a recipe on a data set."""

    name: str
    metric: str  # of `dragoman evaluate --json`
    train: str  # arguments of `dragoman train`; {data} is the folder of corpora
    test: str  # arguments of `dragoman evaluate`
    seeds: tuple[int, ...] = (1, 2, 3)
    variants: tuple[str, ...] = ()  # more arguments of `dragoman evaluate`, each its own test


BUDGET = "10m"  # training time of the language models
_IMDB = (
    "--task classify --train {data}/imdb/train.jsonl.xz --train {data}/imdb/dev.jsonl.xz "
    "--set data.hold_out=0 --recipe"
)
_IMDB_TEST = "--test {data}/imdb/test.jsonl.xz"
_SST = (
    "--task classify --train {data}/sst2/train.jsonl.xz --valid {data}/sst2/dev.jsonl.xz --recipe"
)
_TREC = (
    "--task classify --train {data}/trec/train.jsonl.xz --set data.label_field=coarse "
    "--set data.hold_out=0 --recipe"
)
_REUTERS = "--task classify --train {data}/reuters21578/train.jsonl.xz --recipe"
_BY_LABEL = "--set classify.tune_threshold=labels --set train.best_metric=macro_f1"
_REUTERS_TEST = "--test {data}/reuters21578/test.jsonl.xz"
_WIKITEXT = (
    "--task language --train {data}/wikitext2/train.txt.xz --valid {data}/wikitext2/valid.txt.xz "
    "--recipe"
)
_WIKITEXT_TEST = "--test {data}/wikitext2/test.txt.xz"
_BOOKS = (
    "--task language --train {data}/pg_books/train.jsonl.xz --valid {data}/pg_books/dev.jsonl.xz "
    "--recipe"
)
# Few epochs fit into ten minutes: no dropout, and a higher learning rate than the recipes'.
_BOOKS_FEW_EPOCHS = " ".join(
    f"--set {setting}"
    for setting in (
        "model.dropout=0",
        "model.ffn_dropout=0",
        "language.input_dropout=0",
        "language.output_dropout=0",
        "train.optimizer=adamw",
        "train.beta2=0.99",
        "train.weight_decay=0.05",
        "train.learning_rate=8e-4",
        "train.warmup_steps=400",
    )
)
_BOOKS_TEST = "--test {data}/pg_books/test.jsonl.xz"
_MEMORIES = tuple(f"--set language.eval_memory={memory}" for memory in (512, 1024))  # and 2,048
_EWT = (
    "--task tag --train {data}/ud_english_ewt/train.jsonl.xz "
    "--valid {data}/ud_english_ewt/dev.jsonl.xz --set tag.tag_field=upos --recipe"
)
_CHUNKS = "--task tag --train {data}/conll2000/train.jsonl.xz --set data.hold_out=0 --recipe"
_CHUNKS_TEST = "--test {data}/conll2000/test.jsonl.xz"
_WNUT = (
    "--task tag --train {data}/wnut17/train.jsonl.xz --valid {data}/wnut17/dev.jsonl.xz --recipe"
)
_SICK = "--task pairs --train {data}/sick/train.jsonl.xz --valid {data}/sick/dev.jsonl.xz --recipe"
_SICK_TEST = "--test {data}/sick/test.jsonl.xz"
_FIVE = (1, 2, 3, 4, 5)

ROWS = (
    TaskRow("imdb_han", "accuracy", f"{_IMDB} yang2016", _IMDB_TEST),
    TaskRow("imdb_best", "accuracy", f"{_IMDB} johnson2015", _IMDB_TEST),
    TaskRow("sst2", "accuracy", f"{_SST} wang2012", "--test {data}/sst2/test.jsonl.xz", _FIVE),
    TaskRow("trec", "accuracy", f"{_TREC} li2002", "--test {data}/trec/test.jsonl.xz", _FIVE),
    TaskRow("reuters", "micro_f1", f"{_REUTERS} mullenbach2018", _REUTERS_TEST),
    TaskRow(
        "reuters_macro",
        "macro_f1",
        f"{_REUTERS} mullenbach2018 {_BY_LABEL}",
        _REUTERS_TEST,
    ),
    TaskRow("reuters_max", "macro_f1", f"{_REUTERS} adhikari2019 {_BY_LABEL}", _REUTERS_TEST),
    TaskRow(
        "reuters_labels",
        "macro_f1",
        f"{_REUTERS} adhikari2019 --set classify.pooling=labels {_BY_LABEL}",
        _REUTERS_TEST,
    ),
    TaskRow(
        "wikitext2_xl",
        "perplexity",
        f"{_WIKITEXT} dai2019_lm --set train.steps=13000 --set train.warmup_steps=2000",
        _WIKITEXT_TEST,
        (1,),
    ),
    TaskRow(
        "wikitext2_lstm",
        "perplexity",
        f"{_WIKITEXT} merity2018 --budget {{budget}}",
        _WIKITEXT_TEST,
        (1,),
    ),
    TaskRow(
        "wikitext2_plain",
        "perplexity",
        f"{_WIKITEXT} vaswani2017_lm --budget {{budget}}",
        _WIKITEXT_TEST,
        (1,),
    ),
    TaskRow(
        "books_xl",
        "bits_per_byte",
        f"{_BOOKS} dai2019_bytes {_BOOKS_FEW_EPOCHS} --budget {{budget}}",
        _BOOKS_TEST,
        (1,),
        _MEMORIES,
    ),
    TaskRow(
        "books_plain",
        "bits_per_byte",
        f"{_BOOKS} vaswani2017_bytes {_BOOKS_FEW_EPOCHS} --budget {{budget}}",
        _BOOKS_TEST,
        (1,),
    ),
    TaskRow(
        "ewt",
        "accuracy",
        f"{_EWT} plank2016",
        "--test {data}/ud_english_ewt/test.jsonl.xz",
    ),
    TaskRow(
        "chunks_pos",
        "f1",
        f"{_CHUNKS} lample2016 --set tag.input_field=pos",
        _CHUNKS_TEST,
    ),
    TaskRow("chunks", "f1", f"{_CHUNKS} lample2016", _CHUNKS_TEST),
    TaskRow(
        "chunks_softmax",
        "f1",
        f"{_CHUNKS} lample2016 --set tag.crf=false",
        _CHUNKS_TEST,
    ),
    TaskRow("wnut17", "f1", f"{_WNUT} lample2016", "--test {data}/wnut17/test.jsonl.xz"),
    TaskRow("sick", "accuracy", f"{_SICK} chen2017", _SICK_TEST),
    TaskRow("sick_no_attention", "accuracy", f"{_SICK} conneau2017", _SICK_TEST),
    TaskRow(
        "sick_no_flags",
        "accuracy",
        f"{_SICK} chen2017 --set pairs.match_features=false",
        _SICK_TEST,
    ),
    TaskRow("sick_decomposable", "accuracy", f"{_SICK} parikh2016", _SICK_TEST),
    TaskRow("sick_sequence", "accuracy", f"{_SICK} rocktaschel2016", _SICK_TEST),
    TaskRow("sick_relatedness", "pearson", f"{_SICK} chen2017", _SICK_TEST),
    TaskRow("max_sab", "mae", "--task sets --recipe lee2019_max", ""),
    TaskRow("max_max", "mae", "--task sets --recipe zaheer2017_max", ""),
    TaskRow("max_sum", "mae", "--task sets --recipe zaheer2017_sum", ""),
    TaskRow("max_mean", "mae", "--task sets --recipe zaheer2017_mean", ""),
    TaskRow(
        "clustering",
        "log_likelihood_gap",
        "--task sets --recipe lee2019_clustering",
        "",
    ),
    TaskRow("unique", "accuracy", "--task sets --recipe lee2019_unique", ""),
)


class TaskRun(NamedTuple):
    """A row with one seed."""

    row: TaskRow
    seed: int

    @property
    def key(self) -> str:
        """Name of the run in the results file."""
        return f"{self.row.name}/{self.seed}"


def run_one(
    run: TaskRun, data: str, folder: Path, extra: list[str], budget: str = BUDGET
) -> dict[str, Any]:
    """Train and test once; return metrics, seconds, or the end of the output of a failure."""
    model = folder / run.key.replace("/", "-")
    command = [sys.executable, "-m", "dragoman"]
    named = shlex.split(run.row.train.format(data=data, budget=budget))
    train = [*command, "train", *named, "--set", f"train.seed={run.seed}", *extra]
    began = time.monotonic()
    first = subprocess.run(
        [*train, "--out", str(model)], capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    log = first.stderr[-3000:]
    if first.returncode:
        return {"error": log, "seconds": seconds}
    test = shlex.split(run.row.test.format(data=data))
    began = time.monotonic()
    metrics: dict[str, Any] = {}
    for variant in ("", *run.row.variants):
        tested = subprocess.run(
            [*command, "evaluate", str(model), *test, *shlex.split(variant), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        if tested.returncode:
            return {"error": tested.stderr[-3000:], "log": log, "seconds": seconds}
        metrics[variant] = json.loads(tested.stdout)
    return {
        "metrics": metrics.pop(""),
        "variants": metrics,
        "seconds": round(seconds, 1),
        "test_seconds": round(time.monotonic() - began, 1),
        "log": log,
    }


def find_value(metrics: Any, name: str) -> float | None:
    """Return a metric in the output of `dragoman evaluate --json`."""
    found = (metrics or {}).get("scores", {}).get(name)
    return float(found["score"]) if found else None


def print_table(results: dict[str, Any]) -> None:
    """Print the mean and the standard deviation of each row over its seeds."""
    print(f"{'row':18} {'metric':18} {'mean':>8} {'std':>7} {'seeds':>5} {'s/run':>6}")
    for row in ROWS:
        done = [
            results[f"{row.name}/{seed}"] for seed in row.seeds if f"{row.name}/{seed}" in results
        ]
        values = [
            value
            for each in done
            if (value := find_value(each.get("metrics"), row.metric)) is not None
        ]
        if not done:
            continue
        if not values:
            print(f"{row.name:18} failed: {done[0].get('error', 'no such metric')[-200:]!r}")
            continue
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        seconds = statistics.mean(each["seconds"] for each in done)
        print(
            f"{row.name:18} {row.metric:18} {statistics.mean(values):8.4f} {spread:7.4f} "
            f"{len(values):5} {seconds:6.0f}"
        )
        for variant in row.variants:
            found = [
                value
                for each in done
                if (value := find_value(each.get("variants", {}).get(variant), row.metric))
                is not None
            ]
            if found:
                print(f"  {variant} {statistics.mean(found):.4f}")


def main() -> None:
    """Run the rows that are not in the results file yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the corpora")
    parser.add_argument("--out", type=Path, default=Path("task_results.json"))
    parser.add_argument("--only", nargs="*", default=[], help="names of rows, in this order")
    parser.add_argument("--seeds", type=int, default=0, help="at most so many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--set", action="append", default=[], help="setting of every run")
    parser.add_argument("--budget", default=BUDGET, help="of rows that train for a given time")
    parser.add_argument("--list", action="store_true", help="print the commands and exit")
    arguments = parser.parse_args()
    known = {row.name: row for row in ROWS}
    if unknown := sorted(set(arguments.only) - set(known)):
        parser.error(f"there is no row {unknown[0]}; there are {', '.join(sorted(known))}")
    rows = [known[name] for name in arguments.only or known]
    if arguments.list:
        for row in rows:
            train = row.train.format(data=arguments.data, budget=arguments.budget)
            print(f"{row.name}: dragoman train {train} --out {row.name}")
        return
    extra = [part for each in arguments.set for part in ("--set", each)]
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    runs = [
        run
        for row in rows
        for run in (TaskRun(row, seed) for seed in row.seeds[: arguments.seeds or None])
        if "metrics" not in results.get(run.key, {})
    ]
    with (
        tempfile.TemporaryDirectory(prefix="task-results-") as folder,
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        waiting = {
            pool.submit(run_one, run, arguments.data, Path(folder), extra, arguments.budget): run
            for run in runs
        }
        for future in as_completed(waiting):
            run = waiting[future]
            results[run.key] = future.result()
            value = find_value(results[run.key].get("metrics"), run.row.metric)
            print(
                f"{run.key}: {run.row.metric} {value}, {results[run.key]['seconds']:.0f} s",
                flush=True,
            )
            arguments.out.write_text(json.dumps(results, indent=1))
    print_table(results)


if __name__ == "__main__":
    main()
