"""Loading the C++ kernels: compiled ahead of time in a platform wheel, or once on this machine.

A platform wheel has a library for each instruction set, and the best that the processor supports is
loaded. Otherwise the sources are compiled for this processor with the machine's C++ compiler and
kept in the cache directory, from which they are loaded only if they can be trusted: the library's
SHA-256, owner and mode are checked by `read_cached` of `storage/trusted_cache_directory.py`.
`DRAGOMAN_KERNELS=native` compiles even where the wheel has libraries.

Without either, PyTorch's operations run instead: the same output, more slowly, with one warning.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from dragoman.inference.cpu.kernel_compiler import (
    COMPILER_FLAGS,
    DIGEST_FILE,
    NATIVE_FLAGS,
    VARIANTS,
    compile_library,
    source_digest,
)
from dragoman.storage import trusted_cache_directory

logger = logging.getLogger(__name__)

PREBUILT_DIRECTORY = Path(__file__).parent / "prebuilt"  # in platform wheels only
KERNELS_VARIABLE = "DRAGOMAN_KERNELS"
COMPILERS = ("c++", "g++", "clang++")  # after $CXX

_build_lock = threading.Lock()


def load_kernel_library() -> ctypes.CDLL | None:
    """Return the kernel library, or None where there is none, after one warning with the reason."""
    with _build_lock:
        if os.environ.get(KERNELS_VARIABLE) != "native":
            prebuilt = _load_prebuilt(PREBUILT_DIRECTORY)
            if prebuilt is not None:
                return prebuilt
        return _load_kernel_library(trusted_cache_directory.cache_dir(), os.environ.get("CXX", ""))


@functools.cache
def _load_prebuilt(directory: Path) -> ctypes.CDLL | None:
    """Load the best library of a platform wheel for this processor; None if there is none.

    Libraries that were compiled from other sources than these are ignored: someone is changing
    them.
    """
    try:
        if (directory / DIGEST_FILE).read_text("utf-8").strip() != source_digest():
            logger.debug("%s was compiled from other sources and is ignored", directory)
            return None
        detect = ctypes.CDLL(str(directory / "kernels-baseline.so")).dragoman_cpu_variant
        detect.argtypes, detect.restype = [], ctypes.c_int64
        variant = list(VARIANTS)[detect()]
        library = _open_library(directory / f"kernels-{variant}.so")
    except (OSError, AttributeError, IndexError, ValueError) as error:
        logger.debug("no kernels compiled ahead of time: %s", error)
        return None
    logger.debug("kernels compiled ahead of time for %s", variant)
    return library


@functools.cache
def _load_kernel_library(folder: Path, requested: str) -> ctypes.CDLL | None:
    """Load the library that an earlier run compiled, or compile it; cached either way."""
    compiler = next(filter(None, map(shutil.which, [requested] if requested else COMPILERS)), None)
    if compiler is None:
        logger.warning(
            "%s: CPU inference runs PyTorch's operations, which are slower; install a C++ compiler "
            "such as g++, or a platform wheel of dragoman, which has the kernels",
            f"the compiler {requested} was not found" if requested else "found no C++ compiler",
        )
        return None
    library = folder / f"kernels-{_cache_key(compiler)}.so"
    found = _load_cached(library)
    if found is not None:
        return found
    logger.info("compiling the C++ kernels for this processor, once, with %s", compiler)
    problem: Exception | None = None
    # The system's temporary directory is for a cache directory that cannot be used.
    for scratch_factory in (_scratch_factory(folder), _scratch_factory(None)):
        try:
            with scratch_factory() as scratch:
                return _build_library(compiler, Path(scratch) / library.name, library)
        except subprocess.TimeoutExpired as error:
            problem = error
            break
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            problem = problem or error
    message = getattr(problem, "stderr", None) or str(problem)
    lines = (each.strip() for each in message.splitlines() if each.strip())
    logger.warning(
        "%s failed to compile the C++ kernels: CPU inference runs PyTorch's operations, which are "
        "slower; set CXX to another compiler: %.200s",
        compiler,
        next(lines, type(problem).__name__),
    )
    return None


def _load_cached(library: Path) -> ctypes.CDLL | None:
    """Load a cached library if its bytes are as written and no other user could change them."""
    if trusted_cache_directory.read_cached(library) is None:
        return None
    try:
        return _open_library(library)
    except (OSError, AttributeError) as error:
        logger.debug("%s cannot be loaded and is compiled again: %s", library, error)
        return None


def _scratch_factory(folder: Path | None) -> Callable[[], tempfile.TemporaryDirectory[str]]:
    """Return a function that makes a private directory to compile in, inside `folder` if given."""

    def make() -> tempfile.TemporaryDirectory[str]:
        parent = None if folder is None else trusted_cache_directory.make_private_directory(folder)
        return tempfile.TemporaryDirectory(
            prefix=".tmp-kernels-", dir=parent, ignore_cleanup_errors=True
        )

    return make


def _build_library(compiler: str, scratch: Path, library: Path) -> ctypes.CDLL:
    """Compile and load the kernels, and store them in the cache.

    They are loaded from the private directory that they were compiled in, so several processes may
    do this at the same time. A cache that cannot be written costs one compilation per process.
    """
    _compile(compiler, scratch)
    found = _open_library(scratch)
    try:
        trusted_cache_directory.make_private_directory(library.parent)
        trusted_cache_directory.write_cached(library, scratch.read_bytes())
    except OSError as error:
        logger.warning(
            "the compiled kernels cannot be cached, and every run compiles them again: found %s "
            "(%s); repair the directory, or set %s",
            error.strerror or error,
            library.parent,
            trusted_cache_directory.CACHE_VARIABLE,
        )
    return found


def _compile(compiler: str, library: Path) -> None:
    """Compile the kernels for this processor."""
    compile_library(compiler, library, NATIVE_FLAGS)


def _open_library(library: Path) -> ctypes.CDLL:
    """Load a library and declare the signatures of its functions."""
    found = ctypes.CDLL(str(library))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for function in (found.dragoman_has_int8, found.dragoman_panel_width):
        function.argtypes, function.restype = [], count
    found.dragoman_encode.argtypes = [pointer, pointer, pointer, count]
    found.dragoman_project_memory.argtypes = [pointer, pointer, count, count, pointer, count]
    found.dragoman_decode_step.argtypes = [pointer, pointer]
    found.dragoman_topk.argtypes = [pointer, count, count, count, pointer, pointer]
    found.dragoman_log_sum_exp.argtypes = [pointer, count, count, pointer]
    found.dragoman_decode_greedy.argtypes = [pointer, pointer]
    for function in (
        found.dragoman_encode,
        found.dragoman_project_memory,
        found.dragoman_decode_step,
        found.dragoman_decode_greedy,
    ):
        function.restype = count
    found.dragoman_beam_step.argtypes = [pointer]
    for name in ("topk", "log_sum_exp", "beam_step"):
        getattr(found, f"dragoman_{name}").restype = None
    return found


def _cache_key(compiler: str) -> str:
    """Return a hash of sources, compiler, flags and processor."""
    stat = os.stat(compiler)
    compiled_with = (compiler, stat.st_size, stat.st_mtime_ns, COMPILER_FLAGS, NATIVE_FLAGS)
    processor = (platform.machine(), platform.processor(), _cpu_flags())
    parts = f"{source_digest()}\0{compiled_with!r}\0{processor!r}"
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    """Return the processor's instruction sets where the system lists them, else the host name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.node()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
