"""Hierarchical attention networks: words to sentences, sentences to a document."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from dragoman.attention.attention_pooling import AttentionPooling
from dragoman.config import ModelConfig
from dragoman.config.classification import ClassifyConfig
from dragoman.layers.label_wise_attention import NameMatches
from dragoman.models.classifier import (
    ClassifierModel,
    ClassifierSizes,
    apply_pooling,
    build_pooling,
    initialize_classifier,
    pooled_width,
)
from dragoman.models.factory import build_stack
from dragoman.models.forward_context import ForwardContext
from dragoman.text.special_tokens import UNK

# Poolings of documents that have no meaning for the words of one sentence.
_DOCUMENT_POOLINGS = ("structured", "labels")


class DocumentClassifier(ClassifierModel):
    """Classifier of documents (B, N, W) of N sentences of W words: Yang et al. (2016).

    The words of each sentence are encoded and pooled to a vector (recorded as `words`, with
    B * N rows), the sentences of each document likewise (recorded as `sentences`).
    """

    def __init__(
        self, model: ModelConfig, classify: ClassifyConfig, sizes: ClassifierSizes
    ) -> None:
        super().__init__(model, classify, sizes, pooled_width=pooled_width(classify, model.width))
        self.encoder = build_stack(
            model, model.encoder, "model.encoder", causal=False, memory_width=None
        )
        self.words: nn.Module = (
            AttentionPooling(model.width, score_width=classify.score_width)
            if classify.pooling in _DOCUMENT_POOLINGS
            else build_pooling(classify, model.width, labels=sizes.labels)
        )
        self.sentence_encoder = build_stack(
            replace(model, encoder=classify.sentence_encoder or model.encoder),
            classify.sentence_encoder or model.encoder,
            "classify.sentence_encoder" if classify.sentence_encoder else "model.encoder",
            causal=False,
            memory_width=None,
        )
        self.sentences = build_pooling(classify, model.width, labels=sizes.labels)
        self.overlap_weight = classify.overlap_penalty
        self.sentence_dropout = classify.sentence_dropout
        initialize_classifier(self, model)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed documents (B, N, W); in training some sentences become unknown words."""
        if self.training and self.sentence_dropout:
            dropped = torch.rand(tokens.shape[:2], device=tokens.device) < self.sentence_dropout
            tokens = tokens.masked_fill(dropped.unsqueeze(2), UNK)  # their lengths stay
        return super().embed(tokens)

    def pool(
        self,
        embedded: Tensor,
        mask: Tensor | None,
        losses: dict[str, Tensor],
        matches: NameMatches | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Encode and pool the words (B, N, W, D) of the sentences, then the sentences."""
        word_mask = None if mask is None else mask.flatten(0, 1)  # (B * N, W)
        words = self.encoder(embedded.flatten(0, 1), ForwardContext(mask=word_mask, losses=losses))
        vectors = apply_pooling(self.words, words, word_mask, losses)  # (B * N, D)
        sentences = vectors.view(*embedded.shape[:2], -1)  # (B, N, D)
        sentence_mask = None if mask is None else mask.any(dim=2)  # (B, N)
        hidden = self.sentence_encoder(sentences, ForwardContext(mask=sentence_mask, losses=losses))
        pooled = apply_pooling(self.sentences, hidden, sentence_mask, losses, self.overlap_weight)
        return pooled, hidden, sentence_mask
