"""A trainer for tests: a Transformer of ten thousand weights that learns to reverse a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.config import ModelConfig, TrainConfig
from dragoman.data.batch_plan import BatchPlan
from dragoman.data.collate import Batch, make_batch
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.tasks.translation import TranslationTask
from dragoman.training.cuda_graphs import CUDAGraphRunner, _CapturedGraph
from dragoman.training.data_loader import GlobalBatch
from dragoman.training.task_protocol import Loss
from dragoman.training.train_step import OOMSplitter, StepRequests, TrainStep
from dragoman.training.trainer import Trainer

VOCABULARY = 24
PAIRS = 96
SETTINGS = TrainConfig(
    steps=12,
    batch_tokens=64,
    learning_rate=3e-3,
    warmup_steps=4,
    schedule="constant",
    optimizer="adamw",
    weight_decay=0.01,
    max_grad_norm=1.0,
    ema_decay=0.9,
    precision="float32",
    checkpoint_every=4,
    validate_every=4,
    keep_checkpoints=3,
    seed=7,
)
MODEL = ModelConfig(
    encoder=("transformer*1",),
    decoder=("transformer*1",),
    width=16,
    heads=2,
    ffn_width=32,
    residual="pre_norm",
    dropout=0.1,
)


class Corpus:
    """Pairs of ids: a random sequence, and the same backwards."""

    def __init__(self, pairs: int = PAIRS, seed: int = 0, longest: int = 9) -> None:
        generator = np.random.default_rng(seed)
        self.src = [
            generator.integers(4, VOCABULARY, generator.integers(1, longest + 1))
            for _ in range(pairs)
        ]
        self.tgt = [ids[::-1].copy() for ids in self.src]
        self.lengths = np.array([len(ids) for ids in self.src])

    def plan(self, batch_tokens: int = 64, seed: int = 7) -> BatchPlan:
        return BatchPlan(self.lengths, self.lengths, batch_tokens=batch_tokens, seed=seed)

    def collate(self, plan: BatchPlan) -> Callable[[np.ndarray, int], Batch]:
        def make(examples: np.ndarray, seed: int) -> Batch:
            return make_batch(
                [self.src[i] for i in examples],
                [self.tgt[i] for i in examples],
                examples=examples,
                shapes=plan.shapes,
            )

        return make


def tiny_model(seed: int = 1, **changes: Any) -> EncoderDecoder:
    torch.manual_seed(seed)
    return build_model(
        dataclasses.replace(MODEL, **changes), src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY
    )


def tiny_trainer(
    run: RunDirectory,
    *,
    model: dict[str, Any] | None = None,
    pairs: int = PAIRS,
    parts: dict[str, Any] | None = None,
    **settings: Any,
) -> Trainer:
    """Build a trainer.

    `settings` change TrainConfig, `model` ModelConfig, `parts` the trainer's own arguments.
    """
    config = dataclasses.replace(SETTINGS, **settings)
    corpus = Corpus(pairs)
    plan = corpus.plan(config.batch_tokens, config.seed)
    arguments: dict[str, Any] = {
        "task": TranslationTask(smoothing=config.label_smoothing),
        "collate": corpus.collate(plan),
        **(parts or {}),
    }
    return Trainer(
        model=tiny_model(**(model or {})),
        plan=plan,
        config=config,
        run=run,
        width=MODEL.width,
        **arguments,
    )


def log_of(path: Path) -> list[dict[str, Any]]:
    """Read a run's log, without what the clock decides."""
    return [
        {key: value for key, value in record.items() if key != "seconds"}
        for record in RunDirectory(path).records()
    ]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Read the newest step's tensors, by file and name."""
    newest = RunDirectory(path).latest()
    assert newest is not None, f"nothing was published in {path}"
    files = {
        "weights": newest.load_weights(),
        "optimizer": newest.load_optimizer(),
        "ema": newest.load_ema() or {},
    }
    return {
        f"{part}/{name}": tensor
        for part, tensors in files.items()
        for name, tensor in tensors.items()
    }


def state_of(path: Path) -> dict[str, Any]:
    """Read the newest step's state, without what the clock decides."""
    newest = RunDirectory(path).latest()
    assert newest is not None, f"nothing was published in {path}"
    return {key: value for key, value in newest.state.items() if key != "seconds"}


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that two runs are bit-identical: weights, moments, EMA, state and log."""
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, different
    assert state_of(one) == state_of(other)
    logs = [
        [record for record in log_of(path) if record.get("event") != "checkpoint"]
        for path in (one, other)
    ]
    assert logs[0] == logs[1]


def accumulated(step: TrainStep, batch: GlobalBatch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Do a step with a learning rate of zero.

    Return its summed gradients, and loss, nll and targets.
    """
    seen: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    all_reduce = step._parallel.all_reduce_gradients

    def note(gradients: Any, sums: torch.Tensor, number: int) -> Any:
        kept = [each if each is None else each.clone() for each in gradients]
        seen.append((kept, sums[:3].clone()))
        return all_reduce(gradients, sums, number)

    step._parallel.all_reduce_gradients = note  # type: ignore[method-assign]
    try:
        step(batch, lr=0.0, requests=StepRequests())
    finally:
        step._parallel.all_reduce_gradients = all_reduce  # type: ignore[method-assign]
    return seen[0]


def fail_in_parts(
    splitter: OOMSplitter, batch: Batch, error: Exception, *, may_split: bool = True
) -> None:
    """Raise an error in every part of a batch."""
    for part in splitter.parts(batch, may_split=may_split):
        with part:
            raise error


class FakeCUDAGraphRunner(CUDAGraphRunner):
    """A fake CUDA graph runner: a replay computes eagerly, from and to the graph's tensors."""

    def _capture(self, batch: Batch) -> _CapturedGraph:
        loss = Loss(*(torch.zeros(()) for _ in range(3)))

        def replay() -> None:
            assert self._flat_grads is not None
            self._flat_grads.fill_(
                0.0 if self._accumulates_grad else torch.nan
            )  # what is written over may be anything
            for parameter, view in zip(
                self._parameters, self._grad_views(self._flat_grads), strict=True
            ):
                parameter.grad = view
            found = self._compute(batch)
            for target, value in zip(
                (loss.total, loss.nll, loss.count),
                (found.total, found.nll, found.count),
                strict=True,
            ):
                target.copy_(value.detach())

        return _CapturedGraph(batch, loss, replay)
