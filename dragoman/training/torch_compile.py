"""Compiling a model's blocks, where that pays, and going on without where it fails."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from dragoman.config import TrainConfig
from dragoman.errors import DragomanError
from dragoman.models.block import Block
from dragoman.ops import enable_short_attention
from dragoman.runtime.memory import is_out_of_memory
from dragoman.storage.cache import cache_dir, make_private_directory

logger = logging.getLogger(__name__)

# Compiling takes half a minute, cold, and saves 5 of 30 ms an update (base size, H200): a short run would be over before it gains.
MIN_STEPS, MIN_SECONDS = 10_000, 600.0
_compiled_blocks = weakref.WeakSet[Block]()
_failure = (
    ""  # what the compiler said when it could not do it: in this process it is not asked again
)
RECOMPILE_LIMIT = 64  # of a block's code: kinds, masks, lengths that are special to torch; it gives up quietly past its own 8


class CompileDecision(NamedTuple):
    """Whether to compile, and why."""

    enabled: bool
    reason: str


def choose_torch_compile(
    config: TrainConfig, device: torch.device, *, sharded: bool = False
) -> CompileDecision:
    """Follow `train.compile`; `auto` compiles long runs on a GPU."""
    if sharded:
        return CompileDecision(False, "ranks that share out the weights meet within a pass")
    if _failure and config.compile != "off":
        return CompileDecision(False, "it failed before")
    if config.compile != "auto":
        return CompileDecision(config.compile == "on", "as configured")
    if device.type != "cuda":
        return CompileDecision(False, f"on {device.type} it gains little")
    if config.deterministic:
        return CompileDecision(False, "compiled kernels round differently")
    if config.time_budget and config.time_budget < MIN_SECONDS:
        return CompileDecision(False, f"a budget of {config.time_budget:.0f} s is too short")
    if config.steps < MIN_STEPS:
        return CompileDecision(False, f"{config.steps:,} updates are too few")
    return CompileDecision(True, f"{config.steps:,} updates on {device.type}")


def should_use_cuda_graphs(
    config: TrainConfig, device: torch.device, *, sharded: bool = False
) -> bool:
    """Follow `train.cuda_graphs` where there is a GPU, the only device that can; the meetings of ranks are not recorded."""
    return device.type == "cuda" and config.cuda_graphs != "off" and not sharded


class CompiledForward:
    """A pass through a model whose blocks torch compiles when they are first called.

    Blocks are compiled one by one and for all shapes at once: those of a kind share their code, so a stack of six takes as long as
    one, where compiling whole passes took half a minute for each of a plan's shapes. A block whose loop goes through the
    positions would be compiled for each length; it says so (`Block.compiles`) and stays as it is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        limits: Any = torch._dynamo.config  # torch 2.11 has no public switches for them
        limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
        limits.specialize_float = (
            True  # rates are settings: as numbers that may change they break the code into pieces
        )
        # Torch keeps what it compiled in the system's folder for passing files, which a restart clears.
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache_dir()
        self._function = function
        self._compile_requested = False

    def __call__(self, model: nn.Module, *arguments: Any) -> Any:
        """Call the function; its model's blocks are compiled on the way."""
        if not self._compile_requested:
            compile_blocks(model)
            self._compile_requested = True
        return self._function(model, *arguments)


def _inductor_cache_dir() -> str:
    """Return a folder that nobody else can write to, for torch loads code from it: within the cache, or for this process alone."""
    try:
        return str(make_private_directory(cache_dir() / "compiled"))
    except OSError as error:
        logger.warning("what torch compiles is not kept for the next run: found %s", error)
        return tempfile.mkdtemp(prefix="dragoman-compiled-")


def compile_blocks(model: nn.Module) -> None:
    """Have every block compiled at its next call."""
    for block in model.modules():
        if isinstance(block, Block) and block.supports_compile:
            block.compile(dynamic=True)
            _compiled_blocks.add(block)


def fall_back_to_eager(error: Exception) -> bool:
    """Have all blocks run as they are, where an error may be the compiler's, and say so; else give False.

    A compiler raises whatever it meets, on the way forward or back, and nobody can tell that from a mistake in a block: the pass is
    tried once more without it.
    """
    global _failure
    if not _compiled_blocks or isinstance(error, DragomanError) or is_out_of_memory(error):
        return False
    for block in _compiled_blocks:
        block._compiled_call_impl = None  # what nn.Module.compile sets; a stance of torch's would hold for others in this process too
    _compiled_blocks.clear()
    _failed = summarize_error(error)
    logger.warning(
        "compiling failed, the blocks run as they are, and the result is the same (%s); train.compile=off skips it",
        _failed,
    )
    return True


def summarize_error(error: Exception) -> str:
    """Cut what a compiler said, which may be pages, to its first line."""
    found = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {found[:160]}" if found else type(error).__name__


@contextmanager
def eager_mode() -> Iterator[None]:
    """Run blocks plainly within, compiled or not: evaluation would be compiled anew, for a few passes."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def configure_backends(
    device: torch.device, *, deterministic: bool, cuda_graphs: bool = False
) -> None:
    """Set what is set once a process: how a GPU multiplies float32, whether it must repeat its bits, and which attention it trains.

    To launch the kernels for short sentences one by one costs the host more time than they save; replayed they cost none.
    """
    enable_short_attention(cuda_graphs)
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision(
        "high"
    )  # what autocast leaves in float32 may use the tensor cores
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # half a second for the plan of each shape, on an H200 with torch 2.11
    if deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # without it torch refuses; read at cuBLAS's first use
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
