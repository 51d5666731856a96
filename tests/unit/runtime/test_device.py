"""Devices: the GPU of a rank, the fallback to the CPU, and how hardware is described."""

from __future__ import annotations

import logging

import pytest
import torch

from dragoman.errors import ConfigError
from dragoman.runtime import device as devices
from dragoman.runtime.device import (
    describe_hardware,
    parse_rank_variable,
    run_with_cpu_fallback,
    select_train_device,
)

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_warned", set())
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let torch report two GPUs; return those that are made current."""
    current = list[torch.device]()
    monkeypatch.setattr(devices, "cuda_problem", lambda *_, **__: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    return current


def test_out_of_memory_on_a_gpu_runs_on_the_cpu_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    used = list[str]()

    def make(device: torch.device) -> str:
        used.append(device.type)
        if device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "made"

    with caplog.at_level(logging.WARNING):
        assert [run_with_cpu_fallback(GPU, make) for _ in range(2)] == ["made", "made"]
    assert used == ["cuda", "cpu"] * 2
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "the model does not fit into the memory of cuda"
    ]


@pytest.mark.parametrize(
    ("device", "error"),
    [(GPU, RuntimeError("shapes do not match")), (CPU, MemoryError()), (GPU, ValueError("no"))],
)
def test_other_errors_are_raised_without_a_second_attempt(
    device: torch.device, error: Exception
) -> None:
    used = list[torch.device]()

    def make(each: torch.device) -> None:
        used.append(each)
        raise error

    with pytest.raises(type(error)):
        run_with_cpu_fallback(device, make)
    assert used == [device]


@pytest.mark.parametrize(
    ("wanted", "rank", "found"),
    [("auto", None, "cuda:0"), ("cuda", "1", "cuda:1"), ("cuda:1", "0", "cuda:1")],
)
def test_each_rank_trains_on_its_own_gpu(
    two_gpus: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    rank: str | None,
    found: str,
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert str(select_train_device(wanted)) == found
    assert [str(each) for each in two_gpus] == ([] if ":" in wanted else [found])


def test_more_ranks_than_gpus_are_an_error(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="found 2 for process 3"):
        select_train_device("cuda")
    assert two_gpus == []


@pytest.mark.parametrize("world", [None, "", "1"])
def test_a_single_process_without_its_gpu_trains_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, world: str | None
) -> None:
    monkeypatch.setattr(devices, "cuda_problem", lambda *_, **__: "torch sees no GPU here")
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    assert select_train_device("cuda") == CPU


def test_hardware_is_described_with_its_processes() -> None:
    alone = describe_hardware(CPU, 1)
    assert alone.startswith(f"{torch.get_num_threads()} of ")
    assert describe_hardware(CPU, 4) == f"4 processes, each on {alone}"
    assert describe_hardware(torch.device("mps"), 1) == "mps"


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x"])
def test_a_rank_that_is_no_number_is_an_error(text: str) -> None:
    assert parse_rank_variable({"RANK": "12"}, "RANK") == 12
    with pytest.raises(ConfigError, match=f"RANK must be an integer; found '{text}'"):
        parse_rank_variable({"RANK": text}, "RANK")
