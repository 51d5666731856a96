"""R5: a signal at any moment ends the run with exit code 75 and a checkpoint to resume from."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from fault_victims import (
    HERE,
    ROOT,
    fingerprint,
    last_update,
    leftovers,
    logged,
    loop,
    losses,
    newest_step,
    show,
    wait_for_update,
)

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize(
    ("updates", "signals"),
    [pytest.param(120, 6, id="quick"), pytest.param(400, 20, id="full", marks=pytest.mark.slow)],
)
def test_signals_at_random_moments(victims, reference, place, fault_seed, updates, signals):
    want, log = reference(updates, 25)
    choose = random.Random(fault_seed)
    for number, target in enumerate(sorted(choose.sample(range(1, updates - 25), signals))):
        target = max(
            target, last_update(place) + 1
        )  # a step of this start: before, its handlers may not be installed yet
        victim = loop(victims, place, updates=updates, every=25)
        wait_for_update(place, target, victim)
        time.sleep(choose.uniform(0, 0.01))
        victim.send(SIGNALS[number % 3])
        assert victim.wait() == 75
        assert newest_step(place) == last_update(
            place
        )  # what was done is saved: nothing is replayed
        assert leftovers(place) == []
    assert loop(victims, place, updates=updates, every=25).wait() == 0
    assert fingerprint(place) == want
    assert logged(place) == log
    assert all(len(seen) == 1 for seen in losses(place).values())
    show("R5", {"signals": signals, "exit_75": signals})


@pytest.mark.parametrize(
    "point",
    [
        "publish.mkdir:2",
        "publish.write.weights.safetensors:2",
        "publish.rename:2",
        "publish.log:2",
        "keep.link:2",
        "prune.rename:1",
    ],
)
def test_signal_during_a_checkpoint(victims, reference, place, point):
    want, log = reference()
    assert loop(victims, place, fault=f"{point}:stop").wait() == 75
    assert newest_step(place) == last_update(place)
    assert loop(victims, place).wait() == 0
    assert fingerprint(place) == want
    assert logged(place) == log


def test_second_signal_saves_no_checkpoint(victims, reference, place):
    want, _ = reference()
    code = loop(
        victims, place, fault="publish.mkdir:2:stop,publish.write.weights.safetensors:2:stop"
    ).wait()
    assert code == 75
    assert newest_step(place) == 4
    assert leftovers(place) == []
    assert loop(victims, place).wait() == 0
    assert fingerprint(place) == want


def test_a_third_signal_kills_and_loses_nothing(victims, reference, place):
    want, _ = reference()
    faults = (
        "publish.mkdir:2:stop",
        "publish.write.weights.safetensors:2:stop",
        "publish.fsync:6:stop",
    )
    assert loop(victims, place, fault=",".join(faults)).wait() == -signal.SIGTERM
    assert newest_step(place) == 4
    assert loop(victims, place).wait() == 0
    assert fingerprint(place) == want
    assert leftovers(place) == []


def test_usr1_saves_a_checkpoint_and_training_continues(victims, reference, place):
    want, _ = reference(60, 50)
    victim = loop(victims, place, updates=60, every=50, pause=0.01)
    wait_for_update(place, 3, victim)
    victim.send(signal.SIGUSR1)
    assert victim.wait() == 0
    published = [
        record["step"]
        for record in map(json.loads, (place / "log.jsonl").read_text().splitlines())
        if "event" in record
    ]
    assert len(published) == 3
    assert 3 <= published[0] < 50
    assert fingerprint(place) == want


def start(directory) -> subprocess.Popen:
    """Start a process that installs handlers before it imports torch, as `dragoman train` does."""
    program = f"""
from dragoman.runtime import signals
signals.install_handlers()
import sys
sys.path.insert(0, {str(HERE)!r})
import fault_loop
sys.exit(fault_loop.run({str(directory)!r}, updates=100000, every=1000))
"""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal yet."""
    with open(f"/proc/{pid}/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


def signalled_early(directory, number: int, delay: float) -> int:
    """Send a signal as soon as the handlers are installed; SIGUSR1's is the last of them."""
    process = start(directory)
    while not catches(process.pid, signal.SIGUSR1):
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(number)
    return process.wait()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs /proc to see when the handlers stand"
)
def test_signals_during_the_imports(place):
    """Torch takes seconds to import; a signal that comes then is kept, not fatal."""
    assert signalled_early(place, signal.SIGTERM, 0.0) == 75
    assert newest_step(place) >= 1


@pytest.mark.slow
def test_twenty_signals_in_the_first_seconds(place, fault_seed):
    choose = random.Random(fault_seed)
    slowest = 0.0
    for number in range(20):
        delay = 0.3 * number / 10 if number < 10 else choose.uniform(0.3, 4.0)
        began = time.monotonic()
        assert signalled_early(place, SIGNALS[number % 3], delay) == 75
        slowest = max(slowest, time.monotonic() - began - delay)
        assert newest_step(place) >= 1
    show("R5", {"early_signals": 20, "exit_75": 20, "slowest_seconds": round(slowest, 1)})


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs /proc to see when the handlers stand"
)
@pytest.mark.parametrize("command", ["train", "settings"])
def test_interrupt_before_handlers_are_installed_shows_no_traceback(command, tmp_path):
    """Python shows a traceback for a Ctrl-C during imports.

    From our first line on the process exits or saves.
    """
    program = "import dragoman.__main__, sys, time; print('ready', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == -signal.SIGINT


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs /proc to see when the handlers stand"
)
def test_command_keeps_a_signal_once_handlers_are_installed(tmp_path):
    words = [
        sys.executable,
        "-m",
        "dragoman",
        "train",
        "--src",
        "no.src",
        "--tgt",
        "no.tgt",
        "--out",
        str(tmp_path / "model"),
    ]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE)
    while not catches(process.pid, signal.SIGUSR1):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 2, (
        told
    )  # the argument error was reported: the signal only requested a stop
    assert b"Traceback" not in told
