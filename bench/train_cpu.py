"""Measure CPU training throughput of Dragoman's trainer against its peers on the same batches.

    python bench/train_cpu.py                   some minutes, on an otherwise idle machine
    python bench/train_cpu.py --peers all       also OpenNMT-py, eole and JoeyNMT
    python bench/train_cpu.py --size tiny --steps 2 --rounds 1 --precisions float32    a smoke test

Width 256, ffn 1024, 4+4 layers, vocabulary of 8,000, batches of 2,048 padded tokens, dropout and
label smoothing 0.1, Adam. Each system runs in its own process, after a warm-up over all shapes. It
prints tokens/s by wall time and by CPU time, peak memory, and our ratio to each peer. Other
toolkits train in float32 with their own commands; their throughput is the one they log.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.peers import PEERS, SMOOTHING, PeerStep
from bench.synthetic_corpus import BenchmarkPlan, multi30k_corpus, synthetic_corpus
from bench.toolkit_configs import TOOLKIT_CONFIGS
from bench.toolkit_training import time_toolkit
from bench.train_gpu import SIZES, build_trainer, model_config
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import TrainConfig
from dragoman.training.bf16_mixed_precision import choose_precision

OURS = "ours"


def main() -> None:
    """Run every system, print the ratios and one line of JSON."""
    options = parse_arguments()
    if options.one:
        print(json.dumps(time_one(*options.one, options)))
        return
    where = f"{os.cpu_count()} cores, {options.threads} threads, torch {torch.__version__}"
    print(
        f"{where}; {options.size}, vocabulary of {options.vocabulary:,}, "
        f"{options.batch_tokens:,} padded tokens per batch; best of {options.rounds}",
        flush=True,
    )
    rows = []
    for precision in options.precisions:
        for system in options.only:
            row = run_one(system, precision, options)
            rows.append(row)
            if "error" in row:
                print(f"  {system:24s} {precision:9s} failed: {row['error']}", flush=True)
                continue
            print(
                f"  {system:24s} {precision:9s} {row['tokens_s']:8,.0f} tokens/s "
                f"(slowest round {row['slowest']:,.0f})  "
                f"{row['tokens_cpu_s']:8,.0f} per CPU second  {row['MiB']:6,.0f} MiB  "
                f"padding {row['padding']:.1%}",
                flush=True,
            )
    if options.peers == "all" and "float32" in options.precisions:
        rows += [run_toolkit(name, options) for name in TOOLKIT_CONFIGS]
    ratios = compare(rows)
    settings = {
        name: getattr(options, name)
        for name in ("size", "threads", "steps", "rounds", "batch_tokens", "vocabulary")
    }
    print(
        json.dumps(
            {
                "bench": "train_cpu",
                "rows": rows,
                "ratios": ratios,
                "machine": where,
                "load": os.getloadavg()[0],
            }
            | settings
        )
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments; defaults depend on the size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[OURS, *PEERS],
        default=[OURS, *PEERS],
        metavar="SYSTEM",
        help=f"ours; {'; '.join(PEERS)}",
    )
    parser.add_argument(
        "--peers",
        choices=["some", "all"],
        default="some",
        help="all: also install and run OpenNMT-py, eole and JoeyNMT",
    )
    parser.add_argument(
        "--precisions", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"]
    )
    parser.add_argument("--steps", type=int, default=6, help="training steps per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", type=int, default=24)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--pairs", type=int, default=20_000, help="synthetic pairs")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="directory of multi30k/; default: synthetic text"
    )
    parser.add_argument("--one", nargs=2, metavar=("SYSTEM", "PRECISION"), help=argparse.SUPPRESS)
    return parser.parse_args()


def run_one(system: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time a system in a subprocess."""
    command = [sys.executable, __file__, "--one", system, precision]
    for name in (
        "size",
        "steps",
        "rounds",
        "shapes",
        "threads",
        "batch_tokens",
        "vocabulary",
        "pairs",
        "data",
    ):
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {
            "system": system,
            "precision": precision,
            "error": done.stderr.strip().splitlines()[-1][:200],
        }
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_toolkit(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time a toolkit's training command on synthetic sentences, by wall time."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = synthetic_corpus(Path(folder), options.pairs, vocabulary=options.vocabulary)
        row = time_toolkit(
            name, corpus, model_config(options.size), SIZES[options.size][0], options, Path(folder)
        )
    result = (
        f"failed: {row['error']}"
        if "error" in row
        else f"{row['tokens_s']:8,.0f} tokens/s (slowest round {row['slowest']:,.0f})  "
        f"{row['MiB']:31,.0f} MiB"
    )
    print(f"  {name:24s} {row['precision']:9s} {result}", flush=True)
    return row


def time_one(system: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time the rounds of one system, by wall time and CPU time."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.data:
            corpus = multi30k_corpus(folder, options.data, vocabulary=options.vocabulary)
        else:
            corpus = synthetic_corpus(folder, options.pairs, vocabulary=options.vocabulary)
        sizes = {"batch_tokens": options.batch_tokens, "max_shapes": options.shapes}
        plan = BenchmarkPlan(
            corpus.store, **sizes, steps=options.steps, rounds=options.rounds, warmup_batches=1
        )
        clock = (_ours if system == OURS else _peer)(system, precision, plan, options, folder)
    rounds = list(itertools.pairwise(clock))
    rates = [plan.tokens() / (end[0] - start[0]) for start, end in rounds]
    busy = [plan.tokens() / (end[1] - start[1]) for start, end in rounds]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {
        "system": system,
        "precision": precision,
        "tokens_s": max(rates),
        "slowest": min(rates),
        "tokens_cpu_s": max(busy),
    }
    return row | {
        "MiB": peak,
        "padding": plan.padding(),
        "tokens_per_step": plan.tokens() / options.steps,
    }


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _ours(
    system: str, precision: str, plan: BenchmarkPlan, options: argparse.Namespace, folder: Path
) -> list[tuple[float, float]]:
    """Train with our trainer, reading the clocks at its log lines."""
    warmup_batches = len(plan.warmup_batches)
    config = TrainConfig(
        steps=warmup_batches + plan.rounds * options.steps,
        batch_tokens=options.batch_tokens,
        checkpoint_every=10**6,
        precision=precision,
        label_smoothing=SMOOTHING,
    )
    clock: dict[int, tuple[float, float]] = {}

    def on_record(record: Mapping[str, Any]) -> None:
        if "tokens" in record:
            clock[int(record["step"])] = _now()

    with RunDirectory(folder / "run", keep_checkpoints=1) as run:
        trainer = build_trainer(
            model_config(options.size),
            plan,
            config,
            run,
            torch.device("cpu"),
            options.vocabulary,
            on_record=on_record,
        )
        trainer.fit(resume=False)
    return [clock[warmup_batches + each * options.steps] for each in range(plan.rounds + 1)]


def _peer(
    system: str, precision: str, plan: BenchmarkPlan, options: argparse.Namespace, folder: Path
) -> list[tuple[float, float]]:
    """Train a peer's model on the same batches."""
    torch.manual_seed(1)
    device = torch.device("cpu")
    peer = PEERS[system](model_config(options.size), SIZES[options.size][0], options.vocabulary)
    step = PeerStep(peer, device, choose_precision(precision, device).dtype, compiled=False)
    for batch in plan.warmup_batches:
        step(plan.collate(batch))
    clock = [_now()]
    for _ in range(plan.rounds):
        for batch in plan.timed:
            step(plan.collate(batch))
        clock.append(_now())
    return clock


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print and return our ratio to each peer, by wall time and CPU time."""
    good = [row for row in rows if "error" not in row]
    ratios = []
    for row in good:
        ours = next(
            (
                each
                for each in good
                if each["system"] == OURS and each["precision"] == row["precision"]
            ),
            None,
        )
        if ours is None or row is ours:
            continue
        ratio = ours["tokens_s"] / row["tokens_s"]
        busy = ours["tokens_cpu_s"] / row["tokens_cpu_s"] if "tokens_cpu_s" in row else None
        ratios.append(
            {"against": row["system"], "precision": row["precision"], "clock": ratio, "cpu": busy}
        )
        cpu_ratio = "" if busy is None else f", {busy:5.2f} by CPU time"
        print(
            f"  ours against {row['system']:24s} {row['precision']:9s} "
            f"{ratio:5.2f} times by wall time{cpu_ratio}"
        )
    return ratios


if __name__ == "__main__":
    main()
