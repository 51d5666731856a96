"""One process among several: what it makes of its environment, and what it says when the others are silent."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

from dragoman import stopping
from dragoman.errors import ConfigError, StoppedError
from dragoman.training import distributed, heartbeat
from dragoman.training.distributed import World, join_world, local_rank
from dragoman.training.heartbeat import Heartbeat

CPU = torch.device("cpu")


class Store:
    """torch's rendezvous store, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def worlds(store):
    made: list[World] = []

    def make(rank: int, timeout: float = 30.0) -> World:
        made.append(World(rank, 2, store=store, timeout=timeout))
        return made[-1]

    yield make
    for world in reversed(made):
        world._alone = True
        world.close()


def test_without_a_launcher_we_are_alone() -> None:
    world = join_world(CPU, environment={})
    assert (world.rank, world.size, world.leads) == (0, 1, True)
    assert world.share(lambda: {"a": 1}, "add") == {"a": 1}
    values = torch.ones(3)
    world.all_reduce(values, "sum")
    world.broadcast([values])
    assert values.tolist() == [1, 1, 1]
    world.check_parent()
    world.close()


def test_an_environment_that_is_half_there_is_refused() -> None:
    """A start that hangs without a word (OpenNMT-py#1981, #954, #1487)."""
    with pytest.raises(ConfigError, match="found MASTER_ADDR, MASTER_PORT unset; start it with torchrun"):
        join_world(CPU, environment={"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK must be a whole number; found 'first'"):
        join_world(CPU, environment={"RANK": "first", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="LOCAL_RANK must be a whole number; found 'x'"):
        local_rank({"LOCAL_RANK": "x"})
    assert local_rank({"LOCAL_RANK": "3"}) == 3
    assert local_rank({}) == 0


def test_what_rank_0_computes_all_have(worlds) -> None:
    first, second = worlds(0), worlds(1)
    heard = []
    listener = threading.Thread(target=lambda: heard.append(second.share(lambda: pytest.fail("only rank 0 computes"), "count")))
    listener.start()
    assert first.share(lambda: {"bleu": 30.5}, "count") == {"bleu": 30.5}
    listener.join(timeout=10)
    assert heard == [{"bleu": 30.5}]


def test_an_error_of_rank_0_reaches_the_others(worlds) -> None:
    first, second = worlds(0), worlds(1)

    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        first.share(fail, "publish step 5")
    with pytest.raises(StoppedError, match=r"found on rank 1: rank 0 could not publish step 5: OSError: disk full"):
        second.share(lambda: None, "publish step 5")


def test_a_silent_rank_0_is_given_up(worlds) -> None:
    second = worlds(1, timeout=0.3)
    with pytest.raises(StoppedError, match=r"found on rank 1: no sign of rank 0 for 0 s while waiting for it to validate"):
        second.share(lambda: None, "validate")


def test_asked_to_stop_a_rank_does_not_wait_long_for_the_dead(worlds, monkeypatch) -> None:
    monkeypatch.setattr(distributed, "SILENCE_SECONDS", 0.1)
    second = worlds(1, timeout=3600.0)
    stopping.request("SIGTERM")
    try:
        with pytest.raises(StoppedError, match="no sign of rank 0"):
            second.share(lambda: None, "validate")
    finally:
        stopping.uninstall()


def test_a_launcher_that_is_gone_takes_us_along(worlds, monkeypatch) -> None:
    world = worlds(1)
    monkeypatch.setattr("os.getppid", lambda: 1)
    with pytest.raises(StoppedError, match="found on rank 1: the launcher is gone"):
        world.check_parent()


def test_a_broken_collective_is_one_sentence(worlds, monkeypatch) -> None:
    world = worlds(0)

    def broken(tensor):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr("torch.distributed.all_reduce", broken)
    with pytest.raises(StoppedError, match=r"found on rank 0: Connection closed by peer \[127\.0\.0\.1\]:1234; run the same command"):
        world.all_reduce(torch.zeros(1), "summing")
    assert world._alone


def test_everybody_says_what_it_is_at(worlds, store) -> None:
    worlds(0).doing("validating")
    deadline = time.monotonic() + 10
    while "validating" not in store.values.get("beat/0", b"").decode() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert json.loads(store.values["beat/0"])["doing"] == "validating"


def test_a_long_wait_names_who_is_waited_for(store, caplog, monkeypatch) -> None:
    """Sixty seconds, then a line that says which rank waits for what (OpenNMT-py#1981; allenai/allennlp#5088)."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    other = Heartbeat(store, rank=1, size=2, patience=60.0)
    other.doing("reading the data")
    first = Heartbeat(store, rank=0, size=2, patience=0.1)
    first.doing("summing the gradients of update 7", waits=True)
    deadline = time.monotonic() + 10
    while "has waited" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    first.stop()
    other.stop()
    assert "summing the gradients of update 7" in caplog.text
    assert "rank 1 reading the data for" in caplog.text
    assert caplog.text.count("has waited") == 1


def test_a_rank_that_never_came_is_named(store) -> None:
    beat = Heartbeat(store, rank=0, size=2, patience=60.0)
    assert "rank 1 never heard of" in beat.others()
    beat.stop()
