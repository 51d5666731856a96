"""A stack: blocks one after another, and the norm that some residual wirings want at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from dragoman.models.blocks import Block, Extended
from dragoman.models.context import Context
from dragoman.models.state import State


class Stack(nn.Module):
    """Blocks named by their number, so that a module path reads `encoder.0.self`."""

    def __init__(self, blocks: Sequence[Block], norm: nn.Module | None = None) -> None:
        super().__init__()
        for number, block in enumerate(blocks):
            self.add_module(str(number), block)
        self.depth = len(blocks)
        self.norm = norm

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Go through the blocks, first to last, with their names."""
        for number in range(self.depth):
            block = getattr(self, str(number))
            yield str(number), block

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) at once."""
        for _, block in self.blocks():
            x = block(x, context)
        return x if self.norm is None else self.norm(x)

    def start(self, context: Context) -> State:
        """Stand before the first position."""
        return State(parts={name: block.start(context) for name, block in self.blocks()})

    def extend(self, x: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D)."""
        count = x.size(1)
        parts = {}
        for name, block in self.blocks():
            x, parts[name] = block.extend(x, state.parts[name])
        return Extended(x if self.norm is None else self.norm(x), state.advance(count, parts=parts))
