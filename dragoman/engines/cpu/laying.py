"""A Transformer's weights laid out for the kernels in `source/`: filled structures, and the tensors that they point to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.multihead import CrossAttention, SelfAttention
from dragoman.engines.cpu import screening
from dragoman.engines.cpu.products import Range, Rounding, byte_panels, rounded_rows, rounding
from dragoman.engines.cpu.structures import Around, Layer, Model, Norm, Product
from dragoman.layers.embedding import Embedding
from dragoman.layers.feedforward import ReLU
from dragoman.layers.norms import LayerNorm, RMSNorm, T5Norm
from dragoman.layers.residual import Plain, PostNorm, PreNorm, Residual
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.transformer import TransformerLayer

LANES = 16  # the longest vector: every width is a multiple of it
_RESIDUALS = (PreNorm, PostNorm, Plain)
_NORMS = (LayerNorm, RMSNorm, T5Norm)


class Some(NamedTuple):
    """The part of an output that scores only some pieces."""

    product: Any
    kept: list[Any]  # what the product points to


def laying_refusal(model: EncoderDecoder) -> str:
    """Say why a model that can be frozen has no compiled form; empty where it has one."""
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, block in stack.blocks():
            assert isinstance(block, TransformerLayer), "only what can be frozen"
            residuals = [block.self_residual, block.feedforward_residual, *([block.cross_residual] if block.has_cross else [])]
            norms = [getattr(each, "norm", None) for each in residuals]
            if any(type(each) not in _RESIDUALS for each in residuals) or not all(each is None or type(each) in _NORMS for each in norms):
                return f"{side}.{number} is joined in another way"
            if block.self.within is not None:
                return f"{side}.{number} turns positions"
            if type(block.feedforward.activation) is not ReLU:
                return f"{side}.{number} bends by {type(block.feedforward.activation).__name__}"
            if block.self.width % LANES:
                return f"{side}.{number} is {block.self.width} wide, no multiple of {LANES}"
        if stack.norm is not None and type(stack.norm) not in _NORMS:
            return f"the {side} has another norm"
    attentions: list[Any] = [block.self for stack in (model.encoder, model.decoder) for _, block in stack.blocks()]
    attentions += [block.cross for _, block in model.decoder.blocks()]
    return "" if len({(each.width, each.heads, each.head_width) for each in attentions}) == 1 else "layers have unlike heads"


class Laid:
    """A model as the kernels want it: in float32, or from the ranges of numbers that its products meet in int8.

    A head is widened by noughts to whole vectors, and so is every product's inside; that changes no result.
    """

    def __init__(self, model: EncoderDecoder, seen: Iterator[Range] | None, *, panel: int) -> None:
        self._seen, self._panel = seen, panel
        self._kept: list[Any] = []  # what the structures point to
        blocks = [[block for _, block in stack.blocks()] for stack in (model.encoder, model.decoder)]
        first: Any = blocks[1][0]
        self.heads, self._head = first.self.heads, first.self.head_width
        self._wide_head = _up(self._head, LANES)
        self.inner = self.heads * self._wide_head
        self.layers, self.pieces, self.width = len(blocks[1]), model.output_weight.size(0), first.self.width
        self.model = Model(width=self.width, heads=self.heads, head_width=self._wide_head)
        for side, layers in zip(("encoder", "decoder"), blocks, strict=True):
            made = (Layer * len(layers))(*[self._layer(block) for block in layers])
            self._kept.append(made)
            setattr(self.model, side, made)
            setattr(self.model, f"{side}_layers", len(layers))
        self.model.encoder_norm, self.model.decoder_norm = self._norm(model.encoder.norm), self._norm(model.decoder.norm)
        if model.output.narrow is not None:
            self.model.narrow = self._product(model.output.narrow.weight, None)
        self._embedding(model._embedding("tgt"))
        self._output = model.output_weight.detach(), None if model.output_bias is None else model.output_bias.detach()
        self._output_rounding = None if seen is None else rounding(next(seen))
        self.model.pieces = self._product(*self._output, by=self._output_rounding)

    @property
    def cells(self) -> torch.dtype:
        """Say how keys and values are kept: beside numbers rounded to eight bits, sixteen are exact enough."""
        return torch.float32 if self._seen is None else torch.float16

    def some_pieces(self, ids: Tensor) -> Some:
        """Lay out the output's rows of some pieces (U,): what is scored with them is to the last bit what all would score."""
        weight, bias = self._output
        kept: list[Any] = []
        product = self._product(weight[ids], None if bias is None else bias[ids], by=self._output_rounding, kept=kept)
        return Some(product, kept)

    def screen(self) -> screening.Laid:
        """Lay out the output for whoever takes only the largest logit."""
        return screening.lay(*self._output, panel=self._panel, lanes=LANES)

    def _embedding(self, embedding: Embedding) -> None:
        """Lay out what target pieces are embedded by, where that is a table alone."""
        table = embedding.weight.detach()
        if embedding.wide is None and embedding.length is None and table.dtype == torch.float32 and table.is_contiguous():
            self._kept.append(table)  # the model's own: there is nothing to lay out
            self.model.table, self.model.table_scale = table.data_ptr(), embedding.scale

    def _layer(self, block: Any) -> Layer:
        """Lay out a layer; the products in the order in which a frozen layer makes them, which is that of their ranges."""
        attention: SelfAttention = block.self
        layer = Layer(around_self=self._around(block.self_residual), around_feed=self._around(block.feedforward_residual))
        layer.query_key_value = self._by_heads(attention.query_key_value, 3, scaled=1)
        layer.output = self._from_heads(attention.output)
        if block.has_cross:
            cross: CrossAttention = block.cross
            layer.around_cross = self._around(block.cross_residual)
            layer.query, layer.key_value = self._by_heads(cross.query, 1, scaled=1), self._by_heads(cross.key_value, 2, scaled=0)
            layer.cross_output = self._from_heads(cross.output)
        inner, outer = block.feedforward.inner, block.feedforward.outer
        layer.inner, layer.outer = self._product(inner.weight, inner.bias), self._product(outer.weight, outer.bias)
        return layer

    def _by_heads(self, linear: nn.Linear, parts: int, *, scaled: int) -> Product:
        """Lay out a product that makes `parts` vectors for each head, the first `scaled` divided as their scores would be."""
        factor = torch.ones(parts, 1, 1, 1)
        factor[:scaled] = self._head**-0.5

        def widened(x: Tensor) -> Tensor:
            split = x.detach().view(parts, self.heads, self._head, -1) * factor
            return F.pad(split, (0, 0, 0, self._wide_head - self._head)).reshape(parts * self.inner, -1)

        return self._product(widened(linear.weight), None if linear.bias is None else widened(linear.bias).squeeze(1))

    def _from_heads(self, linear: nn.Linear) -> Product:
        """Lay out a product of what the heads found."""
        split = linear.weight.detach().view(-1, self.heads, self._head)
        return self._product(F.pad(split, (0, self._wide_head - self._head)).flatten(1), linear.bias)

    def _product(self, weight: Tensor, bias: Tensor | None, *, by: Rounding | None = None, kept: list[Any] | None = None) -> Product:
        """Lay out a matrix (E, D) and a bias (E,) in panels; in int8 with the next range, unless told how to round."""
        kept = self._kept if kept is None else kept
        rows, columns = weight.shape
        wide, tall = _up(columns, LANES), _up(rows, self._panel)
        matrix = F.pad(weight.detach().float(), (0, wide - columns, 0, tall - rows))
        shift = F.pad(torch.zeros(rows) if bias is None else bias.detach().float(), (0, tall - rows))
        if self._seen is None:
            ready = matrix.view(-1, self._panel, wide).transpose(1, 2)
            return Product(weight=_at(ready, kept), bias=_at(shift, kept), input_width=wide, output_width=rows)
        scale, zero = rounding(next(self._seen)) if by is None else by
        whole, each = rounded_rows(matrix)
        worth = each * scale
        shift = shift - worth * zero * whole.sum(dim=1)
        ready = byte_panels(whole, self._panel)
        return Product(
            weight=_at(ready, kept),
            scale=_at(worth, kept),
            bias=_at(shift, kept),
            input_width=wide,
            output_width=rows,
            inverse=1.0 / scale,
            zero=zero,
        )

    def _around(self, residual: Residual) -> Around:
        """Lay out the way around a part."""
        if type(residual) is Plain:
            return Around()
        norm = self._norm(residual.norm)
        return Around(before=norm) if type(residual) is PreNorm else Around(after=norm)

    def _norm(self, norm: nn.Module | None) -> Norm:
        """Lay out a norm: one that centres has a bias, if only of noughts."""
        if norm is None:
            return Norm()
        weight: Any = norm.weight
        centres = type(norm) is LayerNorm
        bias: Any = norm.bias if centres else None
        shift = torch.zeros_like(weight) if centres and bias is None else bias
        epsilon: Any = norm.epsilon if type(norm) is T5Norm else norm.eps
        return Norm(
            weight=_at(weight.detach(), self._kept), bias=None if shift is None else _at(shift.detach(), self._kept), epsilon=epsilon
        )


def _up(number: int, to: int) -> int:
    """Round up to a multiple."""
    return -(-number // to) * to


def _at(tensor: Tensor, kept: list[Any]) -> int:
    """Keep a copy of a tensor among others, and say where it lies."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy = copy if copy.dtype == torch.int8 else copy.float()
    kept.append(copy)
    return copy.data_ptr()
