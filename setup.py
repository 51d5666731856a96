"""Build hooks for wheels: all other metadata is in pyproject.toml.

With DRAGOMAN_PREBUILD_KERNELS=1 a wheel contains the C++ kernels of CPU inference, compiled for
several instruction sets, and is tagged for its platform. Without it the wheel is pure Python, and
the kernels are compiled on first use.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))  # what a build needs imports no dependency
PREBUILD = os.environ.get("DRAGOMAN_PREBUILD_KERNELS") == "1"
CPU_ENGINE = Path("dragoman/inference/cpu")


class BuildPackage(build_py):
    """Compile the kernels in the build directory."""

    def run(self) -> None:
        """Copy the package, then compile the kernels."""
        super().run()
        if PREBUILD:
            compile_kernels(Path(self.build_lib) / CPU_ENGINE / "prebuilt")


def compile_kernels(folder: Path) -> None:
    """Compile the kernels for several instruction sets."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None)
    if compiler is None:
        raise SystemExit("DRAGOMAN_PREBUILD_KERNELS=1 needs a C++ compiler; found none; set CXX")
    from dragoman.inference.cpu.kernel_compiler import compile_variants

    compile_variants(compiler, folder)


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
    cmdclass={"build_py": BuildPackage, "bdist_wheel": PlatformWheel},
)
