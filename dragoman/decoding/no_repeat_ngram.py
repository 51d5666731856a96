"""No n-gram of tokens twice in one output, as in fairseq and Hugging Face's `generate`.

It is one of the token constraints that `ConstrainedRows` (`constrained_logits.py`) applies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class NoRepeatNgram:
    """Forbids each token that would complete an n-gram which the output holds already.

    A forced prefix may repeat itself: nothing is forbidden before it ends. EOS is never forbidden.
    """

    needs_check = False  # a token that is allowed never leads to a dead end: EOS may follow
    reason = "no_repeat"

    def __init__(self, size: int, vocab_size: int, *, prefix: Sequence[int] = ()) -> None:
        assert size >= 1, f"an n-gram has at least one token; found {size}"
        self._size, self._vocab_size, self._free = size, vocab_size, len(prefix)

    def start(self) -> tuple[int, ...]:
        """Return the state before the first token: the tokens so far."""
        return ()

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        """Return the state after a token."""
        return (*state, token)

    def allowed(self, state: tuple[int, ...], remaining: int) -> NDArray[np.bool_]:
        """Return which tokens may follow, (V,)."""
        allowed = np.ones(self._vocab_size, dtype=bool)
        if len(state) >= self._free:
            allowed[repeated_tokens(state, self._size)] = False
        return allowed

    def can_complete(self, state: tuple[int, ...], token: int, remaining: int) -> bool:
        """Whether a completion is left after a token: EOS always is."""
        return True


def repeated_tokens(tokens: Sequence[int], size: int) -> list[int]:
    """Return the tokens that would complete an n-gram of this size for the second time."""
    last = tuple(tokens[len(tokens) - size + 1 :]) if len(tokens) >= size - 1 else None
    return sorted(
        {
            tokens[at + size - 1]
            for at in range(len(tokens) - size + 1)
            if tuple(tokens[at : at + size - 1]) == last
        }
    )
