"""Attention weights, contributions and logits of given targets, from one teacher-forced pass.

The pass computes explicit weights instead of calling a fused kernel; `PairCapture.logits` are its
own, so that the shown numbers come from the same pass. `record` of
`attention/attention_weight_hooks.py` records the weights of each layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_mechanism import Mechanism
from dragoman.attention.attention_weight_hooks import (
    AttentionRecord,
    RecordableAttention,
    find_attentions,
    record,
)
from dragoman.attention.location_and_coverage import CoverageAlignment, LocationSensitiveAlignment
from dragoman.attention.lsh import LSHAttention
from dragoman.attention.monotonic import MonotonicAlignment
from dragoman.attention.multi_head import MultiHead
from dragoman.data.inference_batches import pad_batch, pad_sources
from dragoman.explain.explanation import AttentionSite, AttentionWeights, is_cross_attention
from dragoman.layers.convs2s import ConvS2SAttention
from dragoman.models.block_stack import Stack
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.prefix_language_model import PrefixLM
from dragoman.text.special_tokens import BOS, EOS

FloatArray = NDArray[np.float32]

_SITE_LETTERS = {"encoder": "e", "decoder": "d", "cross": "x"}
# The three parts of a prefix LM's weights (S + T, S + T): group and the path of an encoder-decoder.
_PREFIX_PARTS = {
    "encoder": "encoder.{}.self",
    "decoder": "decoder.{}.self",
    "cross": "decoder.{}.cross",
}


class LocatedSite(NamedTuple):
    """An attention site, the module that computes it, and which part of its weights it is."""

    site: AttentionSite
    module_path: str  # of the module in the model: that of the site, but for a prefix LM
    part: str = ""  # of a prefix LM: encoder, decoder or cross; else empty

    def part_slices(self, sources: int) -> tuple[slice, slice]:
        """Return the queries and keys of the module's weights that belong to the site."""
        return {
            "": (slice(None), slice(None)),
            "encoder": (slice(0, sources), slice(0, sources)),
            "decoder": (slice(sources, None), slice(sources, None)),
            "cross": (slice(sources, None), slice(0, sources)),
        }[self.part]


class CapturedSite(NamedTuple):
    """The numbers of one attention site for one sentence pair."""

    site: AttentionSite
    weights: FloatArray  # (H, Q, K)
    contributions: FloatArray  # (H, Q, K) norms of weight * value * output matrix
    output_error: float  # relative distance of weights @ values from the module's output


class PairCapture(NamedTuple):
    """The results of one teacher-forced pass over a sentence pair."""

    sites: list[CapturedSite]
    logits: Tensor  # (T, V) float32, on the CPU
    extras: dict[str, NDArray[np.generic]]  # of special alignments, by name


class AttentionMaps(NamedTuple):
    """Recorded attention weights and log-probabilities of one sentence pair."""

    attentions: dict[str, AttentionWeights]  # path -> (H, T or S, S or T)
    log_probs: list[float]  # of each target token


# --- sites ---


def locate_sites(model: EncoderDecoder) -> list[LocatedSite]:
    """Return the attention sites of a model: encoder, decoder, cross, each by layer."""
    located = list[LocatedSite]()
    is_prefix_lm = isinstance(model, PrefixLM)
    layers = {side: layer_numbers(getattr(model, side)) for side in ("encoder", "decoder")}
    seen = set[str]()
    for path, module in find_attentions(model).items():
        side, _, rest = path.partition(".")
        if side not in layers:
            continue
        layer = next(n for prefix, n in layers[side].items() if f"{rest}.".startswith(f"{prefix}."))
        groups = [*_PREFIX_PARTS] if is_prefix_lm else [_group_of(path)]
        for group in groups:
            site = _describe_site(path, module, group, layer, is_part=is_prefix_lm)
            while site.id in seen:
                site = _with_next_letter(site)
            seen.add(site.id)
            located.append(LocatedSite(site, path, group if is_prefix_lm else ""))
    order = [*_SITE_LETTERS]
    return sorted(located, key=lambda each: (order.index(each.site.group), each.site.layer))


def layer_numbers(stack: Stack) -> dict[str, int]:
    """Return the number of each layer by its path in a stack; blocks of several layers count each.

    The layers of `reformer(layers=2), transformer` are 0.0, 0.1 and 1, numbers 0, 1 and 2.
    """
    return {path: number for number, path in enumerate(_layer_paths(stack))}


def _layer_paths(stack: Stack) -> Iterator[str]:
    for name, block in stack.blocks():
        inner = [child for child, _ in block.named_children() if child.isdigit()]
        yield from (f"{name}.{child}" for child in inner) if inner else [name]


def _group_of(path: str) -> str:
    return "cross" if is_cross_attention(path) else path.partition(".")[0]


def _describe_site(
    path: str, module: RecordableAttention, group: str, layer: int, *, is_part: bool
) -> AttentionSite:
    return AttentionSite(
        id=f"{_SITE_LETTERS[group]}{layer}",
        path=_PREFIX_PARTS[group].format(layer) if is_part else path,
        kind="cross" if group == "cross" else "self",
        group=group,
        layer=layer,
        heads=int(getattr(module, "heads", 1)),
        query="source" if group == "encoder" else "target",
        key="target_in" if group == "decoder" else "source",
        # A target position of a prefix LM divides one row between source and target.
        sum="sub" if is_part and group != "encoder" else row_sum(module),
        causal=group == "decoder",
    )


def _with_next_letter(site: AttentionSite) -> AttentionSite:
    """Return a site with the next letter: x0, x0b, x0c."""
    letter = site.id[-1]
    name = f"{site.id[:-1]}{chr(ord(letter) + 1)}" if letter.isalpha() else f"{site.id}b"
    return replace(site, id=name)


def row_sum(module: nn.Module) -> str:
    """Return the sum of the rows of an attention's weights by its definition."""
    if isinstance(module, MultiHead) and module.mix_weights is not None:
        return "none"  # talking heads mix distributions by a trained matrix
    if isinstance(module, Mechanism) and not module.alignment.rows_sum_to_one:
        return "sub"
    return "one"


# --- capture ---


@torch.inference_mode()
def capture_batch(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> list[PairCapture]:
    """Return weights, contributions and logits of sentence pairs, from one teacher-forced pass.

    Sources are without EOS, which is appended; targets are predicted tokens, EOS included if it
    was reached. Padding never shows: each capture is that of its pair alone, to rounding.
    """
    device = next(model.parameters()).device
    src, src_mask = pad_sources(sources, device)
    tgt_in, tgt_mask = pad_batch([[BOS, *target[:-1]] for target in targets], device)
    located = locate_sites(model)
    with record(model) as records:
        logits = model(src, tgt_in, src_mask, tgt_mask).float()
    attentions = find_attentions(model)
    captures = list[PairCapture]()
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        lengths = {"source": len(source) + 1, "target": len(target), "target_in": len(target)}
        sites, extras = list[CapturedSite](), dict[str, NDArray[np.generic]]()
        for each in located:
            if each.module_path not in records:
                continue
            module, recorded = attentions[each.module_path], records[each.module_path]
            sites.append(_capture_site(each, module, recorded, row, src.size(1), lengths))
            extras |= _alignment_extras(module, recorded, row, sites[-1])
        captures.append(PairCapture(sites, logits[row, : len(target)].cpu(), extras))
    return captures


def capture_pair(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int]
) -> PairCapture:
    """Return what `capture_batch` returns for one sentence pair."""
    [captured] = capture_batch(model, [source], [target])
    return captured


def _capture_site(
    located: LocatedSite,
    module: RecordableAttention,
    recorded: AttentionRecord,
    row: int,
    padded_sources: int,
    lengths: dict[str, int],
) -> CapturedSite:
    """Return one row of a record, without padding, with the norms of its contributions."""
    site = located.site
    rows, columns = located.part_slices(padded_sources)
    queries, keys = lengths[site.query], lengths[site.key]
    weights = recorded.weights[row][:, rows, columns][:, :queries, :keys].float()
    values = recorded.values[row][:, columns][:, :keys].float()  # (H, S, Dv)
    # All keys of the row: the parts of a prefix LM add up to one output.
    expected = recorded.output[row].float()
    computed = recorded.weights[row].float() @ recorded.values[row].float()
    scale = float(expected.abs().max().clamp_min(1e-12))
    norms = _projected_values(module, values, lengths["source"]).norm(dim=-1)  # (H, S)
    return CapturedSite(
        site,
        weights.cpu().numpy().astype(np.float32),
        (weights.abs() * norms.unsqueeze(1)).cpu().numpy().astype(np.float32),
        float((computed - expected).abs().max()) / scale,
    )


def _projected_values(module: nn.Module, values: Tensor, sources: int) -> Tensor:
    """Return each value's (H, S, Dv) term in the module's output at weight 1: (H, S, D).

    It is the value times the head's part of the output matrix; a mechanism has no such matrix.
    """
    matrix = output_matrix(module)
    if matrix is None:
        return values
    heads = matrix.float().view(matrix.size(0), values.size(0), -1)  # (D, H, Dv)
    projected = torch.einsum("hsv,dhv->hsd", values, heads)
    return projected * output_scale(module, sources)


def output_matrix(module: nn.Module) -> Tensor | None:
    """Return the output matrix (D, H Dv) of an attention; None if it has none."""
    if isinstance(module, (MultiHead, LSHAttention)):
        return module.output.weight
    if isinstance(module, ConvS2SAttention):
        return module.output.weight()
    return None


def output_scale(module: nn.Module, sources: int) -> float:
    """Return the factor of the context before the output matrix: ConvS2S multiplies by sqrt(S)."""
    return float(sources) ** 0.5 if isinstance(module, ConvS2SAttention) else 1.0


def _alignment_extras(
    module: nn.Module, recorded: AttentionRecord, row: int, captured: CapturedSite
) -> dict[str, NDArray[np.generic]]:
    """Return arrays of particular alignments by name: "p_choose" of x0 is "x0.p_choose"."""
    if not isinstance(module, Mechanism):
        return {}
    alignment, name = module.alignment, captured.site.id
    weights = captured.weights  # (1, T, S)
    queries, keys = weights.shape[1:]
    found: dict[str, NDArray[np.generic]] = {}
    if isinstance(alignment, MonotonicAlignment) and recorded.scores is not None:
        scores = recorded.scores[row][:, :queries, :keys].float()
        stops = alignment.stop_probabilities(scores).cpu().numpy().astype(np.float32)
        found[f"{name}.p_choose"] = stops
        found[f"{name}.path"] = _read_path(stops[0])
    if isinstance(alignment, (CoverageAlignment, LocationSensitiveAlignment)):
        found[f"{name}.covered"] = np.cumsum(weights, axis=1) - weights
    if isinstance(alignment, LocationSensitiveAlignment) and recorded.scores is not None:
        energies = recorded.scores[row][:, :queries, :keys]
        found[f"{name}.energy"] = energies.float().cpu().numpy().astype(np.float32)
    return found


def _read_path(stops: FloatArray) -> NDArray[np.generic]:
    """Return the key at which a monotonic head stops for each position; S if past the last."""
    path, at = list[int](), 0
    for row in stops:
        later = np.flatnonzero(row[at:] > 0.5)
        at = at + int(later[0]) if later.size else len(row)
        path.append(at)
    return np.asarray(path, dtype=np.int32)


# --- older names ---


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


def record_attention(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int], *, finished: bool = True
) -> AttentionMaps:
    """Return the weights of every attention layer for a source and a given target.

    With `finished`, the target includes its end of sentence.
    """
    tgt_out = [*target, EOS] if finished else list(target)
    captured = capture_pair(model, source, tgt_out)
    log_probs = captured.logits.log_softmax(-1)
    return AttentionMaps(
        {each.site.path: each.weights for each in captured.sites},
        [float(log_probs[position, token]) for position, token in enumerate(tgt_out)],
    )
