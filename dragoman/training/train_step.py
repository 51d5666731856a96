"""One optimizer step: gradient accumulation, all-reduce, gradient clipping and the update.

Nothing here synchronizes with the device. Whether the gradients are finite is decided on the device
by the optimizer's fused kernel, and the metrics of a step are read when they have arrived: one step
later on a GPU. A micro-batch that runs out of memory is computed in halves by `OOMSplitter`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dragoman.data.collate import TensorBatch
from dragoman.errors import ConfigError, StoppedError
from dragoman.runtime import signals
from dragoman.runtime.out_of_memory import RETRY_FRACTION, is_out_of_memory, release_memory
from dragoman.runtime.random_generators import default_generators
from dragoman.storage import fault_injection
from dragoman.training.cuda_graphs import CUDAGraphRunner
from dragoman.training.data_loader import GlobalBatch, derive_seed
from dragoman.training.task_protocol import Loss, Task
from dragoman.training.torch_compile import fall_back_to_eager

logger = logging.getLogger(__name__)

Gradients = list[Tensor | None]  # one for each trainable parameter of the local module


class ReducedGradients(NamedTuple):
    """Gradients and metrics of a step, summed over all ranks."""

    gradients: Gradients
    sums: Tensor
    grad_norm: Tensor  # () of the whole model's gradient, before any division


class ParallelStrategy(Protocol):
    """How the ranks hold the model and sum its gradients."""

    module: nn.Module  # used to compute the loss
    local_module: nn.Module  # holds the parameters that this rank optimizes, averages and saves
    lockstep: bool  # whether ranks communicate within a forward pass, so that all need equally many
    accumulates_grad: bool  # whether a backward pass adds to existing gradients or overwrites them
    file_suffix: str  # ends the names of this rank's checkpoint files, such as "-0-of-2"

    def wrap_task(self, task: Task) -> Task:
        """Return the task, wrapped as this strategy needs it."""
        ...

    def backward(self, loss: Loss) -> None:
        """Leave the loss's gradients on the parameters of the local module."""
        ...

    def all_reduce_gradients(
        self, gradients: Gradients, sums: Tensor, step: int
    ) -> ReducedGradients:
        """Sum the gradients and metrics of a step over the ranks."""
        ...

    def gathered_model(self) -> AbstractContextManager[None]:
        """Gather the whole model on rank 0.

        Every rank must call it, and none may train meanwhile.
        """
        ...

    def local_rows(self, name: str) -> slice | None:
        """Return which rows of a weight this rank holds; None for all of them."""
        ...


class SingleProcess:
    """Training in one process, which holds the whole model."""

    lockstep = False
    accumulates_grad = True
    file_suffix = ""

    def __init__(self, model: nn.Module) -> None:
        self.module = self.local_module = model

    def wrap_task(self, task: Task) -> Task:
        """Return the task unchanged."""
        return task

    def backward(self, loss: Loss) -> None:
        """Leave the loss's gradients on the parameters."""
        loss.total.backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def all_reduce_gradients(
        self, gradients: Gradients, sums: Tensor, step: int
    ) -> ReducedGradients:
        """Return gradients and sums as they are, with the gradient's norm."""
        present = [gradient for gradient in gradients if gradient is not None]
        return ReducedGradients(gradients, sums, torch.nn.utils.get_total_norm(present))

    def gathered_model(self) -> AbstractContextManager[None]:
        """Do nothing: the model is whole."""
        return nullcontext()

    def local_rows(self, name: str) -> slice | None:
        """Return None: all rows are here."""
        return None


class StepRequests(NamedTuple):
    """Requests that end or interrupt training; sent with the gradients, so that all ranks agree."""

    stop: bool = False
    save_checkpoint: bool = False
    out_of_time: bool = False  # the time budget is spent


class StepMetrics(NamedTuple):
    """Metrics of one step over all ranks, as Python numbers."""

    loss: float  # per target token, with label smoothing and auxiliary losses
    nll: float  # per target token
    num_targets: int
    grad_norm: float  # of the mean gradient, before clipping
    is_finite: bool
    tokens: int
    padded_tokens: int
    requests: StepRequests  # of any rank


class PendingMetrics:
    """Metrics being copied asynchronously from the device."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> StepMetrics:
        """Wait for the metrics; on a GPU they have arrived once the next step has been launched."""
        if self._event is not None:
            self._event.synchronize()
        total, nll, count, tokens, padded_tokens, *requests, grad_norm, nonfinite = (
            self._values.tolist()
        )
        num_targets = max(count, 1.0)
        return StepMetrics(
            total / num_targets,
            nll / num_targets,
            int(count),
            grad_norm,
            not nonfinite,
            int(tokens),
            int(padded_tokens),
            StepRequests(*map(bool, requests)),
        )


class TrainStep:
    """Computes the gradients of a batch and applies them; the optimizer is its only state."""

    def __init__(
        self,
        *,
        parallel: ParallelStrategy,
        task: Task,
        optimizer: Optimizer,
        device: torch.device,
        autocast: AbstractContextManager[object],
        oom_splitter: OOMSplitter,
        seed: int,
        max_grad_norm: float,
        cuda_graphs: bool = False,
    ) -> None:
        self._parallel, self._optimizer, self._device = parallel, optimizer, device
        self.task = parallel.wrap_task(task)
        self._autocast, self.oom_splitter = autocast, oom_splitter
        self._seed, self._max_grad_norm = seed, max_grad_norm
        self._generators = default_generators(device)
        self._parameters = [
            parameter for parameter in parallel.local_module.parameters() if parameter.requires_grad
        ]
        self._compute_gradients: Callable[[TensorBatch], Loss] = self._forward_backward
        self.uses_cuda_graphs = cuda_graphs
        if cuda_graphs:
            self._compute_gradients = CUDAGraphRunner(
                self._forward_backward,
                self._parameters,
                device,
                accumulates_grad=parallel.accumulates_grad,
            )

    def release_graphs(self) -> None:
        """Free the captured CUDA graphs and their memory."""
        if isinstance(self._compute_gradients, CUDAGraphRunner):
            self._compute_gradients.release_graphs()

    def __call__(self, batch: GlobalBatch, *, lr: float, requests: StepRequests) -> PendingMetrics:
        """Do one step: accumulate gradients over micro-batches, sum over ranks, clip, apply."""
        gradients: Gradients = [None] * len(self._parameters)
        sums = torch.zeros(3, device=self._device)  # loss, negative log-likelihood, targets
        num_passes = 0
        if fault_injection.armed_faults:
            fault_injection.point("step.before")
        for micro_batch in batch.micro_batches:
            may_split = not self._parallel.lockstep
            for part in self.oom_splitter.parts(micro_batch.batch, may_split=may_split):
                _raise_if_urgent()
                with part:  # an out-of-memory error ends this block; the part's halves come next
                    if num_passes == 1 and self.uses_cuda_graphs:
                        # The first pass's gradients belong to a CUDA graph; the next overwrites
                        # them.
                        gradients = [each if each is None else each.clone() for each in gradients]
                    split = f"{micro_batch.split_index}{part.path and '.' + part.path}"
                    seed = derive_seed(self._seed, batch.step, micro_batch.micro_index, split)
                    for generator in self._generators:
                        generator.manual_seed(seed)
                    compute = self._compute_gradients
                    if micro_batch.is_dummy:
                        compute = partial(self._forward_backward, is_dummy=True)
                    self._accumulate(compute(part.batch), gradients, sums)
                    num_passes += 1
        if fault_injection.armed_faults:
            fault_injection.point("step.after_backward")
        sums = torch.cat([sums, self._host_counts(batch, requests)])
        return self._clip_and_apply(
            self._parallel.all_reduce_gradients(gradients, sums, batch.step), lr
        )

    def _forward_backward(self, batch: TensorBatch, *, is_dummy: bool = False) -> Loss:
        """Compute the loss and its gradients; after an error, leave no gradients behind."""
        batch = batch.to(self._device)
        try:
            with self._autocast:
                loss = self.task.loss(self._parallel.module, batch)
            if is_dummy:
                loss = Loss(0 * loss.total, 0 * loss.nll, 0 * loss.count)
            self._parallel.backward(loss)
        except BaseException:
            self._clear_gradients()
            raise
        return loss

    def _accumulate(self, loss: Loss, gradients: Gradients, sums: Tensor) -> None:
        """Add the parameters' gradients and the loss to the sums.

        Clear the parameters' gradients.
        """
        for index, parameter in enumerate(self._parameters):
            sum_, new = gradients[index], parameter.grad
            gradients[index] = new if sum_ is None else sum_ if new is None else sum_.add_(new)
        self._clear_gradients()
        values = [loss.total.detach(), loss.nll.detach(), loss.count.detach()]
        sums.add_(torch.stack(values).float())

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _host_counts(self, batch: GlobalBatch, requests: StepRequests) -> Tensor:
        """Return this rank's token counts and requests as a tensor on the device."""
        counted = [each.batch for each in batch.micro_batches if not each.is_dummy]
        tokens = sum(each.tokens for each in counted)
        padded_tokens = sum(each.padded_tokens for each in counted)
        counts = torch.tensor([tokens, padded_tokens, *requests], dtype=torch.float32)
        if self._device.type == "cuda":
            counts = counts.pin_memory().to(self._device, non_blocking=True)
        return counts

    @torch.no_grad()
    def _clip_and_apply(self, reduced: ReducedGradients, lr: float) -> PendingMetrics:
        """Divide by the number of targets, clip the gradient norm, and step if all are finite."""
        gradients, sums, grad_norm = reduced
        count = sums[2].clamp(min=1.0)
        grad_norm = grad_norm / count
        # Without targets there is no gradient, and Adam must not step on its moments alone.
        nonfinite = (~(torch.isfinite(grad_norm) & torch.isfinite(sums[0]) & (sums[2] > 0))).float()
        # The fused kernel divides by this: g / (count * norm / max_norm) has the norm `max_norm`.
        divisor = count
        if self._max_grad_norm:
            divisor = count * torch.clamp(grad_norm / self._max_grad_norm, min=1.0)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        apply_gradients(self._optimizer, lr=lr, divisor=divisor, nonfinite=nonfinite)
        self._clear_gradients()
        return PendingMetrics(torch.cat([sums, torch.stack([grad_norm, nonfinite])]))


def apply_gradients(optimizer: Optimizer, *, lr: float, divisor: Tensor, nonfinite: Tensor) -> None:
    """Step with the gradients divided by `divisor`; do nothing if `nonfinite` is 1."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    fused: Any = optimizer  # torch reads these two attributes in every fused step
    fused.grad_scale, fused.found_inf = divisor, nonfinite
    optimizer.step()


# Out-of-memory retries

_warned = set[str]()  # one warning per process, though several trainers may be built in it


class BatchPart:
    """Rows of a micro-batch that are computed together.

    `with part:` catches out-of-memory errors and failures of torch.compile, and records them.
    `path` names the splits that led to the part: "" for the whole batch, "01" for the second half
    of its first half.
    """

    def __init__(self, batch: TensorBatch, path: str = "") -> None:
        self.batch, self.path = batch, path
        self.out_of_memory = self.run_again = False

    def __enter__(self) -> None:
        self.out_of_memory = self.run_again = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        # Swallowing the error here frees its traceback, which holds the tensors that filled the
        # memory.
        if isinstance(error, Exception):
            self.out_of_memory = isinstance(
                error, (RuntimeError, MemoryError)
            ) and is_out_of_memory(error)
            self.run_again = not self.out_of_memory and fall_back_to_eager(error)
        return self.out_of_memory or self.run_again

    @property
    def num_rows(self) -> int:
        """Number of examples."""
        return len(self.batch.examples)

    @property
    def padded_tokens(self) -> int:
        """Padded tokens, as `train.batch_tokens` counts them."""
        return self.batch.limit_tokens

    @property
    def shape_key(self) -> str:
        """The padded lengths of the batch."""
        return self.batch.shape_key

    def halves(self) -> list[BatchPart]:
        """Return the first and the second half of the rows."""
        middle = (self.num_rows + 1) // 2
        return [
            BatchPart(self.batch.rows(slice(middle)), self.path + "0"),
            BatchPart(self.batch.rows(slice(middle, None)), self.path + "1"),
        ]


class OOMSplitter:
    """Splits batches that run out of memory, and stores the sizes that fit."""

    def __init__(self, token_limits: dict[str, int] | None = None) -> None:
        # Shape of a batch -> most padded tokens computed together; part of the training state.
        self.token_limits = dict(token_limits or {})
        self.splits = 0
        self.dropped_examples: list[int] = []  # sentence pairs that did not fit even alone

    def reset(self) -> None:
        """Forget which sizes fit and which did not."""
        self.token_limits.clear()
        self.dropped_examples.clear()
        self.splits = 0

    def parts(self, batch: TensorBatch, *, may_split: bool = True) -> Iterator[BatchPart]:
        """Yield parts of a batch until every row has been computed once, each within `with part:`.

        A part that ran out of memory is followed by its halves. Without `may_split`, where other
        ranks are in the same forward pass, running out of memory raises ConfigError.
        """
        whole, dropped_before = BatchPart(batch), len(self.dropped_examples)
        waiting = [whole]
        while waiting:
            part = waiting.pop(0)
            limit = self.token_limits.get(part.shape_key, 1 << 62)
            if may_split and part.num_rows > 1 and part.padded_tokens > limit:
                waiting[:0] = part.halves()
                continue
            yield part
            if part.run_again:
                waiting.insert(0, part)
            elif part.out_of_memory:
                if not may_split:
                    raise _unsplittable_error(part)
                release_memory()
                waiting[:0] = self._split(part)
        if whole.num_rows > 1 and len(self.dropped_examples) - dropped_before == whole.num_rows:
            raise torch.OutOfMemoryError(
                f"out of memory for every sentence of a batch of {whole.shape_key}"
            )

    def _split(self, part: BatchPart) -> list[BatchPart]:
        """Return the halves of a part that did not fit; drop a single sentence pair."""
        if part.num_rows == 1:
            example = int(part.batch.examples[0])
            if example not in self.dropped_examples:
                logger.warning(
                    "out of memory for one sentence pair alone: example %d is skipped", example
                )
            self.dropped_examples.append(example)
            return []
        self.splits += 1
        self.token_limits[part.shape_key] = int(RETRY_FRACTION * part.padded_tokens)
        logger.log(
            logging.DEBUG if _warned else logging.WARNING,
            "out of memory with %d padded tokens of shape %s: batches that do not fit are computed "
            "in parts, with the same result; lower train.batch_tokens to avoid it",
            part.padded_tokens,
            part.shape_key,
        )
        _warned.add("parts")
        return part.halves()


def _unsplittable_error(part: BatchPart) -> ConfigError:
    found = f"out of memory with {part.padded_tokens} padded tokens of shape {part.shape_key}"
    return ConfigError(
        [
            "with train.fsdp every batch must fit into the memory of every rank; "
            f"found {found}; lower train.batch_tokens"
        ]
    )


def _raise_if_urgent() -> None:
    """Raise StoppedError at a second stop request, which does not wait for the end of the step."""
    if signals.is_stop_urgent():
        raise StoppedError(
            "a second stop request interrupts the training step",
            found=signals.stop_reason(),
            fix="run the same command again to resume from the last checkpoint",
        )
