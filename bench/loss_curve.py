"""Train twice from the same start, compiled in bfloat16 and plainly in float32, and say how far apart the losses are."""

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


def loss_curve(options: argparse.Namespace, corpus: Corpus, model: ModelConfig, device: torch.device, folder: Path) -> None:
    """Train compiled in bfloat16 and plainly in float32 from the same start; a second plain run, with other dropout, shows the noise."""
    on_gpu = device.type == "cuda"  # a CPU's compiler takes minutes
    wanted: dict[str, dict[str, Any]] = {
        f"{'compiled' if on_gpu else 'plain'}, bfloat16": {
            **MODES["compiled+replay" if on_gpu else "eager"],
            "precision": "bfloat16",
            "seed": 1,
        },
        "plain, float32": {**MODES["eager"], "precision": "float32", "seed": 1},
        "plain, float32, other dropout": {**MODES["eager"], "precision": "float32", "seed": 2},
    }
    plan = Rounds(corpus.store, batch_tokens=options.batch_tokens, max_shapes=options.shapes, steps=options.updates, rounds=1)
    curves: dict[str, list[float]] = {}
    for number, (name, settings) in enumerate(wanted.items()):
        settings |= {"steps": options.updates, "batch_tokens": options.batch_tokens, "checkpoint_every": 10**6, "warmup": 200}
        losses: list[float] = []

        def observe(record: Mapping[str, Any], losses: list[float] = losses) -> None:
            if "nll" in record:
                losses.append(float(record["nll"]))

        began = time.perf_counter()
        with RunDirectory(folder / f"curve-{number}", keep=1) as run:
            config = TrainConfig(**settings, label_smoothing=SMOOTHING)
            trainer_of(model, plan, config, run, device, options.vocabulary, observe=observe).run(resume=False)
        curves[name] = losses
        print(f"  {name:32s} {len(losses)} updates in {time.perf_counter() - began:.0f} s, last loss {losses[-1]:.4f}", flush=True)
        free(device)
    first, second, third = curves.values()
    width = max(1, options.updates // 10)
    print(f"\nmean loss in nats a piece\n{'updates':>12s} {'bfloat16':>10s} {'float32':>10s} {'difference':>11s} {'noise':>9s}")
    windows = []
    for start in range(0, len(first) - width + 1, width):
        means = [sum(curve[start : start + width]) / width for curve in (first, second, third)]
        windows.append([start + 1, start + width, *means])
        apart, noise = means[0] - means[1], means[2] - means[1]
        print(f"{start + 1:>6d}-{start + width:<5d} {means[0]:>10.4f} {means[1]:>10.4f} {apart:>11.4f} {noise:>9.4f}")
    largest = max(abs(row[2] - row[3]) for row in windows)
    other = max(abs(row[4] - row[3]) for row in windows)
    signature = {"device": machine(device), "torch": torch.__version__, "size": options.size, "updates": options.updates}
    print(json.dumps({"bench": "train_gpu", "loss_curve": windows, "largest_difference": largest, "noise": other} | signature))
