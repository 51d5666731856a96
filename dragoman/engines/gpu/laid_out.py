"""A Transformer made ready to translate on a GPU: the same function, its weights in the number format of its products.

Products run in that format. What is added up over layers, norms and scores stay in float32, so that half precision rounds what a
product reads and never what is carried on. Nothing in a step depends on a number that only the device knows, so that its launches
can be recorded (`recorded.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.positions import Learned
from dragoman.engines.cpu.frozen import freezing_refusal
from dragoman.engines.gpu.ways import Way
from dragoman.kernels.beam_attention import attend_past, attend_sentence
from dragoman.kernels.joining import Joined
from dragoman.layers.feedforward import FeedForward, ReLU
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.stack import Stack
from dragoman.models.transformer import TransformerLayer

Product = Callable[[Tensor], Tensor]  # (N, D) gives (N, E)


class Standing(NamedTuple):
    """What one step of N sentences with K beams each reads, and where it writes its keys and values."""

    own: Tensor  # (N, L, 2, H, slots, Dh): the keys and values of each layer; those of step t are the slots from t * K
    seen: Tensor  # (N, 1, K, slots): nought for a beam's own past with this step, else minus infinity
    memory: Tensor  # (N, L, 2, H, S, Dh)
    hidden: Tensor  # (N, 1, 1, S): minus infinity where a source is padded, else nought
    step: Tensor  # ()
    slots: Tensor  # (K,) those of this step
    places: int  # steps that there may be at the most


def laying_out_refusal(model: EncoderDecoder) -> str:
    """Say why a model has no such form; empty where it has one."""
    shapes = {(block.self.heads, block.self.head_width, block.cross.heads, block.cross.head_width) for block in _layers(model.decoder)}
    return freezing_refusal(model) or ("" if len(shapes) == 1 else "its layers have heads of different shapes")


class LaidOut:
    """What a model computes, from copies of its weights in one number format."""

    def __init__(self, model: EncoderDecoder, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, model.output_weight.device
        self._src, self._tgt = model._embedding("src"), model._embedding("tgt")
        self._src_entrance, self._tgt_entrance = model.src_entrance, model.tgt_entrance
        self._encoder = [_Layer(block, dtype) for block in _layers(model.encoder)]
        self._decoder = [_Layer(block, dtype) for block in _layers(model.decoder)]
        self._encoder_end, self._decoder_end = (Way.out(stack.norm, dtype) for stack in (model.encoder, model.decoder))
        self._narrow = None if model.output.narrow is None else _product(model.output.narrow, dtype)
        self._output = _scores(model.output_weight.detach().to(dtype))
        self.bias = None if model.output_bias is None else model.output_bias.detach().float()  # (V,) of the logits
        crosses = [block.cross for block in _layers(model.decoder)]
        self._memory = _joined([cross.key_value for cross in crosses], dtype)
        self.layers, self.heads, self.head_width = len(crosses), crosses[0].heads, crosses[0].head_width

    def encode(self, src: Tensor, hidden: Tensor | None) -> Tensor:
        """Read sources (B, S), `hidden` added to scores as in `Standing`; give keys and values for all layers: (B, L, 2, H, S, Dh)."""
        x = self._src_entrance(self._src(src)).float()
        first, *others = self._encoder
        now = first.around_self.begin(x)
        for layer, then in zip(self._encoder, [*(each.around_self for each in others), self._encoder_end], strict=True):
            now = layer.read(now, hidden, then)
        made = self._memory(now.entering)
        return made.view(*src.shape, self.layers, 2, self.heads, self.head_width).permute(0, 2, 3, 4, 1, 5)

    def step(self, tokens: Tensor, at: Standing) -> Tensor:
        """Take one more token of every beam, (N, K), and score what comes next: logits (N * K, V) in float32, without their bias."""
        x = self._placed(tokens.reshape(-1, 1), at).view(*tokens.shape, -1)
        first, *others = self._decoder
        now = first.around_self.begin(x)
        for number, (layer, then) in enumerate(
            zip(self._decoder, [*(each.around_self for each in others), self._decoder_end], strict=True)
        ):
            now = layer.extend(now, at, number, then)
        x = now.entering.flatten(0, 1)
        return self._output(x if self._narrow is None else self._narrow(x))

    def _placed(self, tokens: Tensor, at: Standing) -> Tensor:
        """Embed tokens (N * K, 1), all of which stand at one place that only the device knows."""
        positions = self._tgt_entrance.positions
        most = min(at.places, positions.max_positions) if isinstance(positions, Learned) else at.places
        return self._tgt_entrance(self._tgt(tokens), first=most - 1, places=at.step.expand_as(tokens)).float()


class _Layer:
    """One layer, over a stream in float32."""

    def __init__(self, block: TransformerLayer, dtype: torch.dtype) -> None:
        attention = block.self
        self.heads, self.head_width, self.within = attention.heads, attention.head_width, attention.within
        self.query_key_value, self.output = _product(attention.query_key_value, dtype), _product(attention.output, dtype)
        self.around_self, self.around_feedforward = Way(block.self_residual, dtype), Way(block.feedforward_residual, dtype)
        self.inner, self.outer = _bent(block.feedforward, dtype), _product(block.feedforward.outer, dtype)
        if block.has_cross:
            self.query, self.cross_output = _product(block.cross.query, dtype), _product(block.cross.output, dtype)
            self.around_cross = Way(block.cross_residual, dtype)

    def read(self, now: Joined, hidden: Tensor | None, then: Way) -> Joined:
        """Change every position of (B, S, D): an encoder's layer."""
        made = self.query_key_value(now.entering)
        query, key, value = made.view(*made.shape[:2], 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)  # (B, H, S, Dh) each
        if self.within is not None:
            query, key = self.within.turn(query, None), self.within.turn(key, None)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=hidden)
        now = self.around_self.leave(now.stream, self.output(context.transpose(1, 2).flatten(2)), self.around_feedforward)
        return self._feed(now, then)

    def extend(self, now: Joined, at: Standing, number: int, then: Way) -> Joined:
        """Take one more position of every beam, (N, K, D): a decoder's layer."""
        count, fan, _ = now.stream.shape
        made = self.query_key_value(now.entering).view(count, fan, 3, self.heads, self.head_width)
        query, key_value = made[:, :, 0].transpose(1, 2), made[:, :, 1:].permute(0, 2, 3, 1, 4)  # (N, H, K, Dh), (N, 2, H, K, Dh)
        if self.within is not None:
            places = at.step.expand(count, fan)
            query = self.within.turn(query, places, first=at.places)
            key_value = torch.stack([self.within.turn(key_value[:, 0], places, first=at.places), key_value[:, 1]], dim=1)
        context = attend_past(query, key_value, at.own[:, number], at.seen, step=at.step, slots=at.slots)
        now = self.around_self.leave(now.stream, self.output(context), self.around_cross)
        query = self.query(now.entering).view(count, fan, -1, at.memory.size(-1)).transpose(1, 2)
        context = attend_sentence(query, at.memory[:, number], at.hidden)
        now = self.around_cross.leave(now.stream, self.cross_output(context), self.around_feedforward)
        return self._feed(now, then)

    def _feed(self, now: Joined, then: Way) -> Joined:
        """Widen, bend, narrow."""
        return self.around_feedforward.leave(now.stream, self.outer(self.inner(now.entering)), then)


def _layers(stack: Stack) -> list[TransformerLayer]:
    """Read the layers of a stack that has nothing else."""
    return [block for _, block in stack.blocks() if isinstance(block, TransformerLayer)]


def _product(linear: nn.Linear, dtype: torch.dtype) -> Product:
    """Multiply by a copy of a matrix in another number format."""
    return _joined([linear], dtype)


def _bent(feedforward: FeedForward, dtype: torch.dtype) -> Product:
    """Widen and bend; a GPU takes the positive part while it writes the product, where torch lets it."""
    inner, activation = feedforward.inner, feedforward.activation
    plain = _product(inner, dtype)
    if type(activation) is not ReLU or inner.bias is None or not inner.weight.is_cuda:
        return lambda x: activation(plain(x))
    weight, bias = inner.weight.detach().to(dtype).t(), inner.bias.detach().to(dtype)
    sample = torch.linspace(-1.0, 1.0, 16 * weight.size(0), device=weight.device).view(16, -1).to(dtype)
    try:
        close = torch.allclose(torch._addmm_activation(bias, sample, weight), plain(sample).relu(), atol=1e-2, rtol=1e-2)
    except (RuntimeError, AttributeError, TypeError):
        close = False
    if not close:
        return lambda x: activation(plain(x))
    return lambda x: torch._addmm_activation(bias, x.flatten(0, -2), weight).view(*x.shape[:-1], -1)


def _joined(linears: list[nn.Linear], dtype: torch.dtype) -> Product:
    """Multiply by several matrices at once, what they make side by side."""
    weight = torch.cat([each.weight.detach() for each in linears]).to(dtype)
    biases = [each.bias.detach() for each in linears if each.bias is not None]
    bias = torch.cat(biases).to(dtype) if biases else None
    return lambda x: F.linear(x, weight, bias)


def _scores(weight: Tensor) -> Product:
    """Multiply (N, D) by the matrix (V, D) of the vocabulary; what comes out is float32, which a GPU's products sum in anyway."""
    widens = _widens(weight)
    return lambda x: torch.mm(x, weight.t(), out_dtype=torch.float32) if widens else F.linear(x, weight).float()


def _widens(weight: Tensor) -> bool:
    """Say whether a product of half precision can come out in float32 here, by trying."""
    if weight.dtype == torch.float32 or not weight.is_cuda:
        return False
    try:
        torch.mm(weight[:16], weight[:16].t(), out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True
