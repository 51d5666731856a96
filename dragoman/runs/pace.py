"""How fast this machine trains a model: measured for a second or two on made-up sentences, before anything is prepared."""

from __future__ import annotations

import time

import torch

from dragoman.config import Config
from dragoman.data.batches import Batch, make_batch
from dragoman.models.build import build_model
from dragoman.registry import catalogue
from dragoman.tasks.translate import TranslateTask
from dragoman.training.memory import free, is_out_of_memory
from dragoman.training.precision import choose_precision
from dragoman.training.randomness import own_randomness

LENGTH = 20  # pieces of a made-up sentence, both sides: a short sentence's usual length
SECONDS, FEWEST = 1.5, 2  # measured for so long, and for so many updates at least


def measure_pace(config: Config, device: torch.device) -> float:
    """Train on made-up sentences and return pieces a second, both sides together; a batch that does not fit is halved."""
    rows = max(1, config.train.batch_tokens // LENGTH)
    while True:
        try:
            return _measure(config, device, rows)
        except (RuntimeError, MemoryError) as error:
            if rows == 1 or not is_out_of_memory(error):
                raise
        free()
        rows //= 2


def _measure(config: Config, device: torch.device, rows: int) -> float:
    """Measure with so many sentences a batch."""
    with own_randomness(0):
        vocabulary = config.text.vocabulary
        model = build_model(config.model, src_vocabulary=vocabulary, tgt_vocabulary=vocabulary).to(device).train()
        optimiser = catalogue("optimiser").load(config.train.optimiser)(model, config.train)
        task = TranslateTask(smoothing=config.train.label_smoothing)
        precision = choose_precision(config.train.precision, device)
        batch = _made_up(rows, vocabulary).to(device)
        done, began = -1, 0.0
        while done < FEWEST or time.monotonic() - began < SECONDS:
            with precision.autocast(device):
                loss = task.loss(model, batch)
            torch.autograd.backward(loss.total / loss.count)
            optimiser.step()
            optimiser.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            done += 1
            if done == 0:  # the first update only warms up
                began = time.monotonic()
        return 2 * LENGTH * rows * done / (time.monotonic() - began)


def _made_up(rows: int, vocabulary: int) -> Batch:
    """Make a batch of random pieces, in which nothing is padded."""
    ids = torch.randint(4, vocabulary, (rows, LENGTH - 1)).tolist()
    return make_batch(ids, ids)
