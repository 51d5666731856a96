"""torch.compile for a model's blocks, with a fallback to eager mode when it fails."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from dragoman.config import TrainConfig
from dragoman.errors import DragomanError
from dragoman.models.block_interface import Block
from dragoman.runtime.out_of_memory import is_out_of_memory
from dragoman.storage.trusted_cache_directory import cache_dir, make_private_directory

logger = logging.getLogger(__name__)

# torch.compile takes half a minute with an empty cache, and saves a sixth of each step (base size
# and Transformer-XL, H200): a short run would end before it gains anything.
MIN_STEPS, MIN_SECONDS = 10_000, 300.0
# Variants of one block's code: masks, dtypes, special lengths. Torch's own limit is 8, and it falls
# back to eager mode silently.
RECOMPILE_LIMIT = 64

_compiled_blocks = weakref.WeakSet[Block]()
_failure = ""  # the error of a failed compilation; it is not tried again in this process


class CompileDecision(NamedTuple):
    """Whether to use torch.compile, and why."""

    enabled: bool
    reason: str


def choose_torch_compile(
    config: TrainConfig, device: torch.device, *, sharded: bool = False
) -> CompileDecision:
    """Return the decision of `train.compile`; `auto` compiles long runs on a GPU."""
    if sharded:
        return CompileDecision(False, "FSDP communicates within the forward pass")
    if _failure and config.compile != "off":
        return CompileDecision(False, "it failed before")
    if config.compile != "auto":
        return CompileDecision(config.compile == "on", "as configured")
    if device.type != "cuda":
        return CompileDecision(False, f"on {device.type} it gains little")
    if config.deterministic:
        return CompileDecision(False, "compiled kernels round differently")
    if config.time_budget and config.time_budget < MIN_SECONDS:
        return CompileDecision(False, f"a time budget of {config.time_budget:.0f} s is too short")
    if config.steps < MIN_STEPS:
        return CompileDecision(False, f"{config.steps:,} steps are too few")
    return CompileDecision(True, f"{config.steps:,} steps on {device.type}")


def should_use_cuda_graphs(
    config: TrainConfig, device: torch.device, *, sharded: bool = False
) -> bool:
    """Whether to capture CUDA graphs, according to `train.cuda_graphs`.

    FSDP's collectives are never captured.
    """
    return device.type == "cuda" and config.cuda_graphs != "off" and not sharded


def compile_blocks(model: nn.Module) -> None:
    """Apply torch.compile to a model's blocks; each is compiled at its first call.

    Blocks are compiled one by one, with dynamic shapes. Blocks of one kind share their code, so a
    stack of six takes as long as one; compiling the whole forward pass took half a minute for each
    batch shape. A block with a loop over positions would be compiled for each length; it opts out
    with `Block.supports_compile`.
    """
    limits: Any = torch._dynamo.config  # torch 2.11 has no public settings for these
    limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
    limits.specialize_float = True  # dropout rates are constants; as variables they break the graph
    # Torch's default is the system's temporary directory, which a restart clears.
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache_dir()
    for block in model.modules():
        if isinstance(block, Block) and block.supports_compile:
            block.compile(dynamic=True)
            _compiled_blocks.add(block)


def uncompile_blocks(model: nn.Module) -> None:
    """Switch a model's compiled blocks back to eager mode."""
    for block in model.modules():
        if isinstance(block, Block) and block in _compiled_blocks:
            # What nn.Module.compile sets; a stance of torch's would hold for the whole process.
            block._compiled_call_impl = None
            _compiled_blocks.discard(block)


def _inductor_cache_dir() -> str:
    """Return a private directory for compiled kernels, since torch executes code from it."""
    try:
        return str(make_private_directory(cache_dir() / "compiled"))
    except OSError as error:
        logger.warning("compiled kernels are not cached for the next run: found %s", error)
        return tempfile.mkdtemp(prefix="dragoman-compiled-")


def fall_back_to_eager(error: Exception) -> bool:
    """Switch all compiled blocks to eager mode if the error may come from torch.compile.

    Return whether to run the forward pass again. The compiler raises any kind of exception, in the
    forward or the backward pass, which cannot be told from an error of the block itself. So every
    error but our own and running out of memory is retried once in eager mode.
    """
    global _failure
    if not _compiled_blocks or isinstance(error, DragomanError) or is_out_of_memory(error):
        return False
    for block in list(_compiled_blocks):
        uncompile_blocks(block)
    _failure = summarize_error(error)
    logger.warning(
        "torch.compile failed (%s); training continues in eager mode with the same result; "
        "set train.compile=off to skip it",
        _failure,
    )
    return True


def summarize_error(error: Exception) -> str:
    """Return the type and the first line of an error, whose message may have pages."""
    found = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {found[:160]}" if found else type(error).__name__


@contextmanager
def eager_mode() -> Iterator[None]:
    """Run compiled blocks in eager mode: validation would be compiled for a few passes only."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def allow_graph_kernels(model: nn.Module, allowed: bool) -> None:
    """Set whether a model's layers may use fused kernels that pay only under CUDA graphs.

    Launched one by one they cost the host more time than they save; replayed they cost none.
    """
    for module in model.modules():
        if hasattr(module, "cuda_graphs"):
            module.cuda_graphs = allowed  # type: ignore[assignment]  # a class attribute


def configure_backends(device: torch.device, *, deterministic: bool) -> None:
    """Configure PyTorch for training on a GPU: float32 matmuls, deterministic algorithms."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    # Planning takes half a second for each shape, on an H200 with torch 2.11.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if deterministic:
        # Required by torch; read at the first use of cuBLAS.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
