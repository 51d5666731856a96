"""Gated convolutions with normalised weights, and the attention that goes with them: Gehring et al. (2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.attention.recorder import AttentionRecord, RecordableAttention
from dragoman.ops import attend, attend_reference

SQRT_HALF = (
    0.5**0.5
)  # keeps the variance of a sum of two equally large terms (Gehring et al. 2017, section 3.4)


class PlainWeight(nn.Module):
    """A weight as it is: outputs first, normal values of a given deviation."""

    def __init__(self, *shape: int, std: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(shape))
        nn.init.normal_(self.value, std=std)

    def forward(self) -> Tensor:
        """Give the weight."""
        return self.value


class WeightNormWeight(nn.Module):
    r"""A weight whose length and direction are trained apart, for each output by itself.

    .. math:: w_o = g_o \, v_o / \lVert v_o \rVert

    Salimans and Kingma (2016), equation 2; the lengths start as those of the directions, so that w starts as v.
    """

    def __init__(self, *shape: int, std: float) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(shape))  # v
        nn.init.normal_(self.direction, std=std)
        # g; one axis, like a bias: weight decay leaves it alone. On the meta device there is nothing to measure.
        lengths = (
            torch.empty(shape[0]) if self.direction.is_meta else self._norms().detach().clone()
        )
        self.length = nn.Parameter(lengths)
        self._cached: tuple[object, Tensor] | None = None

    def forward(self) -> Tensor:
        """Put the weight together; where nothing is learnt it is kept, for decoding asks at every step."""
        parts = (self.direction, self.length)
        if (
            self.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or any(part.is_inference() for part in parts)
        ):
            return self._compute_weight()
        now = [(part.data_ptr(), part._version, part.dtype, part.device) for part in parts]
        cached = self._cached  # read once: another thread may replace it
        if cached is None or cached[0] != now:
            cached = self._cached = (now, self._compute_weight())
        return cached[1]

    def train(self, mode: bool = True) -> WeightNormWeight:
        """Forget what is kept: an optimiser may change weights without leaving a trace."""
        self._cached = None
        super().train(mode)
        return self

    def _compute_weight(self) -> Tensor:
        factors = self.length / self._norms()
        return self.direction * factors.view(-1, *(1,) * (self.direction.dim() - 1))

    def _norms(self) -> Tensor:
        """Measure each output's direction."""
        return self.direction.flatten(1).norm(dim=1)


class GLU(nn.GLU):
    """The gated linear unit: half of the numbers decide by their sigmoid how much of the other half passes; Dauphin et al. (2017)."""

    parts = 2


class GatedConvolution(nn.Module):
    r"""Half of the outputs decide how much of the other half passes.

    .. math:: v(X) = A \otimes \sigma(B), \quad [A; B] = W * X + b

    Gehring et al. (2017), section 3.2. A causal one sees a position and the kernel - 1 before it, any other
    as many on either side; places outside the sequence hold zeros. Another activation may stand in the gate's place.
    """

    def __init__(
        self,
        width: int,
        kernel_size: int,
        *,
        weight: type[PlainWeight | WeightNormWeight],
        causal: bool,
        dropout: float = 0.0,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.activation = GLU() if activation is None else activation
        parts: int = getattr(self.activation, "parts", 1)
        # Section 3.5: the gate passes a quarter of the variance, dropout divides what it keeps by 1 - p. Without a gate, half (He 2015).
        self.weight = weight(
            parts * width,
            width,
            kernel_size,
            std=(2 * parts * (1 - dropout) / (kernel_size * width)) ** 0.5,
        )
        self.bias = nn.Parameter(torch.zeros(parts * width))
        self.left_padding = (
            kernel_size - 1 if causal else (kernel_size - 1) // 2
        )  # zeros put before the sequence
        self.right_padding = kernel_size - 1 - self.left_padding

    def forward(self, x: Tensor) -> Tensor:
        """Convolve (B, T, D), zero-padded to keep its length."""
        return self.convolve(F.pad(x, (0, 0, self.left_padding, self.right_padding)))

    def convolve(self, x: Tensor) -> Tensor:
        """Go over a sequence that brings its surroundings: (B, T + kernel - 1, D) gives (B, T, D)."""
        activated: Tensor = self.activation(
            F.conv1d(x.transpose(1, 2), self.weight(), self.bias).transpose(1, 2)
        )
        return activated


class ConvS2SLinear(nn.Module):
    """A matrix and a bias, the matrix normalised like the convolutions'."""

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
    r"""One head that compares states and embeddings together, and finds outputs and embeddings together.

    .. math:: d_i = W_d h_i + b_d + g_i, \quad a_{ij} = \mathrm{softmax}_j(d_i \cdot z_j), \quad c_i = \sum_j a_{ij} (z_j + e_j)

    Gehring et al. (2017), equations 1 and 2. As in the released code, sums are times the root of a half, the context is
    times the root of the number of source positions (section 3.4: m sqrt(1 / m)), and a last projection follows. `gradient`
    is the share of its gradient that goes back into the encoder's outputs, many attentions being a multiple of one.
    """

    def __init__(
        self,
        width: int,
        *,
        weight: type[PlainWeight | WeightNormWeight],
        dropout: float = 0.0,
        grad_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.grad_scale = grad_scale
        self.query = ConvS2SLinear(width, width, weight=weight)  # W_d, b_d
        self.output = ConvS2SLinear(width, width, weight=weight)
        self.dropout = dropout

    def prepare(self, outputs: Tensor, embeddings: Tensor | None) -> dict[str, Tensor]:
        """Name what is read of the source, (B, S, D) each: keys are the encoder's outputs, values have the embeddings too."""
        if self.grad_scale != 1.0 and outputs.requires_grad:
            outputs = (
                outputs.detach() + (outputs - outputs.detach()) * self.grad_scale
            )  # the difference is nought: the value stays
        return {
            "key": outputs,
            "value": outputs if embeddings is None else (outputs + embeddings) * SQRT_HALF,
        }

    def forward(
        self, x: Tensor, embedded: Tensor, source: dict[str, Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        """Attend from states and embeddings (B, T, D) to what `prepare` made; `mask` is broadcastable to (B, T, S).

        Several rows may share a sentence, as beams do: (B * K, T, D) to (B, S, D).
        """
        key, value, shape = source["key"], source["value"], x.shape
        rows_per_sentence = shape[0] // key.size(0)
        if self.hooks is not None and rows_per_sentence > 1:  # notes are by row
            key, value = (
                key.repeat_interleave(rows_per_sentence, dim=0),
                value.repeat_interleave(rows_per_sentence, dim=0),
            )
            mask = (
                mask
                if mask is None or mask.size(0) == 1
                else mask.repeat_interleave(rows_per_sentence, dim=0)
            )
        query = ((self.query(x) + embedded) * SQRT_HALF).view(key.size(0), -1, shape[2])
        seen = key.size(1) if mask is None else mask.sum(dim=-1, keepdim=True).to(query.dtype)
        return self.output((self._attend_head(query, key, value, mask) * seen**0.5).view(shape))

    def _attend_head(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Take the weighted sums: fused, or step by step for whoever watches."""
        dropout = self.dropout if self.training else 0.0
        heads = [each.unsqueeze(1) for each in (query, key, value)]
        if self.hooks is None:
            return attend(*heads, mask=mask, dropout=dropout, scale=1.0).squeeze(1)
        weights = self.apply_edits(
            attend_reference(*heads, mask=mask, dropout=dropout, scale=1.0).weights
        )
        context = weights @ heads[2]
        self.noted(AttentionRecord(weights, heads[2], context))
        return context.squeeze(1)
