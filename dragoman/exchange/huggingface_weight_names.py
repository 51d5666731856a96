"""Map weight names between our Transformer and Hugging Face's Marian and Pegasus models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dragoman.attention.multi_head import MultiHead
from dragoman.exchange.transformer_export_spec import StackSpec
from dragoman.models.transformer_blocks import TransformerLayer

_NORM_NAMES = {
    "self": "self_attn_layer_norm",
    "cross": "encoder_attn_layer_norm",
    "ffn": "final_layer_norm",
}


def to_hugging_face(side: StackSpec, stack: str) -> dict[str, Tensor]:
    """Return the weights of a stack under their names; weights that ours lacks are zero."""
    named: dict[str, Tensor] = {}
    for number, layer in enumerate(side.layers):
        there = f"model.{stack}.layers.{number}"
        for name, part in _layer_to_hugging_face(layer).items():
            named[f"{there}.{name}"] = part.detach().float().cpu()
    if side.norm is not None:
        for kind, tensor in side.norm.named_parameters():
            named[f"model.{stack}.layer_norm.{kind}"] = tensor.detach().float().cpu()
    return named


def from_hugging_face(theirs: Mapping[str, Tensor], stack: str, layers: int) -> dict[str, Tensor]:
    """Return the weights of a stack under our names."""
    ours: dict[str, Tensor] = {}
    for number in range(layers):
        here, there = f"{stack}.{number}", f"model.{stack}.layers.{number}"
        for part in ("weight", "bias"):

            def joined(attention: str, names: str, part: str = part, there: str = there) -> Tensor:
                return torch.cat(
                    [theirs[f"{there}.{attention}.{name}_proj.{part}"] for name in names]
                )

            ours[f"{here}.self.query_key_value.{part}"] = joined("self_attn", "qkv")
            ours[f"{here}.self.output.{part}"] = theirs[f"{there}.self_attn.out_proj.{part}"]
            ours[f"{here}.ffn.inner.{part}"] = theirs[f"{there}.fc1.{part}"]
            ours[f"{here}.ffn.outer.{part}"] = theirs[f"{there}.fc2.{part}"]
            if stack == "decoder":
                ours[f"{here}.cross.query.{part}"] = joined("encoder_attn", "q")
                ours[f"{here}.cross.key_value.{part}"] = joined("encoder_attn", "kv")
                ours[f"{here}.cross.output.{part}"] = theirs[
                    f"{there}.encoder_attn.out_proj.{part}"
                ]
            for name, norm in _NORM_NAMES.items():
                if name != "cross" or stack == "decoder":
                    ours[f"{here}.{name}_residual.norm.{part}"] = theirs[f"{there}.{norm}.{part}"]
    for part in ("weight", "bias"):
        if f"model.{stack}.layer_norm.{part}" in theirs:  # pre-norm only
            ours[f"{stack}.norm.{part}"] = theirs[f"model.{stack}.layer_norm.{part}"]
    return ours


def reorder_sinusoids(named: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Permute the model width: interleaved sines and cosines become sines, then cosines.

    Every weight that reads or writes the residual stream is permuted alike, so nothing else
    changes.
    """
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    reads = (
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "fc1.weight",
        "lm_head.weight",
        "embed_tokens.weight",
        "shared.weight",
    )
    writes = (
        "out_proj.weight",
        "out_proj.bias",
        "fc2.weight",
        "fc2.bias",
        "layer_norm.weight",
        "layer_norm.bias",
    )
    moved = {}
    for name, tensor in named.items():
        if name.endswith(reads):
            tensor = tensor[:, order]
        elif name.endswith(writes):
            tensor = tensor[order]
        moved[name] = tensor.contiguous()
    return moved


def _layer_to_hugging_face(layer: TransformerLayer) -> dict[str, Tensor]:
    """Return the weight names of one layer."""
    named = _split_projections("self_attn", "qkv", layer.self, layer.self.query_key_value)
    named |= _split_projections("self_attn", ["out"], layer.self, layer.self.output)
    if layer.has_cross:
        named |= _split_projections("encoder_attn", "q", layer.cross, layer.cross.query)
        named |= _split_projections("encoder_attn", "kv", layer.cross, layer.cross.key_value)
        named |= _split_projections("encoder_attn", ["out"], layer.cross, layer.cross.output)
    for there, linear in (("fc1", layer.ffn.inner), ("fc2", layer.ffn.outer)):
        named[f"{there}.weight"] = linear.weight
        named[f"{there}.bias"] = (
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
        )
    for name, norm in _NORM_NAMES.items():
        if name != "cross" or layer.has_cross:
            residual = getattr(layer, f"{name}_residual")
            named[f"{norm}.weight"], named[f"{norm}.bias"] = (
                residual.norm.weight,
                residual.norm.bias,
            )
    return named


def _split_projections(
    attention: str, names: Sequence[str], heads: MultiHead, linear: nn.Linear
) -> dict[str, Tensor]:
    """Split a fused projection by name; grouped key and value heads are repeated per group."""
    sizes = [{"q": heads.inner, "out": heads.width}.get(name, heads.kv_inner) for name in names]
    bias = linear.weight.new_zeros(linear.weight.size(0)) if linear.bias is None else linear.bias
    named = {}
    for name, weight, shift in zip(
        names, torch.split(linear.weight, sizes), torch.split(bias, sizes), strict=True
    ):
        for kind, part in (("weight", weight), ("bias", shift)):
            if name in ("k", "v"):
                part = (
                    part.view(heads.kv_heads, -1, *part.shape[1:])
                    .repeat_interleave(heads.heads // heads.kv_heads, dim=0)
                    .flatten(0, 1)
                )
            named[f"{attention}.{name}_proj.{kind}"] = part
    return named
