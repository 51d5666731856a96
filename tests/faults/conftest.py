"""Fixtures of the fault tests: a fork server for subprocesses, and an undisturbed reference run."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_processes import ForkServer, fingerprint, logged, loop


def pytest_addoption(parser):
    parser.addoption("--fault-seed", type=int, default=1, help="Seed of the fault tests.")


@pytest.fixture(scope="session")
def fault_seed(request) -> int:
    return request.config.getoption("--fault-seed")


@pytest.fixture(autouse=True)
def default_signals():
    """Let processes that a test starts receive SIGHUP and SIGINT.

    They inherit ignored signals: `nohup` ignores SIGHUP, a shell SIGINT for a background job.
    """
    before = {signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL)}
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def fork_server():
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def memory():
    """A folder in memory, where fsync is quick: what a killed process leaves does not depend on the
    disk.
    """
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="dragoman-faults-", dir=shared_memory if os.access(shared_memory, os.W_OK) else None
    ) as folder:
        yield Path(folder)


@pytest.fixture
def run_path(memory, request):
    """Path of a run directory, one per test."""
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "run"


@pytest.fixture(scope="session")
def reference(fork_server, memory):
    """Run without faults, once for each length, and remember its losses and its tensors' hashes."""
    known = {}

    def run(steps: int = 12, every: int = 4):
        if (steps, every) not in known:
            directory = memory / f"reference-{steps}-{every}"
            assert loop(fork_server, directory, steps=steps, every=every).wait() == 0
            known[steps, every] = (fingerprint(directory), logged(directory))
        return known[steps, every]

    return run
