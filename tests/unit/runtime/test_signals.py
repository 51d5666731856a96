"""Requests to stop: counted, named, and never lost."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from dragoman.errors import StoppedError
from dragoman.runtime import signals


@pytest.fixture(autouse=True)
def handlers():
    signals.uninstall_handlers()
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    signals.uninstall_handlers()
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_first_signal_requests_a_stop(name):
    signals.install_handlers()
    assert not signals.stop_requested()
    send(getattr(signal, name))
    assert signals.stop_requested()
    assert not signals.is_stop_urgent()
    assert signals.stop_reason() == name


def test_second_signal_is_urgent_and_restores_the_default():
    signals.install_handlers()
    send(signal.SIGTERM, signal.SIGINT)
    assert signals.is_stop_urgent()
    assert signals.stop_reason() == "SIGTERM, SIGINT"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_third_signal_kills():
    code = (
        "import os, signal\nfrom dragoman.runtime import signals\nsignals.install_handlers()\n"
        "for _ in range(3): os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM


def test_usr1_requests_only_a_checkpoint():
    signals.install_handlers()
    send(signal.SIGUSR1)
    assert signals.checkpoint_requested()
    assert not signals.stop_requested()
    signals.clear_checkpoint_request()
    assert not signals.checkpoint_requested()


def test_installing_twice_changes_nothing():
    signals.install_handlers()
    handler = signal.getsignal(signal.SIGTERM)
    signals.install_handlers()
    assert signal.getsignal(signal.SIGTERM) is handler
    signals.uninstall_handlers()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_install_rejects_another_thread():
    found = []

    def other() -> None:
        try:
            signals.install_handlers()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=other, name="worker-7")
    thread.start()
    thread.join()
    assert "worker-7" in found[0]


def test_an_ignored_hangup_stays_ignored():
    """`nohup dragoman train` keeps running when the terminal closes."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.install_handlers()
    send(signal.SIGHUP)
    assert not signals.stop_requested()


def test_a_replaced_handler_is_taken_back():
    signals.install_handlers()
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    assert signals.restore_handlers() == ["SIGTERM"]
    assert signals.restore_handlers() == []
    send(signal.SIGTERM)
    assert signals.stop_requested()


def test_restore_leaves_the_default_after_a_second_request():
    signals.install_handlers()
    send(signal.SIGTERM, signal.SIGTERM)
    assert signals.restore_handlers() == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_without_a_signal():
    signals.request_stop("time limit")
    assert signals.stop_requested()
    assert signals.stop_reason() == "time limit"


def test_wait_wakes_at_a_signal():
    signals.install_handlers()
    timer = threading.Timer(0.05, send, [signal.SIGTERM])
    timer.start()
    began = time.monotonic()
    assert signals.wait_for_stop(60.0)
    assert time.monotonic() - began < 50  # it did not sleep to the end
    timer.join()


def test_wait_wakes_at_a_request_from_a_thread():
    signals.install_handlers()
    timer = threading.Timer(0.05, signals.request_stop, ["time limit"])
    timer.start()
    assert signals.wait_for_stop(60.0)
    timer.join()


def test_wait_without_handlers_sleeps():
    assert signals.wait_for_stop(0.01) is False


def test_raise_if_requested_names_the_reason():
    signals.raise_if_stop_requested()
    signals.request_stop("SIGTERM")
    with pytest.raises(
        StoppedError,
        match="stopped by SIGTERM while preparing, before training; run the same command again",
    ) as caught:
        signals.raise_if_stop_requested()
    assert caught.value.exit_code == 75


def test_importing_it_imports_nothing_heavy():
    """The handlers must be installed within the first milliseconds, before torch is imported."""
    code = (
        "import sys, dragoman.__main__\nprint([m for m in ('torch', 'numpy', 'typer', 'yaml', "
        "'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "installed"),
    [
        (["train", "--out", "m"], True),
        (["--debug", "demo"], True),
        (["translate", "train"], False),
        ([], False),
    ],
)
def test_only_commands_worth_saving_get_handlers(monkeypatch, words, installed):
    from dragoman import __main__
    from dragoman.cli import app

    monkeypatch.setattr(sys, "argv", ["dragoman", *words])
    monkeypatch.setattr(app, "main", lambda: 7)
    monkeypatch.setattr(__main__, "exit_without_teardown", sys.exit)
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 7
    handler = signal.getsignal(signal.SIGTERM)
    assert handler is (signals._on_stop if installed else signals._on_termination)


def test_termination_unwinds_the_stack_once_and_ends_by_the_signal():
    code = """
import os, signal, time
from dragoman.runtime import signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
signals.interrupt_on_termination()
signal.raise_signal(signal.SIGHUP)
try:
    signal.raise_signal(signal.SIGTERM)
    time.sleep(60)
except KeyboardInterrupt:
    print("unwound", flush=True)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
signals.end_by_signal()
print("still there")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "unwound\n")


def test_an_interrupt_while_the_command_is_imported_shows_no_traceback():
    code = """
import signal, sys, dragoman.__main__
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "dragoman.cli.app":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
dragoman.__main__.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "recipes"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_earlier_handlers_and_wake_ups_are_restored():
    def handler(number: int, frame: object) -> None:
        return None

    signal.signal(signal.SIGTERM, handler)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        signals.install_handlers()
        assert signal.getsignal(signal.SIGTERM) is not handler
        signals.uninstall_handlers()
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.set_wakeup_fd(before) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def test_after_a_stop_request_nothing_waits(monkeypatch):
    signals.install_handlers()
    signals.request_stop("time limit")
    assert signals.wait_for_stop(60.0)
    monkeypatch.setattr(signals.select, "select", lambda *_: pytest.fail("it waits"))
    assert signals.wait_for_stop(60.0)
    assert signals.wait_for_stop(60.0)


def test_a_checkpoint_request_ends_one_wait_only():
    signals.install_handlers()
    send(signal.SIGUSR1)
    assert signals.wait_for_stop(60.0) is False
    assert signals._state.pipe is not None
    assert select.select([signals._state.pipe[0]], [], [], 0) == ([], [], [])


@pytest.mark.parametrize("requests", [0, 2])
def test_a_replaced_checkpoint_handler_is_taken_back(requests):
    signals.install_handlers()
    send(*[signal.SIGTERM] * requests)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signals.restore_handlers() == ["SIGUSR1"]
    send(signal.SIGUSR1)
    assert signals.checkpoint_requested()
    assert signals.is_stop_urgent() == (requests == 2)


def test_an_ignored_hangup_stays_ignored_after_two_requests():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.install_handlers()
    send(signal.SIGTERM, signal.SIGTERM)
    assert signals.is_stop_urgent()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_requests_are_forgotten_with_the_handlers():
    signals.install_handlers()
    send(signal.SIGTERM, signal.SIGUSR1)
    signals.uninstall_handlers()
    assert not signals.stop_requested()
    assert not signals.checkpoint_requested()
    assert signals.stop_reason() == ""
