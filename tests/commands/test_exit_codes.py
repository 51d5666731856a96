"""Exit codes: a result, one line for a user error, a traceback for an internal error."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman._version import __version__
from dragoman.cli import app, settings_reference
from dragoman.cli.app import main
from dragoman.errors import CorruptError, DataError, DragomanError, LockedError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "train",
    "translate",
    "evaluate",
    "compare",
    "data",
    "info",
    "recipes",
    "export",
    "import",
    "average",
    "demo",
)
COMMANDS += ("verify", "doctor", "settings")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Patch `dragoman settings` to raise."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(settings_reference, "list_all_settings", fail)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of a peer's release crashed on an undeclared import (eole 0.6.4)."""
    assert main([command, "--help"]) == 0
    assert "Usage: dragoman" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"│ {command} " in out or f" {command} " in out for command in COMMANDS)
    assert main([]) == 0
    assert capsys.readouterr().out == out, "dragoman alone shows the help"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dragoman {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("lines must match", found="3 and 4", fix="compare them"), 2),
        (CorruptError("a checkpoint must verify", found="none of 2", fix="start elsewhere"), 65),
        (LockedError("one process owns a run", found="process 12", fix="wait"), 73),
    ],
)
def test_user_error_is_one_line_with_its_exit_code(
    error: DragomanError,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(monkeypatch, error)
    assert main(["settings"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"dragoman: error: {error}\n"


@pytest.mark.parametrize("arguments", [["--debug", "settings"], ["settings", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_is(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, DataError("lines must match", found="3 and 4", fix="compare them"))
    assert main(arguments) == 2
    assert "Traceback" in capsys.readouterr().err


def test_internal_error_shows_a_traceback_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, ZeroDivisionError("oh"))
    assert main(["settings"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oh" in err
    assert err.splitlines()[-1].startswith("dragoman: error: this is a bug in dragoman")


def test_ctrl_c_prints_one_word_and_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["settings"]) == 130
    assert capsys.readouterr().err == "dragoman: stopped\n"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "x/y"),
            77,
            "found Permission denied (x/y)",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 74, "found No space left on device"),
    ],
)
def test_os_errors_are_reported_in_one_line(
    error: OSError,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(monkeypatch, error)
    assert main(["settings"]) == code
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tranlate"], "Did you mean 'translate'"),
        (["translate", "--bem", "4"], "--beam"),
        (["train"], "Missing option '--out'"),
        (["translate", "-m", "MODEL", "--beam", "many"], "found 'many'"),
        (["translate", "-m", "MODEL", "--beam=0"], "found '0'"),
        (["evaluate"], "found no --src and --ref"),
    ],
)
def test_a_mistyped_command_is_one_line(
    arguments: list[str], words: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(bundle) if word == "MODEL" else word for word in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dragoman: error: ")
    assert words in err
    assert "--help" in err
    assert len(err.splitlines()) == 1


def test_closed_stdout_pipe_is_no_error() -> None:
    code = "import sys, typer; from dragoman.cli import app, settings_reference\n"
    code += "def endless():\n    while True: print('line', flush=True)\n"
    code += "settings_reference.list_all_settings = endless\nsys.exit(app.main(['settings']))"
    shell = f'"{sys.executable}" -c "$CODE" | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", shell],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CODE": code},
    )
    assert done.returncode == app.PIPE_CLOSED
    assert (done.stdout, done.stderr) == ("line\n", "")


def test_a_full_disk_under_stdout_is_reported() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dragoman", "settings"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 74
    assert "No space left on device" in done.stderr


def test_the_library_s_warnings_reach_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    main(["--version"])
    logging.getLogger("dragoman.somewhere").warning("the GPU is not used; say train.device=cuda")
    assert (
        capsys.readouterr().err == "dragoman: warning: the GPU is not used; say train.device=cuda\n"
    )


def test_the_exit_code_leaves_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dragoman", "settings", "model.widht"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "dragoman: error: there is no setting or section 'model.widht'; did you mean "
        "model.width?\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dragoman tr", {"train", "translate"}),
        ("dragoman sc", {"score"}),
        ("dragoman data c", {"check", "clean"}),
        (
            "dragoman recipes show vaswani2017_b",
            {"vaswani2017_base", "vaswani2017_big", "vaswani2017_bytes"},
        ),
        ("dragoman train --recipe ti", {"tiny"}),
        ("dragoman train --set model.wid", {"model.width="}),
    ],
)
def test_the_shell_completes_commands_and_names(words: str, expected: set[str]) -> None:
    shell = {
        "_DRAGOMAN_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "dragoman"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **shell},
    )
    assert set(done.stdout.split()) == expected
    assert done.returncode == 0


def test_help_costs_little_cpu_time() -> None:
    """--help imports neither numpy nor torch; modules are counted instead of seconds."""
    code = (
        "import sys; from dragoman.cli.app import main; main(['--help']); print(len(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert int(done.stdout.splitlines()[-1]) < 600
