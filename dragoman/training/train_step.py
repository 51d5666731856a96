"""One update of the weights: the gradients of its micro-batches, summed over all ranks, and applied once.

Nothing here waits for the device. Whether the numbers are finite is decided on it, by the optimiser's own kernel, and the
figures of an update are read when they have arrived, one update later on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from dragoman.data.batches import Batch
from dragoman.errors import ConfigError, StoppedError
from dragoman.runtime import signals
from dragoman.runtime.memory import RETRY_FRACTION, is_out_of_memory, release_memory
from dragoman.runtime.seeds import derive_seed, seed_generators
from dragoman.storage import fault_injection
from dragoman.training import optimizers
from dragoman.training.cuda_graphs import CUDAGraphRunner
from dragoman.training.data_loader import GlobalBatch, MicroBatch
from dragoman.training.distributed.data_parallel import (
    Gradients,
    ParallelStrategy,
    ReducedGradients,
)
from dragoman.training.mixed_precision import Precision
from dragoman.training.task import Loss, Task
from dragoman.training.torch_compile import fall_back_to_eager

logger = logging.getLogger(__name__)

_warned = set[
    str
]()  # that batches are split is said once a process, whose run and rehearsal have a guard each


class BatchPart(NamedTuple):
    """Some rows of a batch, and the path of splits that led to them: "" for the whole, "01" for the first half's second."""

    batch: Batch
    path: str


class OOMSplitter:
    """Runs a computation on a batch, in parts where the whole does not fit, and remembers what fits."""

    def __init__(self, token_limits: dict[str, int] | None = None) -> None:
        self.token_limits = dict(
            token_limits or {}
        )  # "source length x target length" -> most slots that are tried at once; part of the state
        self.splits = 0
        self.dropped_examples: list[int] = []  # examples that did not fit even alone

    def run(self, batch: Batch, compute: Callable[[Batch, str], None]) -> None:
        """Call `compute(part, path)` until every row has been through it once; it must change nothing when it fails."""
        waiting, before = [BatchPart(batch, "")], len(self.dropped_examples)
        while waiting:
            part = waiting.pop(0)
            if _num_rows(part.batch) > 1 and _padded_tokens(part.batch) > self.token_limits.get(
                _shape_key(part.batch), 1 << 62
            ):
                waiting[:0] = _split_in_half(part)
                continue
            if self._try_part(part, compute):
                continue
            release_memory()
            if _num_rows(part.batch) == 1:
                example = int(part.batch.examples[0])
                if example not in self.dropped_examples:
                    logger.warning(
                        "out of memory for one sentence alone: example %d is left out, and all others are used",
                        example,
                    )
                self.dropped_examples.append(example)
                continue
            self.splits += 1
            self.token_limits[_shape_key(part.batch)] = int(
                RETRY_FRACTION * _padded_tokens(part.batch)
            )
            logger.log(
                logging.DEBUG if _warned else logging.WARNING,
                "out of memory with %d slots of %s: batches that do not fit are computed in parts, and the result is the same; "
                "a lower train.batch_tokens avoids it",
                _padded_tokens(part.batch),
                _shape_key(part.batch),
            )
            _warned.add("parts")
            waiting[:0] = _split_in_half(part)
        if _num_rows(batch) > 1 and len(self.dropped_examples) - before == _num_rows(batch):
            raise torch.OutOfMemoryError(
                f"out of memory for every sentence of a batch of {_shape_key(batch)}"
            )

    def run_unsplit(self, batch: Batch, compute: Callable[[Batch, str], None]) -> None:
        """Call `compute` once, where the other ranks are in the same pass and no rank can split its batch alone."""
        if not self._try_part(BatchPart(batch, ""), compute):
            found = f"out of memory with {_padded_tokens(batch)} slots of {_shape_key(batch)}"
            raise ConfigError(
                [
                    f"with train.fsdp every batch must fit into the memory of every rank; found {found}; lower train.batch_tokens"
                ]
            )

    @staticmethod
    def _try_part(part: BatchPart, compute: Callable[[Batch, str], None]) -> bool:
        """Try one part. The exception must be gone before the retry: its traceback holds the tensors that filled the memory."""
        try:
            compute(part.batch, part.path)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


def _num_rows(batch: Batch) -> int:
    return len(batch.examples)


def _padded_tokens(batch: Batch) -> int:
    """Count the padded slots of the longer side, as `train.batch_tokens` does."""
    return _num_rows(batch) * max(batch.src.shape[1], batch.tgt_in.shape[1])


def _shape_key(batch: Batch) -> str:
    return f"{batch.src.shape[1]}x{batch.tgt_in.shape[1]}"


def _split_in_half(part: BatchPart) -> list[BatchPart]:
    """Cut a part's rows in two."""
    middle = (_num_rows(part.batch) + 1) // 2
    return [
        BatchPart(part.batch.rows(slice(middle)), part.path + "0"),
        BatchPart(part.batch.rows(slice(middle, None)), part.path + "1"),
    ]


class StepRequests(NamedTuple):
    """What is wanted of the run besides going on."""

    stop: bool = False
    save_checkpoint: bool = False
    out_of_time: bool = False  # the time budget is spent


class StepMetrics(NamedTuple):
    """What an update amounted to, over all ranks, as plain numbers."""

    total: float  # per valid target
    nll: float
    targets: int
    grad_norm: float  # of the mean gradient, before clipping
    is_finite: bool
    tokens: int
    padded_tokens: int
    requests: StepRequests  # of any rank


class PendingMetrics:
    """Figures on their way from the device."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> StepMetrics:
        """Wait for the figures, which on a GPU have arrived when the next update has been launched."""
        if self._event is not None:
            self._event.synchronize()
        (
            total,
            nll,
            count,
            tokens,
            padded_tokens,
            stop,
            save_checkpoint,
            out_of_time,
            grad_norm,
            nonfinite,
        ) = self._values.tolist()
        targets = max(count, 1.0)
        requests = StepRequests(bool(stop), bool(save_checkpoint), bool(out_of_time))
        return StepMetrics(
            total / targets,
            nll / targets,
            int(count),
            grad_norm,
            not nonfinite,
            int(tokens),
            int(padded_tokens),
            requests,
        )


class TrainStep:
    """Computes and applies updates; owns nothing that outlives one except the optimiser."""

    def __init__(
        self,
        *,
        parallel: ParallelStrategy,
        task: Task,
        optimizer: Optimizer,
        device: torch.device,
        precision: Precision,
        oom_splitter: OOMSplitter,
        seed: int,
        max_grad_norm: float,
        cuda_graphs: bool = False,
    ) -> None:
        self._parallel, self._task, self._optimizer = parallel, task, optimizer
        self._device, self._precision, self.oom_splitter, self._seed, self._max_grad_norm = (
            device,
            precision,
            oom_splitter,
            seed,
            max_grad_norm,
        )
        self._parameters = [
            parameter for parameter in parallel.local_module.parameters() if parameter.requires_grad
        ]
        self._gradient_function = (
            CUDAGraphRunner(
                self._forward_backward,
                self._parameters,
                device,
                accumulates_grad=parallel.accumulates_grad,
            )
            if cuda_graphs
            else self._forward_backward
        )

    def release_graphs(self) -> None:
        """Let go of what was recorded of earlier updates."""
        if isinstance(self._gradient_function, CUDAGraphRunner):
            self._gradient_function.release_graphs()

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether a shape that comes again is launched as one, which takes it some updates to get ready."""
        return isinstance(self._gradient_function, CUDAGraphRunner)

    def __call__(
        self, update: GlobalBatch, *, learning_rate: float, requests: StepRequests
    ) -> PendingMetrics:
        """Do one update; the figures can be read from what is returned."""
        gradient, sums = self.gradient(update)
        tokens = sum(part.batch.tokens for part in update.micro_batches if not part.is_dummy)
        padded_tokens = sum(
            part.batch.padded_tokens for part in update.micro_batches if not part.is_dummy
        )
        host_counts = torch.tensor([tokens, padded_tokens, *requests], dtype=torch.float32)
        if self._device.type == "cuda":
            host_counts = host_counts.pin_memory().to(self._device, non_blocking=True)
        sums = torch.cat([sums, host_counts])
        return self._clip_and_apply(
            self._parallel.total(gradient, sums, update.number), learning_rate
        )

    def gradient(self, update: GlobalBatch) -> tuple[Gradients, Tensor]:
        """Sum this rank's gradients, one for each parameter, and the (total, nll, count) of its loss."""
        gradient_sums: Gradients = [None] * len(self._parameters)
        sums = torch.zeros(3, device=self._device)
        num_passes = 0
        fault_injection.point("update.before")
        for part in update.micro_batches:

            def compute(batch: Batch, path: str, part: MicroBatch = part) -> None:
                nonlocal num_passes
                _raise_if_urgent()
                if (
                    num_passes == 1 and self.uses_cuda_graphs
                ):  # what the first pass left is the recording's, and the second writes over it
                    gradient_sums[:] = [
                        each if each is None else each.clone() for each in gradient_sums
                    ]
                split_index = f"{part.split_index}{path and '.' + path}"
                seed = derive_seed(self._seed, update.number, part.micro_index, split_index)
                try:
                    loss = self._compute_gradients(batch, seed, is_dummy=part.is_dummy)
                except Exception as error:
                    if not fall_back_to_eager(error):
                        raise
                    loss = self._compute_gradients(
                        batch, seed, is_dummy=part.is_dummy
                    )  # from the same random numbers
                self._add_gradients(gradient_sums)
                num_passes += 1
                sums.add_(
                    torch.stack(
                        [loss.total.detach(), loss.nll.detach(), loss.count.detach()]
                    ).float()
                )

            if self._parallel.lockstep:
                self.oom_splitter.run_unsplit(part.batch, compute)
            else:
                self.oom_splitter.run(part.batch, compute)
        fault_injection.point("update.after_backward")
        return gradient_sums, sums

    def _compute_gradients(self, batch: Batch, seed: int, *, is_dummy: bool) -> Loss:
        """Leave a batch's gradients on the parameters, by replaying where that can be done."""
        seed_generators(seed, self._device)
        return (
            self._forward_backward(batch, is_dummy=True)
            if is_dummy
            else self._gradient_function(batch)
        )

    def _forward_backward(self, batch: Batch, *, is_dummy: bool = False) -> Loss:
        """Leave one batch's gradients on the parameters, or none of them: a failure half-way must not count twice."""
        batch = batch.to(self._device)
        try:
            with self._precision.autocast(self._device):
                loss = self._parallel.loss(self._task, batch)
            if is_dummy:
                loss = Loss(0 * loss.total, 0 * loss.nll, 0 * loss.count)
            self._parallel.backward(loss)
        except BaseException:
            self._clear_gradients()
            raise
        return loss

    def _add_gradients(self, gradient_sums: Gradients) -> None:
        """Add the parameters' gradients to those held, and take them off the parameters."""
        for place, parameter in enumerate(self._parameters):
            kept, new = gradient_sums[place], parameter.grad
            gradient_sums[place] = new if kept is None else kept if new is None else kept.add_(new)
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _clip_and_apply(self, total: ReducedGradients, learning_rate: float) -> PendingMetrics:
        """Divide by the global count, clip, and step unless something is not finite; all on the device."""
        gradient, sums, grad_norm = total
        count = sums[2].clamp(min=1.0)
        grad_norm = grad_norm / count
        # Without any target there is no gradient either, and Adam must not move on its memory alone.
        nonfinite = (~(torch.isfinite(grad_norm) & torch.isfinite(sums[0]) & (sums[2] > 0))).float()
        # The kernel divides by this, and clipping multiplies: g / (count * norm / clip) has the norm `clip`.
        divisor = (
            count * torch.clamp(grad_norm / self._max_grad_norm, min=1.0)
            if self._max_grad_norm
            else count
        )
        for parameter, part in zip(self._parameters, gradient, strict=True):
            parameter.grad = part
        optimizers.apply_gradients(
            self._optimizer, learning_rate=learning_rate, divisor=divisor, nonfinite=nonfinite
        )
        self._clear_gradients()
        return PendingMetrics(torch.cat([sums, torch.stack([grad_norm, nonfinite])]))


def _raise_if_urgent() -> None:
    if signals.is_stop_urgent():
        raise StoppedError(
            "a second request to stop leaves the update in progress",
            found=signals.stop_reason(),
            fix="run the same command again to go on from the last checkpoint",
        )
