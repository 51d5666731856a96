"""A signal at any moment ends the run with exit code 75 and a checkpoint to resume from."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from fault_processes import (
    HERE,
    ROOT,
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

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


@pytest.mark.parametrize(
    ("steps", "signals"),
    [pytest.param(120, 6, id="quick"), pytest.param(400, 20, id="full", marks=pytest.mark.slow)],
)
def test_signals_at_random_moments(fork_server, reference, run_path, fault_seed, steps, signals):
    want, log = reference(steps, 25)
    choose = random.Random(fault_seed)
    for number, target in enumerate(sorted(choose.sample(range(1, steps - 25), signals))):
        target = max(
            target, last_step(run_path) + 1
        )  # a step of this start: before, its handlers may not be installed yet
        child = loop(fork_server, run_path, steps=steps, every=25)
        wait_for_step(run_path, target, child)
        time.sleep(choose.uniform(0, 0.01))
        child.send(SIGNALS[number % 3])
        assert child.wait() == 75
        assert newest_step(run_path) == last_step(
            run_path
        )  # what was done is saved: nothing is replayed
        assert leftovers(run_path) == []
    assert loop(fork_server, run_path, steps=steps, every=25).wait() == 0
    assert fingerprint(run_path) == want
    assert logged(run_path) == log
    assert all(len(seen) == 1 for seen in losses(run_path).values())
    show("signals", {"signals": signals, "exit_75": signals})


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
def test_signal_during_a_checkpoint(fork_server, reference, run_path, point):
    want, log = reference()
    assert loop(fork_server, run_path, fault=f"{point}:stop").wait() == 75
    assert newest_step(run_path) == last_step(run_path)
    assert loop(fork_server, run_path).wait() == 0
    assert fingerprint(run_path) == want
    assert logged(run_path) == log


def test_second_signal_saves_no_checkpoint(fork_server, reference, run_path):
    want, _ = reference()
    code = loop(
        fork_server, run_path, fault="publish.mkdir:2:stop,publish.write.weights.safetensors:2:stop"
    ).wait()
    assert code == 75
    assert newest_step(run_path) == 4
    assert leftovers(run_path) == []
    assert loop(fork_server, run_path).wait() == 0
    assert fingerprint(run_path) == want


def test_a_third_signal_kills_and_loses_nothing(fork_server, reference, run_path):
    want, _ = reference()
    faults = (
        "publish.mkdir:2:stop",
        "publish.write.weights.safetensors:2:stop",
        "publish.fsync:6:stop",
    )
    assert loop(fork_server, run_path, fault=",".join(faults)).wait() == -signal.SIGTERM
    assert newest_step(run_path) == 4
    assert loop(fork_server, run_path).wait() == 0
    assert fingerprint(run_path) == want
    assert leftovers(run_path) == []


def test_usr1_saves_a_checkpoint_and_training_continues(fork_server, reference, run_path):
    want, _ = reference(60, 50)
    child = loop(fork_server, run_path, steps=60, every=50, pause=0.01)
    wait_for_step(run_path, 3, child)
    child.send(signal.SIGUSR1)
    assert child.wait() == 0
    published = [
        record["step"]
        for record in map(json.loads, (run_path / "log.jsonl").read_text().splitlines())
        if "event" in record
    ]
    assert len(published) == 3
    assert 3 <= published[0] < 50
    assert fingerprint(run_path) == want


def start(directory) -> subprocess.Popen:
    """Start a process that installs handlers before it imports torch, as `dragoman train` does."""
    program = f"""
from dragoman.runtime import signals
signals.install_handlers()
import sys
sys.path.insert(0, {str(HERE)!r})
import fault_loop
sys.exit(fault_loop.run({str(directory)!r}, steps=100000, every=1000))
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
def test_signals_during_the_imports(run_path):
    """Torch takes seconds to import; a signal that comes then is kept, not fatal."""
    assert signalled_early(run_path, signal.SIGTERM, 0.0) == 75
    assert newest_step(run_path) >= 1


@pytest.mark.slow
def test_twenty_signals_in_the_first_seconds(run_path, fault_seed):
    choose = random.Random(fault_seed)
    slowest = 0.0
    for number in range(20):
        delay = 0.3 * number / 10 if number < 10 else choose.uniform(0.3, 4.0)
        began = time.monotonic()
        assert signalled_early(run_path, SIGNALS[number % 3], delay) == 75
        slowest = max(slowest, time.monotonic() - began - delay)
        assert newest_step(run_path) >= 1
    show("signals", {"early_signals": 20, "exit_75": 20, "slowest_seconds": round(slowest, 1)})


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
    error_text = process.communicate(timeout=60)[1]
    assert process.returncode == 2, (
        error_text
    )  # the argument error was reported: the signal only requested a stop
    assert b"Traceback" not in error_text
