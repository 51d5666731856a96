"""Measure data preparation throughput of `dragoman train` against SentencePiece's batch encoder.

    python bench/data_preparation.py                          200,000 generated pairs, half a minute
    python bench/data_preparation.py --pairs 2000000          large enough to measure memory
    python bench/data_preparation.py --pairs 2000000 --train  peak memory of `dragoman train`

The text is synthetic: made-up words with Zipfian frequencies and the lengths of real sentences.
The peer is a plain loop over SentencePiece's batch encoder that reads the same files and neither
checks nor stores anything. Rates are tokens/s by wall time and per CPU second, with the ratio to
the peer. Memory is the resident memory of the process tree, sampled twenty times per second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dragoman.config import DataConfig, TextConfig
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.data.token_store import TokenStore
from dragoman.text.sentencepiece_tokenizer import load_tokenizers, save_tokenizers, train_tokenizers

WORDS = 50_000
SAMPLE = 20_000  # pairs that the tokenizers are trained on
PEER = "peer: SentencePiece's batch encoder"
CHUNK = 20_000  # pairs generated at a time


def main() -> None:
    """Generate text, train a tokenizer, prepare the data; print a table and one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cores",
        type=int,
        nargs="+",
        default=sorted({0, 1, len(os.sched_getaffinity(0))}),
        help="numbers of cores; 0 is the peer",
    )
    parser.add_argument(
        "--folder", default=None, help="working directory; about 700 bytes per pair"
    )
    parser.add_argument(
        "--train",
        action="store_true",
        help="only measure the peak memory of the whole command",
    )
    parser.add_argument("--kind", default="bpe", help="text.tokenizer of --train")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "CORES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(prepare_once(Path(options.one[0]), int(options.one[1]))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = generate(folder, options.pairs)
        if options.train:
            print(
                json.dumps(
                    measure_training_memory(folder, options.pairs, options.kind, options.vocabulary)
                    | {"text_bytes": size}
                )
            )
            return
        sample = ParallelFiles(folder / "sample.src", folder / "sample.tgt")
        text = TextConfig(vocab_size=options.vocabulary)
        save_tokenizers(
            train_tokenizers(sample.src_texts(), sample.tgt_texts(), text), folder / "text"
        )
        print(
            f"{options.pairs:,} pairs, {size / 2**20:.0f} MiB of text, vocabulary of "
            f"{options.vocabulary:,}; best of {options.repeats}",
            flush=True,
        )
        rows = [measure_preparation(folder, cores, options.repeats) for cores in options.cores]
    stores = {row["digest"] for row in rows if row["system"] != PEER}
    print(f"identical stores in all runs: {'yes' if len(stores) == 1 else 'NO'}")
    signature = {
        "pairs": options.pairs,
        "text_bytes": size,
        "vocabulary": options.vocabulary,
        "repeats": options.repeats,
    }
    print(
        json.dumps(
            {
                "bench": "data_preparation",
                "rows": rows,
                "alike": len(stores) == 1,
                "cpus": os.cpu_count(),
            }
            | signature
        )
    )


def generate(folder: Path, pairs: int) -> int:
    """Write source, target and a sample of both; return the size of source and target in bytes."""
    random = np.random.default_rng(1)
    sides = {}
    for side, letters in (
        ("src", "eeeeaaaiioouunnrrssttdhlcmgbfwkzpvyäöüß"),
        ("tgt", "eeeettaaoooiinnsshhrrdlucmwfgypbvk"),
    ):
        alphabet = np.array(list(letters))
        # frequent words are shorter
        lengths = np.clip(random.poisson(np.linspace(2.0, 8.0, WORDS)), 1, 20)
        flat = "".join(random.choice(alphabet, int(lengths.sum())))
        ends = np.cumsum(lengths).tolist()
        sides[side] = np.array(
            [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)], dtype=object
        )
    weights = 1.0 / np.arange(3, WORDS + 3)
    bounds = np.cumsum(weights / weights.sum())
    for name in ("src", "tgt"):
        with (folder / name).open("w") as file, (folder / f"sample.{name}").open("w") as sample:
            for start in range(0, pairs, CHUNK):
                # The same seed for both sides, so that the sides of a pair have similar lengths.
                lengths = np.clip(
                    np.random.default_rng(start)
                    .lognormal(2.55, 0.55, min(CHUNK, pairs - start))
                    .astype(int),
                    1,
                    90,
                )
                words = sides[name][
                    np.searchsorted(bounds, random.random(int(lengths.sum()))).clip(max=WORDS - 1)
                ].tolist()
                ends = np.cumsum(lengths).tolist()
                lines = [
                    " ".join(words[begin:end]).capitalize() + ".\n"
                    for begin, end in zip([0, *ends], ends, strict=False)
                ]
                file.writelines(lines)
                if start < SAMPLE:
                    sample.writelines(lines[: SAMPLE - start])
    return sum((folder / name).stat().st_size for name in ("src", "tgt"))


def measure_preparation(folder: Path, cores: int, repeats: int) -> dict[str, Any]:
    """Prepare the data in a subprocess several times; print and return the best run."""
    name = f"prepared with {cores} core{'s' * (cores > 1)}" if cores else PEER
    runs = [
        run_json_command([sys.executable, __file__, "--one", str(folder), str(cores)])
        for _ in range(repeats)
    ]
    best = min(runs, key=lambda run: run.report["seconds"])
    seconds = [run.report["seconds"] for run in runs]
    rate = best.report["tokens"] / best.report["seconds"]
    row = {
        "system": name,
        "cores": max(1, cores),
        **best.report,
        "spread": [min(seconds), max(seconds)],
    }
    core = max(run.report["tokens"] / run.report["cpu"] for run in runs)
    row |= {"tokens_s": rate, "tokens_cpu_s": core, "MiB": max(run.peak for run in runs) / 2**20}
    print(
        f"  {name:40s} {best.report['seconds']:7.2f} s "
        f"({min(seconds):.2f} to {max(seconds):.2f})  {rate / 1e6:6.2f}M tokens/s  "
        f"{core / 1e6:6.2f}M a core  {row['MiB']:6.0f} MiB",
        flush=True,
    )
    return row


def measure_training_memory(folder: Path, pairs: int, kind: str, vocabulary: int) -> dict[str, Any]:
    """Run `dragoman train` for a few steps; return the peak memory of its processes."""
    command = [
        sys.executable,
        "-m",
        "dragoman",
        "train",
        "--src",
        str(folder / "src"),
        "--tgt",
        str(folder / "tgt"),
    ]
    command += ["--out", str(folder / "model"), "--recipe", "tiny"]
    settings = {
        "train.steps": 5,
        "text.tokenizer": kind,
        "text.vocab_size": vocabulary,
        "data.cache_dir": folder / "cache",
    }
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    began = time.monotonic()
    _, peak = watch(command)
    return {
        "bench": "train_memory",
        "pairs": pairs,
        "kind": kind,
        "MiB": peak / 2**20,
        "seconds": time.monotonic() - began,
    }


class MemoryRun(NamedTuple):
    """Report of a process, and the peak memory of its process tree."""

    report: dict[str, Any]
    peak: int


def run_json_command(command: list[str]) -> MemoryRun:
    """Run a command that prints a line of JSON, sampling the memory of its process tree."""
    out, peak = watch(command)
    return MemoryRun(json.loads(out.strip().splitlines()[-1]), peak)


def watch(command: list[str]) -> tuple[str, int]:
    """Run a command; return its output and the peak memory of its process tree."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.05):
            peak = max(peak, sum(map(resident_bytes, process_tree(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    ended.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return out, peak


def process_tree(root: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    found = [root]
    for each in found:
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += map(int, path.read_text().split())
            except OSError:
                continue
    return found


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except (OSError, IndexError):
        return 0


def prepare_once(folder: Path, cores: int) -> dict[str, Any]:
    """Prepare the data with a number of cores; 0 runs the peer."""
    tokenizers = load_tokenizers(folder / "text")
    if not cores:
        return sentencepiece_loop(folder, tokenizers.src.model)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        began, busy = time.monotonic(), cpu_seconds()
        corpus = ParallelFiles(folder / "src", folder / "tgt")
        store = TokenStore.prepare(
            corpus, tokenizers, folder=Path(cache), data=DataConfig(), workers=cores
        )
        took = {"seconds": time.monotonic() - began, "cpu": cpu_seconds() - busy}
        manifest = json.loads((store.folder / "manifest.json").read_text())
        digest = "-".join(record["sha256"][:8] for _, record in sorted(manifest["files"].items()))
        tokens = store.report.src_tokens + store.report.tgt_tokens
        return {**took, "tokens": tokens, "pairs": store.report.pairs, "digest": digest}


def cpu_seconds() -> float:
    """Return the CPU time of this process and its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def sentencepiece_loop(folder: Path, model: bytes, rows: int = 8192) -> dict[str, Any]:
    """Encode both files with SentencePiece's batch encoder."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokens, began, busy = 0, time.monotonic(), cpu_seconds()
    for name in ("src", "tgt"):
        with (folder / name).open() as file:
            while lines := [line for _, line in zip(range(rows), file, strict=False)]:
                tokens += sum(
                    map(len, processor.encode([line.rstrip("\n") for line in lines], num_threads=1))
                )
    return {"seconds": time.monotonic() - began, "cpu": cpu_seconds() - busy, "tokens": tokens}


if __name__ == "__main__":
    main()
