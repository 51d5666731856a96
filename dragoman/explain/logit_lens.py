"""Logit lens: what the model would predict if its decoder ended after each of its layers.

The decoder's final norm and the output matrix are applied to the hidden state after every layer
(nostalgebraist 2020, "interpreting GPT: the logit lens"). The last layer's are the model's own
logits. Early layers write in a space that the output matrix was not trained on, so their ranks are
weak evidence: that a token ranks high says something, that it ranks low says little.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.attention.recorder import find_attentions, record
from dragoman.explain.forced_target import ForcedTarget

TOP_TOKENS = 5
RANKS = "lens.rank"  # name of the array


class LogitLens(NamedTuple):
    """The predictions after each of L decoder layers, for T target positions."""

    layers: list[str]  # "d0", "d1" and so on
    ranks: NDArray[np.int32]  # (L, T) rank of the target token; 1 is the most probable
    top_ids: NDArray[np.int64]  # (L, T, 5) most probable tokens, best first
    top_probs: NDArray[np.float32]  # (L, T, 5) their probabilities
    final_logits: Tensor  # (T, V) of the last layer: the model's own
    skipped: int  # layers of another width than the last, which the output matrix cannot read


class LensFields(NamedTuple):
    """The lens as an explanation has it, and the arrays that it names."""

    fields: dict[str, Any]  # layers, rank, top, exact_last
    arrays: dict[str, NDArray[Any]]


@torch.no_grad()
def read_logit_lens(forced: ForcedTarget, *, top: int = TOP_TOKENS) -> LogitLens:
    """Return the rank of each target token and the most probable tokens after each layer."""
    model, outputs = forced.model, list[Tensor]()
    # Explicit attention weights, as in the pass whose numbers stand beside these.
    with record(model, list(find_attentions(model))):
        forced.hidden(forced.embed_source(), forced.embed_target(), layer_outputs=outputs)
    width = outputs[-1].size(-1)
    layers, ranks, top_ids, top_probs = [], [], [], []
    logits = torch.empty(0)
    for number, output in enumerate(outputs):
        if output.size(-1) != width:
            continue
        logits = model.project(model.output(model.decoder.finish(output)))[0].float()  # (T, V)
        best = logits.topk(min(top, logits.size(-1)), dim=-1)
        layers.append(f"d{number}")
        ranks.append(token_ranks(logits, forced.tgt_out))
        top_ids.append(best.indices)
        top_probs.append((best.values - logits.logsumexp(-1, keepdim=True)).exp())
    return LogitLens(
        layers,
        torch.stack(ranks).cpu().numpy().astype(np.int32),
        torch.stack(top_ids).cpu().numpy(),
        torch.stack(top_probs).cpu().numpy(),
        logits,
        len(outputs) - len(layers),
    )


def lens_fields(lens: LogitLens, name_tokens: Callable[[list[int]], list[str]]) -> LensFields:
    """Return the lens as an explanation has it; `name_tokens` returns the texts of token ids."""
    texts = iter(name_tokens(lens.top_ids.flatten().tolist()))
    top = [
        [[[next(texts), round(prob, 5)] for prob in position] for position in layer]
        for layer in lens.top_probs.tolist()
    ]
    fields = {"layers": lens.layers, "rank": RANKS, "top": top, "exact_last": True}
    return LensFields(fields, {RANKS: lens.ranks})


def token_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the rank (T,) of each token among its logits (T, V): 1 plus the number above it."""
    chosen = logits.gather(1, tokens.unsqueeze(1))
    return (logits > chosen).sum(dim=1) + 1
