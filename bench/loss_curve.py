"""Train as users do and in plain float32, each with several dropout seeds, and say whether their losses differ by more than seeds do.

`python bench/train_gpu.py --loss-curve` makes two comparisons, for each sees what the other cannot.

Curves: all runs have the same initial weights and the same batches, and differ in who computes and in dropout. Once the rate is high,
above all with the norm behind the layers, runs part chaotically, by up to tenths of a nat and whatever computes them: one run of
each way says nothing, so the noise is that between seeds. The standard error comes from both groups' spreads and is rough itself: with
three runs each, two that do not differ at all are more than two errors apart in 12 % of the windows (Student's t with four degrees of
freedom; up to 18 % where one group spreads and the other does not), and one run's windows are not independent of each other. Where
both ways draw the same dropout from a seed, as without a compiler, it cancels in the difference and not in the error, which is too large.

Weights held still: nothing can part, so every way sees the same weights and the same batches, and loss and gradient norm are compared
update by update. What errs in the same direction everywhere shows here long before a curve shows it; what only adds up does not.
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
from bench.synthetic_corpus import WARMUP_BATCHES, BenchmarkPlan, Corpus
from bench.timing import device_name, free_memory
from bench.train_gpu import MODES, build_trainer
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import ModelConfig, TrainConfig

REFERENCE = "plain float32"
WINDOWS = 10
MIN_ERROR = 1e-9  # nats: keeps runs without any spread from a division by zero
REPORTED_OPTIONS = (
    "size",
    "updates",
    "seeds",
    "rate",
    "warm_up",
    "still",
    "batch_tokens",
    "vocabulary",
)


def compared_setups(device: torch.device) -> dict[str, dict[str, Any]]:
    """Name what is compared: what a GPU's users get (on a CPU, bfloat16 alone), and float32 without compiler or recordings.

    The trainer lets a GPU multiply float32 in TensorFloat-32, here as ever.
    """
    mode = "compiled+replay" if device.type == "cuda" else "eager"
    return {
        f"{mode} bfloat16": {**MODES[mode], "precision": "bfloat16"},
        REFERENCE: {**MODES["eager"], "precision": "float32"},
    }


class Run(NamedTuple):
    """What one run leaves: figures of every update, and its last weights."""

    nll: list[float]
    norm: list[float]  # of the gradient
    weights: dict[str, Tensor]


class LossCurveRunner:
    """Where all runs start and what they run over; a run differs from another in its way and its dropout seed only."""

    def __init__(
        self,
        options: argparse.Namespace,
        corpus: Corpus,
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
        """Settle a run's settings; the seed reaches dropout only, for initial weights and batches have their own."""
        tokens = self._options.batch_tokens
        return TrainConfig(
            **setup,
            seed=seed,
            batch_tokens=tokens,
            checkpoint_every=10**6,
            label_smoothing=SMOOTHING,
            **more,
        )

    def train(self, name: str, setup: Mapping[str, Any], seed: int) -> Run:
        """Train from the initial weights over the wanted updates."""
        options = self._options
        config = self.config(
            setup,
            seed,
            steps=options.updates,
            learning_rate=options.rate,
            warmup_steps=options.warm_up,
        )
        return self._run(f"{name}, seed {seed}", config, self.plan(options.updates))

    def run_frozen(
        self, name: str, setup: Mapping[str, Any], seed: int, weights: Mapping[str, Tensor]
    ) -> Run:
        """Go over some batches with weights that stay as they are: at a rate of 0 an update computes all and moves nothing.

        Each batch comes a few times, with other dropout each time, as a GPU replays a shape only when it comes again.
        """
        config = self.config(setup, seed, steps=self._options.still, learning_rate=0.0)
        plan = self.plan(math.ceil(self._options.still / WARMUP_BATCHES), rounds=WARMUP_BATCHES)
        run = self._run(f"{name}, seed {seed}, held still", config, plan, weights)
        moved = max(
            float((run.weights[key] - weight).abs().max()) for key, weight in weights.items()
        )
        assert moved == 0.0, f"weights that are held still must not move; found a change of {moved}"
        return run

    def plan(self, steps: int, rounds: int = 1) -> BenchmarkPlan:
        """Plan the same batches for every run, without those that only warm up."""
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
    ) -> Run:
        """Run the library's trainer, from given weights or the initial ones, and print how it went."""
        began = time.perf_counter()
        records: list[Mapping[str, Any]] = []
        # Its own folder, gone afterwards: a checkpoint of each run would fill a disk.
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
            f"a run must log each of its {config.steps} updates once; found {len(nll)}"
        )
        last = {key: tensor.cpu() for key, tensor in trainer.model.state_dict().items()}
        print(
            f"  {label:48s} {len(nll)} updates in {time.perf_counter() - began:.0f} s, last loss {nll[-1]:.4f}",
            flush=True,
        )
        del trainer
        free_memory(self._device)
        return Run(nll, norm, last)


def loss_curve(
    options: argparse.Namespace,
    corpus: Corpus,
    model: ModelConfig,
    device: torch.device,
    folder: Path,
) -> None:
    """Make both comparisons, and print them as tables and as one line of JSON."""
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
    found = {"ours": ours, "loss_curve": windows, "largest": largest, "held_still": held}
    print(json.dumps({"bench": "train_gpu"} | found | signature))


def compare(
    ours: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """Compare two groups of curves over tenths of the run: a run's mean over a tenth is one observation, seeds make the spread."""
    length = len(plain[0])
    bounds = [length * part // WINDOWS for part in range(WINDOWS + 1)]
    windows = []
    for start, stop in pairwise(bounds):
        if start == stop:  # fewer updates than windows
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
    """Print the windows and, in one line, the worst of them."""
    print(
        f"\nmean nll in nats a piece: {REFERENCE}, its standard deviation over seeds, and {ours} less {REFERENCE}, with its standard error"
    )
    print(
        f"{'updates':>11s} {'float32':>10s} {'deviation':>10s} {'less':>10s} {'error':>10s} {'in errors':>10s}"
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
        f"largest difference {largest['nats']:.4f} nats, largest in standard errors {largest['in_errors']:.1f}; "
        f"{within} of {len(windows)} windows within two standard errors",
        flush=True,
    )
    return largest | {"within_two": within, "windows": len(windows)}


def paired_differences(run: Run, base: Run) -> dict[str, float]:
    """Compare update by update: batches differ far more from each other than two ways on one batch, and that cancels."""
    losses = [ours - plain for ours, plain in zip(run.nll, base.nll, strict=True)]
    ratios = [ours / plain for ours, plain in zip(run.norm, base.norm, strict=True)]
    root = math.sqrt(len(losses))
    means = {"nll": fmean(losses), "nll_error": stdev(losses) / root}
    return means | {"norm_ratio": fmean(ratios), "norm_ratio_error": stdev(ratios) / root}


def print_frozen(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Print what was found with weights held still."""
    print(
        f"\nweights held still, each update against {REFERENCE}, seed 1: nll less its nll, and the gradient's norm over its norm"
    )
    for name, row in rows.items():
        loss, norm = (
            f"{row[key]:{form}} ± {row[f'{key}_error']:.5f}"
            for key, form in (("nll", "+.5f"), ("norm_ratio", ".5f"))
        )
        print(f"  {name:34s} {loss:>22s}   norm {norm:>20s}", flush=True)
    return rows
