"""`dragoman explore`: the page served to this machine, or written as one file."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from explanation_kit import make_explanation

from dragoman.cli import explore as command
from dragoman.cli.app import main
from dragoman.errors import DataError, DragomanError
from dragoman.explore.html_export import read_island

ROOT = Path(__file__).resolve().parents[2]


def error_line(*arguments: object, capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that must fail; return its error line."""
    assert main(["explore", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.fixture(scope="module")
def stored(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an explanation as `dragoman explain --json` does."""
    from dragoman.inference import Translator

    path = tmp_path_factory.mktemp("stored") / "explanation.json"
    path.write_text(Translator.load(bundle).explain("Guten Morgen.").to_json(), encoding="utf-8")
    return path


def test_ambiguous_arguments_are_rejected(
    bundle: Path, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = tmp_path / "out.html"
    assert "--html needs a text" in error_line(bundle, "--html", html, capsys=capsys)
    line = error_line(bundle, "a", "--text", "b", capsys=capsys)
    assert "a text and --text exclude each other; found 'a' and 'b'" in line
    line = error_line(bundle, "a", "--json", stored, capsys=capsys)
    assert f"a text and --json exclude each other; found 'a' and {stored}" in line
    assert "must hold words; found ' '" in error_line(bundle, " ", capsys=capsys)
    assert "found nothing at" in error_line(tmp_path / "none", "a", capsys=capsys)
    assert "if it is a text, add --text" in error_line("Guten Morgen", capsys=capsys)
    assert "at most 16; found 17" in error_line(bundle, "a", "--beam", 17, capsys=capsys)
    assert "found '70000'" in error_line(bundle, "--port", 70000, capsys=capsys)
    assert "found the directory" in error_line(bundle, "a", "--html", tmp_path, capsys=capsys)
    assert not html.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not json", "an explanation must be a JSON object"),
        (b"{}\n{}\n", "must hold one explanation; found 2 lines"),
        (b'{"format": "other"}', "explanation"),
    ],
)
def test_a_file_must_be_one_explanation(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    line = error_line("--json", path, "--html", tmp_path / "out.html", capsys=capsys)
    assert words in line
    assert str(path) in line


def test_a_port_in_use_is_one_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        line = error_line(bundle, "--port", port, capsys=capsys)
    assert f"--port must be free; found {port} in use on 127.0.0.1" in line


def test_serving_needs_the_extra_and_a_file_does_not(
    bundle: Path,
    stored: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "starlette" else find(name)
    )
    line = error_line(bundle, capsys=capsys)
    assert "needs the package starlette; found none; pip install 'dragoman[web]'" in line
    assert main(["explore", "--json", str(stored), "--html", str(tmp_path / "out.html")]) == 0


def test_a_file_is_written_without_starlette_being_imported(stored: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from dragoman.cli.app import main; "
        f"code = main(['explore', '--json', {str(stored)!r}, '--html', "
        f"{str(tmp_path / 'o.html')!r}]); "
        "print(code, [m for m in ('starlette', 'uvicorn', 'torch', 'matplotlib') if m in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0 []"
    assert done.stderr.strip() == f"dragoman: written to {tmp_path / 'o.html'}"


def test_the_file_holds_the_explanation(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.html"
    assert main(["explore", str(bundle), "--html", str(path), "--beam", "1", "Guten Morgen."]) == 0
    assert f"written to {path}" in capsys.readouterr().err
    page = path.read_text(encoding="utf-8")
    found = read_island(page)
    assert found["source"]["text"] == "Guten Morgen."
    assert found["request"]["beam"] == 1
    assert "<title>Guten Morgen. – Dragoman explorer</title>" in page


def test_a_file_serves_its_precomputed_results(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    options = ["--html", str(path), "--branches", "1", "--ablations", "top2"]
    assert main(["explore", str(bundle), "Guten Morgen.", *options]) == 0
    found = read_island(path.read_text(encoding="utf-8"))
    assert len(found["branches"]) == len(found["steps"])
    assert len(found["ablations"]) == 2
    assert found["model"]["path"] == bundle.name
    heads = {f"{head['site']}.{head['head']}": head["effect"] for head in found["heads"]}
    chosen = [abs(heads[name]["estimate"]) for name in found["ablations"]]
    assert min(chosen) >= sorted(abs(effect["estimate"]) for effect in heads.values())[-2]


def test_options_for_a_file_are_rejected_elsewhere(
    bundle: Path, stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(bundle, "a", "--branches", 2, capsys=capsys)
    assert "--branches needs --html and a model" in line
    assert "found --branches 2 without" in line
    html = tmp_path / "out.html"
    line = error_line("--json", stored, "--html", html, "--ablations", "top8", capsys=capsys)
    assert "found --ablations top8 without" in line
    line = error_line(bundle, "a", "--html", html, "--ablations", "top", capsys=capsys)
    assert "must be top1 to top99, or heads such as x3.2,d0.1; found 'top'" in line
    assert not html.exists()


def test_a_desktop_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("SSH_CONNECTION", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert not command.has_desktop()
    monkeypatch.setenv("DISPLAY", ":0")
    assert command.has_desktop()
    monkeypatch.setenv("SSH_CONNECTION", "there")
    assert not command.has_desktop()


class Served:
    """A running `dragoman explore`, as a user would start it."""

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dragoman", "explore", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell in the background has SIGINT ignored, which children inherit.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def read(self, path: str, body: object = None) -> dict:
        request = urllib.request.Request(
            f"{self.url}api/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def stop(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[type]:
    running: list[Served] = []

    def start(*arguments: object) -> Served:
        running.append(Served(*arguments, "--port", 0, "--no-open", cwd=tmp_path))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


def test_a_model_is_served_until_ctrl_c(serve, bundle: Path) -> None:
    served = serve(bundle, "--text", "Guten Morgen.")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/explore/", served.url)
    session = served.read("session")
    assert session["model"]["source_lang"] == "de"
    assert session["examples"] == ["Guten Morgen."]
    assert served.read(f"e/{session['explanation']}")["source"]["text"] == "Guten Morgen."
    found = served.read("explain", {"text": "Zwei Männer reden.", "beam": 2})
    assert found["source"]["text"] == "Zwei Männer reden."
    code, errors = served.stop(signal.SIGINT)
    assert code == 130
    assert errors.splitlines() == [
        "dragoman: serving the page; press Ctrl-C to stop",
        "dragoman: stopped",
    ]


def test_without_a_text_the_page_opens_with_an_example(serve, bundle: Path) -> None:
    served = serve(bundle, "--beam", 2)
    session = served.read("session")
    found = served.read(f"e/{session['explanation']}")
    assert found["source"]["text"] == session["examples"][0]
    assert found["request"]["beam"] == 2


def test_a_stored_explanation_is_served_without_a_model(serve, stored: Path) -> None:
    served = serve("--json", stored)
    session = served.read("session")
    assert session["can_explain"] is False
    assert served.read(f"e/{session['explanation']}")["source"]["text"] == "Guten Morgen."
    code, errors = served.stop(signal.SIGTERM)
    assert code in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert "Traceback" not in errors


def test_another_address_is_warned_about(serve, stored: Path) -> None:
    served = serve("--json", stored, "--host", "0.0.0.0")
    assert served.read("session")["can_explain"] is False
    _, errors = served.stop(signal.SIGINT)
    assert "warning: serving at 0.0.0.0: everyone who can reach it can use the model" in errors


def test_a_text_that_cannot_be_explained_is_one_line(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(bundle, "--port", 0, "--text", "wort " * 2000, capsys=capsys)
    assert "at most 512 tokens; found" in line


def test_reading_an_explanation_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DragomanError, match="must be a plain file; found a directory"):
        command.read_explanation(tmp_path)


def test_an_explanation_may_be_written_over_several_lines(tmp_path: Path) -> None:
    explanation, path = make_explanation(), tmp_path / "explanation.json"
    path.write_text(json.dumps(json.loads(explanation.to_json()), indent=1))
    assert command.read_explanation(path).digest == explanation.digest
    path.write_text(f"{explanation.to_json()}\n{explanation.to_json()}\n")
    with pytest.raises(DataError, match="must hold one explanation; found 2 lines"):
        command.read_explanation(path)
