"""Models of sentence pairs: two encoders with co-attention, two without, or one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman import ops
from dragoman.attention.co_attention import CoAttention
from dragoman.config import ModelConfig
from dragoman.config.sentence_pair_classification import PairsConfig
from dragoman.layers.embedding_and_output_projection import Embedding, StackInput
from dragoman.models.block_stack import Stack
from dragoman.models.factory import build_stack, build_stack_input
from dragoman.models.forward_context import ForwardContext
from dragoman.models.initialization import initialize_weights
from dragoman.ops.masked_pooling import max_pool, mean_pool, sum_pool
from dragoman.text.special_tokens import UNK

EXACT_MATCH, STEM_MATCH, SECOND_SENTENCE = 1, 2, 4  # bits of a token's flags
FLAGS = 8

Pooling = Callable[[Tensor, Tensor], Tensor]  # states (B, T, D) and a mask (B, T) to (B, P)


class PairOutput(NamedTuple):
    """Logits of the labels, and of the bins of the score."""

    labels: Tensor | None  # (B, L); None without labels
    score: Tensor | None  # (B, R), a logit for each whole score; None without scores


class SentenceVectors(NamedTuple):
    """One vector for each sentence of a pair."""

    first: Tensor  # (B, P)
    second: Tensor  # (B, P)


def mean_max_pool(states: Tensor, mask: Tensor) -> Tensor:
    """Return mean and maximum, concatenated: Chen et al. (2017), equations 18 and 19."""
    return torch.cat([mean_pool(states, mask), max_pool(states, mask)], dim=-1)


POOLINGS: dict[str, Pooling] = {
    "mean": mean_pool,
    "max": max_pool,
    "sum": sum_pool,
    "mean_max": mean_max_pool,
}


class FeedForwardReLU(nn.Module):
    """Linear layers with ReLU and dropout before each: the F, G and H of Parikh et al. (2016)."""

    def __init__(self, inputs: int, width: int, *, layers: int, dropout: float) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            nn.Linear(width if number else inputs, width) for number in range(layers)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Transform (..., I): (..., W)."""
        for linear in self.linears:
            x = torch.relu(linear(ops.dropout(x, self.dropout, training=self.training)))
        return x


class NoInteraction(nn.Module):
    """Pool each sentence alone: Conneau et al. (2017)."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling

    def forward(self, states: Tensor, mask: Tensor) -> SentenceVectors:
        """Return the vectors of states (2 B, T, D), the first sentences before the second."""
        return SentenceVectors(*self.pooling(states, mask).chunk(2))


class ComparedAlignment(nn.Module):
    r"""Align the sentences by co-attention, compare each word with its context vector, and pool.

    .. math:: m_t = G([a_t; \tilde a_t; a_t - \tilde a_t; a_t \odot \tilde a_t])

    Chen et al. (2017), equations 14 to 17, who compose the compared words by a second BiLSTM.
    Parikh et al. (2016) compare only a and its alignment, and compose by a sum.
    """

    def __init__(
        self,
        *,
        cross: CoAttention,
        compare: nn.Module,
        composition: Stack | None,
        pooling: Pooling,
        products: bool,
    ) -> None:
        super().__init__()
        self.cross, self.compare, self.composition = cross, compare, composition
        self.pooling, self.products = pooling, products

    def forward(self, states: Tensor, mask: Tensor) -> SentenceVectors:
        """Return the vectors of states (2 B, T, D), the first sentences before the second."""
        first, second = states.chunk(2)
        first_mask, second_mask = mask.chunk(2)
        aligned = torch.cat(
            self.cross(first, second, first_mask=first_mask, second_mask=second_mask)
        )
        parts = [states, aligned]
        if self.products:
            parts += [states - aligned, states * aligned]
        compared = self.compare(torch.cat(parts, dim=-1))  # (2 B, T, D)
        if self.composition is not None:
            compared = self.composition(compared, ForwardContext(mask=mask))
        return SentenceVectors(*self.pooling(compared, mask).chunk(2))


class MLPHead(nn.Module):
    """One hidden layer with tanh and dropout, and the logits."""

    def __init__(self, inputs: int, width: int, outputs: int, *, dropout: float) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.dropout = dropout

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (B, O) of features (B, P)."""
        features = ops.dropout(features, self.dropout, training=self.training)
        hidden = torch.tanh(self.hidden(features))
        return self.output(ops.dropout(hidden, self.dropout, training=self.training))


class PairModel(nn.Module):
    """Embeddings, an encoder, the interaction of the sentences, and a classifier of each target.

    The label's classifier takes [u; v; |u - v|; u * v] (Conneau et al. 2017), the score's only the
    last two, which do not depend on the order of the sentences (Tai et al. 2015, equation 15).
    Without an `interaction` a pair is one sequence, and both take its pooled vector.
    """

    def __init__(
        self,
        *,
        embedding: Embedding,
        flag_embedding: Embedding,
        stack_input: StackInput,
        encoder: Stack,
        interaction: NoInteraction | ComparedAlignment | None,
        pooling: Pooling,
        label_classifier: MLPHead | None,
        score_classifier: MLPHead | None,
        word_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.word_dropout = word_dropout
        self.embedding, self.flag_embedding = embedding, flag_embedding
        self.stack_input, self.encoder = stack_input, encoder
        self.interaction, self.pooling = interaction, pooling
        self.label_classifier, self.score_classifier = label_classifier, score_classifier

    def forward(self, tokens: Tensor, flags: Tensor, lengths: Tensor) -> PairOutput:
        """Classify pairs: tokens and flags (B, 2, T) with lengths (B, 2); one sequence: (B, 1, T).

        Both sentences run through the encoder as one batch.
        """
        tokens, flags, lengths = (
            part.transpose(0, 1).flatten(0, 1) for part in (tokens, flags, lengths)
        )
        if self.training and self.word_dropout:
            dropped = torch.rand(tokens.shape, device=tokens.device) < self.word_dropout
            tokens = tokens.masked_fill(dropped, UNK)
        mask = torch.arange(tokens.size(1), device=tokens.device) < lengths.unsqueeze(1)
        embedded = self.stack_input(self.embedding(tokens) + self.flag_embedding(flags))
        states = self.encoder(embedded, ForwardContext(mask=mask))  # (2 B, T, D)
        if self.interaction is None:
            directed = symmetric = self.pooling(states, mask)
        else:
            first, second = self.interaction(states, mask)
            symmetric = torch.cat([(first - second).abs(), first * second], dim=-1)
            directed = torch.cat([first, second, symmetric], dim=-1)
        return PairOutput(
            None if self.label_classifier is None else self.label_classifier(directed),
            None if self.score_classifier is None else self.score_classifier(symmetric),
        )


def build_pair_model(
    model: ModelConfig, pairs: PairsConfig, *, vocab_size: int, labels: int, score_bins: int
) -> PairModel:
    """Build a model of sentence pairs; `labels` or `score_bins` is 0 where there are none."""
    pooling = POOLINGS[pairs.pooling]
    is_sequence = pairs.interaction == "sequence"
    pooled = model.width * (2 if pairs.pooling == "mean_max" else 1)
    scale = model.width**0.5 if model.scale_embeddings else 1.0

    def build_head(inputs: int, outputs: int) -> MLPHead | None:
        if not outputs:
            return None
        return MLPHead(inputs, pairs.classifier_width, outputs, dropout=model.dropout)

    built = PairModel(
        embedding=Embedding(
            vocab_size, model.width, scale=scale, embedding_width=model.embedding_width
        ),
        flag_embedding=Embedding(FLAGS, model.width, scale=scale),
        stack_input=build_stack_input(model),
        encoder=build_stack(model, model.encoder, "model.encoder", causal=False, memory_width=None),
        interaction=None if is_sequence else _build_interaction(model, pairs, pooling),
        pooling=pooling,
        label_classifier=build_head(pooled * (1 if is_sequence else 4), labels),
        score_classifier=build_head(pooled * (1 if is_sequence else 2), score_bins),
        word_dropout=pairs.word_dropout,
    )
    initialize_weights(built)
    with torch.no_grad():
        built.flag_embedding.weight[0] = 0.0  # a word without flags starts as its embedding
    return built


def _build_interaction(
    model: ModelConfig, pairs: PairsConfig, pooling: Pooling
) -> NoInteraction | ComparedAlignment:
    """Build the interaction that `pairs.interaction` names, for two encoders."""
    if pairs.interaction == "none":
        return NoInteraction(pooling)
    width, dropout = model.width, model.dropout
    if pairs.interaction == "decomposable":
        return ComparedAlignment(
            cross=CoAttention(FeedForwardReLU(width, width, layers=2, dropout=dropout)),  # F
            compare=FeedForwardReLU(2 * width, width, layers=2, dropout=dropout),  # G
            composition=None,
            pooling=pooling,
            products=False,
        )
    return ComparedAlignment(
        cross=CoAttention(),
        compare=FeedForwardReLU(4 * width, width, layers=1, dropout=dropout),
        composition=build_stack(
            model, pairs.composition, "pairs.composition", causal=False, memory_width=None
        ),
        pooling=pooling,
        products=True,
    )
