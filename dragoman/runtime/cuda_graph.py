"""Recording what is launched on a GPU, as a CUDA graph, so that the whole can be launched again at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

GraphReplay = Callable[[], None]


class CudaGraphCapturer:
    """Records actions that read and write the same tensors each time; recordings run one at a time and share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run_once: Callable[[], None]) -> GraphReplay:
        """Record an action, which must have run before: nothing is computed now, and its first run may load what it needs."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Other threads may go on asking the driver for memory meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run_once()
            except BaseException:
                with suppress(RuntimeError):  # it only says that something failed before
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(stream)
        replay: GraphReplay = graph.replay
        return replay


def build_graph_capturer(device: torch.device) -> CudaGraphCapturer | None:
    """Give what records on a device; None where nothing can."""
    return CudaGraphCapturer(device) if device.type == "cuda" else None
