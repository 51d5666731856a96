"""Kernels compiled ahead of time: the library of the processor's instruction set is chosen and
gives the same output.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from dragoman.inference.cpu import cpp_kernel_library_loader, kernel_compiler

COMPILER = next(filter(None, map(shutil.which, cpp_kernel_library_loader.COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile all variants as a wheel does, quickly."""
    directory = tmp_path_factory.mktemp("prebuilt")
    with pytest.MonkeyPatch.context() as patch:
        flags = tuple("-O0" if each == "-O3" else each for each in kernel_compiler.COMPILER_FLAGS)
        patch.setattr(kernel_compiler, "COMPILER_FLAGS", flags)
        assert COMPILER is not None
        kernel_compiler.compile_variants(COMPILER, directory)
    return directory


def log_sum_exp(library: ctypes.CDLL, logits: torch.Tensor) -> torch.Tensor:
    """Call one kernel of a library."""
    found = torch.empty(len(logits))
    library.dragoman_log_sum_exp(logits.data_ptr(), *logits.shape, found.data_ptr())
    return found


@needs_compiler
def test_the_best_variant_for_this_processor_is_loaded(prebuilt: Path) -> None:
    library = cpp_kernel_library_loader._load_prebuilt.__wrapped__(prebuilt)
    assert library is not None
    flags = cpp_kernel_library_loader._cpu_flags().split()
    panel = {True: 64, False: 16}["avx512f" in flags] if kernel_compiler.IS_X86 else None
    assert panel is None or library.dragoman_panel_width() >= 16
    assert bool(library.dragoman_has_int8()) == ("avx512_vnni" in flags)
    logits = torch.randn(3, 100)
    torch.testing.assert_close(log_sum_exp(library, logits), logits.logsumexp(-1))


@needs_compiler
@pytest.mark.parametrize("variant", kernel_compiler.VARIANTS)
def test_every_variant_that_this_processor_runs_computes_the_same(
    prebuilt: Path, variant: str
) -> None:
    baseline = ctypes.CDLL(str(prebuilt / "kernels-baseline.so"))
    if list(kernel_compiler.VARIANTS).index(variant) > baseline.dragoman_cpu_variant():
        pytest.skip(f"this processor has no {variant}")
    library = cpp_kernel_library_loader._open_library(prebuilt / f"kernels-{variant}.so")
    logits = torch.randn(5, 333)
    torch.testing.assert_close(log_sum_exp(library, logits), logits.logsumexp(-1))


@needs_compiler
@pytest.mark.parametrize("damage", ["other sources", "no baseline", "not a library", "no variant"])
def test_unusable_libraries_are_ignored(prebuilt: Path, tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "prebuilt"
    shutil.copytree(prebuilt, directory)
    if damage == "other sources":
        (directory / kernel_compiler.DIGEST_FILE).write_text("0" * 64)
    elif damage == "no baseline":
        (directory / "kernels-baseline.so").unlink()
    else:
        for path in directory.glob("kernels-*.so"):
            if damage == "not a library":
                path.write_bytes(b"not a library")
            elif path.name != "kernels-baseline.so":
                path.unlink()
        if damage == "no variant" and len(kernel_compiler.VARIANTS) == 1:
            pytest.skip("one variant only")
    found = cpp_kernel_library_loader._load_prebuilt.__wrapped__(directory)
    assert found is None


def test_without_prebuilt_libraries_the_sources_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_kernel_library_loader, "PREBUILT_DIRECTORY", tmp_path / "none")
    compiled = object()
    monkeypatch.setattr(
        cpp_kernel_library_loader, "_load_kernel_library", lambda folder, wanted: compiled
    )
    assert cpp_kernel_library_loader.load_kernel_library() is compiled


@needs_compiler
def test_native_is_compiled_on_request(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = object()
    monkeypatch.setattr(cpp_kernel_library_loader, "PREBUILT_DIRECTORY", prebuilt)
    monkeypatch.setattr(
        cpp_kernel_library_loader, "_load_kernel_library", lambda folder, wanted: compiled
    )
    assert cpp_kernel_library_loader.load_kernel_library() is not compiled
    monkeypatch.setenv(cpp_kernel_library_loader.KERNELS_VARIABLE, "native")
    assert cpp_kernel_library_loader.load_kernel_library() is compiled
