"""The process group: environment, results exchanged between ranks, and lost ranks."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
import torch

from dragoman.errors import ConfigError, StoppedError
from dragoman.runtime import signals
from dragoman.runtime.device import local_rank
from dragoman.training.distributed import heartbeat, process_group
from dragoman.training.distributed.heartbeat import Heartbeat
from dragoman.training.distributed.process_group import (
    ProcessGroup,
    agree_on_group_id,
    init_process_group,
)

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
    made: list[ProcessGroup] = []

    def make(rank: int, timeout: float = 30.0) -> ProcessGroup:
        made.append(ProcessGroup(rank, 2, store=store, timeout=timeout))
        return made[-1]

    yield make
    for world in reversed(made):
        world._peer_lost = True
        world.close()


def test_without_torchrun_there_is_one_rank() -> None:
    world = init_process_group(CPU, environment={})
    assert (world.rank, world.size, world.is_rank_zero) == (0, 1, True)
    assert world.run_on_rank_zero(lambda: {"a": 1}, "add") == {"a": 1}
    values = torch.ones(3)
    world.all_reduce(values, "sum")
    world.broadcast([values])
    assert values.tolist() == [1, 1, 1]
    world.check_launcher()
    world.close()


def test_incomplete_torchrun_environment_is_rejected() -> None:
    """A start that hangs silently (OpenNMT-py#1981, #954, #1487)."""
    with pytest.raises(
        ConfigError, match="found MASTER_ADDR, MASTER_PORT unset; start it with torchrun"
    ):
        init_process_group(CPU, environment={"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="RANK must be an integer; found 'first'"):
        init_process_group(CPU, environment={"RANK": "first", "WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="LOCAL_RANK must be an integer; found 'x'"):
        local_rank({"LOCAL_RANK": "x"})
    assert local_rank({"LOCAL_RANK": "3"}) == 3
    assert local_rank({}) == 0


def test_result_of_rank_zero_reaches_all_ranks(worlds) -> None:
    first, second = worlds(0), worlds(1)
    heard = []
    listener = threading.Thread(
        target=lambda: heard.append(
            second.run_on_rank_zero(lambda: pytest.fail("only rank 0 computes"), "count")
        )
    )
    listener.start()
    assert first.run_on_rank_zero(lambda: {"bleu": 30.5}, "count") == {"bleu": 30.5}
    listener.join(timeout=10)
    assert heard == [{"bleu": 30.5}]


def test_an_error_of_rank_0_reaches_the_others(worlds) -> None:
    first, second = worlds(0), worlds(1)

    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        first.run_on_rank_zero(fail, "publish step 5")
    with pytest.raises(
        StoppedError, match=r"found on rank 1: rank 0 could not publish step 5: OSError: disk full"
    ):
        second.run_on_rank_zero(lambda: None, "publish step 5")


def test_rank_zero_without_heartbeat_raises_stopped_error(worlds) -> None:
    second = worlds(1, timeout=0.3)
    with pytest.raises(
        StoppedError,
        match=r"found on rank 1: no heartbeat of rank 0 for 0 s while waiting for it to validate",
    ):
        second.run_on_rank_zero(lambda: None, "validate")


def test_stopping_rank_waits_shortly_for_a_dead_one(worlds, monkeypatch) -> None:
    monkeypatch.setattr(process_group, "STOPPING_RANK_TIMEOUT_SECONDS", 0.1)
    second = worlds(1, timeout=3600.0)
    signals.request_stop("SIGTERM")
    try:
        with pytest.raises(StoppedError, match="no heartbeat of rank 0"):
            second.run_on_rank_zero(lambda: None, "validate")
    finally:
        signals.uninstall_handlers()


def test_lost_launcher_raises_stopped_error(worlds, monkeypatch) -> None:
    world = worlds(1)
    monkeypatch.setattr("os.getppid", lambda: 1)
    with pytest.raises(StoppedError, match="found on rank 1: the launcher is gone"):
        world.check_launcher()


def test_broken_collective_raises_stopped_error(worlds, monkeypatch) -> None:
    world = worlds(0)

    def broken(tensor):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr("torch.distributed.all_reduce", broken)
    with pytest.raises(
        StoppedError,
        match=r"on rank 0: Connection closed by peer \[127\.0\.0\.1\]:1234; run the same command",
    ):
        world.all_reduce(torch.zeros(1), "summing")
    assert world._peer_lost


def test_heartbeat_writes_the_activity(worlds, store) -> None:
    worlds(0).set_activity("validating")
    deadline = time.monotonic() + 10
    while (
        "validating" not in store.values.get("beat/0", b"").decode() and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert json.loads(store.values["beat/0"])["activity"] == "validating"


def test_long_wait_warns_with_the_ranks_activity(store, caplog, monkeypatch) -> None:
    """Sixty seconds, then a warning with the rank and what it waits for (OpenNMT-py#1981,
    allenai/allennlp#5088).
    """
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.02)
    other = Heartbeat(store, rank=1, size=2, patience=60.0)
    other.set_activity("reading the data")
    first = Heartbeat(store, rank=0, size=2, patience=0.1)
    first.set_activity("summing the gradients of update 7", waits=True)
    deadline = time.monotonic() + 10
    while "has waited" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    first.stop()
    other.stop()
    assert "summing the gradients of update 7" in caplog.text
    assert "rank 1: reading the data for" in caplog.text
    assert caplog.text.count("has waited") == 1


def test_a_rank_that_never_came_is_named(store) -> None:
    beat = Heartbeat(store, rank=0, size=2, patience=60.0)
    assert "rank 1: never connected" in beat.describe_other_ranks()
    beat.stop()


def test_rank_zero_calls_a_function_on_all_ranks(worlds) -> None:
    first, second = worlds(0), worlds(1)
    heard = []

    def listen() -> None:
        heard.append(
            second.run_with_ranks(
                lambda ask: pytest.fail("only rank 0 conducts"), lambda word: word + 100, "count"
            )
        )

    listener = threading.Thread(target=listen)
    listener.start()
    assert first.run_with_ranks(lambda ask: [ask(1), ask(2)], lambda word: word + 10, "count") == [
        [11, 101],
        [12, 102],
    ]
    listener.join(timeout=10)
    assert heard == [[[11, 101], [12, 102]]]
    assert ProcessGroup().run_with_ranks(lambda ask: ask(5), lambda word: word + 1, "count") == [6]


def test_error_on_one_rank_is_raised_on_rank_zero(worlds) -> None:
    first, second = worlds(0), worlds(1)
    failed = []

    def listen() -> None:
        try:
            second.run_with_ranks(lambda ask: None, lambda word: 1 // word, "divide")
        except ZeroDivisionError as error:
            failed.append(str(error))

    listener = threading.Thread(target=listen)
    listener.start()
    with pytest.raises(
        StoppedError,
        match=r"found on rank 0: rank 1 could not divide: ZeroDivisionError: .* by zero",
    ):
        first.run_with_ranks(lambda ask: ask(0), lambda word: None, "divide")
    listener.join(timeout=10)
    assert failed


def test_rank_without_heartbeat_raises_stopped_error(worlds) -> None:
    first = worlds(0, timeout=0.3)
    with pytest.raises(
        StoppedError,
        match=r"on rank 0: no heartbeat of rank 1 for 0 s while waiting for it to publish step 5",
    ):
        first.run_with_ranks(lambda ask: ask("folder"), lambda word: None, "publish step 5")


def watch(store, rank: int) -> tuple[Heartbeat, list[str]]:
    reasons: list[str] = []
    beat = Heartbeat(store, rank=rank, size=3, patience=60.0, lost=reasons.append)
    beat.is_monitoring = True
    beat.set_activity("summing", waits=True)
    return beat, reasons


def until(true) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    pytest.fail("it was never reported")


def test_rank_without_heartbeat_is_lost_for_all_ranks(store, monkeypatch) -> None:
    """NCCL collectives with a dead peer never return: the rank that notices notifies the others."""
    monkeypatch.setattr(heartbeat, "LOST_RANK_SECONDS", 0.2)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.02)
    store.set(
        "beat/2", json.dumps({"count": 7, "activity": "summing", "seconds": 1.0})
    )  # and no more from it
    first, messages = watch(store, 0)
    second, also = watch(store, 1)
    until(lambda: messages and also)
    assert messages == also == ["no heartbeat of rank 2 for 0 s during summing"]
    first.stop()
    second.stop()


def test_no_rank_is_lost_before_training_or_without_waiting(store, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "LOST_RANK_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 0.02)
    reasons: list[str] = []
    beat = Heartbeat(store, rank=1, size=2, patience=60.0, lost=reasons.append)
    beat.set_activity("summing", waits=True)
    time.sleep(0.3)
    beat.is_monitoring = True
    beat.set_activity("computing")
    time.sleep(0.3)
    beat.stop()
    assert not reasons


def test_process_blocked_in_a_collective_exits(worlds, monkeypatch, caplog) -> None:
    """The main thread has some seconds to notice by itself.

    Then the process ends, with what happened in its status.
    """
    left: list[int] = []
    monkeypatch.setattr(process_group, "EXIT_GRACE_SECONDS", 0.05)
    monkeypatch.setattr("os._exit", left.append)
    world = worlds(1)
    messages: list[str] = []
    world.on_rank_lost = messages.append
    world._exit_process("no heartbeat of rank 0 for 20 s during summing")
    assert left == [StoppedError.exit_code]
    assert "found on rank 1: no heartbeat of rank 0 for 20 s during summing" in messages[0]
    assert "no heartbeat of rank 0" in caplog.text
    world._exiting.set()
    world._exit_process("again")
    assert left == [StoppedError.exit_code]


def test_only_a_peers_death_is_a_loss(worlds) -> None:
    """An error of our own keeps its name and its traceback."""
    world = worlds(0)

    def fail(text: str) -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        world.run_collective(lambda: fail("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(StoppedError, match="Connection closed by peer"):
        world.run_collective(
            lambda: fail("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2")
        )


@pytest.mark.parametrize(
    "text", ["NCCL error in: x.cpp", "Timeout waiting for key", "the operation timed out"]
)
def test_errors_of_nccl_and_timeouts_are_a_loss(worlds, text: str) -> None:
    def fail() -> None:
        raise RuntimeError(text)

    with pytest.raises(StoppedError, match=text):
        worlds(1).run_collective(fail)


@pytest.mark.parametrize(("silence", "lost"), [(19.0, False), (21.0, True)])
def test_a_training_rank_is_lost_after_twenty_seconds(
    store, monkeypatch, silence: float, lost: bool
) -> None:
    for rank in (0, 1):
        beat = Heartbeat(store, rank=rank, size=2, patience=60.0)
        monkeypatch.setattr(beat, "seconds_silent", lambda of: silence)
        assert bool(beat._find_lost_rank()) is lost
        beat.stop()


@pytest.mark.parametrize(
    ("of", "stopping", "silence", "lost"),
    [
        (0, False, 25.0, False),  # rank 0 may be busy for long
        (0, False, 301.0, True),
        (1, False, 19.0, False),
        (1, False, 25.0, True),  # the others only write files
        (0, True, 1.0, False),
        (0, True, 3.0, True),
    ],
)
def test_how_long_a_silent_rank_is_waited_for(
    worlds, store, monkeypatch, of: int, stopping: bool, silence: float, lost: bool
) -> None:
    world = worlds(1 - of, timeout=300.0)
    monkeypatch.setattr(world._heartbeat, "seconds_silent", lambda of: silence)
    monkeypatch.setattr(signals, "stop_requested", lambda: stopping)
    # The result comes while the rank sleeps for the first time.
    monkeypatch.setattr(process_group.time, "sleep", lambda seconds: store.set("result", ""))
    if lost:
        with pytest.raises(StoppedError, match=f"no heartbeat of rank {of}"):
            world._wait_for_key(["result"], of, "save")
    else:
        assert world._wait_for_key(["result"], of, "save") == "result"
    assert world._peer_lost is lost


@pytest.mark.parametrize(("timeout", "patience"), [(300.0, 60.0), (30.0, 15.0)])
def test_long_waits_warn_after_a_minute_or_half_the_timeout(
    worlds, timeout: float, patience: float
) -> None:
    assert worlds(0, timeout=timeout)._heartbeat._patience == patience


def test_ranks_are_watched_from_the_first_sum_of_gradients_on(worlds, monkeypatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: None)
    world = worlds(0)
    world.set_activity("waiting for data", waits=True)
    assert not world._heartbeat.is_monitoring
    world.all_reduce(torch.zeros(1), "summing")
    assert world._heartbeat.is_monitoring
    assert not world._heartbeat._is_waiting


@pytest.mark.parametrize(
    ("rank", "peer_lost", "waited"), [(0, False, True), (0, True, False), (1, False, False)]
)
def test_rank_zero_leaves_last_but_does_not_wait_for_the_dead(
    worlds, store, monkeypatch, rank: int, peer_lost: bool, waited: bool
) -> None:
    world = worlds(rank)
    world._peer_lost = peer_lost
    monkeypatch.setattr(
        process_group.time, "sleep", lambda seconds: store.set(f"bye/{1 - rank}", "")
    )
    world.close()
    assert store.check([f"bye/{rank}"])
    assert store.check([f"bye/{1 - rank}"]) is waited


def join_ranks(store, size: int, skip: tuple[int, ...] = ()) -> list[str]:
    names: dict[int, str] = {}
    threads = [
        threading.Thread(
            target=lambda rank=rank: names.setdefault(
                rank, agree_on_group_id(store, rank=rank, size=size, timeout=20.0)
            )
        )
        for rank in reversed(range(size))
        if rank not in skip
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.07)  # the last ranks come first and find what the dead have left
    for thread in threads:
        thread.join(timeout=30)
    return list(names.values())


def test_restarted_ranks_form_a_new_group(store) -> None:
    """The launcher's store still has the words of those who were killed."""
    first, second, fewer = join_ranks(store, 3), join_ranks(store, 3), join_ranks(store, 2)
    assert [len(names) for names in (first, second, fewer)] == [3, 3, 2]
    assert [len(set(names)) for names in (first, second, fewer)] == [1, 1, 1]
    assert len({first[0], second[0], fewer[0]}) == 3


def test_a_rank_that_never_joins_is_named(store) -> None:
    with pytest.raises(RuntimeError, match=r"not all of 2 ranks joined within 0 s; missing: \[1\]"):
        agree_on_group_id(store, rank=0, size=2, timeout=0.2)


def test_only_a_rank_of_several_misses_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, one_of_two = ProcessGroup(), ProcessGroup(1, 2)
    for world in (alone, one_of_two):
        world.check_launcher()
    monkeypatch.setattr(os, "getppid", lambda: -1)
    alone.check_launcher()  # a shell that ended: training continues
    with pytest.raises(StoppedError, match="the launcher is gone"):
        one_of_two.check_launcher()


def test_the_first_heartbeat_is_at_once(store, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 600.0)
    beating = Heartbeat(store, rank=1, size=2, patience=60.0)
    deadline = time.monotonic() + 20
    while not store.check(["beat/1"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    beating.stop()
    assert json.loads(store.values["beat/1"])["count"] == 1
