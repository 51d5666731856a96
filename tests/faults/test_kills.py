"""Kill -9 loses only the steps since the last checkpoint, and resuming is bit-exact."""

from __future__ import annotations

import random
import time

import pytest
from fault_processes import (
    fingerprint,
    last_step,
    leftovers,
    logged,
    loop,
    losses,
    newest_step,
    show,
    wait_for_step,
)

EVERY = 5


def kill_and_resume(fork_server, directory, *, steps, kills, choose):
    """Kill at random times, as often as asked, then finish.

    Return the largest number of steps that one kill lost.
    """
    most = 0
    for target in sorted(choose.sample(range(1, steps - EVERY), kills)):
        child = loop(fork_server, directory, steps=steps, every=EVERY)
        wait_for_step(directory, target, child)
        time.sleep(choose.uniform(0, 0.02))
        child.send()
        assert child.wait() == -9
        most = max(most, last_step(directory) - newest_step(directory))
    assert loop(fork_server, directory, steps=steps, every=EVERY).wait() == 0
    return most


def check(fork_server, reference, directory, *, steps, kills, seed):
    want, log = reference(steps, EVERY)
    began = time.monotonic()
    most = kill_and_resume(
        fork_server, directory, steps=steps, kills=kills, choose=random.Random(seed)
    )
    assert fingerprint(directory) == want
    assert logged(directory) == log
    assert most <= EVERY
    seen = losses(directory)
    assert all(len(seen[step]) == 1 for step in seen)
    assert leftovers(directory) == []
    seconds = round(time.monotonic() - began, 1)
    show(
        "kills",
        {
            "kills": kills,
            "updates": steps,
            "most_replayed": most,
            "losses_equal": len(seen),
            "seconds": seconds,
        },
    )


@pytest.mark.parametrize(
    ("steps", "kills"),
    [pytest.param(120, 10, id="quick"), pytest.param(400, 30, id="full", marks=pytest.mark.slow)],
)
def test_killed_and_resumed_runs_end_in_the_same_weights(
    fork_server, reference, run_path, fault_seed, steps, kills
):
    """A resumed run is the same run (joeynmt#125, OpenNMT-py#2006, transformers#11323)."""
    check(fork_server, reference, run_path, steps=steps, kills=kills, seed=fault_seed)


@pytest.mark.slow
def test_a_hundred_kills_on_a_disk_end_in_the_same_weights(
    fork_server, reference, tmp_path, fault_seed
):
    check(fork_server, reference, tmp_path / "run", steps=800, kills=100, seed=fault_seed)
