"""Recurrent blocks: `lstm` and `gru` in encoders and decoders, `bilstm` and `bigru` in encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dragoman.attention.alignments import AlignmentState, Smoothed
from dragoman.attention.mechanism import Mechanism, Prepared
from dragoman.attention.recording import one_note
from dragoman.attention.reinforced import Reinforced
from dragoman.errors import DragomanError
from dragoman.layers.asking import QUERIES, AskAfter, Asking
from dragoman.layers.recurrent import GRU, LSTM, SUMMARIES, Bare, Carried, Recurrence, Summary, TwoSided
from dragoman.layers.residual import Residual
from dragoman.models.blocks import Block, Extended, Place
from dragoman.models.context import Context, Memory
from dragoman.models.options import RecurrentOptions, TwoSidedOptions, pair_of
from dragoman.models.state import State
from dragoman.registry import catalogue

ALIGNED = "alignment."  # stands before the names of what an alignment carries


class Attention(NamedTuple):
    """What an attentive layer adds to a plain one."""

    asking: Asking
    cross: Mechanism


class Told(NamedTuple):
    """Where one position looked, and what the alignment remembers of it."""

    weights: Tensor  # (B, S)
    state: AlignmentState


class RecurrentLayer(Block):
    """A recurrence; in a decoder it starts from a summary of the memory, and may attend to it."""

    kind: ClassVar[type[Recurrence]]
    overrides = RecurrentOptions.overrides
    compiles = False  # a loop over positions

    def __init__(
        self,
        *,
        recurrence: Recurrence | None,  # None where there is an attention, which has it
        attention: Attention | None,
        residual: Residual,
        summary: Summary | None,
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
            reader, inputs = self._reader(), summary(torch.zeros(1, 1, memory_width, device="cpu"), None).size(1)
            self.initial = nn.Linear(inputs, reader.layers * reader.width)
            if initial_cell:
                self.initial_cell = nn.Linear(inputs, reader.layers * reader.width)

    @classmethod
    def build(
        cls,
        place: Place,
        attention: str = "none",
        alignment: str = "softmax",
        query: str = "after",
        feeding: bool = False,
        layers: int = 1,
        initial: str = "mean",
        reverse: bool = False,
        skip: bool = True,
        reach: int = 0,
        chunk: int = 0,
        smoothing: bool = False,
        penalty: float = 0.0,
        initial_cell: bool = False,
    ) -> RecurrentLayer:
        """Build a layer, or several stacked as one.

        `attention` is the name of a score, or of an alignment with the score of its paper; `skip=false` leaves residual and norm out.
        """
        config, memory_width = place.config, place.memory_width
        found = None
        if attention != "none" and memory_width is not None:
            widths = {"query_width": config.width, "key_width": memory_width, "score_width": config.width}
            score, aligned = pair_of(attention, alignment)
            asked = {"reach": reach, "chunk": chunk, "inner": Smoothed() if smoothing else None, "weight": penalty}
            own = {name: value for name, value in asked.items() if value}  # what is not asked for is as the alignment has it
            cross = Mechanism(catalogue("score").load(score)(**widths), catalogue("alignment").load(aligned)(**widths, **own))
            sizes = {"memory_width": memory_width, "layers": layers}
            found = Attention(QUERIES[query].build(cls.kind, config.width, **sizes, feeding=feeding, dropout=config.dropout), cross)
        plain = None if found else cls.kind(config.width, config.width, layers=layers, dropout=config.dropout)
        return cls(
            recurrence=plain,
            attention=found,
            residual=_residual(place, skip),
            summary=SUMMARIES.get(initial) if memory_width is not None else None,
            memory_width=memory_width,
            initial_cell=initial_cell,
            reverse=reverse,
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) at once."""
        _refuse_segments(context)
        if context.memory is None:
            recurrence, entered = self._plain(), self.residual.enter(x)
            change = recurrence.sweep_back(entered, context.mask) if self.reverse else recurrence.sweep(entered)
            return self.residual.leave(x, change)
        if self.has_cross and self.training and self.cross.alignment.adds_loss:
            told: list[Told] = []
            with one_note(self.cross):
                change, _ = self._ask(self.residual.enter(x), self.start(context), told)
            self._add_losses(told, context)
            return self.residual.leave(x, change)
        if self.has_cross and not self.asking.feeding and isinstance(self.asking, AskAfter):
            entered = self.residual.enter(x)
            hidden = self.asking.recurrence.run(entered, self._begin(context.memory)).output
            values = context.memory.values
            with one_note(self.cross):
                attended = self.cross(query=hidden, key=values, value=values, mask=context.memory.mask)
            return self.residual.leave(x, self.asking.read(hidden, attended.context))
        return self.extend(x, self.start(context)).output

    def start(self, context: Context) -> State:
        """Stand before the first position, with the memory's keys prepared once."""
        memory = context.memory
        assert memory is not None, "a translator's decoder starts from a memory"
        carried = self._begin(memory)
        if not self.has_cross:
            # Nothing is read again, but rows must still know their sentence: an empty tensor for each.
            return State(carried=carried, memory={"sentence": memory.values.new_empty(memory.rows, 1, 0)})
        prepared = self.cross.prepare(key=memory.values, value=memory.values, mask=memory.mask)
        if self.asking.feeding:
            carried["fed"] = memory.values.new_zeros(memory.rows, self.asking.width)
        carried |= {ALIGNED + name: tensor for name, tensor in self.cross.start(prepared).items()}
        return State(carried=carried, memory={"key": prepared.key, "value": prepared.value, "mask": prepared.mask})

    def extend(self, x: Tensor, state: State) -> Extended:
        """Take T more positions (B, T, D)."""
        entered = self.residual.enter(x)
        if self.has_cross:
            with one_note(self.cross):
                change, carried = self._ask(entered, state)
        else:
            change, carried = self._plain().run(entered, state.carried)
        return Extended(self.residual.leave(x, change), replace(state.advance(x.size(1)), carried=carried))

    def _ask(self, x: Tensor, state: State, told: list[Told] | None = None) -> tuple[Tensor, Carried]:
        """Take positions (B, T, D) one after another, each with its question to the memory; `told` collects where they looked."""
        prepared = Prepared(*(state.memory[name] for name in ("key", "value", "mask")))
        aligned = {name.removeprefix(ALIGNED): tensor for name, tensor in state.carried.items() if name.startswith(ALIGNED)}
        own = {name: tensor for name, tensor in state.carried.items() if not name.startswith(ALIGNED)}

        def look(query: Tensor) -> Tensor:
            nonlocal aligned
            attended, aligned = self.cross.step(query.unsqueeze(1), prepared, aligned)
            if told is not None:
                told.append(Told(attended.weights.squeeze(1), aligned))
            return attended.context.squeeze(1)

        output, own = self.asking.run(x, own, look)
        return output, own | {ALIGNED + name: tensor for name, tensor in aligned.items()}

    def _add_losses(self, told: list[Told], context: Context) -> None:
        """Add what the alignment trains with, over the positions that are not padding; choices wait for their reward."""
        alignment = self.cross.alignment

        def real(values: list[Tensor]) -> Tensor:
            stacked = torch.stack(values, dim=1)  # (B, T)
            return stacked if context.mask is None else stacked.masked_fill(~context.mask, 0.0)

        penalties = [penalty for weights, state in told if (penalty := alignment.penalty(weights, state)) is not None]
        if penalties:
            context.add_loss(alignment.loss_name, real(penalties).sum())
        if isinstance(alignment, Reinforced):
            alignment.hold(real([alignment.chance(state) for _, state in told]).sum(dim=1))

    def _plain(self) -> Recurrence:
        """Find the recurrence of a layer that does not attend."""
        assert isinstance(self.recurrence, Recurrence), "a layer that does not attend must have a recurrence"
        return self.recurrence

    def _reader(self) -> Asking | Recurrence:
        """Find what reads the positions."""
        return self.asking if self.has_cross else self._plain()

    def _begin(self, memory: Memory) -> Carried:
        r"""Return the first states, projected from a summary h of the memory.

        .. math:: s_0 = \tanh(W_s h), \quad c_0 = \tanh(W_c h)

        The first is Bahdanau et al. (2015), appendix A.2.2; both, for an LSTM whose `initial_cell` is asked for, Xu et al. (2015).
        """
        carried = self._reader().begin(memory.values)
        if self.summary is not None:
            summary = self.summary(memory.values, memory.mask)
            carried["hidden"] = torch.tanh(self.initial(summary)).view_as(carried["hidden"])
            if hasattr(self, "initial_cell"):
                carried["cell"] = torch.tanh(self.initial_cell(summary)).view_as(carried["cell"])
        return carried


class LSTMLayer(RecurrentLayer):
    """Long short-term memory as a block: `lstm` in a configuration."""

    kind = LSTM


class GRULayer(RecurrentLayer):
    """Gated recurrent units as a block: `gru` in a configuration."""

    kind = GRU


class TwoSidedLayer(Block):
    """One recurrence from each end of the source."""

    kind: ClassVar[type[Recurrence]]
    overrides = TwoSidedOptions.overrides
    compiles = False  # PyTorch's kernels, which a compiler leaves as they are

    def __init__(self, *, sides: TwoSided, residual: Residual) -> None:
        super().__init__()
        self.sides, self.residual = sides, residual
        self.final_norm = residual.final_norm

    @classmethod
    def build(cls, place: Place, skip: bool = True) -> TwoSidedLayer:
        """Build an encoder's layer; `skip=false` leaves residual and norm out."""
        width = place.config.width
        ahead, back = (cls.kind(width, width // 2) for _ in range(2))
        return cls(sides=TwoSided(ahead, back), residual=_residual(place, skip))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Change every position of (B, T, D) at once."""
        _refuse_segments(context)
        return self.residual.leave(x, self.sides(self.residual.enter(x), context.mask))


class BiLSTMLayer(TwoSidedLayer):
    """Long short-term memories from both ends: `bilstm` in a configuration."""

    kind = LSTM


class BiGRULayer(TwoSidedLayer):
    """Gated recurrent units from both ends: `bigru` in a configuration."""

    kind = GRU


def _residual(place: Place, skip: bool) -> Residual:
    """Build the way around a layer."""
    config = place.config
    kind = catalogue("residual").load(config.residual) if skip else Bare
    found = kind(catalogue("norm").load(config.norm)(config.width, config.norm_epsilon), dropout=config.dropout)
    assert isinstance(found, Residual), "a residual wiring must be a Residual"
    return found


def _refuse_segments(context: Context) -> None:
    """Refuse rows of several sentences, across whose borders a recurrence would remember."""
    if context.segments is not None:
        raise DragomanError(
            "a recurrent block must be given one sentence a row",
            found=f"segments of shape {tuple(context.segments.shape)}",
            fix="do not pack sentences, or use blocks of attention",
        )
