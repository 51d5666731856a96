"""The run directory: crash-safe checkpoints, a lock, the training log and status.json.

`RunDirectory.latest` loads the newest checkpoint that verifies and quarantines damaged ones.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dragoman._version import __version__
from dragoman.checkpoint.checkpoint_io import (
    TENSOR_PARTS,
    Checkpoint,
    CheckpointTensors,
    WriteTensors,
    list_steps,
    open_checkpoint,
    step_directory_name,
    write_checkpoint,
    write_tensor_files,
)
from dragoman.checkpoint.retention import (
    BestCheckpoint,
    count_quarantined,
    prune_checkpoints,
    prune_oldest,
    quarantine_checkpoint,
    remove_leftovers,
)
from dragoman.checkpoint.training_log import TrainingLog, spell_nonfinite
from dragoman.errors import CorruptError, DiskError
from dragoman.storage import fault_injection
from dragoman.storage import manifest as manifests
from dragoman.storage.atomic_and_safe_file_io import replace_file
from dragoman.storage.disk_space_and_errors import (
    DiskFullError,
    format_bytes,
    os_errors_converted,
    require_disk_space,
    require_writable,
)
from dragoman.storage.lock import DirectoryLock
from dragoman.storage.tensor_files import check_finite, count_tensor_bytes


def describe_environment(
    *, device: str = "cpu", world: int = 1, deterministic: bool = False
) -> dict[str, Any]:
    """Return the environment that bit-exact results depend on, threads included."""
    return {
        "torch": torch.__version__.split("+")[0],
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "world": world,
        "deterministic": deterministic,
    }


def environment_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what changed, such as "threads 1 -> 2"; empty when a resumed run is bit-exact."""
    return [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


__all__ = ["Checkpoint", "CheckpointTensors", "RunDirectory"]

logger = logging.getLogger(__name__)

_DISK_ERROR_RETRIES = 2  # failed checkpoints that are tolerated, other than on a full disk
_DISK_SPACE_MARGIN = 1.2  # required disk space over the bytes of the tensors


class RunDirectory:
    """Checkpoints, log and status of a run; only rank 0 writes to it."""

    def __init__(
        self,
        path: Path,
        *,
        keep_checkpoints: int = 3,
        disk_full_retries: int = 3,
        data_digest: str = "",
        config_digest: str = "",
        environment: Callable[[], Mapping[str, Any]] = describe_environment,
    ) -> None:
        self.path = Path(path)
        self.run_id = ""
        self.keep_checkpoints, self.disk_full_retries = keep_checkpoints, disk_full_retries
        self.data_digest, self.config_digest = data_digest, config_digest
        self._environment = environment
        self._lock = DirectoryLock(self.path)
        self.training_log = TrainingLog(self.path)
        self._best = BestCheckpoint(self.path)
        self._status = StatusFile(self.path)
        self._parent: Checkpoint | None = None
        self._failures = 0

    # Owning the directory

    def lock(self) -> RunDirectory:
        """Lock the directory, remove leftovers, and create run.json where there is none."""
        require_writable(self.path)
        self._lock.acquire()
        with os_errors_converted(self.path):
            remove_leftovers(self.path)
            self.run_id = create_or_read_run_id(self.path, self.config_digest)
        return self

    def close(self) -> None:
        """Close the log and release the lock."""
        self.training_log.close()
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        """Lock the directory."""
        return self.lock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release the lock."""
        self.close()

    # Saving

    def require_checkpoint_space(self, tensors: CheckpointTensors, *, ranks: int = 1) -> None:
        """Raise DiskFullError if the checkpoints of a run will not fit.

        There must be space for one more than are kept.
        """
        size = int(_DISK_SPACE_MARGIN * ranks * _count_bytes(tensors))
        existing = len(self.steps())
        with os_errors_converted(self.path):
            require_disk_space(
                self.path,
                size * max(1, self.keep_checkpoints + 1 - existing),
                f"{self.keep_checkpoints + 1} checkpoints of {format_bytes(size)}",
            )

    def save_checkpoint(
        self,
        step: int,
        tensors: CheckpointTensors,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        tolerate_disk_errors: bool = False,
        suspect: bool = False,
        write: WriteTensors = write_tensor_files,
        ranks: int = 1,
    ) -> Checkpoint | None:
        """Save a checkpoint atomically and durably, and return it; `write` writes the tensor files.

        With `tolerate_disk_errors`, a failing disk returns None and training continues:
        `disk_full_retries` times when the disk is full, twice after other errors. `suspect` marks a
        checkpoint after a loss spike; the last one that is not suspect is never pruned.
        """
        self._lock.check()
        for part in TENSOR_PARTS:
            check_finite(tensors.get(part) or {}, part)
        fields = {
            "run_id": self.run_id,
            "created_by": f"dragoman {__version__}",
            "config_sha256": self.config_digest,
            "data_sha256": self.data_digest,
            "env": dict(self._environment()),
            "metrics": spell_nonfinite(metrics or {}),
            "suspect": suspect,
            "parent": _parent_reference(self._parent),
        }
        try:
            with os_errors_converted(self.path):
                self.training_log.sync()
                checkpoint = self._write_pruning_old(step, tensors, state, fields, write, ranks)
        except DiskError as error:
            self._failures += 1
            left = (
                self.disk_full_retries if isinstance(error, DiskFullError) else _DISK_ERROR_RETRIES
            ) - self._failures
            if not tolerate_disk_errors or left < 0:
                raise
            logger.warning(
                "the checkpoint of step %d was not saved: %s "
                "(training continues; %d more failures end it)",
                step,
                error,
                left + 1,
            )
            return None
        self._failures, self._parent = 0, checkpoint
        with os_errors_converted(self.path):
            fault_injection.point("publish.log")
            self.training_log.append({"event": "checkpoint", "step": step})
        self.status(step=step, checkpoint=step)
        return checkpoint

    def _write_pruning_old(
        self,
        step: int,
        tensors: CheckpointTensors,
        state: Mapping[str, Any],
        fields: Mapping[str, Any],
        write: WriteTensors,
        ranks: int,
    ) -> Checkpoint:
        """Write a checkpoint; while the disk is full, remove old ones, one at a time."""
        needed = int(_DISK_SPACE_MARGIN * ranks * _count_bytes(tensors))
        path = self.path / step_directory_name(step)
        if path.exists():
            try:
                open_checkpoint(path)
            except CorruptError as error:
                quarantine_checkpoint(path, error)
        while True:
            try:
                require_disk_space(self.path, needed, path.name)
                with os_errors_converted(self.path):
                    return write_checkpoint(self.path, step, tensors, state, fields, write)
            except DiskFullError:
                removed = prune_oldest(self.path, self.run_id, needed)
                if removed is None:
                    raise
                logger.warning("the disk is full: %s was removed for %s", removed, path.name)

    # Loading

    def steps(self) -> list[int]:
        """Return the saved steps, oldest first, unverified."""
        return list_steps(self.path)

    def open_step(self, step: int) -> Checkpoint:
        """Verify and open one checkpoint; raises CorruptError naming the first damaged file."""
        return open_checkpoint(self.path / step_directory_name(step))

    def verified_checkpoints(self) -> Iterator[Checkpoint]:
        """Yield the checkpoints that verify, newest first; changes nothing."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CorruptError):
                yield self.open_step(step)

    def latest(self, expected: CheckpointTensors | None = None) -> Checkpoint | None:
        """Return the newest checkpoint that verifies; None only where none was ever saved.

        While the lock is held, a damaged checkpoint is quarantined as `bad-step-…`. An intact one
        that does not match `expected` belongs to another configuration and raises CorruptError.
        """
        bad = 0
        for step in reversed(self.steps()):
            try:
                checkpoint = self.open_step(step)
            except CorruptError as error:
                bad += 1
                logger.warning("%s is damaged and is skipped: %s", step_directory_name(step), error)
                if self._lock.held:
                    quarantine_checkpoint(self.path / step_directory_name(step), error)
                continue
            self._check_same_run(checkpoint, expected)
            self._parent = checkpoint
            return checkpoint
        if self._has_saved_before():
            raise CorruptError(
                f"the run in {self.path} must have a checkpoint that verifies",
                found=f"{count_quarantined(self.path) or bad} checkpoints, none valid",
                fix="restore one from a copy (WHY.txt in each bad-step directory has the reason), "
                "or train in another directory",
            )
        return None

    def best(self) -> Checkpoint | None:
        """Return the checkpoint that was kept as the best, if there is one."""
        return self._best.open()

    def environment_changes_since(self, checkpoint: Checkpoint) -> list[str]:
        """Return why resuming from a checkpoint is not bit-exact, such as "threads 1 -> 2"."""
        return environment_changes(checkpoint.environment, dict(self._environment()))

    # Retention

    def keep_best(self, step: int) -> None:
        """Keep a checkpoint as the best, exempt from pruning, in place of an earlier best."""
        with os_errors_converted(self.path):
            self._best.replace(self.open_step(step))

    def ensure_best_kept(self, step: int) -> None:
        """Keep the best checkpoint of a resumed run, where a crash came before keeping it."""
        if step in self.steps() and self._best.steps() != [step]:
            with contextlib.suppress(CorruptError):  # the earlier best stays
                self.keep_best(step)

    def prune(self, keep_checkpoints: int | None = None) -> list[int]:
        """Remove old checkpoints as `prune_checkpoints` does; return the removed steps."""
        keep = keep_checkpoints or self.keep_checkpoints
        with os_errors_converted(self.path):
            return prune_checkpoints(self.path, self.run_id, keep=keep)

    # Log and status

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of log.jsonl."""
        return self.training_log.records()

    def truncate_log(self, step: int) -> int:
        """Remove the log lines after a step, which a resumed run repeats; return how many."""
        return self.training_log.truncate(step)

    def status(self, **fields: Any) -> None:
        """Update status.json (state, step, exit_code, reason, …).

        A full disk only logs a warning.
        """
        self._lock.check()
        self._status.update(fields)

    def _has_saved_before(self) -> bool:
        """Whether a checkpoint was ever saved here, so that the run cannot start at step 0."""
        return (
            bool(self.steps())
            or count_quarantined(self.path) > 0
            or any(record.get("event") == "checkpoint" for record in self.training_log.records())
        )

    def _check_same_run(self, checkpoint: Checkpoint, expected: CheckpointTensors | None) -> None:
        before = checkpoint.manifest.get("data_sha256")
        if before and self.data_digest and before != self.data_digest:
            raise CorruptError(
                "the corpus must be the one that the run started with",
                found=f"data {self.data_digest[:12]}…, and {checkpoint.path.name} was trained on "
                f"{before[:12]}…",
                fix="restore the corpus, or train in another directory",
            )
        if expected is not None:
            checkpoint.check_shapes_match(expected)
        for change in self.environment_changes_since(checkpoint):
            logger.warning("resume is not bit-exact: %s", change)


class StatusFile:
    """`status.json`: state, step and exit code of a run, for launchers that lose the exit code."""

    def __init__(self, run: Path) -> None:
        self.path = run / "status.json"
        self._fields: dict[str, Any] = {}

    def update(self, fields: dict[str, Any]) -> None:
        """Change some fields and replace the file; a full disk only logs a warning."""
        self._fields |= fields
        process = {"pid": os.getpid(), "host": socket.gethostname(), "time": _timestamp()}
        try:
            replace_file(self.path, manifests.canonical_json(self._fields | process))
        except OSError as error:
            logger.warning("status.json was not replaced: %s", error)


def _timestamp() -> str:
    """Return the local time for display; no decision depends on it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def create_or_read_run_id(run: Path, config_digest: str) -> str:
    """Return the id of the run from run.json, written at its start.

    Pruning only touches its own steps.
    """
    path = run / "run.json"
    if path.exists():
        return str(manifests.read_json(path).get("run_id", ""))
    run_id = secrets.token_hex(8)
    created = {
        "format": 1,
        "run_id": run_id,
        "created": _timestamp(),
        "created_by": f"dragoman {__version__}",
    }
    replace_file(path, manifests.canonical_json(created | {"config_sha256": config_digest}))
    return run_id


def _count_bytes(tensors: CheckpointTensors) -> int:
    return sum(count_tensor_bytes(values) for values in tensors.values() if values is not None)


def _parent_reference(parent: Checkpoint | None) -> dict[str, Any] | None:
    return (
        None
        if parent is None
        else {"step": parent.step, "manifest_sha256": manifests.manifest_digest(parent.manifest)}
    )
