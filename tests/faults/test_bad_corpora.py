"""Twenty-four bad corpora end as specified, with file and line, in little memory and time."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dragoman.config.root_config import TextConfig
from dragoman.text.sentencepiece_tokenizer import save_tokenizers, train_tokenizers

ROOT = Path(__file__).resolve().parents[2]
LINES = 1000
GOOD_SRC = b"".join(b"Zeile %d mit Text\n" % i for i in range(LINES))
GOOD_TGT = b"".join(b"line %d with text\n" % i for i in range(LINES))
MOST_MEMORY = 200  # MB beyond what the process had


class Case(NamedTuple):
    """A bad source file, and how preparing must end."""

    name: str
    data: bytes | None
    code: int
    message: str
    file: str = "bad.de"
    pairs: int = 0
    on_bad_line: str = "stop"


def with_line(number: int, line: bytes) -> bytes:
    """Replace one line, counted from 1, of the good source."""
    lines = GOOD_SRC.split(b"\n")
    lines[number - 1] = line
    return b"\n".join(lines)


def bomb() -> bytes:
    """Ten megabytes that unpack to ten gigabytes of lines, in a hundred members."""
    return gzip.compress(b"aaaaaaa\n" * (100 << 17), 9) * 100


INVALID = {
    "lone continuation": b"\x80",
    "continuation of latin": b"caf\xe9",
    "overlong two": b"\xc0\xaf",
    "overlong three": b"\xe0\x80\xaf",
    "overlong four": b"\xf0\x80\x80\xaf",
    "overlong nul": b"\xc0\x80",
    "surrogate": b"\xed\xa0\x80",
    "surrogate pair": b"\xed\xa0\xbd\xed\xb8\x80",
    "past the end": b"\xf4\x90\x80\x80",
    "five bytes": b"\xf8\x88\x80\x80\x80",
    "never used": b"\xfe\xff",
    "cut character": b"abc \xe4\xb8",
}

CASES = [
    *(
        Case(
            name,
            with_line(700, b"Text " + bad),
            2,
            r"bad\.de line 700 must be UTF-8; found byte 0x",
        )
        for name, bad in INVALID.items()
    ),
    Case(
        "truncated gz",
        gzip.compress(GOOD_SRC)[:-20],
        2,
        r"bad\.de\.gz must be a whole gzip file; found an end after",
        "bad.de.gz",
    ),
    Case(
        "truncated xz",
        lzma.compress(GOOD_SRC)[:-40],
        2,
        r"bad\.de\.xz must be a whole xz file; found an end after",
        "bad.de.xz",
    ),
    Case(
        "nul",
        with_line(31, b"a\x00b"),
        2,
        r"bad\.de line 31 must be text; found a NUL byte at byte 2",
    ),
    Case(
        "ten megabyte line",
        with_line(500, b"x" * 10_000_000),
        0,
        r"999 of 1000 .* 1 with an overlong line \(line 500\)",
        pairs=999,
    ),
    Case("crlf", GOOD_SRC.replace(b"\n", b"\r\n"), 0, "1000 of 1000 pairs kept", pairs=LINES),
    Case(
        "line separator",
        with_line(9, "eins\u2028zwei\u0085drei".encode()),
        0,
        "1000 of 1000 pairs kept",
        pairs=LINES,
    ),
    Case("byte order mark", b"\xef\xbb\xbf" + GOOD_SRC, 0, "1000 of 1000 pairs kept", pairs=LINES),
    Case(
        "unequal",
        GOOD_SRC + b"noch eine\n" * 7,
        2,
        r"bad\.de and .*good\.en must have equally many lines; found 1007 and 1000",
    ),
    Case("empty", b"", 2, r"bad\.de and .*good\.en must have equally many lines; found 0 and 1000"),
    Case(
        "bomb", b"", 2, r"bad\.de\.gz must not unpack to more than 200 times its size", "bad.de.gz"
    ),
    Case(
        "changed",
        GOOD_SRC,
        65,
        r"bad\.de must stay as it is while it is read; found \d+ bytes at first",
    ),
    Case("missing", None, 2, r"missing\.de must exist; found no such file", "missing.de"),
]
SKIPPED = Case(
    "skipped",
    with_line(700, b"caf\xe9"),
    0,
    r"999 of 1000 .* 1 with a bad line \(line 700\)",
    pairs=999,
    on_bad_line="skip",
)


def test_there_are_twenty_four() -> None:
    assert len({case.name for case in CASES}) == 24
    assert sum(case.message.endswith("found byte 0x") for case in CASES) == 12


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Prepare every case in one subprocess, so that its memory can be measured."""
    folder = tmp_path_factory.mktemp("corpora")
    made = train_tokenizers(
        ["Zeile 1234567890 mit Text"] * 20,
        ["line with text"] * 20,
        TextConfig(vocab_size=290, character_coverage=1.0),
    )
    save_tokenizers(made, folder / "text")
    (folder / "good.en").write_bytes(GOOD_TGT)
    requests = []
    for number, case in enumerate([*CASES, SKIPPED]):
        directory = folder / str(number)
        directory.mkdir()
        if case.data is not None:
            (directory / case.file).write_bytes(bomb() if case.name == "bomb" else case.data)
        request = {
            "name": case.name,
            "src": f"{number}/{case.file}",
            "tgt": "good.en",
            "on_bad_line": case.on_bad_line,
        }
        requests.append(json.dumps(request))
    command = [sys.executable, str(Path(__file__).with_name("corpus_process.py")), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command,
        input="\n".join(requests),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    left = list(folder.glob("cache-*/.tmp-*"))
    assert not left, "a failed preparation left something behind"
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize("case", [*CASES, SKIPPED], ids=lambda case: case.name)
def test_bad_corpus(answers: dict[str, dict[str, Any]], case: Case) -> None:
    answer = answers[case.name]
    assert answer["code"] == case.code, answer["message"]
    assert re.search(case.message, answer["message"]), answer["message"]
    assert "\n" not in answer["message"]
    assert answer["pairs"] == case.pairs
    assert answer["memory"] <= MOST_MEMORY


def test_bad_corpora_take_little_time_and_memory(
    answers: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = sum(answers[case.name]["code"] == case.code for case in CASES)
    worst = max(answers[case.name]["memory"] for case in CASES)
    slowest = max(answers[case.name]["seconds"] for case in CASES)
    value = f"{ended}/{len(CASES)}, {worst} MB and {slowest:.1f} s at most"
    with capsys.disabled():
        sys.stdout.write(
            "\n"
            + json.dumps({"bar": "bad-corpora", "ok": ended == len(CASES), "value": value})
            + "\n"
        )
    assert ended == len(CASES) == 24
