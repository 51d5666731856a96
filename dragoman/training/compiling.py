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
from dragoman.files.cache import cache_folder, make_private
from dragoman.kernels import enable_short_attention
from dragoman.models.blocks import Block
from dragoman.training.memory import is_out_of_memory

log = logging.getLogger(__name__)

# Compiling takes half a minute, cold, and saves 5 of 30 ms an update (base size, H200): a short run would be over before it gains.
LEAST_UPDATES, LEAST_SECONDS = 10_000, 600.0
_compiled = weakref.WeakSet[Block]()
_failed = ""  # what the compiler said when it could not do it: in this process it is not asked again
MOST_VARIANTS = 64  # of a block's code: kinds, masks, lengths that are special to torch; it gives up quietly past its own 8


class Compiling(NamedTuple):
    """Whether to compile, and why."""

    wanted: bool
    reason: str


def choose_compiling(config: TrainConfig, device: torch.device, *, sharded: bool = False) -> Compiling:
    """Follow `train.compile`; `auto` compiles long runs on a GPU."""
    if sharded:
        return Compiling(False, "ranks that share out the weights meet within a pass")
    if _failed and config.compile != "off":
        return Compiling(False, "it failed before")
    if config.compile != "auto":
        return Compiling(config.compile == "on", "as configured")
    if device.type != "cuda":
        return Compiling(False, f"on {device.type} it gains little")
    if config.deterministic:
        return Compiling(False, "compiled kernels round differently")
    if config.budget and config.budget < LEAST_SECONDS:
        return Compiling(False, f"a budget of {config.budget:.0f} s is too short")
    if config.steps < LEAST_UPDATES:
        return Compiling(False, f"{config.steps:,} updates are too few")
    return Compiling(True, f"{config.steps:,} updates on {device.type}")


def choose_replaying(config: TrainConfig, device: torch.device, *, sharded: bool = False) -> bool:
    """Follow `train.replay` where there is a GPU, the only device that can; the meetings of ranks are not recorded."""
    return device.type == "cuda" and config.replay != "off" and not sharded


class Compiled:
    """A pass through a model whose blocks torch compiles when they are first called.

    Blocks are compiled one by one and for all shapes at once: those of a kind share their code, so a stack of six takes as long as
    one, where compiling whole passes took half a minute for each of a plan's shapes. A block whose loop goes through the
    positions would be compiled for each length; it says so (`Block.compiles`) and stays as it is.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        limits: Any = torch._dynamo.config  # torch 2.11 has no public switches for them
        limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)
        limits.specialize_float = True  # rates are settings: as numbers that may change they break the code into pieces
        # Torch keeps what it compiled in the system's folder for passing files, which a restart clears.
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = _folder_for_torch()
        self._function = function
        self._begun = False

    def __call__(self, model: nn.Module, *arguments: Any) -> Any:
        """Call the function; its model's blocks are compiled on the way."""
        if not self._begun:
            compile_blocks(model)
            self._begun = True
        return self._function(model, *arguments)


def _folder_for_torch() -> str:
    """Return a folder that nobody else can write to, for torch loads code from it: within the cache, or for this process alone."""
    try:
        return str(make_private(cache_folder() / "compiled"))
    except OSError as error:
        log.warning("what torch compiles is not kept for the next run: found %s", error)
        return tempfile.mkdtemp(prefix="dragoman-compiled-")


def compile_blocks(model: nn.Module) -> None:
    """Have every block compiled at its next call."""
    for block in model.modules():
        if isinstance(block, Block) and block.compiles:
            block.compile(dynamic=True)
            _compiled.add(block)


def stop_compiling(error: Exception) -> bool:
    """Have all blocks run as they are, where an error may be the compiler's, and say so; else give False.

    A compiler raises whatever it meets, on the way forward or back, and nobody can tell that from a mistake in a block: the pass is
    tried once more without it.
    """
    global _failed
    if not _compiled or isinstance(error, DragomanError) or is_out_of_memory(error):
        return False
    for block in _compiled:
        block._compiled_call_impl = None  # what nn.Module.compile sets; a stance of torch's would hold for others in this process too
    _compiled.clear()
    _failed = said_shortly(error)
    log.warning("compiling failed, the blocks run as they are, and the result is the same (%s); train.compile=off skips it", _failed)
    return True


def said_shortly(error: Exception) -> str:
    """Cut what a compiler said, which may be pages, to its first line."""
    found = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {found[:160]}" if found else type(error).__name__


@contextmanager
def as_they_are() -> Iterator[None]:
    """Run blocks plainly within, compiled or not: evaluation would be compiled anew, for a few passes."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def prepare_device(device: torch.device, *, deterministic: bool, replaying: bool = False) -> None:
    """Set what is set once a process: how a GPU multiplies float32, whether it must repeat its bits, and which attention it trains.

    To launch the kernels for short sentences one by one costs the host more time than they save; replayed they cost none.
    """
    enable_short_attention(replaying)
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision("high")  # what autocast leaves in float32 may use the tensor cores
    torch.backends.cuda.enable_cudnn_sdp(False)  # half a second for the plan of each shape, on an H200 with torch 2.11
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses; read at cuBLAS's first use
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
