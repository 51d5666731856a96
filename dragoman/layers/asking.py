"""Recurrences that ask: the turns that a recurrence takes with attention to a memory, and what is made of the answers.

The loop over positions does only what must wait for the position before: products with the given inputs are made before it, and
the output is read after it, for all positions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dragoman.kernels import dropout
from dragoman.layers.recurrent import Carried, Ran, Recurrence

Look = Callable[[Tensor], Tensor]  # asks the memory: a query (B, D) gives a context (B, D)


class Asking(nn.Module):
    """A recurrence and the questions it asks of a memory: who goes first, and what is made of the answer."""

    feeds = True  # whether its last output can be part of its next input

    def __init__(self, recurrence: Recurrence, *, feeding: bool = False) -> None:
        super().__init__()
        self.recurrence = recurrence
        self.layers, self.width, self.feeding = recurrence.layers, recurrence.width, feeding

    @classmethod
    def build(cls, kind: type[Recurrence], width: int, *, memory_width: int, feeding: bool, layers: int, dropout: float) -> Asking:
        """Build for inputs (B, T, width), beside which the last output comes in where there is `feeding`."""
        raise NotImplementedError

    def begin(self, like: Tensor) -> Carried:
        """Remember nothing yet, for the rows, device and type of a tensor (B, ...)."""
        return {name: like.new_zeros(like.size(0), self.layers, self.width) for name in self.recurrence.names}

    def run(self, x: Tensor, carried: Carried, look: Look) -> Ran:
        """Take positions (B, T, D) one after another; "fed" is carried where the last output comes in."""
        raise NotImplementedError


class AskAfter(Asking):
    r"""Step, then ask with the new state.

    .. math:: \tilde h_t = \tanh(W_c [c_t; h_t])

    Luong, Pham and Manning (2015), section 3, equation 5; where the last output is fed in, section 3.3.
    """

    def __init__(self, recurrence: Recurrence, readout: nn.Linear, *, feeding: bool = False) -> None:
        super().__init__(recurrence, feeding=feeding)
        self.readout = readout

    @classmethod
    def build(cls, kind: type[Recurrence], width: int, *, memory_width: int, feeding: bool, layers: int, dropout: float) -> AskAfter:
        """Build for inputs (B, T, width), beside which the last output comes in where there is `feeding`."""
        recurrence = kind(width + (width if feeding else 0), width, layers=layers, dropout=dropout)
        return cls(recurrence, nn.Linear(memory_width + width, width, bias=False), feeding=feeding)

    def run(self, x: Tensor, carried: Carried, look: Look) -> Ran:
        """Take positions (B, T, D) one after another."""
        recurrence, layers = self.recurrence, self.recurrence.split(carried)
        projected, fed = recurrence.project(x), carried.get("fed")
        beside = recurrence.beside(x.size(2)).to(projected.dtype)
        states, contexts, outputs = [], [], []
        for gates in projected.unbind(dim=1):
            layers = recurrence.advance(gates if fed is None else torch.addmm(gates, fed.to(gates.dtype), beside), layers)
            states.append(layers[-1][0])
            contexts.append(look(states[-1]))
            if fed is not None:
                fed = self.read(states[-1], contexts[-1])
                outputs.append(fed)
        carried = recurrence.join(layers) | ({} if fed is None else {"fed": fed})
        return Ran(torch.stack(outputs, 1) if outputs else self.read(torch.stack(states, 1), torch.stack(contexts, 1)), carried)

    def read(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Join state and answer, (..., D) each."""
        return torch.tanh(self.readout(torch.cat([context, hidden], dim=-1)))


class AskBefore(Asking):
    r"""Ask with the old state, then step with the answer; a maxout layer reads state, input and answer.

    .. math:: s_t = f(s_{t-1}, [y_{t-1}; c_t]), \quad \tilde t = U_o s_t + V_o y_{t-1} + C_o c_t,
        \quad t_k = \max(\tilde t_{2k-1}, \tilde t_{2k})

    Bahdanau, Cho and Bengio (2015), equations 4 and 5 and appendix A.2.2, which writes s_{t-1} in the second; equation 4 has s_t.
    """

    def __init__(self, recurrence: Recurrence, readout: nn.Linear, *, feeding: bool = False) -> None:
        super().__init__(recurrence, feeding=feeding)
        self.readout = readout

    @classmethod
    def build(cls, kind: type[Recurrence], width: int, *, memory_width: int, feeding: bool, layers: int, dropout: float) -> AskBefore:
        """Build for inputs (B, T, width), beside which the last output comes in where there is `feeding`."""
        recurrence = kind(width + memory_width + (width if feeding else 0), width, layers=layers, dropout=dropout)
        return cls(recurrence, nn.Linear(2 * width + memory_width, 2 * width, bias=False), feeding=feeding)

    def run(self, x: Tensor, carried: Carried, look: Look) -> Ran:
        """Take positions (B, T, D) one after another."""
        recurrence, layers = self.recurrence, self.recurrence.split(carried)
        projected, fed = recurrence.project(x), carried.get("fed")
        beside = recurrence.beside(x.size(2)).to(projected.dtype)
        states, contexts, outputs = [], [], []
        for position, gates in enumerate(projected.unbind(dim=1)):
            contexts.append(look(layers[-1][0]))
            rest = contexts[-1] if fed is None else torch.cat([contexts[-1], fed], dim=-1)
            layers = recurrence.advance(torch.addmm(gates, rest.to(gates.dtype), beside), layers)
            states.append(layers[-1][0])
            if fed is not None:
                fed = self.read(states[-1], x[:, position], contexts[-1])
                outputs.append(fed)
        carried = recurrence.join(layers) | ({} if fed is None else {"fed": fed})
        return Ran(torch.stack(outputs, 1) if outputs else self.read(torch.stack(states, 1), x, torch.stack(contexts, 1)), carried)

    def read(self, hidden: Tensor, x: Tensor, context: Tensor) -> Tensor:
        """Let the larger of each two outputs pass, (..., D)."""
        return self.readout(torch.cat([hidden, x, context], dim=-1)).unflatten(-1, (-1, 2)).amax(dim=-1)


class AskBelow(Asking):
    r"""The lowest layer asks with its old state, and every layer gets the answer beside its input; from the third on each adds its input.

    .. math:: c_t = \mathrm{attend}(h^1_{t-1}), \quad h^l_t = f(h^l_{t-1}, [x^l_t; c_t]), \quad x^{l+1}_t = h^l_t + x^l_t \; (l \ge 3)

    Wu et al. (2016), "Google's Neural Machine Translation System". Only the lowest layer must wait for its answers: the others read
    whole sequences at once.
    """

    feeds = False

    def __init__(self, recurrence: Recurrence, above: list[Recurrence], *, dropout: float = 0.0) -> None:
        super().__init__(recurrence)
        self.above = nn.ModuleList(above)
        self.layers, self.dropout = 1 + len(above), dropout

    @classmethod
    def build(cls, kind: type[Recurrence], width: int, *, memory_width: int, feeding: bool, layers: int, dropout: float) -> AskBelow:
        """Build for inputs (B, T, width)."""
        assert not feeding, "the answers are fed to every layer; the last output is not"
        lowest, *above = (kind(width + memory_width, width) for _ in range(layers))
        return cls(lowest, above, dropout=dropout)

    def run(self, x: Tensor, carried: Carried, look: Look) -> Ran:
        """Take positions (B, T, D): one after another in the lowest layer, all at once above it."""
        recurrence, layers = self.recurrence, self.recurrence.split(carried)
        projected = recurrence.project(x)
        beside = recurrence.beside(x.size(2)).to(projected.dtype)
        states, contexts = [], []
        for gates in projected.unbind(dim=1):
            contexts.append(look(layers[-1][0]))
            layers = recurrence.advance(torch.addmm(gates, contexts[-1].to(gates.dtype), beside), layers)
            states.append(layers[-1][0])
        x, context, after = torch.stack(states, dim=1), torch.stack(contexts, dim=1), [recurrence.join(layers)]
        for number, upper in self.uppers():
            entered = dropout(x, self.dropout) if self.training and self.dropout else x
            change, own = upper.run(
                torch.cat([entered, context], dim=-1), {name: each[:, number : number + 1] for name, each in carried.items()}
            )
            x = x + change if number >= 2 else change
            after.append(own)
        return Ran(x, {name: torch.cat([own[name] for own in after], dim=1) for name in recurrence.names})

    def uppers(self) -> Iterator[tuple[int, Recurrence]]:
        """Go through the layers above the lowest, with their numbers."""
        for number, upper in enumerate(self.above, start=1):
            assert isinstance(upper, Recurrence), "layers above the lowest must be recurrences"
            yield number, upper


QUERIES: dict[str, type[Asking]] = {"before": AskBefore, "after": AskAfter, "below": AskBelow}  # when it asks, beside its step
