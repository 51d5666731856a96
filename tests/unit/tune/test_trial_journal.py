"""The journal of a study: crashes and durations of trials, from its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dragoman.tune.trial_journal import TrialJournal, TrialRecord

STOP = {"event": "stop"}
START = {"event": "start", "values": {}}
VALUE = {"event": "value", "step": 1, "value": 0.5}
END = {
    **{"event": "end", "state": "complete", "value": 0.5, "reason": ""},
    **{"trial_seconds": 9.5, "parameters": 7},
}


def read_trials(tmp_path: Path, *events: dict[str, Any]) -> list[TrialRecord]:
    """Return the trials of events of trial 0, one second apart unless they have a time."""
    numbered = [{"trial": 0, "seconds": at, **event} for at, event in enumerate(events)]
    return TrialJournal(tmp_path).trials(numbered, [])


@pytest.mark.parametrize(
    ("events", "crashes"),
    [
        ([START], 1),  # the process that wrote it has ended
        ([START, START, START], 3),
        ([START, STOP], 0),
        ([START, STOP, START, STOP], 0),
        ([START, STOP, START], 1),
        ([START, STOP, START, START], 2),
        ([START, START, STOP, START], 1),
        ([START, START, VALUE], 1),
        ([START, START, VALUE, START], 2),
        ([START, VALUE, STOP, START], 1),
    ],
)
def test_processes_that_ended_without_an_event_are_crashes(
    tmp_path: Path, events: list[dict[str, Any]], crashes: int
) -> None:
    [trial] = read_trials(tmp_path, *events)
    assert (trial.state, trial.crashes) == ("running", crashes)


def test_the_time_of_a_trial_is_that_of_its_processes(tmp_path: Path) -> None:
    events = [
        {**START, "seconds": 10.0},
        {**VALUE, "seconds": 15.0},
        {**START, "seconds": 40.0},  # killed in between
        {**VALUE, "seconds": 42.0},
        {**STOP, "seconds": 43.0},
        {**START, "seconds": 90.0},
    ]
    [trial] = read_trials(tmp_path, *events)
    assert trial.seconds == 5.0 + 2.0 + 1.0
    [ended] = read_trials(tmp_path, *events, {**END, "seconds": 91.0})
    assert (ended.seconds, ended.parameters, ended.state) == (9.5, 7, "complete")


def test_validations_are_in_the_order_of_the_journal(tmp_path: Path) -> None:
    [trial] = read_trials(
        tmp_path, START, VALUE, {**VALUE, "step": 2, "value": 0.25}, START, {**VALUE, "step": 2}
    )
    assert (trial.steps, trial.reports) == ([1, 2, 2], [0.5, 0.25, 0.5])
