"""Trusted engines: exported on this machine, or accepted by a trial in a child process.

Other programs read model files in native code, which a crafted file can crash. So an engine that
came with a downloaded model is opened only on request, first in a child process. Each accepted
engine has an empty file in the user's cache folder, named by the SHA-256 of its manifest, which in
turn lists the hashes of all its files.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dragoman.errors import BundleError, DragomanError
from dragoman.storage import manifest
from dragoman.storage.trusted_cache_directory import (
    cache_dir,
    make_private_directory,
    trust_problem,
)

logger = logging.getLogger(__name__)

TRIAL_TIMEOUT = 120  # seconds
# Address space of a trial, beside four times the engine's files; torch alone reserves several GiB.
_TRIAL_MEMORY = 16 << 30
_SHA256 = re.compile(r"[0-9a-f]{64}")


def trust_directory() -> Path:
    """Return the folder with a record for each trusted engine."""
    return cache_dir() / "trusted-engines"


def is_trusted(digest: str) -> bool:
    """Whether the engine whose manifest has this SHA-256 was exported or passed a trial here."""
    if not _SHA256.fullmatch(digest):
        return False
    try:
        found = os.lstat(trust_directory() / digest)
        return stat.S_ISREG(found.st_mode) and not trust_problem(trust_directory() / digest)
    except OSError:
        return False


def record_trust(digest: str) -> None:
    """Record an engine as trusted; if that fails, it needs --engine and a trial each time."""
    try:
        folder = make_private_directory(trust_directory())
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        os.close(os.open(folder / digest, flags, 0o600))
    except OSError as error:
        logger.warning(
            "the engine could not be recorded as trusted (%s): it needs --engine to be used",
            error,
        )


def require_trial(
    fields: Mapping[str, Any], function: str, arguments: list[str], *, label: str
) -> None:
    """Raise BundleError unless the engine with these manifest fields is trusted or passes a trial.

    The trial calls `function` in a child process, once: an engine that passes is then trusted.
    """
    digest = manifest.manifest_digest(fields)
    if is_trusted(digest):
        return
    logger.info("%s was not exported on this machine: trying it in a child process, once", label)
    size = sum(record["bytes"] for record in fields["files"].values())
    run_in_child(function, arguments, label=label, bytes=size)
    record_trust(digest)


def run_in_child(function: str, arguments: list[str], *, label: str, bytes: int) -> None:
    """Call `module:function` with arguments in a child process; raise BundleError if that fails.

    `label` names the engine in the error, and `bytes` is the size of its files.
    """
    module, _, name = function.partition(":")
    code = (
        f"import sys; from {module} import {name}; from {__name__} import run_trial; "
        f"run_trial({name}, sys.argv[1:])"
    )
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(_TRIAL_MEMORY + 4 * bytes), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TRIAL_TIMEOUT,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        found = f"no answer within {TRIAL_TIMEOUT} seconds"
    except OSError as error:
        found = f"no process to try it in ({error})"
    else:
        if done.returncode == 0:
            return
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        found = (
            _describe_exit(done.returncode)
            if done.returncode < 0 or not lines
            else f"{lines[-1]:.300}"
        )
    raise BundleError(
        f"{label} was not exported on this machine and must pass a trial in a child process",
        found=found,
        fix="use --engine native, or export the model here",
    )


def run_trial(function: Callable[..., None], arguments: list[str]) -> None:
    """Limit the address space to the first argument and call a function; exit 1 if it raises."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(arguments[0]), int(arguments[0])))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):  # a system without such limits, or with lower ones
        pass
    try:
        function(*arguments[1:])
    except DragomanError as error:
        sys.exit(str(error).splitlines()[0])  # to stderr, with exit code 1
    except Exception as error:  # native code raises what it likes
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _describe_exit(code: int) -> str:
    """Describe the exit of a trial without output."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"a crash with {signal.Signals(-code).name}"
    except ValueError:
        return f"a crash with signal {-code}"
