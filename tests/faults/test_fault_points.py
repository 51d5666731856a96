"""A fault at any named point leaves a verified checkpoint, and the next start recovers."""

from __future__ import annotations

import shutil

import pytest
from fault_processes import (
    fingerprint,
    leftovers,
    logged,
    loop,
    losses,
    newest_step,
    reported,
    show,
)

from dragoman.storage.fault_injection import FAULT_POINTS

STORAGE = [point for point in FAULT_POINTS if point.startswith(("publish.", "keep.", "prune."))]
MOMENTS = [point for point in FAULT_POINTS if point not in STORAGE]
ERRORS = ("eio", "enospc", "short")


def run_into_fault(fork_server, reference, run_path, fault):
    """Run into a fault, inspect, and resume; return the exit code of the failed run."""
    want, log = reference()
    shutil.rmtree(run_path, ignore_errors=True)
    code = loop(fork_server, run_path, fault=fault, tolerate_disk_errors=False).wait()
    assert newest_step(run_path) >= reported(run_path), f"{fault}: reported {reported(run_path)}"
    assert loop(fork_server, run_path).wait() == 0, fault
    assert leftovers(run_path) == [], fault
    assert not list(run_path.glob("bad-*")), fault
    assert fingerprint(run_path) == want, fault
    assert logged(run_path) == log, fault
    assert all(len(seen) == 1 for seen in losses(run_path).values()), fault
    return code


@pytest.mark.parametrize("point", STORAGE + MOMENTS)
def test_kill_at_every_point(fork_server, reference, run_path, point):
    passage = 2 if point not in ("publish.fsync",) else 7
    assert run_into_fault(fork_server, reference, run_path, f"{point}:{passage}:kill") == -9


@pytest.mark.parametrize("point", STORAGE)
def test_disk_errors_at_every_point(fork_server, reference, run_path, point):
    """An error while saving is an error, not a warning (Lightning-AI/pytorch-lightning#21800)."""
    for number, action in enumerate(ERRORS, start=1):
        code = run_into_fault(fork_server, reference, run_path, f"{point}:{number}:{action}")
        # A full disk may be answered by giving up an old step, and then nothing is lost at all.
        assert code == 74 or (action == "enospc" and code == 0)


@pytest.mark.slow
def test_fault_at_every_occurrence_of_every_point(fork_server, reference, run_path):
    states = 0
    for point in STORAGE + MOMENTS:
        for action in ("kill", *(ERRORS if point in STORAGE else ())):
            for passage in range(1, 13):
                code = run_into_fault(
                    fork_server, reference, run_path, f"{point}:{passage}:{action}"
                )
                states += 1
                if code == 0 and action != "enospc":
                    break  # the run has no such passage
    show("fault-points", {"states": states, "verified_fraction": 1.0})
