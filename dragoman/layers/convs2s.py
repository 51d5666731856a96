"""ConvS2S layers: gated convolutions, weight normalization, attention (Gehring et al. 2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.attention_weight_hooks import AttentionRecord, RecordableAttention
from dragoman.layers.feed_forward import count_projections
from dragoman.ops import attend, attend_reference
from dragoman.ops.weight_norm_cache import WeightCache

SQRT_HALF = 0.5**0.5  # keeps the variance of a sum of two terms (Gehring et al. 2017, section 3.4)


class PlainWeight(nn.Module):
    """A weight without weight normalization, outputs first, normally distributed at first."""

    def __init__(self, *shape: int, std: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(shape))
        nn.init.normal_(self.value, std=std)

    def forward(self) -> Tensor:
        """Return the weight."""
        return self.value


class WeightNormWeight(nn.Module):
    r"""A weight with weight normalization: length and direction of each output are trained apart.

    .. math:: w_o = g_o \, v_o / \lVert v_o \rVert

    Salimans and Kingma (2016), equation 2; g starts as the length of v, so that w starts as v.
    """

    def __init__(self, *shape: int, std: float) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(shape))  # v
        nn.init.normal_(self.direction, std=std)
        # g; one axis, like a bias, so that weight decay skips it. The meta device has no values.
        lengths = (
            torch.empty(shape[0]) if self.direction.is_meta else self._norms().detach().clone()
        )
        self.length = nn.Parameter(lengths)
        self._cache = WeightCache()

    def forward(self) -> Tensor:
        """Return the weight; in evaluation it is cached for the next decoding step."""
        if self.training:
            return self._compute_weight()
        return self._cache.get((self.direction, self.length), self._compute_weight)

    def train(self, mode: bool = True) -> WeightNormWeight:
        """Set the mode and clear the cache: optimizers may change weights without a new version."""
        self._cache.clear()
        super().train(mode)
        return self

    def _compute_weight(self) -> Tensor:
        factors = self.length / self._norms()
        return self.direction * factors.view(-1, *(1,) * (self.direction.dim() - 1))

    def _norms(self) -> Tensor:
        """Return the L2 norm of each output's direction."""
        return self.direction.flatten(1).norm(dim=1)


class GLU(nn.GLU):
    """Gated linear unit, a * sigmoid(b) of two halves: Dauphin et al. (2017)."""

    projections = 2  # linear projections that the activation takes


class GatedConvolution(nn.Module):
    r"""A one-dimensional convolution followed by a gated linear unit.

    .. math:: v(X) = A \otimes \sigma(B), \quad [A; B] = W * X + b

    Gehring et al. (2017), section 3.2. A causal convolution covers a position and the kernel - 1
    before it, any other as many on either side; the sequence is padded with zeros. With a dilation
    of d only every d-th of these positions is read, over d times the distance (Yu and Koltun 2016).
    Another activation may replace the gate. The output has the input's width unless it is given.
    """

    def __init__(
        self,
        width: int,
        kernel_size: int,
        *,
        weight: type[PlainWeight | WeightNormWeight],
        causal: bool,
        output_width: int | None = None,
        dilation: int = 1,
        dropout: float = 0.0,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.input_width, self.output_width = width, output_width or width
        self.dilation = dilation
        self.activation = GLU() if activation is None else activation
        projections = count_projections(self.activation)
        # Section 3.5: the gate passes a quarter of the variance, dropout scales by 1 / (1 - p).
        # Without a gate it is a half (He et al. 2015).
        self.weight = weight(
            projections * self.output_width,
            width,
            kernel_size,
            std=(2 * projections * (1 - dropout) / (kernel_size * width)) ** 0.5,
        )
        self.bias = nn.Parameter(torch.zeros(projections * self.output_width))
        reach = dilation * (kernel_size - 1)  # from the first position read to the last
        self.left_padding = reach if causal else reach // 2
        self.right_padding = reach - self.left_padding

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (B, T, D), zero-padded to keep its length."""
        return self.convolve(F.pad(x, (0, 0, self.left_padding, self.right_padding)))

    def convolve(self, x: Tensor) -> Tensor:
        """Convolve a padded sequence: (B, T + dilation * (kernel - 1), D) to (B, T, D)."""
        convolved = F.conv1d(x.transpose(1, 2), self.weight(), self.bias, dilation=self.dilation)
        activated: Tensor = self.activation(convolved.transpose(1, 2))
        return activated


class ConvS2SLinear(nn.Module):
    """A linear layer whose matrix has weight normalization, like the convolutions."""

    def __init__(
        self, inputs: int, outputs: int, *, weight: type[PlainWeight | WeightNormWeight]
    ) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs, std=inputs**-0.5)  # section 3.5
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return F.linear(x, self.weight(), self.bias)


class ConvS2SAttention(RecordableAttention):
    r"""Single-head attention with embeddings added to queries and values.

    .. math:: d_i = W_d h_i + b_d + g_i, \quad a_{ij} = \mathrm{softmax}_j(d_i \cdot z_j), \quad
        c_i = \sum_j a_{ij} (z_j + e_j)

    Gehring et al. (2017), equations 1 and 2. As in the released code, sums are scaled by sqrt(1/2),
    the context by the square root of the source length (section 3.4: m sqrt(1 / m)), and an output
    projection follows. In training, `grad_scale` multiplies the gradient of the encoder's outputs,
    which get one from the attention of every layer. States may have a width other than that of
    embeddings and encoder outputs: the two projections lead from one to the other and back
    (section 3.3).
    """

    cuda_graphs = False  # whether CUDA graphs replay this layer; set by the trainer

    def __init__(
        self,
        width: int,
        *,
        weight: type[PlainWeight | WeightNormWeight],
        state_width: int | None = None,
        dropout: float = 0.0,
        grad_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.grad_scale = grad_scale
        state_width = state_width or width
        self.query = ConvS2SLinear(state_width, width, weight=weight)  # W_d, b_d
        self.output = ConvS2SLinear(width, state_width, weight=weight)
        self.dropout = dropout

    def prepare(self, outputs: Tensor, embeddings: Tensor | None) -> dict[str, Tensor]:
        """Return keys (encoder outputs) and values (outputs plus embeddings), (B, S, D) each."""
        if self.training and self.grad_scale != 1.0 and outputs.requires_grad:
            # The difference is zero: only the gradient is scaled.
            outputs = outputs.detach() + (outputs - outputs.detach()) * self.grad_scale
        return {
            "key": outputs,
            "value": outputs if embeddings is None else (outputs + embeddings) * SQRT_HALF,
        }

    def forward(
        self, x: Tensor, embedded: Tensor, source: dict[str, Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        """Attend from states and embeddings (B, T, D) to the result of `prepare`.

        `mask` is broadcastable to (B, T, S). Several rows may share a sentence, as beams do:
        (B * K, T, D) to (B, S, D).
        """
        key, value = source["key"], source["value"]
        rows_per_sentence = x.size(0) // key.size(0)
        if self.hooks is not None and rows_per_sentence > 1:  # records have one row each
            key, value = (
                key.repeat_interleave(rows_per_sentence, dim=0),
                value.repeat_interleave(rows_per_sentence, dim=0),
            )
            mask = (
                mask
                if mask is None or mask.size(0) == 1
                else mask.repeat_interleave(rows_per_sentence, dim=0)
            )
        query = (self.query(x) + embedded) * SQRT_HALF  # (B * K, T, D)
        keys = key.size(1) if mask is None else mask.sum(dim=-1, keepdim=True).to(query.dtype)
        by_sentence = query.view(key.size(0), -1, query.size(2))  # (B, K * T, D)
        context = self._attend_head(by_sentence, key, value, mask) * keys**0.5
        return self.output(context.view(query.shape))

    def _attend_head(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Return the context vectors; while recording, from explicit attention weights."""
        dropout = self.dropout if self.training else 0.0
        heads = [each.unsqueeze(1) for each in (query, key, value)]
        if self.hooks is None:
            context = attend(
                *heads, mask=mask, dropout=dropout, scale=1.0, cuda_graphs=self.cuda_graphs
            )
            return context.squeeze(1)
        weights = self.apply_edits(
            attend_reference(*heads, mask=mask, dropout=dropout, scale=1.0).weights
        )
        context = weights @ heads[2]
        self.emit_record(AttentionRecord(weights, heads[2], context))
        return context.squeeze(1)
