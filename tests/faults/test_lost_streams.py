"""A command's output stream may disappear: its pipe, its disk, its terminal.

Training continues. Translation ends when the reader of its output has exited.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest

from dragoman.runtime import fault_tolerant_stdio
from dragoman.training.progress_display import open_progress

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "text.tokenizer=characters",
    "model.width=16",
    "model.heads=2",
    "model.ffn_width=32",
    "model.encoder=[transformer*1]",
]
SETTINGS += [
    "model.decoder=[transformer*1]",
    "train.batch_tokens=200",
    "train.warmup_steps=10",
    "train.validate_every=1000000",
    "train.device=cpu",
]


class Gone(io.StringIO):
    """A stream whose other end is gone."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


@pytest.fixture(autouse=True)
def forget() -> None:
    fault_tolerant_stdio.pop_lost_streams()


@pytest.mark.parametrize(
    "number", [errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT, errno.ESTALE]
)
@pytest.mark.parametrize("live", [False, True])
def test_progress_outlives_its_stream(number: int, live: bool) -> None:
    progress = open_progress(Gone(number), live=live)
    progress.note("a line")
    with progress.phase("preparing", 10, "pairs") as phase:
        phase.advance(10)
    with progress.training(steps=3) as view:
        for update in range(3):
            view.update({"step": update, "nll": 1.0, "padding": 0.1, "tokens": 10})
        view.show_validation({"loss": 1.0}, {"step": 3, "loss": 1.0})
    assert fault_tolerant_stdio.pop_lost_streams() == {"stderr": os.strerror(number)}
    assert fault_tolerant_stdio.pop_lost_streams() == {}, "a loss is reported once"


def test_a_closed_stream_and_a_slow_one() -> None:
    closed = io.StringIO()
    closed.close()
    stream = fault_tolerant_stdio.make_tolerant(closed)
    assert stream.write("x") == 1
    stream.flush()
    assert not stream.isatty()
    assert "closed file" in fault_tolerant_stdio.pop_lost_streams()["stderr"]
    slow = fault_tolerant_stdio.make_tolerant(Gone(errno.EAGAIN))
    slow.write("x")
    assert fault_tolerant_stdio.pop_lost_streams() == {}


def test_tracebacks_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", fault_tolerant_stdio.make_tolerant(Gone(errno.EPIPE)))
    traceback.print_exception(ValueError("one without a reader"))
    sys.stderr.writelines(["a", "b"])
    assert fault_tolerant_stdio.make_tolerant(sys.stderr) is sys.stderr


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write words to be written backwards."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(5)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(3, 8))) for _ in range(200)]
    (folder / "src").write_text("\n".join(words) + "\n")
    (folder / "tgt").write_text("\n".join(word[::-1] for word in words) + "\n")
    return folder


def command(corpus: Path, out: Path, steps: int) -> list[str]:
    words = [sys.executable, "-m", "dragoman", "train", "--recipe", "tiny", "-o", str(out)]
    words += ["--src", str(corpus / "src"), "--tgt", str(corpus / "tgt")]
    for setting in (*SETTINGS, f"train.steps={steps}", f"data.cache_dir={out.parent / 'cache'}"):
        words += ["--set", setting]
    return words


def start(kind: str, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a command whose stdout and stderr go away at once, or after a moment."""
    options = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "start_new_session": True}
    if kind == "pipe closed":
        reader, writer = os.pipe()
        process = subprocess.Popen(words, stdout=writer, stderr=writer, **options)
        os.close(writer)
        os.read(reader, 1)  # until it has written something
        os.close(reader)
    elif kind == "disk full":
        with open("/dev/full", "w") as full:
            process = subprocess.Popen(words, stdout=full, stderr=full, **options)
    elif kind == "closed":
        process = subprocess.Popen(["sh", "-c", 'exec "$@" 1>&- 2>&-', "sh", *words], **options)
    else:
        ours, theirs = os.openpty()
        process = subprocess.Popen(words, stdout=theirs, stderr=theirs, **options)
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)  # hung up
    return process


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("pipe closed", "Broken pipe"),
        pytest.param("disk full", "No space left on device", marks=pytest.mark.slow),
        pytest.param("closed", "", marks=pytest.mark.slow),
        pytest.param("terminal hung up", "Input/output error", marks=pytest.mark.slow),
    ],
)
def test_training_continues_without_its_output_stream(
    kind: str, reason: str, corpus: Path, tmp_path: Path
) -> None:
    """`dragoman train 2>&1 | tee log` lost a thousand steps when tee was killed."""
    out = tmp_path / "model"
    process = start(kind, command(corpus, out, steps=30))
    assert process.wait(timeout=300) == 0
    assert (out / "manifest.json").exists()
    records = [
        json.loads(line) for line in (out / "training" / "log.jsonl").read_text().splitlines()
    ]
    assert max(record["step"] for record in records) == 30
    lost = {
        record["stream"]: record["reason"]
        for record in records
        if record.get("event") == "stream lost"
    }
    status = json.loads((out / "training" / "status.json").read_text())
    assert status["state"] == "finished"
    if reason:
        assert lost["stderr"] == reason
        assert status["progress"].endswith(f"stderr: {reason}")
    else:
        assert not lost, "a stream that was never there is not lost"


@pytest.mark.slow
def test_a_terminal_that_hangs_up_with_a_signal_saves_and_exits_75(
    corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    process = start("terminal hung up", command(corpus, out, steps=100_000))
    while not (out / "training" / "log.jsonl").exists() or process.poll() is not None:
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=300) == 75
    assert list((out / "training").glob("step-*"))


CLOSED = """
import os, sys
from dragoman.__main__ import open_missing_descriptors, open_streams
open_missing_descriptors()
opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
open_streams()
os.write(2, b"what a C library writes to stderr")
print("not shown", file=sys.stderr)
assert opened > 2, opened
"""


def test_a_closed_stderr_is_not_the_next_file_that_is_opened(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "sh",
            "-c",
            'exec "$@" 0<&- 1>&- 2>&-',
            "sh",
            sys.executable,
            "-c",
            CLOSED,
            str(tmp_path / "file"),
        ],
        cwd=ROOT,
    )
    assert done.returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("arguments", [["settings", "model.widht"], ["settings"], ["--version"]])
def test_a_command_s_result_does_not_depend_on_its_stderr(arguments: list[str]) -> None:
    whole = subprocess.run(
        [sys.executable, "-m", "dragoman", *arguments], cwd=ROOT, capture_output=True
    )
    reader, writer = os.pipe()
    os.close(reader)
    deaf = subprocess.run(
        [sys.executable, "-m", "dragoman", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    os.close(writer)
    assert (deaf.returncode, deaf.stdout) == (whole.returncode, whole.stdout)


def test_results_that_no_stdout_takes_are_an_error() -> None:
    """`dragoman translate >&-` ended with 0, as if its output had gone somewhere."""
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 1>&-', "sh", sys.executable, "-m", "dragoman", "settings"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 74
    assert "Bad file descriptor" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_command_ends_quietly_when_its_output_pipe_is_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dragoman", "settings"],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == b""
