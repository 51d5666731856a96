"""Replaying launches: on a GPU a small model's time goes into launching its kernels one by one.

For each shape of batch the launches of one forward and backward pass are recorded, as a CUDA graph, and from then on
replayed as a single one. The kernels, their order and their random numbers are those of the plain pass. What cannot be
recorded (a pass that waits for the device, or that draws random numbers on the host) goes on as before.
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

from dragoman.attention.recorder import is_recording
from dragoman.data.batches import Batch
from dragoman.runtime.cuda_graph import CudaGraphCapturer
from dragoman.runtime.memory import is_out_of_memory
from dragoman.runtime.seeds import seed_generators
from dragoman.training.task import Loss

logger = logging.getLogger(__name__)

MAX_GRAPHS = (
    64  # the plan's shapes, with and without masks; each takes as long to record as a few updates
)
CAPTURE_AT_OCCURRENCE = (
    2  # a shape is recorded when it comes again: many remainders of a pass never do
)

ForwardBackward = Callable[
    [Batch], Loss
]  # leaves the gradients on the parameters, or none of them where it fails


class GraphCaptureError(RuntimeError):
    """A pass does something that a recording would freeze or forbid."""


class _CapturedGraph(NamedTuple):
    batch: Batch  # the tensors that the recorded kernels read
    loss: Loss  # the tensors that they write
    replay: Callable[[], None]


class CUDAGraphRunner:
    """Computes losses and gradients as `compute` does, by replaying it where that can be done.

    The gradients that it leaves are its own, and the next call writes over them: whoever needs them longer copies them.
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
        self._accumulates_grad = accumulates_grad  # whether a pass adds to the gradients that it finds, or writes over them
        self._graphs: dict[Any, _CapturedGraph] = {}
        self._shape_counts: Counter[Any] = Counter()
        self._flat_grads: Tensor | None = (
            None  # of all parameters in a row: what every recording writes
        )
        self._params_without_grad: set[int] = set()  # parameters that get no gradient
        self._capturer = CudaGraphCapturer(device)
        self.is_enabled = True

    def __call__(self, batch: Batch) -> Loss:
        """Leave a batch's gradients on the parameters and give its loss; the caller has just seeded the generators."""
        if (
            not self.is_enabled or is_recording()
        ):  # captured kernels neither record nor edit attention weights
            return self._compute(batch)
        key = _batch_key(batch)
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
        """Let go of every recording and its memory; shapes are recorded anew when they come again."""
        self._graphs.clear()
        self._shape_counts.clear()
        self._flat_grads, self._capturer = (
            None,
            CudaGraphCapturer(self._device),
        )  # the memory goes with the last recording

    def _replay_graph(self, captured: _CapturedGraph, batch: Batch) -> Loss:
        """Give the recorded kernels this batch, and hand out what they make."""
        assert self._flat_grads is not None, "what is recorded has somewhere to write"
        for place, tensor in zip(
            _batch_tensors(captured.batch), _batch_tensors(batch), strict=True
        ):
            place.copy_(tensor, non_blocking=True)
        captured.replay()
        for number, (parameter, gradient) in enumerate(
            zip(self._parameters, self._grad_views(self._flat_grads), strict=True)
        ):
            parameter.grad = None if number in self._params_without_grad else gradient
        loss = captured.loss
        return Loss(loss.total.clone(), loss.nll.clone(), loss.count.clone())

    def _capture_shape(self, key: Any, batch: Batch) -> bool:
        """Record a shape; where that fails, say so once and never try again."""
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
                "updates are launched kernel by kernel, which takes small models longer: %s", found
            )
        for parameter in self._parameters:
            parameter.grad = None
        seed_generators(seed, self._device)
        return self.is_enabled

    def _warm_up(self, batch: Batch) -> None:
        """Run one plain pass under watch, and note which parameters get no gradient."""
        before = torch.default_generator.get_state()
        with _forbid_device_sync():
            self._compute(batch)
        if not torch.equal(before, torch.default_generator.get_state()):
            raise GraphCaptureError(
                "the model draws random numbers on the host, and a recording would repeat them"
            )
        self._params_without_grad = {
            number for number, parameter in enumerate(self._parameters) if parameter.grad is None
        }
        total = sum(parameter.numel() for parameter in self._parameters)
        self._flat_grads = torch.zeros(total, device=self._device)

    def _capture(self, batch: Batch) -> _CapturedGraph:
        """Record the kernels of one pass over a batch's tensors; nothing is computed yet."""
        assert self._flat_grads is not None, "a trial has made room for the gradients"
        gradients, made = self._flat_grads, list[Loss]()
        for parameter, view in zip(self._parameters, self._grad_views(gradients), strict=True):
            parameter.grad = view  # the pass leaves its gradient there

        def launch() -> None:
            if self._accumulates_grad:
                gradients.zero_()
            loss = self._compute(batch)
            made.append(Loss(loss.total.detach(), loss.nll.detach(), loss.count.detach()))

        replay = self._capturer(launch)
        return _CapturedGraph(batch, made[0], replay)

    def _grad_views(self, flat: Tensor) -> Iterator[Tensor]:
        """Cut a row of all numbers into the parameters' shapes."""
        pieces = flat.split([parameter.numel() for parameter in self._parameters])  # type: ignore[no-untyped-call]
        return (
            piece.view_as(parameter)
            for piece, parameter in zip(pieces, self._parameters, strict=True)
        )


def _batch_key(batch: Batch) -> tuple[Any, ...]:
    """Tell batches apart whose kernels differ: by shape, and by which sides are padded."""
    full = (batch.sizes == (batch.src.shape[1], batch.tgt_in.shape[1])).all(axis=0)
    return (batch.src.shape, batch.tgt_in.shape, *full.tolist())


def _batch_tensors(batch: Batch) -> tuple[Tensor, ...]:
    return batch.src, batch.src_lengths, batch.tgt_in, batch.tgt_out, batch.tgt_lengths


@contextmanager
def _forbid_device_sync() -> Iterator[None]:
    """Turn every wait for the device into an error."""
    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns that it may overlook some waits; recording will not
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _reset_generator(device: torch.device) -> None:
    """Give the device a generator state that no broken recording has marked as its own."""
    if device.type != "cuda":
        return
    generator = torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
