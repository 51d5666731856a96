"""With the real trainer: kill -9 and signals at random moments change nothing."""

from __future__ import annotations

import random
import signal
import time

import pytest
from fault_processes import (
    fingerprint,
    last_step,
    leftovers,
    logged,
    losses,
    newest_step,
    show,
    trainer,
    wait_for_step,
)
from training_kit import assert_same_run

SETTINGS = {"checkpoint_every": 5, "validate_every": 7}


def whole_run(fork_server, directory, steps):
    assert trainer(fork_server, directory, steps=steps, **SETTINGS).wait() == 0
    return fingerprint(directory), logged(directory)


@pytest.mark.parametrize(
    ("steps", "kills"),
    [pytest.param(30, 3, id="quick"), pytest.param(300, 30, id="full", marks=pytest.mark.slow)],
)
def test_killed_and_resumed_runs_end_in_the_same_weights(
    fork_server, run_path, fault_seed, steps, kills
):
    """Kill -9 and resume is bit-exact (joeynmt#125, OpenNMT-py#2006, transformers#11323)."""
    want, log = whole_run(fork_server, run_path.with_name("whole"), steps)
    choose = random.Random(fault_seed)
    began, most = time.monotonic(), 0
    for target in sorted(choose.sample(range(1, steps - 5), kills)):
        child = trainer(fork_server, run_path, steps=steps, **SETTINGS)
        wait_for_step(run_path, target)
        time.sleep(choose.uniform(0, 0.03))
        child.send()
        assert child.wait() == -9
        most = max(most, last_step(run_path) - newest_step(run_path))
    assert trainer(fork_server, run_path, steps=steps, **SETTINGS).wait() == 0
    assert fingerprint(run_path) == want
    assert logged(run_path) == log
    assert_same_run(run_path.with_name("whole"), run_path)
    seen = losses(run_path)
    assert all(len(seen[update]) == 1 for update in seen)
    assert most <= 5
    assert leftovers(run_path) == []
    show(
        "kills",
        {
            "trainer": True,
            "kills": kills,
            "steps": steps,
            "most_replayed": most,
            "seconds": round(time.monotonic() - began, 1),
        },
    )


@pytest.mark.parametrize(
    "fault", ["step.before:8", "step.after_backward:8", "data.next:8", "valid.mid:1"]
)
def test_a_kill_at_every_point_of_a_step(fork_server, run_path, fault):
    want, log = whole_run(fork_server, run_path.with_name("whole"), 12)
    assert trainer(fork_server, run_path, fault=f"{fault}:kill", steps=12, **SETTINGS).wait() == -9
    assert trainer(fork_server, run_path, steps=12, **SETTINGS).wait() == 0
    assert (fingerprint(run_path), logged(run_path)) == (want, log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_with_75_and_a_checkpoint_of_that_step(fork_server, run_path, number):
    want, log = whole_run(fork_server, run_path.with_name("whole"), 30)
    child = trainer(fork_server, run_path, steps=30, pause=0.01, **SETTINGS)
    wait_for_step(run_path, 3)
    child.send(number)
    assert child.wait() == 75
    assert newest_step(run_path) == last_step(run_path) >= 3
    assert trainer(fork_server, run_path, steps=30, **SETTINGS).wait() == 0
    assert (fingerprint(run_path), logged(run_path)) == (want, log)


def test_a_signal_inside_a_validation(fork_server, run_path):
    want, _ = whole_run(fork_server, run_path.with_name("whole"), 12)
    assert (
        trainer(fork_server, run_path, fault="valid.mid:1:stop", steps=12, **SETTINGS).wait() == 75
    )
    assert newest_step(run_path) == 7
    assert trainer(fork_server, run_path, steps=12, **SETTINGS).wait() == 0
    assert fingerprint(run_path) == want
