"""The run directory: checkpoints that are whole or absent, a lock, a log, and a status that survives the process.

    training/
      run.json          once: format, run id, when it began (for people)
      lock              held by the process that trains here
      log.jsonl         a line an update
      status.json       state, update, exit code, reason
      step-00001000/    weights, optimiser, ema, state.json, manifest.json
      keep/             the best step, by hard links
      bad-step-…/       did not verify; WHY.txt says what; never deleted by us

There is no pointer to the newest: it is the highest step whose manifest verifies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dragoman._version import __version__
from dragoman.errors import CorruptError, DiskError
from dragoman.files import faults
from dragoman.files import manifest as manifests
from dragoman.files.atomic import remove_flat, replace_file, sync_directory
from dragoman.files.disk import FullError, explaining, require_room, require_writable
from dragoman.files.lock import Lock
from dragoman.training.environment import describe_environment, differences
from dragoman.training.keeping import Kept
from dragoman.training.log import UpdateLog
from dragoman.training.stored import PARTS, Checkpoint, Tensors, open_checkpoint, step_name, write_step
from dragoman.training.tensors import require_finite, tensor_bytes

__all__ = ["Checkpoint", "RunDirectory", "Tensors"]

log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8,})")
_OURS = re.compile(r"\.(tmp|del)-.+-\d+-[0-9a-f]{8}")
_RETRIES = 2  # intervals to go on after a disk error other than a full disk
_MARGIN = 1.2  # room asked for, over the tensors' own bytes: headers, state, other programs
_STATUS_SECONDS = 60.0


class RunDirectory:
    """What a run writes, and how it is found again; only one process, rank 0, may write in it."""

    def __init__(
        self,
        path: Path,
        *,
        keep: int = 3,
        grace: int = 3,
        data_digest: str = "",
        config_digest: str = "",
        environment: Callable[[], Mapping[str, Any]] = describe_environment,
    ) -> None:
        self.path = Path(path)
        self.run_id = ""
        self.keep, self.grace = keep, grace
        self.data_digest, self.config_digest = data_digest, config_digest
        self._environment = environment
        self._lock = Lock(self.path)
        self._log = UpdateLog(self.path)
        self._kept = Kept(self.path)
        self._parent: Checkpoint | None = None
        self._failures = 0
        self._status: dict[str, Any] = {}
        self._status_due = 0.0

    # Owning the directory

    def lock(self) -> RunDirectory:
        """Take the directory for this process, clear its own leftovers, and begin the run's record where there is none."""
        require_writable(self.path)
        self._lock.acquire()
        with explaining(self.path):
            self._sweep()
            self.run_id = self._read_or_begin()
        return self

    def close(self) -> None:
        """Give the directory back."""
        self._log.close()
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        """Lock for the length of a block."""
        return self.lock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give the directory back, whatever happened."""
        self.close()

    # Publishing

    def require_space(self, tensors: Tensors) -> None:
        """Refuse at the start a run whose checkpoints will not fit: one more than are kept exist for a moment."""
        size = int(_MARGIN * _size(tensors))
        there = len(self.steps())
        with explaining(self.path):
            require_room(self.path, size * max(1, self.keep + 1 - there), f"room for {self.keep + 1} checkpoints of {size} bytes")

    def publish(
        self,
        step: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        patient: bool = False,
        suspect: bool = False,
    ) -> Checkpoint | None:
        """Make a step visible, whole and durable, or raise.

        With `patient`, a failing disk is waited for: None is returned and training may go on, for `grace` intervals when
        the disk is full and two for other errors. A stop and the run's end must not be patient. `suspect` marks a step
        after a spike of the loss; the last one that is not suspect is never pruned.
        """
        for part in PARTS:
            require_finite(tensors.get(part) or {}, part)
        fields = {
            "run_id": self.run_id,
            "created_by": f"dragoman {__version__}",
            "config_sha256": self.config_digest,
            "data_sha256": self.data_digest,
            "env": dict(self._environment()),
            "metrics": dict(metrics or {}),
            "suspect": suspect,
            "parent": _name_parent(self._parent),
        }
        try:
            with explaining(self.path):
                self._log.sync()
                checkpoint = self._write_making_room(step, tensors, state, fields)
                faults.point("publish.log")
                self._log.append({"event": "publish", "update": step})
        except DiskError as error:
            self._failures += 1
            left = (self.grace if isinstance(error, FullError) else _RETRIES) - self._failures
            if not patient or left < 0:
                raise
            log.warning("step %d was not saved: %s (training goes on; %d more failures end it)", step, error, left + 1)
            return None
        self._failures = 0
        self._parent = checkpoint
        self.status(update=step, published=step)
        return checkpoint

    def _write_making_room(self, step: int, tensors: Tensors, state: Mapping[str, Any], fields: Mapping[str, Any]) -> Checkpoint:
        """Write a step; while the disk is full, give up old steps one at a time."""
        while True:
            try:
                require_room(self.path, int(_MARGIN * _size(tensors)), f"step {step}")
                with explaining(self.path):
                    return write_step(self.path, step, tensors, state, fields)
            except CorruptError as error:
                self._quarantine(self.path / step_name(step), error)
            except FullError:
                if not self._prune_oldest():
                    raise

    # Finding

    def steps(self) -> list[int]:
        """List the published steps, oldest first, unverified."""
        if not self.path.is_dir():
            return []
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, os.listdir(self.path)) if match)

    def at(self, step: int) -> Checkpoint:
        """Open one step, verified; raises CorruptError naming the first wrong file."""
        return open_checkpoint(self.path / step_name(step))

    def verified(self) -> Iterator[Checkpoint]:
        """Open the steps that verify, newest first, changing nothing."""
        for step in reversed(self.steps()):
            with contextlib.suppress(CorruptError):
                yield self.at(step)

    def newest(self, expected: Tensors | None = None) -> Checkpoint | None:
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
                log.warning("%s does not verify and is passed over: %s", step_name(step), error)
                if self._lock.held:
                    self._quarantine(self.path / step_name(step), error)
                continue
            self._check_same_run(checkpoint, expected)
            self._parent = checkpoint
            return checkpoint
        if self._has_history():
            raise CorruptError(
                f"a run that was begun in {self.path} goes on from a checkpoint that verifies",
                found=f"{self._count_bad() or bad} checkpoints, none valid",
                fix="restore one from a copy (each bad-step folder says why in WHY.txt), or train in another directory",
            )
        return None

    def best(self) -> Checkpoint | None:
        """Open the step that was kept as the best, if there is one."""
        return self._kept.open()

    def not_exact(self, checkpoint: Checkpoint) -> list[str]:
        """Say why going on from a checkpoint will not repeat an uninterrupted run's bits, such as "threads 1 -> 2"."""
        return differences(checkpoint.environment, dict(self._environment()))

    # Keeping and pruning

    def keep_best(self, step: int) -> None:
        """Keep a step as the best, past any pruning, in place of an earlier best."""
        with explaining(self.path):
            self._kept.replace(self.at(step))

    def prune(self, keep: int | None = None) -> list[int]:
        """Remove the oldest steps but the `keep` newest; returns which.

        Never the newest, never the best (unless keep/ holds it), never the last that is not suspect, never one that this run did not write.
        """
        pruned = []
        with explaining(self.path):
            for checkpoint in self._candidates()[: max(0, len(self.steps()) - max(1, keep or self.keep))]:
                self._remove(checkpoint)
                pruned.append(checkpoint.step)
        return pruned

    def _candidates(self) -> list[Checkpoint]:
        """List the steps that may be removed, oldest first."""
        known = []
        for step in self.steps():
            with contextlib.suppress(CorruptError):
                known.append(open_checkpoint(self.path / step_name(step), sizes_only=True))
        protected = {checkpoint.step for checkpoint in known[-1:]}
        protected |= {checkpoint.step for checkpoint in [c for c in known if not c.manifest.get("suspect")][-1:]}
        return [c for c in known if c.step not in protected and c.manifest.get("run_id") == self.run_id]

    def _prune_oldest(self) -> bool:
        """Remove one old step to make room, verified in full first; says whether there was one."""
        for candidate in self._candidates():
            with contextlib.suppress(CorruptError):
                self._remove(self.at(candidate.step))
                log.warning("the disk is full: %s was removed to make room for a newer one", candidate.path.name)
                return True
        return False

    def _remove(self, checkpoint: Checkpoint) -> None:
        hidden = self.path / f".del-{checkpoint.step:08d}-{os.getpid()}-{secrets.token_hex(4)}"
        faults.point("prune.rename")
        os.rename(checkpoint.path, hidden)
        sync_directory(self.path)
        manifests.remove_listed(hidden, checkpoint.manifest)

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
        self._status |= fields
        if not now and time.monotonic() < self._status_due:
            return
        self._status_due = time.monotonic() + _STATUS_SECONDS
        people = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        try:
            replace_file(self.path / "status.json", manifests.canonical_json(self._status | people))
        except OSError as error:
            log.warning("status.json was not replaced: %s", error)

    # Inside

    def _read_or_begin(self) -> str:
        path = self.path / "run.json"
        if path.exists():
            return str(manifests.read_json(path).get("run_id", ""))
        run_id = secrets.token_hex(8)
        began = {"format": 1, "run_id": run_id, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "created_by": f"dragoman {__version__}"}
        replace_file(path, manifests.canonical_json(began | {"config_sha256": self.config_digest}))
        return run_id

    def _sweep(self) -> None:
        """Remove what a killed process of ours left half-made or half-removed."""
        for name in sorted(os.listdir(self.path)):
            if _OURS.fullmatch(name):
                place = self.path / name
                if place.is_dir() and not place.is_symlink():
                    if not remove_flat(place):
                        log.warning("%s was left by an earlier run and holds what is not ours; look and delete it by hand", place)
                else:
                    place.unlink()

    def _quarantine(self, place: Path, error: CorruptError) -> None:
        bad = self.path / f"bad-{place.name}-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"
        with explaining(self.path):
            os.rename(place, bad)
            if bad.is_dir():
                (bad / "WHY.txt").write_text(f"{error}\n", encoding="utf-8")
            sync_directory(self.path)

    def _count_bad(self) -> int:
        return len([name for name in os.listdir(self.path) if name.startswith("bad-step-")]) if self.path.is_dir() else 0

    def _has_history(self) -> bool:
        """Say whether a step was ever published here: then update 0 is not where the run goes on."""
        return bool(self.steps()) or self._count_bad() > 0 or any(record.get("event") == "publish" for record in self._log.records())

    def _check_same_run(self, checkpoint: Checkpoint, expected: Tensors | None) -> None:
        before = checkpoint.manifest.get("data_sha256")
        if before and self.data_digest and before != self.data_digest:
            raise CorruptError(
                "the corpus must be the one that the run began with",
                found=f"data {self.data_digest[:12]}… where {checkpoint.path.name} was trained on {before[:12]}…",
                fix="restore the corpus, or train in another directory",
            )
        if expected is not None:
            checkpoint.require_fit(expected)
        for change in self.not_exact(checkpoint):
            log.warning("resume is not bit-exact: %s", change)


def _size(tensors: Tensors) -> int:
    return sum(tensor_bytes(values) for values in tensors.values() if values is not None)


def _name_parent(parent: Checkpoint | None) -> dict[str, Any] | None:
    return None if parent is None else {"step": parent.step, "manifest_sha256": manifests.manifest_digest(parent.manifest)}
