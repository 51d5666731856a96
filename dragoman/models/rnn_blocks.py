"""Recurrent blocks: `lstm`, `gru`, `rnn`, `sru`; in encoders also bidirectional and sliced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.attention_mechanism import Mechanism, PreparedKeys
from dragoman.attention.attention_weight_hooks import merge_records
from dragoman.attention.policy_gradient_alignment import ReinforceAlignment
from dragoman.attention.softmax_and_gumbel_alignment import AlignmentState, SmoothedSoftmax
from dragoman.config import ModelConfig
from dragoman.layers.norms_and_residuals import NoResidual, Residual
from dragoman.layers.rnn import (
    GRU,
    LSTM,
    MEMORY_SUMMARIES,
    RNN,
    SRU,
    BidirectionalRNN,
    MemorySummary,
    RNNState,
    SlicedRNN,
    TanhRNN,
)
from dragoman.layers.rnn_decoders import RNN_DECODERS, AttentionDecoder
from dragoman.models.block_interface import (
    Block,
    BuildContext,
    ExtendOutput,
    SegmentOutput,
    build_residual,
)
from dragoman.models.block_options import (
    BidirectionalRNNOptions,
    RNNOptions,
    SlicedRNNOptions,
    copies_final_state,
    resolve_attention,
)
from dragoman.models.decoder_state import DecoderState
from dragoman.models.forward_context import ForwardContext, Memory
from dragoman.registry import catalogue

ALIGNMENT_PREFIX = "alignment."  # of the alignment's tensors among a state's recurrent ones


class DecoderAttention(NamedTuple):
    """The parts of an RNN decoder with attention."""

    attention_decoder: AttentionDecoder
    cross: Mechanism


class AlignmentStep(NamedTuple):
    """Attention weights of one position, and the alignment's state after it."""

    weights: Tensor  # (B, S)
    state: AlignmentState


class RNNLayer(Block):
    """Unidirectional RNN; in a decoder, initialized from the encoder, with optional attention."""

    kind: ClassVar[type[RNN]]
    overridable = RNNOptions.overridable
    has_recurrent_state = True
    supports_compile = False  # loops over positions

    def __init__(
        self,
        *,
        rnn: RNN | None,  # None with attention, whose decoder has the RNN
        attention: DecoderAttention | None,
        residual: Residual,
        summary: MemorySummary | None,
        memory_width: int | None,
        initial_cell: bool = False,
        reverse: bool = False,
        exports_final_state: bool = False,
        copies_state: bool = False,
    ) -> None:
        super().__init__()
        self.residual = residual
        self.final_norm = residual.final_norm
        self.reverse = reverse
        self.exports_final_state = exports_final_state  # an encoder's final state to the decoder
        self.copies_state = copies_state  # a decoder starts with it
        self.has_cross = attention is not None
        if attention is not None:
            self.attention_decoder, self.cross = attention
        else:
            self.rnn = rnn
        self.summary = summary
        if summary is not None and memory_width is not None:
            stateful = self._rnn_or_decoder()
            inputs = summary(torch.zeros(1, 1, memory_width, device="cpu"), None).size(1)
            self.initial = nn.Linear(inputs, stateful.layers * stateful.width)
            if initial_cell:
                self.initial_cell = nn.Linear(inputs, stateful.layers * stateful.width)

    @classmethod
    def build(
        cls,
        build_context: BuildContext,
        attention: str = "none",
        alignment: str = "softmax",
        decoder: str = "luong",
        input_feeding: bool = False,
        layers: int = 1,
        initial_state: str = "mean",
        reverse: bool = False,
        residual_connection: bool = True,
        radius: int = 0,
        chunk_size: int = 0,
        smoothing: bool = False,
        coverage_loss_weight: float = 0.0,
        initial_cell: bool = False,
        weight_dropout: float = 0.0,
        locked_dropout: bool = False,
    ) -> RNNLayer:
        """Build one or several stacked RNN layers.

        `attention` names a score function, or an alignment, which then has its paper's score.
        """
        config, memory_width = build_context.config, build_context.memory_width
        decoder_attention = plain = None
        if attention != "none" and memory_width is not None:
            widths = {
                "query_width": config.width,
                "key_width": memory_width,
                "score_width": config.width,
            }
            score_name, alignment_name = resolve_attention(attention, alignment)
            options = {
                "radius": radius,
                "chunk_size": chunk_size,
                "base_alignment": SmoothedSoftmax() if smoothing else None,
                "loss_weight": coverage_loss_weight,
            }
            given = {name: value for name, value in options.items() if value}  # others: defaults
            cross = Mechanism(
                catalogue("score").load(score_name)(**widths),
                catalogue("alignment").load(alignment_name)(**widths, **given),
            )
            decoder_attention = DecoderAttention(
                RNN_DECODERS[decoder].build(
                    cls.kind,
                    config.width,
                    memory_width=memory_width,
                    layers=layers,
                    input_feeding=input_feeding,
                    dropout=config.dropout,
                ),
                cross,
            )
        else:
            plain = cls.kind(
                config.width,
                config.width,
                layers=layers,
                dropout=config.dropout,
                weight_dropout=weight_dropout,
            )
        residual = _build_residual(config, residual_connection)
        residual.locked = locked_dropout
        return cls(
            rnn=plain,
            attention=decoder_attention,
            residual=residual,
            summary=MEMORY_SUMMARIES.get(initial_state) if memory_width is not None else None,
            memory_width=memory_width,
            initial_cell=initial_cell,
            reverse=reverse,
            exports_final_state=memory_width is None and copies_final_state(config),
            copies_state=initial_state == "encoder",
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D)."""
        sublayer_input = self.residual.prepare_input(x)
        if context.memory is None:
            rnn = self._rnn_without_attention()
            if self.exports_final_state:
                sublayer_output, final = rnn.encode(
                    sublayer_input, context.mask, reverse=self.reverse
                )
                context.final_states.append(
                    torch.stack([final[name] for name in rnn.state_names], dim=1)
                )
            else:
                sublayer_output = (
                    rnn.run_reversed(sublayer_input, context.mask)
                    if self.reverse
                    else rnn.run_forward(sublayer_input)
                )
        elif self.has_cross:
            sublayer_output = self._forward_with_attention(sublayer_input, context.memory, context)
        else:
            rnn, initial_state = self._rnn_without_attention(), self._initial_state(context.memory)
            sublayer_output = rnn.run(sublayer_input, initial_state).output
        return self.residual.add_output(x, sublayer_output)

    def _forward_with_attention(self, x: Tensor, memory: Memory, context: ForwardContext) -> Tensor:
        """Run the attention decoder over (B, T, D) under teacher forcing."""
        has_loss = self.training and self.cross.alignment.has_loss
        with merge_records(self.cross):
            if self.attention_decoder.is_parallel and not has_loss:
                return self.attention_decoder.run_parallel(
                    x,
                    self._initial_state(memory),
                    lambda query: (
                        self.cross(
                            query=query, key=memory.values, value=memory.values, mask=memory.mask
                        ).context
                    ),
                )
            alignment_steps: list[AlignmentStep] | None = [] if has_loss else None
            output, _ = self._run_attention_decoder(x, self.start(context), alignment_steps)
        if alignment_steps is not None:
            self._add_losses(alignment_steps, context)
        return output

    def carried_shapes(self, memory: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the RNN's state, which truncated back-propagation carries."""
        rnn = self._rnn_without_attention()
        return dict.fromkeys(rnn.state_names, (rnn.layers, rnn.width))

    def forward_segment(
        self, x: Tensor, context: ForwardContext, previous: Mapping[str, Tensor]
    ) -> SegmentOutput:
        """Return the output for a segment (B, T, D), from the state that the last one left."""
        if not previous:
            return SegmentOutput(self(x, context), {})
        state = {name: tensor.detach() for name, tensor in previous.items()}
        output, left = self._rnn_without_attention().run(self.residual.prepare_input(x), state)
        carried = {name: tensor.detach() for name, tensor in left.items()}
        return SegmentOutput(self.residual.add_output(x, output), carried)

    def start(self, context: ForwardContext) -> DecoderState:
        """Return the initial RNN state and the projected keys and values of the source."""
        memory = context.memory
        if memory is None:
            zeros = self._rnn_without_attention().zero_state(context.state_template())
            return context.initial_state(None, recurrent=zeros)
        recurrent = self._initial_state(memory)
        if not self.has_cross:
            return context.initial_state(None, recurrent=recurrent)
        prepared = self.cross.prepare(key=memory.values, value=memory.values, mask=memory.mask)
        if self.attention_decoder.input_feeding:
            recurrent["previous_output"] = memory.values.new_zeros(
                memory.rows, self.attention_decoder.width
            )
        recurrent |= {
            ALIGNMENT_PREFIX + name: tensor for name, tensor in self.cross.start(prepared).items()
        }
        source = {"key": prepared.key, "value": prepared.value, "mask": prepared.mask}
        return context.initial_state(source, recurrent=recurrent)

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Return the output for T more positions (B, T, D), and the state after them."""
        sublayer_input = self.residual.prepare_input(x)
        if self.has_cross:
            with merge_records(self.cross):
                sublayer_output, recurrent = self._run_attention_decoder(sublayer_input, state)
        else:
            sublayer_output, recurrent = self._rnn_without_attention().run(
                sublayer_input, state.recurrent
            )
        return ExtendOutput(
            self.residual.add_output(x, sublayer_output),
            replace(state.advance(x.size(1)), recurrent=recurrent),
        )

    def _run_attention_decoder(
        self, x: Tensor, state: DecoderState, alignment_steps: list[AlignmentStep] | None = None
    ) -> tuple[Tensor, RNNState]:
        """Run the attention decoder step by step over (B, T, D); return its output and state.

        `alignment_steps`, if given, gets the attention weights and alignment state of every step.
        """
        prepared = PreparedKeys(*(state.memory[name] for name in ("key", "value", "mask")))
        aligned = {
            name.removeprefix(ALIGNMENT_PREFIX): tensor
            for name, tensor in state.recurrent.items()
            if name.startswith(ALIGNMENT_PREFIX)
        }
        own = {
            name: tensor
            for name, tensor in state.recurrent.items()
            if not name.startswith(ALIGNMENT_PREFIX)
        }

        scans = alignment_steps is None and self.cross.can_scan(prepared)

        def attend(query: Tensor) -> Tensor:
            nonlocal aligned
            if scans:
                context, aligned = self.cross.scan(query.unsqueeze(1), prepared, aligned)
                return context.squeeze(1)
            attended, aligned = self.cross.step(query.unsqueeze(1), prepared, aligned)
            if alignment_steps is not None:
                alignment_steps.append(AlignmentStep(attended.weights.squeeze(1), aligned))
            return attended.context.squeeze(1)

        output, own = self.attention_decoder.run(x, own, attend)
        return output, own | {ALIGNMENT_PREFIX + name: tensor for name, tensor in aligned.items()}

    def _add_losses(self, alignment_steps: list[AlignmentStep], context: ForwardContext) -> None:
        """Add the alignment's losses over real tokens; store REINFORCE's log-probabilities."""
        alignment = self.cross.alignment

        def stack_real(values: list[Tensor]) -> Tensor:
            stacked = torch.stack(values, dim=1)  # (B, T)
            return stacked if context.mask is None else stacked.masked_fill(~context.mask, 0.0)

        losses = [
            loss
            for weights, state in alignment_steps
            if (loss := alignment.step_loss(weights, state)) is not None
        ]
        if losses:
            context.add_loss(alignment.loss_name, stack_real(losses).sum())
        if isinstance(alignment, ReinforceAlignment):
            alignment.store_log_probs(
                stack_real([alignment.log_prob(state) for _, state in alignment_steps]).sum(dim=1)
            )

    def _rnn_without_attention(self) -> RNN:
        """Return the RNN of a layer without attention."""
        assert isinstance(self.rnn, RNN), "a layer without attention must have an RNN"
        return self.rnn

    def _rnn_or_decoder(self) -> AttentionDecoder | RNN:
        """Return the RNN, or the attention decoder around it."""
        return self.attention_decoder if self.has_cross else self._rnn_without_attention()

    def _initial_state(self, memory: Memory) -> RNNState:
        r"""Return the initial states, projected from a summary h of the encoder's output.

        .. math:: s_0 = \tanh(W_s h), \quad c_0 = \tanh(W_c h)

        The first is Bahdanau et al. (2015), appendix A.2.2; the second, for an LSTM with
        `initial_cell`, Xu et al. (2015). Without it, the initial cell state is zero. With
        `initial_state=encoder` both are the encoder's final states, layer by layer, as in Sutskever
        et al. (2014).
        """
        recurrent = self._rnn_or_decoder().zero_state(memory.values)
        if self.copies_state:
            assert memory.final_state is not None, "the encoder must return its final state"
            return dict(zip(recurrent, memory.final_state.unbind(1), strict=True))
        if self.summary is not None:
            summary = self.summary(memory.values, memory.mask)
            projected = torch.tanh(self.initial(summary)).view_as(recurrent["hidden"])
            recurrent |= dict.fromkeys(self.kind.projected_states, projected)
            if hasattr(self, "initial_cell"):
                recurrent["cell"] = torch.tanh(self.initial_cell(summary)).view_as(
                    recurrent["cell"]
                )
        return recurrent


class LSTMLayer(RNNLayer):
    """LSTM as a block: `lstm` in a configuration."""

    kind = LSTM


class GRULayer(RNNLayer):
    """GRU as a block: `gru` in a configuration."""

    kind = GRU


class TanhRNNLayer(RNNLayer):
    """Plain RNN as a block: `rnn` in a configuration."""

    kind = TanhRNN


class SRULayer(RNNLayer):
    """SRU as a block: `sru` in a configuration."""

    kind = SRU


class BidirectionalRNNLayer(Block):
    """Bidirectional RNN of an encoder."""

    kind: ClassVar[type[RNN]]
    overridable = BidirectionalRNNOptions.overridable
    supports_compile = False  # PyTorch's RNN kernels, which torch.compile does not change

    def __init__(self, *, rnn: BidirectionalRNN, residual: Residual) -> None:
        super().__init__()
        self.rnn, self.residual = rnn, residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(
        cls, build_context: BuildContext, residual_connection: bool = True
    ) -> BidirectionalRNNLayer:
        """Build an encoder's layer, half the width in each direction."""
        width = build_context.config.width
        forward_rnn, backward_rnn = (cls.kind(width, width // 2) for _ in range(2))
        return cls(
            rnn=BidirectionalRNN(forward_rnn, backward_rnn),
            residual=_build_residual(build_context.config, residual_connection),
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D)."""
        return self.residual.add_output(x, self.rnn(self.residual.prepare_input(x), context.mask))


class BiLSTMLayer(BidirectionalRNNLayer):
    """Bidirectional LSTM as a block: `bilstm` in a configuration."""

    kind = LSTM


class BiGRULayer(BidirectionalRNNLayer):
    """Bidirectional GRU as a block: `bigru` in a configuration."""

    kind = GRU


class BiTanhRNNLayer(BidirectionalRNNLayer):
    """Bidirectional plain RNN as a block: `birnn` in a configuration."""

    kind = TanhRNN


class BiSRULayer(BidirectionalRNNLayer):
    """Bidirectional SRU as a block: `bisru` in a configuration."""

    kind = SRU


class SlicedRNNLayer(Block):
    """Sliced RNN of an encoder: `sliced_rnn` in a configuration."""

    overridable = SlicedRNNOptions.overridable
    supports_compile = False  # PyTorch's RNN kernels, which torch.compile does not change

    def __init__(self, *, sliced: SlicedRNN, residual: Residual) -> None:
        super().__init__()
        self.sliced, self.residual = sliced, residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(
        cls,
        build_context: BuildContext,
        cell: str = "gru",
        slice_length: int = 4,
        levels: int = 2,
        residual_connection: bool = True,
    ) -> SlicedRNNLayer:
        """Build an encoder's layer with one RNN for each level."""
        config = build_context.config
        kind = {"gru": GRU, "lstm": LSTM, "rnn": TanhRNN, "sru": SRU}[cell]
        return cls(
            sliced=SlicedRNN(
                [kind(config.width, config.width) for _ in range(levels)], slice_length
            ),
            residual=_build_residual(config, residual_connection),
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the output for a whole sequence (B, T, D)."""
        sublayer_output = self.sliced(self.residual.prepare_input(x), context.mask)
        return self.residual.add_output(x, sublayer_output)


def _build_residual(config: ModelConfig, residual_connection: bool) -> Residual:
    """Build the residual connection and norm, or neither."""
    return build_residual(config) if residual_connection else NoResidual(dropout=config.dropout)
