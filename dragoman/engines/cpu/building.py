"""The kernels in `cpu/`, compiled for the machine they run on: once, by whatever C++ compiler it has, and kept in the user's cache folder.

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
import threading
from pathlib import Path

from dragoman.engines.measuring import cache_folder

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
        return _kernels(cache_folder(), os.environ.get("CXX", ""))


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
    try:
        if library.exists():
            return _loaded(library)
    except (OSError, AttributeError):
        logger.debug("%s is damaged, and is made again", library)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        logger.info("compiling the kernels for this processor, once, with %s", compiler)
        _compile(compiler, library)
        return _loaded(library)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or str(error)
        line = next((each.strip() for each in told.splitlines() if each.strip()), type(error).__name__)
        logger.warning("the kernels could not be compiled, and torch's operations are used, which are slower: %s: %.200s", compiler, line)
        return None


def _compile(compiler: str, library: Path) -> None:
    """Compile into place, whole or not at all; several processes may do so at once."""
    temporary = library.with_suffix(f".{os.getpid()}")
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i386") else "-mcpu=native"
    command = [compiler, *FLAGS, tuned, "-o", str(temporary), str(SOURCES / MAIN)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
        os.replace(temporary, library)
    finally:
        temporary.unlink(missing_ok=True)


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
    for told in (found.dragoman_step, found.dragoman_walk):
        told.restype = count
    for name in ("read", "prepare", "largest", "normaliser"):
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
