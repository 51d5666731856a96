"""`dragoman translate --input --output`: files, encodings and progress."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
Typed = Callable[[str | bytes], None]
LINES = ["Guten Morgen.", "", "Zwei Männer reden.", "  ", "x", "🙂"]


def translate(bundle: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Translate in this process and return the lines of the result."""
    assert main(["translate", "-m", str(bundle), *arguments]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


def test_files_are_translated_line_by_line(
    bundle: Path, tmp_path: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--input` and `--output`, plain and compressed, give what standard input and output give."""
    text = "".join(f"{line}\n" for line in LINES)
    typed(text)
    expected = translate(bundle, capsys=capsys)
    (tmp_path / "in.txt").write_text(text, "utf-8")
    (tmp_path / "in.gz").write_bytes(gzip.compress(text.encode().removesuffix(b"\n")))
    for name in ("in.txt", "in.gz"):
        assert translate(bundle, "--input", str(tmp_path / name), capsys=capsys) == expected
    out = tmp_path / "out.txt"
    assert (
        translate(
            bundle,
            "-i",
            str(tmp_path / "in.txt"),
            "-i",
            str(tmp_path / "in.gz"),
            "-o",
            str(out),
            capsys=capsys,
        )
        == []
    )
    assert out.read_text("utf-8").split("\n") == [*expected, *expected, ""]
    typed(text)
    assert (
        translate(bundle, "--input", "-", "--output", str(tmp_path / "packed.gz"), capsys=capsys)
        == []
    )
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()).decode().split("\n") == [
        *expected,
        "",
    ]
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "in.gz",
        "in.txt",
        "out.txt",
        "packed.gz",
    ], "no leftovers"


def test_a_pipe_can_be_an_input(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("Guten Morgen.\nx\n"))
    writer.start()
    found = translate(bundle, "--input", str(tmp_path / "pipe"), capsys=capsys)
    writer.join(timeout=30)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--input", "nowhere.txt"], "nowhere.txt must exist"),
        (["--input", "."], "must be a plain file; found a directory"),
        (
            ["--input", "in.txt", "text"],
            "texts and --input exclude each other; found 'text' and in.txt",
        ),
        (
            ["--input", "in.txt", "--output", "in.txt"],
            "--output must not be a file that the command reads; found in.txt",
        ),
        (
            ["--input", "in.txt", "--output", "./link.txt"],
            "--output must not be a file that the command reads; found link.txt",
        ),
        (
            ["--input", "in.txt", "--output", "no/where.txt"],
            "--output must be in an existing directory; found no",
        ),
        (["--output", "."], "--output must name a file; found the directory ."),
    ],
)
def test_inputs_and_outputs_are_checked_before_the_model_is_opened(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("x\n")
    (tmp_path / "link.txt").symlink_to("in.txt")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "manifest.json").write_text(
        "{}"
    )  # looks like a bundle; loading it would fail
    assert main(["translate", "-m", "model", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_bad_line_leaves_no_output(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_bytes(
        b"Guten Morgen.\n" * 40 + "Gr\u00fc\u00dfe\n".encode("latin1")
    )
    (tmp_path / "out.txt").write_text("old\n")
    assert (
        main(
            [
                "translate",
                "-m",
                str(bundle),
                "-i",
                str(tmp_path / "in.txt"),
                "-o",
                str(tmp_path / "out.txt"),
            ]
        )
        == 2
    )
    assert (
        f"line 41 of {tmp_path / 'in.txt'} must be UTF-8; found the byte 0xfc"
        in capsys.readouterr().err
    )
    assert (tmp_path / "out.txt").read_text() == "old\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_name_of_a_file_is_warned_about(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.txt"
    path.write_text("Guten Morgen.\n")
    assert main(["translate", "-m", str(bundle), str(path)]) == 0
    captured = capsys.readouterr()
    assert f"warning: {path} is a file name but is translated as text" in captured.err
    assert f"--input {path}" in captured.err
    assert len(captured.out.splitlines()) == 1
    assert main(["translate", "-m", str(bundle), "x" * 5000]) == 0, "longer than any name"
    assert "name of a file" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["Guten Morgen, liebe Leute.\nx\n", "a\nb\n", "x"])
@pytest.mark.parametrize(
    ("encoding", "name"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
    ],
)
def test_utf16_is_recognised_on_stdin_as_in_files(
    text: str,
    encoding: str,
    name: str,
    bundle: Path,
    typed: Typed,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without its mark UTF-16 is valid UTF-8 full of NULs, and was translated."""
    data = text.encode(encoding)
    typed(data)
    assert main(["translate", "-m", str(bundle)]) == 2
    captured = capsys.readouterr()
    assert (
        captured.err
        == f"dragoman: error: standard input must be UTF-8; found {name}; convert it first: iconv "
        f"-f {name} -t UTF-8\n"
    )
    assert captured.out == ""
    (tmp_path / "in.txt").write_bytes(data)
    assert main(["translate", "-m", str(bundle), "-i", str(tmp_path / "in.txt")]) == 2
    assert f"in.txt must be UTF-8; found {name}" in capsys.readouterr().err


def test_a_nul_is_no_text(bundle: Path, typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    typed(b"Guten Morgen.\na\0b\n")
    assert main(["translate", "-m", str(bundle)]) == 2
    assert (
        "line 2 of standard input must be text; found a NUL byte at byte 2"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("text", ["a\n", "\n", "\ufeff\n", "\ufeffa\n"])
def test_short_first_lines_are_not_mistaken(
    text: str, bundle: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(text)
    assert len(translate(bundle, capsys=capsys)) == 1


@pytest.mark.parametrize("nbest", [1, 3])
def test_json_lists_the_n_best_with_the_best_first(
    nbest: int, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There are n alternatives, the best first, for every n and for empty lines."""
    lines = translate(bundle, "--json", "--nbest", str(nbest), "Guten Morgen.", "", capsys=capsys)
    full, empty = (json.loads(line) for line in lines)
    assert len(full["alternatives"]) == nbest
    assert len(empty["alternatives"]) == 1
    for found in (full, empty):
        first = found["alternatives"][0]
        assert {name: found[name] for name in first} == first
        assert set(first) == {"text", "score", "tokens", "log_probs"}


class Terminal(io.StringIO):
    """A stream whose isatty() is True."""

    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_never_on_stdout(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default rich prints what goes to stdout on its own console, which is stderr."""
    path = tmp_path / "in.txt"
    path.write_text("Guten Morgen.\n" * 40)
    expected = translate(bundle, "-i", str(path), capsys=capsys)
    monkeypatch.setattr("dragoman.cli.command_progress_bar.DELAY_SECONDS", 0.0)
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert translate(bundle, "-i", str(path), capsys=capsys) == expected
    assert "translating" in screen.getvalue()
    assert "of 40 lines" in screen.getvalue()


def test_no_progress_with_results_on_the_terminal_or_without_one(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "in.txt"
    path.write_text("x\n" * 40)
    monkeypatch.setattr("dragoman.cli.command_progress_bar.DELAY_SECONDS", 0.0)
    assert main(["translate", "-m", str(bundle), "-i", str(path)]) == 0
    assert "translating" not in capsys.readouterr().err
    screen, results = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", results)
    assert main(["translate", "-m", str(bundle), "-i", str(path)]) == 0
    assert "translating" not in screen.getvalue()
    assert results.getvalue().count("\n") == 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_terminated_command_leaves_no_temporary_file(
    number: signal.Signals, bundle: Path, tmp_path: Path
) -> None:
    """SIGTERM left `.tmp-out.txt-…` beside the output for ever."""
    command = [sys.executable, "-m", "dragoman", "translate", "-m", str(bundle)]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--output", str(tmp_path / "out.txt")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell in the background has SIGINT ignored, which children inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [each.name[:12] for each in tmp_path.iterdir()] == [".tmp-out.txt"]
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert errors.decode() == "dragoman: stopped\n"
    assert not list(tmp_path.iterdir())
