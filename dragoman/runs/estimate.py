"""Estimates before a run: throughput, time, memory and disk, measured on a few real or random batches."""

from __future__ import annotations

import itertools
import os
import resource
import sys
import time
from typing import NamedTuple

import torch
from torch import nn

from dragoman.config import Config, TrainConfig
from dragoman.data.batches import Batch, BatchPlan, make_batch
from dragoman.errors import ConfigError
from dragoman.models.factory import build_model, count_parameters
from dragoman.registry import catalogue
from dragoman.runs.data_preparation import PreparedData
from dragoman.runtime.memory import is_out_of_memory, release_memory
from dragoman.runtime.seeds import isolated_rng
from dragoman.storage.disk import format_bytes
from dragoman.tasks.translation import TranslationTask, TranslationValidator
from dragoman.training.mixed_precision import choose_precision
from dragoman.training.progress import format_duration
from dragoman.training.trainer import Throughput, Trainer

RANDOM_SENTENCE_TOKENS = (
    20  # pieces of a made-up sentence, both sides: a short sentence's usual length
)
RANDOM_PROBE_SECONDS, RANDOM_PROBE_STEPS = (
    1.5,
    2,
)  # measured for so long, and for so many updates at least


def measure_random_throughput(config: Config, device: torch.device) -> float:
    """Train on made-up sentences and return pieces a second, both sides together; a batch that does not fit is halved."""
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
    """Measure with so many sentences a batch."""
    with isolated_rng(0):
        vocabulary = config.text.vocab_size
        model = (
            build_model(config.model, src_vocab_size=vocabulary, tgt_vocab_size=vocabulary)
            .to(device)
            .train()
        )
        optimizer = catalogue("optimizer").load(config.train.optimizer)(model, config.train)
        task = TranslationTask(smoothing=config.train.label_smoothing)
        precision = choose_precision(config.train.precision, device)
        batch = _random_batch(rows, vocabulary).to(device)
        done, began = -1, 0.0
        while done < RANDOM_PROBE_STEPS or time.monotonic() - began < RANDOM_PROBE_SECONDS:
            with precision.autocast(device):
                loss = task.loss(model, batch)
            torch.autograd.backward(loss.total / loss.count)
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            done += 1
            if done == 0:  # the first update only warms up
                began = time.monotonic()
        return 2 * RANDOM_SENTENCE_TOKENS * rows * done / (time.monotonic() - began)


def _random_batch(rows: int, vocabulary: int) -> Batch:
    """Make a batch of random pieces, in which nothing is padded."""
    ids = torch.randint(4, vocabulary, (rows, RANDOM_SENTENCE_TOKENS - 1)).tolist()
    return make_batch(ids, ids)


PROBE_SECONDS = 5.0
PROBE_VALIDATION_BATCHES, PROBE_VALIDATION_SENTENCES = (
    2,
    8,
)  # of the validation corpus, before training
BATCHING_EXPONENT = 0.75  # exponent of the time to translate more sentences at once: 25 times as many take 11 times as long
TRAINED_OUTPUT_RATIO = 0.4  # outputs of a trained model, against those of an untrained one that finds no end (both measured on Multi30k)
CHECKPOINT_BYTES_PER_SECOND = 150e6  # bytes of a checkpoint: written, synced, read back and hashed


class RunEstimate(NamedTuple):
    """An estimate from a few real updates."""

    pairs: int
    valid_pairs: int
    vocabulary: tuple[int, int]
    parameters: int
    steps: int
    epochs: float
    padding: float
    throughput: Throughput
    memory: int  # bytes at the peak, of the GPU or of the process
    checkpoint: int  # bytes of one
    validation: float = 0.0  # seconds of one

    def with_steps(self, steps: int) -> RunEstimate:
        """Return the estimate for another number of steps."""
        return self._replace(steps=steps, epochs=self.epochs * steps / self.steps)

    def overhead(self, config: TrainConfig) -> float:
        """Return the seconds that a run's validations and checkpoints take."""
        validations = config.steps / config.validate_every + 1
        checkpoints = config.steps / config.checkpoint_every + validations
        return validations * self.validation + checkpoints * (
            0.1 + self.checkpoint / CHECKPOINT_BYTES_PER_SECOND
        )

    def lines(self) -> list[str]:
        """Say it in a few lines."""
        src, tgt = self.vocabulary
        vocabulary = f"{src:,} tokens" if src == tgt else f"{src:,} and {tgt:,} tokens"
        return [
            f"data: {self.pairs:,} pair{'' if self.pairs == 1 else 's'}, {self.valid_pairs:,} to validate on; "
            f"vocabulary of {vocabulary}; padding {100 * self.padding:.1f} %",
            f"model: {self.parameters:,} weights",
            f"training: {self.steps:,} steps, {self.epochs:.1f} epochs, about {format_duration(self.steps * self.throughput.seconds_per_step)} "
            f"at {self.throughput.tokens_per_second:,.0f} tokens/s",
            f"memory: about {format_bytes(self.memory)}; disk: {format_bytes(self.checkpoint)} a checkpoint",
        ]


def estimate_validation_seconds(validation: TranslationValidator | None, model: nn.Module) -> float:
    """Estimate what one validation takes, from a few batches and a few sentences; the model may be untrained."""
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
                if index == 1 or len(batches) == 1:  # the first warms up
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
            few = validation.sample.src[:PROBE_VALIDATION_SENTENCES]
            validation.translate(model, few[:2])
            began = time.monotonic()
            validation.translate(model, few)
            larger = max(1.0, len(validation.sample.src) / len(few))
            return (
                seconds
                + (time.monotonic() - began) * larger**BATCHING_EXPONENT * TRAINED_OUTPUT_RATIO
            )
    finally:
        model.train()


def estimate_run(
    trainer: Trainer, plan: BatchPlan, config: Config, prepared: PreparedData, device: torch.device
) -> RunEstimate:
    """Rehearse a few updates and reckon from them; nothing of the run is changed."""
    throughput = trainer.measure_throughput(
        min(PROBE_SECONDS, 0.02 * config.train.time_budget)
        if config.train.time_budget
        else PROBE_SECONDS
    )
    parameters = count_parameters(trainer.model)
    copies = 3 + (1 if config.train.ema_decay else 0)  # weights, two moments, the running average
    return RunEstimate(
        pairs=len(prepared.train),
        valid_pairs=len(prepared.valid) if prepared.valid is not None else 0,
        vocabulary=(len(prepared.tokenizers.src), len(prepared.tokenizers.tgt)),
        parameters=parameters,
        steps=config.train.steps,
        epochs=config.train.steps * config.train.gradient_accumulation / plan.batches(0),
        padding=plan.padding_fraction(0),
        throughput=throughput,
        memory=peak_memory(device),
        checkpoint=4 * copies * parameters,
    )


def peak_memory(device: torch.device) -> int:
    """Read the most memory that was used so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def require_model_fits_memory(parameters: int) -> None:
    """Refuse a model whose float32 weights alone exceed the memory of this machine, before anything is allocated."""
    needed, there = 4 * parameters, _physical_memory()
    if there and needed > there:
        found = f"{parameters:,} parameters, {format_bytes(needed)} in float32, and {format_bytes(there)} of memory"
        raise ConfigError(
            [
                f"a model must fit into this machine's memory; found {found}; lower model.width or the number of layers"
            ]
        )


def _physical_memory() -> int:
    """Return the bytes of memory that the machine has; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
