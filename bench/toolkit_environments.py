"""Other toolkits, each installed into an environment of its own: OpenNMT-py, eole and JoeyNMT.

An environment is made once, under the cache folder, and found again as long as nothing that goes into it changes. All get this
interpreter's version of torch, so that all multiply alike. To be rid of them, delete the folder that `environments` names.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dragoman.storage.cache import cache_dir


class InstallError(Exception):
    """A toolkit's environment could not be made; the message says why, in a line."""


class Toolkit(NamedTuple):
    """What is installed for one: versions that run with this Python and this torch."""

    packages: tuple[str, ...]
    no_deps: tuple[str, ...] = ()  # installed after them, without what they ask for themselves

    @property
    def release(self) -> str:
        """Say which release of the toolkit itself this is."""
        return [*self.no_deps, *self.packages][0].split("==")[1]


TOOLKITS = {
    # It asks for torch below 2.3, and runs with 2.13 all the same; given its wish, pip takes 3.0.4, which is slower.
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
    "eole": Toolkit(("eole==0.6.4", "aiohttp==3.14.5")),  # which it imports, but does not ask for
    "JoeyNMT": Toolkit(("joeynmt==2.3.0", "importlib_metadata==10.2.0")),  # the same
}
"""What is timed in an environment of its own, by name."""


def environments_directory() -> Path:
    """Give the folder that holds them all."""
    return cache_dir() / "bench"


def toolkit_python(name: str, torch_version: str) -> Path:
    """Give the toolkit's own Python; its environment is made the first time, which takes one to three minutes."""
    toolkit = TOOLKITS[name]
    torch = f"torch=={torch_version.split('+')[0]}"
    wanted = "\n".join([sys.version, torch, *toolkit.packages, *toolkit.no_deps])
    folder = environments_directory() / f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    if complete.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)  # a run that was stopped half-way
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
    _run([*pip, torch], name)  # first, so that what comes later is chosen to go with it
    _run([*pip, torch, *toolkit.packages], name)
    if toolkit.no_deps:
        _run([*pip, "--no-deps", *toolkit.no_deps], name)
    complete.write_text(wanted, encoding="utf-8")
    return python


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = [
            line
            for line in (done.stderr or done.stdout).strip().splitlines()
            if "ERROR" in line or "rror:" in line
        ]
        raise InstallError(
            f"{name} could not be installed: {(told or ['no word of why'])[-1].removeprefix('ERROR: ')[:200]}"
        )
