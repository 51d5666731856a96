"""Bidirectional language model that predicts masked tokens: BERT's, XLNet's and ALBERT's heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dragoman.attention import masks
from dragoman.config import ModelConfig
from dragoman.models.language_model import (
    LanguageDropout,
    NeuralLanguageModel,
    build_language_model,
)


class MaskedLM(NeuralLanguageModel):
    """A language model whose stack is not causal: the attention mask is the objective.

    The last id of its vocabulary is the mask, which replaces a token to predict.
    """

    def __init__(self, *, order: OrderHead | None = None, **parts: Any) -> None:
        super().__init__(**parts)
        self.order = order

    @property
    def mask_token(self) -> int:
        """Return the id of the mask."""
        return self.embedding.weight.size(0) - 1

    def permuted(
        self,
        tokens: Tensor,
        ranks: Tensor,
        positions: Tensor,
        *,
        layer_outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Return states (B, P, E) that predict the tokens at positions (B, P) from lower ranks.

        Two-stream self-attention (Yang et al. 2019, "XLNet", section 2.3) as one stack over
        L + P positions under `masks.two_stream`: the content stream of tokens (B, L), and a query
        stream that begins with the mask and a position: it has the position, not the token. Ranks
        (B, L) are the factorization order; tokens of equal rank attend to each other. The output of
        every layer for both streams, (B, L + P, D), is appended to `layer_outputs`.
        """
        length = tokens.size(1)
        queries = torch.full_like(positions, self.mask_token)
        content = torch.arange(length, device=tokens.device).expand_as(tokens)
        hidden = self.decode(
            torch.cat([tokens, queries], dim=1),
            attention_mask=masks.two_stream(ranks, ranks.gather(1, positions)),
            position_ids=torch.cat([content, positions], dim=1),
            layer_outputs=layer_outputs,
        )
        return hidden[:, length:]


class OrderHead(nn.Module):
    """Whether two segments are in order, from the first position: ALBERT's binary classifier.

    Lan et al. (2020), section 3.1; the pooler is BERT's (Devlin et al. 2019).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (B, 2), swapped and in order, of hidden states (B, L, E)."""
        return self.classifier(torch.tanh(self.pooler(hidden[:, 0])))


def build_masked_lm(
    config: ModelConfig,
    *,
    vocab_size: int,
    dropout: LanguageDropout | None = None,
    sentence_order: bool = False,
) -> MaskedLM:
    """Build a bidirectional stack of `model.decoder`; the mask follows the vocabulary's tokens."""
    plain = build_language_model(config, vocab_size=vocab_size + 1, dropout=dropout, causal=False)
    order = None
    if sentence_order:
        order = OrderHead(config.resolved_embedding_width)
        for linear in (order.pooler, order.classifier):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
    return MaskedLM(
        order=order,
        embedding=plain.embedding,
        stack_input=plain.stack_input,
        decoder=plain.decoder,
        output=plain.output,
        dropout=plain.dropout,
    )


def gather_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return the hidden states (B, L, E) at positions (B, P): (B, P, E)."""
    return hidden.gather(1, positions.unsqueeze(2).expand(-1, -1, hidden.size(2)))
