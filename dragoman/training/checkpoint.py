"""The run directory: checkpoints that are whole or absent, a lock, a log, and a status that survives the process.

    training/
      run.json          once: format, run id, when it began (for people)
      lock              held by the process that trains here
      log.jsonl         a line an update
      status.json       state, update, exit code, reason
      step-00001000/    weights, optimiser, ema (a file each, or one a rank), state.json, manifest.json
      keep/             the best step, by hard links
      bad-step-…/       did not verify; WHY.txt says what; never deleted by us

There is no pointer to the newest: it is the highest step whose manifest verifies.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dragoman._version import __version__
from dragoman.errors import CorruptError, DiskError
from dragoman.files import faults
from dragoman.files import manifest as manifests
from dragoman.files.disk import FullError, explaining, require_room, require_writable
from dragoman.files.lock import Lock
from dragoman.training.environment import describe_environment, differences
from dragoman.training.housekeeping import Status, begin, count_bad, quarantine, remove, sweep
from dragoman.training.keeping import Kept, prunable, prune_oldest
from dragoman.training.log import UpdateLog, finite
from dragoman.training.stored import PARTS, Checkpoint, Tensors, Write, list_steps, open_checkpoint, step_name, write_parts, write_step
from dragoman.training.tensors import require_finite, tensor_bytes

__all__ = ["Checkpoint", "RunDirectory", "Tensors"]

log = logging.getLogger(__name__)

_RETRIES = 2  # intervals to go on after a disk error other than a full disk
_MARGIN = 1.2  # room asked for, over the tensors' own bytes: headers, state, other programs


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
        self._status = Status(self.path)
        self._parent: Checkpoint | None = None
        self._failures = 0

    # Owning the directory

    def lock(self) -> RunDirectory:
        """Take the directory for this process, clear its own leftovers, and begin the run's record where there is none."""
        require_writable(self.path)
        self._lock.acquire()
        with explaining(self.path):
            sweep(self.path)
            self.run_id = begin(self.path, self.config_digest)
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

    def require_space(self, tensors: Tensors, *, ranks: int = 1) -> None:
        """Refuse at the start a run whose checkpoints will not fit: one more than are kept exist for a moment."""
        size = int(_MARGIN * ranks * _size(tensors))
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
        write: Write = write_parts,
        ranks: int = 1,
    ) -> Checkpoint | None:
        """Make a step visible, whole and durable, or raise; `write` has the files written, where `ranks` write some each.

        With `patient`, a failing disk is waited for: None is returned and training may go on, for `grace` intervals when
        the disk is full and two for other errors. A stop and the run's end must not be patient. `suspect` marks a step
        after a spike of the loss; the last one that is not suspect is never pruned.
        """
        self._lock.check()
        for part in PARTS:
            require_finite(tensors.get(part) or {}, part)
        fields = {
            "run_id": self.run_id,
            "created_by": f"dragoman {__version__}",
            "config_sha256": self.config_digest,
            "data_sha256": self.data_digest,
            "env": dict(self._environment()),
            "metrics": finite(metrics or {}),
            "suspect": suspect,
            "parent": _name_parent(self._parent),
        }
        try:
            with explaining(self.path):
                self._log.sync()
                checkpoint = self._write_making_room(step, tensors, state, fields, write, ranks)
        except DiskError as error:
            self._failures += 1
            left = (self.grace if isinstance(error, FullError) else _RETRIES) - self._failures
            if not patient or left < 0:
                raise
            log.warning("step %d was not saved: %s (training goes on; %d more failures end it)", step, error, left + 1)
            return None
        self._failures, self._parent = 0, checkpoint
        with explaining(self.path):
            faults.point("publish.log")
            self._log.append({"event": "publish", "update": step})
        self.status(update=step, published=step)
        return checkpoint

    def _write_making_room(
        self, step: int, tensors: Tensors, state: Mapping[str, Any], fields: Mapping[str, Any], write: Write, ranks: int
    ) -> Checkpoint:
        """Write a step; while the disk is full, give up old steps one at a time."""
        needed = int(_MARGIN * ranks * _size(tensors))
        place = self.path / step_name(step)
        if place.exists():
            try:
                open_checkpoint(place)
            except CorruptError as error:
                quarantine(place, error)
        while True:
            try:
                require_room(self.path, needed, place.name)
                with explaining(self.path):
                    return write_step(self.path, step, tensors, state, fields, write)
            except FullError:
                removed = prune_oldest(self.path, self.run_id, needed)
                if removed is None:
                    raise
                log.warning("the disk is full: %s was removed to make room for %s", removed, place.name)

    # Finding

    def steps(self) -> list[int]:
        """List the published steps, oldest first, unverified."""
        return list_steps(self.path)

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
                    quarantine(self.path / step_name(step), error)
                continue
            self._check_same_run(checkpoint, expected)
            self._parent = checkpoint
            return checkpoint
        if self._has_history():
            raise CorruptError(
                f"a run that was begun in {self.path} goes on from a checkpoint that verifies",
                found=f"{count_bad(self.path) or bad} checkpoints, none valid",
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

    def settle_best(self, step: int) -> None:
        """Keep the best that a resumed run knows of, where a crash came between publishing and keeping it."""
        if step in self.steps() and self._kept.steps() != [step]:
            with contextlib.suppress(CorruptError):  # the earlier best stays
                self.keep_best(step)

    def prune(self, keep: int | None = None) -> list[int]:
        """Remove the oldest steps but the `keep` newest; returns which.

        Never the newest, never the best (unless keep/ holds it), never the last that is not suspect, never one that this run did not write.
        """
        pruned = []
        with explaining(self.path):
            newest = self.steps()[-max(1, keep or self.keep) :]
            for checkpoint in prunable(self.path, self.run_id):
                if checkpoint.step in newest:
                    continue
                remove(checkpoint, self.path)
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

    def _has_history(self) -> bool:
        """Say whether a step was ever published here: then update 0 is not where the run goes on."""
        return bool(self.steps()) or count_bad(self.path) > 0 or any(record.get("event") == "publish" for record in self._log.records())

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
