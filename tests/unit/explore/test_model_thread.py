"""The model thread: one job at a time, cancelled when its client has left."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks

from dragoman.explore.model_thread import Cancellation, ModelWorker, WorkCancelledError
from dragoman.explore.request_parsing import RequestError


class Layers(nn.Module):
    """Runs layers until something stops it, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.layers_run = 0
        self.started = threading.Event()

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.layer(x)
            self.layers_run += 1
            self.started.set()
        return x


@pytest.fixture
def model() -> Layers:
    return Layers()


@pytest.fixture
def worker():
    made = ModelWorker(stops_modules=True, max_waiting=2)
    yield made
    made.close()


def run_forever(model: Layers):
    with torch.inference_mode():
        return model(torch.zeros(1, 2), 10**9)


def test_work_is_done_in_order_and_in_one_thread(worker: ModelWorker) -> None:
    order: list[int] = []
    futures = [
        worker.submit(lambda n=n: (order.append(n), threading.get_ident())[1], Cancellation())
        for n in range(3)
    ]
    assert len({future.result(10) for future in futures}) == 1
    assert order == [0, 1, 2]


def test_cancelled_work_stops_at_the_next_layer(worker: ModelWorker, model: Layers) -> None:
    cancellation = Cancellation()
    future = worker.submit(lambda: run_forever(model), cancellation)
    assert model.started.wait(10)
    cancellation.cancel()
    with pytest.raises(WorkCancelledError):
        future.result(10)
    assert worker.submit(lambda: 3, Cancellation()).result(10) == 3


def test_work_stops_when_its_time_is_over(worker: ModelWorker, model: Layers) -> None:
    future = worker.submit(lambda: run_forever(model), Cancellation(0.05))
    with pytest.raises(RequestError, match="did not finish in time") as found:
        future.result(10)
    assert found.value.status == 503


def test_work_that_waited_too_long_is_not_begun(worker: ModelWorker) -> None:
    with pytest.raises(RequestError, match="did not finish in time"):
        worker.submit(lambda: pytest.fail("it ran"), Cancellation(-1)).result(10)


def test_other_threads_may_use_the_model(worker: ModelWorker, model: Layers) -> None:
    cancellation = Cancellation()
    future = worker.submit(lambda: run_forever(model), cancellation)
    assert model.started.wait(10)
    cancellation.cancel()
    assert model(torch.zeros(1, 2), 3).shape == (1, 2)
    with pytest.raises(WorkCancelledError):
        future.result(10)


def test_other_threads_run_the_model_while_cancelled_work_ends(
    worker: ModelWorker, model: Layers
) -> None:
    began, end = threading.Event(), threading.Event()
    cancellation = Cancellation()

    def wait() -> bool:
        began.set()
        return end.wait(10)

    future = worker.submit(wait, cancellation)
    assert began.wait(10)
    cancellation.cancel()
    assert model(torch.zeros(1, 2), 2).shape == (1, 2)
    end.set()
    assert future.result(10)


def test_queue_length_is_limited(worker: ModelWorker) -> None:
    gate = threading.Event()
    waiting = [worker.submit(lambda: gate.wait(10), Cancellation()) for _ in range(3)]
    with pytest.raises(RequestError, match="Too many requests") as found:
        worker.submit(lambda: None, Cancellation())
    assert (found.value.status, found.value.retry_after) == (429, 2)
    assert worker.submit(lambda: 5, Cancellation(), is_bounded=False)
    assert waiting[2].cancel()  # its client left: the queue slot is free
    worker.submit(lambda: None, Cancellation(), is_bounded=False)
    gate.set()
    assert all(each.result(10) for each in waiting[:2])
    assert worker.submit(lambda: 7, Cancellation()).result(10) == 7


def test_a_generator_keeps_its_context_to_itself(worker: ModelWorker) -> None:
    scope: contextvars.ContextVar[str] = contextvars.ContextVar("scope", default="")

    def generate():
        token = scope.set("inside")
        yield scope.get()
        yield scope.get()
        scope.reset(token)

    values, context, cancellation = generate(), contextvars.copy_context(), Cancellation()

    def step() -> str:
        return worker.submit(lambda: next(values, ""), cancellation, context=context).result(10)

    assert step() == "inside"
    assert worker.submit(scope.get, Cancellation()).result(10) == ""
    assert (step(), step()) == ("inside", "")


def test_closing_stops_everything_and_removes_the_hook(model: Layers) -> None:
    worker = ModelWorker(stops_modules=True)
    assert not _global_forward_pre_hooks  # nothing runs, and torch.compile warns about hooks
    running = worker.submit(lambda: run_forever(model), Cancellation())
    waiting = worker.submit(lambda: 3, Cancellation())
    assert model.started.wait(10)
    assert len(_global_forward_pre_hooks) == 1
    worker.close()
    with pytest.raises(WorkCancelledError):
        running.result(10)
    assert waiting.cancelled()
    worker._executor.shutdown(wait=True)
    assert not _global_forward_pre_hooks
    with pytest.raises(RequestError, match="stopping"):
        worker.submit(lambda: 3, Cancellation())
