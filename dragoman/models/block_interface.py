"""Base class of the blocks that encoders and decoders are lists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from dragoman.config import ModelConfig
from dragoman.layers.norms_and_residuals import Residual
from dragoman.models.decoder_state import DecoderState
from dragoman.models.forward_context import ForwardContext
from dragoman.registry import catalogue


class ExtendOutput(NamedTuple):
    """Hidden states of the new positions, and the decoder state after them."""

    output: Tensor  # (B, T, D)
    state: DecoderState


class SegmentOutput(NamedTuple):
    """Hidden states of a segment, and the state carried to the next one of its stream."""

    output: Tensor  # (B, T, D)
    carried: dict[str, Tensor]  # detached


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildContext:
    """Arguments of a block's `build` besides its own options."""

    config: ModelConfig  # with the block's overrides, as in transformer(heads=4)
    causal: bool  # whether it is a decoder's block
    # Width of the encoder's output; None in an encoder or a language model.
    memory_width: int | None
    input_width: int | None = None  # width of the block's input; None for config.width


class Block(nn.Module):
    """One entry of `model.encoder` or `model.decoder`.

    Every block has `forward`. A decoder's block also has `start` and `extend`, and extending by any
    split of a sequence gives the same output as `forward`.
    """

    # Whether a stack that ends with this block needs a final norm (pre-norm blocks do).
    final_norm = False
    # Whether torch.compile pays: the code is the same for all lengths.
    supports_compile: ClassVar[bool] = True
    # Whether train.param_dtype=auto means bfloat16 for it on a GPU.
    bf16_params_by_default: ClassVar[bool] = False
    # Whether a segment continues from the state that the one before it left, as an RNN does.
    has_recurrent_state: ClassVar[bool] = False
    # Whether a segment can attend to the hidden states of earlier ones (Transformer-XL).
    has_segment_memory: ClassVar[bool] = False
    # Settings of `model` that the block can override: transformer(heads=4).
    overridable: ClassVar[tuple[str, ...]] = ()
    # Whether it reads the stack's input, `ForwardContext.embedded`, and has extend_with_embeddings.
    reads_embeddings = False
    # Whether it consists of layers that call `ForwardContext.add_layer_output` themselves.
    adds_layer_outputs: ClassVar[bool] = False

    @classmethod
    def build(cls, build_context: BuildContext) -> Block:
        """Build the block; further keyword arguments are the block's own options."""
        raise NotImplementedError

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output (B, T, D) for a whole sequence (B, T, D): training and encoding."""
        raise NotImplementedError

    def start(self, context: ForwardContext) -> DecoderState:
        """Return the state before the first position."""
        raise NotImplementedError

    def start_with_prefix(self, x: Tensor, context: ForwardContext) -> ExtendOutput:
        """Return the output for a prefix (B, S, D) that is visible to all, and the state after it.

        Only the blocks of a prefix LM have it.
        """
        raise NotImplementedError

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T >= 1 more positions (B, T, D), and the state after them."""
        raise NotImplementedError

    def carried_shapes(self, memory: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of a row of each tensor that a segment leaves to the next.

        `memory` is the number of earlier positions that attention reads.
        """
        return {}

    def forward_segment(
        self, x: Tensor, context: ForwardContext, previous: Mapping[str, Tensor]
    ) -> SegmentOutput:
        """Return the output for a segment (B, T, D), given the state carried from the last one.

        In training: no gradient flows into `previous`. `extend` is the same for generation.
        """
        return SegmentOutput(self(x, context), {})

    def extend_with_embeddings(
        self, x: Tensor, embedded: Tensor, state: DecoderState
    ) -> ExtendOutput:
        """Return what `extend` does, given the stack's input at the new positions (B, T, D).

        For blocks that read it.
        """
        raise NotImplementedError


def build_residual(
    config: ModelConfig, *, dropout: float | None = None, width: int = 0
) -> Residual:
    """Build a residual connection with model.dropout and model.width unless they are given."""
    norm = catalogue("norm").load(config.norm)(width or config.width, config.norm_epsilon)
    residual = catalogue("residual").load(config.residual)(
        norm, dropout=config.dropout if dropout is None else dropout
    )
    assert isinstance(residual, Residual), f"{config.residual} must be a Residual"
    return residual
