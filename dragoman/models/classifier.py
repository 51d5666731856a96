"""Text classifiers: an encoder with pooling, filters over words, n-grams, and one output layer.

`ClassifierModel` is the interface. `SequenceClassifier` reads tokens (B, T); the classifier of
documents as sentences of words is in `hierarchical_document_classifier.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman import ops
from dragoman.attention.attention_pooling import (
    AttentionPooling,
    Pooled,
    StructuredPooling,
    overlap_penalty,
)
from dragoman.attention.dense_softmax_attention import FeatureGate
from dragoman.config import ModelConfig
from dragoman.config.classification import ClassifyConfig
from dragoman.layers.embedding_and_output_projection import StackInput
from dragoman.layers.label_wise_attention import (
    LabelAttention,
    LabelNames,
    LabelOutput,
    NameMatches,
)
from dragoman.layers.multi_table_word_embedding import WordEmbedding
from dragoman.layers.ngram_linear_classifier import NgramBag
from dragoman.layers.sequence_pooling import (
    LastBidirectionalPooling,
    LastPooling,
    MaxPooling,
    MeanPooling,
)
from dragoman.layers.text_cnn import FilterBank, OneHotFilterBank
from dragoman.models.block_stack import Stack
from dragoman.models.factory import build_stack, build_stack_input
from dragoman.models.forward_context import ForwardContext
from dragoman.models.initialization import DEPTH_SCALINGS, initialize_weights
from dragoman.models.layer_sharing import SHARED_LAYER_TYPES, share_layers
from dragoman.text.special_tokens import UNK

# Of the n-grams' logits, so that one learning rate suits them and an encoder: found with Adam at
# 1e-3 on held-out parts of IMDB, SST-2, TREC and Reuters.
NGRAM_SCALES = {"naive_bayes": 5.0, "tf_idf": 10.0}


class NgramFeatures(NamedTuple):
    """The n-grams of a batch of texts."""

    ids: Tensor  # (B, K); 0 is padding
    values: Tensor | None = None  # (B, K), such as tf-idf; None for 1


class ClassifierOutput(NamedTuple):
    """Logits of the classes, and of the auxiliary targets in training."""

    logits: Tensor  # (B, C), the sum of both branches
    encoder_logits: Tensor | None = None  # (B, C) without n-grams; None without an encoder
    ngram_logits: Tensor | None = None  # (B, C) of the n-grams alone
    auxiliary: Tensor | None = None  # (B, C') of the second label
    attributes: Tensor | None = None  # (B, A) of the attributes


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifierSizes:
    """Sizes that a classifier takes from its training data."""

    vocab_size: int
    labels: int
    auxiliary_labels: int = 0
    attributes: int = 0
    ngram_features: int = 0  # padding included
    vector_widths: tuple[int, ...] = ()
    frozen_widths: tuple[int, ...] = ()
    label_words: tuple[tuple[int, ...], ...] = ()  # ids of the words of each label's name


class ClassifierModel(nn.Module):
    """Base of the classifiers: features of a text to logits of its classes.

    Subclasses define `pool`. Its result is one vector per text, or with `classify.pooling=labels`
    one per label. Attention weights are recorded under the paths `pooling`, or `words` and
    `sentences`, and `attributes`.
    """

    thresholds: Tensor

    def __init__(
        self,
        model: ModelConfig,
        classify: ClassifyConfig,
        sizes: ClassifierSizes,
        *,
        pooled_width: int,
    ) -> None:
        """Build the parts that all classifiers share; a `pooled_width` of 0 means no encoder."""
        super().__init__()
        self.dropout = classify.dropout
        self.by_label = classify.pooling == "labels"
        has_filters = bool(classify.filter_widths)
        one_hot = classify.filter_input == "one_hot"
        self.embedding = (
            _build_embedding(model, classify, sizes)
            if pooled_width or (has_filters and not one_hot)
            else None
        )
        self.stack_input: StackInput | None = (
            build_stack_input(model) if self.embedding is not None else None
        )
        self.filters: FilterBank | OneHotFilterBank | None = None
        if has_filters:
            self.filters = (
                OneHotFilterBank(
                    sizes.vocab_size, widths=classify.filter_widths, filters=classify.filters
                )
                if one_hot
                else FilterBank(
                    model.width, widths=classify.filter_widths, filters=classify.filters
                )
            )
        self.bag = (
            NgramBag(
                sizes.ngram_features,
                sizes.labels,
                dropout=classify.ngram_dropout,
                scale=NGRAM_SCALES[classify.ngram_weights],
            )
            if classify.ngrams
            else None
        )
        self.attributes = self.attribute_output = None
        if sizes.attributes:
            width = model.width
            self.attributes = LabelAttention(width, labels=sizes.attributes, score_width=width)
            self.attribute_output = LabelOutput(width, sizes.attributes)
        self.names = LabelNames(sizes.label_words) if classify.label_names else None
        self.label_output = (
            LabelOutput(pooled_width, sizes.labels, names=classify.label_names)
            if self.by_label
            else None
        )
        vector_width = (
            pooled_width * (not self.by_label)
            + (self.filters.output_width if self.filters is not None else 0)
            + (model.width if sizes.attributes else 0)
        )
        self.gate = FeatureGate(vector_width) if classify.feature_gate and vector_width else None
        self.hidden = (
            nn.Linear(vector_width, classify.hidden_width)
            if classify.hidden_width and vector_width
            else None
        )
        output_width = classify.hidden_width if self.hidden is not None else vector_width
        self.output = nn.Linear(output_width, sizes.labels) if output_width else None
        auxiliary_width = output_width or pooled_width
        self.auxiliary = (
            nn.Linear(auxiliary_width, sizes.auxiliary_labels)
            if sizes.auxiliary_labels and auxiliary_width
            else None
        )
        # Least probability of a predicted label; tuned on the validation set, or the setting.
        self.register_buffer("thresholds", torch.full((sizes.labels,), classify.threshold))

    @torch.no_grad()
    def set_prior(self, logits: Tensor) -> None:
        """Start the bias of the logits (C,) from those of the classes' frequencies.

        Rare labels are then not predicted from the first step on (Lin et al. 2017, "Focal loss",
        section 4.1).
        """
        layers = (self.label_output, self.output, self.bag)
        first = next(layer for layer in layers if layer is not None)
        first.bias.copy_(logits)

    def pool(
        self,
        embedded: Tensor,
        mask: Tensor | None,
        losses: dict[str, Tensor],
        matches: NameMatches | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Encode and pool embeddings (B, T, D), or (B, N, W, D) for documents.

        `matches` are the labels' names in the text, where label attention reads them. Return the
        pooled vectors, the encoder's output (B, S, D) and its mask (B, S).
        """
        raise NotImplementedError

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, ngrams: NgramFeatures | None = None
    ) -> Tensor:
        """Return logits (B, C) of tokens (B, T), or (B, N, W) for documents, and their mask."""
        return self.classify(tokens, mask, ngrams).logits

    def classify(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        ngrams: NgramFeatures | None = None,
        *,
        losses: dict[str, Tensor] | None = None,
    ) -> ClassifierOutput:
        """Return all logits; add auxiliary losses, summed over the batch, to `losses`."""
        losses = {} if losses is None else losses
        parts: list[Tensor] = []  # logits of the branches without n-grams
        vectors: list[Tensor] = []  # features of each text, (B, ...)
        attributes = by_label = None
        embedded = None if self.embedding is None else self.embed(tokens)
        if self._has_encoder:
            assert embedded is not None, "an encoder has embeddings"
            matches = None if self.names is None else self.names(tokens)
            pooled, hidden, hidden_mask = self.pool(embedded, mask, losses, matches)
            if self.label_output is not None:
                by_label = self._drop(pooled)  # (B, C, D)
                parts.append(self.label_output(by_label, matches))
            else:
                vectors.append(pooled)
            if self.attributes is not None and self.attribute_output is not None:
                found = self.attributes(hidden, mask=hidden_mask).vectors  # (B, A, D)
                attributes = self.attribute_output(self._drop(found))
                vectors.append(found.mean(dim=1))
        if isinstance(self.filters, OneHotFilterBank):
            vectors.append(self.filters(tokens, mask))
        elif self.filters is not None:
            assert embedded is not None, "filters have embeddings"
            vectors.append(self.filters(embedded, mask))
        vector = self._combine(vectors) if vectors else None
        if vector is not None and self.output is not None:
            parts.append(self.output(vector))
        auxiliary = None
        if self.auxiliary is not None:
            shared = by_label.mean(dim=1) if vector is None and by_label is not None else vector
            auxiliary = self.auxiliary(shared)
        encoder_logits = sum(parts[1:], parts[0]) if parts else None
        ngram_logits = None
        if self.bag is not None:
            assert ngrams is not None, "a classifier with n-grams needs those of the texts"
            ngram_logits = self.bag(ngrams.ids, ngrams.values)
        if encoder_logits is None:
            assert ngram_logits is not None, "a classifier has an encoder, filters or n-grams"
            logits = ngram_logits
        else:
            logits = encoder_logits if ngram_logits is None else encoder_logits + ngram_logits
        return ClassifierOutput(logits, encoder_logits, ngram_logits, auxiliary, attributes)

    @property
    def _has_encoder(self) -> bool:
        """Whether the model has an encoder stack."""
        return getattr(self, "encoder", None) is not None

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens (..., T), with positions and dropout: (..., T, D)."""
        assert self.embedding is not None, "called for models with embeddings"
        assert self.stack_input is not None, "called for models with embeddings"
        rows = self.stack_input(
            self.embedding(tokens.flatten(0, -2))
        )  # (B, T, D), or (B * N, W, D)
        return rows.view(*tokens.shape, -1)

    def _combine(self, vectors: list[Tensor]) -> Tensor:
        """Concatenate features, and apply gate, dropout and hidden layer."""
        vector = torch.cat(vectors, dim=-1) if len(vectors) > 1 else vectors[0]
        if self.gate is not None:
            # Times the width, so that equal weights keep the scale.
            vector = self.gate(vector) * vector.size(-1)
        vector = self._drop(vector)
        if self.hidden is None:
            return vector
        return self._drop(F.relu(self.hidden(vector)))

    def _drop(self, x: Tensor) -> Tensor:
        """Apply the dropout of the pooled features, in training."""
        return ops.dropout(x, self.dropout, training=self.training)


class SequenceClassifier(ClassifierModel):
    """Classifier of token sequences: an encoder stack and one pooling over all tokens."""

    def __init__(
        self, model: ModelConfig, classify: ClassifyConfig, sizes: ClassifierSizes
    ) -> None:
        width = pooled_width(classify, model.width) if classify.pooling != "none" else 0
        super().__init__(model, classify, sizes, pooled_width=width)
        self.encoder: Stack | None = None
        self.pooling: nn.Module | None = None
        if width:
            self.encoder = build_stack(
                model, model.encoder, "model.encoder", causal=False, memory_width=None
            )
            self.pooling = build_pooling(classify, model.width, labels=sizes.labels)
        self.overlap_weight = classify.overlap_penalty
        initialize_classifier(self, model)

    def pool(
        self,
        embedded: Tensor,
        mask: Tensor | None,
        losses: dict[str, Tensor],
        matches: NameMatches | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Encode and pool embeddings (B, T, D)."""
        assert self.encoder is not None, "called for models with an encoder"
        assert self.pooling is not None, "called for models with an encoder"
        hidden = self.encoder(embedded, ForwardContext(mask=mask, losses=losses))
        pooled = (
            self.pooling(hidden, mask=mask, matches=matches).vectors
            if isinstance(self.pooling, LabelAttention)
            else apply_pooling(self.pooling, hidden, mask, losses, self.overlap_weight)
        )
        return pooled, hidden, mask


def _build_embedding(
    model: ModelConfig, classify: ClassifyConfig, sizes: ClassifierSizes
) -> WordEmbedding:
    """Return the embedding of words: a trained table, pre-trained vectors, or both."""
    has_vectors = bool(sizes.vector_widths or sizes.frozen_widths)
    # Word vectors replace the table of their own unless its width is set.
    has_table = not has_vectors or bool(model.embedding_width)
    return WordEmbedding(
        sizes.vocab_size,
        model.width,
        widths=(*([model.resolved_embedding_width] if has_table else []), *sizes.vector_widths),
        frozen_widths=sizes.frozen_widths,
        scale=model.width**0.5 if model.scale_embeddings else 1.0,
        unknown=UNK,
        word_dropout=classify.word_dropout,
        embedding_dropout=classify.embedding_dropout,
    )


def build_classifier(
    model: ModelConfig, classify: ClassifyConfig, sizes: ClassifierSizes
) -> ClassifierModel:
    """Build a classifier with weights initialized from torch's random number generator."""
    if classify.hierarchical:
        from dragoman.models.hierarchical_document_classifier import (
            DocumentClassifier,  # imports this module
        )

        return DocumentClassifier(model, classify, sizes)
    return SequenceClassifier(model, classify, sizes)


def initialize_classifier(classifier: ClassifierModel, model: ModelConfig) -> None:
    """Initialize the weights, and share layers according to the settings."""
    initialize_weights(classifier, DEPTH_SCALINGS[model.initialization])
    kind = SHARED_LAYER_TYPES[model.share_layers]
    if kind is not None:
        for module in classifier.children():
            if isinstance(module, Stack):
                share_layers(module, kind)


_POOLINGS: dict[str, Callable[[], nn.Module]] = {
    "mean": MeanPooling,
    "max": MaxPooling,
    "last": LastPooling,
    "last_bidirectional": LastBidirectionalPooling,
}


def build_pooling(classify: ClassifyConfig, width: int, *, labels: int) -> nn.Module:
    """Build the pooling that `classify.pooling` names, over vectors of a width."""
    if classify.pooling == "attention":
        return AttentionPooling(width, score_width=classify.score_width)
    if classify.pooling == "structured":
        return StructuredPooling(width, hops=classify.hops, score_width=classify.score_width)
    if classify.pooling == "labels":
        names, score_width = classify.label_names, classify.score_width
        return LabelAttention(width, labels=labels, score_width=score_width, names=names)
    return _POOLINGS[classify.pooling]()


def pooled_width(classify: ClassifyConfig, width: int) -> int:
    """Return the width of the pooled vector of a text, or of each label's."""
    return classify.hops * width if classify.pooling == "structured" else width


def apply_pooling(
    pooling: nn.Module,
    x: Tensor,
    mask: Tensor | None,
    losses: dict[str, Tensor],
    overlap_weight: float = 0.0,
) -> Tensor:
    """Pool (B, S, D) to (B, P), or to (B, C, D) with a query per label."""
    pooled = pooling(x, mask=mask)
    if not isinstance(pooled, Pooled):
        return pooled
    if isinstance(pooling, StructuredPooling) and not isinstance(pooling, AttentionPooling):
        if overlap_weight:
            penalty = overlap_weight * overlap_penalty(pooled.weights).sum()
            losses["overlap"] = losses["overlap"] + penalty if "overlap" in losses else penalty
        return pooled.vectors.flatten(1)
    return pooled.vectors
