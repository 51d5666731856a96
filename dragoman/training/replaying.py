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

from dragoman.attention.recording import is_recording
from dragoman.data.batches import Batch
from dragoman.kernels.capturing import Capturer
from dragoman.training.loss import Loss
from dragoman.training.memory import is_out_of_memory
from dragoman.training.randomness import reseed

log = logging.getLogger(__name__)

MOST_RECORDINGS = 64  # the plan's shapes, with and without masks; each takes as long to record as a few updates
SIGHTINGS = 2  # a shape is recorded when it comes again: many remainders of a pass never do

Compute = Callable[[Batch], Loss]  # leaves the gradients on the parameters, or none of them where it fails


class CannotReplayError(RuntimeError):
    """A pass does something that a recording would freeze or forbid."""


class _Recording(NamedTuple):
    batch: Batch  # the tensors that the recorded kernels read
    loss: Loss  # the tensors that they write
    replay: Callable[[], None]


class Replay:
    """Computes losses and gradients as `compute` does, by replaying it where that can be done.

    The gradients that it leaves are its own, and the next call writes over them: whoever needs them longer copies them.
    """

    def __init__(self, compute: Compute, parameters: Sequence[nn.Parameter], device: torch.device, *, adds: bool = True) -> None:
        self._compute, self._parameters, self._device = compute, parameters, device
        self._adds = adds  # whether a pass adds to the gradients that it finds, or writes over them
        self._recordings: dict[Any, _Recording] = {}
        self._sightings: Counter[Any] = Counter()
        self._gradients: Tensor | None = None  # of all parameters in a row: what every recording writes
        self._untouched: set[int] = set()  # parameters that get no gradient
        self._capturer = Capturer(device)
        self.possible = True

    def __call__(self, batch: Batch) -> Loss:
        """Leave a batch's gradients on the parameters and give its loss; the caller has just seeded the generators."""
        if not self.possible or is_recording():  # captured kernels neither record nor edit attention weights
            return self._compute(batch)
        key = _key(batch)
        if key not in self._recordings:
            self._sightings[key] += 1
            if self._sightings[key] < SIGHTINGS or len(self._recordings) >= MOST_RECORDINGS or not self._record(key, batch):
                return self._compute(batch)
        return self._play(self._recordings[key], batch)

    def forget(self) -> None:
        """Let go of every recording and its memory; shapes are recorded anew when they come again."""
        self._recordings.clear()
        self._sightings.clear()
        self._gradients, self._capturer = None, Capturer(self._device)  # the memory goes with the last recording

    def _play(self, recording: _Recording, batch: Batch) -> Loss:
        """Give the recorded kernels this batch, and hand out what they make."""
        assert self._gradients is not None, "what is recorded has somewhere to write"
        for place, tensor in zip(_tensors(recording.batch), _tensors(batch), strict=True):
            place.copy_(tensor, non_blocking=True)
        recording.replay()
        for number, (parameter, gradient) in enumerate(zip(self._parameters, self._views(self._gradients), strict=True)):
            parameter.grad = None if number in self._untouched else gradient
        loss = recording.loss
        return Loss(loss.total.clone(), loss.nll.clone(), loss.count.clone())

    def _record(self, key: Any, batch: Batch) -> bool:
        """Record a shape; where that fails, say so once and never try again."""
        seed = torch.default_generator.initial_seed()
        try:
            if not self._recordings:
                self._try(batch)
                reseed(seed, self._device)
            self._recordings[key] = self._capture(batch.to(self._device).clone())
        except RuntimeError as error:
            self.possible = False
            self._recordings.clear()
            _renew_generator(self._device)
            found = "out of memory" if is_out_of_memory(error) else " ".join(str(error).split())[:160]
            log.info("updates are launched kernel by kernel, which takes small models longer: %s", found)
        for parameter in self._parameters:
            parameter.grad = None
        reseed(seed, self._device)
        return self.possible

    def _try(self, batch: Batch) -> None:
        """Run one plain pass under watch, and note which parameters get no gradient."""
        before = torch.default_generator.get_state()
        with _no_waiting():
            self._compute(batch)
        if not torch.equal(before, torch.default_generator.get_state()):
            raise CannotReplayError("the model draws random numbers on the host, and a recording would repeat them")
        self._untouched = {number for number, parameter in enumerate(self._parameters) if parameter.grad is None}
        total = sum(parameter.numel() for parameter in self._parameters)
        self._gradients = torch.zeros(total, device=self._device)

    def _capture(self, batch: Batch) -> _Recording:
        """Record the kernels of one pass over a batch's tensors; nothing is computed yet."""
        assert self._gradients is not None, "a trial has made room for the gradients"
        gradients, made = self._gradients, list[Loss]()
        for parameter, view in zip(self._parameters, self._views(gradients), strict=True):
            parameter.grad = view  # the pass leaves its gradient there

        def launch() -> None:
            if self._adds:
                gradients.zero_()
            loss = self._compute(batch)
            made.append(Loss(loss.total.detach(), loss.nll.detach(), loss.count.detach()))

        replay = self._capturer(launch)
        return _Recording(batch, made[0], replay)

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        """Cut a row of all numbers into the parameters' shapes."""
        pieces = flat.split([parameter.numel() for parameter in self._parameters])  # type: ignore[no-untyped-call]
        return (piece.view_as(parameter) for piece, parameter in zip(pieces, self._parameters, strict=True))


def _key(batch: Batch) -> tuple[Any, ...]:
    """Tell batches apart whose kernels differ: by shape, and by which sides are padded."""
    full = (batch.sizes == (batch.src.shape[1], batch.tgt_in.shape[1])).all(axis=0)
    return (batch.src.shape, batch.tgt_in.shape, *full.tolist())


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return batch.src, batch.src_lengths, batch.tgt_in, batch.tgt_out, batch.tgt_lengths


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Turn every wait for the device into an error."""
    if not torch.cuda.is_available():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it may overlook some waits; recording will not
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _renew_generator(device: torch.device) -> None:
    """Give the device a generator state that no broken recording has marked as its own."""
    if device.type != "cuda":
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
