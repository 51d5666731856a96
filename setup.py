"""Build hook for platform wheels: all other metadata is in pyproject.toml.

With DRAGOMAN_PREBUILD_KERNELS=1 a wheel contains the C++ kernels of CPU inference, compiled for
several instruction sets, and is tagged for its platform. Without it the wheel is pure Python, and
the kernels are compiled on first use.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILD = os.environ.get("DRAGOMAN_PREBUILD_KERNELS") == "1"
CPU_ENGINE = Path("dragoman/inference/cpu")


class BuildKernels(build_py):
    """Compile the kernels into the build directory, beside the Python files."""

    def run(self) -> None:
        """Copy the package, then compile."""
        super().run()
        if not PREBUILD:
            return
        compiler = next(
            filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None
        )
        if compiler is None:
            raise SystemExit(
                "DRAGOMAN_PREBUILD_KERNELS=1 needs a C++ compiler; found none; set CXX"
            )
        path = Path(__file__).parent / CPU_ENGINE / "kernel_compiler.py"
        spec = importlib.util.spec_from_file_location("kernel_compiler", path)
        assert spec is not None
        assert spec.loader is not None
        kernel_compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernel_compiler)
        kernel_compiler.compile_variants(compiler, Path(self.build_lib) / CPU_ENGINE / "prebuilt")


class PlatformWheel(bdist_wheel):
    """Tag a wheel with kernels for its platform and any Python: ctypes loads them."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PREBUILD else (python, abi, platform)


class KernelDistribution(Distribution):
    """A distribution with compiled files goes into platlib, where auditwheel expects them."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel has compiled files."""
        return PREBUILD


setup(
    distclass=KernelDistribution,
    cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel},
)
