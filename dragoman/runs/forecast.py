"""What a run will take, said before it begins: time, memory, disk, passes over the corpus."""

from __future__ import annotations

import itertools
import resource
import sys
import time
from typing import NamedTuple

import torch
from torch import nn

from dragoman.config import Config, TrainConfig
from dragoman.data.batches import BatchPlan
from dragoman.models.build import count_parameters
from dragoman.runs.prepare import Prepared
from dragoman.tasks.translate import TranslateTask, TranslateValidation
from dragoman.training.loop import Pace, Trainer
from dragoman.training.meter import duration
from dragoman.training.randomness import own_randomness

REHEARSAL_SECONDS = 5.0
TIMED_BATCHES, TIMED_SENTENCES = 2, 8  # of the validation corpus, before training
BATCHED = 0.75  # exponent of the time to translate more sentences at once: 25 times as many take 11 times as long
SHORTER = 0.4  # outputs of a trained model, against those of an untrained one that finds no end (both measured on Multi30k)
WRITTEN_A_SECOND = 150e6  # bytes of a checkpoint: written, synced, read back and hashed


class Forecast(NamedTuple):
    """An estimate from a few real updates."""

    pairs: int
    valid_pairs: int
    vocabulary: tuple[int, int]
    parameters: int
    updates: int
    passes: float
    padding: float
    pace: Pace
    memory: int  # bytes at the peak, of the GPU or of the process
    checkpoint: int  # bytes of one
    validation: float = 0.0  # seconds of one

    def with_steps(self, steps: int) -> Forecast:
        """Return the estimate for another number of steps."""
        return self._replace(updates=steps, passes=self.passes * steps / self.updates)

    def overhead(self, config: TrainConfig) -> float:
        """Return the seconds that a run's validations and checkpoints take."""
        validations = config.steps / config.validate_every + 1
        checkpoints = config.steps / config.checkpoint_every + validations
        return validations * self.validation + checkpoints * (0.1 + self.checkpoint / WRITTEN_A_SECOND)

    def lines(self) -> list[str]:
        """Say it in a few lines."""
        src, tgt = self.vocabulary
        vocabulary = f"{src:,} pieces" if src == tgt else f"{src:,} and {tgt:,} pieces"
        return [
            f"data: {self.pairs:,} pair{'' if self.pairs == 1 else 's'}, {self.valid_pairs:,} to validate on; "
            f"vocabulary of {vocabulary}; padding {100 * self.padding:.1f} %",
            f"model: {self.parameters:,} weights",
            f"training: {self.updates:,} steps, {self.passes:.1f} epochs, about {duration(self.updates * self.pace.seconds)} "
            f"at {self.pace.tokens:,.0f} tokens/s",
            f"memory: about {size_text(self.memory)}; disk: {size_text(self.checkpoint)} a checkpoint",
        ]


def validation_seconds(validation: TranslateValidation | None, model: nn.Module) -> float:
    """Estimate what one validation takes, from a few batches and a few sentences; the model may be untrained."""
    if validation is None:
        return 0.0
    model.eval()
    try:
        with own_randomness(0), torch.no_grad():
            task, batches = TranslateTask(smoothing=0.0), list(itertools.islice(validation.batches(), TIMED_BATCHES + 1))
            began = time.monotonic()
            for index, batch in enumerate(batches):
                if index == 1 or len(batches) == 1:  # the first warms up
                    began = time.monotonic()
                with validation.precision.autocast(validation.device):
                    task.loss(model, batch.to(validation.device))
            seconds = (time.monotonic() - began) * validation.count / max(1, len(batches) - 1)
            if validation.translate is None or validation.sample is None or not len(validation.sample.src):
                return seconds
            few = validation.sample.src[:TIMED_SENTENCES]
            validation.translate(model, few[:2])
            began = time.monotonic()
            validation.translate(model, few)
            larger = max(1.0, len(validation.sample.src) / len(few))
            return seconds + (time.monotonic() - began) * larger**BATCHED * SHORTER
    finally:
        model.train()


def forecast(trainer: Trainer, plan: BatchPlan, config: Config, prepared: Prepared, device: torch.device) -> Forecast:
    """Rehearse a few updates and reckon from them; nothing of the run is changed."""
    pace = trainer.rehearse(min(REHEARSAL_SECONDS, 0.02 * config.train.budget) if config.train.budget else REHEARSAL_SECONDS)
    parameters = count_parameters(trainer.model)
    copies = 3 + (1 if config.train.ema else 0)  # weights, two moments, the running average
    return Forecast(
        pairs=len(prepared.train),
        valid_pairs=len(prepared.valid) if prepared.valid is not None else 0,
        vocabulary=(len(prepared.tokenizers.src), len(prepared.tokenizers.tgt)),
        parameters=parameters,
        updates=config.train.steps,
        passes=config.train.steps * config.train.accumulate / plan.batches(0),
        padding=plan.padding_share(0),
        pace=pace,
        memory=peak_memory(device),
        checkpoint=4 * copies * parameters,
    )


def peak_memory(device: torch.device) -> int:
    """Read the most memory that was used so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def size_text(size: float) -> str:
    """Write bytes as a person would."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
