"""Parts of a Transformer's layer as blocks of their own, to stand beside recurrences and convolutions: `attend`, `feedforward`."""

from __future__ import annotations

from torch import Tensor

from dragoman.attention.multihead import CrossAttention
from dragoman.layers.feedforward import FeedForward
from dragoman.layers.residual import Residual
from dragoman.models.blocks import Block, Extended, Place
from dragoman.models.context import Context, Memory
from dragoman.models.options import AttendOptions, FeedForwardOptions
from dragoman.models.state import State
from dragoman.models.transformer import feedforward_of, shape_of_heads
from dragoman.registry import catalogue


class AttendLayer(Block):
    """Multi-head attention to the memory and nothing else: `attend` in a configuration."""

    overrides = AttendOptions.overrides

    def __init__(self, *, cross: CrossAttention, residual: Residual) -> None:
        super().__init__()
        self.cross = cross  # recorded as decoder.0.cross
        self.residual = residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(cls, place: Place) -> AttendLayer:
        """Build a decoder's layer."""
        config = place.config
        assert place.memory_width is not None, "attend stands in decoders only: its options say so"
        cross = CrossAttention(config.width, config.heads, memory_width=place.memory_width, **shape_of_heads(config))
        return cls(cross=cross, residual=_residual(place))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) at once."""
        assert context.memory is not None, "a layer that attends to a memory must be given one"
        change = self.cross(self.residual.enter(x), context.memory.values, mask=context.memory_mask())
        return self.residual.leave(x, change)

    def start(self, context: Context) -> State:
        """Prepare the memory's keys and values once."""
        assert context.memory is not None, "a translator's decoder starts from a memory"
        memory = {"key_value": self.cross.prepare(context.memory.values)}
        if context.memory.mask is not None:
            memory["mask"] = context.memory.mask
        return State(carried=_row(context.memory), memory=memory)

    def extend(self, x: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D), each of which asks for itself."""
        mask = state.memory.get("mask")
        change = self.cross.read(self.residual.enter(x), state.memory["key_value"], mask=None if mask is None else mask.unsqueeze(1))
        return Extended(self.residual.leave(x, change), state.advance(x.size(1)))


class FeedForwardLayer(Block):
    """The feed-forward layer and nothing else: `feedforward` in a configuration."""

    overrides = FeedForwardOptions.overrides

    def __init__(self, *, feedforward: FeedForward, residual: Residual) -> None:
        super().__init__()
        self.feedforward = feedforward
        self.residual = residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(cls, place: Place) -> FeedForwardLayer:
        """Build a layer of either side."""
        config = place.config
        return cls(feedforward=feedforward_of(config), residual=_residual(place))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) by itself."""
        return self._change(x)

    def start(self, context: Context) -> State:
        """Stand before the first position; nothing will be remembered."""
        assert context.memory is not None, "a translator's decoder starts from a memory"
        return State(carried=_row(context.memory), memory={"sentence": context.memory.values.new_empty(context.memory.rows, 1, 0)})

    def extend(self, x: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D)."""
        return Extended(self._change(x), state.advance(x.size(1)))

    def _change(self, x: Tensor) -> Tensor:
        return self.residual.leave(x, self.feedforward(self.residual.enter(x)))


def _row(memory: Memory) -> dict[str, Tensor]:
    """Give a layer that remembers nothing an empty tensor for each row, so that rows can still be counted."""
    return {"row": memory.values.new_empty(memory.rows, 0)}


def _residual(place: Place) -> Residual:
    """Build the way around a layer."""
    config = place.config
    norm = catalogue("norm").load(config.norm)(config.width, config.norm_epsilon)
    found = catalogue("residual").load(config.residual)(norm, dropout=config.dropout)
    assert isinstance(found, Residual), "a residual wiring must be a Residual"
    return found
