r"""Reversible layers: two streams that change in turn, so that what went in can be computed from what came out.

.. math:: y_1 = x_1 + F(x_2) \qquad y_2 = x_2 + G(y_1)

Gomez et al. (2017); in a Transformer, Kitaev et al. (2020), with F the attention and G the feed-forward layer. Each change reads the
stream that was written last and adds to the other one, however many changes there are: a decoder's layer has three. Training keeps
the streams behind the last change only, and on the way back takes each change off again: memory does not grow with depth, for one
more forward pass. What comes back differs from what went in by rounding, so gradients do too. A change that decides (a hash)
may note its decision, to decide alike on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

SavedDecisions = dict[
    str, Tensor
]  # what a change decided: empty on the way forward, filled on the way back


class ReversibleSublayer(NamedTuple):
    """What one stream adds to the other."""

    apply: Callable[
        [Tensor, Tensor | None, SavedDecisions], Tensor
    ]  # the stream (B, T, D) and the memory (B, S, D)
    parameters: tuple[nn.Parameter, ...]


def run_sublayers(
    sublayers: Sequence[ReversibleSublayer], x: Tensor, memory: Tensor | None
) -> Tensor:
    """Put (B, T, D) through the changes as any other layers, and give the mean of both streams."""
    written, read = x, x
    for sublayer in sublayers:
        written, read = read, written + sublayer.apply(read, memory, {})
    return (written + read) / 2


@_disable_dynamo  # torch.compile would keep what this takes care not to keep; torch.compiler.disable imports torch._dynamo at once
def run_sublayers_reversible(
    sublayers: Sequence[ReversibleSublayer], x: Tensor, memory: Tensor | None, *, random: bool
) -> Tensor:
    """Do the same, keeping nothing in between; `random` says that changes draw numbers, which must be drawn again alike."""
    parameters = list(
        dict.fromkeys(
            each for sublayer in sublayers for each in sublayer.parameters if each.requires_grad
        )
    )
    mean: Tensor = _ReversibleFunction.apply(tuple(sublayers), random, x, memory, *parameters)  # type: ignore[no-untyped-call]
    return mean


class _ReversibleFunction(torch.autograd.Function):
    """Changes forward, and backward without what they went through."""

    @staticmethod
    def forward(
        ctx: Any,
        sublayers: tuple[ReversibleSublayer, ...],
        random: bool,
        x: Tensor,
        memory: Tensor | None,
        *parameters: nn.Parameter,
    ) -> Tensor:
        """Run all changes; keep both streams at the end, the decisions, and where the random numbers stood."""
        ctx.sublayers, ctx.parameters, ctx.decisions, ctx.rng_states = sublayers, parameters, [], []
        ctx.cast = _autocast_settings(x.device.type)
        written, read = x, x
        # In half precision attention has other kernels where gradients are wanted, and what is added must be what is taken off.
        with_grad = ctx.cast["enabled"]
        with torch.autocast(**ctx.cast), torch.set_grad_enabled(with_grad):
            for sublayer in sublayers:
                ctx.rng_states.append(_rng_states(x.device) if random else None)
                saved: SavedDecisions = {}
                sublayer_output = sublayer.apply(
                    read.detach().requires_grad_(with_grad), memory, saved
                )
                written, read = read, written + sublayer_output.detach()
                ctx.decisions.append(saved)
        ctx.save_for_backward(written, read, memory)
        return (written + read) / 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Take the changes off, last to first, and send the gradient through each on the way."""
        written, read, memory = ctx.saved_tensors
        memory = None if memory is None else memory.detach().requires_grad_(ctx.needs_input_grad[3])
        grads: dict[int, Tensor] = {}  # by the id of what they belong to
        grad_written, grad_read = grad_output / 2, grad_output / 2
        for sublayer, saved, rng_states in zip(
            reversed(ctx.sublayers), reversed(ctx.decisions), reversed(ctx.rng_states), strict=True
        ):
            # Of the streams before the change, the one that it read is now `written`.
            source = written.detach().requires_grad_()
            with (
                torch.enable_grad(),
                torch.autocast(**ctx.cast),
                _restored_rng(rng_states, source.device),
            ):
                sublayer_output = sublayer.apply(source, memory, saved)
            wanted = [source, *(each for each in sublayer.parameters if each.requires_grad)]
            wanted += [memory] if memory is not None and memory.requires_grad else []
            grad_source, *others = torch.autograd.grad(
                sublayer_output, wanted, grad_read.to(sublayer_output.dtype), allow_unused=True
            )
            for each, grad in zip(wanted[1:], others, strict=True):
                if grad is not None:
                    grads[id(each)] = grads[id(each)] + grad if id(each) in grads else grad
            written, read = read - sublayer_output.detach(), written
            grad_written, grad_read = (
                grad_read,
                grad_written if grad_source is None else grad_written + grad_source,
            )
        return (
            None,
            None,
            grad_written + grad_read,
            grads.get(id(memory)),
            *(grads.get(id(each)) for each in ctx.parameters),
        )


def _autocast_settings(kind: str) -> dict[str, Any]:
    """Say how products are cast on a kind of device; without the cache, whose copies of weights made here would carry no gradient."""
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": False,
    }


def _rng_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Say where the generators stand that layers on a device draw from."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "reversible layers draw dropout's numbers twice, and a recording of launches would draw others"
        )
    return torch.get_rng_state(), torch.cuda.get_rng_state(
        device
    ) if device.type == "cuda" else None


@contextmanager
def _restored_rng(
    rng_states: tuple[Tensor, Tensor | None] | None, device: torch.device
) -> Iterator[None]:
    """Draw once more what was drawn from a place on, and leave the generators as they were."""
    if rng_states is None:
        yield
        return
    host, on_device = rng_states
    with torch.random.fork_rng(devices=[device] if on_device is not None else []):
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        yield
