"""Beam search on a GPU whose every step, model and rule together, is one launch.

A step launched kernel by kernel takes the host milliseconds, most of which the GPU stands idle. Here a step of each shape runs once as
it is, is recorded when it comes again, and replayed from then on. The host asks every few steps how many sentences are left, and moves
those that are to the front when a smaller shape will do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dragoman.decoding.board import Board
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.penalties import Penalty
from dragoman.decoding.stepping import not_finite
from dragoman.engines.face import Request
from dragoman.engines.gpu.advancing import Advancer
from dragoman.engines.gpu.laid_out import LaidOut
from dragoman.engines.gpu.room import Room, level, rounded
from dragoman.kernels.capturing import Replay, capturer
from dragoman.text.specials import EOS, PAD

logger = logging.getLogger(__name__)

ASKED_EVERY = 4  # steps
WORTH_MOVING = 0.75  # of the sentences or fewer: then the others are dropped
READ_TOGETHER = 32_768  # padded source positions that go through the encoder at once
MOST_RECORDINGS = 512  # some hundred kilobytes each; beyond that all are made anew


class RecordedBeam:
    """Searches with one model, one batch at a time; beams of one are greedy."""

    def __init__(self, model: LaidOut, *, record: Callable[[Callable[[], None]], Replay] | None = None) -> None:
        self._model, self._room = model, Room(model)
        self._renew = (lambda: capturer(model.device)) if record is None else (lambda: record)
        self._record = self._renew()
        self._recordings: dict[Any, Replay | None] = {}  # None: ran once
        self._boards: dict[tuple[int, int, Penalty], Board] = {}
        self._advancer = Advancer(self._room, model.device)

    @property
    def recordings(self) -> int:
        """Count what is recorded."""
        return sum(each is not None for each in self._recordings.values())

    def forget(self) -> None:
        """Give back all memory but the weights'."""
        self._drop_recordings()
        self._boards.clear()
        self._room.forget()

    def run(self, request: Request, *, size: int, nbest: int, penalty: Penalty) -> list[list[Hypothesis]]:
        """Search for every row, as `Beam` does."""
        order = sorted(range(len(request.sources)), key=lambda row: -len(request.sources[row]))
        limits = np.maximum([request.limits[row] for row in order], 1).astype(np.int64)
        longest = int(limits.max())
        count = level(len(order))
        self._room.lay_out(sentences=count, source=rounded(len(request.sources[order[0]]) + 1), places=rounded(longest + 1), size=size)
        board = self._board(count, size=size, nbest=nbest, penalty=penalty)
        self._read([request.sources[row] for row in order], count)
        self._advancer.at_least.fill_(request.at_least)
        for place, new in zip(self._room.beams(count), board.begin(limits, fan=size, rows=count), strict=True):
            place.copy_(new)
        taken = self._search(board, count, longest)
        found = board.results(len(order), taken)
        return [found[place] for place in np.argsort(order).tolist()]

    def _search(self, board: Board, count: int, longest: int) -> int:
        """Take steps until no sentence goes on, and count them."""
        taken, going = 0, count
        while going:
            self._take(board, count, self._room.reach(taken))
            taken += 1
            if taken % ASKED_EVERY and taken <= longest:
                continue
            going, sound = torch.stack([self._room.beams(count).alive.sum(), board.sound.long()]).tolist()  # waits for the device
            if not sound:
                self._room.forget()  # what is no number must not stay where masks hide it
                raise not_finite(taken - 1)
            smaller = level(max(going, 1))
            if going and smaller <= WORTH_MOVING * count:
                self._drop_done(board, count, smaller, taken)
                count = smaller
        return taken

    def _drop_done(self, board: Board, count: int, smaller: int, taken: int) -> None:
        """Move what goes on to the front; a place that is left over works for nobody."""
        order = torch.sort((~self._room.beams(count).alive).byte(), stable=True).indices[:smaller]
        self._room.keep(order, count, taken)
        beams = self._room.beams(smaller)
        beams.sentences.masked_fill_(~beams.alive, board.sentences)

    def _take(self, board: Board, count: int, read: int) -> None:
        """Take one step: as it is the first time, recorded the second time, replayed from then on."""
        room = self._room
        key = (count, read, room.source, room.places, board.size, board.nbest, board.penalty)
        replay = self._recordings.get(key)
        if replay is None and key in self._recordings and self._record is not None:
            replay = self._recordings[key] = self._recorded(lambda: self._step(board, count, read))
        if replay is not None:
            replay()
            return
        self._step(board, count, read)
        if len(self._recordings) >= MOST_RECORDINGS:
            self._drop_recordings()
        self._recordings[key] = None

    def _recorded(self, action: Callable[[], None]) -> Replay | None:
        """Record an action; where that fails, say so once and never try again."""
        assert self._record is not None, "only where something can record"
        try:
            return self._record(action)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._record = None
            self._recordings.clear()
            logger.warning("steps are launched kernel by kernel, which takes longer: %s", " ".join(str(error).split())[:160])
            return None

    def _step(self, board: Board, count: int, read: int) -> None:
        """Score what comes next, choose, and leave everything ready for the next step."""
        beams = self._room.beams(count)
        logits = self._model.step(beams.tokens, self._room.standing(count, read, board.step))
        self._advancer.advance(board, count, logits, self._model.bias)

    def _board(self, count: int, *, size: int, nbest: int, penalty: Penalty) -> Board:
        """Give the board of a way of searching, a larger one where it is too small; see that what is recorded still holds."""
        way, places = (size, nbest, penalty), self._room.places
        known = self._boards.get(way)
        if known is None or known.sentences < count or known.steps < places:
            if known is not None:
                self._drop_recordings()
            # Twice what is needed: it is small, and what is recorded is lost when it must grow.
            sentences, steps = (2 * count, 2 * places) if known is None else (2 * max(count, known.sentences), 2 * max(places, known.steps))
            known = self._boards[way] = Board(
                sentences=sentences, steps=steps, size=size, nbest=nbest, penalty=penalty, device=self._model.device
            )
        if self._room.grew:
            self._drop_recordings()
            self._room.grew = False
        return known

    def _drop_recordings(self) -> None:
        """Let go of what is recorded; the memory that recordings shared goes with the last of them, and the next need another."""
        self._recordings.clear()
        if self._record is not None:
            self._record = self._renew()

    def _read(self, sources: Sequence[Sequence[int]], count: int) -> None:
        """Encode sources, the longest first, in groups of like lengths; what is left of the room gets sources of nothing but an end."""
        lengths = np.ones(count, dtype=np.int64)
        lengths[: len(sources)] = [len(source) + 1 for source in sources]
        width = self._room.source
        ids = np.full((count, width), PAD, dtype=np.int64)
        ids[np.arange(width) < (lengths - 1)[:, None]] = np.fromiter(chain.from_iterable(sources), np.int64)
        ids[np.arange(count), lengths - 1] = EOS
        device = self._model.device
        packed, sizes = _sent(ids, device), _sent(lengths, device)
        hidden = self._room.hidden(count)
        hidden.zero_().masked_fill_((torch.arange(width, device=device) >= sizes.unsqueeze(1)).view_as(hidden), -torch.inf)
        memory = self._room.memory(count)
        first = 0
        while first < count:
            last, longest = min(count, first + max(1, READ_TOGETHER // int(lengths[first]))), int(lengths[first])
            padded = bool(lengths[last - 1] < longest)
            mask = hidden[first:last, ..., :longest] if padded else None
            memory[first:last, ..., :longest, :].copy_(self._model.encode(packed[first:last, :longest], mask))
            first = last


def _sent(array: Any, device: torch.device) -> Tensor:
    """Copy an array to the device, without waiting for a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
