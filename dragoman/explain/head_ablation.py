"""Head ablation: what changes when attention heads are switched off.

A head that is off contributes nothing; its slice is zero before the output projection, the bias of
its values included. An attention with all heads off writes the bias of its output projection alone;
an RNN's context vector is zero. Michel, Levy and Neubig (2019), "Are Sixteen Heads Really Better
than One?", whose head masks also give estimates of all effects at once. Effects are changes of
log-probability under teacher forcing: negative where the head helps the target token.
`scaled_heads` in teacher_forced_pass.py multiplies the attention weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.errors import DataError
from dragoman.explain.explanation import AttentionSite
from dragoman.explain.teacher_forced_pass import (
    TargetGradients,
    TeacherForcedPair,
    attention_parts,
    scaled_heads,
)
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.prefix_language_model import PrefixLM

HeadSelection = Mapping[str, Sequence[int]]  # path of an attention -> heads


class HeadEffect(NamedTuple):
    """The effect of one head that is off."""

    path: str  # of the attention: "decoder.3.cross"
    head: int
    changes: NDArray[np.float32]  # (T,) of each target token's log-probability

    @property
    def total(self) -> float:
        """The change of the target's log-probability."""
        return float(self.changes.sum())


def select_heads(sites: Sequence[AttentionSite], names: Sequence[str]) -> dict[str, list[int]]:
    """Return the heads of names such as "x3.2", by the path of their site.

    Raise DataError for a name that is no head of the sites.
    """
    by_id = {site.id: site for site in sites}
    chosen: dict[str, list[int]] = {}
    for name in names:
        site_id, _, number = str(name).rpartition(".")
        site = by_id.get(site_id)
        if site is None or not number.isascii() or not number.isdigit():
            raise DataError(
                "a head must be written as a site and a number, such as "
                f"{sites[0].id + '.0' if sites else 'x0.0'}",
                found=repr(name),
                fix=f"the sites are {', '.join(by_id)}" if by_id else "this model has no attention",
            )
        if int(number) >= site.heads:
            raise DataError(
                f"{site_id} has {site.heads} head{'' if site.heads == 1 else 's'}, "
                f"{site_id}.0 to {site_id}.{site.heads - 1}",
                found=repr(name),
                fix="heads are counted from 0",
            )
        heads = chosen.setdefault(site.path, [])
        if int(number) not in heads:
            heads.append(int(number))
    return chosen


@contextmanager
def heads_switched_off(model: nn.Module, off: HeadSelection, *, sources: int = 0) -> Iterator[None]:
    """Switch heads off within the block, for this thread; attentions compute explicit weights.

    `sources` is the number of source tokens, which a prefix LM needs. Without heads off, all is as
    in the unchanged model with explicit weights, bit for bit.
    """
    parts = attention_parts(model)
    device = next(model.parameters()).device
    scales = {}
    for path, heads in off.items():
        if path not in parts:
            raise DataError(
                "a head to switch off must be in an attention of the model",
                found=repr(path),
                fix=f"its attentions are {', '.join(parts) or 'none'}",
            )
        count = parts[path].heads
        wrong = [head for head in heads if not 0 <= head < count]
        if wrong:
            raise DataError(
                f"a head of {path} must be from 0 to {count - 1}",
                found=str(wrong[0]),
                fix="heads are counted from 0",
            )
        scale = torch.ones(1, count, device=device)
        scale[0, list(heads)] = 0.0
        scales[path] = scale
    with scaled_heads(model, scales, sources=sources):
        yield


@torch.no_grad()
def ablate_heads(pair: TeacherForcedPair, off: HeadSelection) -> NDArray[np.float32]:
    """Return the change (T,) of each target token's log-probability with some heads off."""
    with heads_switched_off(pair.model, {}):
        before = pair.baseline()
    with heads_switched_off(pair.model, off, sources=pair.src_length):
        after = pair.baseline()
    return _to_numpy(after - before)


def head_estimates(gradients: TargetGradients) -> dict[str, NDArray[np.float32]]:
    r"""Return estimates of the effect of every head from its slopes: (H,) for each attention.

    .. math:: \sum_t \log \sigma(z_t - \partial z_t / \partial m_h) - \log \sigma(z_t)

    z_t are the log-odds of target token t and m_h the scale of head h, which is 1: the log-odds are
    taken to change linearly as the head fades out. Far from the truth where a head saturates or
    others take over; the order of heads is more reliable than the size.
    """
    log_odds = gradients.log_odds.double().unsqueeze(1)
    before = nn.functional.logsigmoid(log_odds)
    return {
        path: _to_numpy((nn.functional.logsigmoid(log_odds - slopes.sum(-1)) - before).sum(0))
        for path, slopes in gradients.keys.items()
    }


def linear_head_estimates(pair: TeacherForcedPair) -> dict[str, NDArray[np.float32]]:
    r"""Return estimates of the effect of every head, (H,) an attention, from one backward pass.

    .. math:: -\sum_t \partial \log p_t / \partial m_h

    The log-probability is taken to change linearly, which it does less than the log-odds of
    `head_estimates`; those need a backward pass for every target token.
    """
    with torch.inference_mode(False), torch.enable_grad():
        scales = {
            path: torch.ones(1, part.heads, device=pair.tgt_in.device).requires_grad_()
            for path, part in attention_parts(pair.model).items()
        }
        with scaled_heads(pair.model, scales, sources=pair.src_length):
            total = pair.log_probs(pair.hidden(pair.embed_source(), pair.embed_target())).sum()
        if not scales:
            return {}
        slopes = torch.autograd.grad(
            total, list(scales.values()), allow_unused=True, materialize_grads=True
        )
    return {path: _to_numpy(-slope[0]) for path, slope in zip(scales, slopes, strict=True)}


def head_batches(pair: TeacherForcedPair) -> list[list[tuple[str, int]]]:
    """Return all heads in batches of bounded memory, the decoder's before the encoder's."""
    parts = attention_parts(pair.model)
    heads = [(path, head) for path, part in parts.items() for head in range(part.heads)]
    groups = [
        [each for each in heads if each[0].startswith("encoder.") == in_encoder]
        for in_encoder in (False, True)
    ]
    rows = pair.max_rows()
    return [group[first : first + rows] for group in groups for first in range(0, len(group), rows)]


def measure_head_batch(
    pair: TeacherForcedPair, heads: Sequence[tuple[str, int]]
) -> list[HeadEffect]:
    """Return the effect of each of some heads that is off alone, in one batch with a row for each.

    If all are the decoder's, they share one encoder pass.
    """
    with heads_switched_off(pair.model, {}):
        before = pair.baseline()
    changes = _to_numpy(_run_without(pair, heads) - before)
    return [HeadEffect(*each, row) for each, row in zip(heads, changes, strict=True)]


@torch.no_grad()
def _run_without(pair: TeacherForcedPair, heads: Sequence[tuple[str, int]]) -> Tensor:
    """Return the log-probability (n, T) of each target token without each of n heads."""
    model, parts, rows = pair.model, attention_parts(pair.model), len(heads)
    shares_encoder = not isinstance(model, PrefixLM) and not any(
        path.startswith("encoder.") for path, _ in heads
    )
    scales: dict[str, Tensor] = {}
    for row, (path, head) in enumerate(heads):
        if path not in scales:
            scales[path] = torch.ones(rows, parts[path].heads, device=pair.tgt_in.device)
        scales[path][row, head] = 0.0
    src, tgt = pair.embed_source(), pair.embed_target().expand(rows, -1, -1)
    if shares_encoder and src is not None and isinstance(model, EncoderDecoder):
        with heads_switched_off(model, {}):
            memory = model.encode_embedded(src)
        copies = memory.select(torch.zeros(rows, dtype=torch.long, device=src.device))
        with scaled_heads(model, scales):
            return pair.log_probs(model.decode_embedded(tgt, copies))
    src = None if src is None else src.expand(rows, -1, -1)
    with scaled_heads(model, scales, sources=pair.src_length):
        return pair.log_probs(pair.hidden(src, tgt))


def _to_numpy(values: Tensor) -> NDArray[np.float32]:
    """Return float32 values on the host."""
    array: NDArray[np.float32] = values.detach().float().cpu().numpy()
    return array
