"""The training log (log.jsonl): one JSON line per step, truncated to the checkpoint at a resume."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman.errors import encode_json
from dragoman.storage.atomic_and_safe_file_io import open_run_file
from dragoman.storage.disk_space_and_errors import DISK_FULL_ERRNOS, os_errors_converted

# Kept in memory while the disk is full; failing checkpoints end the run long before that.
_MAX_BUFFERED_BYTES = 1 << 20


class TrainingLog:
    """`log.jsonl` of a run directory; lines that a resume removes go to `log.discarded.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log.jsonl"
        self.discarded = directory / "log.discarded.jsonl"
        self._descriptor = -1
        self._pending = b""

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a line.

        While the disk is full it is kept in memory, so that the run can continue.
        """
        line = json.dumps(spell_nonfinite(record), ensure_ascii=False, allow_nan=False)
        self._pending += (line.encode() if line.isascii() else encode_json(line)) + b"\n"
        try:
            self._flush()
        except OSError as error:
            disk_full = error.errno in {*DISK_FULL_ERRNOS, errno.EFBIG}
            if not disk_full or len(self._pending) > _MAX_BUFFERED_BYTES:
                with os_errors_converted(self.path):
                    raise

    def sync(self) -> None:
        """Flush all lines to disk (fsync): the log must reach at least as far as a checkpoint."""
        with os_errors_converted(self.path):
            self._flush()
            os.fsync(self._descriptor)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records in order; a line that a crash cut off is ignored."""
        for _, record in self._lines():
            yield record

    def truncate(self, step: int) -> int:
        """Move all lines after a step to `log.discarded.jsonl`; return how many."""
        self.close()
        if not os.path.lexists(self.path):
            return 0
        cut = 0
        for end, record in self._lines():
            number = record.get("step", 0)
            if type(number) is not int or number > step:  # lines that we did not write go too
                break
            cut = end
        with (
            os_errors_converted(self.path),
            open(open_run_file(self.path, os.O_RDWR), "rb+") as file,
        ):
            file.seek(cut)
            rest = file.read()
            if not rest:
                return 0
            with open(
                open_run_file(self.discarded, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab"
            ) as discarded:
                discarded.write(rest if rest.endswith(b"\n") else rest + b"\n")
                discarded.flush()
                os.fsync(discarded.fileno())
            # Only after the copy is on disk: a crash in between leaves lines twice, but loses none.
            file.truncate(cut)
            os.fsync(file.fileno())
        return rest.count(b"\n") + (not rest.endswith(b"\n"))

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._pending = b""

    def _flush(self) -> None:
        if self._descriptor < 0:
            self._descriptor = open_run_file(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while self._pending:
            self._pending = self._pending[os.write(self._descriptor, self._pending) :]

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the records with the offset of their line ends, up to the first incomplete line."""
        if not os.path.lexists(self.path):
            return
        end = 0
        with open(open_run_file(self.path, os.O_RDONLY), "rb") as file:
            for line in file:
                end += len(line)
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    return
                if not line.endswith(b"\n") or not isinstance(record, dict):
                    return
                yield end, record


def spell_nonfinite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with NaN and infinity as text, which JSON has no numbers for."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
