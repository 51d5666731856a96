"""`torchrun --max-restarts`: after a rank dies, all ranks restart and the run resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernel_kit import cache_with_kernels

WORDS = (
    "train --recipe tiny --out {out} --src a.src --tgt a.tgt --valid-src v.src --valid-tgt v.tgt"
)
SETTINGS = [
    "model.width=16", "model.heads=2", "model.ffn_width=32", "model.encoder=transformer",
    "model.decoder=transformer", "text.tokenizer=characters",
    "text.byte_fallback=false", "text.vocab_size=40", "train.batch_tokens=100",
    "train.gradient_accumulation=2", "train.average_checkpoints=2",
    "train.checkpoint_every=10", "train.validate_every=60", "train.validate_sentences=2",
    "train.device=cpu", "train.precision=float32",
]  # fmt: skip


def start(folder: Path, out: str, *settings: str, ranks: int) -> subprocess.Popen:
    words = [
        *WORDS.format(out=out).split(),
        *(word for each in [*SETTINGS, *settings] for word in ("--set", each)),
    ]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--max-restarts=1",
        ]
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DRAGOMAN_CACHE": str(cache_with_kernels(folder / "cache")),
        "PYTHONPATH": path,
    }
    with (folder / f"{out}.output").open("w") as output:
        return subprocess.Popen(
            [*launcher, "-m", "dragoman", *words],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def losses(folder: Path, out: str) -> list[float]:
    lines = (folder / out / "training" / "log.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "event" not in record]


def ranks_of(launcher: subprocess.Popen) -> list[int]:
    """Find the launcher's processes, first rank first."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher.pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    return sorted(int(word) for word in found.stdout.split())


def wait_for(true, what: str) -> None:
    for _ in range(6000):
        if true():
            return
        time.sleep(0.02)
    pytest.fail(f"{what} was never reached")


@pytest.mark.skipif(
    sys.platform != "linux", reason="finds processes in /proc, which only Linux has"
)
@pytest.mark.slow  # quick tests of ranks that are lost: tests/faults/test_ranks.py
@pytest.mark.parametrize("shard", ["on", "off"])
def test_a_killed_rank_restarts_the_run_without_changing_it(backwards, shard):
    """Both ranks resume from the latest checkpoint with the losses of an uninterrupted run."""
    options = ("train.steps=120", f"train.fsdp={shard}")
    quiet = start(backwards, "quiet", *options, ranks=1)
    assert quiet.wait(timeout=300) == 0, (backwards / "quiet.output").read_text()
    killed = start(backwards, "killed", *options, ranks=2)
    log = backwards / "killed" / "training" / "log.jsonl"
    try:
        wait_for(lambda: log.exists() and len(losses(backwards, "killed")) > 12, "update 12")
        os.kill(ranks_of(killed)[-1], signal.SIGKILL)
        assert killed.wait(timeout=300) == 0, (backwards / "killed.output").read_text()
    finally:
        if killed.poll() is None:
            os.killpg(killed.pid, signal.SIGKILL)
    assert losses(backwards, "killed") == pytest.approx(losses(backwards, "quiet"), rel=1e-5)
    assert len(losses(backwards, "killed")) == 120
    assert "resuming the run in" in (backwards / "killed.output").read_text()
    assert (backwards / "killed" / "weights.safetensors").exists()
    shards = list((backwards / "killed" / "training").glob("step-*/weights-1-of-2.safetensors"))
    assert bool(shards) is (shard == "on")
    words = ["average", "killed", "--last", "2", "--out", "averaged"]
    done = subprocess.run(
        [sys.executable, "-m", "dragoman", *words],
        cwd=backwards,
        capture_output=True,
        text=True,
        check=False,
        env=paths(),
    )
    assert done.returncode == 0, done.stderr
    verified = subprocess.run(
        [sys.executable, "-m", "dragoman", "verify", "killed"],
        cwd=backwards,
        capture_output=True,
        text=True,
        env=paths(),
    )
    assert verified.returncode == 0, verified.stderr


def paths() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
