"""A Transformer made ready to translate on a CPU: the same function, its products laid out once, its caches never copied.

It has the verbs of a model that a search and an engine use, `encode`, `start` and `step`, and nothing to train or to watch.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.multihead import MultiHead
from dragoman.engines.products import Product
from dragoman.engines.unfolding import KeyValue, Unfolding
from dragoman.layers.feedforward import ReLU
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.stack import Stack
from dragoman.models.transformer import TransformerLayer


class Maker(Protocol):
    """Makes a product of a matrix (E, D) and a bias (E,), the positive part of it with `relu`."""

    def __call__(self, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Product:
        """Make it."""
        ...


class Sources(NamedTuple):
    """Encoded sources."""

    values: Tensor  # (B, S, D)
    hidden: Tensor | None  # (B, 1, 1, S): minus infinity where a source is padded, else nought


def freezing_refusal(model: EncoderDecoder) -> str:
    """Say why a model has no frozen form; empty where it has one."""
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for number, block in stack.blocks():
            if type(block) is not TransformerLayer:
                return f"{side}.{number} is a {type(block).__name__}"
            within = block.self.within
            if block.self.window or (within is not None and within.biased):
                return f"{side}.{number} measures distances"
            attentions: list[MultiHead] = [block.self, block.cross] if block.has_cross else [block.self]
            for each in attentions:
                if not each.fused or each.kv_heads != each.heads or each.query_norm is not None:
                    return f"{side}.{number} has heads of another kind"
    return "" if all(getattr(block, "has_cross", False) for _, block in model.decoder.blocks()) else "the decoder sees no source"


class Frozen:
    """What a model computes, from copies of its weights."""

    def __init__(self, model: EncoderDecoder, make: Maker) -> None:
        self._src, self._tgt = model._embedding("src"), model._embedding("tgt")
        self._src_entrance, self._tgt_entrance = model.src_entrance, model.tgt_entrance
        self._encoder = [_Layer(block, make) for block in _layers(model.encoder)]
        self._decoder = [_Layer(block, make) for block in _layers(model.decoder)]
        self._encoder_norm, self._decoder_norm = model.encoder.norm, model.decoder.norm
        narrow = model.output.narrow
        self._narrow = None if narrow is None else make(narrow.weight.detach(), None)
        self._output = make(model.output_weight.detach(), _detached(model.output_bias))

    def encode(self, src: Tensor, mask: Tensor | None = None) -> Sources:
        """Read sources (B, S), real where `mask` (B, S) is True."""
        x = self._src_entrance(self._src(src))
        hidden = None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)[:, None, None, :]
        shape = x.shape
        x = x.flatten(0, 1)
        for layer in self._encoder:
            x = layer.read(x, shape[0], hidden)
        x = x if self._encoder_norm is None else self._encoder_norm(x)
        return Sources(x.view(shape), hidden)

    def start(self, memory: Sources) -> Unfolding:
        """Stand before the first target position of every row."""
        prepared = [layer.prepare(memory.values) for layer in self._decoder]
        own = [each.map(lambda tensor: tensor.new_empty(tensor.size(0), tensor.size(1), 0, tensor.size(3))) for each in prepared]
        return Unfolding(own, prepared, memory.hidden)

    def step(self, tokens: Tensor, state: Unfolding) -> tuple[Tensor, Unfolding]:
        """Take one more token a row, (N * F,), and score what comes next."""
        x = self._tgt_entrance(self._tgt(tokens.unsqueeze(1)), first=state.steps).squeeze(1)
        state = state.advance()
        for number, layer in enumerate(self._decoder):
            x = layer.extend(x, state, number)
        x = x if self._decoder_norm is None else self._decoder_norm(x)
        return self._output(x if self._narrow is None else self._narrow(x)), state


class _Layer:
    """One layer: the wiring around its parts is the model's own."""

    def __init__(self, block: TransformerLayer, make: Maker) -> None:
        attention, feedforward = block.self, block.feedforward
        self.heads, self.head_width = attention.heads, attention.head_width
        self.within = attention.within
        query_key_value = attention.query_key_value
        self.query_key_value = make(*_shrunk(query_key_value, self.heads * self.head_width, self.head_width))
        self.output = make(*_weights(attention.output))
        self.self_residual, self.feedforward_residual = block.self_residual, block.feedforward_residual
        if block.has_cross:
            self.query = make(*_shrunk(block.cross.query, self.heads * self.head_width, self.head_width))
            self.key_value = make(*_weights(block.cross.key_value))
            self.cross_output = make(*_weights(block.cross.output))
            self.cross_residual = block.cross_residual
        self.bends = type(feedforward.activation) is ReLU  # the product then bends as well
        self.activation = feedforward.activation
        self.inner = make(*_weights(feedforward.inner), relu=self.bends)
        self.outer = make(*_weights(feedforward.outer))

    def read(self, x: Tensor, rows: int, hidden: Tensor | None) -> Tensor:
        """Change every position of (B * S, D): an encoder's layer."""
        parts = self.query_key_value(self.self_residual.enter(x)).view(rows, -1, 3, self.heads, self.head_width)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # (B, H, S, Dh) each
        if self.within is not None:
            query, key = self.within.turn(query, None), self.within.turn(key, None)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=hidden, scale=1.0)
        x = self.self_residual.leave(x, self.output(context.transpose(1, 2).reshape(x.size(0), -1)))
        return self._feed(x)

    def prepare(self, memory: Tensor) -> KeyValue:
        """Make keys and values of (N, S, D), once a sentence."""
        rows, length, _ = memory.shape
        parts = self.key_value(memory.flatten(0, 1)).view(rows, length, 2, self.heads, self.head_width)
        key, value = parts.permute(2, 0, 3, 1, 4)
        return KeyValue(key.contiguous(), value.contiguous())

    def extend(self, x: Tensor, state: Unfolding, number: int) -> Tensor:
        """Take one more position a row (N * F, D): a decoder's layer."""
        rows, fan = x.size(0), state.fan
        parts = self.query_key_value(self.self_residual.enter(x)).view(rows, 3, self.heads, self.head_width)
        query, key, value = parts.unbind(1)  # (N * F, H, Dh) each
        if self.within is not None:
            first = state.steps - 1
            query, key = (self.within.turn(part.unsqueeze(2), None, first=first).squeeze(2) for part in (query, key))
        own, slots = state.own[number], state.slots
        own.key[:, :, slots - fan : slots] = self._beams(key, fan)
        own.value[:, :, slots - fan : slots] = self._beams(value, fan)
        bias = None if state.seen is None else state.seen.unsqueeze(1)
        context = _attend(self._beams(query, fan), own.key[:, :, :slots], own.value[:, :, :slots], bias)
        x = self.self_residual.leave(x, self.output(context))
        query = self.query(self.cross_residual.enter(x)).view(rows, self.heads, self.head_width)
        memory = state.memory[number]
        context = _attend(self._beams(query, fan), memory.key, memory.value, state.hidden)
        return self._feed(self.cross_residual.leave(x, self.cross_output(context)))

    def _feed(self, x: Tensor) -> Tensor:
        """Widen, bend, narrow."""
        bent = self.inner(self.feedforward_residual.enter(x))
        return self.feedforward_residual.leave(x, self.outer(bent if self.bends else self.activation(bent)))

    def _beams(self, x: Tensor, fan: int) -> Tensor:
        """Put the beams of a sentence beside each other: (N * F, H, Dh) gives (N, H, F, Dh)."""
        return x.view(-1, fan, self.heads, self.head_width).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """Attend from (N, H, F, Dh) to (N, H, S, Dh), `bias` added to the scores, and join the heads: (N * F, D).

    For few queries two batched products are quicker than the fused kernel, which is made for many.
    """
    rows, heads, fan, width = query.shape
    scores = torch.bmm(query.reshape(-1, fan, width), key.flatten(0, 1).transpose(1, 2))  # (N * H, F, S)
    if bias is not None:
        scores.view(rows, heads, fan, -1).add_(bias)
    context = torch.bmm(scores.softmax(dim=-1), value.flatten(0, 1))
    return context.view(rows, heads, fan, width).transpose(1, 2).reshape(rows * fan, heads * width)


def _layers(stack: Stack) -> list[TransformerLayer]:
    """Read the layers of a stack that has nothing else."""
    return [block for _, block in stack.blocks() if isinstance(block, TransformerLayer)]


def _weights(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Read a product's matrix and bias."""
    return linear.weight.detach(), _detached(linear.bias)


def _shrunk(linear: nn.Linear, queries: int, head_width: int) -> tuple[Tensor, Tensor | None]:
    """Read a product whose first rows make queries, those divided by the root of a head's width as scores are."""
    factor = torch.ones(linear.weight.size(0), device=linear.weight.device)
    factor[:queries] = head_width**-0.5
    bias = _detached(linear.bias)
    return linear.weight.detach() * factor.unsqueeze(1), None if bias is None else bias * factor


def _detached(tensor: Tensor | None) -> Tensor | None:
    """Leave gradients behind."""
    return None if tensor is None else tensor.detach()
