"""Bit flips, truncations and edited headers are detected, with the name of the file."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import time

import pytest
from fault_processes import loop, newest_step, show

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import CorruptError
from dragoman.storage import manifest


@pytest.fixture(scope="module")
def whole(fork_server, memory):
    """A run with two checkpoints, the newest of which is damaged."""
    directory = memory / "whole"
    assert loop(fork_server, directory, steps=8, every=4).wait() == 0
    shutil.rmtree(directory / "keep")  # its hard links would be damaged with the step
    assert RunDirectory(directory).steps() == [4, 8]
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def damage_newest_checkpoint(whole, caplog):
    """Damage one file of the newest checkpoint, search for the newest, and restore the file."""
    step = whole / "step-00000008"

    def change(name: str, data: bytes) -> None:
        good = (step / name).read_bytes()
        assert data != good
        (step / name).write_bytes(data)
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                assert newest_step(whole) == 4, name
            assert str(step / name) in caplog.text
        finally:
            (step / name).write_bytes(good)

    return change


def files(whole) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((whole / "step-00000008").iterdir())}


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def header_end(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_a_hundred_bit_flips(whole, damage_newest_checkpoint, fault_seed):
    """Safetensors itself notices none of a hundred flips among its numbers."""
    choose, content = random.Random(fault_seed), files(whole)
    began = time.monotonic()
    for _ in range(100):
        name = choose.choices(list(content), weights=[len(data) for data in content.values()])[0]
        damage_newest_checkpoint(
            name, flipped(content[name], choose.randrange(len(content[name]) * 8))
        )
    show(
        "damage",
        {
            "bit_flips": 100,
            "noticed": 100,
            "seconds_each": round((time.monotonic() - began) / 100, 3),
        },
    )


def test_twenty_truncations(whole, damage_newest_checkpoint, fault_seed):
    choose, content = random.Random(fault_seed), files(whole)
    for number in range(20):
        name = list(content)[number % len(content)]
        damage_newest_checkpoint(name, content[name][: choose.randrange(len(content[name]))])
    show("damage", {"truncations": 20, "noticed": 20})


def test_twenty_edits_of_headers_and_manifests(whole, damage_newest_checkpoint, fault_seed):
    choose, content = random.Random(fault_seed), files(whole)
    for number in range(10):
        name = [each for each in content if each.endswith(".safetensors")][number % 3]
        damage_newest_checkpoint(
            name, flipped(content[name], choose.randrange(header_end(content[name]) * 8))
        )
    good = content[manifest.MANIFEST_NAME]
    values = json.loads(good)
    edits = [
        values | {"step": 9},
        values | {"format": 2},
        values | {"metrics": {"loss": 0.0}},
        values | {"run_id": "another"},
        values | {"extra": 1},
        {key: value for key, value in values.items() if key != "env"},
        values
        | {
            "files": {
                name: record
                for name, record in values["files"].items()
                if name != "ema.safetensors"
            }
        },
        values | {"files": values["files"] | {"../outside": {"bytes": 1, "sha256": ""}}},
        values | {"files": values["files"] | {"state.json": {"bytes": 1, "sha256": ""}}},
    ]
    for edit in edits:
        damage_newest_checkpoint(manifest.MANIFEST_NAME, manifest.canonical_json(edit))
    damage_newest_checkpoint(manifest.MANIFEST_NAME, good.replace(b"\n", b"\r\n"))
    show("damage", {"edits": 20, "noticed": 20})


@pytest.mark.slow
def test_every_bit_of_a_manifest_and_of_a_header(whole, damage_newest_checkpoint):
    content = files(whole)
    for bit in range(len(content[manifest.MANIFEST_NAME]) * 8):
        damage_newest_checkpoint(
            manifest.MANIFEST_NAME, flipped(content[manifest.MANIFEST_NAME], bit)
        )
    name = "ema.safetensors"
    for bit in range(header_end(content[name]) * 8):
        damage_newest_checkpoint(name, flipped(content[name], bit))
    show(
        "damage",
        {
            "exhaustive_flips": 8
            * (len(content[manifest.MANIFEST_NAME]) + header_end(content[name]))
        },
    )


def test_run_resumes_from_the_previous_checkpoint(fork_server, reference, run_path):
    want, _ = reference()
    assert loop(fork_server, run_path, steps=8).wait() == 0
    path = run_path / "step-00000008" / "optimizer.safetensors"
    path.write_bytes(flipped(path.read_bytes(), 12345))
    assert loop(fork_server, run_path).wait() == 0
    [bad] = run_path.glob("bad-step-00000008-*")
    assert "optimizer.safetensors" in (bad / "WHY.txt").read_text()
    newest = RunDirectory(run_path).latest()
    assert newest is not None
    assert {"step": "12"} | {
        n: r["sha256"] for n, r in newest.manifest["files"].items() if n != "state.json"
    } == want


def test_all_steps_damaged_is_exit_65_and_nothing_is_deleted(fork_server, run_path):
    assert loop(fork_server, run_path, steps=8).wait() == 0
    for step in (4, 8):
        os.truncate(run_path / f"step-{step:08d}" / "weights.safetensors", 100)
    before = sum(path.stat().st_size for path in run_path.rglob("*.safetensors"))
    for _ in range(2):
        assert loop(fork_server, run_path).wait() == 65
    assert "2 checkpoints, none valid" in run_path.with_name("run.output").read_text()
    assert sum(path.stat().st_size for path in run_path.rglob("*.safetensors")) == before
    with pytest.raises(CorruptError, match="none valid"):
        RunDirectory(run_path).latest()
