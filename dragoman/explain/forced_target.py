"""A given target under teacher forcing, computed from token embeddings that may be changed.

Attribution, head ablation and the logit lens run the model on one source and one target. They share
this pass: from embeddings to hidden states, and from hidden states to the log-probability of each
target token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.layers.embedding import Embedding
from dragoman.models.context import ForwardContext
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.text.special_tokens import BOS

GenerativeModel = EncoderDecoder | NeuralLanguageModel

MAX_BATCH_BYTES = 400_000_000  # of the activations of all rows of a batch, as estimated


class ForcedTarget(NamedTuple):
    """A source and a target of one model, both as the decoder reads them."""

    model: GenerativeModel
    src: Tensor | None  # (1, S), the end of sentence last; None for a language model
    tgt_in: Tensor  # (1, T), what the decoder reads: <s>, then the target without its last token
    tgt_out: Tensor  # (T,), what it is to predict

    @classmethod
    def build(
        cls,
        model: GenerativeModel,
        source: Sequence[int] | None,
        target: Sequence[int],
        *,
        first: int = BOS,
    ) -> ForcedTarget:
        """Build it from token ids, both with their end of sentence if they have one."""
        device = next(model.parameters()).device
        with torch.inference_mode(False):  # autograd cannot save inference tensors
            return cls(
                model,
                None if source is None else torch.tensor([list(source)], device=device),
                torch.tensor([[first, *target[:-1]]], device=device),
                torch.tensor(list(target), device=device),
            )

    @property
    def src_length(self) -> int:
        """The number of source tokens, S; 0 for a language model."""
        return 0 if self.src is None else self.src.size(1)

    @property
    def tgt_length(self) -> int:
        """The number of target tokens, T."""
        return self.tgt_out.size(0)

    def max_rows(self) -> int:
        """Return how many copies of this pair make a batch of bounded memory."""
        # What linear layers write, twice for what lies between them, and three tensors of logits.
        widths = sum(
            module.out_features for module in self.model.modules() if isinstance(module, nn.Linear)
        )
        tokens = max(self.src_length, self.tgt_length)
        numbers = 2 * tokens * widths + 3 * self.tgt_length * self.model.output_weight.size(0)
        return max(1, MAX_BATCH_BYTES // (4 * numbers))

    def tables(self) -> tuple[Embedding | None, Embedding]:
        """Return the embedding tables of source and target; None for no source."""
        if isinstance(self.model, EncoderDecoder):
            return self.model._embedding("src"), self.model._embedding("tgt")
        return None, self.model.embedding

    def embed_source(self) -> Tensor | None:
        """Return the embeddings (1, S, D) of the source tokens, without positions."""
        table, _ = self.tables()
        return None if table is None or self.src is None else table(self.src)

    def embed_target(self) -> Tensor:
        """Return the embeddings (1, T, D) of the decoder's input, without positions."""
        _, table = self.tables()
        return table(self.tgt_in)

    def hidden(
        self, src: Tensor | None, tgt: Tensor, *, layer_outputs: list[Tensor] | None = None
    ) -> Tensor:
        """Return the hidden states (B, T, E) for `project`, of embeddings (B, S, D), (B, T, D)."""
        if isinstance(self.model, EncoderDecoder):
            assert src is not None, "an encoder-decoder has a source"
            return self.model.hidden_embedded(src, tgt, layer_outputs=layer_outputs)
        context = ForwardContext(layer_outputs=layer_outputs)
        return self.model.output(self.model.decoder(self.model.entrance(tgt), context))

    def log_probs(self, hidden: Tensor, *, first: int = 0) -> Tensor:
        """Return the log-probability (B, T) of each target token, from `first` on."""
        logits = self.model.project(hidden)
        log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        tokens = self.tgt_out[first : first + hidden.size(1)]
        return log_probs.gather(2, tokens.view(1, -1, 1).expand(len(hidden), -1, 1)).squeeze(2)

    def log_odds(self, hidden: Tensor, *, first: int = 0) -> Tensor:
        """Return log p - log (1 - p) (B, T) of each target token, from `first` on.

        As the distance of its logit from the log-sum-exp of all others, which is exact where p is
        nearly 1.
        """
        logits = self.model.project(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        tokens = self.tgt_out[first : first + hidden.size(1)].view(1, -1, 1)
        tokens = tokens.expand(len(hidden), -1, 1)
        others = logits.scatter(2, tokens, float("-inf"))
        return logits.gather(2, tokens).squeeze(2) - others.logsumexp(-1)

    @torch.no_grad()
    def baseline(self) -> Tensor:
        """Return the log-probability (T,) of each target token of the unchanged model."""
        return self.log_probs(self.hidden(self.embed_source(), self.embed_target()))[0]
