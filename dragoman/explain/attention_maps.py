"""Where a model looked while it wrote given targets: one pass with the whole target known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dragoman.attention.recorder import find_attentions, record
from dragoman.decoding.padded_batch import pad_batch, pad_sources
from dragoman.explain.explanation import AttentionWeights, is_cross_attention
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import BOS, EOS


class AttentionMaps(NamedTuple):
    """What one row's pass showed."""

    attentions: dict[str, AttentionWeights]  # path -> (H, T or S, S or T)
    log_probs: list[float]  # of each target token


@torch.inference_mode()
def align_batch(
    model: EncoderDecoder, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> list[AttentionWeights] | None:
    """Average each row's cross-attention over layers and heads: (T, S), the source's end being a column.

    A row per target token says where the model looked when it chose that token. None if the decoder has no cross-attention.
    """
    device = next(model.parameters()).device
    cross_attentions = [path for path in find_attentions(model) if is_cross_attention(path)]
    if not cross_attentions:
        return None
    memory = model.encode(*pad_sources(sources, device))
    tgt_in, mask = pad_batch([[BOS, *target] for target in targets], device)
    with record(model, cross_attentions) as notes:
        model.decode(tgt_in, memory, mask)
    total = torch.stack([notes[path].weights.float().mean(dim=1) for path in cross_attentions]).sum(
        dim=0
    )  # (B, T, S)
    mean: AttentionWeights = (total / len(cross_attentions)).cpu().numpy()
    return [
        mean[row, : len(target), : len(source) + 1]
        for row, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]


@torch.inference_mode()
def record_attention(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int], *, finished: bool = True
) -> AttentionMaps:
    """Record every attention of a model while it reads a source and writes a given target, its end included if finished."""
    device = next(model.parameters()).device
    written = [*target, EOS] if finished else list(target)
    src, _ = pad_sources([source], device)
    tgt_in, _ = pad_batch([[BOS, *written[:-1]]], device)
    with record(model) as notes:
        log_probs = model(src, tgt_in).float().log_softmax(-1)[0]
    weights = {
        path: note.weights[0].float().cpu().numpy().astype(np.float32)
        for path, note in notes.items()
    }
    return AttentionMaps(
        weights, [float(log_probs[place, token]) for place, token in enumerate(written)]
    )
