"""The one thread in which the explorer runs its model, with a bounded queue and time limits."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from dragoman.explore.request_parsing import RequestError

MAX_WAITING = 8  # requests that wait for the model; more are answered 429
REQUEST_SECONDS = 60.0  # of one request, waiting included
RETRY_SECONDS = 2

ResultT = TypeVar("ResultT")


class WorkCancelledError(Exception):
    """The client is gone, or the server stops."""


class Cancellation:
    """Whether a job should stop: its client is gone or its time is over."""

    def __init__(self, seconds: float = REQUEST_SECONDS) -> None:
        self._event = threading.Event()
        self.deadline = time.monotonic() + seconds

    def cancel(self) -> None:
        """Stop the work at the model's next layer."""
        self._event.set()

    def seconds_left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raise WorkCancelledError or RequestError if the work should stop."""
        if self._event.is_set():
            raise WorkCancelledError
        if time.monotonic() > self.deadline:
            raise timeout_error()


def timeout_error() -> RequestError:
    """Return the answer to a request that took too long."""
    return RequestError(
        503,
        "The model did not finish in time; try a shorter text or a smaller beam.",
        retry_after=RETRY_SECONDS,
    )


class ModelWorker:
    """Runs functions one after another in a thread of its own.

    With `stops_modules` a hook on every torch module checks the cancellation of the running
    function, so that a forward pass whose client is gone, or whose time is over, stops at its next
    layer. The hook is torch's global one: hooks of a model's own would make a translator leave its
    fused kernels, whose last bits differ. It is registered only while a function runs, because
    torch.compile warns about global hooks.
    """

    def __init__(self, *, stops_modules: bool = False, max_waiting: int = MAX_WAITING) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="explore-model")
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._pending: set[Cancellation] = set()
        self._running: Cancellation | None = None
        self._thread: int | None = None
        self._closed = False
        self._stops_modules = stops_modules

    def submit(
        self,
        function: Callable[[], ResultT],
        cancellation: Cancellation,
        *,
        context: contextvars.Context | None = None,
        is_bounded: bool = True,
    ) -> Future[ResultT]:
        """Queue a function; raise RequestError 429 if too many wait already.

        `context` isolates the context variables of a generator that is resumed several times.
        """
        with self._lock:
            if self._closed:
                raise RequestError(503, "The server is stopping.", retry_after=RETRY_SECONDS)
            # One runs, the others wait.
            if is_bounded and len(self._pending) > self._max_waiting:
                raise RequestError(
                    429,
                    "Too many requests wait for the model; try again in a moment.",
                    retry_after=RETRY_SECONDS,
                )
            self._pending.add(cancellation)
        scope = contextvars.copy_context() if context is None else context
        future = self._executor.submit(self._run, function, cancellation, scope)
        future.add_done_callback(lambda _: self._forget(cancellation))  # also if it never ran
        return future

    def _forget(self, cancellation: Cancellation) -> None:
        with self._lock:
            self._pending.discard(cancellation)

    def _run(
        self,
        function: Callable[[], ResultT],
        cancellation: Cancellation,
        context: contextvars.Context,
    ) -> ResultT:
        with self._lock:
            self._thread, self._running = threading.get_ident(), cancellation
        try:
            cancellation.check()
            with self._module_checks():
                return context.run(function)
        finally:
            with self._lock:
                self._running = None

    @contextlib.contextmanager
    def _module_checks(self) -> Iterator[None]:
        """Check the cancellation before each torch module of the block."""
        if not self._stops_modules:
            yield
            return
        from torch.nn.modules.module import register_module_forward_pre_hook

        hook = register_module_forward_pre_hook(self._check_hook)
        try:
            yield
        finally:
            hook.remove()

    def _check_hook(self, module: Any, inputs: Any) -> None:
        """Stop the running function if it should; calls from other threads are not affected."""
        running = self._running
        if running is not None and threading.get_ident() == self._thread:
            running.check()

    def close(self) -> None:
        """Cancel what runs and waits, and end the thread."""
        with self._lock:
            self._closed = True
            for each in self._pending:
                each.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
