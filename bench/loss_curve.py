"""Train from the same start in several ways, and say how far their losses are from those of plain float32."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.drawn import Corpus, Rounds
from bench.peers import SMOOTHING
from bench.stopwatch import free, machine
from bench.train_gpu import MODES, trainer_of
from dragoman.config import ModelConfig, TrainConfig
from dragoman.training.checkpoint import RunDirectory

REFERENCE, NOISE = "plain, float32", "plain, float32, other dropout"


def ways(device: torch.device) -> dict[str, dict[str, Any]]:
    """Name the runs: what a GPU's users get, the same without the compiler, the reference, and the reference with other dropout."""
    halves = {f"{mode}, bfloat16": MODES[mode] for mode in (("compiled+replay", "replay") if device.type == "cuda" else ("eager",))}
    wanted: dict[str, dict[str, Any]] = {name: {**mode, "precision": "bfloat16", "seed": 1} for name, mode in halves.items()}
    plain = {**MODES["eager"], "precision": "float32"}
    return wanted | {REFERENCE: {**plain, "seed": 1}, NOISE: {**plain, "seed": 2}}


def loss_curve(options: argparse.Namespace, corpus: Corpus, model: ModelConfig, device: torch.device, folder: Path) -> None:
    """Train each way and compare means of the loss over tenths of the run.

    The rate rises for half of it, to 3e-4: with the norm behind the layers a higher one, sooner, leaves two runs that differ in nothing
    but dropout 0.6 apart, and a comparison says nothing.
    """
    plan = Rounds(corpus.store, batch_tokens=options.batch_tokens, max_shapes=options.shapes, steps=options.updates, rounds=1)
    curves: dict[str, list[float]] = {}
    for name, settings in ways(device).items():
        began = time.perf_counter()
        with RunDirectory(folder / f"curve-{len(curves)}", keep=1) as run:
            config = TrainConfig(
                **settings,
                steps=options.updates,
                batch_tokens=options.batch_tokens,
                checkpoint_every=10**6,
                learning_rate=3e-4,
                warmup=max(1, options.updates // 2),
                label_smoothing=SMOOTHING,
            )
            losses: list[float] = []

            def observe(record: Mapping[str, Any], losses: list[float] = losses) -> None:
                if "nll" in record:
                    losses.append(float(record["nll"]))

            trainer_of(model, plan, config, run, device, len(corpus.tokenizers.tgt), observe=observe).run(resume=False)
        curves[name] = losses
        print(f"  {name:32s} {len(losses)} updates in {time.perf_counter() - began:.0f} s, last loss {losses[-1]:.4f}", flush=True)
        free(device)
    windows = compare(curves, max(1, options.updates // 10))
    largest = {name: max(abs(row[name] - row[REFERENCE]) for row in windows) for name in curves if name != REFERENCE}
    signature = {"device": machine(device), "torch": torch.__version__, "size": options.size, "updates": options.updates}
    print(json.dumps({"bench": "train_gpu", "loss_curve": windows, "largest_differences": largest, "data": str(options.data)} | signature))


def compare(curves: Mapping[str, list[float]], width: int) -> list[dict[str, float]]:
    """Print the reference's mean over each window of updates, and how far every other run is from it."""
    others = [name for name in curves if name != REFERENCE]
    print(f"\nmean loss in nats a piece: {REFERENCE}, and less that: {'; '.join(others)}")
    windows = []
    for start in range(0, len(curves[REFERENCE]) - width + 1, width):
        means = {name: sum(curve[start : start + width]) / width for name, curve in curves.items()}
        windows.append({"from": start + 1, "to": start + width, **means})
        apart = "".join(f"{means[name] - means[REFERENCE]:>11.4f}" for name in others)
        print(f"{start + 1:>6d}-{start + width:<5d} {means[REFERENCE]:>10.4f} {apart}", flush=True)
    return windows
