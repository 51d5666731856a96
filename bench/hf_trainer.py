"""Hugging Face's `Seq2SeqTrainer` as a training peer, with its own batches and data loading.

It trains the Marian model of bench/peers.py on the same sentence pairs, configured for speed as its
documentation allows: bfloat16, fused AdamW, label smoothing, worker processes, pinned memory, no
checkpoints, logs or evaluation, torch.compile with dynamic shapes. Marian draws a random number
before every layer (LayerDrop), which breaks the graph: its layers are compiled one by one.

Batches: the trainer counts sentences, so a batch has as many as fill our padded tokens at the mean
length. Its sampler sorts the pairs of 50 batches by source length, which leaves 26 % padding on the
synthetic corpus; "by length" gives it a column with the longer side's length: 10 % padding. The
pairs are repeated until there are enough for that; a round has --steps batches.

Memory: logits take 16 bytes each at the peak. With a vocabulary of 32,768, 1,534 pairs of 61 and 52
tokens need 42 GB for logits and 25 GB for layers. Batches are reduced until the logits fit into
half of the device's memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.peers import SMOOTHING
from bench.timing_helpers import OutOfTimeError, reset_peak, synchronize, timing_row
from dragoman.config import TrainConfig
from dragoman.data.token_store import TokenStore
from dragoman.text.special_tokens import EOS, PAD
from dragoman.training.bf16_mixed_precision import choose_precision

GIVEN_LENGTHS = "by length"
TRAINERS = [
    "Hugging Face Trainer",
    "Hugging Face Trainer, compiled",
    f"Hugging Face Trainer, {GIVEN_LENGTHS}",
    f"Hugging Face Trainer, {GIVEN_LENGTHS}, compiled",
]
IGNORE_INDEX = -100  # ignored by its losses
ROUNDS = 2  # after a warm-up round; at most SORTINGS in all
SORTS_PER_EPOCH = 4  # per epoch at least, so that its sampler sorts 50 batches at a time
BYTES_PER_LOGIT = 16
WORKERS = 4  # one worker makes a batch of 1,534 pairs in 6 ms


class PairDataset(torch.utils.data.Dataset[dict[str, NDArray[np.int64]]]):
    """Sentence pairs in memory, repeated until there are enough."""

    def __init__(self, store: TokenStore, count: int) -> None:
        self._count = count
        sides = {"input_ids": "src", "labels": "tgt"}
        self._rows = [
            {
                name: np.append(store.ids(side, index), EOS).astype(np.int64)
                for name, side in sides.items()
            }
            for index in range(min(count, len(store)))
        ]
        # (N, 2)
        self.sizes = np.array([[len(ids) for ids in row.values()] for row in self._rows])[
            np.arange(count) % len(self._rows)
        ]

    def __len__(self) -> int:
        """Return the number of pairs, repetitions included."""
        return self._count

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        """Return a pair; iteration ends after the last."""
        if index >= self._count:
            raise IndexError(index)
        return self._rows[index % len(self._rows)]


class PaddingCollator:
    """Pads as `DataCollatorForSeq2Seq` does, without a tokenizer."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, pairs: Sequence[dict[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
        """Return padded sources (B, S) and targets (B, T)."""
        src, labels = (
            _table([pair[name] for pair in pairs], fill)
            for name, fill in (("input_ids", PAD), ("labels", IGNORE_INDEX))
        )
        lengths = torch.tensor([len(pair["input_ids"]) for pair in pairs])
        return {
            "input_ids": src,
            "attention_mask": (torch.arange(src.shape[1]) < lengths[:, None]).long(),
            "labels": labels,
            "decoder_input_ids": self._model.prepare_decoder_input_ids_from_labels(labels=labels),
        }


def _table(rows: list[NDArray[np.int64]], fill: int) -> Tensor:
    table = np.full((len(rows), max(len(row) for row in rows)), fill, np.int64)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return torch.from_numpy(table)


class RecordingSampler(torch.utils.data.Sampler[int]):
    """Wraps a sampler and stores its order, to count tokens afterwards."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.order: list[int] = []

    def __len__(self) -> int:
        """Return the number of pairs in an epoch."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        """Yield an epoch's order."""
        drawn = list(self._sampler)
        self.order += drawn
        return iter(drawn)


def sentences_per_batch(
    store: TokenStore, *, padded_tokens: int, vocabulary: int, max_bytes: float = float("inf")
) -> int:
    """Return the sentences that fill a batch of padded tokens, limited by the memory of logits."""
    longer = np.maximum(store.src_lengths, store.tgt_lengths).astype(np.int64) + 1
    worst = (int(store.tgt_lengths.max()) + 1) * vocabulary * BYTES_PER_LOGIT
    return max(1, int(min(padded_tokens / longer.mean(), max_bytes / worst)))


def time_trainer(
    system: str, model: Any, store: TokenStore, options: Any, device: torch.device, folder: Path
) -> dict[str, Any]:
    """Train with Hugging Face's trainer; return a row with its throughput."""
    began = time.perf_counter()
    reset_peak(device)
    max_bytes = (
        torch.cuda.get_device_properties(device).total_memory / 2
        if device.type == "cuda"
        else float("inf")
    )
    sentences = sentences_per_batch(
        store,
        padded_tokens=options.batch_tokens,
        vocabulary=options.vocabulary,
        max_bytes=max_bytes,
    )
    steps = options.steps
    data = PairDataset(store, SORTS_PER_EPOCH * steps * sentences)
    with dynamic_shapes():
        settings = arguments(
            folder,
            sentences=sentences,
            steps=(1 + ROUNDS) * steps,
            half=choose_precision(options.precision, device).dtype == torch.bfloat16,
            cpu=device.type == "cpu",
            compiled=system.endswith("compiled"),
        )
        trainer, sampler = build_hf_trainer(
            model, data, settings, given_lengths=GIVEN_LENGTHS in system
        )
        clock, losses = record_timing(trainer, every=steps, device=device)
        try:
            trainer.train()
        except OutOfTimeError:
            if len(clock) < 2:
                raise
    rounds = range(1, len(clock))
    counted = [
        count(data, sampler.order, sentences, number * steps, (number + 1) * steps)
        for number in rounds
    ]
    seconds = [clock[number] - clock[number - 1] for number in rounds]
    tokens = [each for each, _ in counted]
    means = torch.stack(losses[: len(clock) * steps]).view(-1, steps).mean(dim=1).tolist()
    more = {
        "padding": 1.0 - sum(tokens) / sum(padded for _, padded in counted),
        "sentences": sentences,
        "losses": means,
    }
    return timing_row(system, tokens, seconds, clock[0] - began, device) | more


@contextmanager
def dynamic_shapes() -> Iterator[None]:
    """Make its torch.compile option use dynamic shapes, by the documented environment setting."""
    name = "ACCELERATE_DYNAMO_USE_DYNAMIC"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def arguments(
    folder: Path, *, sentences: int, steps: int, half: bool, cpu: bool, compiled: bool
) -> Any:
    """Return the trainer's arguments, with the optimizer settings of the other peers."""
    import transformers

    library: Any = transformers
    workers = 0 if cpu else WORKERS
    return library.Seq2SeqTrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=sentences,
        train_sampling_strategy="group_by_length",
        label_smoothing_factor=SMOOTHING,
        bf16=half,
        use_cpu=cpu,
        torch_compile=compiled,
        optim="adamw_torch_fused",
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.98,
        adam_epsilon=1e-9,
        weight_decay=0.0,
        max_grad_norm=TrainConfig().max_grad_norm,
        dataloader_num_workers=workers,
        dataloader_pin_memory=not cpu,
        accelerator_config={"non_blocking": not cpu},
        logging_nan_inf_filter=False,  # it would synchronize at every step
        remove_unused_columns=False,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )


def build_hf_trainer(
    model: Any, data: PairDataset, settings: Any, *, given_lengths: bool
) -> tuple[Any, RecordingSampler]:
    """Return the trainer and its sampler, sorting by source or by the given lengths."""
    import transformers
    from transformers.trainer_pt_utils import LengthGroupedSampler

    library: Any = transformers
    model.config.use_cache = False
    lengths = data.sizes.max(axis=1) if given_lengths else data.sizes[:, 0]
    sampler = RecordingSampler(
        LengthGroupedSampler(settings.train_batch_size, lengths=lengths.tolist())
    )
    trainer = library.Seq2SeqTrainer(
        model=model, args=settings, train_dataset=data, data_collator=PaddingCollator(model)
    )
    trainer._get_train_sampler = lambda *_: sampler  # its own sampler, recorded
    trainer.remove_callback(library.PrinterCallback)
    return trainer, sampler


def record_timing(
    trainer: Any, *, every: int, device: torch.device
) -> tuple[list[float], list[Tensor]]:
    """Add a callback; return the lists that it fills with times and losses."""
    import transformers

    library: Any = transformers
    clock: list[float] = []
    losses: list[Tensor] = []

    class RoundClock(library.TrainerCallback):  # type: ignore[misc]  # a class of Any
        """Callback that reads the clock after synchronizing the device."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Read the clock at the end of each round."""
            if state.global_step % every == 0:
                synchronize(device)
                clock.append(time.perf_counter())

    plain = trainer.training_step

    def training_step(*given: Any, **named: Any) -> Tensor:
        loss: Tensor = plain(*given, **named)
        losses.append(loss)  # stays on the device
        return loss

    trainer.training_step = training_step
    trainer.add_callback(RoundClock())
    return clock, losses


def count(
    data: PairDataset, order: Sequence[int], sentences: int, first: int, last: int
) -> tuple[int, int]:
    """Return the tokens without padding, and the padded tokens, of some steps."""
    sizes = data.sizes[np.array(order[first * sentences : last * sentences])].reshape(
        last - first, sentences, 2
    )
    return int(sizes.sum()), int(sizes.max(axis=1).sum()) * sentences
