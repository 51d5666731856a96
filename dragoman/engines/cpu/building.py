"""The kernels in `cpu/`, compiled for the machine they run on: once, by whatever C++ compiler it has, and kept in the user's cache folder.

What is in the cache is loaded only if it can be trusted (`dragoman/files/cache.py`); else it is compiled again.

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

from dragoman.files import cache

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "source"
MAIN = "transformer.cpp"
COMPILERS = ("c++", "g++", "clang++")  # after $CXX
SECONDS = 180  # that a compiler is given
# Sums must keep their order, so no -ffast-math. Conditions of floating-point numbers raise no errors that anybody reads.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-w")

_building = threading.Lock()


def kernels() -> ctypes.CDLL | None:
    """Give the compiled kernels; None where there are none, for the reason that was told the first time."""
    with _building:
        return _kernels(cache.cache_folder(), os.environ.get("CXX", ""))


@functools.cache
def _kernels(folder: Path, wanted: str) -> ctypes.CDLL | None:
    """Load what an earlier run compiled, or compile; remembered whatever comes of it."""
    compiler = next(filter(None, map(shutil.which, [wanted] if wanted else COMPILERS)), None)
    if compiler is None:
        logger.info(
            "%s: torch's operations are used, which are slower", f"the compiler {wanted} is not there" if wanted else "no C++ compiler"
        )
        return None
    library = folder / f"kernels-{_key(compiler)}.so"
    found = _from_cache(library)
    if found is not None:
        return found
    logger.info("compiling the kernels for this processor, once, with %s", compiler)
    problem: Exception | None = None
    for make_scratch in (_scratch_in(folder), _scratch_in(None)):  # the second for a cache that cannot be used
        try:
            with make_scratch() as scratch:
                return _built(compiler, Path(scratch) / library.name, library)
        except subprocess.TimeoutExpired as error:
            problem = error
            break
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            problem = problem or error
    told = getattr(problem, "stderr", None) or str(problem)
    line = next((each.strip() for each in told.splitlines() if each.strip()), type(problem).__name__)
    logger.warning("the kernels could not be compiled, and torch's operations are used, which are slower: %s: %.200s", compiler, line)
    return None


def _from_cache(library: Path) -> ctypes.CDLL | None:
    """Load what an earlier run compiled, if every byte of it is as it was written and nobody else could write it."""
    if cache.fetch(library) is None:
        return None
    try:
        return _loaded(library)
    except (OSError, AttributeError) as error:
        logger.debug("%s cannot be loaded and is made again: %s", library, error)
        return None


def _scratch_in(folder: Path | None) -> Callable[[], tempfile.TemporaryDirectory[str]]:
    """Return what makes a private folder to compile in: within the cache, or in the system's temporary directory."""

    def make() -> tempfile.TemporaryDirectory[str]:
        place = None if folder is None else cache.make_private(folder)
        return tempfile.TemporaryDirectory(prefix=".tmp-kernels-", dir=place, ignore_cleanup_errors=True)

    return make


def _built(compiler: str, scratch: Path, library: Path) -> ctypes.CDLL:
    """Compile and load the kernels, and store them in the cache; without it they are compiled anew in every run.

    They are loaded from the private folder that they were compiled in, so several processes may do this at once.
    """
    _compile(compiler, scratch)
    found = _loaded(scratch)
    try:
        cache.make_private(library.parent)
        cache.store(library, scratch.read_bytes())
    except OSError as error:
        logger.warning(
            "the compiled kernels cannot be kept, and every run compiles them anew: found %s (%s); repair the folder, or set %s",
            error.strerror or error, library.parent, cache.VARIABLE,
        )  # fmt: skip
    return found


def _compile(compiler: str, library: Path) -> None:
    """Compile the kernels into a file."""
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i386") else "-mcpu=native"
    command = [compiler, *FLAGS, tuned, "-o", str(library), str(SOURCES / MAIN)]
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=SECONDS)


def _loaded(library: Path) -> ctypes.CDLL:
    """Load the library and say what its functions take: pointers and counts."""
    found = ctypes.CDLL(str(library))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    for told in (found.dragoman_has_int8, found.dragoman_panel):
        told.argtypes, told.restype = [], count
    found.dragoman_read.argtypes = [pointer, pointer, pointer, count]
    found.dragoman_prepare.argtypes = [pointer, pointer, count, count, pointer, count]
    found.dragoman_step.argtypes = [pointer, pointer]
    found.dragoman_largest.argtypes = [pointer, count, count, count, pointer, pointer]
    found.dragoman_normaliser.argtypes = [pointer, count, count, pointer]
    found.dragoman_walk.argtypes = [pointer, pointer]
    for told in (found.dragoman_read, found.dragoman_prepare, found.dragoman_step, found.dragoman_walk):
        told.restype = count
    for name in ("largest", "normaliser"):
        getattr(found, f"dragoman_{name}").restype = None
    return found


def _key(compiler: str) -> str:
    """Hash all that the compiled kernels depend on: the sources, the compiler, the processor, the flags."""
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".h", ".cpp")]
    stat = os.stat(compiler)
    parts += [repr((compiler, stat.st_size, stat.st_mtime_ns, FLAGS, platform.machine(), platform.processor(), _processor())).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Say what instructions a processor has, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return platform.node()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
