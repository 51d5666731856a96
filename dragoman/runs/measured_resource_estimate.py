"""Estimates before a run, from measured steps: throughput, time, memory and disk space."""

from __future__ import annotations

import itertools
import math
import os
import resource
import sys
import time
from typing import NamedTuple

import torch
from torch import nn

from dragoman.config import Config, TrainConfig
from dragoman.data.batch_plan import Plan
from dragoman.data.collate import Batch, TensorBatch, make_batch
from dragoman.errors import ConfigError
from dragoman.models.factory import build_model, count_parameters
from dragoman.registry import catalogue
from dragoman.runtime.out_of_memory import is_out_of_memory, release_memory
from dragoman.runtime.random_generators import isolated_rng
from dragoman.storage.disk_space_and_errors import format_bytes
from dragoman.tasks.translation import Regularization, TranslationTask, TranslationValidator
from dragoman.training.bf16_mixed_precision import choose_precision
from dragoman.training.cuda_graphs import (
    CAPTURE_AT_OCCURRENCE,
    CUDAGraphRunner,
    ForwardBackward,
)
from dragoman.training.optimizer import full_state_shapes
from dragoman.training.progress_display import format_duration
from dragoman.training.task_protocol import Loss
from dragoman.training.throughput_benchmark import Throughput, time_steps
from dragoman.training.torch_compile import allow_graph_kernels, should_use_cuda_graphs
from dragoman.training.trainer import Trainer

RANDOM_SENTENCE_TOKENS = 20  # tokens of a random sentence, on each side
RANDOM_PROBE_SECONDS = 2.0  # half of it is warm-up
PROBE_SECONDS = 5.0
PROBE_VALIDATION_BATCHES, PROBE_VALIDATION_SENTENCES = 2, 8
BATCHING_EXPONENT = 0.75  # time grows with sentences^0.75: 25 times as many take 11 times as long
TRAINED_OUTPUT_RATIO = 0.4  # output length of a trained model over an untrained one (Multi30k)
CHECKPOINT_BYTES_PER_SECOND = 150e6  # written, synced, read back and hashed


def measure_random_throughput(config: Config, device: torch.device) -> float:
    """Return the training tokens/s on random sentences; halve the batch if out of memory."""
    rows = max(1, config.train.batch_tokens // RANDOM_SENTENCE_TOKENS)
    while True:
        try:
            return _measure_rows(config, device, rows)
        except (RuntimeError, MemoryError) as error:
            if rows == 1 or not is_out_of_memory(error):
                raise
        release_memory()
        rows //= 2


def _measure_rows(config: Config, device: torch.device, rows: int) -> float:
    """Measure with a number of sentences per batch, with CUDA graphs where training uses them."""
    with isolated_rng(0):
        vocab_size = config.text.vocab_size
        model = (
            build_model(config.model, src_vocab_size=vocab_size, tgt_vocab_size=vocab_size)
            .to(device)
            .train()
        )
        optimizer = catalogue("optimizer").load(config.train.optimizer)(model, config.train)
        task = TranslationTask(
            smoothing=config.train.label_smoothing,
            regularization=Regularization.of(config.train),
        )
        precision = choose_precision(config.train.precision, device)
        batch = _random_batch(rows, vocab_size).to(device)

        def forward_backward(batch: TensorBatch) -> Loss:
            assert isinstance(batch, Batch), f"found {type(batch).__name__}"
            with precision.autocast(device):
                loss = task.loss(model, batch)
            torch.autograd.backward(loss.total / loss.count)
            return loss

        compute: ForwardBackward = forward_backward
        min_steps = 1
        if should_use_cuda_graphs(config.train, device):
            allow_graph_kernels(model, allowed=True)
            compute = CUDAGraphRunner(forward_backward, list(model.parameters()), device)
            min_steps = 2 * CAPTURE_AT_OCCURRENCE

        def step() -> int:
            compute(batch)
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return 2 * RANDOM_SENTENCE_TOKENS * rows

        return time_steps(step, seconds=RANDOM_PROBE_SECONDS, min_steps=min_steps).tokens_per_second


def _random_batch(rows: int, vocab_size: int) -> Batch:
    """Return a batch of random tokens without padding."""
    ids = torch.randint(4, vocab_size, (rows, RANDOM_SENTENCE_TOKENS - 1)).tolist()
    return make_batch(ids, ids)


class RunEstimate(NamedTuple):
    """An estimate from a few real training steps."""

    data: str  # the numbers of the data, as text
    parameters: int
    steps: int
    epochs: float
    padding: float
    throughput: Throughput
    peak_memory_bytes: int  # of the GPU or of the process
    checkpoint_bytes: int  # of one checkpoint
    validation_seconds: float = 0.0  # of one validation

    def with_steps(self, steps: int) -> RunEstimate:
        """Return the estimate for another number of steps."""
        return self._replace(steps=steps, epochs=self.epochs * steps / self.steps)

    def overhead(self, config: TrainConfig) -> float:
        """Return the seconds of a run's validations and checkpoints."""
        validations = config.steps / config.validate_every + 1
        checkpoints = config.steps / config.checkpoint_every + validations
        if config.checkpoint_every == config.validate_every:  # saved once, after validating
            checkpoints = validations
        return validations * self.validation_seconds + checkpoints * self.checkpoint_seconds

    @property
    def checkpoint_seconds(self) -> float:
        """Return the estimated seconds of writing one checkpoint."""
        return 0.1 + self.checkpoint_bytes / CHECKPOINT_BYTES_PER_SECOND

    def lines(self) -> list[str]:
        """Return the estimate as lines of text."""
        seconds = format_duration(self.steps * self.throughput.seconds_per_step)
        return [
            f"data: {self.data}; padding {100 * self.padding:.1f} %",
            f"model: {self.parameters:,} parameters",
            f"training: {self.steps:,} steps, {self.epochs:.1f} epochs, about {seconds} "
            f"at {self.throughput.tokens_per_second:,.0f} tokens/s",
            f"memory: about {format_bytes(self.peak_memory_bytes)} peak; "
            f"disk: {format_bytes(self.checkpoint_bytes)} per checkpoint",
        ]


def estimate_validation_seconds(validation: TranslationValidator | None, model: nn.Module) -> float:
    """Return the estimated seconds of one validation, measured on a few batches and sentences."""
    if validation is None:
        return 0.0
    model.eval()
    try:
        with isolated_rng(0), torch.no_grad():
            task, batches = (
                TranslationTask(smoothing=0.0),
                list(itertools.islice(validation.batches(), PROBE_VALIDATION_BATCHES + 1)),
            )
            began = time.monotonic()
            for index, batch in enumerate(batches):
                if index == 1 or len(batches) == 1:  # the first is warm-up
                    began = time.monotonic()
                with validation.precision.autocast(validation.device):
                    task.loss(model, batch.to(validation.device))
            seconds = (time.monotonic() - began) * validation.count / max(1, len(batches) - 1)
            if (
                validation.translate is None
                or validation.sample is None
                or not len(validation.sample.src)
            ):
                return seconds
            sample = validation.sample.src[:PROBE_VALIDATION_SENTENCES]
            validation.translate(model, sample[:2])
            began = time.monotonic()
            validation.translate(model, sample)
            ratio = max(1.0, len(validation.sample.src) / len(sample))
            return (
                seconds
                + (time.monotonic() - began) * ratio**BATCHING_EXPONENT * TRAINED_OUTPUT_RATIO
            )
    finally:
        model.train()


def estimate_run(
    trainer: Trainer, plan: Plan, config: Config, data: str, device: torch.device
) -> RunEstimate:
    """Measure a few training steps and return the estimate; weights and optimizer are restored."""
    throughput = trainer.measure_throughput(
        min(PROBE_SECONDS, 0.02 * config.train.time_budget)
        if config.train.time_budget
        else PROBE_SECONDS
    )
    parameters = count_parameters(trainer.model)
    moments = sum(map(math.prod, full_state_shapes(trainer.optimizer, trainer.model).values()))
    numbers = moments + parameters * (2 if config.train.ema_decay else 1)  # weights and EMA
    return RunEstimate(
        data=data,
        parameters=parameters,
        steps=config.train.steps,
        epochs=config.train.steps * config.train.gradient_accumulation / plan.batches(0),
        padding=plan.padding_fraction(0),
        throughput=throughput,
        peak_memory_bytes=peak_memory(device),
        checkpoint_bytes=4 * numbers,
    )


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes, of the GPU or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def require_model_fits_memory(parameters: int) -> None:
    """Raise ConfigError if the float32 weights exceed the machine's memory."""
    needed, available = 4 * parameters, _physical_memory()
    if available and needed > available:
        found = (
            f"{parameters:,} parameters, {format_bytes(needed)} in float32, "
            f"and {format_bytes(available)} of memory"
        )
        raise ConfigError(
            [
                f"the model must fit into this machine's memory; found {found}; "
                "lower model.width or the number of layers"
            ]
        )


def _physical_memory() -> int:
    """Return the bytes of physical memory; 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
