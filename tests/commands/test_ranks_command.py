"""`torchrun … -m dragoman train`: several processes, the same command, the same losses."""

import json
import os
import subprocess
import sys

import pytest
from kernel_kit import cache_with_kernels

from dragoman.cli.app import main

WORDS = (
    "train --recipe tiny --out {out} --src a.src --tgt a.tgt --valid-src v.src --valid-tgt v.tgt"
)
SETTINGS = [
    "model.width=16", "model.heads=2", "model.ffn_width=32", "model.encoder=transformer",
    "model.decoder=transformer", "text.tokenizer=characters",
    "text.byte_fallback=false", "text.vocab_size=40", "train.steps=8", "train.batch_tokens=100",
    "train.gradient_accumulation=2",
    "train.checkpoint_every=4", "train.validate_every=8", "train.validate_sentences=2",
    "train.device=cpu", "train.precision=float32",
]  # fmt: skip


def words(out: str) -> list[str]:
    return [
        *WORDS.format(out=out).split(),
        *(word for each in SETTINGS for word in ("--set", each)),
    ]


def start_ranks(folder, out: str) -> subprocess.CompletedProcess[str]:
    """Run the command in two processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
    }
    return subprocess.run(
        [sys.executable, *launcher, "-m", "dragoman", *words(out)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def losses(folder, out: str) -> list[float]:
    lines = (folder / out / "training" / "log.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "event" not in record]


def test_two_ranks_train_as_one_does(backwards, monkeypatch):
    """Several ranks start and resume with one command, and do not hang (OpenNMT-py#1981)."""
    monkeypatch.setenv("DRAGOMAN_CACHE", str(cache_with_kernels(backwards / "cache")))
    monkeypatch.chdir(backwards)
    assert main(words("one")) == 0
    done = start_ranks(backwards, "two")
    assert done.returncode == 0, done.stderr
    assert losses(backwards, "two") == pytest.approx(losses(backwards, "one"), rel=1e-5)
    assert len(losses(backwards, "two")) == 8
    assert (backwards / "two" / "weights.safetensors").exists()
    again = start_ranks(backwards, "two")
    assert again.returncode == 0
    assert "nothing to do" in again.stderr
