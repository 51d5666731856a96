"""Pack weights for the C++ kernels, in float32 or int8, and the int8 filter of the output.

`quantize_rows` in `storage/int8_quantization.py` quantizes them, and `pack_int8_panels` in
packed_linear.py packs the result in the layout of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.multi_head import CrossAttention, SelfAttention
from dragoman.inference.cpu.c_structs import (
    CInt8Filter,
    CLayer,
    CLinear,
    CModel,
    CNorm,
    CResidualNorms,
)
from dragoman.inference.cpu.packed_linear import (
    ActivationRange,
    QuantizationParams,
    pack_int8_panels,
    quantization_params,
)
from dragoman.layers.embedding_and_output_projection import Embedding
from dragoman.layers.feed_forward import ReLU
from dragoman.layers.norms_and_residuals import (
    LayerNorm,
    NoNorm,
    PostNorm,
    PreNorm,
    Residual,
    RMSNorm,
    T5Norm,
)
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.transformer_blocks import TransformerLayer
from dragoman.storage.int8_quantization import quantize_rows

ZERO_POINT = 128  # the uint8 value that stands for an input of zero
VECTOR_WIDTH = 16  # floats of the widest SIMD vector: every width is padded to a multiple of it
_RESIDUALS = (PreNorm, PostNorm, NoNorm)
_NORMS = (LayerNorm, RMSNorm, T5Norm)


class PackedInt8Filter(NamedTuple):
    """An int8 filter and the tensors that it points to."""

    int8_filter: CInt8Filter
    buffers: list[Tensor]


def pack_int8_filter(
    weight: Tensor, bias: Tensor | None, *, panel: int, lanes: int
) -> PackedInt8Filter:
    """Quantize an output projection (V, D) with bias (V,), and bound its rounding error.

    Rows are padded to whole panels, columns to whole vectors.
    """
    vocab_size, width = weight.shape
    padded_rows, padded_columns = -vocab_size % panel, -width % lanes
    float_weight = weight.detach().float()
    float_weight = (  # the model's own tensor if it needs no padding
        F.pad(float_weight, (0, padded_columns)) if padded_columns else float_weight.contiguous()
    )
    matrix = F.pad(float_weight, (0, 0, 0, padded_rows))
    int_values, each = quantize_rows(matrix)
    dequantized = int_values * each.unsqueeze(1)
    error_norms, weight_norms = (
        (matrix - dequantized).double().norm(dim=1),
        dequantized.double().norm(dim=1),
    )
    # Several times the rounding error of float32 sums of D terms, in the float32 logits and in the
    # scaling of the int8 ones.
    error_norms += matrix.size(1) * 2.0**-22 * (matrix.double().norm(dim=1) + weight_norms)
    added = torch.zeros(vocab_size) if bias is None else bias.detach().float()
    finite = added[added.isfinite()].abs()
    buffers = [
        pack_int8_panels(int_values, panel).contiguous(),
        each,
        -ZERO_POINT * each * int_values.sum(dim=1),
        F.pad(added, (0, padded_rows)),
        *((length * (1 + 1e-5)).float() for length in (error_norms, weight_norms)),
        float_weight,
    ]
    addresses = [tensor.data_ptr() for tensor in buffers]
    quantized_linear = CLinear(
        weight=addresses[0],
        scale=addresses[1],
        bias=addresses[2],
        in_features=matrix.size(1),
        out_features=vocab_size,
    )
    int8_filter = CInt8Filter(quantized_linear, *addresses[3:])
    int8_filter.bias_slack = 2.0**-20 * float(finite.max()) if finite.numel() else 0.0
    return PackedInt8Filter(int8_filter, buffers)


class OutputSubset(NamedTuple):
    """The rows of the output projection for some token ids."""

    linear: CLinear
    buffers: list[Any]  # tensors that it points to


def cpp_unsupported_reason(model: EncoderDecoder) -> str:
    """Return why a standard Transformer cannot run in the C++ kernels; empty if it can."""
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, block in stack.blocks():
            assert isinstance(block, TransformerLayer), "checked by torch_unsupported_reason"
            residuals = [
                block.self_residual,
                block.ffn_residual,
                *([block.cross_residual] if block.has_cross else []),
            ]
            norms = [getattr(each, "norm", None) for each in residuals]
            if any(type(each) not in _RESIDUALS for each in residuals) or not all(
                each is None or type(each) in _NORMS for each in norms
            ):
                return f"{side}.{number} has another residual connection or norm"
            if block.self.relative_position is not None:
                return f"{side}.{number} has relative or rotary positions"
            if type(block.ffn.activation) is not ReLU:
                activation = type(block.ffn.activation).__name__
                return f"{side}.{number} has the activation {activation}"
            if block.self.width % VECTOR_WIDTH:
                return (
                    f"{side}.{number} has width {block.self.width}, no multiple of {VECTOR_WIDTH}"
                )
        if stack.norm is not None and type(stack.norm) not in _NORMS:
            return f"the {side} has an unsupported norm"
    attentions: list[Any] = [
        block.self for stack in (model.encoder, model.decoder) for _, block in stack.blocks()
    ]
    attentions += [block.cross for _, block in model.decoder.blocks()]
    return (
        ""
        if len({(each.width, each.heads, each.head_width) for each in attentions}) == 1
        else "its layers differ in heads or head width"
    )


class PackedTransformer:
    """A model's weights packed for the C++ kernels: in float32, or in int8 if ranges are given.

    `ranges` are those of the inputs of its linear layers, in the order of packing. Heads and the
    inputs of linear layers are padded with zeros to whole vectors, which changes no result.
    """

    def __init__(
        self, model: EncoderDecoder, ranges: Iterator[ActivationRange] | None, *, panel: int
    ) -> None:
        self._ranges, self._panel = ranges, panel
        self._buffers: list[Any] = []  # tensors that the structs point to
        # Beside int8 activations, float16 is exact enough for keys and values.
        self.kv_dtype = torch.float32 if ranges is None else torch.float16
        blocks = [
            [block for _, block in stack.blocks()] for stack in (model.encoder, model.decoder)
        ]
        first: Any = blocks[1][0]
        self.heads, self._head_width = first.self.heads, first.self.head_width
        self._padded_head_width = _round_up(self._head_width, VECTOR_WIDTH)
        self.inner = self.heads * self._padded_head_width
        self.layers, self.vocab_size, self.width = (
            len(blocks[1]),
            model.output_weight.size(0),
            first.self.width,
        )
        self.model = CModel(width=self.width, heads=self.heads, head_width=self._padded_head_width)
        for side, layers in zip(("encoder", "decoder"), blocks, strict=True):
            made = (CLayer * len(layers))(*[self._pack_layer(block) for block in layers])
            self._buffers.append(made)
            setattr(self.model, side, made)
            setattr(self.model, f"{side}_layers", len(layers))
        self.model.encoder_norm, self.model.decoder_norm = (
            self._pack_norm(model.encoder.norm),
            self._pack_norm(model.decoder.norm),
        )
        if model.output.down_proj is not None:
            self.model.down_proj = self._pack_linear(model.output.down_proj.weight, None)
        self._pack_embedding(model._embedding("tgt"))
        self._output = (
            model.output_weight.detach(),
            None if model.output_bias is None else model.output_bias.detach(),
        )
        self._output_params = None if ranges is None else quantization_params(next(ranges))
        self.model.output = self._pack_linear(*self._output, by=self._output_params)

    def pack_output_rows(self, ids: Tensor) -> OutputSubset:
        """Pack the output projection of token ids (U,); logits bit-identical to the full one."""
        weight, bias = self._output
        buffers: list[Any] = []
        linear = self._pack_linear(
            weight[ids],
            None if bias is None else bias[ids],
            by=self._output_params,
            buffers=buffers,
        )
        return OutputSubset(linear, buffers)

    def int8_filter(self) -> PackedInt8Filter:
        """Pack the output projection as an int8 filter for greedy decoding."""
        return pack_int8_filter(*self._output, panel=self._panel, lanes=VECTOR_WIDTH)

    def _pack_embedding(self, embedding: Embedding) -> None:
        """Set the target embedding table, if token embeddings are a plain lookup."""
        embedding_table = embedding.weight.detach()
        if (
            is_plain_table(embedding)
            and embedding_table.dtype == torch.float32
            and embedding_table.is_contiguous()
        ):
            self._buffers.append(embedding_table)  # the model's own tensor, not a copy
            self.model.embedding_table, self.model.embedding_scale = (
                embedding_table.data_ptr(),
                embedding.scale,
            )

    def _pack_layer(self, block: Any) -> CLayer:
        """Pack a layer; its linear layers in the order of TorchTransformer's ranges."""
        attention: SelfAttention = block.self
        layer = CLayer(
            self_norms=self._pack_norms(block.self_residual),
            ffn_norms=self._pack_norms(block.ffn_residual),
        )
        layer.query_key_value = self._pack_by_heads(attention.query_key_value, 3, scaled=1)
        layer.output = self._pack_from_heads(attention.output)
        if block.has_cross:
            cross: CrossAttention = block.cross
            layer.cross_norms = self._pack_norms(block.cross_residual)
            layer.query, layer.key_value = (
                self._pack_by_heads(cross.query, 1, scaled=1),
                self._pack_by_heads(cross.key_value, 2, scaled=0),
            )
            layer.cross_output = self._pack_from_heads(cross.output)
        inner, outer = block.ffn.inner, block.ffn.outer
        layer.inner, layer.outer = (
            self._pack_linear(inner.weight, inner.bias),
            self._pack_linear(outer.weight, outer.bias),
        )
        return layer

    def _pack_by_heads(self, linear: nn.Linear, parts: int, *, scaled: int) -> CLinear:
        """Pack a projection to `parts` vectors per head; `scaled` of them include 1 / sqrt(Dh)."""
        factor = torch.ones(parts, 1, 1, 1)
        factor[:scaled] = self._head_width**-0.5

        def pad_heads(x: Tensor) -> Tensor:
            split = x.detach().view(parts, self.heads, self._head_width, -1) * factor
            return F.pad(split, (0, 0, 0, self._padded_head_width - self._head_width)).reshape(
                parts * self.inner, -1
            )

        return self._pack_linear(
            pad_heads(linear.weight),
            None if linear.bias is None else pad_heads(linear.bias).squeeze(1),
        )

    def _pack_from_heads(self, linear: nn.Linear) -> CLinear:
        """Pack the output projection of an attention."""
        split = linear.weight.detach().view(-1, self.heads, self._head_width)
        return self._pack_linear(
            F.pad(split, (0, self._padded_head_width - self._head_width)).flatten(1), linear.bias
        )

    def _pack_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        by: QuantizationParams | None = None,
        buffers: list[Any] | None = None,
    ) -> CLinear:
        """Pack a matrix (E, D) and a bias (E,) in panels; in int8 by the next range or `by`."""
        buffers = self._buffers if buffers is None else buffers
        rows, columns = weight.shape
        padded_columns, padded_rows = _round_up(columns, VECTOR_WIDTH), _round_up(rows, self._panel)
        matrix = F.pad(
            weight.detach().float(), (0, padded_columns - columns, 0, padded_rows - rows)
        )
        packed_bias = F.pad(
            torch.zeros(rows) if bias is None else bias.detach().float(), (0, padded_rows - rows)
        )
        if self._ranges is None:
            packed_panels = matrix.view(-1, self._panel, padded_columns).transpose(1, 2)
            return CLinear(
                weight=_copy_address(packed_panels, buffers),
                bias=_copy_address(packed_bias, buffers),
                in_features=padded_columns,
                out_features=rows,
            )
        scale, zero_point = quantization_params(next(self._ranges)) if by is None else by
        int_values, each = quantize_rows(matrix)
        output_scales = each * scale
        packed_bias = packed_bias - output_scales * zero_point * int_values.sum(dim=1)
        packed_panels = pack_int8_panels(int_values, self._panel)
        return CLinear(
            weight=_copy_address(packed_panels, buffers),
            scale=_copy_address(output_scales, buffers),
            bias=_copy_address(packed_bias, buffers),
            in_features=padded_columns,
            out_features=rows,
            inv_scale=1.0 / scale,
            zero_point=zero_point,
        )

    def _pack_norms(self, residual: Residual) -> CResidualNorms:
        """Pack the norms of a residual connection."""
        if type(residual) is NoNorm:
            return CResidualNorms()
        norm = self._pack_norm(residual.norm)
        return (
            CResidualNorms(pre_norm=norm)
            if type(residual) is PreNorm
            else CResidualNorms(post_norm=norm)
        )

    def _pack_norm(self, norm: nn.Module | None) -> CNorm:
        """Pack a norm; a layer norm always has a bias, zeros if need be: RMS norms have none."""
        if norm is None:
            return CNorm()
        weight: Any = norm.weight
        subtracts_mean = type(norm) is LayerNorm
        bias: Any = norm.bias if subtracts_mean else None
        packed_bias = torch.zeros_like(weight) if subtracts_mean and bias is None else bias
        epsilon: Any = norm.epsilon if type(norm) is T5Norm else norm.eps
        return CNorm(
            weight=_copy_address(weight.detach(), self._buffers),
            bias=None
            if packed_bias is None
            else _copy_address(packed_bias.detach(), self._buffers),
            epsilon=epsilon,
        )


def is_plain_table(embedding: Embedding) -> bool:
    """Whether an embedding is a lookup and a scale: neither factorized nor normalized."""
    return embedding.up_proj is None and embedding.length is None


def _round_up(number: int, to: int) -> int:
    """Round up to a multiple."""
    return -(-number // to) * to


def _copy_address(tensor: Tensor, buffers: list[Any]) -> int:
    """Append a contiguous copy of a tensor to the buffers and return its address."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy = copy if copy.dtype == torch.int8 else copy.float()
    buffers.append(copy)
    return copy.data_ptr()
