"""What all tests share: kits beside this file can be imported, GPU tests are selected, and no other
test sees a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_kit import why_not

HAS_GPU = torch.cuda.is_available()

with contextlib.suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile(
        "dragoman", deadline=None
    )  # no test asserts a wall-clock time: machines may be busy
    hypothesis.settings.load_profile("dragoman")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the settings of pytest-timeout where it is not installed: a GPU machine may have
    pytest and no plugins.
    """
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "Ignored: pytest-timeout is not installed.")


class MissingPackages:
    """Import finder of last resort that turns the import of a missing test dependency into a
    skip.
    """

    names = frozenset(
        {
            "httptools",
            "hypothesis",
            "jsonschema",
            "matplotlib",
            "playwright",
            "rich",
            "sacrebleu",
            "safetensors",
            "sentencepiece",
            "starlette",
            "typer",
            "uvicorn",
            "yaml",
        }
    )

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """Skip the module or test that imports a missing package."""
        if name in cls.names:
            pytest.skip(f"needs the package {name}", allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    """With `-m gpu`, tolerate missing packages: nothing can be installed on some GPU machines.
    Elsewhere they stay errors.
    """
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: ignored, pytest-timeout is not installed")
    if "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr:
        sys.meta_path.append(MissingPackages)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect tests without the garbage collector, and exempt what exists then from it.

    It would traverse these 700,000 objects dozens of times, and again in every `gc.collect()`.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` or `triton` where there is none."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if reason := why_not(gpu="gpu" in marks, triton="triton" in marks):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hide the GPU from every test that is not marked `gpu`, its fixtures and its child processes.

    The device `auto` then means the same on all machines. What training sets once a process starts
    anew with each test.
    """
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    with pytest.MonkeyPatch.context() as patch:
        if HAS_GPU and item.get_closest_marker("gpu") is None:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch.cuda, "device_count", lambda: 0)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _compiled_kernels() -> None:
    """Compile the CPU's kernels before the first test: whichever ran first would find a line about
    it on its stderr.
    """
    from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library

    load_kernel_library()
