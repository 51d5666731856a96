"""Recurrences: a vector that reads a sequence one position after another, and the turns it takes with attention.

Whole sequences go through PyTorch's kernels, single positions through its cells; both share one set of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.kernels import dropout
from dragoman.layers.residual import Residual

Carried = dict[str, Tensor]  # what a recurrence remembers, by name: (B, layers, D)
Look = Callable[[Tensor], Tensor]  # asks the memory: a query (B, D) gives a context (B, D)

Summary = Callable[[Tensor, Tensor | None], Tensor]  # sums up values (B, S, D), real where a mask (B, S) is True: (B, D)


class Ran(NamedTuple):
    """What a recurrence wrote, and what it remembers."""

    output: Tensor  # (B, T, D) after `run`, (B, D) after `step`
    carried: Carried


class Recurrence(nn.Module):
    """Layers of cells above each other, dropout between them in training."""

    kernels: ClassVar[type[nn.LSTM] | type[nn.GRU]]
    names: ClassVar[tuple[str, ...]]  # what is carried from one position to the next; the first is what the cell shows
    gates: ClassVar[int]  # matrices that PyTorch stores as one

    def __init__(self, inputs: int, width: int, *, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers, self.width = layers, width
        self.kernel = self.kernels(inputs, width, num_layers=layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
        self.fill()

    def fill(self) -> None:
        """Give first values: Xavier for what comes in, orthogonal for what comes back (Bahdanau et al. 2015, appendix B.1), no bias."""
        for layer in range(self.layers):
            inward, back, *biases = self._weights(layer)
            for gate in range(self.gates):
                rows = slice(gate * self.width, (gate + 1) * self.width)
                nn.init.xavier_uniform_(inward.data[rows])
                nn.init.orthogonal_(back.data[rows])
            for bias in biases:
                nn.init.zeros_(bias)

    def begin(self, like: Tensor) -> Carried:
        """Remember nothing yet, for the rows, device and type of a tensor (B, ...)."""
        return {name: like.new_zeros(like.size(0), self.layers, self.width) for name in self.names}

    def run(self, x: Tensor, carried: Carried) -> Ran:
        """Read all positions of (B, T, D) in one call of the kernel."""
        states = [carried[name].transpose(0, 1).contiguous().to(x.dtype) for name in self.names]
        output, after = self.kernel(x, tuple(states) if len(states) > 1 else states[0])
        after = after if len(states) > 1 else (after,)
        return Ran(output, {name: state.transpose(0, 1) for name, state in zip(self.names, after, strict=True)})

    def sweep(self, x: Tensor) -> Tensor:
        """Read (B, T, D) from the first position; padding stands at the end, where what is real never looks."""
        return self.run(x, self.begin(x)).output

    def sweep_back(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Read (B, T, D) from each row's last real position; what was read at a position stands there."""
        return turn_around(self.sweep(turn_around(x, mask)), mask)

    def step(self, x: Tensor, carried: Carried) -> Ran:
        """Read one position (B, D) by cells."""
        rows: list[tuple[Tensor, ...]] = []
        for layer in range(self.layers):
            if layer and self.training and self.kernel.dropout:
                x = dropout(x, self.kernel.dropout)
            states = tuple(carried[name][:, layer].to(x.dtype) for name in self.names)
            rows.append(self.cell(x, states, self._weights(layer)))
            x = rows[-1][0]
        return Ran(x, {name: torch.stack(layers, dim=1) for name, layers in zip(self.names, zip(*rows, strict=True), strict=True)})

    def cell(self, x: Tensor, states: tuple[Tensor, ...], weights: list[Tensor]) -> tuple[Tensor, ...]:
        """Move one layer on by one position, (B, D)."""
        raise NotImplementedError

    def _weights(self, layer: int) -> list[Tensor]:
        """Find a layer's weights by PyTorch's names for them."""
        return [getattr(self.kernel, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


class LSTM(Recurrence):
    r"""Long short-term memory: Hochreiter and Schmidhuber (1997), with the forget gate of Gers et al. (2000).

    .. math:: c_t = f_t \odot c_{t-1} + i_t \odot g_t, \quad h_t = o_t \odot \tanh c_t
    """

    kernels = nn.LSTM
    names = ("hidden", "cell")
    gates = 4

    def fill(self) -> None:
        """Fill as every recurrence, but begin by remembering: forget gates get a bias of 1 (Jozefowicz et al. 2015, section 3)."""
        super().fill()
        for layer in range(self.layers):
            nn.init.ones_(self._weights(layer)[2].data[self.width : 2 * self.width])

    def cell(self, x: Tensor, states: tuple[Tensor, ...], weights: list[Tensor]) -> tuple[Tensor, ...]:
        """Move one layer on by one position, (B, D)."""
        return torch.lstm_cell(x, states, *weights)


class GRU(Recurrence):
    r"""The gated recurrent unit: Cho et al. (2014), in the form of PyTorch and cuDNN.

    .. math:: h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}, \quad n_t = \tanh(W x_t + b + r_t \odot (U h_{t-1} + d))

    The paper resets before the product, U (r ∘ h); here it is after it, which kernels compute in one product.
    """

    kernels = nn.GRU
    names = ("hidden",)
    gates = 3

    def cell(self, x: Tensor, states: tuple[Tensor, ...], weights: list[Tensor]) -> tuple[Tensor, ...]:
        """Move one layer on by one position, (B, D)."""
        return (torch.gru_cell(x, states[0], *weights),)


def turn_around(x: Tensor, mask: Tensor | None) -> Tensor:
    """Reverse the real positions of each row of (B, T, D) and leave its padding at the end: twice is never.

    With the padding out of the way a plain kernel reads backwards; packing would make a GPU wait for the lengths.
    """
    if mask is None:
        return x.flip(1)
    places = torch.arange(x.size(1), device=x.device)
    last = mask.sum(dim=1, keepdim=True) - 1  # (B, 1)
    order = torch.where(places <= last, last - places, places)  # (B, T)
    return x.gather(1, order.unsqueeze(2).expand_as(x))


def first(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum a sentence up by its first position (B, D), where a backward recurrence ends."""
    return values[:, 0]


def last(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum a sentence up by its last real position (B, D), where a forward recurrence ends."""
    if mask is None:
        return values[:, -1]
    place = (mask.sum(dim=1) - 1).clamp(min=0)
    return values[torch.arange(place.size(0), device=place.device), place]


def mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Sum a sentence up by the mean of its real positions (B, D)."""
    if mask is None:
        return values.mean(dim=1)
    real = mask.unsqueeze(2).to(values.dtype)
    return (values * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)


class TwoSided(nn.Module):
    """One recurrence from each end, half of the width each: Schuster and Paliwal (1997)."""

    def __init__(self, ahead: Recurrence, back: Recurrence) -> None:
        super().__init__()
        self.ahead, self.back = ahead, back

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Read (B, T, D) from both ends, each row's padding left out."""
        return torch.cat([self.ahead.sweep(x), self.back.sweep_back(x, mask)], dim=-1)


class Asking(nn.Module):
    """A recurrence and the questions it asks of a memory: who goes first, and what is made of the answer."""

    def __init__(self, recurrence: Recurrence, readout: nn.Linear) -> None:
        super().__init__()
        self.recurrence, self.readout = recurrence, readout

    @classmethod
    def build(cls, kind: type[Recurrence], width: int, *, memory_width: int, fed: int, layers: int, dropout: float) -> Asking:
        """Build for inputs (B, T, width), beside which `fed` numbers of the last output come in."""
        raise NotImplementedError

    def step(self, x: Tensor, fed: list[Tensor], carried: Carried, look: Look) -> Ran:
        """Take one position (B, D)."""
        raise NotImplementedError


class AskAfter(Asking):
    r"""Step, then ask with the new state.

    .. math:: \tilde h_t = \tanh(W_c [c_t; h_t])

    Luong, Pham and Manning (2015), section 3, equation 5; where the last output is fed in, section 3.3.
    """

    @classmethod
    def build(cls, kind: type[Recurrence], width: int, *, memory_width: int, fed: int, layers: int, dropout: float) -> AskAfter:
        """Build for inputs (B, T, width), beside which `fed` numbers of the last output come in."""
        recurrence = kind(width + fed, width, layers=layers, dropout=dropout)
        return cls(recurrence, nn.Linear(memory_width + width, width, bias=False))

    def step(self, x: Tensor, fed: list[Tensor], carried: Carried, look: Look) -> Ran:
        """Take one position (B, D)."""
        hidden, carried = self.recurrence.step(torch.cat([x, *fed], dim=-1), carried)
        return Ran(self.read(hidden, look(hidden)), carried)

    def read(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Join state and answer, (..., D) each."""
        return torch.tanh(self.readout(torch.cat([context, hidden], dim=-1)))


class AskBefore(Asking):
    r"""Ask with the old state, then step with the answer; a maxout layer reads state, input and answer.

    .. math:: s_t = f(s_{t-1}, [y_{t-1}; c_t]), \quad \tilde t = U_o s_t + V_o y_{t-1} + C_o c_t,
        \quad t_k = \max(\tilde t_{2k-1}, \tilde t_{2k})

    Bahdanau, Cho and Bengio (2015), equations 4 and 5 and appendix A.2.2, which writes s_{t-1} in the second; equation 4 has s_t.
    """

    @classmethod
    def build(cls, kind: type[Recurrence], width: int, *, memory_width: int, fed: int, layers: int, dropout: float) -> AskBefore:
        """Build for inputs (B, T, width), beside which `fed` numbers of the last output come in."""
        recurrence = kind(width + memory_width + fed, width, layers=layers, dropout=dropout)
        return cls(recurrence, nn.Linear(2 * width + memory_width, 2 * width, bias=False))

    def step(self, x: Tensor, fed: list[Tensor], carried: Carried, look: Look) -> Ran:
        """Take one position (B, D)."""
        context = look(carried["hidden"][:, -1])
        hidden, carried = self.recurrence.step(torch.cat([x, context, *fed], dim=-1), carried)
        pairs = self.readout(torch.cat([hidden, x, context], dim=-1)).unflatten(-1, (-1, 2))  # (B, D, 2)
        return Ran(pairs.amax(dim=-1), carried)


class Bare(Residual):
    """No way around the layer, and no norm: stacks as they were before residual connections."""

    def __init__(self, norm: nn.Module | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(None, dropout=dropout)

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """Go on with the change alone, some of it dropped in training."""
        return dropout(change, self.dropout) if self.training and self.dropout else change


SUMMARIES: dict[str, Summary] = {"first": first, "last": last, "mean": mean}  # what a decoder may begin with
QUERIES: dict[str, type[Asking]] = {"before": AskBefore, "after": AskAfter}  # when it asks, beside its step
