"""R6: a full disk ends a run with exit code 74 and loses nothing; it resumes with space again."""

from __future__ import annotations

import subprocess
import time

import pytest
from fault_victims import fingerprint, leftovers, logged, loop, newest_step, reported, show

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.storage.disk import free_disk_bytes


def sizes(directory) -> dict[str, int]:
    newest = RunDirectory(directory).latest()
    assert newest is not None
    return {name: record["bytes"] for name, record in newest.manifest["files"].items()}


def test_file_limits(victims, reference, place):
    """No file may grow past a limit: at five sizes, from the smallest that stops the first save."""
    want, log = reference()
    stopped = 0
    for limit in (2_000, 50_000, 200_000, 250_000, 400_000):
        code = loop(victims, place, updates=8, every=2, file_limit=limit).wait()
        assert code == 74, limit
        assert newest_step(place) >= reported(place)
        stopped += 1
    assert newest_step(place) == 0
    assert "File too large" in place.with_name("run.output").read_text()
    assert loop(victims, place).wait() == 0
    assert leftovers(place) == []
    assert fingerprint(place) == want
    assert logged(place) == log
    show("R6", {"file_limits": stopped, "exit_74": stopped})


@pytest.mark.parametrize("action", ["enospc", "short"])
def test_full_disk_exits_74_and_keeps_the_newest_checkpoint(victims, reference, place, action):
    want, _ = reference(40, 2)
    passages = ",".join(f"publish.write.state.json:{number}:{action}" for number in range(3, 30))
    assert loop(victims, place, updates=40, every=2, keep=1, fault=passages).wait() == 74
    assert newest_step(place) == 4
    assert "training continues" in place.with_name("run.output").read_text()
    assert loop(victims, place, updates=40, every=2).wait() == 0
    assert fingerprint(place) == want


@pytest.fixture
def small_disk(tmp_path):
    """Mount file systems in memory of a given size; needs the rights to."""
    mounted = []

    def mount(size: int):
        place = tmp_path / f"disk-{size}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.root
def test_small_file_systems(victims, reference, place, small_disk):
    assert loop(victims, place, updates=4).wait() == 0
    one = sum(sizes(place).values())
    refused = stopped = 0
    for share in (
        0.5,
        1.5,
        2.5,
        3.5,
        4.5,
    ):  # the start asks for three checkpoints and a margin: 3.6
        run = small_disk(int(one * share)) / "run"
        code = loop(victims, run, keep=2).wait()
        assert code == (74 if share < 3.6 else 0), share
        assert newest_step(run) == (0 if code else 12)
        refused += code == 74
    for share in (5, 6, 7, 8, 9):  # free space at the start, then another program takes it
        disk = small_disk(int(one * share))
        run = disk / "run"
        victim = loop(victims, run, updates=40, every=2, pause=0.01)
        while 4 not in RunDirectory(run).steps():
            time.sleep(0.001)
        fill(disk, leave=int(one * 0.3))
        assert victim.wait() == 74, share
        assert newest_step(run) >= max(4, reported(run))
        stopped += 1
        (disk / "filler").unlink()
        assert loop(victims, run, updates=40, every=2).wait() == 0
        assert leftovers(run) == []
        assert fingerprint(run) == reference(40, 2)[0]
    show("R6", {"small_disks_refused_at_start": refused, "filled_while_running_exit_74": stopped})


def fill(disk, leave: int) -> None:
    """Fill the disk from another process."""
    with (disk / "filler").open("wb") as file:
        while (free := free_disk_bytes(disk)) > leave:
            file.write(b"\0" * min(65536, free - leave))
            file.flush()
