"""Compiling the C++ kernels in `csrc/`: for this processor, or ahead of time for a wheel.

A wheel holds one library per instruction set (`VARIANTS`). `cpp_kernel_library_loader.py` picks the
best that the processor can run, and checks a cached one before it is loaded. `setup.py` loads this
file by its path, so it imports nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCE_DIRECTORY = Path(__file__).parent / "csrc"
MAIN_SOURCE = "transformer.cpp"
VARIANT_SOURCE = "cpu_variant.cpp"  # detects the instruction set; part of the baseline library
COMPILE_TIMEOUT = 180  # seconds
# Floating-point sums keep their order, so no -ffast-math.
COMPILER_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-w",
)
IS_X86 = platform.machine() in ("x86_64", "AMD64")
NATIVE_FLAGS = ("-march=native",) if IS_X86 else ("-mcpu=native",)
# Slowest first: `dragoman_cpu_variant` in cpu_variant.cpp returns an index into this order.
VARIANTS: dict[str, tuple[str, ...]] = (
    {
        "baseline": ("-march=x86-64",),
        "avx2": ("-march=x86-64-v3",),
        "avx512": ("-march=x86-64-v4",),
        "avx512_vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    }
    if IS_X86
    else {"baseline": ()}
)
DIGEST_FILE = "sources.sha256"


def source_digest() -> str:
    """Return a SHA-256 of all C++ sources."""
    hasher = hashlib.sha256()
    for path in sorted(SOURCE_DIRECTORY.iterdir()):
        if path.suffix in (".h", ".cpp"):
            hasher.update(path.read_bytes() + b"\0")
    return hasher.hexdigest()


def compile_library(
    compiler: str, library: Path, flags: Sequence[str], sources: Sequence[str] = (MAIN_SOURCE,)
) -> None:
    """Compile the kernels into a shared library; raise a SubprocessError if the compiler fails."""
    command = [compiler, *COMPILER_FLAGS, *flags, "-o", str(library)]
    subprocess.run(
        [*command, *(str(SOURCE_DIRECTORY / each) for each in sources)],
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=COMPILE_TIMEOUT,
    )


def compile_variants(compiler: str, directory: Path) -> list[Path]:
    """Compile the kernels for every instruction set into a directory; return the libraries."""
    directory.mkdir(parents=True, exist_ok=True)
    libraries = []
    for name, flags in VARIANTS.items():
        library = directory / f"kernels-{name}.so"
        sources = (MAIN_SOURCE, VARIANT_SOURCE) if name == "baseline" else (MAIN_SOURCE,)
        compile_library(compiler, library, flags, sources)
        libraries.append(library)
    (directory / DIGEST_FILE).write_text(source_digest() + "\n", encoding="utf-8")
    return libraries
