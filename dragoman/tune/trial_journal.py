"""Journal of a study (journal.jsonl): one JSON line per event, durable before the search continues.

    {"event": "study", …}     first: search space, metric, base configuration, files
    {"event": "start", …}     a trial begins, or begins again after its process ended
    {"event": "value", …}     a validation of the running trial
    {"event": "stop", …}      a stop was requested; the trial is resumed later
    {"event": "end", …}       the trial is complete, pruned or failed

Each has "seconds", the time that the study has used. A line that a crash cut off is removed when
the journal is opened; anything else that we did not write is an error.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dragoman.errors import CorruptError, encode_json
from dragoman.storage.atomic_and_safe_file_io import open_run_file, sync_directory
from dragoman.storage.disk_space_and_errors import os_errors_converted
from dragoman.tune.search_space import SearchParameter, Value

JOURNAL_FILE = "journal.jsonl"
FORMAT = 1
MAX_JOURNAL_BYTES = 64 << 20  # thousands of trials; more is a mistake or an attack
RUNNING, COMPLETE, PRUNED, FAILED = "running", "complete", "pruned", "failed"
ENDED = (COMPLETE, PRUNED, FAILED)


@dataclass(slots=True)
class TrialRecord:
    """A trial: its values, and what is known about its run."""

    number: int
    values: dict[str, Value]
    state: str = RUNNING
    steps: list[int] = field(default_factory=list)  # of its validations
    reports: list[float] = field(default_factory=list)  # value of each validation
    value: float | None = None  # of the best validation, once it has ended
    seconds: float = 0.0  # of its run so far, over all processes
    parameters: int = 0  # of its model, if known
    reason: str = ""  # why it failed or was pruned
    crashes: int = 0  # processes that ended without an event since its last validation


class TrialJournal:
    """The journal of a study directory, open for appending."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / JOURNAL_FILE
        self._descriptor = -1

    def read(self, *, has_trials: bool = False) -> list[dict[str, Any]]:
        """Return the events; remove an incomplete last line. Raise CorruptError for other lines.

        With `has_trials` an empty journal is an error: a study began, and what it found is lost.
        """
        if not os.path.lexists(self.path):
            return []
        with (
            os_errors_converted(self.path),
            open(open_run_file(self.path, os.O_RDWR), "rb+") as file,
        ):
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JOURNAL_BYTES:
                raise self.corrupt(0, f"{size:,} bytes")
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if has_trials and not whole:
                raise self.corrupt(0, "no event, beside trials of a study")
            if whole < len(data):
                file.truncate(whole)
                os.fsync(file.fileno())
        return [
            self._parse(number, line) for number, line in enumerate(data[:whole].splitlines(), 1)
        ]

    def append(self, event: Mapping[str, Any]) -> None:
        """Append an event and flush it to disk."""
        line = encode_json(json.dumps(event, ensure_ascii=False, allow_nan=False)) + b"\n"
        with os_errors_converted(self.path):
            if self._descriptor < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._descriptor = open_run_file(self.path, flags)
                sync_directory(self.path.parent)
            while line:
                line = line[os.write(self._descriptor, line) :]
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            raise self.corrupt(number, f"{line[:60]!r}") from None
        if not isinstance(event, dict) or not _is_number(event.get("seconds")):
            raise self.corrupt(number, f"{line[:60]!r}")
        return event

    def corrupt(self, line: int, found: str) -> CorruptError:
        """Return the error for a journal that we did not write like this."""
        return CorruptError(
            f"{self.path} must be the journal of a study",
            found=f"{found} in line {line}" if line else found,
            fix="restore it, or choose another --out directory",
        )

    def trials(
        self, events: Sequence[Mapping[str, Any]], space: Sequence[SearchParameter]
    ) -> list[TrialRecord]:
        """Return the trials of all events but the first; raise CorruptError for a wrong one."""
        trials: list[TrialRecord] = []
        began = 0.0  # study seconds at the last event of the running trial's process
        for line, event in enumerate(events, 2):
            kind, number = event.get("event"), event.get("trial")
            current = trials[-1] if trials and trials[-1].state == RUNNING else None
            if kind == "start" and number == len(trials) and current is None:
                values = event.get("values")
                if not _fits(values, space):
                    raise self.corrupt(line, f"values {values!r:.60}")
                trials.append(TrialRecord(len(trials), dict(values or {})))
            elif current is None or type(number) is not int or number != current.number:
                raise self.corrupt(line, f"{kind!r:.20} of trial {number!r:.20}")
            elif kind == "start":
                current.crashes += 1
            elif kind not in ("stop", "value", "end"):
                raise self.corrupt(line, f"event {kind!r:.60}")
            else:
                current.seconds += max(0.0, event["seconds"] - began)
            began = event["seconds"]
            if kind == "stop" and current is not None:
                current.crashes = -1  # the start that follows is no crash
            elif kind == "value" and current is not None:
                self._read_value(line, event, current)
            elif kind == "end" and current is not None:
                self._read_end(line, event, current)
        if trials and trials[-1].state == RUNNING:
            trials[-1].crashes += 1  # the process that wrote the last line
        return trials

    def _read_value(self, line: int, event: Mapping[str, Any], trial: TrialRecord) -> None:
        step, value = event.get("step"), event.get("value")
        if type(step) is not int or not _is_number(value):
            raise self.corrupt(line, f"value {value!r:.40} at step {step!r:.20}")
        trial.steps.append(step)
        trial.reports.append(float(value or 0.0))
        trial.crashes = 0

    def _read_end(self, line: int, event: Mapping[str, Any], trial: TrialRecord) -> None:
        state, value, reason = (event.get(name) for name in ("state", "value", "reason"))
        seconds, parameters = event.get("trial_seconds"), event.get("parameters")
        has_value = _is_number(value) if state in (COMPLETE, PRUNED) else value is None
        if (
            state not in ENDED
            or not has_value
            or not isinstance(reason, str)
            or not _is_number(seconds)
            or type(parameters) is not int
        ):
            raise self.corrupt(line, f"end {state!r:.20} with value {value!r:.40}")
        trial.state, trial.value, trial.reason = str(state), value, reason
        trial.seconds, trial.parameters = float(seconds or 0.0), parameters


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _fits(values: Any, space: Sequence[SearchParameter]) -> bool:
    """Whether values are a point of the space."""
    return (
        isinstance(values, dict)
        and values.keys() == {each.name for each in space}
        and all(each.accepts(values[each.name]) for each in space)
    )
