"""CUDA graphs: capture the forward and backward pass of each batch shape, and replay it.

On a GPU, a small model spends its time launching kernels one by one; a CUDA graph launches them
together. Kernels, their order and their random numbers are those of the eager pass. A model that
cannot be captured (because it synchronizes with the device, or draws random numbers on the host)
stays in eager mode.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import is_recording
from dragoman.data.collate import TensorBatch
from dragoman.runtime.cuda_graph_capture import CudaGraphCapturer
from dragoman.runtime.out_of_memory import is_out_of_memory
from dragoman.runtime.random_generators import seed_generators
from dragoman.training.task_protocol import Loss

logger = logging.getLogger(__name__)

MAX_GRAPHS = 64  # batch shapes, with and without masks; a capture takes as long as a few steps
CAPTURE_AT_OCCURRENCE = 2  # many last batches of an epoch have a shape that never occurs again

ForwardBackward = Callable[
    [TensorBatch], Loss
]  # leaves gradients on the parameters, or none on failure


class GraphCaptureError(RuntimeError):
    """The model does something that a CUDA graph cannot replay."""


class _CapturedGraph(NamedTuple):
    batch: TensorBatch  # the tensors that the captured kernels read
    loss: Loss  # the tensors that they write
    replay: Callable[[], None]


class CUDAGraphRunner:
    """Computes losses and gradients as `compute` does, by replaying CUDA graphs where possible.

    The gradients that it leaves on the parameters are overwritten by the next call: clone them to
    keep them.
    """

    def __init__(
        self,
        compute: ForwardBackward,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        *,
        accumulates_grad: bool = True,
    ) -> None:
        self._compute, self._parameters, self._device = compute, parameters, device
        self._accumulates_grad = accumulates_grad  # whether `compute` adds to existing gradients
        self._graphs: dict[Any, _CapturedGraph] = {}
        self._shape_counts: Counter[Any] = Counter()
        self._flat_grads: Tensor | None = None  # of all parameters; every graph writes to it
        self._params_without_grad: set[int] = set()
        self._capturer = CudaGraphCapturer(device)
        self.is_enabled = True

    def __call__(self, batch: TensorBatch) -> Loss:
        """Leave the gradients on the parameters and return the loss.

        The caller has just set the seed.
        """
        if not self.is_enabled or is_recording():  # a graph cannot record or edit attention weights
            return self._compute(batch)
        key = batch.graph_key
        if key not in self._graphs:
            self._shape_counts[key] += 1
            if (
                self._shape_counts[key] < CAPTURE_AT_OCCURRENCE
                or len(self._graphs) >= MAX_GRAPHS
                or not self._capture_shape(key, batch)
            ):
                return self._compute(batch)
        return self._replay_graph(self._graphs[key], batch)

    def release_graphs(self) -> None:
        """Free all graphs and their memory; shapes are captured again when they recur."""
        self._graphs.clear()
        self._shape_counts.clear()
        self._flat_grads = None
        self._capturer = CudaGraphCapturer(self._device)  # its memory pool goes with the last graph

    def _replay_graph(self, captured: _CapturedGraph, batch: TensorBatch) -> Loss:
        """Copy a batch into the graph's input tensors, replay it, and return its loss."""
        assert self._flat_grads is not None, "a captured graph has gradients"
        for static, tensor in zip(captured.batch.tensors(), batch.tensors(), strict=True):
            static.copy_(tensor, non_blocking=True)
        captured.replay()
        for number, (parameter, gradient) in enumerate(
            zip(self._parameters, self._grad_views(self._flat_grads), strict=True)
        ):
            parameter.grad = None if number in self._params_without_grad else gradient
        loss = captured.loss
        return Loss(loss.total.clone(), loss.nll.clone(), loss.count.clone())

    def _capture_shape(self, key: Any, batch: TensorBatch) -> bool:
        """Capture a batch shape and return whether that worked; a failure disables CUDA graphs."""
        seed = torch.default_generator.initial_seed()
        try:
            if not self._graphs:
                self._warm_up(batch)
                seed_generators(seed, self._device)
            self._graphs[key] = self._capture(batch.to(self._device).clone())
        except RuntimeError as error:
            self.is_enabled = False
            self._graphs.clear()
            _reset_generator(self._device)
            found = (
                "out of memory" if is_out_of_memory(error) else " ".join(str(error).split())[:160]
            )
            logger.info(
                "CUDA graphs: off, training continues in eager mode, slower for small models (%s)",
                found,
            )
        for parameter in self._parameters:
            parameter.grad = None
        seed_generators(seed, self._device)
        return self.is_enabled

    def _warm_up(self, batch: TensorBatch) -> None:
        """Run one eager pass that may not synchronize; find the parameters without gradients."""
        before = torch.default_generator.get_state()
        with _forbid_device_sync():
            self._compute(batch)
        if not torch.equal(before, torch.default_generator.get_state()):
            raise GraphCaptureError(
                "the model draws random numbers on the host, which a CUDA graph would repeat"
            )
        self._params_without_grad = {
            number for number, parameter in enumerate(self._parameters) if parameter.grad is None
        }
        total = sum(parameter.numel() for parameter in self._parameters)
        self._flat_grads = torch.zeros(total, device=self._device)

    def _capture(self, batch: TensorBatch) -> _CapturedGraph:
        """Capture the kernels of one pass over a batch's tensors; nothing is computed yet."""
        assert self._flat_grads is not None, "the warm-up allocates the gradients"
        gradients, losses = self._flat_grads, list[Loss]()
        for parameter, view in zip(self._parameters, self._grad_views(gradients), strict=True):
            parameter.grad = view  # the backward pass writes to it

        def launch() -> None:
            if self._accumulates_grad:
                gradients.zero_()
            loss = self._compute(batch)
            losses.append(Loss(loss.total.detach(), loss.nll.detach(), loss.count.detach()))

        replay = self._capturer(launch)
        return _CapturedGraph(batch, losses[0], replay)

    def _grad_views(self, flat: Tensor) -> Iterator[Tensor]:
        """Return views of a flat tensor in the parameters' shapes."""
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = flat.split(sizes)  # type: ignore[no-untyped-call]
        return (
            part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)
        )


@contextmanager
def _forbid_device_sync() -> Iterator[None]:
    """Raise an error at every synchronization with the device."""
    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it may miss some; the capture does not
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _reset_generator(device: torch.device) -> None:
    """Replace the device's generator state, which a failed capture may have claimed."""
    if device.type != "cuda":
        return
    generator = torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
