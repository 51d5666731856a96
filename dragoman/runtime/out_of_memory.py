"""Out-of-memory errors: recognizing them, releasing memory, and running batches in halves.

`BatchHalving` serves inference: `inference/single_batch_translator.py`,
`inference/translation_log_probabilities.py` and the predictors of other tasks. Training halves its
micro-batches itself: `OOMSplitter` in `training/train_step.py`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")

# After an out-of-memory error the token limit is this fraction of what failed: below 1, so that the
# next batch is split before it fails, and above 1/2, so that the halves are not split again.
RETRY_FRACTION = 0.8


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory; does not import torch.

    On the CPU torch raises a RuntimeError that only its message identifies.
    """
    names = {each.__name__ for each in type(error).__mro__}  # torch.OutOfMemoryError is one
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


def release_memory() -> None:
    """Release the memory that a failed attempt still holds."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class BatchHalving:
    """Runs batches; one that does not fit in memory is run in halves.

    Later batches of more padded tokens than are known to fit are split before they fail.
    """

    def __init__(self) -> None:
        self.max_tokens = sys.maxsize  # padded tokens of a batch

    def run(
        self,
        batch: Sequence[RowT],
        run: Callable[[Sequence[RowT]], list[ResultT]],
        *,
        padded_tokens: Callable[[Sequence[RowT]], int],
        fallback: Callable[[Sequence[RowT]], list[ResultT]] | None = None,
        can_fall_back: Callable[[], bool] = lambda: True,
        on_halving: Callable[[int], None] | None = None,
    ) -> list[ResultT]:
        """Return the results of all rows, in order.

        A single row that does not fit is run by `fallback`; it raises without one, or if
        `can_fall_back`, which is called only then, returns False. `on_halving` is called with the
        number of rows of a batch that failed.
        """
        count = len(batch)
        if count == 1 or padded_tokens(batch) <= self.max_tokens:
            try:
                return run(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if count == 1 and (fallback is None or not can_fall_back()):
                    raise
            release_memory()
            if count == 1 and fallback is not None:
                return fallback(batch)
            self.max_tokens = int(RETRY_FRACTION * padded_tokens(batch))
            if on_halving is not None:
                on_halving(count)
        return [
            result
            for half in (batch[: count // 2], batch[count // 2 :])
            for result in self.run(
                half,
                run,
                padded_tokens=padded_tokens,
                fallback=fallback,
                can_fall_back=can_fall_back,
                on_halving=on_halving,
            )
        ]
