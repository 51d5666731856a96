"""The kernels in `cpu/`, compiled for the machine they run on: once, by whatever C++ compiler it has, and kept in the user's cache folder.

What is in the cache is loaded only if it can be trusted (`dragoman/storage/cache.py`); else it is compiled again.

A machine without a compiler, or with one that fails, uses torch's operations instead: the same results, more slowly. That is said once.
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

from dragoman.storage import cache

logger = logging.getLogger(__name__)

SOURCE_DIRECTORY = Path(__file__).parent / "csrc"
MAIN_SOURCE = "transformer.cpp"
COMPILERS = ("c++", "g++", "clang++")  # after $CXX
COMPILE_TIMEOUT = 180  # that a compiler is given
# Sums must keep their order, so no -ffast-math. Conditions of floating-point numbers raise no errors that anybody reads.
COMPILER_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-w",
)

_build_lock = threading.Lock()


def load_kernel_library() -> ctypes.CDLL | None:
    """Give the compiled kernels; None where there are none, for the reason that was told the first time."""
    with _build_lock:
        return _load_kernel_library(cache.cache_dir(), os.environ.get("CXX", ""))


@functools.cache
def _load_kernel_library(folder: Path, requested: str) -> ctypes.CDLL | None:
    """Load what an earlier run compiled, or compile; remembered whatever comes of it."""
    compiler = next(filter(None, map(shutil.which, [requested] if requested else COMPILERS)), None)
    if compiler is None:
        logger.info(
            "%s: torch's operations are used, which are slower",
            f"the compiler {requested} is not there" if requested else "no C++ compiler",
        )
        return None
    library = folder / f"kernels-{_cache_key(compiler)}.so"
    found = _load_cached(library)
    if found is not None:
        return found
    logger.info("compiling the kernels for this processor, once, with %s", compiler)
    problem: Exception | None = None
    for scratch_factory in (
        _scratch_factory(folder),
        _scratch_factory(None),
    ):  # the second for a cache that cannot be used
        try:
            with scratch_factory() as scratch:
                return _build_library(compiler, Path(scratch) / library.name, library)
        except subprocess.TimeoutExpired as error:
            problem = error
            break
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            problem = problem or error
    message = getattr(problem, "stderr", None) or str(problem)
    line = next(
        (each.strip() for each in message.splitlines() if each.strip()), type(problem).__name__
    )
    logger.warning(
        "the kernels could not be compiled, and torch's operations are used, which are slower: %s: %.200s",
        compiler,
        line,
    )
    return None


def _load_cached(library: Path) -> ctypes.CDLL | None:
    """Load what an earlier run compiled, if every byte of it is as it was written and nobody else could write it."""
    if cache.read_cached(library) is None:
        return None
    try:
        return _open_library(library)
    except (OSError, AttributeError) as error:
        logger.debug("%s cannot be loaded and is made again: %s", library, error)
        return None


def _scratch_factory(folder: Path | None) -> Callable[[], tempfile.TemporaryDirectory[str]]:
    """Return what makes a private folder to compile in: within the cache, or in the system's temporary directory."""

    def make() -> tempfile.TemporaryDirectory[str]:
        place = None if folder is None else cache.make_private_directory(folder)
        return tempfile.TemporaryDirectory(
            prefix=".tmp-kernels-", dir=place, ignore_cleanup_errors=True
        )

    return make


def _build_library(compiler: str, scratch: Path, library: Path) -> ctypes.CDLL:
    """Compile and load the kernels, and store them in the cache; without it they are compiled anew in every run.

    They are loaded from the private folder that they were compiled in, so several processes may do this at once.
    """
    _compile(compiler, scratch)
    found = _open_library(scratch)
    try:
        cache.make_private_directory(library.parent)
        cache.write_cached(library, scratch.read_bytes())
    except OSError as error:
        logger.warning(
            "the compiled kernels cannot be kept, and every run compiles them anew: found %s (%s); repair the folder, or set %s",
            error.strerror or error, library.parent, cache.CACHE_VARIABLE,
        )  # fmt: skip
    return found


def _compile(compiler: str, library: Path) -> None:
    """Compile the kernels into a file."""
    target_flag = (
        "-march=native" if platform.machine() in ("x86_64", "AMD64", "i386") else "-mcpu=native"
    )
    command = [
        compiler,
        *COMPILER_FLAGS,
        target_flag,
        "-o",
        str(library),
        str(SOURCE_DIRECTORY / MAIN_SOURCE),
    ]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMPILE_TIMEOUT,
    )


def _open_library(library: Path) -> ctypes.CDLL:
    """Load the library and say what its functions take: pointers and counts."""
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
    for name in ("topk", "log_sum_exp"):
        getattr(found, f"dragoman_{name}").restype = None
    return found


def _cache_key(compiler: str) -> str:
    """Hash all that the compiled kernels depend on: the sources, the compiler, the processor, the flags."""
    parts = [
        path.read_bytes()
        for path in sorted(SOURCE_DIRECTORY.iterdir())
        if path.suffix in (".h", ".cpp")
    ]
    stat = os.stat(compiler)
    parts += [
        repr(
            (
                compiler,
                stat.st_size,
                stat.st_mtime_ns,
                COMPILER_FLAGS,
                platform.machine(),
                platform.processor(),
                _cpu_flags(),
            )
        ).encode()
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu_flags() -> str:
    """Say what instructions a processor has, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.node()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
