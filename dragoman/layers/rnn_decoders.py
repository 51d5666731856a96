"""Recurrences that ask: the turns that a recurrence takes with attention to a memory, and what is made of the answers.

The loop over positions does only what must wait for the position before: products with the given inputs are made before it, and
the output is read after it, for all positions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dragoman.layers.rnn import RNN, RNNOutput, RNNState
from dragoman.ops import dropout

AttendFunction = Callable[
    [Tensor], Tensor
]  # asks the memory: a query (B, D) gives a context (B, D)


class AttentionDecoder(nn.Module):
    """A recurrence and the questions it asks of a memory: who goes first, and what is made of the answer."""

    supports_input_feeding = True  # whether its last output can be part of its next input

    def __init__(self, recurrence: RNN, *, input_feeding: bool = False) -> None:
        super().__init__()
        self.is_parallel = False  # whether the RNN does not depend on the attention: run_parallel
        self.recurrence = recurrence
        self.layers, self.width, self.input_feeding = (
            recurrence.layers,
            recurrence.width,
            input_feeding,
        )

    @classmethod
    def build(
        cls,
        kind: type[RNN],
        width: int,
        *,
        memory_width: int,
        input_feeding: bool,
        layers: int,
        dropout: float,
    ) -> AttentionDecoder:
        """Build for inputs (B, T, width), beside which the last output comes in where there is `feeding`."""
        raise NotImplementedError

    def zero_state(self, like: Tensor) -> RNNState:
        """Remember nothing yet, for the rows, device and type of a tensor (B, ...)."""
        return {
            name: like.new_zeros(like.size(0), self.layers, self.width)
            for name in self.recurrence.state_names
        }

    def run(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> RNNOutput:
        """Take positions (B, T, D) one after another; "fed" is carried where the last output comes in."""
        raise NotImplementedError

    def run_parallel(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> Tensor:
        """Return the outputs for (B, T, D) with one call of the RNN and one of the attention."""
        raise NotImplementedError


class LuongDecoder(AttentionDecoder):
    r"""Step, then ask with the new state.

    .. math:: \tilde h_t = \tanh(W_c [c_t; h_t])

    Luong, Pham and Manning (2015), section 3, equation 5; where the last output is fed in, section 3.3.
    """

    def __init__(self, recurrence: RNN, readout: nn.Linear, *, input_feeding: bool = False) -> None:
        super().__init__(recurrence, input_feeding=input_feeding)
        self.readout = readout
        self.is_parallel = not input_feeding

    @classmethod
    def build(
        cls,
        kind: type[RNN],
        width: int,
        *,
        memory_width: int,
        input_feeding: bool,
        layers: int,
        dropout: float,
    ) -> LuongDecoder:
        """Build for inputs (B, T, width), beside which the last output comes in where there is `feeding`."""
        recurrence = kind(
            width + (width if input_feeding else 0), width, layers=layers, dropout=dropout
        )
        return cls(
            recurrence,
            nn.Linear(memory_width + width, width, bias=False),
            input_feeding=input_feeding,
        )

    def run(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> RNNOutput:
        """Take positions (B, T, D) one after another."""
        recurrence, layers = self.recurrence, self.recurrence.split(rnn_state)
        projected, previous_output = recurrence.project(x), rnn_state.get("previous_output")
        extra_input_weight = recurrence.extra_input_weight(x.size(2)).to(projected.dtype)
        states, contexts, outputs = [], [], []
        for gates in projected.unbind(dim=1):
            layers = recurrence.advance(
                gates
                if previous_output is None
                else torch.addmm(gates, previous_output.to(gates.dtype), extra_input_weight),
                layers,
            )
            states.append(layers[-1][0])
            contexts.append(attend(states[-1]))
            if previous_output is not None:
                previous_output = self.combine(states[-1], contexts[-1])
                outputs.append(previous_output)
        rnn_state = recurrence.join(layers) | (
            {} if previous_output is None else {"previous_output": previous_output}
        )
        return RNNOutput(
            torch.stack(outputs, 1)
            if outputs
            else self.combine(torch.stack(states, 1), torch.stack(contexts, 1)),
            rnn_state,
        )

    def run_parallel(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> Tensor:
        """Return the outputs for (B, T, D) with one call of the RNN and one of the attention."""
        hidden = self.recurrence.run(x, rnn_state).output
        return self.combine(hidden, attend(hidden))

    def combine(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Join state and answer, (..., D) each."""
        return torch.tanh(self.readout(torch.cat([context, hidden], dim=-1)))


class BahdanauDecoder(AttentionDecoder):
    r"""Ask with the old state, then step with the answer; a maxout layer reads state, input and answer.

    .. math:: s_t = f(s_{t-1}, [y_{t-1}; c_t]), \quad \tilde t = U_o s_t + V_o y_{t-1} + C_o c_t,
        \quad t_k = \max(\tilde t_{2k-1}, \tilde t_{2k})

    Bahdanau, Cho and Bengio (2015), equations 4 and 5 and appendix A.2.2, which writes s_{t-1} in the second; equation 4 has s_t.
    """

    def __init__(self, recurrence: RNN, readout: nn.Linear, *, input_feeding: bool = False) -> None:
        super().__init__(recurrence, input_feeding=input_feeding)
        self.readout = readout

    @classmethod
    def build(
        cls,
        kind: type[RNN],
        width: int,
        *,
        memory_width: int,
        input_feeding: bool,
        layers: int,
        dropout: float,
    ) -> BahdanauDecoder:
        """Build for inputs (B, T, width), beside which the last output comes in where there is `feeding`."""
        recurrence = kind(
            width + memory_width + (width if input_feeding else 0),
            width,
            layers=layers,
            dropout=dropout,
        )
        return cls(
            recurrence,
            nn.Linear(2 * width + memory_width, 2 * width, bias=False),
            input_feeding=input_feeding,
        )

    def run(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> RNNOutput:
        """Take positions (B, T, D) one after another."""
        recurrence, layers = self.recurrence, self.recurrence.split(rnn_state)
        projected, previous_output = recurrence.project(x), rnn_state.get("previous_output")
        extra_input_weight = recurrence.extra_input_weight(x.size(2)).to(projected.dtype)
        states, contexts, outputs = [], [], []
        for position, gates in enumerate(projected.unbind(dim=1)):
            contexts.append(attend(layers[-1][0]))
            extra_input = (
                contexts[-1]
                if previous_output is None
                else torch.cat([contexts[-1], previous_output], dim=-1)
            )
            layers = recurrence.advance(
                torch.addmm(gates, extra_input.to(gates.dtype), extra_input_weight), layers
            )
            states.append(layers[-1][0])
            if previous_output is not None:
                previous_output = self.combine(states[-1], x[:, position], contexts[-1])
                outputs.append(previous_output)
        rnn_state = recurrence.join(layers) | (
            {} if previous_output is None else {"previous_output": previous_output}
        )
        return RNNOutput(
            torch.stack(outputs, 1)
            if outputs
            else self.combine(torch.stack(states, 1), x, torch.stack(contexts, 1)),
            rnn_state,
        )

    def combine(self, hidden: Tensor, x: Tensor, context: Tensor) -> Tensor:
        """Let the larger of each two outputs pass, (..., D)."""
        return (
            self.readout(torch.cat([hidden, x, context], dim=-1))
            .unflatten(-1, (-1, 2))
            .amax(dim=-1)
        )


class GNMTDecoder(AttentionDecoder):
    r"""The lowest layer asks with its old state, and every layer gets the answer beside its input; from the third on each adds its input.

    .. math:: c_t = \mathrm{attend}(h^1_{t-1}), \quad h^l_t = f(h^l_{t-1}, [x^l_t; c_t]), \quad x^{l+1}_t = h^l_t + x^l_t \; (l \ge 3)

    Wu et al. (2016), "Google's Neural Machine Translation System". Only the lowest layer must wait for its answers: the others read
    whole sequences at once.
    """

    supports_input_feeding = False

    def __init__(self, recurrence: RNN, above: list[RNN], *, dropout: float = 0.0) -> None:
        super().__init__(recurrence)
        self.above = nn.ModuleList(above)
        self.layers, self.dropout = 1 + len(above), dropout

    @classmethod
    def build(
        cls,
        kind: type[RNN],
        width: int,
        *,
        memory_width: int,
        input_feeding: bool,
        layers: int,
        dropout: float,
    ) -> GNMTDecoder:
        """Build for inputs (B, T, width)."""
        assert not input_feeding, "the answers are fed to every layer; the last output is not"
        lowest, *above = (kind(width + memory_width, width) for _ in range(layers))
        return cls(lowest, above, dropout=dropout)

    def run(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> RNNOutput:
        """Take positions (B, T, D): one after another in the lowest layer, all at once above it."""
        recurrence, layers = self.recurrence, self.recurrence.split(rnn_state)
        projected = recurrence.project(x)
        extra_input_weight = recurrence.extra_input_weight(x.size(2)).to(projected.dtype)
        states, contexts = [], []
        for gates in projected.unbind(dim=1):
            contexts.append(attend(layers[-1][0]))
            layers = recurrence.advance(
                torch.addmm(gates, contexts[-1].to(gates.dtype), extra_input_weight), layers
            )
            states.append(layers[-1][0])
        x, context, after = (
            torch.stack(states, dim=1),
            torch.stack(contexts, dim=1),
            [recurrence.join(layers)],
        )
        for number, upper in self.upper_layers():
            sublayer_input = dropout(x, self.dropout) if self.training and self.dropout else x
            sublayer_output, own = upper.run(
                torch.cat([sublayer_input, context], dim=-1),
                {name: each[:, number : number + 1] for name, each in rnn_state.items()},
            )
            x = x + sublayer_output if number >= 2 else sublayer_output
            after.append(own)
        return RNNOutput(
            x,
            {
                name: torch.cat([own[name] for own in after], dim=1)
                for name in recurrence.state_names
            },
        )

    def upper_layers(self) -> Iterator[tuple[int, RNN]]:
        """Go through the layers above the lowest, with their numbers."""
        for number, upper in enumerate(self.above, start=1):
            assert isinstance(upper, RNN), "layers above the lowest must be recurrences"
            yield number, upper


RNN_DECODERS: dict[str, type[AttentionDecoder]] = {
    "bahdanau": BahdanauDecoder,
    "luong": LuongDecoder,
    "gnmt": GNMTDecoder,
}  # when it asks, beside its step
