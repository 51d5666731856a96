"""Weights packed for the C++ kernels, in float32 or int8, and the int8 filter of the output projection."""

from __future__ import annotations

import ctypes
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
from dragoman.inference.cpu.linear import (
    ActivationRange,
    QuantizationParams,
    pack_int8_panels,
    quantization_params,
    quantize_rows,
)
from dragoman.layers.embedding import Embedding
from dragoman.layers.feed_forward import ReLU
from dragoman.layers.norms import LayerNorm, RMSNorm, T5Norm
from dragoman.layers.residual import NoNorm, PostNorm, PreNorm, Residual
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.transformer import TransformerLayer

ZERO_POINT = 128  # the whole number that stands for an input of nought
MAX_RESCORED_FRACTION = (
    1 / 16
)  # of the pieces, on average, that may be scored twice before the whole product is the quicker way
_MIN_OBSERVED_ROWS = 512  # rows, before that is judged


class PackedInt8Filter(NamedTuple):
    """A screen, and the tensors that it points to."""

    int8_filter: CInt8Filter
    buffers: list[Tensor]


def pack_int8_filter(
    weight: Tensor, bias: Tensor | None, *, panel: int, lanes: int
) -> PackedInt8Filter:
    """Lay out a matrix (E, D) and a bias (E,): rows up to whole panels, columns up to whole vectors."""
    vocab_size, width = weight.shape
    padded_rows, padded_columns = -vocab_size % panel, -width % lanes
    float_weight = weight.detach().float()
    float_weight = (
        F.pad(float_weight, (0, padded_columns)) if padded_columns else float_weight.contiguous()
    )  # the model's own, where it is as the kernels want it
    matrix = F.pad(float_weight, (0, 0, 0, padded_rows))
    int_values, each = quantize_rows(matrix)
    dequantized = int_values * each.unsqueeze(1)
    error_norms, weight_norms = (
        (matrix - dequantized).double().norm(dim=1),
        dequantized.double().norm(dim=1),
    )
    # What float32 sums of D products may be off by, in the exact ones and in the scaling of the rough ones, several times over.
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


class AdaptiveInt8Filter:
    """A screen that is given up where it does not pay: where many pieces are so near the best that they must be scored twice."""

    def __init__(self, packed: PackedInt8Filter) -> None:
        self._packed, self._vocab_size = packed, packed.int8_filter.quantized_linear.out_features
        self._rows = self._rescored = 0
        self.is_worthwhile = True

    @property
    def address(self) -> Any:
        """Where the kernels find it."""
        return ctypes.addressof(self._packed.int8_filter)

    def record(self, rows: int, rescored: int) -> None:
        """Add up what a step did; threads that add at once may lose some, which changes no result."""
        self._rows += rows
        self._rescored += rescored
        if (
            self._rows >= _MIN_OBSERVED_ROWS
            and self._rescored > MAX_RESCORED_FRACTION * self._rows * self._vocab_size
        ):
            self.is_worthwhile = False


VECTOR_WIDTH = 16  # the longest vector: every width is a multiple of it
_RESIDUALS = (PreNorm, PostNorm, NoNorm)
_NORMS = (LayerNorm, RMSNorm, T5Norm)


class OutputSubset(NamedTuple):
    """The part of an output that scores only some pieces."""

    product: Any
    buffers: list[Any]  # what the product points to


def cpp_unsupported_reason(model: EncoderDecoder) -> str:
    """Say why a model that can be frozen has no compiled form; empty where it has one."""
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, block in stack.blocks():
            assert isinstance(block, TransformerLayer), "only what can be frozen"
            residuals = [
                block.self_residual,
                block.feedforward_residual,
                *([block.cross_residual] if block.has_cross else []),
            ]
            norms = [getattr(each, "norm", None) for each in residuals]
            if any(type(each) not in _RESIDUALS for each in residuals) or not all(
                each is None or type(each) in _NORMS for each in norms
            ):
                return f"{side}.{number} is joined in another way"
            if block.self.within is not None:
                return f"{side}.{number} turns positions"
            if type(block.feedforward.activation) is not ReLU:
                return f"{side}.{number} bends by {type(block.feedforward.activation).__name__}"
            if block.self.width % VECTOR_WIDTH:
                return f"{side}.{number} is {block.self.width} wide, no multiple of {VECTOR_WIDTH}"
        if stack.norm is not None and type(stack.norm) not in _NORMS:
            return f"the {side} has another norm"
    attentions: list[Any] = [
        block.self for stack in (model.encoder, model.decoder) for _, block in stack.blocks()
    ]
    attentions += [block.cross for _, block in model.decoder.blocks()]
    return (
        ""
        if len({(each.width, each.heads, each.head_width) for each in attentions}) == 1
        else "layers have unlike heads"
    )


class PackedTransformer:
    """A model as the kernels want it: in float32, or from the ranges of numbers that its products meet in int8.

    A head is widened by noughts to whole vectors, and so is every product's inside; that changes no result.
    """

    def __init__(
        self, model: EncoderDecoder, ranges: Iterator[ActivationRange] | None, *, panel: int
    ) -> None:
        self._ranges, self._panel = ranges, panel
        self._buffers: list[Any] = []  # what the structures point to
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
        if model.output.narrow is not None:
            self.model.narrow = self._pack_linear(model.output.narrow.weight, None)
        self._pack_embedding(model._embedding("tgt"))
        self._output = (
            model.output_weight.detach(),
            None if model.output_bias is None else model.output_bias.detach(),
        )
        self._output_params = None if ranges is None else quantization_params(next(ranges))
        self.model.output = self._pack_linear(*self._output, by=self._output_params)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Say how keys and values are kept: beside numbers rounded to eight bits, sixteen are exact enough."""
        return torch.float32 if self._ranges is None else torch.float16

    def pack_output_rows(self, ids: Tensor) -> OutputSubset:
        """Lay out the output's rows of some pieces (U,): what is scored with them is to the last bit what all would score."""
        weight, bias = self._output
        buffers: list[Any] = []
        product = self._pack_linear(
            weight[ids],
            None if bias is None else bias[ids],
            by=self._output_params,
            buffers=buffers,
        )
        return OutputSubset(product, buffers)

    def int8_filter(self) -> PackedInt8Filter:
        """Lay out the output for whoever takes only the largest logit."""
        return pack_int8_filter(*self._output, panel=self._panel, lanes=VECTOR_WIDTH)

    def _pack_embedding(self, embedding: Embedding) -> None:
        """Lay out what target pieces are embedded by, where that is a table alone."""
        embedding_table = embedding.weight.detach()
        if (
            embedding.wide is None
            and embedding.length is None
            and embedding_table.dtype == torch.float32
            and embedding_table.is_contiguous()
        ):
            self._buffers.append(embedding_table)  # the model's own: there is nothing to lay out
            self.model.embedding_table, self.model.embedding_scale = (
                embedding_table.data_ptr(),
                embedding.scale,
            )

    def _pack_layer(self, block: Any) -> CLayer:
        """Lay out a layer; the products in the order in which a frozen layer makes them, which is that of their ranges."""
        attention: SelfAttention = block.self
        layer = CLayer(
            self_norms=self._pack_norms(block.self_residual),
            ffn_norms=self._pack_norms(block.feedforward_residual),
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
        inner, outer = block.feedforward.inner, block.feedforward.outer
        layer.inner, layer.outer = (
            self._pack_linear(inner.weight, inner.bias),
            self._pack_linear(outer.weight, outer.bias),
        )
        return layer

    def _pack_by_heads(self, linear: nn.Linear, parts: int, *, scaled: int) -> CLinear:
        """Lay out a product that makes `parts` vectors for each head, the first `scaled` divided as their scores would be."""
        factor = torch.ones(parts, 1, 1, 1)
        factor[:scaled] = self._head_width**-0.5

        def widened(x: Tensor) -> Tensor:
            split = x.detach().view(parts, self.heads, self._head_width, -1) * factor
            return F.pad(split, (0, 0, 0, self._padded_head_width - self._head_width)).reshape(
                parts * self.inner, -1
            )

        return self._pack_linear(
            widened(linear.weight), None if linear.bias is None else widened(linear.bias).squeeze(1)
        )

    def _pack_from_heads(self, linear: nn.Linear) -> CLinear:
        """Lay out a product of what the heads found."""
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
        """Lay out a matrix (E, D) and a bias (E,) in panels; in int8 with the next range, unless told how to round."""
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
        """Lay out the way around a part."""
        if type(residual) is NoNorm:
            return CResidualNorms()
        norm = self._pack_norm(residual.norm)
        return (
            CResidualNorms(pre_norm=norm)
            if type(residual) is PreNorm
            else CResidualNorms(post_norm=norm)
        )

    def _pack_norm(self, norm: nn.Module | None) -> CNorm:
        """Lay out a norm: one that centres has a bias, if only of noughts."""
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


def _round_up(number: int, to: int) -> int:
    """Round up to a multiple."""
    return -(-number // to) * to


def _copy_address(tensor: Tensor, buffers: list[Any]) -> int:
    """Keep a copy of a tensor among others, and say where it lies."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy = copy if copy.dtype == torch.int8 else copy.float()
    buffers.append(copy)
    return copy.data_ptr()
