"""An ensemble: several models decoded as one, by the mean of their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class EnsembleState:
    """The decoder states of the members, row by row of the same hypotheses."""

    members: tuple[Any, ...]

    @property
    def device(self) -> torch.device:
        """The device of the first member; tokens and logits are there."""
        device: torch.device = self.members[0].device
        return device

    def select(self, rows: Tensor) -> EnsembleState:
        """Return the state of these rows, in this order."""
        return EnsembleState(tuple(each.select(rows) for each in self.members))

    def reorder(self, rows: Tensor) -> EnsembleState:
        """Return the state of these rows, each of the same sentence as the row that it replaces."""
        return EnsembleState(tuple(each.reorder(rows) for each in self.members))

    def keep(self, sentences: Tensor) -> EnsembleState:
        """Return the state of these sentences."""
        return EnsembleState(tuple(each.keep(sentences) for each in self.members))


class EnsembleDecoder:
    r"""Models with the same vocabularies that a search sees as one.

    .. math:: \log p(y_t) = \frac{1}{N} \sum_n \log p_n(y_t) - \log Z_t

    The searches normalize: this is the geometric mean of the members' distributions. The members
    may be of different architectures.
    """

    def __init__(self, models: Sequence[Any]) -> None:
        self.models = tuple(models)

    def encode(self, src: Tensor, mask: Tensor | None = None) -> tuple[Any, ...]:
        """Return each member's memory of the sources (B, S)."""
        return tuple(model.encode(src, mask) for model in self.models)

    def start(self, memory: Sequence[Any]) -> EnsembleState:
        """Return the state before the first token."""
        return EnsembleState(
            tuple(model.start(each) for model, each in zip(self.models, memory, strict=True))
        )

    def step(self, tokens: Tensor, state: EnsembleState) -> tuple[Tensor, EnsembleState]:
        """Append one token per row (B,); return the mean log-probabilities (B, V) and the state."""
        total, states = None, list[Any]()
        for model, member_state in zip(self.models, state.members, strict=True):
            logits, new_state = model.step(tokens, member_state)
            log_probs = logits.float().log_softmax(dim=-1)
            total = log_probs if total is None else total.add_(log_probs)
            states.append(new_state)
        assert total is not None, "an ensemble has members"
        return total.div_(len(self.models)), EnsembleState(tuple(states))
