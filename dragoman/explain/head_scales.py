"""Scales of attention heads: what is multiplied to switch a head off, or differentiated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.recorder import WeightsEdit, edit, find_attentions
from dragoman.models.prefix_lm import PrefixLM


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
    """Multiply the weights of heads within the block by scales, (1, H) or one row per batch row."""
    parts = attention_parts(model)
    by_module: dict[str, list[tuple[AttentionPart, Tensor]]] = {
        path: [] for path in find_attentions(model)
    }
    for path, scale in scales.items():
        by_module[parts[path].module].append((parts[path], scale))

    def scale_weights(own: list[tuple[AttentionPart, Tensor]]) -> WeightsEdit:
        def apply_edit(weights: Tensor) -> Tensor:
            for part, scale in own:
                scaled = weights * scale[:, :, None, None].to(weights.dtype)
                region = part.region(weights.size(2), weights.size(3), sources, weights.device)
                weights = scaled if region is None else torch.where(region, scaled, weights)
            return weights

        return apply_edit

    with edit(model, {path: scale_weights(own) for path, own in by_module.items()}):
        yield
