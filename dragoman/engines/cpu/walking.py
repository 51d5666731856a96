"""A greedy search in few calls: the kernels take the largest logit of each row and go on by themselves, until rows end or room runs out.

Between two steps of a small model, Python would need a tenth of a step's time in float32 and a fifth in int8.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dragoman.attention.positions import Positions
from dragoman.decoding.stepping import not_finite
from dragoman.engines.cpu.laying import Laid
from dragoman.engines.cpu.recalling import FIRST, Recall
from dragoman.engines.cpu.screening import Screening
from dragoman.engines.cpu.structures import Step, Taken, Walk
from dragoman.errors import DragomanError
from dragoman.text.specials import BOS, EOS, SPECIALS

MORE = 4  # pieces that an output may have more than its source before a search makes room again


class Followed(NamedTuple):
    """What each row took, step by step."""

    tokens: NDArray[np.int64]  # (N, T), the end among them; -1 where a row took nothing
    logits: NDArray[np.float32]  # (N, T)


class Walker:
    """Follows the largest logit through a model that is laid out."""

    def __init__(self, kernels: ctypes.CDLL, laid: Laid, places: Positions, *, screens: bool) -> None:
        self._kernels, self._laid, self._places = kernels, laid, places
        self._screens = screens and bool(kernels.dragoman_has_int8())
        self._laying = threading.Lock()
        self.screening: Screening | None = None

    def can(self, state: Recall) -> bool:
        """Say whether pieces are embedded by a table alone, and all of them may be used."""
        return state.short is None and self._laid.model.table is not None

    def follow(self, state: Recall, limits: NDArray[np.int64], *, at_least: int) -> Followed:
        """Go on from a fresh state; before `at_least` pieces no row ends, and past its limit each takes nothing but its end."""
        assert self.can(state), "who cannot walk takes single steps"
        count, first = len(limits), 0
        rows, tokens = np.arange(count), np.full(count, BOS)
        found = [Followed(np.empty((0, count), dtype=np.int64), np.empty((0, count), dtype=np.float32))]
        while rows.size:
            room = FIRST if first else max(FIRST, int(state.lengths.max()) + MORE)
            most, places = self._vectors(first, min(room, int(limits[rows].max()) + 1 - first))  # one more for the end
            state = state.with_room(most)
            state = replace(state, caches=state.caches.copy(), firsts=state.firsts.copy(), lengths=state.lengths.copy())
            new = Followed(np.full((most, count), -1), np.zeros((most, count), dtype=np.float32))
            walk = Walk(limits=limits.ctypes.data, rows=rows.ctypes.data, ids=new.tokens.ctypes.data, logits=new.logits.ctypes.data)
            walk.all, walk.first, walk.most, walk.at_least, walk.end = count, first, most, at_least, EOS
            walk.places = None if places is None else places.data_ptr()
            walk.step, _held = self._before(state, tokens, most)
            living = self._go(walk)
            found.append(new)
            rows, tokens = rows[:living], tokens[:living]
            state = replace(state, **{each: getattr(state, each)[:living] for each in ("caches", "firsts", "lengths")})
            state, first = replace(state, filled=state.filled + most), first + most
        return Followed(*(np.concatenate(each).T for each in zip(*found, strict=True)))

    def _vectors(self, first: int, most: int) -> tuple[int, Tensor | None]:
        """Give what is added to embeddings at so many places, or at fewer where positions end before outputs have to."""
        try:
            vectors = self._places.vectors(first, most)
        except DragomanError:
            if most == 1:
                raise
            return self._vectors(first, 1)
        return most, None if vectors is None else vectors.float().contiguous()

    def _before(self, state: Recall, tokens: NDArray[np.int64], most: int) -> tuple[Step, Any]:
        """Say where the first step begins, and give what must live as long as the walk. Rows without beams have one past: every slot."""
        past = np.arange(state.filled + most, dtype=np.int32)
        values, ids = np.empty(tokens.size, dtype=np.float32), np.empty(tokens.size, dtype=np.int64)
        taken = Taken(values=values.ctypes.data, ids=ids.ctypes.data, few=len(SPECIALS), width=self._laid.pieces)
        step = state.as_step(tokens=tokens.ctypes.data, rows=tokens.size, past=past.ctypes.data, steps=state.filled + 1, taken=taken)
        return step, (past, values, ids)

    def _go(self, walk: Walk) -> int:
        """Walk, and say how many rows live on."""
        screening = self._screen()
        walk.step.screen = None if screening is None else screening.address
        living: int = self._kernels.dragoman_walk(ctypes.byref(self._laid.model), ctypes.byref(walk))
        if living < 0:
            raise not_finite(-1 - living)
        if screening is not None:
            screening.note(walk.stepped, walk.settled)
        return living

    def _screen(self) -> Screening | None:
        """Give what finds the largest logit quickly, laid out when it is first wanted; None where that does not pay."""
        if not self._screens:
            return None
        with self._laying:
            self.screening = self.screening or Screening(self._laid.screen())
        return self.screening if self.screening.pays else None
