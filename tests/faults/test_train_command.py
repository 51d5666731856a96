"""Crash safety of `dragoman train`: kills, signals and full disks."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from fault_processes import (
    ROOT,
    command,
    fingerprint,
    last_step,
    leftovers,
    logged,
    losses,
    newest_step,
    show,
    wait_for_step,
)

SYLLABLES = [first + second for first in "bdkm" for second in "aeiou"]
SETTINGS = (
    "text.tokenizer=characters",
    "model.width=32",
    "model.heads=2",
    "model.ffn_width=64",
    "model.encoder=[transformer]",
    "model.decoder=[transformer]",
    "train.batch_tokens=400",
    "train.checkpoint_every=5",
    "train.validate_every=20",
    "train.validate_sentences=2",
    "decode.beam=1",
    "decode.max_length_ratio=1",
    "decode.max_length_extra=4",
    "train.best_metric=loss",
    "train.threads=1",
)


@pytest.fixture(scope="session")
def corpus(memory):
    """Sentences of syllables, and the same backwards."""
    folder, choose = memory / "corpus", random.Random(0)
    folder.mkdir()
    for name, count in (("train", 400), ("valid", 6)):
        lines = [
            [choose.choice(SYLLABLES) for _ in range(choose.randint(2, 7))] for _ in range(count)
        ]
        (folder / f"{name}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{name}.tgt").write_text(
            "".join(" ".join(reversed(line)) + "\n" for line in lines)
        )
    return folder


@pytest.fixture(scope="session")
def train(fork_server, corpus):
    """Start `dragoman train` with small settings."""

    def start(out: Path, *, steps: int = 40, settings: tuple[str, ...] = (), **faults):
        return command(
            fork_server,
            out.with_name(out.name + ".output"),
            *words_for(corpus, out, steps, settings),
            **faults,
        )

    return start


def words_for(corpus: Path, out: Path, steps: int, settings: tuple[str, ...] = ()) -> list[str]:
    words = ["train", "--recipe", "tiny", "--out", str(out)]
    for side in ("src", "tgt"):
        words += [
            f"--{side}",
            str(corpus / f"train.{side}"),
            f"--valid-{side}",
            str(corpus / f"valid.{side}"),
        ]
    for setting in (
        *SETTINGS,
        f"train.steps={steps}",
        f"data.cache_dir={out.parent / 'cache'}",
        *settings,
    ):
        words += ["--set", setting]
    return words


@pytest.fixture(scope="session")
def whole(train, memory):
    """Train without faults, once for each length, and cache the results."""
    known = {}

    def run(steps: int = 40):
        if steps not in known:
            out = memory / f"whole-{steps}" / "model"
            out.parent.mkdir()
            assert train(out, steps=steps).wait() == 0, out.with_name("model.output").read_text()
            known[steps] = outcome(out)
        return known[steps]

    return run


@pytest.fixture
def out(memory):
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "model"


def outcome(out: Path) -> dict:
    weights = hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()
    return {
        "weights": weights,
        "step": fingerprint(out / "training"),
        "log": logged(out / "training"),
    }


def read_output(out: Path) -> str:
    return out.with_name("model.output").read_text()


def status(out: Path) -> dict:
    return json.loads((out / "training" / "status.json").read_text())


def killed_at(train, out: Path, update: int, **faults) -> None:
    """Start the command and kill it soon after a step."""
    child = train(out, **faults)
    wait_for_step(out / "training", update, child)
    child.send()
    assert child.wait() == -9, read_output(out)


def kill_often(train, out, *, steps, kills, choose) -> int:
    """Kill the command at random times; return the most steps lost by one kill."""
    most, run = 0, out / "training"
    targets = [0] * (kills // 4) + sorted(choose.sample(range(1, steps - 5), kills - kills // 4))
    for target in targets:
        child = train(out, steps=steps)
        if target:
            wait_for_step(run, target, child)
        time.sleep(choose.uniform(0, 0.03) if target else choose.uniform(0, 1.0))
        child.send()
        assert child.wait() == -9, read_output(out)
        most = max(most, last_step(run) - newest_step(run))
    assert train(out, steps=steps).wait() == 0, read_output(out)
    return most


@pytest.mark.parametrize(
    ("steps", "kills"),
    [pytest.param(40, 4, id="quick"), pytest.param(400, 30, id="full", marks=pytest.mark.slow)],
)
def test_kills_end_in_the_same_weights(train, whole, out, fault_seed, steps, kills):
    """The same command resumes, bit for bit (Locomotive#29, joeynmt#125, OpenNMT-py#2006)."""
    want, began = whole(steps), time.monotonic()
    most = kill_often(train, out, steps=steps, kills=kills, choose=random.Random(fault_seed))
    assert outcome(out) == want
    assert most <= 5
    assert all(len(seen) == 1 for seen in losses(out / "training").values())
    assert leftovers(out / "training") == []
    assert leftovers(out) == []
    seconds = round(time.monotonic() - began, 1)
    show(
        "kills",
        {
            "command": "dragoman train",
            "kills": kills,
            "updates": steps,
            "most_replayed": most,
            "seconds": seconds,
        },
    )


# The throughput probe also passes the fault points of a step; test_trainer_kills.py covers those.
POINTS = ["valid.mid:2", "keep.rename:2", "prune.unlink:1"]


@pytest.mark.parametrize("point", POINTS)
def test_kill_at_a_named_point(train, whole, out, point):
    assert train(out, fault=f"{point}:kill").wait() == -9, read_output(out)
    assert train(out).wait() == 0, read_output(out)
    assert outcome(out) == whole()


def test_a_kill_while_the_bundle_is_written(train, whole, out):
    """Eight checkpoints, and then the bundle's own weights."""
    assert train(out, fault="publish.write.weights.safetensors:9:kill").wait() == -9, read_output(
        out
    )
    assert not (out / "manifest.json").exists()
    assert leftovers(out) != []
    assert train(out).wait() == 0, read_output(out)
    assert outcome(out) == whole()
    assert leftovers(out) == []


def test_wall_clock_changes_have_no_effect(train, whole, out):
    """Machines whose clocks are years apart take turns."""
    year = 365 * 86400
    killed_at(train, out, 8, clock=10 * year)
    killed_at(train, out, 17, clock=-year)
    assert train(out, clock=3 * year).wait() == 0, read_output(out)
    assert outcome(out) == whole()
    assert leftovers(out / "training") == []
    show("clock", {"clocks": [10, -1, 3], "same_weights": True})


def test_a_signal_stops_saves_and_reports_how_to_continue(train, whole, out):
    for number, target in ((signal.SIGTERM, 7), (signal.SIGINT, 18)):
        target = max(target, last_step(out / "training") + 1)
        child = train(out)
        wait_for_step(out / "training", target, child)
        child.send(number)
        assert child.wait() == 75, read_output(out)
        assert newest_step(out / "training") == last_step(out / "training")
        assert status(out)["exit_code"] == 75
        assert number.name in status(out)["reason"]
        step = newest_step(out / "training")
        assert (
            f"dragoman: stopped at step {step}, checkpoint saved; resume with: dragoman train "
            f"--out {out} --resume" in read_output(out)
        )
    assert train(out).wait() == 0
    assert outcome(out) == whole()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs /proc to see when the handlers stand"
)
def test_a_signal_before_the_imports_are_done(corpus, out):
    """`python -m dragoman train` keeps a signal that comes while torch is being imported."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dragoman", *words_for(corpus, out, 40)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    while not catches(process.pid, signal.SIGTERM):
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    error_text = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() == 75, error_text
    assert "SIGTERM" in error_text


def catches(pid: int, number: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    return bool(caught >> (number - 1) & 1)


def test_full_disk_exits_74_and_resumes_with_free_space(train, whole, out):
    assert train(out, file_limit=100_000).wait() == 74, read_output(out)
    assert (
        train(out, fault=",".join(f"publish.mkdir:{n}:enospc" for n in range(4, 20))).wait() == 74
    ), read_output(out)
    assert newest_step(out / "training") == 15
    assert status(out)["exit_code"] == 74
    assert train(out).wait() == 0, read_output(out)
    assert outcome(out) == whole()


def test_a_second_trainer_is_exit_73(train, whole, out):
    first = train(out, fault="valid.mid:1:sleep")
    wait_for_step(out / "training", 20, first)
    assert train(out).wait() == 73, read_output(out)
    assert f"process {first.pid} on" in read_output(out)
    assert first.wait() == 0
    assert outcome(out) == whole()


@pytest.mark.skipif(
    os.getuid() != 0, reason="only root can switch to a user without write permission"
)
def test_no_permission_is_exit_77(train, whole, corpus):
    whole()  # imported now, since the other user may lack read permission
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        readable = Path(folder) / "corpus"
        shutil.copytree(corpus, readable)
        out = Path(folder) / "model"
        out.mkdir(mode=0o555)
        (Path(folder) / "cache").mkdir()
        (Path(folder) / "cache").chmod(0o777)
        assert train(out, user=65534).wait() == 77, read_output(out)
        assert os.listdir(out) == []


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(train, whole, out):
    killed_at(train, out, 23)
    path = out / "training" / f"step-{newest_step(out / 'training'):08d}" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[5000] ^= 4
    path.write_bytes(data)
    assert train(out).wait() == 0, read_output(out)
    assert str(path) in read_output(out)
    assert outcome(out) == whole()


def test_all_checkpoints_damaged_is_exit_65(train, out):
    killed_at(train, out, 6)
    for path in (out / "training").glob("step-*/weights.safetensors"):
        os.truncate(path, 100)
    assert train(out).wait() == 65, read_output(out)
    assert "checkpoints, none valid" in read_output(out)
    assert list((out / "training").glob("bad-step-*/weights.safetensors"))


def test_a_changed_corpus_is_rejected(train, out, corpus, memory):
    killed_at(train, out, 6)
    lines = (corpus / "train.tgt").read_text()
    try:
        (corpus / "train.tgt").write_text(lines.replace("ba", "mu", 1))
        assert train(out).wait() == 65, read_output(out)
    finally:
        (corpus / "train.tgt").write_text(lines)
    assert newest_step(out / "training") >= 5


def test_a_changed_configuration_is_rejected(train, out):
    killed_at(train, out, 6)
    assert train(out, settings=("model.width=64",)).wait() == 2, read_output(out)
    assert "model.width" in read_output(out)
    assert newest_step(out / "training") >= 5
