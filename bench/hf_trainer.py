"""Hugging Face's own trainer, on batches that it makes itself: what its user gets, where bench/peers.py has a model on our batches.

`Seq2SeqTrainer` (transformers, with accelerate) trains the Marian of bench/peers.py on the same prepared pairs, set up as well as its
documentation lets a user: bfloat16, fused AdamW, label smoothing, worker processes, pinned memory copied without waiting, no cache of
keys, no look at each loss for what is not finite, nothing saved, logged or evaluated. It compiles by its own option, told that shapes
change. Marian draws a number before every layer to decide whether to leave it out, with layer drop off too, where the compiler stops:
it gets the layers one by one, and the loss stays outside.

Batches: it wants sentences, not slots, so a batch has as many as fill our slots at the mean length of the pairs' longer sides. Its sampler
sorts 50 batches' pairs at a time by length, where a pass has four times as many. It measures the source's, which leaves 26 % padding in the
drawn corpus. Whoever thinks of it can give a column of lengths of their own: "told lengths" has the longer side's, and 10 % padding.
The pairs are gone through again until there are enough for this; a round is one such sorting, of --steps batches, and has more padding
below 50.

Memory: a logit takes 16 bytes at the peak: its float32, the logarithm of its probability, that negated or its gradient, and another. The
worst batch has the longest target. With 32,768 pieces, 1,534 pairs of 61 and 52 pieces are 42 GB of logits and 25 GB of layers, as
PyTorch's memory tracker counts without a GPU. Logits may take half of a device's memory; where they would take more, batches are smaller.
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
from bench.timing import OutOfTimeError, reset_peak, synchronize, timing_row
from dragoman.config import TrainConfig
from dragoman.data.token_store import TokenStore
from dragoman.text.special_tokens import EOS, PAD
from dragoman.training.mixed_precision import choose_precision

GIVEN_LENGTHS = "told lengths"
TRAINERS = [
    "Hugging Face Trainer",
    "Hugging Face Trainer, compiled",
    f"Hugging Face Trainer, {GIVEN_LENGTHS}",
    f"Hugging Face Trainer, {GIVEN_LENGTHS}, compiled",
]
IGNORE_INDEX = -100  # what its losses pass over
ROUNDS = 2  # after one to warm up; with that, no more than SORTINGS
SORTS_PER_EPOCH = 4  # a pass has at least so many, or its sampler sorts fewer batches at a time
BYTES_PER_LOGIT = 16
WORKERS = 4  # more would not pay: one makes a batch of 1,534 pairs in 6 ms


class PairDataset(torch.utils.data.Dataset[dict[str, NDArray[np.int64]]]):
    """A store's pairs in memory, with their ends, gone through again until there are enough."""

    def __init__(self, store: TokenStore, count: int) -> None:
        self._count = count
        sides = {"input_ids": "src", "labels": "tgt"}
        self._rows = [
            {
                name: np.append(store.ids(side, place), EOS).astype(np.int64)
                for name, side in sides.items()
            }
            for place in range(min(count, len(store)))
        ]
        self.sizes = np.array([[len(ids) for ids in row.values()] for row in self._rows])[
            np.arange(count) % len(self._rows)
        ]  # (N, 2)

    def __len__(self) -> int:
        """Count the pairs, those that come again too."""
        return self._count

    def __getitem__(self, place: int) -> dict[str, NDArray[np.int64]]:
        """Return a pair by number."""
        return self._rows[place % len(self._rows)]


class PaddingCollator:
    """Pads as `DataCollatorForSeq2Seq` does, which would want a tokenizer for it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, pairs: Sequence[dict[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
        """Put pairs side by side: (B, S) and (B, T)."""
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
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return torch.from_numpy(table)


class RecordingSampler(torch.utils.data.Sampler[int]):
    """Hands on a sampler's order, and keeps it: batches are made in other processes, where nothing can be counted."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.order: list[int] = []

    def __len__(self) -> int:
        """Count a pass's pairs."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        """Draw a pass's order."""
        drawn = list(self._sampler)
        self.order += drawn
        return iter(drawn)


def sentences_per_batch(
    store: TokenStore, *, slots: int, vocabulary: int, room: float = float("inf")
) -> int:
    """Choose how many sentences fill so many slots of the longer side on average; the longest targets' logits must fit into room."""
    longer = np.maximum(store.src_lengths, store.tgt_lengths).astype(np.int64) + 1
    worst = (int(store.tgt_lengths.max()) + 1) * vocabulary * BYTES_PER_LOGIT
    return max(1, int(min(slots / longer.mean(), room / worst)))


def time_trainer(
    system: str, model: Any, store: TokenStore, options: Any, device: torch.device, folder: Path
) -> dict[str, Any]:
    """Train through Hugging Face's trainer, and read the clock where a round ends."""
    began = time.perf_counter()
    reset_peak(device)
    room = (
        torch.cuda.get_device_properties(device).total_memory / 2
        if device.type == "cuda"
        else float("inf")
    )
    sentences = sentences_per_batch(
        store, slots=options.batch_tokens, vocabulary=options.vocabulary, room=room
    )
    steps = options.steps
    data = PairDataset(store, SORTS_PER_EPOCH * steps * sentences)
    with dynamic_shapes():
        settings = arguments(
            folder,
            sentences=sentences,
            updates=(1 + ROUNDS) * steps,
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
        "padding": 1.0 - sum(tokens) / sum(slots for _, slots in counted),
        "sentences": sentences,
        "losses": means,
    }
    return timing_row(system, tokens, seconds, clock[0] - began, device) | more


@contextmanager
def dynamic_shapes() -> Iterator[None]:
    """Have its option to compile do so once for all shapes, by the setting that its documentation has for this."""
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
    folder: Path, *, sentences: int, updates: int, half: bool, cpu: bool, compiled: bool
) -> Any:
    """Set the trainer up; the optimiser's numbers are those of the other peers, and clipping is ours."""
    import transformers

    library: Any = transformers
    workers = 0 if cpu else WORKERS
    return library.Seq2SeqTrainingArguments(
        output_dir=str(folder),
        max_steps=updates,
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
        max_grad_norm=TrainConfig().clip,
        dataloader_num_workers=workers,
        dataloader_pin_memory=not cpu,
        accelerator_config={"non_blocking": not cpu},
        logging_nan_inf_filter=False,  # it waits for the device at every update
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
    """Put its trainer together, with the order in which it will go through the pairs, sorted by their sources or as it was told."""
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
    trainer._get_train_sampler = lambda *_: sampler  # what it makes itself, but remembered
    trainer.remove_callback(library.PrinterCallback)
    return trainer, sampler


def record_timing(
    trainer: Any, *, every: int, device: torch.device
) -> tuple[list[float], list[Tensor]]:
    """Return lists that will have the time after every so many updates, and each update's loss."""
    import transformers

    library: Any = transformers
    clock: list[float] = []
    losses: list[Tensor] = []

    class Clock(library.TrainerCallback):  # type: ignore[misc]  # a class of Any
        """Reads the clock, the device having finished."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Look after every update whether a round has ended."""
            if state.global_step % every == 0:
                synchronize(device)
                clock.append(time.perf_counter())

    plain = trainer.training_step

    def training_step(*given: Any, **named: Any) -> Tensor:
        loss: Tensor = plain(*given, **named)
        losses.append(loss)  # on its device: nothing waits
        return loss

    trainer.training_step = training_step
    trainer.add_callback(Clock())
    return clock, losses


def count(
    data: PairDataset, order: Sequence[int], sentences: int, first: int, last: int
) -> tuple[int, int]:
    """Count the real tokens of both sides, ends included, and the slots of some updates."""
    sizes = data.sizes[np.array(order[first * sentences : last * sentences])].reshape(
        last - first, sentences, 2
    )
    return int(sizes.sum()), int(sizes.max(axis=1).sum()) * sentences
