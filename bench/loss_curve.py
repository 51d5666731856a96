"""Compare the losses of default mixed-precision training with plain float32, over several seeds.

`python bench/train_gpu.py --loss-curve` makes two comparisons.

Curves: all runs have the same initial weights and batches, and differ in computation and dropout.
At high learning rates, above all with post-norm, runs diverge chaotically by up to tenths of a nat,
so a difference is compared with the spread between seeds. The standard error is rough: with three
runs each, equal setups differ by more than two standard errors in 12 % of the windows (Student's t,
four degrees of freedom), and windows of one run are not independent.

Frozen weights: with a learning rate of 0, loss and gradient norm are compared step by step on the
same weights and batches. This shows systematic errors early, but not accumulated ones.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.peers import SMOOTHING
from bench.synthetic_corpus import WARMUP_BATCHES, BenchmarkPlan, PreparedCorpus
from bench.timing_helpers import device_name, free_memory
from bench.train_gpu import MODES, build_trainer
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import ModelConfig, TrainConfig

REFERENCE = "plain float32"
WINDOWS = 10
MIN_ERROR = 1e-9  # nats; avoids division by zero for runs without spread
REPORTED_OPTIONS = (
    "size",
    "curve_steps",
    "seeds",
    "rate",
    "warm_up",
    "frozen_steps",
    "batch_tokens",
    "vocabulary",
)


def compared_setups(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the compared settings: the default (bfloat16 only, on a CPU), and plain float32."""
    mode = "compiled+cuda_graphs" if device.type == "cuda" else "eager"
    return {
        f"{mode} bfloat16": {**MODES[mode], "precision": "bfloat16"},
        REFERENCE: {**MODES["eager"], "precision": "float32"},
    }


class LossCurve(NamedTuple):
    """Metrics of every step of a run, and its final weights."""

    nll: list[float]
    norm: list[float]  # gradient norm
    weights: dict[str, Tensor]


class LossCurveRunner:
    """Common initial weights and batches; runs differ in settings and dropout seed."""

    def __init__(
        self,
        options: argparse.Namespace,
        corpus: PreparedCorpus,
        model: ModelConfig,
        device: torch.device,
        folder: Path,
    ) -> None:
        self._options, self._corpus, self._model, self._device, self._folder = (
            options,
            corpus,
            model,
            device,
            folder,
        )

    def config(self, setup: Mapping[str, Any], seed: int, **more: Any) -> TrainConfig:
        """Return a run's settings; the seed changes dropout only."""
        tokens = self._options.batch_tokens
        return TrainConfig(
            **setup,
            seed=seed,
            batch_tokens=tokens,
            checkpoint_every=10**6,
            label_smoothing=SMOOTHING,
            **more,
        )

    def train(self, name: str, setup: Mapping[str, Any], seed: int) -> LossCurve:
        """Train from the initial weights."""
        options = self._options
        config = self.config(
            setup,
            seed,
            steps=options.curve_steps,
            learning_rate=options.rate,
            warmup_steps=options.warm_up,
        )
        return self._run(f"{name}, seed {seed}", config, self.plan(options.curve_steps))

    def run_frozen(
        self, name: str, setup: Mapping[str, Any], seed: int, weights: Mapping[str, Tensor]
    ) -> LossCurve:
        """Run steps with a learning rate of 0, each batch a few times, to replay CUDA graphs."""
        config = self.config(setup, seed, steps=self._options.frozen_steps, learning_rate=0.0)
        plan = self.plan(
            math.ceil(self._options.frozen_steps / WARMUP_BATCHES), rounds=WARMUP_BATCHES
        )
        run = self._run(f"{name}, seed {seed}, frozen", config, plan, weights)
        moved = max(
            float((run.weights[key] - weight).abs().max()) for key, weight in weights.items()
        )
        assert moved == 0.0, f"frozen weights must not change; found a change of {moved}"
        return run

    def plan(self, steps: int, rounds: int = 1) -> BenchmarkPlan:
        """Return the batches of every run."""
        options = self._options
        return BenchmarkPlan(
            self._corpus.store,
            batch_tokens=options.batch_tokens,
            max_shapes=options.shapes,
            steps=steps,
            rounds=rounds,
            warmup_batches=0,
        )

    def _run(
        self,
        label: str,
        config: TrainConfig,
        plan: BenchmarkPlan,
        weights: Mapping[str, Tensor] | None = None,
    ) -> LossCurve:
        """Run the trainer and print a summary line."""
        began = time.perf_counter()
        records: list[Mapping[str, Any]] = []
        # A temporary directory, because the checkpoints of all runs would fill a disk.
        with (
            tempfile.TemporaryDirectory(dir=self._folder) as name,
            RunDirectory(Path(name) / "run", keep_checkpoints=1) as run,
        ):
            vocabulary = len(self._corpus.tokenizers.tgt)
            trainer = build_trainer(
                self._model, plan, config, run, self._device, vocabulary, on_record=records.append
            )
            if weights is not None:
                trainer.model.load_state_dict(weights)
            trainer.fit(resume=False)
        nll, norm = (
            [float(record[key]) for record in records if "nll" in record]
            for key in ("nll", "grad_norm")
        )
        assert len(nll) == config.steps, (
            f"a run must log each of its {config.steps} steps once; found {len(nll)}"
        )
        last = {key: tensor.cpu() for key, tensor in trainer.model.state_dict().items()}
        print(
            f"  {label:48s} {len(nll)} steps in {time.perf_counter() - began:.0f} s, "
            f"last loss {nll[-1]:.4f}",
            flush=True,
        )
        del trainer
        free_memory(self._device)
        return LossCurve(nll, norm, last)


def loss_curve(
    options: argparse.Namespace,
    corpus: PreparedCorpus,
    model: ModelConfig,
    device: torch.device,
    folder: Path,
) -> None:
    """Run both comparisons; print tables and one line of JSON."""
    runner = LossCurveRunner(options, corpus, model, device, folder)
    both = compared_setups(device)
    ours = next(iter(both))
    seeds = range(1, options.seeds + 1)
    runs = {
        name: [runner.train(name, setup, seed) for seed in seeds] for name, setup in both.items()
    }
    windows = compare(*([run.nll for run in runs[name]] for name in (ours, REFERENCE)))
    largest = print_windows(ours, windows)
    weights = runs[REFERENCE][0].weights
    base, other, noise = (
        runner.run_frozen(name, both[name], seed, weights)
        for name, seed in ((REFERENCE, 1), (ours, 1), (REFERENCE, 2))
    )
    held = print_frozen(
        {
            f"{ours}, seed 1": paired_differences(other, base),
            f"{REFERENCE}, seed 2": paired_differences(noise, base),
        }
    )
    data = str(options.data) if options.data else "drawn"
    signature = {"data": data, "device": device_name(device), "torch": torch.__version__} | {
        name: getattr(options, name) for name in REPORTED_OPTIONS
    }
    found = {"ours": ours, "loss_curve": windows, "largest": largest, "frozen": held}
    print(json.dumps({"bench": "train_gpu"} | found | signature))


def compare(
    ours: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """Compare two groups of curves in ten windows; a run's mean over a window is an observation."""
    length = len(plain[0])
    bounds = [length * part // WINDOWS for part in range(WINDOWS + 1)]
    windows = []
    for start, stop in pairwise(bounds):
        if start == stop:  # fewer steps than windows
            continue
        our_means, plain_means = (
            [fmean(curve[start:stop]) for curve in group] for group in (ours, plain)
        )
        difference = fmean(our_means) - fmean(plain_means)
        error = math.sqrt(
            stdev(our_means) ** 2 / len(our_means) + stdev(plain_means) ** 2 / len(plain_means)
        )
        window = {"from": start + 1, "to": stop, "ours": our_means, "plain": plain_means}
        window |= {"plain_mean": fmean(plain_means), "plain_deviation": stdev(plain_means)}
        windows.append(
            window
            | {
                "difference": difference,
                "error": error,
                "in_errors": difference / max(error, MIN_ERROR),
            }
        )
    return windows


def print_windows(ours: str, windows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Print the windows and the largest difference."""
    print(
        f"\nmean NLL in nats per token: {REFERENCE}, its standard deviation over seeds, "
        f"and {ours} - {REFERENCE} with its standard error"
    )
    print(
        f"{'steps':>11s} {'float32':>10s} {'deviation':>10s} {'difference':>10s} {'error':>10s} "
        f"{'in errors':>10s}"
    )
    for window in windows:
        cells = "".join(
            f"{window[key]:>11.4f}"
            for key in ("plain_mean", "plain_deviation", "difference", "error")
        )
        print(f"{window['from']:>5d}-{window['to']:<5d}{cells}{window['in_errors']:>11.1f}")
    largest = {"nats": max(abs(window["difference"]) for window in windows)}
    largest |= {"in_errors": max(abs(window["in_errors"]) for window in windows)}
    within = sum(abs(window["in_errors"]) <= 2 for window in windows)
    print(
        f"largest difference {largest['nats']:.4f} nats, "
        f"largest in standard errors {largest['in_errors']:.1f}; "
        f"{within} of {len(windows)} windows within two standard errors",
        flush=True,
    )
    return largest | {"within_two": within, "windows": len(windows)}


def paired_differences(run: LossCurve, base: LossCurve) -> dict[str, float]:
    """Return the mean of step-by-step differences and its standard error."""
    losses = [ours - plain for ours, plain in zip(run.nll, base.nll, strict=True)]
    ratios = [ours / plain for ours, plain in zip(run.norm, base.norm, strict=True)]
    root = math.sqrt(len(losses))
    means = {"nll": fmean(losses), "nll_error": stdev(losses) / root}
    return means | {"norm_ratio": fmean(ratios), "norm_ratio_error": stdev(ratios) / root}


def print_frozen(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Print the comparison with frozen weights."""
    print(
        f"\nfrozen weights, each step against {REFERENCE}, seed 1: difference of the NLL, "
        "ratio of the gradient norms"
    )
    for name, row in rows.items():
        loss, norm = (
            f"{row[key]:{form}} ± {row[f'{key}_error']:.5f}"
            for key, form in (("nll", "+.5f"), ("norm_ratio", ".5f"))
        )
        print(f"  {name:34s} {loss:>22s}   norm {norm:>20s}", flush=True)
    return rows
