"""The run's log: one JSON line an update, appended, and cut back to the last published update at resume."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dragoman.errors import encode_json
from dragoman.storage.atomic import open_run_file
from dragoman.storage.disk import DISK_FULL_ERRNOS, os_errors_converted

_MAX_BUFFERED_BYTES = (
    1 << 20
)  # bytes held back while the disk is full; the run ends long before, by the checkpoint's rule


class TrainingLog:
    """`log.jsonl` of a run directory; lines that a resume takes back go to `log.discarded.jsonl`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "log.jsonl"
        self.discarded = directory / "log.discarded.jsonl"
        self._descriptor = -1
        self._pending = b""

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a line; while the disk is full it is held back, for a line is not worth losing a run."""
        line = json.dumps(spell_nonfinite(record), ensure_ascii=False, allow_nan=False)
        self._pending += encode_json(line) + b"\n"
        with os_errors_converted(self.path):
            try:
                self._flush()
            except OSError as error:
                if (
                    error.errno not in {*DISK_FULL_ERRNOS, errno.EFBIG}
                    or len(self._pending) > _MAX_BUFFERED_BYTES
                ):
                    raise

    def sync(self) -> None:
        """Make every line durable: a checkpoint must not outlive the log of the updates that led to it."""
        with os_errors_converted(self.path):
            self._flush()
            os.fsync(self._descriptor)

    def records(self) -> Iterator[dict[str, Any]]:
        """Read the whole lines back, in order; a line cut off by a crash is left out."""
        for _, record in self._lines():
            yield record

    def truncate(self, step: int) -> int:
        """Take back every line from the first that is past an update; returns how many lines went to the discarded ones."""
        self.close()
        if not os.path.lexists(self.path):
            return 0
        cut = 0
        for end, record in self._lines():
            number = record.get("step", 0)
            if (
                type(number) is not int or number > step
            ):  # what is not ours goes to the discarded lines too
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
            # Only after the copy is safe: a crash in between leaves a line twice, never nowhere.
            file.truncate(cut)
            os.fsync(file.fileno())
        return rest.count(b"\n") + (not rest.endswith(b"\n"))

    def close(self) -> None:
        """Close the file; the next line opens it again."""
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
        """Give each whole line with the offset of its end; stops at the first that is not whole."""
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
    """Spell NaN and infinity as text: JSON has no numbers for them, and a skipped update's loss is worth reading."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
