"""Fixtures of the command tests: a small model directory, a corpus, and a runner of commands."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    ("Guten Morgen.", "Good morning."),
    ("Ein Hund läuft durch den Schnee.", "A dog runs through the snow."),
    ("Zwei Männer reden.", "Two men are talking."),
    ("Das ist ein Haus.", "This is a house."),
    ("Eine Frau liest ein Buch.", "A woman reads a book."),
    ("Kinder spielen im Park.", "Children play in the park."),
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write train and dev files of a few dozen pairs."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, times in (("train", 10), ("dev", 1)):
        for column, language in enumerate(("de", "en")):
            text = "".join(f"{pair[column]}\n" for pair in PAIRS * times)
            (folder / f"{name}.{language}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def backwards(tmp_path: Path) -> Path:
    """Write a corpus of reversed words: a.src and a.tgt to train, v.src and v.tgt to validate."""
    draw = random.Random(5)
    for name, count in (("a", 120), ("v", 10)):
        words = ["".join(draw.choices("abcdefgh", k=draw.randint(3, 8))) for _ in range(count)]
        (tmp_path / f"{name}.src").write_text("\n".join(words) + "\n")
        (tmp_path / f"{name}.tgt").write_text("\n".join(word[::-1] for word in words) + "\n")
    return tmp_path


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a valid model with random weights."""
    import torch

    from dragoman.bundle import write_bundle
    from dragoman.config import read_config
    from dragoman.models.factory import build_model
    from dragoman.text.sentencepiece_tokenizer import train_tokenizers

    overrides = [
        "model.width=16",
        "model.heads=2",
        "model.ffn_width=32",
        "model.encoder=[transformer*1]",
        "model.decoder=[transformer*1]",
    ]
    overrides += [
        "text.tokenizer=characters",
        "data.src_lang=de",
        "data.tgt_lang=en",
        "decode.beam=2",
        "decode.max_length_ratio=1",
        "decode.max_length_extra=4",
    ]
    config = read_config(recipe="tiny", overrides=overrides)
    tokenizers = train_tokenizers(
        (src for src, _ in PAIRS * 20), (tgt for _, tgt in PAIRS * 20), config.text
    )
    torch.manual_seed(3)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    path = tmp_path_factory.mktemp("models") / "my-model"
    write_bundle(
        path,
        config=config,
        tokenizers=tokenizers,
        weights=model.state_dict(),
        golden=["Guten Morgen."],
    )
    return path


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], None]:
    """Put text or bytes where a command in this process reads its standard input."""

    def put(text: str | bytes) -> None:
        raw = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))

    return put


@pytest.fixture
def dragoman(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a subprocess, in an empty directory, as a user would."""

    def run(
        *arguments: object,
        input: str | bytes | None = None,
        timeout: float = 120,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        raw = input.encode() if isinstance(input, str) else input
        command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=tmp_path, input=raw, capture_output=True, timeout=timeout, env=environment
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run
