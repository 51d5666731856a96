"""RNN decoders with attention: Bahdanau, Luong (with or without input feeding) and GNMT.

The loop over positions computes only what depends on the previous position. Input projections are
computed before the loop and readouts after it, for all positions in one matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dragoman import ops
from dragoman.layers.rnn import RNN, RNNOutput, RNNState

AttendFunction = Callable[[Tensor], Tensor]  # from a query (B, D) to a context vector (B, D)


class AttentionDecoder(nn.Module):
    """An RNN with cross-attention: when it attends, and how the context vector is used."""

    supports_input_feeding = True  # whether the last output can be part of the next input

    def __init__(self, rnn: RNN, *, input_feeding: bool) -> None:
        super().__init__()
        self.is_parallel = False  # whether the RNN does not depend on the attention: run_parallel
        self.rnn = rnn
        self.layers, self.width, self.input_feeding = (
            rnn.layers,
            rnn.width,
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
        """Build a decoder for inputs (B, T, width), plus the last output with input feeding."""
        raise NotImplementedError

    def zero_state(self, like: Tensor) -> RNNState:
        """Return a zero state for the batch size, device and dtype of a tensor (B, ...)."""
        return {
            name: like.new_zeros(like.size(0), self.layers, self.width)
            for name in self.rnn.state_names
        }

    def run(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> RNNOutput:
        """Run over positions (B, T, D); with input feeding the state has "previous_output"."""
        raise NotImplementedError

    def run_parallel(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> Tensor:
        """Return the outputs for (B, T, D) with one call of the RNN and one of the attention."""
        raise NotImplementedError


class LuongDecoder(AttentionDecoder):
    r"""Luong's decoder: attend with the new hidden state, then combine it with the context vector.

    .. math:: \tilde h_t = \tanh(W_c [c_t; h_t])

    Luong, Pham and Manning (2015), section 3, equation 5; input feeding is section 3.3.
    """

    def __init__(self, rnn: RNN, readout: nn.Linear, *, input_feeding: bool) -> None:
        super().__init__(rnn, input_feeding=input_feeding)
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
        """Build a decoder for inputs (B, T, width), plus the last output with input feeding."""
        rnn = kind(width + (width if input_feeding else 0), width, layers=layers, dropout=dropout)
        return cls(
            rnn,
            nn.Linear(memory_width + width, width, bias=False),
            input_feeding=input_feeding,
        )

    def run(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> RNNOutput:
        """Run over positions (B, T, D), one after another."""
        rnn, layers = self.rnn, self.rnn.split(rnn_state)
        projected, previous_output = rnn.project(x), rnn_state.get("previous_output")
        extra_input_weight = rnn.extra_input_weight(x.size(2)).to(projected.dtype)
        states, contexts, outputs = [], [], []
        for gates in projected.unbind(dim=1):
            layers = rnn.advance(
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
        rnn_state = rnn.join(layers) | (
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
        hidden = self.rnn.run(x, rnn_state).output
        return self.combine(hidden, attend(hidden))

    def combine(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Return the attentional hidden state of hidden state and context vector (..., D)."""
        return torch.tanh(self.readout(torch.cat([context, hidden], dim=-1)))


class BahdanauDecoder(AttentionDecoder):
    r"""Bahdanau's decoder: attend with the previous state, then update it with the context vector.

    .. math:: s_t = f(s_{t-1}, [y_{t-1}; c_t]), \quad \tilde t = U_o s_t + V_o y_{t-1} + C_o c_t,
        \quad t_k = \max(\tilde t_{2k-1}, \tilde t_{2k})

    Bahdanau, Cho and Bengio (2015), equations 4 and 5 and appendix A.2.2, with a maxout readout.
    The appendix writes s_{t-1} in the readout; equation 4 has s_t.
    """

    def __init__(self, rnn: RNN, readout: nn.Linear, *, input_feeding: bool) -> None:
        super().__init__(rnn, input_feeding=input_feeding)
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
        """Build a decoder for inputs (B, T, width), plus the last output with input feeding."""
        rnn = kind(
            width + memory_width + (width if input_feeding else 0),
            width,
            layers=layers,
            dropout=dropout,
        )
        return cls(
            rnn,
            nn.Linear(2 * width + memory_width, 2 * width, bias=False),
            input_feeding=input_feeding,
        )

    def run(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> RNNOutput:
        """Run over positions (B, T, D), one after another."""
        rnn, layers = self.rnn, self.rnn.split(rnn_state)
        projected, previous_output = rnn.project(x), rnn_state.get("previous_output")
        extra_input_weight = rnn.extra_input_weight(x.size(2)).to(projected.dtype)
        states, contexts, outputs = [], [], []
        for position, gates in enumerate(projected.unbind(dim=1)):
            contexts.append(attend(layers[-1][0]))
            extra_input = (
                contexts[-1]
                if previous_output is None
                else torch.cat([contexts[-1], previous_output], dim=-1)
            )
            layers = rnn.advance(
                torch.addmm(gates, extra_input.to(gates.dtype), extra_input_weight), layers
            )
            states.append(layers[-1][0])
            if previous_output is not None:
                previous_output = self.combine(states[-1], x[:, position], contexts[-1])
                outputs.append(previous_output)
        rnn_state = rnn.join(layers) | (
            {} if previous_output is None else {"previous_output": previous_output}
        )
        return RNNOutput(
            torch.stack(outputs, 1)
            if outputs
            else self.combine(torch.stack(states, 1), x, torch.stack(contexts, 1)),
            rnn_state,
        )

    def combine(self, hidden: Tensor, x: Tensor, context: Tensor) -> Tensor:
        """Return the maxout of state, input and context vector, (..., D) each."""
        return (
            self.readout(torch.cat([hidden, x, context], dim=-1))
            .unflatten(-1, (-1, 2))
            .amax(dim=-1)
        )


class GNMTDecoder(AttentionDecoder):
    r"""GNMT's decoder: the bottom layer attends, and every layer gets the context vector as input.

    .. math:: c_t = \mathrm{attend}(h^1_{t-1}), \quad h^l_t = f(h^l_{t-1}, [x^l_t; c_t]), \quad
        x^{l+1}_t = h^l_t + x^l_t \; (l \ge 3)

    Wu et al. (2016), "Google's Neural Machine Translation System", with residual connections
    from the third layer on. Only the bottom layer runs position by position; the others run over
    the whole sequence.
    """

    supports_input_feeding = False

    def __init__(self, rnn: RNN, upper_layers: list[RNN], *, dropout: float = 0.0) -> None:
        super().__init__(rnn, input_feeding=False)
        self.upper_layers = nn.ModuleList(upper_layers)
        self.layers, self.dropout = 1 + len(upper_layers), dropout

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
        """Build a decoder for inputs (B, T, width)."""
        assert not input_feeding, "GNMT has no input feeding"
        bottom, *upper_layers = (kind(width + memory_width, width) for _ in range(layers))
        return cls(bottom, upper_layers, dropout=dropout)

    def run(self, x: Tensor, rnn_state: RNNState, attend: AttendFunction) -> RNNOutput:
        """Run over (B, T, D): by position in the bottom layer, then layer by layer."""
        rnn, layers = self.rnn, self.rnn.split(rnn_state)
        projected = rnn.project(x)
        extra_input_weight = rnn.extra_input_weight(x.size(2)).to(projected.dtype)
        states, contexts = [], []
        for gates in projected.unbind(dim=1):
            contexts.append(attend(layers[-1][0]))
            layers = rnn.advance(
                torch.addmm(gates, contexts[-1].to(gates.dtype), extra_input_weight), layers
            )
            states.append(layers[-1][0])
        x, context, after = (
            torch.stack(states, dim=1),
            torch.stack(contexts, dim=1),
            [rnn.join(layers)],
        )
        for number, upper in self._numbered_layers():
            sublayer_input = ops.dropout(x, self.dropout, training=self.training)
            sublayer_output, own = upper.run(
                torch.cat([sublayer_input, context], dim=-1),
                {name: each[:, number : number + 1] for name, each in rnn_state.items()},
            )
            x = x + sublayer_output if number >= 2 else sublayer_output
            after.append(own)
        return RNNOutput(
            x,
            {name: torch.cat([own[name] for own in after], dim=1) for name in rnn.state_names},
        )

    def _numbered_layers(self) -> Iterator[tuple[int, RNN]]:
        """Yield the layers above the bottom one with their numbers, from 1."""
        for number, upper in enumerate(self.upper_layers, start=1):
            assert isinstance(upper, RNN), "upper layers must be RNNs"
            yield number, upper


# By the values of the option `decoder`.
RNN_DECODERS: dict[str, type[AttentionDecoder]] = {
    "bahdanau": BahdanauDecoder,
    "luong": LuongDecoder,
    "gnmt": GNMTDecoder,
}
