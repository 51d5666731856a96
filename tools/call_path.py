"""Count the files, functions and stack frames of one training step or one translated sentence.

`train` counts between two calls of `torch.autograd.backward` of a run of `dragoman train` on a CPU
in plain mode (no torch.compile, no CUDA graphs); `translate` counts a second
`Translator.translate()` of one sentence with a loaded model on the native CPU engine. Functions of
the package are counted in all threads; frames are the deepest stack of them in one thread, from the
command or the call on.

    python tools/call_path.py train
    python tools/call_path.py translate --beam 4 --list
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "dragoman") + "/"
SETTINGS = (
    "text.tokenizer=characters",
    "model.encoder=[transformer*2]",
    "model.decoder=[transformer*2]",
    "model.width=32",
    "model.heads=2",
    "model.ffn_width=64",
    "model.residual=pre_norm",
    "model.dropout=0.1",
    "train.steps=12",
    "train.warmup_steps=2",
    "train.batch_tokens=256",
    "train.ema_decay=0.9",
    "train.validate_every=12",
    "train.validate_sentences=0",
    "train.checkpoint_every=12",
    "train.threads=1",
    "train.precision=float32",
    "train.compile=off",
    "train.cuda_graphs=off",
    "train.device=cpu",
    "decode.beam=1",
)


class CallRecorder:
    """The package's functions that are called while it records, and the deepest stack of them."""

    def __init__(self) -> None:
        self.calls: set[CodeType] = set()
        self.deepest: list[str] = []
        self.recording = False

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Record a call event; the signature is that of `sys.setprofile`."""
        if not self.recording or event != "call" or not _is_ours(frame):
            return
        self.calls.add(frame.f_code)
        stack = []
        current: FrameType | None = frame
        while current is not None:
            if _is_ours(current):
                stack.append(
                    f"{_relative(current.f_code)}:{current.f_lineno} {current.f_code.co_name}"
                )
            current = current.f_back
        if len(stack) > len(self.deepest):
            self.deepest = stack[::-1]

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Profile this thread and those that it starts."""
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def files(self) -> list[str]:
        """Return the files of the recorded functions."""
        return sorted({_relative(code) for code in self.calls})


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame is a function of the package; module bodies and comprehensions are not."""
    code = frame.f_code
    return code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")


def _relative(code: CodeType) -> str:
    return code.co_filename.removeprefix(PACKAGE)


def write_corpus(folder: Path) -> list[str]:
    """Write a small corpus of number words; return the options of `dragoman train` that name it."""
    ones = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    pairs = [
        (f"{ten} {one}", str(10 * (i + 2) + j + 1))
        for i, ten in enumerate(tens)
        for j, one in enumerate(ones)
    ]
    options = []
    for name, part in (("", pairs * 4), ("valid-", pairs[:8])):
        for side, column in (("src", 0), ("tgt", 1)):
            path = folder / f"{name}{side}.txt"
            path.write_text("".join(f"{pair[column]}\n" for pair in part), encoding="utf-8")
            options.append(f"--{name}{side}={path}")
    return options


def run_command(arguments: list[str]) -> None:
    """Run a command of dragoman in this process, without its output."""
    from dragoman.__main__ import main

    before, sys.argv = sys.argv, ["dragoman", *arguments]
    silent = io.StringIO()
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            main()
    except SystemExit as stop:
        if stop.code:
            sys.exit(f"dragoman {' '.join(arguments)} failed:\n{silent.getvalue()}")
    finally:
        sys.argv = before


def train_arguments(folder: Path) -> list[str]:
    """Return the arguments of `dragoman train` for the small model."""
    settings = [f"--set={each}" for each in (*SETTINGS, f"data.cache_dir={folder / 'cache'}")]
    return ["train", *write_corpus(folder), f"--out={folder / 'model'}", "--recipe=tiny", *settings]


def count_train_step(folder: Path, recorder: CallRecorder) -> None:
    """Record from one call of `torch.autograd.backward` to the next, in the middle of a run."""
    import torch

    backward, calls = torch.autograd.backward, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        recorder.recording = calls == 6
        return backward(*arguments, **options)

    torch.autograd.backward = counted
    try:
        with recorder.installed():
            run_command(train_arguments(folder))
    finally:
        torch.autograd.backward = backward


def count_sentence(folder: Path, recorder: CallRecorder, beam: int) -> None:
    """Record the second of two calls of `Translator.translate`."""
    run_command(train_arguments(folder))
    from dragoman import Translator

    translator = Translator.load(folder / "model", engine="native", device="cpu")
    translator.translate(["twenty one"], beam=beam)
    with recorder.installed():
        recorder.recording = True
        translator.translate(["thirty two"], beam=beam)
        recorder.recording = False


def main() -> None:
    """Count, and print the counts; with --list the files and the deepest stack too."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("train", "translate"))
    parser.add_argument("--beam", type=int, default=1, help="beam size of translate")
    parser.add_argument("--list", action="store_true", help="list files and the deepest stack")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    recorder = CallRecorder()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "train":
            count_train_step(Path(folder), recorder)
        else:
            count_sentence(Path(folder), recorder, options.beam)
    if options.list:
        print("\n".join(recorder.files()), "", *recorder.deepest, "", sep="\n")
    print(
        f"{options.what}: {len(recorder.files())} files, {len(recorder.calls)} functions, "
        f"{len(recorder.deepest)} frames"
    )


if __name__ == "__main__":
    main()
