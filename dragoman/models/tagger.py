"""Taggers: embedded words, characters and features, an encoder, and a distribution over tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman import ops
from dragoman.config import ModelConfig
from dragoman.config.tagging import TagConfig
from dragoman.layers.character_features import CHARACTER_ENCODERS, CharacterEncoder
from dragoman.layers.crf_and_token_softmax import LinearChainCRF, TagOutput, TokenSoftmax
from dragoman.layers.embedding_and_output_projection import Embedding, StackInput
from dragoman.models.block_stack import Stack
from dragoman.models.factory import build_stack, build_stack_input
from dragoman.models.forward_context import ForwardContext
from dragoman.models.initialization import DEPTH_SCALINGS, initialize_weights
from dragoman.models.layer_sharing import SHARED_LAYER_TYPES, share_layers
from dragoman.text.special_tokens import PAD, UNK


@dataclass(frozen=True, kw_only=True, slots=True)
class TaggerSizes:
    """Sizes of the vocabularies and label sets that a tagger is built for."""

    words: int
    characters: int
    features: int  # of all features together, in one table
    columns: int  # number of features of a token
    tags: int
    auxiliary: Mapping[str, int]  # number of labels of each auxiliary target, by field


class CharacterFeatures(nn.Module):
    """Character embeddings and the encoder that computes a word's features from them."""

    def __init__(self, vocab_size: int, width: int, encoder: CharacterEncoder) -> None:
        super().__init__()
        self.embedding = Embedding(vocab_size, width)
        self.encoder = encoder

    def forward(self, characters: Tensor) -> Tensor:
        """Return the features (B, T, F) of words' characters (B, T, C), padded by 0."""
        words = characters.flatten(0, 1)  # (B T, C)
        features = self.encoder(self.embedding(words), words != PAD)
        return features.unflatten(0, characters.shape[:2])


class TokenInput(nn.Module):
    """The input of each token: its word, characters and features, joined and projected to D."""

    def __init__(
        self,
        width: int,
        *,
        words: Embedding | None,
        characters: CharacterFeatures | None,
        features: Embedding | None,
        joined_width: int,
        word_dropout: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.words, self.characters, self.features = words, characters, features
        self.projection = nn.Linear(joined_width, width) if joined_width != width else None
        self.word_dropout, self.dropout = word_dropout, dropout

    def forward(
        self, words: Tensor, characters: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Embed words (B, T), their characters (B, T, C) and features (B, T, F): (B, T, D)."""
        parts = []
        if self.words is not None:
            parts.append(self.words(self._drop_words(words)))
        if self.characters is not None:
            assert characters is not None, "this tagger reads characters"
            parts.append(self.characters(characters))
        if self.features is not None:
            assert features is not None, "this tagger reads features"
            parts.append(self.features(features).flatten(2))
        joined = ops.dropout(torch.cat(parts, dim=-1), self.dropout, training=self.training)
        return joined if self.projection is None else self.projection(joined)

    def _drop_words(self, words: Tensor) -> Tensor:
        """Replace words by <unk> at random, in training; their characters stay."""
        if not self.training or not self.word_dropout:
            return words
        return words.masked_fill(
            torch.rand(words.shape, device=words.device) < self.word_dropout, UNK
        )


class TaggingModel(nn.Module):
    """Scores the tags of each token; a `TagOutput` makes a distribution over sequences of them."""

    def __init__(
        self,
        *,
        inputs: TokenInput,
        stack_input: StackInput,
        encoder: Stack,
        emission: nn.Linear,
        tag_output: TagOutput,
        auxiliary: Mapping[str, nn.Linear],
        output_dropout: float,
    ) -> None:
        super().__init__()
        self.inputs, self.stack_input, self.encoder = inputs, stack_input, encoder
        self.emission, self.tag_output = emission, tag_output
        self.auxiliary = nn.ModuleDict(auxiliary)
        self.output_dropout = output_dropout

    def encode(
        self,
        words: Tensor,
        mask: Tensor | None,
        *,
        characters: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, T, D) of words (B, T) with their characters and features."""
        x = self.stack_input(self.inputs(words, characters, features))
        hidden = self.encoder(x, ForwardContext(mask=mask))
        return ops.dropout(hidden, self.output_dropout, training=self.training)

    def forward(
        self,
        words: Tensor,
        mask: Tensor | None,
        *,
        characters: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Return the emissions (B, T, K): the score of each tag for each token."""
        return self.emit(self.encode(words, mask, characters=characters, features=features))

    def emit(self, hidden: Tensor) -> Tensor:
        """Return the emissions (B, T, K) of hidden states (B, T, D), in float32.

        In bfloat16 a score of 20 would be rounded to multiples of an eighth, and a CRF adds up
        such scores over a whole sentence.
        """
        weight, bias = self.emission.weight, self.emission.bias
        dtype = torch.promote_types(weight.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(dtype), weight.to(dtype), bias.to(dtype))


def build_tagger(model: ModelConfig, tag: TagConfig, sizes: TaggerSizes) -> TaggingModel:
    """Build a tagger with weights initialized from torch's random number generator."""
    widths = (
        tag.word_width,
        tag.character_features if tag.characters != "none" else 0,
        tag.feature_width * sizes.columns,
    )
    characters = None
    if tag.characters != "none":
        encoder = CHARACTER_ENCODERS[tag.characters](
            tag.character_width, tag.character_features, kernel_size=tag.character_kernel
        )
        characters = CharacterFeatures(sizes.characters, tag.character_width, encoder)
    built = TaggingModel(
        inputs=TokenInput(
            model.width,
            words=Embedding(sizes.words, tag.word_width) if tag.word_width else None,
            characters=characters,
            features=Embedding(sizes.features, tag.feature_width) if sizes.columns else None,
            joined_width=sum(widths),
            word_dropout=tag.word_dropout,
            dropout=tag.input_dropout,
        ),
        stack_input=build_stack_input(model),
        encoder=build_stack(model, model.encoder, "model.encoder", causal=False, memory_width=None),
        emission=nn.Linear(model.width, sizes.tags),
        tag_output=LinearChainCRF(sizes.tags) if tag.crf else TokenSoftmax(sizes.tags),
        auxiliary={
            field: nn.Linear(model.width, labels) for field, labels in sizes.auxiliary.items()
        },
        output_dropout=tag.output_dropout,
    )
    initialize_weights(built, DEPTH_SCALINGS[model.initialization])
    kind = SHARED_LAYER_TYPES[model.share_layers]
    if kind is not None:
        share_layers(built.encoder, kind)
    return built
