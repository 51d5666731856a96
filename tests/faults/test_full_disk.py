"""A full disk ends a run with exit code 74 and loses nothing; it resumes with space again."""

from __future__ import annotations

import subprocess
import time

import pytest
from fault_processes import fingerprint, leftovers, logged, loop, newest_step, reported, show

from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.storage.disk_space_and_errors import free_disk_bytes


def sizes(directory) -> dict[str, int]:
    newest = RunDirectory(directory).latest()
    assert newest is not None
    return {name: record["bytes"] for name, record in newest.manifest["files"].items()}


def test_file_limits(fork_server, reference, run_path):
    """No file may grow past a limit: at five sizes, from the smallest that stops the first save."""
    want, log = reference()
    stopped = 0
    for limit in (2_000, 50_000, 200_000, 250_000, 400_000):
        code = loop(fork_server, run_path, steps=8, every=2, file_limit=limit).wait()
        assert code == 74, limit
        assert newest_step(run_path) >= reported(run_path)
        stopped += 1
    assert newest_step(run_path) == 0
    assert "File too large" in run_path.with_name("run.output").read_text()
    assert loop(fork_server, run_path).wait() == 0
    assert leftovers(run_path) == []
    assert fingerprint(run_path) == want
    assert logged(run_path) == log
    show("disk-full", {"file_limits": stopped, "exit_74": stopped})


@pytest.mark.parametrize("action", ["enospc", "short"])
def test_full_disk_exits_74_and_keeps_the_newest_checkpoint(
    fork_server, reference, run_path, action
):
    want, _ = reference(40, 2)
    passages = ",".join(f"publish.write.state.json:{number}:{action}" for number in range(3, 30))
    assert loop(fork_server, run_path, steps=40, every=2, keep=1, fault=passages).wait() == 74
    assert newest_step(run_path) == 4
    assert "training continues" in run_path.with_name("run.output").read_text()
    assert loop(fork_server, run_path, steps=40, every=2).wait() == 0
    assert fingerprint(run_path) == want


@pytest.fixture
def small_disk(tmp_path):
    """Mount file systems in memory of a given size; needs the rights to."""
    mounted = []

    def mount(size: int):
        run_path = tmp_path / f"disk-{size}"
        run_path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(run_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
        mounted.append(run_path)
        return run_path

    yield mount
    for run_path in mounted:
        subprocess.run(["umount", str(run_path)], check=True)


@pytest.mark.root
def test_small_file_systems(fork_server, reference, run_path, small_disk):
    assert loop(fork_server, run_path, steps=4).wait() == 0
    one = sum(sizes(run_path).values())
    rejected = stopped = 0
    for fraction in (
        0.5,
        1.5,
        2.5,
        3.5,
        4.5,
    ):  # the start asks for three checkpoints and a margin: 3.6
        run = small_disk(int(one * fraction)) / "run"
        code = loop(fork_server, run, keep=2).wait()
        assert code == (74 if fraction < 3.6 else 0), fraction
        assert newest_step(run) == (0 if code else 12)
        rejected += code == 74
    for fraction in (5, 6, 7, 8, 9):  # free space at the start, then another program takes it
        disk = small_disk(int(one * fraction))
        run = disk / "run"
        child = loop(fork_server, run, steps=40, every=2, pause=0.01)
        while 4 not in RunDirectory(run).steps():
            time.sleep(0.001)
        fill(disk, leave=int(one * 0.3))
        assert child.wait() == 74, fraction
        assert newest_step(run) >= max(4, reported(run))
        stopped += 1
        (disk / "filler").unlink()
        assert loop(fork_server, run, steps=40, every=2).wait() == 0
        assert leftovers(run) == []
        assert fingerprint(run) == reference(40, 2)[0]
    show(
        "disk-full",
        {"small_disks_refused_at_start": rejected, "filled_while_running_exit_74": stopped},
    )


def fill(disk, leave: int) -> None:
    """Fill the disk from another process."""
    with (disk / "filler").open("wb") as file:
        while (free := free_disk_bytes(disk)) > leave:
            file.write(b"\0" * min(65536, free - leave))
            file.flush()
