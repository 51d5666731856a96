"""The run directory: crash-safe checkpoints, a lock, the training log and status.json."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from dragoman._version import __version__
from dragoman.checkpoint.checkpoint import (
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
    StatusFile,
    count_quarantined,
    create_or_read_run_id,
    list_prunable,
    prune_oldest,
    quarantine_checkpoint,
    remove_checkpoint,
    remove_leftovers,
)
from dragoman.checkpoint.training_log import TrainingLog, spell_nonfinite
from dragoman.errors import CorruptError, DiskError
from dragoman.storage import fault_injection
from dragoman.storage import manifest as manifests
from dragoman.storage.disk import (
    DiskFullError,
    os_errors_converted,
    require_disk_space,
    require_writable,
)
from dragoman.storage.lock import DirectoryLock
from dragoman.storage.tensor_files import check_finite, count_tensor_bytes


def describe_environment(
    *, device: str = "cpu", world: int = 1, deterministic: bool = False
) -> dict[str, Any]:
    """Record what the bits depend on; sums are split by threads and instruction set, so those are part of it."""
    return {
        "torch": torch.__version__.split("+")[0],
        "threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "world": world,
        "deterministic": deterministic,
    }


def environment_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what changed, such as "threads 1 -> 2"; empty when a resumed run repeats every bit."""
    return [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


__all__ = ["Checkpoint", "CheckpointTensors", "RunDirectory"]

logger = logging.getLogger(__name__)

_DISK_ERROR_RETRIES = 2  # intervals to go on after a disk error other than a full disk
_DISK_SPACE_MARGIN = (
    1.2  # room asked for, over the tensors' own bytes: headers, state, other programs
)


class RunDirectory:
    """What a run writes, and how it is found again; only one process, rank 0, may write in it."""

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
        self._log = TrainingLog(self.path)
        self._best = BestCheckpoint(self.path)
        self._status = StatusFile(self.path)
        self._parent: Checkpoint | None = None
        self._failures = 0

    # Owning the directory

    def lock(self) -> RunDirectory:
        """Take the directory for this process, clear its own leftovers, and begin the run's record where there is none."""
        require_writable(self.path)
        self._lock.acquire()
        with os_errors_converted(self.path):
            remove_leftovers(self.path)
            self.run_id = create_or_read_run_id(self.path, self.config_digest)
        return self

    def close(self) -> None:
        """Give the directory back."""
        self._log.close()
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        """Lock for the length of a block."""
        return self.lock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the directory back, whatever happened."""
        self.close()

    # Publishing

    def require_checkpoint_space(self, tensors: CheckpointTensors, *, ranks: int = 1) -> None:
        """Refuse at the start a run whose checkpoints will not fit: one more than are kept exist for a moment."""
        size = int(_DISK_SPACE_MARGIN * ranks * _count_bytes(tensors))
        there = len(self.steps())
        with os_errors_converted(self.path):
            require_disk_space(
                self.path,
                size * max(1, self.keep_checkpoints + 1 - there),
                f"room for {self.keep_checkpoints + 1} checkpoints of {size} bytes",
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
        """Make a step visible, whole and durable, or raise; `write` has the files written, where `ranks` write some each.

        With `patient`, a failing disk is waited for: None is returned and training may go on, for `grace` intervals when
        the disk is full and two for other errors. A stop and the run's end must not be patient. `suspect` marks a step
        after a spike of the loss; the last one that is not suspect is never pruned.
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
                self._log.sync()
                checkpoint = self._write_pruning_old(step, tensors, state, fields, write, ranks)
        except DiskError as error:
            self._failures += 1
            left = (
                self.disk_full_retries if isinstance(error, DiskFullError) else _DISK_ERROR_RETRIES
            ) - self._failures
            if not tolerate_disk_errors or left < 0:
                raise
            logger.warning(
                "step %d was not saved: %s (training goes on; %d more failures end it)",
                step,
                error,
                left + 1,
            )
            return None
        self._failures, self._parent = 0, checkpoint
        with os_errors_converted(self.path):
            fault_injection.point("publish.log")
            self._log.append({"event": "checkpoint", "step": step})
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
        """Write a step; while the disk is full, give up old steps one at a time."""
        needed = int(_DISK_SPACE_MARGIN * ranks * _count_bytes(tensors))
        place = self.path / step_directory_name(step)
        if place.exists():
            try:
                open_checkpoint(place)
            except CorruptError as error:
                quarantine_checkpoint(place, error)
        while True:
            try:
                require_disk_space(self.path, needed, place.name)
                with os_errors_converted(self.path):
                    return write_checkpoint(self.path, step, tensors, state, fields, write)
            except DiskFullError:
                removed = prune_oldest(self.path, self.run_id, needed)
                if removed is None:
                    raise
                logger.warning(
                    "the disk is full: %s was removed to make room for %s", removed, place.name
                )

    # Finding

    def steps(self) -> list[int]:
        """List the published steps, oldest first, unverified."""
        return list_steps(self.path)

    def at(self, step: int) -> Checkpoint:
        """Open one step, verified; raises CorruptError naming the first wrong file."""
        return open_checkpoint(self.path / step_directory_name(step))

    def verified_checkpoints(self) -> Iterator[Checkpoint]:
        """Open the steps that verify, newest first, changing nothing."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CorruptError):
                yield self.at(step)

    def newest(self, expected: CheckpointTensors | None = None) -> Checkpoint | None:
        """Open the newest step that verifies and fits; None only where no step was ever published.

        While the lock is held, a step that does not verify is set aside as `bad-step-…`. A whole step that does not fit
        `expected` is no damage: the configuration changed, and that is an error of its own.
        """
        bad = 0
        for step in reversed(self.steps()):
            try:
                checkpoint = self.at(step)
            except CorruptError as error:
                bad += 1
                logger.warning(
                    "%s does not verify and is passed over: %s", step_directory_name(step), error
                )
                if self._lock.held:
                    quarantine_checkpoint(self.path / step_directory_name(step), error)
                continue
            self._check_same_run(checkpoint, expected)
            self._parent = checkpoint
            return checkpoint
        if self._has_saved_before():
            raise CorruptError(
                f"a run that was begun in {self.path} goes on from a checkpoint that verifies",
                found=f"{count_quarantined(self.path) or bad} checkpoints, none valid",
                fix="restore one from a copy (each bad-step folder says why in WHY.txt), or train in another directory",
            )
        return None

    def best(self) -> Checkpoint | None:
        """Open the step that was kept as the best, if there is one."""
        return self._best.open()

    def environment_changes_since(self, checkpoint: Checkpoint) -> list[str]:
        """Say why going on from a checkpoint will not repeat an uninterrupted run's bits, such as "threads 1 -> 2"."""
        return environment_changes(checkpoint.environment, dict(self._environment()))

    # Keeping and pruning

    def keep_best(self, step: int) -> None:
        """Keep a step as the best, past any pruning, in place of an earlier best."""
        with os_errors_converted(self.path):
            self._best.replace(self.at(step))

    def ensure_best_kept(self, step: int) -> None:
        """Keep the best that a resumed run knows of, where a crash came between publishing and keeping it."""
        if step in self.steps() and self._best.steps() != [step]:
            with contextlib.suppress(CorruptError):  # the earlier best stays
                self.keep_best(step)

    def prune(self, keep_checkpoints: int | None = None) -> list[int]:
        """Remove the oldest steps but the `keep` newest; returns which.

        Never the newest, never the best (unless keep/ holds it), never the last that is not suspect, never one that this run did not write.
        """
        pruned = []
        with os_errors_converted(self.path):
            newest = self.steps()[-max(1, keep_checkpoints or self.keep_checkpoints) :]
            for checkpoint in list_prunable(self.path, self.run_id):
                if checkpoint.step in newest:
                    continue
                remove_checkpoint(checkpoint, self.path)
                pruned.append(checkpoint.step)
        return pruned

    # Log and status

    def log(self, record: Mapping[str, Any]) -> None:
        """Add an update's line to log.jsonl; it must carry its number as `update`."""
        self._log.append(record)

    def records(self) -> Iterator[dict[str, Any]]:
        """Read log.jsonl back."""
        return self._log.records()

    def truncate_log(self, step: int) -> int:
        """Take back the lines past a step, so that replayed updates are not counted twice; returns how many."""
        return self._log.truncate(step)

    def status(self, *, now: bool = True, **fields: Any) -> None:
        """Replace status.json (state, update, exit_code, reason, …); with `now=False`, at most once a minute.

        Some launchers lose the exit code; this file has it. A full disk does not end a run here.
        """
        self._lock.check()
        self._status.replace(fields, now=now)

    def _has_saved_before(self) -> bool:
        """Say whether a step was ever published here: then update 0 is not where the run goes on."""
        return (
            bool(self.steps())
            or count_quarantined(self.path) > 0
            or any(record.get("event") == "checkpoint" for record in self._log.records())
        )

    def _check_same_run(self, checkpoint: Checkpoint, expected: CheckpointTensors | None) -> None:
        before = checkpoint.manifest.get("data_sha256")
        if before and self.data_digest and before != self.data_digest:
            raise CorruptError(
                "the corpus must be the one that the run began with",
                found=f"data {self.data_digest[:12]}… where {checkpoint.path.name} was trained on {before[:12]}…",
                fix="restore the corpus, or train in another directory",
            )
        if expected is not None:
            checkpoint.require_fit(expected)
        for change in self.environment_changes_since(checkpoint):
            logger.warning("resume is not bit-exact: %s", change)


def _count_bytes(tensors: CheckpointTensors) -> int:
    return sum(count_tensor_bytes(values) for values in tensors.values() if values is not None)


def _parent_reference(parent: Checkpoint | None) -> dict[str, Any] | None:
    return (
        None
        if parent is None
        else {"step": parent.step, "manifest_sha256": manifests.manifest_digest(parent.manifest)}
    )
