"""The contract of a block: what encoders and decoders are lists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from dragoman.config import ModelConfig
from dragoman.models.context import ForwardContext
from dragoman.models.decoder_state import DecoderState


class ExtendOutput(NamedTuple):
    """More positions, and the state after them."""

    output: Tensor  # (B, T, D)
    state: DecoderState


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Where a block will stand: what a builder needs to know beside the configuration."""

    config: ModelConfig
    causal: bool  # a decoder's block, which sees no future
    memory_width: int | None  # the width of what it may attend to; None where there is no encoder


class Block(nn.Module):
    """One step of a stack. A causal block also generates; a two-sided one only has `forward`.

    Extending in any split equals `forward`.
    """

    final_norm = False  # whether a stack that ends with this block needs a norm after it
    supports_compile: ClassVar[bool] = (
        True  # whether its code is the same for all lengths, so that compiling it pays
    )
    bf16_params_by_default: ClassVar[bool] = (
        False  # whether a GPU trains it with weights rounded to bfloat16 unless told otherwise
    )
    overridable: ClassVar[
        tuple[str, ...]
    ] = ()  # settings of `model` that a block may have for itself: transformer(heads=4)

    @classmethod
    def build(cls, build_context: BuildContext) -> Block:
        """Build the block for a place; keyword arguments beside it are the block's own options."""
        raise NotImplementedError

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once: training, encoding."""
        raise NotImplementedError

    def start(self, context: ForwardContext) -> DecoderState:
        """Stand before the first position."""
        raise NotImplementedError

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T >= 1 more positions (B, T, D)."""
        raise NotImplementedError
