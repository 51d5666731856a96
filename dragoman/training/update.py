"""One update of the weights: the gradients of its micro-batches, summed over all ranks, and applied once.

Nothing here waits for the device. Whether the numbers are finite is decided on it, by the optimiser's own kernel, and the
figures of an update are read when they have arrived, one update later on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dragoman import stopping
from dragoman.data.batches import Batch
from dragoman.errors import StoppedError
from dragoman.files import faults
from dragoman.training import optimisers
from dragoman.training.compiling import stop_compiling
from dragoman.training.feed import Slice, Update
from dragoman.training.holding import Gradient, Holding, Total
from dragoman.training.loss import Loss, Trainable
from dragoman.training.memory import MemoryGuard
from dragoman.training.precision import Precision
from dragoman.training.randomness import reseed, seed_for
from dragoman.training.replaying import Replay


class Requests(NamedTuple):
    """What is wanted of the run besides going on."""

    stop: bool = False
    publish: bool = False
    late: bool = False  # the time budget is spent


class Figures(NamedTuple):
    """What an update amounted to, over all ranks, as plain numbers."""

    total: float  # per valid target
    nll: float
    targets: int
    norm: float  # of the mean gradient, before clipping
    finite: bool
    tokens: int
    slots: int
    requests: Requests  # of any rank


class Pending:
    """Figures on their way from the device."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Figures:
        """Wait for the figures, which on a GPU have arrived when the next update has been launched."""
        if self._event is not None:
            self._event.synchronize()
        total, nll, count, tokens, slots, stop, publish, late, norm, bad = self._values.tolist()
        targets = max(count, 1.0)
        requests = Requests(bool(stop), bool(publish), bool(late))
        return Figures(total / targets, nll / targets, int(count), norm, not bad, int(tokens), int(slots), requests)


class UpdateStep:
    """Computes and applies updates; owns nothing that outlives one except the optimiser."""

    def __init__(
        self,
        *,
        holding: Holding,
        task: Trainable,
        optimiser: Optimizer,
        device: torch.device,
        precision: Precision,
        guard: MemoryGuard,
        seed: int,
        clip: float,
        replay: bool = False,
    ) -> None:
        self._holding, self._task, self._optimiser = holding, task, optimiser
        self._device, self._precision, self.guard, self._seed, self._clip = device, precision, guard, seed, clip
        self._parameters = [parameter for parameter in holding.shares.parameters() if parameter.requires_grad]
        self._backward = Replay(self._launch, self._parameters, device, adds=holding.adds) if replay else self._launch

    def forget(self) -> None:
        """Let go of what was recorded of earlier updates."""
        if isinstance(self._backward, Replay):
            self._backward.forget()

    @property
    def replays(self) -> bool:
        """Whether a shape that comes again is launched as one, which takes it some updates to get ready."""
        return isinstance(self._backward, Replay)

    def __call__(self, update: Update, *, learning_rate: float, requests: Requests) -> Pending:
        """Do one update; the figures can be read from what is returned."""
        gradient, sums = self.gradient(update)
        tokens = sum(part.batch.tokens for part in update.slices if not part.idle)
        slots = sum(part.batch.slots for part in update.slices if not part.idle)
        host = torch.tensor([tokens, slots, *requests], dtype=torch.float32)
        if self._device.type == "cuda":
            host = host.pin_memory().to(self._device, non_blocking=True)
        sums = torch.cat([sums, host])
        return self._apply(self._holding.total(gradient, sums, update.number), learning_rate)

    def gradient(self, update: Update) -> tuple[Gradient, Tensor]:
        """Sum this rank's gradients, one for each parameter, and the (total, nll, count) of its loss."""
        held: Gradient = [None] * len(self._parameters)
        sums = torch.zeros(3, device=self._device)
        passes = 0
        faults.point("update.before")
        for part in update.slices:

            def compute(batch: Batch, path: str, part: Slice = part) -> None:
                nonlocal passes
                _leave_if_urgent()
                if passes == 1 and self.replays:  # what the first pass left is the recording's, and the second writes over it
                    held[:] = [each if each is None else each.clone() for each in held]
                slot = f"{part.slot}{path and '.' + path}"
                seed = seed_for(self._seed, update.number, part.micro, slot)
                try:
                    loss = self._computed(batch, seed, idle=part.idle)
                except Exception as error:
                    if not stop_compiling(error):
                        raise
                    loss = self._computed(batch, seed, idle=part.idle)  # from the same random numbers
                self._hold(held)
                passes += 1
                sums.add_(torch.stack([loss.total.detach(), loss.nll.detach(), loss.count.detach()]).float())

            if self._holding.lockstep:
                self.guard.run_whole(part.batch, compute)
            else:
                self.guard.run(part.batch, compute)
        faults.point("update.after_backward")
        return held, sums

    def _computed(self, batch: Batch, seed: int, *, idle: bool) -> Loss:
        """Leave a batch's gradients on the parameters, by replaying where that can be done."""
        reseed(seed, self._device)
        return self._launch(batch, idle=True) if idle else self._backward(batch)

    def _launch(self, batch: Batch, *, idle: bool = False) -> Loss:
        """Leave one batch's gradients on the parameters, or none of them: a failure half-way must not count twice."""
        batch = batch.to(self._device)
        try:
            with self._precision.autocast(self._device):
                loss = self._holding.loss(self._task, batch)
            if idle:
                loss = Loss(0 * loss.total, 0 * loss.nll, 0 * loss.count)
            self._holding.backward(loss)
        except BaseException:
            self._clear()
            raise
        return loss

    def _hold(self, held: Gradient) -> None:
        """Add the parameters' gradients to those held, and take them off the parameters."""
        for place, parameter in enumerate(self._parameters):
            kept, new = held[place], parameter.grad
            held[place] = new if kept is None else kept if new is None else kept.add_(new)
        self._clear()

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _apply(self, total: Total, learning_rate: float) -> Pending:
        """Divide by the global count, clip, and step unless something is not finite; all on the device."""
        gradient, sums, norm = total
        count = sums[2].clamp(min=1.0)
        norm = norm / count
        # Without any target there is no gradient either, and Adam must not move on its memory alone.
        bad = (~(torch.isfinite(norm) & torch.isfinite(sums[0]) & (sums[2] > 0))).float()
        # The kernel divides by this, and clipping multiplies: g / (count * norm / clip) has the norm `clip`.
        divisor = count * torch.clamp(norm / self._clip, min=1.0) if self._clip else count
        for parameter, part in zip(self._parameters, gradient, strict=True):
            parameter.grad = part
        optimisers.step(self._optimiser, learning_rate=learning_rate, divisor=divisor, nonfinite=bad)
        self._clear()
        return Pending(torch.cat([sums, torch.stack([norm, bad])]))


def _leave_if_urgent() -> None:
    if stopping.urgent():
        raise StoppedError(
            "a second request to stop leaves the update in progress",
            found=stopping.reason(),
            fix="run the same command again to go on from the last checkpoint",
        )
