"""Attention weights of given targets, recorded in one teacher-forced forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dragoman.attention.recorder import find_attentions, record
from dragoman.decoding.padded_batch import pad_batch, pad_sources
from dragoman.explain.explanation import AttentionWeights, is_cross_attention
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.prefix_lm import PrefixLM
from dragoman.text.special_tokens import BOS, EOS


class AttentionMaps(NamedTuple):
    """Recorded attention weights and log-probabilities of one sentence pair."""

    attentions: dict[str, AttentionWeights]  # path -> (H, T or S, S or T)
    log_probs: list[float]  # of each target token


@torch.inference_mode()
def align_batch(
    model: EncoderDecoder, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[AttentionWeights] | None:
    """Return each row's cross-attention weights averaged over layers and heads: (T, S).

    The last column is the source's end of sentence. None if the decoder has no cross-attention.
    """
    device = next(model.parameters()).device
    # A prefix LM attends to the source by the self-attention of its one stack.
    is_prefix_lm = isinstance(model, PrefixLM)
    cross_attentions = [
        path for path in find_attentions(model) if is_prefix_lm or is_cross_attention(path)
    ]
    if not cross_attentions:
        return None
    src, src_mask = pad_sources(sources, device)
    memory = model.encode(src, src_mask)
    tgt_in, mask = pad_batch([[BOS, *target] for target in targets], device)
    with record(model, cross_attentions) as records:
        model.decode(tgt_in, memory, mask)
    total = torch.stack(
        [records[path].weights[..., : src.size(1)].float().mean(dim=1) for path in cross_attentions]
    ).sum(dim=0)  # (B, T, S)
    mean: AttentionWeights = (total / len(cross_attentions)).cpu().numpy()
    return [
        mean[row, : len(target), : len(source) + 1]
        for row, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]


@torch.inference_mode()
def record_attention(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int], *, finished: bool = True
) -> AttentionMaps:
    """Return the weights of every attention layer for a source and a given target.

    With `finished`, the target includes its end of sentence.
    """
    device = next(model.parameters()).device
    tgt_out = [*target, EOS] if finished else list(target)
    src, _ = pad_sources([source], device)
    tgt_in, _ = pad_batch([[BOS, *tgt_out[:-1]]], device)
    with record(model) as records:
        log_probs = model(src, tgt_in).float().log_softmax(-1)[0]
    weights = {
        path: recorded.weights[0].float().cpu().numpy().astype(np.float32)
        for path, recorded in records.items()
    }
    if isinstance(model, PrefixLM):
        weights = _split_prefix(weights, src.size(1))
    return AttentionMaps(
        weights, [float(log_probs[position, token]) for position, token in enumerate(tgt_out)]
    )


def _split_prefix(
    weights: dict[str, AttentionWeights], sources: int
) -> dict[str, AttentionWeights]:
    """Name the parts of a prefix LM's weights (H, S + T, S + T) as an encoder-decoder's.

    `encoder.N.self` is source to source; the rows of `decoder.N.cross`, target to source, and of
    `decoder.N.self`, target to target, sum to one together.
    """
    parts = {
        "encoder.{}.self": np.s_[:, :sources, :sources],
        "decoder.{}.cross": np.s_[:, sources:, :sources],
        "decoder.{}.self": np.s_[:, sources:, sources:],
    }
    return {
        name.format(path.split(".")[1]): found[part]
        for name, part in parts.items()
        for path, found in weights.items()
    }
