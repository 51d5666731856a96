"""A given target under teacher forcing, with its gradients and with scaled attention heads.

Attribution, head ablation and the logit lens run the model on one source and one target. They share
this pass: from embeddings, which may be changed, to hidden states, and from hidden states to the
log-probability of each target token. The output of each head may be multiplied by a scale, which is
zero to switch the head off, or differentiated.

Gradients are of the log-odds of a target token, z = log p - log (1 - p), not of its
log-probability: where the model is sure, p is nearly 1 and the gradient of log p vanishes, however
much the token depends on an input. The gradient of log p is that of z times 1 - p.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import WeightsEdit, edit, find_attentions
from dragoman.layers.embedding_and_output_projection import Embedding
from dragoman.layers.rnn import RNN
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.forward_context import ForwardContext
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.models.prefix_language_model import PrefixLM
from dragoman.text.special_tokens import BOS

GenerativeModel = EncoderDecoder | NeuralLanguageModel

MAX_BATCH_BYTES = 400_000_000  # of the activations of all rows of a batch, as estimated
TARGETS_PER_PASS = 16  # whose backward passes run as one batch


class TeacherForcedPair(NamedTuple):
    """A source and a target of one model, both as the decoder reads them."""

    model: GenerativeModel
    src: Tensor | None  # (1, S), the end of sentence last; None for a language model
    tgt_in: Tensor  # (1, T), the decoder's input: <s>, then the target without its last token
    tgt_out: Tensor  # (T,), the tokens to predict

    @classmethod
    def build(
        cls,
        model: GenerativeModel,
        source: Sequence[int] | None,
        target: Sequence[int],
        *,
        first: int = BOS,
    ) -> TeacherForcedPair:
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
        # Outputs of linear layers, twice for the tensors between them, and three of logits.
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
        return self.model.output(self.model.decoder(self.model.stack_input(tgt), context))

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

    def gradient_work(self) -> int:
        """Return about how many multiplications a backward pass for every target token takes."""
        sides = [
            sum(
                each.numel()
                for name, each in self.model.named_parameters()
                if name.startswith(f"{side}.") and each.dim() > 1
            )
            for side in ("encoder", "decoder")
        ]
        # A token needs the decoder up to its own position.
        return self.tgt_length * (self.src_length * sides[0] + self.tgt_length * sides[1] // 2)

    @torch.no_grad()
    def baseline(self) -> Tensor:
        """Return the log-probability (T,) of each target token of the unchanged model."""
        return self.log_probs(self.hidden(self.embed_source(), self.embed_target()))[0]


class AttentionPart(NamedTuple):
    """An attention of a model, or the part of a prefix LM's that reads or is read by one side."""

    module: str  # path of the module
    heads: int
    # Of a prefix LM, whose one attention does the work of three: "source" to source, "cross" from
    # target to source, or "target" to target. Empty for the whole.
    part: str = ""

    def region(self, queries: int, keys: int, sources: int, device: torch.device) -> Tensor | None:
        """Return which weights (Q, K) belong to the part; None for all.

        The queries are the last Q of the K positions, of which the first `sources` are the source.
        """
        if not self.part:
            return None
        positions = torch.arange(keys, device=device)
        is_source_row = (positions[keys - queries :] < sources).unsqueeze(1)
        is_source_column = positions < sources
        return {
            "source": is_source_row & is_source_column,
            "cross": ~is_source_row & is_source_column,
            "target": ~is_source_row & ~is_source_column,
        }[self.part]


def attention_parts(model: nn.Module) -> dict[str, AttentionPart]:
    """Return the attentions of a model, by the paths that an explanation has for them.

    A prefix LM's `decoder.0.self` appears as `encoder.0.self`, `decoder.0.cross` and
    `decoder.0.self`, as if it were an encoder-decoder.
    """
    found = {
        path: AttentionPart(path, int(getattr(module, "heads", 1)))
        for path, module in find_attentions(model).items()
    }
    if not isinstance(model, PrefixLM):
        return found
    names = {"encoder.{}.self": "source", "decoder.{}.cross": "cross", "decoder.{}.self": "target"}
    return {
        name.format(path.split(".")[1]): whole._replace(part=part)
        for name, part in names.items()
        for path, whole in found.items()
    }


@contextmanager
def scaled_heads(
    model: nn.Module, scales: Mapping[str, Tensor], *, sources: int = 0
) -> Iterator[None]:
    """Multiply the weights of heads within the block by scales.

    A scale is (1, H) or (1, H, K), one number for each key; or it has one row for each batch row.
    """
    parts = attention_parts(model)
    by_module: dict[str, list[tuple[AttentionPart, Tensor]]] = {
        path: [] for path in find_attentions(model)
    }
    for path, scale in scales.items():
        by_module[parts[path].module].append((parts[path], scale))

    def scale_weights(own: list[tuple[AttentionPart, Tensor]]) -> WeightsEdit:
        def apply_edit(weights: Tensor) -> Tensor:
            for part, scale in own:
                by_key = scale.unsqueeze(-1) if scale.dim() == 2 else scale[..., : weights.size(3)]
                scaled = weights * by_key.unsqueeze(2).to(weights.dtype)
                region = part.region(weights.size(2), weights.size(3), sources, weights.device)
                weights = scaled if region is None else torch.where(region, scaled, weights)
            return weights

        return apply_edit

    with edit(model, {path: scale_weights(own) for path, own in by_module.items()}):
        yield


class TargetGradients(NamedTuple):
    """Gradients of the log-odds of T target tokens."""

    src: Tensor | None  # (T, S, D) with respect to the source's embeddings
    tgt: Tensor  # (T, T, D) with respect to those of the decoder's input
    # (T, H, S + T) by attention: with respect to a scale of all weights that a head gives to a key,
    # for each key of its side; of an encoder-decoder the first S or T columns are used.
    keys: dict[str, Tensor]
    log_odds: Tensor  # (T,)


def target_gradients(
    pair: TeacherForcedPair,
    src: Tensor | None,
    tgt: Tensor,
    heads: Mapping[str, int],
    *,
    targets: range | None = None,
) -> TargetGradients:
    """Return the gradients at embeddings (1, S, D) and (1, T, D), of all targets or some.

    `heads` are the numbers of heads of the attentions whose scales are wanted. Targets are taken in
    groups; a group needs the decoder's input up to its last token only.
    """
    targets = range(pair.tgt_length) if targets is None else targets
    parts = [
        _group_gradients(pair, src, tgt, heads, first, min(first + TARGETS_PER_PASS, targets.stop))
        for first in range(targets.start, targets.stop, TARGETS_PER_PASS)
    ]
    sources = [part.src for part in parts if part.src is not None]
    return TargetGradients(
        torch.cat(sources) if sources else None,
        torch.cat(
            [
                nn.functional.pad(part.tgt, (0, 0, 0, pair.tgt_length - part.tgt.size(1)))
                for part in parts
            ]
        ),
        {path: torch.cat([part.keys[path] for part in parts]) for path in heads},
        torch.cat([part.log_odds for part in parts]),
    )


def _group_gradients(
    pair: TeacherForcedPair,
    src: Tensor | None,
    tgt: Tensor,
    heads: Mapping[str, int],
    first: int,
    end: int,
    *,
    by_rows: bool | None = None,
) -> TargetGradients:
    """Return the gradients of targets first to end - 1.

    One forward pass of one row is followed by one backward pass that `vmap` batches over targets.
    RNN kernels have no rule for that: there the batch has one row for each target.
    """
    if by_rows is None:
        by_rows = any(isinstance(module, RNN) for module in pair.model.modules())
    count = end - first
    rows = count if by_rows else 1
    with torch.inference_mode(False), torch.enable_grad():
        embedded = [
            None if side is None else side.detach().repeat(rows, 1, 1).requires_grad_()
            for side in (src, tgt[:, :end])
        ]
        scales = {
            path: torch.ones(
                rows, size, pair.src_length + pair.tgt_length, device=tgt.device
            ).requires_grad_()
            for path, size in heads.items()
        }
        # Explicit weights also where no scale is wanted: fused kernels have no rule for vmap.
        with scaled_heads(pair.model, scales, sources=pair.src_length):
            hidden = pair.hidden(embedded[0], _given(embedded[1]))
        if by_rows:  # row t at position t
            positions = torch.arange(count, device=tgt.device)
            hidden = hidden[positions, first + positions].unsqueeze(0)
        else:
            hidden = hidden[:, first:end]
        leaf = hidden.detach().requires_grad_()
        log_odds = pair.log_odds(leaf, first=first)  # (1, n)
        [slopes] = torch.autograd.grad(log_odds.sum(), [leaf])  # (1, n, E)
        if not by_rows:  # row t has the gradient of target t alone
            slopes = torch.diag_embed(slopes[0].T).permute(1, 2, 0).unsqueeze(1)  # (n, 1, n, E)
        leaves = [each for each in (*embedded, *scales.values()) if each is not None]
        found = torch.autograd.grad(
            hidden,
            leaves,
            slopes,
            is_grads_batched=not by_rows,
            allow_unused=True,
            materialize_grads=True,
        )
    gradients = [
        each.reshape(count, *leaf.shape[1:]) for each, leaf in zip(found, leaves, strict=True)
    ]
    num_sides = len(leaves) - len(scales)
    sides, of_heads = gradients[:num_sides], gradients[num_sides:]
    return TargetGradients(
        sides[0] if len(sides) == 2 else None,
        sides[-1],
        dict(zip(scales, of_heads, strict=True)),
        log_odds[0].detach(),
    )


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a target has tokens"
    return tensor
