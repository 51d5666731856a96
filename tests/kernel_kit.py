"""Triton kernels without a GPU: run by the interpreter, or only compiled."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"

interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="needs the package triton and TRITON_INTERPRET=1"
)
# Marks, so that `make test-gpu` can select these tests; conftest.py skips them on a machine without
# what they need.
needs_triton = pytest.mark.triton
needs_gpu = pytest.mark.gpu


def cache_with_kernels(folder: Path) -> Path:
    """Return a new cache folder that has only the compiled C++ kernels: compiling takes seconds."""
    from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library
    from dragoman.storage.trusted_cache_directory import cache_dir

    load_kernel_library()
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
        for each in cache_dir().glob("kernels-*"):
            shutil.copy2(each, folder / each.name)
    return folder


def why_not(*, gpu: bool, triton: bool) -> str:
    """Return why a test that needs a GPU or Triton is skipped here, or an empty string."""
    if gpu and not torch.cuda.is_available():
        return "needs a GPU"
    if triton and (not TRITON or INTERPRETED):
        return "needs the package triton, not as an interpreter"
    return ""


def run_interpreted(file: str, timeout: int = 500) -> None:
    """Run a file's tests called "interpreted" in another process.

    Triton decides at import whether it compiles or interprets.
    """
    call = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-k",
        "interpreted",
        str(Path(file).relative_to(ROOT)),
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    ended = subprocess.run(
        call, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    # Triton 3.6's interpreter makes loop bounds of arrays with one element; numpy 2.5 rejects it.
    if "only 0-dimensional arrays can be converted to Python scalars" in ended.stdout:
        pytest.skip("this Triton's interpreter does not support this numpy")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert " passed" in ended.stdout


def compile_for_hopper(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    *,
    aligned: Collection[str] = (),
    **options: int,
) -> Any:
    """Compile a kernel for compute capability 9.0.

    Arguments without a type or value are integers; those in `aligned` are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def argument_index(name: str) -> tuple[int]:
        return (kernel.arg_names.index(name),)

    source = ASTSource(
        fn=kernel,
        signature={
            each: "constexpr" if each in constants else types.get(each, "i32")
            for each in kernel.arg_names
        },
        constexprs={argument_index(each): value for each, value in constants.items()},
        attrs={argument_index(each): [["tt.divisibility", 16]] for each in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
