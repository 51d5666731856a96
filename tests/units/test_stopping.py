"""Requests to stop: counted, named, and never lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dragoman import stopping
from dragoman.errors import StoppedError


@pytest.fixture(autouse=True)
def handlers():
    stopping.uninstall()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    stopping.uninstall()
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_first_signal_asks_to_stop_and_is_named(name):
    stopping.install()
    assert not stopping.requested()
    send(getattr(signal, name))
    assert stopping.requested()
    assert not stopping.urgent()
    assert stopping.reason() == name


def test_second_signal_is_urgent_and_the_third_meets_the_default():
    stopping.install()
    send(signal.SIGTERM, signal.SIGINT)
    assert stopping.urgent()
    assert stopping.reason() == "SIGTERM, SIGINT"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_third_signal_kills():
    code = "import os, signal\nfrom dragoman import stopping\nstopping.install()\nfor _ in range(3): os.kill(os.getpid(), signal.SIGTERM)\n"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM


def test_usr1_asks_for_a_checkpoint_only():
    stopping.install()
    send(signal.SIGUSR1)
    assert stopping.publish_requested()
    assert not stopping.requested()
    stopping.clear_publish()
    assert not stopping.publish_requested()


def test_installing_twice_changes_nothing():
    stopping.install()
    handler = signal.getsignal(signal.SIGTERM)
    stopping.install()
    assert signal.getsignal(signal.SIGTERM) is handler
    stopping.uninstall()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_install_refuses_another_thread():
    found = []

    def other() -> None:
        try:
            stopping.install()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=other, name="worker-7")
    thread.start()
    thread.join()
    assert "worker-7" in found[0]


def test_an_ignored_hangup_stays_ignored():
    """`nohup dragoman train` goes on when the terminal closes."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopping.install()
    send(signal.SIGHUP)
    assert not stopping.requested()


def test_a_replaced_handler_is_taken_back():
    stopping.install()
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    assert stopping.restore() == ["SIGTERM"]
    assert stopping.restore() == []
    send(signal.SIGTERM)
    assert stopping.requested()


def test_restore_leaves_the_default_after_a_second_request():
    stopping.install()
    send(signal.SIGTERM, signal.SIGTERM)
    assert stopping.restore() == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_request_without_a_signal():
    stopping.request("time limit")
    assert stopping.requested()
    assert stopping.reason() == "time limit"


def test_wait_wakes_at_a_signal():
    stopping.install()
    timer = threading.Timer(0.05, send, [signal.SIGTERM])
    timer.start()
    began = time.monotonic()
    assert stopping.wait(60.0)
    assert time.monotonic() - began < 50  # it did not sleep to the end
    timer.join()


def test_wait_wakes_at_a_request_from_a_thread():
    stopping.install()
    timer = threading.Timer(0.05, stopping.request, ["time limit"])
    timer.start()
    assert stopping.wait(60.0)
    timer.join()


def test_wait_without_handlers_sleeps():
    assert stopping.wait(0.01) is False


def test_raise_if_requested_names_the_reason():
    stopping.raise_if_requested()
    stopping.request("SIGTERM")
    with pytest.raises(StoppedError, match="stopped by SIGTERM while preparing, before training; run the same command again") as caught:
        stopping.raise_if_requested()
    assert caught.value.exit_code == 75


def test_importing_it_imports_nothing_heavy():
    """The handlers must stand within the first milliseconds, before torch's import."""
    code = "import sys, dragoman.__main__\nprint([m for m in ('torch', 'numpy', 'typer', 'yaml', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "installed"), [(["train", "--out", "m"], True), (["--debug", "demo"], True), (["translate", "train"], False), ([], False)]
)
def test_only_commands_worth_saving_get_handlers(monkeypatch, words, installed):
    from dragoman import __main__
    from dragoman.cli import app

    monkeypatch.setattr(sys, "argv", ["dragoman", *words])
    monkeypatch.setattr(app, "main", lambda: 7)
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 7
    assert (signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL) == installed
