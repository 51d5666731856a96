"""Out of memory: the batch is split by rows and nothing is dropped.

One very long sentence must not end a run (OpenNMT-py#1161, facebookresearch/fairseq#1191). Sums over rows make the
gradient of the halves the gradient of the whole, up to rounding.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from dragoman.data.batches import Batch
from dragoman.errors import ConfigError

log = logging.getLogger(__name__)

# After a failure the bucket's cap is this share of what failed: below it, so that the next batch is split before it
# fails, and above one half, so that the halves which are tried next are not split again.
CAP_SHARE = 0.8
_told = set[str]()  # that batches are split is said once a process, whose run and rehearsal have a guard each


class Part(NamedTuple):
    """Some rows of a batch, and the path of splits that led to them: "" for the whole, "01" for the first half's second."""

    batch: Batch
    path: str


class MemoryGuard:
    """Runs a computation on a batch, in parts where the whole does not fit, and remembers what fits."""

    def __init__(self, caps: dict[str, int] | None = None) -> None:
        self.caps = dict(caps or {})  # "source length x target length" -> most slots that are tried at once; part of the state
        self.splits = 0
        self.dropped: list[int] = []  # examples that did not fit even alone

    def run(self, batch: Batch, compute: Callable[[Batch, str], None]) -> None:
        """Call `compute(part, path)` until every row has been through it once; it must change nothing when it fails."""
        waiting, before = [Part(batch, "")], len(self.dropped)
        while waiting:
            part = waiting.pop(0)
            if _rows(part.batch) > 1 and _slots(part.batch) > self.caps.get(_bucket(part.batch), 1 << 62):
                waiting[:0] = _halves(part)
                continue
            if self._fits(part, compute):
                continue
            free()
            if _rows(part.batch) == 1:
                example = int(part.batch.examples[0])
                if example not in self.dropped:
                    log.warning("out of memory for one sentence alone: example %d is left out, and all others are used", example)
                self.dropped.append(example)
                continue
            self.splits += 1
            self.caps[_bucket(part.batch)] = int(CAP_SHARE * _slots(part.batch))
            log.log(
                logging.DEBUG if _told else logging.WARNING,
                "out of memory with %d slots of %s: batches that do not fit are computed in parts, and the result is the same; "
                "a lower train.batch_tokens avoids it",
                _slots(part.batch),
                _bucket(part.batch),
            )
            _told.add("parts")
            waiting[:0] = _halves(part)
        if _rows(batch) > 1 and len(self.dropped) - before == _rows(batch):
            raise torch.OutOfMemoryError(f"out of memory for every sentence of a batch of {_bucket(batch)}")

    def run_whole(self, batch: Batch, compute: Callable[[Batch, str], None]) -> None:
        """Call `compute` once, where the other ranks are in the same pass and no rank can split its batch alone."""
        if not self._fits(Part(batch, ""), compute):
            found = f"out of memory with {_slots(batch)} slots of {_bucket(batch)}"
            raise ConfigError(
                [f"with train.shard every batch must fit into the memory of every rank; found {found}; lower train.batch_tokens"]
            )

    @staticmethod
    def _fits(part: Part, compute: Callable[[Batch, str], None]) -> bool:
        """Try one part. The exception must be gone before the retry: its traceback holds the tensors that filled the memory."""
        try:
            compute(part.batch, part.path)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise a full memory; on the CPU torch raises a plain RuntimeError that only its text tells apart."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)


def _rows(batch: Batch) -> int:
    return len(batch.examples)


def _slots(batch: Batch) -> int:
    """Count the padded slots of the longer side, as `train.batch_tokens` does."""
    return _rows(batch) * max(batch.src.shape[1], batch.tgt_in.shape[1])


def _bucket(batch: Batch) -> str:
    return f"{batch.src.shape[1]}x{batch.tgt_in.shape[1]}"


def _halves(part: Part) -> list[Part]:
    """Cut a part's rows in two."""
    middle = (_rows(part.batch) + 1) // 2
    return [
        Part(part.batch.rows(slice(middle)), part.path + "0"),
        Part(part.batch.rows(slice(middle, None)), part.path + "1"),
    ]


def free() -> None:
    """Give back what a failed try still holds."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
