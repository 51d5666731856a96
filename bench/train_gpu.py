"""Measure GPU training throughput of Dragoman's trainer, data loading included, against its peers.

    python bench/train_gpu.py                          about five minutes, mostly torch.compile
    python bench/train_gpu.py --only eager compiled    other modes of ours
    python bench/train_gpu.py --shapes 3 --static      peers compiled for each of a few shapes
    python bench/train_gpu.py --loss-curve             loss of mixed precision against float32
    python bench/train_gpu.py --size tiny --steps 4 --only eager    a smoke test on a CPU

Throughput counts tokens of both sides without padding, EOS included. Each system warms up on every
shape, then runs rounds of --steps steps; the best round counts, and our ratio to each peer is
printed. Peers run in two forms. "On our batches": a plain training loop gets our batches, which
have little padding, ready in pinned memory. "Hugging Face Trainer": its own batches and data
loading (bench/hf_trainer.py); "by length" gives it a length column. Lengths are Multi30k's, or with
--data the real text. Compiled peers use dynamic shapes unless --static. A system that fails or
exceeds --seconds is reported and skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.hf_trainer import TRAINERS, time_trainer
from bench.peers import PEERS, SMOOTHING, PeerStep, build_marian
from bench.synthetic_corpus import (
    WARMUP_BATCHES,
    BenchmarkPlan,
    PreparedCorpus,
    multi30k_corpus,
    synthetic_corpus,
)
from bench.timing_helpers import (
    OutOfTimeError,
    device_name,
    free_memory,
    reset_peak,
    synchronize,
    time_limit,
    timing_row,
)
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import ModelConfig, TrainConfig
from dragoman.data.batch_plan import Cursor
from dragoman.data.bucket_shapes import MAX_SHAPES
from dragoman.models.factory import build_model
from dragoman.tasks.translation import Regularization, TranslationTask
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.data_loader import DataLoader, GlobalBatch
from dragoman.training.torch_compile import configure_backends
from dragoman.training.trainer import Trainer

SIZES = {
    "tiny": (2, 64, 4, 128),
    "small": (4, 256, 4, 1024),
    "base": (6, 512, 8, 2048),
}  # layers, width, heads, ffn_width
MODES = {
    "eager": {"compile": "off", "cuda_graphs": "off"},
    "cuda_graphs": {"compile": "off", "cuda_graphs": "auto"},
    "compiled": {"compile": "on", "cuda_graphs": "off"},
    "compiled+cuda_graphs": {"compile": "on", "cuda_graphs": "auto"},
}
PEERS_ON_OUR_BATCHES = [system for name in PEERS for system in (name, f"{name}, compiled")]
SLOW = "torch.nn.Transformer, compiled"  # takes over a minute to compile
SYSTEMS = [*MODES, *TRAINERS, *PEERS_ON_OUR_BATCHES]
DEFAULT_SYSTEMS = [
    "cuda_graphs",
    "compiled+cuda_graphs",
    *TRAINERS,
    *(system for system in PEERS_ON_OUR_BATCHES if system != SLOW),
]
PEER_ROUNDS = 2


def main() -> None:
    """Time every system, print the ratios and one line of JSON."""
    options = parse_arguments()
    if options.compile_cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(options.compile_cache).resolve())
    device = torch.device(options.device)
    configure_backends(device, deterministic=False)
    if any("compiled" in system for system in options.only):
        torch._dynamo.config.recompile_limit = 256  # type: ignore[attr-defined]  # torch's default of 8 falls back to eager silently
    model = model_config(options.size)
    with tempfile.TemporaryDirectory() as name:
        corpus = load_corpus(options, Path(name))
        if options.loss_curve:
            from bench.loss_curve import loss_curve  # imports this module

            loss_curve(options, corpus, model, device, Path(name))
            return
        plan = BenchmarkPlan(
            corpus.store,
            batch_tokens=options.batch_tokens,
            max_shapes=options.shapes,
            steps=options.steps,
        )
        precision = choose_precision(options.precision, device)
        print(
            f"{device_name(device)}, torch {torch.__version__}, {precision.name}; {options.size}, "
            f"vocabulary of {options.vocabulary:,}, "
            f"{options.batch_tokens:,} padded tokens per batch, "
            f"{plan.used} shapes, {plan.padding():.1%} padding, "
            f"{plan.tokens() / options.steps:,.0f} tokens per step, "
            f"{options.steps} steps per round",
            flush=True,
        )
        rows: list[dict[str, Any]] = []
        for system in options.only:
            try:
                with time_limit(options.seconds):
                    row = time_system(
                        system, plan, model, options, device, Path(name) / f"run-{len(rows)}"
                    )
            except (
                Exception,
                OutOfTimeError,
            ) as error:  # such as a peer that is not installed
                row = {
                    "system": system,
                    "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
                }
            rows.append(row)
            show(row)
            free_memory(device)
    report(rows)
    signature = {
        "device": device_name(device),
        "torch": torch.__version__,
        "precision": precision.name,
        "shapes": plan.shapes,
    }
    settings = {
        name: getattr(options, name)
        for name in ("size", "vocabulary", "batch_tokens", "steps", "static", "data")
    }
    padding = {"padding": plan.padding(), "tokens_per_step": plan.tokens() / options.steps}
    print(
        json.dumps(
            {"bench": "train_gpu", "rows": rows} | padding | signature | settings, default=str
        )
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the arguments; defaults depend on the size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SYSTEMS,
        default=DEFAULT_SYSTEMS,
        metavar="SYSTEM",
        help=f"some of: {'; '.join(SYSTEMS)}",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=50,
        help="training steps per round; Hugging Face's Trainer pads more below 50",
    )
    parser.add_argument("--shapes", type=int, default=MAX_SHAPES, help="most batch shapes")
    parser.add_argument("--static", action="store_true", help="compile peers for static shapes")
    parser.add_argument("--batch-tokens", type=int, help="padded tokens of the longer side")
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--pairs", type=int, help="synthetic pairs")
    parser.add_argument(
        "--length-factor",
        type=float,
        default=1.0,
        help="length of synthetic sentences relative to Multi30k's",
    )
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="directory of multi30k/; default: synthetic text"
    )
    parser.add_argument("--compile-cache", help="cache directory of torch.compile, for later calls")
    parser.add_argument(
        "--seconds", type=float, default=80.0, help="time limit of each system, warm-up included"
    )
    curve = parser.add_argument_group(
        "loss curve", "compares losses instead of timing (bench/loss_curve.py)"
    )
    curve.add_argument("--loss-curve", action="store_true")
    curve.add_argument("--curve-steps", type=int, default=500, help="training steps of each run")
    curve.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="dropout seeds of each setup; at least 2",
    )
    curve.add_argument(
        "--rate",
        type=float,
        default=TrainConfig().learning_rate,
        help="peak learning rate; at high rates post-norm runs diverge by up to tenths of a nat",
    )
    curve.add_argument(
        "--warm-up",
        type=int,
        default=TrainConfig().warmup_steps,
        help="warm-up steps",
    )
    curve.add_argument(
        "--frozen-steps", type=int, default=60, help="steps with frozen weights; at least 2"
    )
    options = parser.parse_args()
    if options.seeds < 2 or options.frozen_steps < 2:
        parser.error(
            "--seeds and --frozen-steps must be at least 2; "
            f"found {options.seeds} and {options.frozen_steps}"
        )
    tiny = options.size == "tiny"
    options.batch_tokens = options.batch_tokens or (256 if tiny else 25_600)
    options.vocabulary = options.vocabulary or (512 if tiny else 32_768)
    options.pairs = options.pairs or (400 if tiny else 120_000)
    return options


def model_config(size: str) -> ModelConfig:
    """Return the configuration of a size, with biases in attention as the peers have."""
    layers, width, heads, ffn_width = SIZES[size]
    return ModelConfig(
        encoder=(f"transformer*{layers}",),
        decoder=(f"transformer*{layers}",),
        width=width,
        heads=heads,
        ffn_width=ffn_width,
    )


def load_corpus(options: argparse.Namespace, folder: Path) -> PreparedCorpus:
    """Return the training corpus."""
    if options.data:
        return multi30k_corpus(folder, options.data, vocabulary=options.vocabulary)
    return synthetic_corpus(
        folder, options.pairs, vocabulary=options.vocabulary, length_factor=options.length_factor
    )


def time_system(
    system: str,
    plan: BenchmarkPlan,
    model: ModelConfig,
    options: argparse.Namespace,
    device: torch.device,
    folder: Path,
) -> dict[str, Any]:
    """Time one system."""
    if system in MODES:
        return time_ours(system, plan, model, options, device, folder)
    if system in TRAINERS:
        torch.manual_seed(1)
        return time_trainer(
            system,
            build_marian(model, SIZES[options.size][0], options.vocabulary),
            plan.store,
            options,
            device,
            folder,
        )
    return time_peer(system, plan, model, options, device)


class TimedFeed:
    """Data loader that measures how long the trainer waits for it."""

    def __init__(self, feed: DataLoader, warmup_batches: int) -> None:
        self._data_loader, self._warmup_steps, self.wait_seconds = feed, warmup_batches, 0.0

    def batches(self, number: int, cursor: Cursor) -> Generator[GlobalBatch, None, None]:
        """Yield the batches."""
        batches = self._data_loader.batches(number, cursor)
        try:
            while True:
                began = time.perf_counter()
                batch = next(batches)
                if batch.step > self._warmup_steps:
                    self.wait_seconds += time.perf_counter() - began
                yield batch
        finally:
            batches.close()


def time_ours(
    mode: str,
    plan: BenchmarkPlan,
    model: ModelConfig,
    options: argparse.Namespace,
    device: torch.device,
    folder: Path,
    **settings: float,
) -> dict[str, Any]:
    """Train with our trainer and more of its settings, reading the clock at its log lines."""
    began = time.perf_counter()
    warmup_batches, steps = len(plan.warmup_batches), len(plan.timed)
    config = TrainConfig(
        **{
            **MODES[mode],
            "steps": warmup_batches + plan.rounds * steps,
            "batch_tokens": options.batch_tokens,
            "checkpoint_every": 10**6,
            **settings,
        },
        label_smoothing=SMOOTHING,
        precision=options.precision,
        warmup_steps=4000,
    )
    clock: dict[int, float] = {}

    def on_record(record: Mapping[str, Any]) -> None:
        if "tokens" in record:
            clock[int(record["step"])] = time.perf_counter()

    reset_peak(device)
    with RunDirectory(folder, keep_checkpoints=1) as run:
        trainer = build_trainer(
            model, plan, config, run, device, options.vocabulary, on_record=on_record
        )
        feed = TimedFeed(trainer._data_loader, warmup_batches)
        trainer._data_loader = feed  # type: ignore[assignment]  # the trainer's own, with a stopwatch around it
        try:
            trainer.fit(resume=False)
        except OutOfTimeError:
            if warmup_batches + steps not in clock:
                raise
    rounds = [each for each in range(plan.rounds) if warmup_batches + (each + 1) * steps in clock]
    seconds = [
        clock[warmup_batches + (each + 1) * steps] - clock[warmup_batches + each * steps]
        for each in rounds
    ]
    wait_seconds = feed.wait_seconds / sum(seconds)
    return timing_row(
        mode, [plan.tokens()] * len(rounds), seconds, clock[warmup_batches] - began, device
    ) | {
        "ours": True,
        "data_wait": wait_seconds,
    }


def build_trainer(
    model: ModelConfig,
    plan: BenchmarkPlan,
    config: TrainConfig,
    run: RunDirectory,
    device: torch.device,
    vocabulary: int,
    **more: Any,
) -> Trainer:
    """Build the trainer as a run does."""
    torch.manual_seed(1)
    built = build_model(model, src_vocab_size=vocabulary, tgt_vocab_size=vocabulary).to(device)
    task = TranslationTask(
        smoothing=config.label_smoothing, regularization=Regularization.of(config)
    )
    return Trainer(
        model=built,
        task=task,
        plan=plan,
        collate=plan.collate,
        config=config,
        run=run,
        width=model.width,
        **more,
    )


def time_peer(
    system: str,
    plan: BenchmarkPlan,
    model: ModelConfig,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Time a peer's training steps."""
    began = time.perf_counter()
    name = system.removesuffix(", compiled")
    dtype = choose_precision(options.precision, device).dtype
    reset_peak(device)
    torch.manual_seed(1)
    peer = PEERS[name](model, SIZES[options.size][0], options.vocabulary)
    step = PeerStep(peer, device, dtype, compiled=system != name, static=options.static)
    warmup_batches, timed = (
        [plan.collate(batch) for batch in part]
        for part in (plan.warmup_batches[::WARMUP_BATCHES], plan.timed)
    )
    if device.type == "cuda":
        warmup_batches, timed = (
            [batch.pin_memory() for batch in part] for part in (warmup_batches, timed)
        )
    for batch in warmup_batches:
        step(batch)
    synchronize(device)
    warmup_seconds = time.perf_counter() - began
    seconds: list[float] = []
    for _ in range(PEER_ROUNDS):
        started = time.perf_counter()
        for batch in timed:
            step(batch)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return timing_row(system, [plan.tokens()] * PEER_ROUNDS, seconds, warmup_seconds, device) | {
        "on_our_batches": True
    }


def label(row: Mapping[str, Any]) -> str:
    """Return the label of a row, with the origin of its batches."""
    return (
        f"ours, {row['system']}"
        if "ours" in row
        else f"{row['system']}, on our batches"
        if "on_our_batches" in row
        else str(row["system"])
    )


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    if "error" in row:
        print(f"  {label(row):46s} failed: {row['error']}", flush=True)
        return
    memory = "" if row["MiB"] is None else f"  {row['MiB']:8,.0f} MiB"
    idle = f"  waiting for data {row['data_wait']:.1%}" if "data_wait" in row else ""
    own = (
        f"  {row['sentences']:,} sentences per batch, {row['padding']:.1%} padding"
        if "sentences" in row
        else ""
    )
    print(
        f"  {label(row):46s} {row['tokens_s']:12,.0f} tokens/s "
        f"(slowest round {row['slowest']:,.0f})  warm-up {row['warm_up_s']:6.1f} s"
        f"{memory}{idle}{own}",
        flush=True,
    )


def report(rows: list[dict[str, Any]]) -> None:
    """Print the ratio of our fastest mode to every other system."""
    good = [row for row in rows if "error" not in row]
    ours = [row for row in good if "ours" in row]
    if not ours:
        return
    best = max(ours, key=lambda row: row["tokens_s"])
    print(f"\n{label(best)}, against:")
    for row in good:
        if row is not best:
            print(f"  {label(row):46s} {best['tokens_s'] / row['tokens_s']:6.2f} times")


if __name__ == "__main__":
    main()
