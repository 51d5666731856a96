"""Checks of the installation: PyTorch, GPUs, C++ engine, cache folder, extras, built-in model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterator

import torch

from dragoman.bundle.format import box_path
from dragoman.doctor.check_result import CheckResult, NotApplicableError
from dragoman.errors import BundleError, DragomanError
from dragoman.inference.cpu.cpp_kernel_library_loader import PREBUILT_DIRECTORY, load_kernel_library
from dragoman.runtime.device import cuda_problem, describe_hardware
from dragoman.runtime.optional_package_checks import EXTRAS, install_hint, missing_reason
from dragoman.storage.checksum_verification import verify_directory
from dragoman.storage.disk_space_and_errors import format_bytes
from dragoman.storage.trusted_cache_directory import cache_dir, make_private_directory

MATMUL_TOLERANCE = 1e-3  # of a float32 matmul on a GPU, against the CPU's
TORCH_VERSIONS = ((2, 11), (2, 13))  # the first and the last that the tests run on


class _BrokenError(Exception):
    """Something here does not work; the message is the reason and what to do."""


def run_installation_checks(
    *, on_check: Callable[[str], None] = lambda name: None
) -> Iterator[CheckResult]:
    """Check what Dragoman uses of this machine, and yield each result; the note is what was found.

    FAIL means that something is broken, SKIP that something optional is not there.
    """
    for name, check in _checks():
        on_check(name)
        try:
            yield CheckResult(name=name, passed=True, note=check())
        except NotApplicableError as reason:
            yield CheckResult(name=name, passed=None, note=str(reason))
        except (_BrokenError, DragomanError, OSError) as error:
            yield CheckResult(name=name, passed=False, note=str(error))


def _checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name and the function of each check."""
    yield "PyTorch", _check_torch
    yield "CPU", lambda: describe_hardware(torch.device("cpu"), 1)
    yield "GPU", _check_gpu
    yield "Triton kernels", _check_triton
    yield "C++ engine", _check_cpp_engine
    yield "cache directory", _check_cache
    yield "built-in model", _check_built_in_model
    for package in EXTRAS:
        yield package, lambda package=package: _check_package(package)  # type: ignore[misc]


def _check_torch() -> str:
    """Return the versions of PyTorch and Python."""
    first, last = TORCH_VERSIONS
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    version = f"{torch.__version__}, Python {platform.python_version()}"
    if found < first:
        raise _BrokenError(
            f"{version}; PyTorch must be {first[0]}.{first[1]} or later: pip install -U torch"
        )
    return version if found <= last else f"{version}; tested up to {last[0]}.{last[1]}"


def _check_gpu() -> str:
    """Return the names and the memory of the GPUs, after a matmul on each."""
    if torch.backends.mps.is_available():
        _compare_matmul(torch.device("mps"))
        return "Apple GPU (mps)"
    problem = cuda_problem(torch.device("cuda"), is_auto=True)
    if problem is None and shutil.which("nvidia-smi") and not torch.version.cuda:
        problem = (
            f"torch {torch.__version__} is built for CPUs only, and this machine has NVIDIA's "
            "driver; install a build of PyTorch for CUDA"
        )
    if problem is None:
        raise NotApplicableError("none; the CPU is used")
    if problem:
        raise _BrokenError(problem)
    found = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        _compare_matmul(device)
        memory = torch.cuda.get_device_properties(device).total_memory
        found.append(f"{torch.cuda.get_device_name(device)}, {format_bytes(memory)}")
    return "; ".join(found)


def _compare_matmul(device: torch.device) -> None:
    """Raise _BrokenError if a GPU's matmul differs from the CPU's."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(256, 256, generator=generator)
    try:
        product = (matrix.to(device) @ matrix.to(device)).cpu()
    except RuntimeError as error:
        raise _BrokenError(f"{device} failed: {next(iter(str(error).splitlines()), '')}") from error
    expected = matrix @ matrix
    difference = float((product - expected).abs().max() / expected.abs().max())
    if not difference <= MATMUL_TOLERANCE:
        raise _BrokenError(f"a matmul on {device} is {difference:.0e} off that on the CPU")


def _check_triton() -> str:
    """Return Triton's version, which the fused GPU kernels need."""
    if not torch.cuda.is_available():
        raise NotApplicableError("for NVIDIA GPUs")
    if reason := missing_reason("triton"):
        raise _BrokenError(f"{reason}: GPUs run PyTorch's operations, which are slower")
    return importlib.metadata.version("triton")


def _check_cpp_engine() -> str:
    """Return where the C++ kernels come from."""
    library = load_kernel_library()
    if library is None:
        raise _BrokenError(
            "no kernels: CPU inference runs PyTorch's operations, which are slower; install a C++ "
            "compiler such as g++"
        )
    name = os.path.basename(library._name)
    if os.path.dirname(library._name) == str(PREBUILT_DIRECTORY):
        return f"compiled ahead of time, {name}"
    return "compiled for this processor"


def _check_cache() -> str:
    """Return the cache directory and the space left there."""
    folder = cache_dir()
    try:
        make_private_directory(folder)
    except OSError as error:
        raise _BrokenError(
            f"{folder} cannot be used ({error.strerror or error}); set DRAGOMAN_CACHE to a "
            "directory that only you may write to"
        ) from error
    return f"{folder}, {format_bytes(shutil.disk_usage(folder).free)} free"


def _check_built_in_model() -> str:
    """Return the size of the built-in model, after checking its files."""
    try:
        path = box_path()
    except BundleError as error:
        raise NotApplicableError("this installation has none") from error
    checks = verify_directory(path)
    damaged = [check.name for check in checks if not check.ok]
    if damaged:
        raise _BrokenError(f"damaged: {', '.join(damaged)}; install dragoman again")
    return f"{format_bytes(sum(check.bytes for check in checks))}, all checksums match"


def _check_package(package: str) -> str:
    """Return the version of an optional package."""
    reason = missing_reason(package)
    if reason.startswith("no "):
        raise NotApplicableError(f"not installed: {install_hint(package)}")
    if reason:
        raise _BrokenError(f"found {reason}; install it again: {install_hint(package)}")
    return importlib.metadata.version(package)
