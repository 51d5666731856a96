"""Memory: recognizing out-of-memory errors and releasing cached memory."""

from __future__ import annotations

import gc
import sys

# After an out-of-memory error the token limit is this fraction of what failed: below 1, so that the
# next batch is split before it fails, and above 1/2, so that the halves are not split again.
RETRY_FRACTION = 0.8


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory; does not import torch.

    On the CPU torch raises a RuntimeError that only its text tells apart.
    """
    names = {each.__name__ for each in type(error).__mro__}  # torch.OutOfMemoryError is one
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


def release_memory() -> None:
    """Release the memory that a failed attempt still holds."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
