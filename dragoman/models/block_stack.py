"""A stack of blocks with LayerDrop and an optional final norm: an encoder or a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.models.block_interface import Block, ExtendOutput, SegmentOutput
from dragoman.models.decoder_state import DecoderState
from dragoman.models.forward_context import ForwardContext


class Stack(nn.Module):
    """Blocks in sequence, named by their index: `encoder.0.self` is a module path.

    In training each block is skipped with probability `layer_drop`; outputs are not rescaled. Fan,
    Grave and Joulin (2020). `projections` change the width before the block of a name, or at the
    "end", where blocks have widths of their own.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        norm: nn.Module | None = None,
        *,
        block_texts: Sequence[str] = (),
        layer_drop: float = 0.0,
        projections: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.block_texts = tuple(block_texts)  # the blocks as written in the configuration
        # Path of a shared parameter -> path of the parameter that it shares.
        self.shared_from: dict[str, str] = {}
        self.layer_drop = layer_drop
        for number, block in enumerate(blocks):
            self.add_module(str(number), block)
        self.depth = len(blocks)
        self.reads_embeddings = any(block.reads_embeddings for block in blocks)
        if projections:
            self.projections = nn.ModuleDict(projections)
        self.has_projections = bool(projections)
        self.norm = norm

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Yield the blocks in order, with their names."""
        for number in range(self.depth):
            block = getattr(self, str(number))
            yield str(number), block

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D)."""
        drops_layers = self.training and self.layer_drop > 0
        if self.reads_embeddings:
            context = replace(context, embedded=x)
        for name, block in self.blocks():
            x = self._project(x, name)
            x = self._maybe_skip(block, x, context) if drops_layers else block(x, context)
            if not block.adds_layer_outputs:
                context.add_layer_output(x)
        return self.finish(x)

    def start(self, context: ForwardContext) -> DecoderState:
        """Return the state before the first position."""
        return DecoderState(children={name: block.start(context) for name, block in self.blocks()})

    def start_with_prefix(self, x: Tensor, context: ForwardContext) -> ExtendOutput:
        """Return the output for a prefix (B, S, D) of a prefix LM, and the state after it."""
        children = {}
        for name, block in self.blocks():
            x, children[name] = block.start_with_prefix(self._project(x, name), context)
        return ExtendOutput(self.finish(x), DecoderState(children=children))

    def extend(
        self, x: Tensor, state: DecoderState, *, layer_outputs: list[Tensor] | None = None
    ) -> ExtendOutput:
        """Return the output for T more positions (B, T, D), and the state after them.

        The output of every block, (B, T, D), is appended to `layer_outputs`.
        """
        embedded, children = x, {}
        for name, block in self.blocks():
            x = self._project(x, name)
            x, children[name] = (
                block.extend_with_embeddings(x, embedded, state.children[name])
                if block.reads_embeddings
                else block.extend(x, state.children[name])
            )
            if layer_outputs is not None:
                layer_outputs.append(x)
        return ExtendOutput(self.finish(x), state.advance(embedded.size(1), children=children))

    def _project(self, x: Tensor, name: str) -> Tensor:
        """Return (B, T, D) in the width that the block of a name takes."""
        return self.projections[name](x) if self.has_projections and name in self.projections else x

    def finish(self, x: Tensor) -> Tensor:
        """Return the last block's output in the model's width, normalized if there is a norm."""
        x = self._project(x, "end")
        return x if self.norm is None else self.norm(x)

    def carried_shapes(self, memory: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the states carried over segments, named `<block>.<tensor>`."""
        return {
            f"{number}.{name}": shape
            for number, block in self.blocks()
            for name, shape in block.carried_shapes(memory).items()
        }

    def forward_segment(
        self, x: Tensor, context: ForwardContext, previous: Mapping[str, Tensor]
    ) -> SegmentOutput:
        """Return the output for a segment (B, T, D), given the state carried from the last one."""
        carried = {}
        for number, block in self.blocks():
            prefix = f"{number}."
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in previous.items()
                if name.startswith(prefix)
            }
            x, left = block.forward_segment(self._project(x, number), context, own)
            carried.update({prefix + name: tensor for name, tensor in left.items()})
        return SegmentOutput(self.finish(x), carried)

    def _maybe_skip(self, block: Block, x: Tensor, context: ForwardContext) -> Tensor:
        """Apply or skip a block at random, with the generator that was seeded for this batch."""
        if torch.compiler.is_compiling():
            # A compiled graph has no branches: compute the block and choose.
            skip = torch.rand((), device=x.device) < self.layer_drop
            return torch.where(skip, x, block(x, context))
        # The CPU's generator, because reading a GPU tensor would synchronize.
        if torch.rand((), device="cpu") >= self.layer_drop:
            return block(x, context)
        # The encoder's output gets a gradient too, even if every block that reads it is skipped.
        memory = [] if context.memory is None else [context.memory.values]
        skipped: Tensor = _SkippedBlock.apply(x, *memory, *block.parameters())  # type: ignore[no-untyped-call]
        return skipped


class _SkippedBlock(torch.autograd.Function):
    """Identity that gives the skipped block's parameters and inputs a zero gradient, not None.

    The optimizer then updates every parameter on every rank, whichever blocks a rank skipped, and
    has state for each of them to save.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *unused: Tensor) -> Tensor:
        """Return the input."""
        ctx.save_for_backward(*unused)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of the input, and zeros for the others."""
        return grad, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)
