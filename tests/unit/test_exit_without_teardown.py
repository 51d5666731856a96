"""Exit of a command without the interpreter's teardown: nothing of value is skipped."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = """
import atexit, sys, tempfile, threading, time
from dragoman.__main__ import exit_without_teardown
"""


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + code]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, **options
    )


@pytest.mark.parametrize("code", [0, 2, 75])
def test_streams_are_flushed_and_exit_handlers_run(code):
    done = run(
        "atexit.register(print, 'handler')\n"
        "print('text', end='')\n"
        "sys.stderr.write('note')\n"
        f"exit_without_teardown({code})\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "texthandler\n", "note")


def test_modules_are_not_cleared():
    """What makes it worth having: torch's modules take the interpreter 0.3 s."""
    cleared = "class Cleared:\n    def __del__(self): print('cleared')\nheld = Cleared()\n"
    assert run(cleared + "exit_without_teardown(0)").stdout == ""
    assert run(cleared + "sys.exit(0)").stdout == "cleared\n"


def test_temporary_directories_are_removed(tmp_path):
    done = run(
        f"held = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})\n"
        "print(held.name)\n"
        "exit_without_teardown(0)\n"
    )
    assert done.stdout.startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_other_threads_are_waited_for():
    done = run(
        "def work():\n    time.sleep(0.2)\n    print('done')\n"
        "threading.Thread(target=work).start()\n"
        "exit_without_teardown(3)\n"
    )
    assert (done.returncode, done.stdout) == (3, "done\n")


def test_output_that_cannot_be_written_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", HEAD + "print('text')\nexit_without_teardown(0)"],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode != 0
    assert "No space left" in done.stderr
