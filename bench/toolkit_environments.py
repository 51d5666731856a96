"""Virtual environments of the peer toolkits: OpenNMT-py, eole and JoeyNMT.

An environment is created once in the cache directory and reused until its packages change. All use
the torch version of this environment. To remove them, delete `environments_directory()`.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dragoman.storage.trusted_cache_directory import cache_dir


class InstallError(Exception):
    """A toolkit's environment could not be created."""


class Toolkit(NamedTuple):
    """Packages of a toolkit, in versions that run with this Python and torch."""

    packages: tuple[str, ...]
    no_deps: tuple[str, ...] = ()  # installed last, without their dependencies

    @property
    def release(self) -> str:
        """Return the version of the toolkit itself."""
        return [*self.no_deps, *self.packages][0].split("==")[1]


TOOLKITS = {
    # Requires torch < 2.3 but runs with 2.13; with dependencies pip would choose the slower 3.0.4.
    "OpenNMT-py": Toolkit(
        (
            "configargparse==1.9.0",
            "ctranslate2==4.8.4",
            "fasttext-wheel==0.9.2",
            "pyahocorasick==2.3.1",
            "pyonmttok==1.38.1",
            "pyyaml",
            "rapidfuzz==3.14.6",
            "sacrebleu==2.6.0",
            "six",
            "spacy==3.8.18",
            "tensorboard==2.21.0",
        ),
        no_deps=("OpenNMT-py==3.5.1",),
    ),
    "eole": Toolkit(("eole==0.6.4", "aiohttp==3.14.5")),  # imported but not declared
    # imported but not declared
    "JoeyNMT": Toolkit(("joeynmt==2.3.0", "importlib_metadata==10.2.0")),
}
"""Packages of each toolkit's environment."""


def environments_directory() -> Path:
    """Return the directory of all environments."""
    return cache_dir() / "bench"


def toolkit_python(name: str, torch_version: str) -> Path:
    """Return the Python of a toolkit's environment, creating it if needed (1 to 3 minutes)."""
    toolkit = TOOLKITS[name]
    torch = f"torch=={torch_version.split('+')[0]}"
    wanted = "\n".join([sys.version, torch, *toolkit.packages, *toolkit.no_deps])
    folder = environments_directory() / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if complete.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted run
    print(f"{name}: installing it into {folder}", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", str(folder)], name)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "1",
    ]
    _run([*pip, torch], name)  # first, so that later packages match it
    _run([*pip, torch, *toolkit.packages], name)
    if toolkit.no_deps:
        _run([*pip, "--no-deps", *toolkit.no_deps], name)
    complete.write_text(wanted, encoding="utf-8")
    return python


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [
            line
            for line in (done.stderr or done.stdout).strip().splitlines()
            if "ERROR" in line or "rror:" in line
        ]
        raise InstallError(
            f"{name} could not be installed: "
            f"{(errors or ['pip gave no reason'])[-1].removeprefix('ERROR: ')[:200]}"
        )
