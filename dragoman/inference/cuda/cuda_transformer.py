"""Transformer for GPU inference: half-precision matmuls, float32 residual stream and norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.absolute_position_encodings import LearnedPositions
from dragoman.inference.cpu.packed_weight_torch_transformer import torch_unsupported_reason
from dragoman.layers.feed_forward import FeedForward, ReLU
from dragoman.layers.norms_and_residuals import (
    LayerNorm,
    NoNorm,
    PostNorm,
    PreNorm,
    Residual,
    RMSNorm,
)
from dragoman.models.block_stack import Stack
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.transformer_blocks import TransformerLayer
from dragoman.ops.beam_search_step_attention import attend_kv_cache, attend_memory
from dragoman.ops.fused_norm import AddNormOutput, NormParameters, add_norm


class FusedResidual:
    """A residual connection in float32, fused with the norm before or after it."""

    def __init__(self, residual: Residual, dtype: torch.dtype) -> None:
        self._residual = copy.deepcopy(residual).float().eval()
        self._dtype = dtype
        scale = _norm_parameters(getattr(self._residual, "norm", None))
        # The norm that can be fused with the sum before it.
        self._pre_norm = scale if type(residual) is PreNorm else None
        self._post_norm = scale if type(residual) is PostNorm else None
        self._is_plain_sum = type(residual) in (PreNorm, NoNorm)

    @classmethod
    def for_output(cls, norm: nn.Module | None, dtype: torch.dtype) -> FusedResidual:
        """Return the final norm of a stack as a residual connection."""
        return cls(NoNorm() if norm is None else PreNorm(norm), dtype)

    def first_input(self, x: Tensor) -> AddNormOutput:
        """Return the residual stream and the input of the first layer."""
        x = x.contiguous()
        if self._pre_norm is not None:
            return add_norm(x, None, self._pre_norm, self._dtype, post_norm=False)
        return AddNormOutput(x, self._layer_input(x))

    def add_output(
        self, x: Tensor, sublayer_output: Tensor, next_residual: FusedResidual
    ) -> AddNormOutput:
        """Add a sublayer's output to the residual stream (..., D); return the next input too."""
        if self._is_plain_sum and next_residual._pre_norm is not None:
            return add_norm(
                x, sublayer_output, next_residual._pre_norm, self._dtype, post_norm=False
            )
        if self._post_norm is not None and type(next_residual._residual) in (PostNorm, NoNorm):
            return add_norm(x, sublayer_output, self._post_norm, self._dtype, post_norm=True)
        x = self._residual.add_output(x, sublayer_output)
        return AddNormOutput(x, next_residual._layer_input(x))

    def _layer_input(self, x: Tensor) -> Tensor:
        """Return the input of a sublayer from the residual stream."""
        layer_input: Tensor = self._residual.prepare_input(x).to(self._dtype)
        return layer_input


def _norm_parameters(norm: nn.Module | None) -> NormParameters | None:
    """Return the parameters of a norm that can be fused with a sum; None for others."""
    if type(norm) is LayerNorm and norm.weight is not None:
        return NormParameters(norm.weight.detach(), norm.bias.detach(), norm.eps, True)
    if type(norm) is RMSNorm and norm.weight is not None and norm.eps is not None:
        return NormParameters(norm.weight.detach(), None, norm.eps, False)
    return None


LinearFunction = Callable[[Tensor], Tensor]  # (N, D) gives (N, E)


class DecodeStepInputs(NamedTuple):
    """Inputs of a decoder step of N sentences with K beams, and the KV cache that it writes to."""

    kv_cache: Tensor  # (N, L, 2, H, slots, Dh): step t of beam k is in slot t * K + k
    history_bias: Tensor  # (N, 1, K, slots): zero for a beam's own past and this step, else -inf
    memory: Tensor  # (N, L, 2, H, S, Dh) cross-attention keys and values
    padding_bias: Tensor  # (N, 1, 1, S): -inf for source padding, else zero
    step: Tensor  # ()
    slots: Tensor  # (K,) of this step
    max_steps: int


def cuda_unsupported_reason(model: EncoderDecoder) -> str:
    """Return why a model cannot be converted; empty if it can."""
    shapes = {
        (block.self.heads, block.self.head_width, block.cross.heads, block.cross.head_width)
        for block in _transformer_layers(model.decoder)
    }
    return torch_unsupported_reason(model) or (
        "" if len(shapes) == 1 else "its layers have heads of different shapes"
    )


class CudaTransformer:
    """A Transformer with copies of a model's weights in one dtype."""

    def __init__(self, model: EncoderDecoder, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, model.output_weight.device
        self._src, self._tgt = model._embedding("src"), model._embedding("tgt")
        self._src_input, self._tgt_input = model.src_input, model.tgt_input
        self._encoder = [_CudaLayer(block, dtype) for block in _transformer_layers(model.encoder)]
        self._decoder = [_CudaLayer(block, dtype) for block in _transformer_layers(model.decoder)]
        self._encoder_output, self._decoder_output = (
            FusedResidual.for_output(stack.norm, dtype) for stack in (model.encoder, model.decoder)
        )
        self._down_proj = (
            None if model.output.down_proj is None else _cast_linear(model.output.down_proj, dtype)
        )
        self._output = _output_linear(model.output_weight.detach().to(dtype))
        # (V,) bias of the logits, added by the beam search step.
        self.bias = None if model.output_bias is None else model.output_bias.detach().float()
        cross_attentions = [block.cross for block in _transformer_layers(model.decoder)]
        self._memory = _concat_linears([cross.key_value for cross in cross_attentions], dtype)
        self.layers, self.heads, self.head_width = (
            len(cross_attentions),
            cross_attentions[0].heads,
            cross_attentions[0].head_width,
        )

    def encode(self, src: Tensor, padding_bias: Tensor | None) -> Tensor:
        """Encode sources (B, S); return cross-attention keys and values, (B, L, 2, H, S, Dh)."""
        x = self._src_input(self._src(src)).float()
        first, *others = self._encoder
        activations = first.self_residual.first_input(x)
        for layer, next_residual in zip(
            self._encoder,
            [*(each.self_residual for each in others), self._encoder_output],
            strict=True,
        ):
            activations = layer.encode(activations, padding_bias, next_residual)
        made = self._memory(activations.layer_input)
        return made.view(*src.shape, self.layers, 2, self.heads, self.head_width).permute(
            0, 2, 3, 4, 1, 5
        )

    def step(self, tokens: Tensor, step_inputs: DecodeStepInputs) -> Tensor:
        """Append one token per beam (N, K); return float32 logits (N * K, V) without their bias."""
        x = self._embed_tokens(tokens.reshape(-1, 1), step_inputs).view(*tokens.shape, -1)
        first, *others = self._decoder
        activations = first.self_residual.first_input(x)
        for number, (layer, next_residual) in enumerate(
            zip(
                self._decoder,
                [*(each.self_residual for each in others), self._decoder_output],
                strict=True,
            )
        ):
            activations = layer.extend(activations, step_inputs, number, next_residual)
        x = activations.layer_input.flatten(0, 1)
        return self._output(x if self._down_proj is None else self._down_proj(x))

    def _embed_tokens(self, tokens: Tensor, step_inputs: DecodeStepInputs) -> Tensor:
        """Embed tokens (N * K, 1), all at one position that only the device knows."""
        positions = self._tgt_input.positions
        most = (
            min(step_inputs.max_steps, positions.max_positions)
            if isinstance(positions, LearnedPositions)
            else step_inputs.max_steps
        )
        return self._tgt_input(
            self._tgt(tokens), first=most - 1, position_ids=step_inputs.step.expand_as(tokens)
        ).float()


class _CudaLayer:
    """One layer; the residual stream is float32."""

    def __init__(self, block: TransformerLayer, dtype: torch.dtype) -> None:
        attention = block.self
        self.heads, self.head_width, self.rotary = (
            attention.heads,
            attention.head_width,
            attention.relative_position,
        )
        self.query_key_value, self.output = (
            _cast_linear(attention.query_key_value, dtype),
            _cast_linear(attention.output, dtype),
        )
        self.self_residual, self.ffn_residual = (
            FusedResidual(block.self_residual, dtype),
            FusedResidual(block.ffn_residual, dtype),
        )
        self.inner, self.outer = (
            _linear_activation(block.ffn, dtype),
            _cast_linear(block.ffn.outer, dtype),
        )
        if block.has_cross:
            self.query, self.cross_output = (
                _cast_linear(block.cross.query, dtype),
                _cast_linear(block.cross.output, dtype),
            )
            self.cross_residual = FusedResidual(block.cross_residual, dtype)

    def encode(
        self, activations: AddNormOutput, padding_bias: Tensor | None, next_residual: FusedResidual
    ) -> AddNormOutput:
        """Run an encoder layer on all positions (B, S, D)."""
        made = self.query_key_value(activations.layer_input)
        query, key, value = made.view(*made.shape[:2], 3, self.heads, self.head_width).permute(
            2, 0, 3, 1, 4
        )  # (B, H, S, Dh) each
        if self.rotary is not None:
            query, key = self.rotary.rotate(query, None), self.rotary.rotate(key, None)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=padding_bias)
        activations = self.self_residual.add_output(
            activations.residual, self.output(context.transpose(1, 2).flatten(2)), self.ffn_residual
        )
        return self._feed_forward(activations, next_residual)

    def extend(
        self,
        activations: AddNormOutput,
        step_inputs: DecodeStepInputs,
        number: int,
        next_residual: FusedResidual,
    ) -> AddNormOutput:
        """Run a decoder layer on the next position of every beam (N, K, D)."""
        count, beams_per_sentence, _ = activations.residual.shape
        made = self.query_key_value(activations.layer_input).view(
            count, beams_per_sentence, 3, self.heads, self.head_width
        )
        query, key_value = (
            made[:, :, 0].transpose(1, 2),
            made[:, :, 1:].permute(0, 2, 3, 1, 4),
        )  # (N, H, K, Dh), (N, 2, H, K, Dh)
        if self.rotary is not None:
            position_ids = step_inputs.step.expand(count, beams_per_sentence)
            query = self.rotary.rotate(query, position_ids, first=step_inputs.max_steps)
            key_value = torch.stack(
                [
                    self.rotary.rotate(key_value[:, 0], position_ids, first=step_inputs.max_steps),
                    key_value[:, 1],
                ],
                dim=1,
            )
        context = attend_kv_cache(
            query,
            key_value,
            step_inputs.kv_cache[:, number],
            step_inputs.history_bias,
            step=step_inputs.step,
            slots=step_inputs.slots,
        )
        activations = self.self_residual.add_output(
            activations.residual, self.output(context), self.cross_residual
        )
        query = (
            self.query(activations.layer_input)
            .view(count, beams_per_sentence, -1, step_inputs.memory.size(-1))
            .transpose(1, 2)
        )
        context = attend_memory(query, step_inputs.memory[:, number], step_inputs.padding_bias)
        activations = self.cross_residual.add_output(
            activations.residual, self.cross_output(context), self.ffn_residual
        )
        return self._feed_forward(activations, next_residual)

    def _feed_forward(
        self, activations: AddNormOutput, next_residual: FusedResidual
    ) -> AddNormOutput:
        """Run the feed-forward network with its residual connection."""
        return self.ffn_residual.add_output(
            activations.residual, self.outer(self.inner(activations.layer_input)), next_residual
        )


def _transformer_layers(stack: Stack) -> list[TransformerLayer]:
    """Return the Transformer layers of a stack."""
    return [block for _, block in stack.blocks() if isinstance(block, TransformerLayer)]


def _cast_linear(linear: nn.Linear, dtype: torch.dtype) -> LinearFunction:
    """Return a linear layer with a copy of the weights in another dtype."""
    return _concat_linears([linear], dtype)


def _linear_activation(ffn: FeedForward, dtype: torch.dtype) -> LinearFunction:
    """Return the first linear layer with its activation; fused linear-ReLU on a GPU."""
    inner, activation = ffn.inner, ffn.activation
    plain = _cast_linear(inner, dtype)
    if type(activation) is not ReLU or inner.bias is None or not inner.weight.is_cuda:
        return lambda x: activation(plain(x))
    weight, bias = inner.weight.detach().to(dtype).t(), inner.bias.detach().to(dtype)
    sample = (
        torch.linspace(-1.0, 1.0, 16 * weight.size(0), device=weight.device).view(16, -1).to(dtype)
    )
    try:
        close = torch.allclose(
            torch._addmm_activation(bias, sample, weight),
            plain(sample).relu(),
            atol=1e-2,
            rtol=1e-2,
        )
    except (RuntimeError, AttributeError, TypeError):
        close = False
    if not close:
        return lambda x: activation(plain(x))
    return lambda x: torch._addmm_activation(bias, x.flatten(0, -2), weight).view(*x.shape[:-1], -1)


def _concat_linears(linears: list[nn.Linear], dtype: torch.dtype) -> LinearFunction:
    """Return several linear layers of one input as one, outputs concatenated."""
    weight = torch.cat([each.weight.detach() for each in linears]).to(dtype)
    biases = [each.bias.detach() for each in linears if each.bias is not None]
    bias = torch.cat(biases).to(dtype) if biases else None
    return lambda x: F.linear(x, weight, bias)


def _output_linear(weight: Tensor) -> LinearFunction:
    """Return the output projection (V, D) to float32 logits, in which a GPU accumulates anyway."""
    can_widen = _can_output_float32(weight)
    return lambda x: (
        torch.mm(x, weight.t(), out_dtype=torch.float32)
        if can_widen
        else F.linear(x, weight).float()
    )


def _can_output_float32(weight: Tensor) -> bool:
    """Whether a half-precision matmul can return float32 here, by a trial."""
    if weight.dtype == torch.float32 or not weight.is_cuda:
        return False
    try:
        torch.mm(weight[:16], weight[:16].t(), out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True
