"""Fault injection for tests: named points where the disk fails or the process dies.

    DRAGOMAN_FAULT=<point>:<n>:<action>[,...]     at the n-th passage (from 1) of the point

Actions: `kill` (SIGKILL to ourselves), `stop` (SIGTERM), `sleep` (one second), `eio` and `enospc`
(system errors), `short` (a partial write). Points in writes are passed with half of the data
written. Without the variable a point costs one comparison.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass

from dragoman.errors import ConfigError, suggest_name

CHECKPOINT_FILES = ("weights.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json")

FAULT_POINTS = (
    "publish.mkdir",
    *(f"publish.write.{name}" for name in CHECKPOINT_FILES),
    "publish.fsync",
    "publish.manifest",
    "publish.rename",
    "publish.fsync_dir",
    "publish.log",
    "keep.link",
    "keep.rename",
    "prune.rename",
    "prune.unlink",
    "step.before",
    "step.after_backward",
    "data.next",
    "valid.mid",
)

_ERRORS = {"eio": errno.EIO, "short": errno.EIO, "enospc": errno.ENOSPC}
FAULT_ACTIONS = ("kill", "stop", "sleep", *_ERRORS)


@dataclass
class _Fault:
    point: str
    left: int  # passages until it is triggered
    action: str


armed_faults: list[_Fault] = []


def arm_faults(text: str) -> None:
    """Arm the faults of a description, replacing earlier ones; "" disarms all."""
    armed_faults[:] = [_parse(part) for part in text.split(",") if part]


def point(name: str) -> None:
    """Trigger the fault that a test armed at this point; otherwise do nothing."""
    if not armed_faults:
        return
    passed = [fault for fault in armed_faults if fault.point == name and fault.left]
    for fault in passed:  # count this passage for all of them before one raises
        fault.left -= 1
    for fault in passed:
        if not fault.left:
            _trigger(fault)


def _parse(part: str) -> _Fault:
    name, _, rest = part.partition(":")
    count, _, action = rest.partition(":")
    if name not in FAULT_POINTS:
        raise ConfigError(
            [
                f"DRAGOMAN_FAULT must name a fault point; found {name!r}; "
                f"{suggest_name(name, FAULT_POINTS)}"
            ]
        )
    if action not in FAULT_ACTIONS:
        raise ConfigError(
            [
                f"DRAGOMAN_FAULT must end in an action; found {action!r}; "
                f"{suggest_name(action, FAULT_ACTIONS)}"
            ]
        )
    if not count.isdecimal() or not int(count):
        raise ConfigError(
            [f"DRAGOMAN_FAULT must count passages from 1; found {count!r}; write {name}:1:{action}"]
        )
    return _Fault(name, int(count), action)


def _trigger(fault: _Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.action == "sleep":
        time.sleep(1.0)
    else:
        number = _ERRORS[fault.action]
        raise OSError(number, f"{os.strerror(number)} (injected at {fault.point})")


arm_faults(os.environ.get("DRAGOMAN_FAULT", ""))
