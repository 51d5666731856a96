"""CUDA graph capture and replay, for training/cuda_graphs.py and inference/cuda/."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

GraphReplay = Callable[[], None]


class CudaGraphCapturer:
    """Captures functions that read and write fixed tensors; the graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run_once: Callable[[], None]) -> GraphReplay:
        """Capture a function, which must have run once before, and return its replay.

        Nothing is computed during the capture.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream, current = self._stream, torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Other threads may allocate meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run_once()
            except BaseException:
                with suppress(RuntimeError):  # it only repeats that the capture failed
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(stream)
        replay: GraphReplay = graph.replay
        return replay


def build_graph_capturer(device: torch.device) -> CudaGraphCapturer | None:
    """Return a capturer for a GPU, or None for other devices."""
    return CudaGraphCapturer(device) if device.type == "cuda" else None
