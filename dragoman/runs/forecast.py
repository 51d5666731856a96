"""What a run will take, said before it begins: time, memory, disk, passes over the corpus."""

from __future__ import annotations

import resource
import sys
from typing import NamedTuple

import torch

from dragoman.config import Config
from dragoman.data.batches import BatchPlan
from dragoman.models.build import count_parameters
from dragoman.runs.prepare import Prepared
from dragoman.training.loop import Pace, Trainer
from dragoman.training.meter import duration

REHEARSAL_SECONDS = 5.0


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

    def lines(self) -> list[str]:
        """Say it in a few lines."""
        src, tgt = self.vocabulary
        vocabulary = f"{src:,} pieces" if src == tgt else f"{src:,} and {tgt:,} pieces"
        return [
            f"data: {self.pairs:,} pair{'' if self.pairs == 1 else 's'}, {self.valid_pairs:,} to validate on; "
            f"vocabulary of {vocabulary}; padding {100 * self.padding:.1f} %",
            f"model: {self.parameters:,} weights",
            f"training: {self.updates:,} updates, {self.passes:.1f} passes, about {duration(self.updates * self.pace.seconds)} "
            f"at {self.pace.tokens:,.0f} tokens a second",
            f"memory: about {size_text(self.memory)}; disk: {size_text(self.checkpoint)} a checkpoint",
        ]


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
