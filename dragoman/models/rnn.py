"""Recurrent blocks: `lstm` and `gru` in encoders and decoders, `bilstm` and `bigru` in encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.alignments import AlignmentState, SmoothedSoftmax
from dragoman.attention.mechanism import Mechanism, PreparedKeys
from dragoman.attention.recorder import merge_records
from dragoman.attention.reinforce import ReinforceAlignment
from dragoman.errors import DragomanError
from dragoman.layers.residual import Residual
from dragoman.layers.rnn import (
    GRU,
    LSTM,
    MEMORY_SUMMARIES,
    RNN,
    BidirectionalRNN,
    MemorySummary,
    NoResidual,
    RNNState,
)
from dragoman.layers.rnn_decoders import RNN_DECODERS, AttentionDecoder, LuongDecoder
from dragoman.models.block import Block, BuildContext, ExtendOutput
from dragoman.models.block_options import BidirectionalRNNOptions, RNNOptions, resolve_attention
from dragoman.models.context import ForwardContext, Memory
from dragoman.models.decoder_state import DecoderState
from dragoman.registry import catalogue

ALIGNMENT_PREFIX = "alignment."  # stands before the names of what an alignment carries


class DecoderAttention(NamedTuple):
    """What an attentive layer adds to a plain one."""

    asking: AttentionDecoder
    cross: Mechanism


class AlignmentStep(NamedTuple):
    """Where one position looked, and what the alignment remembers of it."""

    weights: Tensor  # (B, S)
    state: AlignmentState


class RNNLayer(Block):
    """A recurrence; in a decoder it starts from a summary of the memory, and may attend to it."""

    kind: ClassVar[type[RNN]]
    overridable = RNNOptions.overridable
    supports_compile = False  # a loop over positions

    def __init__(
        self,
        *,
        recurrence: RNN | None,  # None where there is an attention, which has it
        attention: DecoderAttention | None,
        residual: Residual,
        summary: MemorySummary | None,
        memory_width: int | None,
        initial_cell: bool = False,
        reverse: bool = False,
    ) -> None:
        super().__init__()
        self.residual = residual
        self.final_norm = residual.final_norm
        self.reverse = reverse
        self.has_cross = attention is not None
        if attention is not None:
            self.asking, self.cross = attention
        else:
            self.recurrence = recurrence
        self.summary = summary
        if summary is not None and memory_width is not None:
            reader, inputs = (
                self._rnn(),
                summary(torch.zeros(1, 1, memory_width, device="cpu"), None).size(1),
            )
            self.initial = nn.Linear(inputs, reader.layers * reader.width)
            if initial_cell:
                self.initial_cell = nn.Linear(inputs, reader.layers * reader.width)

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
    ) -> RNNLayer:
        """Build a layer, or several stacked as one.

        `attention` is the name of a score, or of an alignment with the score of its paper; `residual_connection=false` leaves residual and norm out.
        """
        config, memory_width = build_context.config, build_context.memory_width
        found = None
        if attention != "none" and memory_width is not None:
            widths = {
                "query_width": config.width,
                "key_width": memory_width,
                "score_width": config.width,
            }
            score, aligned = resolve_attention(attention, alignment)
            asked = {
                "radius": radius,
                "chunk_size": chunk_size,
                "base_alignment": SmoothedSoftmax() if smoothing else None,
                "loss_weight": coverage_loss_weight,
            }
            own = {
                name: value for name, value in asked.items() if value
            }  # what is not asked for is as the alignment has it
            cross = Mechanism(
                catalogue("score").load(score)(**widths),
                catalogue("alignment").load(aligned)(**widths, **own),
            )
            sizes = {"memory_width": memory_width, "layers": layers}
            found = DecoderAttention(
                RNN_DECODERS[decoder].build(
                    cls.kind,
                    config.width,
                    **sizes,
                    input_feeding=input_feeding,
                    dropout=config.dropout,
                ),
                cross,
            )
        plain = (
            None
            if found
            else cls.kind(config.width, config.width, layers=layers, dropout=config.dropout)
        )
        return cls(
            recurrence=plain,
            attention=found,
            residual=_build_residual(build_context, residual_connection),
            summary=MEMORY_SUMMARIES.get(initial_state) if memory_width is not None else None,
            memory_width=memory_width,
            initial_cell=initial_cell,
            reverse=reverse,
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once."""
        _reject_segments(context)
        if context.memory is None:
            recurrence, sublayer_input = (
                self._rnn_without_attention(),
                self.residual.prepare_input(x),
            )
            sublayer_output = (
                recurrence.run_reversed(sublayer_input, context.mask)
                if self.reverse
                else recurrence.run_forward(sublayer_input)
            )
            return self.residual.add_output(x, sublayer_output)
        if self.has_cross and self.training and self.cross.alignment.has_loss:
            alignment_steps: list[AlignmentStep] = []
            with merge_records(self.cross):
                sublayer_output, _ = self._run_attention_decoder(
                    self.residual.prepare_input(x), self.start(context), alignment_steps
                )
            self._add_losses(alignment_steps, context)
            return self.residual.add_output(x, sublayer_output)
        if (
            self.has_cross
            and not self.asking.input_feeding
            and isinstance(self.asking, LuongDecoder)
        ):
            sublayer_input = self.residual.prepare_input(x)
            hidden = self.asking.recurrence.run(
                sublayer_input, self._initial_state(context.memory)
            ).output
            values = context.memory.values
            with merge_records(self.cross):
                attended = self.cross(
                    query=hidden, key=values, value=values, mask=context.memory.mask
                )
            return self.residual.add_output(x, self.asking.combine(hidden, attended.context))
        return self.extend(x, self.start(context)).output

    def start(self, context: ForwardContext) -> DecoderState:
        """Stand before the first position, with the memory's keys prepared once."""
        memory = context.memory
        assert memory is not None, "a translator's decoder starts from a memory"
        recurrent = self._initial_state(memory)
        if not self.has_cross:
            # Nothing is read again, but rows must still know their sentence: an empty tensor for each.
            return DecoderState(
                recurrent=recurrent, memory={"sentence": memory.values.new_empty(memory.rows, 1, 0)}
            )
        prepared = self.cross.prepare(key=memory.values, value=memory.values, mask=memory.mask)
        if self.asking.input_feeding:
            recurrent["previous_output"] = memory.values.new_zeros(memory.rows, self.asking.width)
        recurrent |= {
            ALIGNMENT_PREFIX + name: tensor for name, tensor in self.cross.start(prepared).items()
        }
        return DecoderState(
            recurrent=recurrent,
            memory={"key": prepared.key, "value": prepared.value, "mask": prepared.mask},
        )

    def extend(self, x: Tensor, state: DecoderState) -> ExtendOutput:
        """Take T more positions (B, T, D)."""
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
        """Take positions (B, T, D) one after another, each with its question to the memory; `told` collects where they looked."""
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

        def attend(query: Tensor) -> Tensor:
            nonlocal aligned
            attended, aligned = self.cross.step(query.unsqueeze(1), prepared, aligned)
            if alignment_steps is not None:
                alignment_steps.append(AlignmentStep(attended.weights.squeeze(1), aligned))
            return attended.context.squeeze(1)

        output, own = self.asking.run(x, own, attend)
        return output, own | {ALIGNMENT_PREFIX + name: tensor for name, tensor in aligned.items()}

    def _add_losses(self, alignment_steps: list[AlignmentStep], context: ForwardContext) -> None:
        """Add what the alignment trains with, over the positions that are not padding; choices wait for their reward."""
        alignment = self.cross.alignment

        def real(values: list[Tensor]) -> Tensor:
            stacked = torch.stack(values, dim=1)  # (B, T)
            return stacked if context.mask is None else stacked.masked_fill(~context.mask, 0.0)

        losses = [
            loss
            for weights, state in alignment_steps
            if (loss := alignment.step_loss(weights, state)) is not None
        ]
        if losses:
            context.add_loss(alignment.loss_name, real(losses).sum())
        if isinstance(alignment, ReinforceAlignment):
            alignment.store_log_probs(
                real([alignment.log_prob(state) for _, state in alignment_steps]).sum(dim=1)
            )

    def _rnn_without_attention(self) -> RNN:
        """Find the recurrence of a layer that does not attend."""
        assert isinstance(self.recurrence, RNN), (
            "a layer that does not attend must have a recurrence"
        )
        return self.recurrence

    def _rnn(self) -> AttentionDecoder | RNN:
        """Find what reads the positions."""
        return self.asking if self.has_cross else self._rnn_without_attention()

    def _initial_state(self, memory: Memory) -> RNNState:
        r"""Return the first states, projected from a summary h of the memory.

        .. math:: s_0 = \tanh(W_s h), \quad c_0 = \tanh(W_c h)

        The first is Bahdanau et al. (2015), appendix A.2.2; both, for an LSTM whose `initial_cell` is asked for, Xu et al. (2015).
        """
        recurrent = self._rnn().zero_state(memory.values)
        if self.summary is not None:
            summary = self.summary(memory.values, memory.mask)
            recurrent["hidden"] = torch.tanh(self.initial(summary)).view_as(recurrent["hidden"])
            if hasattr(self, "initial_cell"):
                recurrent["cell"] = torch.tanh(self.initial_cell(summary)).view_as(
                    recurrent["cell"]
                )
        return recurrent


class LSTMLayer(RNNLayer):
    """Long short-term memory as a block: `lstm` in a configuration."""

    kind = LSTM


class GRULayer(RNNLayer):
    """Gated recurrent units as a block: `gru` in a configuration."""

    kind = GRU


class BidirectionalRNNLayer(Block):
    """One recurrence from each end of the source."""

    kind: ClassVar[type[RNN]]
    overridable = BidirectionalRNNOptions.overridable
    supports_compile = False  # PyTorch's kernels, which a compiler leaves as they are

    def __init__(self, *, sides: BidirectionalRNN, residual: Residual) -> None:
        super().__init__()
        self.sides, self.residual = sides, residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(
        cls, build_context: BuildContext, residual_connection: bool = True
    ) -> BidirectionalRNNLayer:
        """Build an encoder's layer; `residual_connection=false` leaves residual and norm out."""
        width = build_context.config.width
        ahead, back = (cls.kind(width, width // 2) for _ in range(2))
        return cls(
            sides=BidirectionalRNN(ahead, back),
            residual=_build_residual(build_context, residual_connection),
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Change every position of (B, T, D) at once."""
        _reject_segments(context)
        return self.residual.add_output(x, self.sides(self.residual.prepare_input(x), context.mask))


class BiLSTMLayer(BidirectionalRNNLayer):
    """Long short-term memories from both ends: `bilstm` in a configuration."""

    kind = LSTM


class BiGRULayer(BidirectionalRNNLayer):
    """Gated recurrent units from both ends: `bigru` in a configuration."""

    kind = GRU


def _build_residual(build_context: BuildContext, residual_connection: bool) -> Residual:
    """Build the way around a layer."""
    config = build_context.config
    kind = catalogue("residual").load(config.residual) if residual_connection else NoResidual
    found = kind(
        catalogue("norm").load(config.norm)(config.width, config.norm_epsilon),
        dropout=config.dropout,
    )
    assert isinstance(found, Residual), "a residual wiring must be a Residual"
    return found


def _reject_segments(context: ForwardContext) -> None:
    """Refuse rows of several sentences, across whose borders a recurrence would remember."""
    if context.segment_ids is not None:
        raise DragomanError(
            "a recurrent block must be given one sentence a row",
            found=f"segments of shape {tuple(context.segment_ids.shape)}",
            fix="do not pack sentences, or use blocks of attention",
        )
