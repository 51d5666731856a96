"""Memory: recognizing out-of-memory errors, and releasing cached memory."""

from __future__ import annotations

import gc

import torch

# After a failure the bucket's cap is this share of what failed: below it, so that the next batch is split before it
# fails, and above one half, so that the halves which are tried next are not split again.
RETRY_FRACTION = 0.8


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise a full memory; on the CPU torch raises a plain RuntimeError that only its text tells apart."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(
        error
    )


def release_memory() -> None:
    """Give back what a failed try still holds."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
