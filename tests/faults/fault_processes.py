"""Subprocess trainers that a test starts, kills and restarts, and readers of their run
directories.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dragoman.checkpoint.run_directory import RunDirectory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class ForkServer:
    """The forking server's other end."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "fault_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        self._alive: set[int] = set()
        assert "ready" in self._read()

    def start(self, output: Path, **request: Any) -> ChildProcess:
        """Fork a child process; its output is appended to a file."""
        pid = self._ask({"start": request | {"output": str(output)}})["pid"]
        self._alive.add(pid)
        return ChildProcess(self, pid)

    def wait(self, pid: int) -> int:
        code = self._ask({"wait": pid})["code"]
        self._alive.discard(pid)
        return int(code)

    def close(self) -> None:
        for pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())


class ChildProcess:
    """One forked process."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self._fork_server, self.pid = fork_server, pid

    def send(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        return self._fork_server.wait(self.pid)

    def alive(self) -> bool:
        """Whether it still runs; a dead process stays a zombie until it is waited for."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return not Path("/proc").exists()


def loop(
    fork_server: ForkServer,
    directory: Path,
    *,
    fault: str = "",
    file_limit: int = 0,
    user: int = 0,
    **options: Any,
) -> ChildProcess:
    """Start the miniature run in a directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    output = directory.with_name(directory.name + ".output")
    if user:
        output.touch()
        output.chmod(0o666)
    return fork_server.start(
        output,
        fault=fault,
        file_limit=file_limit,
        user=user,
        loop={"directory": str(directory), **options},
    )


def trainer(
    fork_server: ForkServer, directory: Path, *, fault: str = "", **options: Any
) -> ChildProcess:
    """Start the real trainer, in miniature, in a directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    output = directory.with_name(directory.name + ".output")
    return fork_server.start(
        output, fault=fault, module="fault_trainer", loop={"directory": str(directory), **options}
    )


def command(
    fork_server: ForkServer,
    output: Path,
    *words: str,
    fault: str = "",
    file_limit: int = 0,
    user: int = 0,
    clock: float = 0.0,
) -> ChildProcess:
    """Start `dragoman` with some arguments, as a user does."""
    if user:
        output.touch()
        output.chmod(0o666)
    return fork_server.start(
        output, fault=fault, file_limit=file_limit, user=user, clock=clock, command=list(words)
    )


def losses(directory: Path) -> dict[int, set[str]]:
    """Collect every loss ever logged for a step, discarded lines included."""
    found: dict[int, set[str]] = {}
    for name in ("log.jsonl", "log.discarded.jsonl"):
        for record in _lines(directory / name):
            if "loss" in record and "event" not in record:
                found.setdefault(record["step"], set()).add(str(record["loss"]))
    return found


def logged(directory: Path) -> list[tuple[int, str]]:
    """List the logged steps with their losses, in order."""
    return [
        (record["step"], str(record["loss"]))
        for record in _lines(directory / "log.jsonl")
        if "loss" in record and "event" not in record
    ]


def last_step(directory: Path) -> int:
    """Return the last step in the log of a running child; called hundreds of times a second."""
    try:
        with (directory / "log.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def wait_for_step(
    directory: Path, step: int, child: ChildProcess | None = None, seconds: float = 120.0
) -> None:
    """Wait until a running trainer has logged a step."""
    end = time.monotonic() + seconds
    while last_step(directory) < step:
        assert child is None or child.alive(), (
            f"the child ended before step {step}; the last was {last_step(directory)}"
        )
        assert time.monotonic() < end, (
            f"step {step} was never reached; the last was {last_step(directory)}"
        )
        time.sleep(0.002)


def reported(directory: Path) -> int:
    """Read the newest step that the run reported as published."""
    published = [
        record["step"]
        for record in _lines(directory / "log.jsonl")
        if record.get("event") == "checkpoint"
    ]
    with contextlib.suppress(FileNotFoundError):
        published.append(json.loads((directory / "status.json").read_text()).get("checkpoint", 0))
    return max(published, default=0)


def newest_step(directory: Path) -> int:
    """Verify the newest step in full; 0 where none was published."""
    newest = RunDirectory(directory).latest()
    return 0 if newest is None else newest.step


def fingerprint(directory: Path) -> dict[str, str]:
    """Hash the newest step's tensors."""
    newest = RunDirectory(directory).latest()
    assert newest is not None
    return {"step": str(newest.step)} | {
        name: record["sha256"]
        for name, record in newest.manifest["files"].items()
        if name.endswith(".safetensors")
    }


def leftovers(directory: Path) -> list[str]:
    """List partly written and partly removed files and directories."""
    return [name for name in os.listdir(directory) if name.startswith((".tmp-", ".del-"))]


def show(name: str, value: Any, ok: bool = True) -> None:
    """Print the result of a check as a line of JSON for scripts."""
    sys.stdout.write(json.dumps({"bar": name, "ok": ok, "value": value}) + "\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)
