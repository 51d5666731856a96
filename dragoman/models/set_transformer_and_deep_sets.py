"""Models of sets: an encoder of elements, attention or Deep Sets blocks, pooling, a decoder.

The attention blocks SAB, ISAB and PMA are in `set_transformer_blocks.py`.
"""

from __future__ import annotations

from torch import Tensor, nn

from dragoman.config import ModelConfig
from dragoman.config.unordered_set_input_task import SetsConfig
from dragoman.layers.synthetic_character_image_encoder import GlyphEncoder
from dragoman.models.block_interface import Block
from dragoman.models.block_stack import Stack
from dragoman.models.forward_context import ForwardContext
from dragoman.models.initialization import initialize_weights
from dragoman.models.set_transformer_blocks import (
    POOLINGS,
    ElementwiseBlock,
    InducedSetAttentionBlock,
    PoolingByMultiheadAttention,
    SetAttentionBlock,
)
from dragoman.registry import catalogue

MAX_EXACT_FEATURES = 8  # wider inputs are projected by a matmul


class VectorEncoder(nn.Module):
    """A linear layer from the numbers of an element to the model's width.

    Few numbers are multiplied in float32, without the rounding of TF32 and bfloat16 matmuls: a
    number of 0 to 100 would lose what distinguishes the largest from the next.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, width)

    def forward(self, elements: Tensor) -> Tensor:
        """Project elements (B, N, F): (B, N, D)."""
        if elements.size(-1) > MAX_EXACT_FEATURES:
            return self.linear(elements)
        columns = elements.unsqueeze(-1) * self.linear.weight.t()  # (B, N, F, D)
        return columns.sum(dim=-2) + self.linear.bias


class SetTransformer(nn.Module):
    """Encoder, pooling and decoder of a set: Lee et al. (2019), section 3.2.

    Its output does not depend on the order of the elements. With an `mlp` encoder and mean, sum or
    max pooling it is Deep Sets (Zaheer et al. 2017).
    """

    def __init__(
        self,
        *,
        elements: nn.Module,
        encoder: Stack,
        pooling: Block,
        pooling_norm: nn.Module | None,
        decoder: Stack | None,
        output: nn.Linear,
        vectors: int,
    ) -> None:
        super().__init__()
        self.elements, self.encoder, self.pooling = elements, encoder, pooling
        self.pooling_norm, self.decoder, self.output = pooling_norm, decoder, output
        self.vectors = vectors  # rows of the output: 1, or one for each component of a mixture

    def encode(self, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode the elements (B, N, F) of sets, real where the mask (B, N) is True: (B, N, D)."""
        return self.encoder(self.elements(elements), ForwardContext(mask=mask))

    def pool(self, encoded: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool and decode encoded sets (B, N, D): (B, k, D) with k seeds."""
        pooled = self.pooling(encoded, ForwardContext(mask=mask))
        if self.decoder is not None:
            return self.decoder(pooled, ForwardContext())
        return pooled if self.pooling_norm is None else self.pooling_norm(pooled)

    def forward(self, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the outputs (B, O), or (B, K, O) for K vectors, of sets (B, N, F)."""
        pooled = self.pool(self.encode(elements, mask), mask)  # (B, k, D)
        if self.vectors == 1:
            return self.output(pooled.flatten(1))
        outputs = self.output(pooled)
        return outputs.view(outputs.size(0), self.vectors, -1)


def build_set_transformer(
    model: ModelConfig,
    sets: SetsConfig,
    *,
    features: int,
    outputs: int,
    vectors: int = 1,
    images: bool = False,
) -> SetTransformer:
    """Build a model of sets of elements (F,) or of images, with `vectors` rows of `outputs`."""
    blocks: list[Block] = [_build_encoder_block(model, sets) for _ in range(sets.layers)]
    pooling: Block = (
        PoolingByMultiheadAttention(model, seeds=sets.seeds)
        if sets.pooling == "pma"
        else POOLINGS[sets.pooling]()
    )
    decoder: list[Block] = [
        SetAttentionBlock(model) if sets.pooling == "pma" else ElementwiseBlock(model)
        for _ in range(sets.decoder_layers)
    ]
    if vectors == 1:
        output = nn.Linear(sets.seeds * model.width, outputs)
    else:
        output = nn.Linear(model.width, vectors // sets.seeds * outputs)
    built = SetTransformer(
        elements=(GlyphEncoder(model.width) if images else VectorEncoder(features, model.width)),
        encoder=Stack(blocks, _final_norm(model, blocks)),
        pooling=pooling,
        pooling_norm=None if decoder else _final_norm(model, [pooling]),
        decoder=Stack(decoder, _final_norm(model, decoder)) if decoder else None,
        output=output,
        vectors=vectors,
    )
    initialize_weights(built)
    return built


def _build_encoder_block(model: ModelConfig, sets: SetsConfig) -> Block:
    """Build one block of `sets.encoder`."""
    if sets.encoder == "isab":
        return InducedSetAttentionBlock(model, inducing_points=sets.inducing_points)
    return SetAttentionBlock(model) if sets.encoder == "sab" else ElementwiseBlock(model)


def _final_norm(model: ModelConfig, blocks: list[Block]) -> nn.Module | None:
    """Return the norm that a pre-norm stack ends with, or None."""
    if not blocks[-1].final_norm:
        return None
    norm: nn.Module = catalogue("norm").load(model.norm)(model.width, model.norm_epsilon)
    return norm
