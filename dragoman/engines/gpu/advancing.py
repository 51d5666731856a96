"""One step of a beam search's rule, from logits to new beams: by two launches where Triton's kernels run, else by `board.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dragoman.decoding.board import SPARE, Beams, Board
from dragoman.decoding.largest import largest
from dragoman.engines.gpu.room import Room
from dragoman.kernels.guarding import Guarded
from dragoman.kernels.ranking import Rules, rank, restricted
from dragoman.text.specials import BOS, EOS, PAD, UNK

RULE = Guarded("the beam's rule")
MOST_DONE_AT_ONCE = 8  # beams of a sentence: one warp holds all their candidates, and the compiler writes out a round for each


class Advancer:
    """Chooses what comes next for the beams in a room, and writes it there and on a board."""

    def __init__(self, room: Room, device: torch.device) -> None:
        self._room = room
        self.at_least = torch.zeros((), dtype=torch.long, device=device)  # tokens before an end is allowed
        self._compared: set[tuple[int, int]] = set()  # beams and n best that both ways were taken for once

    def advance(self, board: Board, count: int, logits: Tensor, bias: Tensor | None) -> None:
        """Take one step of the first `count` sentences by logits (N * K, V), to which a bias (V,) is still to be added."""
        rules = Rules((PAD, BOS, UNK), EOS, board.step, self.at_least)
        ranked = rank(logits, min(board.size, logits.size(1)), rules, bias=bias)
        if ranked is None:
            logits = logits if bias is None else logits.add_(bias)
            scores = restricted(logits.log_softmax(dim=-1), rules)
            log_probs, ids = largest(scores, min(board.size + SPARE, logits.size(1)))
        else:
            log_probs, ids = ranked
        if not self._by_kernel(board, count, log_probs, ids):
            self._plainly(board, count, log_probs, ids)

    def _plainly(self, board: Board, count: int, log_probs: Tensor, ids: Tensor) -> None:
        """Go by the rule as it is written down."""
        beams = self._room.beams(count)
        new, parents = board.choose(beams, log_probs, ids)
        self._room.follow(count, parents)
        for place, made in zip(beams, new, strict=True):
            if place is not made:
                place.copy_(made)

    def _by_kernel(self, board: Board, count: int, log_probs: Tensor, ids: Tensor) -> bool:
        """Go by the kernel, and say whether that could be done."""
        divisors = board.divisors
        if divisors is None or board.size > MOST_DONE_AT_ONCE or not RULE.tries(log_probs):
            return False
        beams, seen = self._room.beams(count), self._room.table(count)

        def action() -> None:
            from dragoman.kernels import beam_rule

            living = beam_rule.Living(*beams, seen)
            kept = beam_rule.Kept(*_kept(board))
            beam_rule.advance(log_probs, ids, living, kept, divisors, end=EOS, nbest=board.nbest)
            board.step.add_(1)

        kind = (board.size, board.nbest)
        if kind in self._compared or (log_probs.is_cuda and torch.cuda.is_current_stream_capturing()):
            return RULE.attempt(action)
        changed = (*beams, seen, *_kept(board))
        before = [each.clone() for each in changed]
        if not RULE.attempt(action):
            return False
        found = [each.clone() for each in (*beams, seen)]
        for place, was in zip(changed, before, strict=True):
            place.copy_(was)
        self._plainly(board, count, log_probs, ids)
        if not _same(found, beams, seen):
            RULE.give_up(ArithmeticError("it differs from what it replaces"))
        self._compared.add(kind)
        return True


def _kept(board: Board) -> tuple[Tensor, ...]:
    """Name what a step reads and writes of a board."""
    return (
        board.step, board.sound, board.limits, board.places, board.finished, board.cut, board.cut_after,
        board.parents, board.tokens, board.log_probs,
    )  # fmt: skip


def _same(found: Sequence[Tensor], beams: Beams, seen: Tensor) -> bool:
    """Say whether what goes on is the same."""
    sentences, tokens, totals, alive, table = found
    going = beams.alive.unsqueeze(1)
    return bool(
        torch.equal(sentences, beams.sentences)
        and torch.equal(alive, beams.alive)
        and torch.equal(tokens.masked_fill(~going, 0), beams.tokens.masked_fill(~going, 0))
        and torch.equal(totals.masked_fill(~going, 0.0), beams.totals.masked_fill(~going, 0.0))
        and torch.equal(table.masked_fill(~going.unsqueeze(2), 0.0), seen.masked_fill(~going.unsqueeze(2), 0.0))
    )
