"""Several processes train as one, and none outlives the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fault_processes import ROOT, ChildProcess, last_step, show, wait_for_step
from training_kit import log_of, tensors_of

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(
    fork_server, directory: Path, ranks: int, *, faults: dict[int, str] | None = None, **settings
) -> list[ChildProcess]:
    """Start ranks as torchrun would, but forked from a process that has imported everything."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        fork_server.start(
            directory.with_name("output"),
            module="fault_rank",
            fault=(faults or {}).get(rank, ""),
            loop={
                "directory": str(directory),
                "environment": shared | {"RANK": str(rank)},
                **settings,
            },
        )
        for rank in range(ranks)
    ]


def run_ranks(fork_server, directory: Path, ranks: int, **settings) -> list[int]:
    return [child.wait() for child in start_ranks(fork_server, directory, ranks, **settings)]


def traced(directory: Path, rank: int = 0) -> dict[int, list]:
    lines = (directory.parent / f"trace-{rank}.jsonl").read_text().splitlines()
    return {record["step"]: record["examples"] for record in map(json.loads, lines)}


def shapes_of(directory: Path) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors_of(directory).items()}


def steps_of(directory: Path) -> list[dict]:
    return [record for record in log_of(directory) if "nll" in record]


@pytest.mark.parametrize(
    ("ranks", "steps", "settings"),
    [
        pytest.param(
            2,
            100,
            {"gradient_accumulation": 2, "dropout": 0.1},
            id="micro-batches shared out, with dropout",
        ),
        pytest.param(
            2,
            40,
            {"gradient_accumulation": 2, "layer_drop": 0.4},
            id="each leaves out other layers",
        ),
        pytest.param(2, 40, {"gradient_accumulation": 1}, id="rows shared out"),
        pytest.param(
            2,
            40,
            {"gradient_accumulation": 3, "dropout": 0.1, "fsdp": "on"},
            id="weights shared out, one rank idle at times",
        ),
        pytest.param(4, 40, {"gradient_accumulation": 4}, id="four ranks"),
        pytest.param(
            4,
            20,
            {"gradient_accumulation": 2, "fsdp": "on"},
            id="four ranks, weights and rows shared out",
        ),
        pytest.param(
            3, 100, {"gradient_accumulation": 2}, id="an odd number", marks=pytest.mark.slow
        ),
        pytest.param(
            3,
            100,
            {"gradient_accumulation": 2, "fsdp": "on"},
            id="an odd number, shared out",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_several_ranks_equal_one(fork_server, tmp_path, ranks, steps, settings):
    """The same losses on the same global batch, up to rounding, for up to a hundred steps.

    The same examples in each step.
    """
    one, several = tmp_path / "one" / "run", tmp_path / "several" / "run"
    rarely = {"steps": steps, "checkpoint_every": steps // 2, "validate_every": steps // 2}
    assert run_ranks(fork_server, one, 1, **rarely, **settings) == [0]
    assert run_ranks(fork_server, several, ranks, **rarely, **settings) == [0] * ranks, (
        several.with_name("output").read_text()
    )
    first, second = steps_of(one), steps_of(several)
    assert [record["step"] for record in second] == list(range(1, steps + 1))
    assert [record["tokens"] for record in first] == [record["tokens"] for record in second]
    for name, near in (("loss", 1e-5), ("nll", 1e-5), ("grad_norm", 1e-4)):
        assert [record[name] for record in first] == pytest.approx(
            [record[name] for record in second], rel=near
        )
    worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(first, second, strict=True))
    show(
        "ranks",
        {
            "ranks": ranks,
            **settings,
            "updates": steps,
            "largest relative difference of a loss": worst,
        },
    )
    assert traced(one) == traced(several, 0) == traced(several, ranks - 1)
    validations = [
        [record["loss"] for record in log_of(each) if record.get("event") == "validation"]
        for each in (one, several)
    ]
    assert validations[0] == pytest.approx(validations[1], rel=1e-5)
    assert shapes_of(one) == shapes_of(several)  # whoever wrote them, in however many files


def test_not_finite_on_one_rank_is_skipped_on_both(fork_server, tmp_path):
    directory = tmp_path / "run"
    assert run_ranks(fork_server, directory, 2, steps=8, gradient_accumulation=2, nan=[1, 5]) == [
        0,
        0,
    ]
    assert [record["step"] for record in log_of(directory) if record.get("skipped")] == [5]
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(directory).values())


def test_a_signal_to_one_rank_stops_both_after_the_same_step(fork_server, tmp_path):
    directory = tmp_path / "run"
    ranks = start_ranks(
        fork_server,
        directory,
        2,
        steps=2000,
        gradient_accumulation=2,
        checkpoint_every=500,
        pause=0.02,
    )
    wait_for_step(directory, 5)
    ranks[1].send(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [75, 75]
    stopped = max(traced(directory, 0))
    assert stopped == max(traced(directory, 1)) == last_step(directory)
    assert json.loads((directory / "status.json").read_text())["exit_code"] == 75
    assert run_ranks(
        fork_server, directory, 2, steps=stopped + 3, gradient_accumulation=2, checkpoint_every=500
    ) == [0, 0]
    assert [record["step"] for record in steps_of(directory)] == list(range(1, stopped + 4))


def test_rank_whose_peer_died_exits_soon_and_publishes_nothing(fork_server, tmp_path):
    directory = tmp_path / "run"
    ranks = start_ranks(
        fork_server,
        directory,
        2,
        steps=2000,
        gradient_accumulation=2,
        checkpoint_every=1000,
        validate_every=1000,
        pause=0.02,
    )
    wait_for_step(directory, 5)
    ranks[1].send()
    assert [rank.wait() for rank in ranks] == [75, -9]
    assert not list(directory.glob("step-*"))
    assert (
        "all ranks of a run must stay alive; found on rank 0:"
        in directory.with_name("output").read_text()
    )
    assert json.loads((directory / "status.json").read_text())["exit_code"] == 75


def test_the_number_of_ranks_may_change_at_a_resume(fork_server, tmp_path):
    """The global batch does not depend on the ranks: 1, 2 and 1 again see the same examples."""
    directory, whole = tmp_path / "changing" / "run", tmp_path / "whole" / "run"
    for ranks, steps in ((1, 6), (2, 12), (1, 18)):
        assert (
            run_ranks(fork_server, directory, ranks, steps=steps, gradient_accumulation=2)
            == [0] * ranks
        )
    assert run_ranks(fork_server, whole, 1, steps=18, gradient_accumulation=2) == [0]
    assert traced(directory) == traced(whole)
    losses = [[record["loss"] for record in steps_of(each)] for each in (directory, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def torchrun(directory: Path, ranks: int, **settings) -> subprocess.Popen:
    directory.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(HERE / "fault_rank.py"),
    ]
    command.append(json.dumps({"directory": str(directory), **settings}))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with directory.with_name("output").open("a") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )


def pids(directory: Path, ranks: int) -> list[int]:
    lines = [
        (directory.parent / f"trace-{rank}.jsonl").read_text().splitlines()[-1]
        for rank in range(ranks)
    ]
    return [json.loads(line)["pid"] for line in lines]


def gone(numbers: list[int], seconds: float) -> float:
    """Wait until no process of these is left; returns the seconds it took."""
    began = time.monotonic()
    while any(alive(number) for number in numbers):
        assert time.monotonic() - began < seconds, (
            f"{[n for n in numbers if alive(n)]} still there after {seconds} s"
        )
        time.sleep(0.05)
    return time.monotonic() - began


def alive(number: int) -> bool:
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(number, 0)
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "times", "number", "limit", "fsdp"),
    [
        ("rank", 10, signal.SIGKILL, 5.0, "off"),
        ("rank", 3, signal.SIGKILL, 30.0, "on"),
        ("launcher", 3, signal.SIGKILL, 5.0, "off"),
        ("rank", 3, signal.SIGSTOP, 10.0 + 15.0 + 35.0, "off"),
    ],
    ids=["kill a rank", "kill a rank that holds a share", "kill the launcher", "stop a rank"],
)
def test_under_torchrun_no_rank_survives(tmp_path, killed, times, number, limit, fsdp):
    """Ranks outlive a killed torchrun unless they set PDEATHSIG.

    The run then resumes.
    """
    directory = tmp_path / "run"
    took = []
    for time_number in range(times):
        launcher = torchrun(
            directory,
            2,
            steps=100_000,
            gradient_accumulation=2,
            checkpoint_every=10,
            timeout=10.0,
            pause=0.005,
            fsdp=fsdp,
        )
        try:
            wait_for_step(directory, 12 * (time_number + 1))
            ranks = pids(directory, 2)
            target = launcher.pid if killed == "launcher" else ranks[time_number % 2]
            os.kill(target, number)
            watched = [rank for rank in ranks if rank != target or number == signal.SIGKILL]
            took.append(gone(watched, limit))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait(timeout=60)
            for rank in pids(directory, 2):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
    show(
        "ranks",
        {
            "killed": killed,
            "fsdp": fsdp,
            "signal": number.name,
            "times": times,
            "slowest": round(max(took), 2),
        },
    )
