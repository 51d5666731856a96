r"""Reversible layers: two residual streams whose inputs can be recomputed from their outputs.

.. math:: y_1 = x_1 + F(x_2) \qquad y_2 = x_2 + G(y_1)

Gomez et al. (2017); in a Transformer Kitaev et al. (2020), where F is attention and G the
feed-forward network. Each sublayer reads the stream that was written last and adds to the other
one; a decoder layer has three sublayers. Training saves only the last streams, and the backward
pass subtracts each sublayer's output again: memory does not grow with depth, at the cost of one
more forward pass. Recomputed inputs differ from the original ones by rounding, so gradients do too.
A sublayer with a discrete decision (a hash) can save it for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

SavedDecisions = dict[str, Tensor]  # empty in the forward pass, filled in the backward pass


class ReversibleSublayer(NamedTuple):
    """A sublayer as a function of the stream it reads, with its parameters."""

    # Takes the stream (B, T, D), the memory (B, S, D) and saved decisions.
    apply: Callable[[Tensor, Tensor | None, SavedDecisions], Tensor]
    parameters: tuple[nn.Parameter, ...]


def run_sublayers(
    sublayers: Sequence[ReversibleSublayer], x: Tensor, memory: Tensor | None
) -> Tensor:
    """Run the sublayers on (B, T, D) with autograd; return the mean of both streams."""
    written, read = x, x
    for sublayer in sublayers:
        written, read = read, written + sublayer.apply(read, memory, {})
    return (written + read) / 2


# torch.compile would save activations; torch.compiler.disable would import torch._dynamo now.
@_disable_dynamo
def run_sublayers_reversible(
    sublayers: Sequence[ReversibleSublayer], x: Tensor, memory: Tensor | None, *, random: bool
) -> Tensor:
    """Do the same without saving activations; with `random`, restore RNG states to recompute."""
    parameters = list(
        dict.fromkeys(
            each for sublayer in sublayers for each in sublayer.parameters if each.requires_grad
        )
    )
    mean: Tensor = _ReversibleFunction.apply(tuple(sublayers), random, x, memory, *parameters)  # type: ignore[no-untyped-call]
    return mean


class _ReversibleFunction(torch.autograd.Function):
    """Runs the sublayers, and recomputes their inputs in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        sublayers: tuple[ReversibleSublayer, ...],
        random: bool,
        x: Tensor,
        memory: Tensor | None,
        *parameters: nn.Parameter,
    ) -> Tensor:
        """Run all sublayers; save the last streams, the decisions and the RNG states."""
        ctx.sublayers, ctx.parameters, ctx.decisions, ctx.rng_states = sublayers, parameters, [], []
        ctx.cast = _autocast_settings(x.device.type)
        written, read = x, x
        # In half precision attention uses other kernels with gradients enabled, and the backward
        # pass must subtract exactly what was added.
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
        """Subtract the sublayers' outputs, last to first, and backpropagate through each."""
        written, read, memory = ctx.saved_tensors
        memory = None if memory is None else memory.detach().requires_grad_(ctx.needs_input_grad[3])
        grads: dict[int, Tensor] = {}  # by the id of the tensor
        grad_written, grad_read = grad_output / 2, grad_output / 2
        for sublayer, saved, rng_states in zip(
            reversed(ctx.sublayers), reversed(ctx.decisions), reversed(ctx.rng_states), strict=True
        ):
            # The stream that the sublayer read is now `written`.
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
    """Return autocast's settings, without its cache: weights cast here would carry no gradient."""
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": False,
    }


def _rng_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the RNG states of the CPU and of the device."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("reversible layers with dropout cannot be captured in a CUDA graph")
    return torch.get_rng_state(), torch.cuda.get_rng_state(
        device
    ) if device.type == "cuda" else None


@contextmanager
def _restored_rng(
    rng_states: tuple[Tensor, Tensor | None] | None, device: torch.device
) -> Iterator[None]:
    """Restore RNG states within the block, and the current ones after it."""
    if rng_states is None:
        yield
        return
    host, on_device = rng_states
    with torch.random.fork_rng(devices=[device] if on_device is not None else []):
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
        yield
