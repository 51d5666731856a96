"""A stack: blocks one after another, some left out in training where that is asked for, and the norm that some wirings want at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.models.block import Block, ExtendOutput
from dragoman.models.context import ForwardContext
from dragoman.models.decoder_state import DecoderState


class Stack(nn.Module):
    """Blocks named by their number, so that a module path reads `encoder.0.self`.

    With a `layer_drop`, each block is left out of a training pass with that probability, and what went into it goes on; afterwards
    all are there, and nothing is rescaled: Fan, Grave and Joulin (2020).
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        norm: nn.Module | None = None,
        *,
        block_texts: Sequence[str] = (),
        layer_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.block_texts = tuple(block_texts)  # in which each block was asked for
        self.shared_from: dict[
            str, str
        ] = {}  # path of a shared weight -> path of the one that it is
        self.layer_drop = layer_drop
        for number, block in enumerate(blocks):
            self.add_module(str(number), block)
        self.depth = len(blocks)
        self.norm = norm

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Go through the blocks, first to last, with their names."""
        for number in range(self.depth):
            block = getattr(self, str(number))
            yield str(number), block

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once."""
        drops_layers = self.training and self.layer_drop > 0
        for _, block in self.blocks():
            x = self._maybe_skip(block, x, context) if drops_layers else block(x, context)
        return x if self.norm is None else self.norm(x)

    def start(self, context: ForwardContext) -> DecoderState:
        """Stand before the first position."""
        return DecoderState(children={name: block.start(context) for name, block in self.blocks()})

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T more positions (B, T, D)."""
        count = x.size(1)
        children = {}
        for name, block in self.blocks():
            x, children[name] = block.extend(x, state.children[name])
        return ExtendOutput(
            x if self.norm is None else self.norm(x), state.advance(count, children=children)
        )

    def _maybe_skip(self, block: Block, x: Tensor, context: ForwardContext) -> Tensor:
        """Leave a block out or not, as the generator that was seeded for this batch says."""
        if torch.compiler.is_compiling():  # a compiled pass is one graph: both ways are computed
            return torch.where(
                torch.rand((), device=x.device) < self.layer_drop, x, block(x, context)
            )
        if (
            torch.rand((), device="cpu") >= self.layer_drop
        ):  # the host's generator: asking a GPU's would take a wait
            return block(x, context)
        memory = (
            [] if context.memory is None else [context.memory.values]
        )  # or an encoder that nobody reads would be forgotten too
        passed: Tensor = _SkippedBlock.apply(x, *memory, *block.parameters())  # type: ignore[no-untyped-call]
        return passed


class _SkippedBlock(torch.autograd.Function):
    """Hands on what a layer was to change. Its weights, and what it was to read, get the gradient nought, not none: an optimiser
    then moves on its memory whether the ranks left the layer out together or not, and has something of every weight to save.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *unused: Tensor) -> Tensor:
        """Give the input back."""
        ctx.save_for_backward(*unused)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Hand the gradient on."""
        return grad, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
