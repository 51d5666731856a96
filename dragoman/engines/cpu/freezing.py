"""Freezing a model: which form it gets, and for int8 the ranges of numbers that its products meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dragoman.decoding.packing import pack_sources
from dragoman.engines.cpu.building import kernels
from dragoman.engines.cpu.compiled import Compiled
from dragoman.engines.cpu.frozen import Frozen, freezing_refusal
from dragoman.engines.cpu.laying import laying_refusal
from dragoman.engines.cpu.products import Product, Range, int8, int8_refusal, packed, plain
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import BOS, SPECIALS

FLOAT32, INT8, FLOAT16, BFLOAT16 = "float32", "int8", "float16", "bfloat16"
HALVES = (FLOAT16, BFLOAT16)  # on a GPU
PRECISIONS = (FLOAT32, INT8, *HALVES)

Pair = tuple[Sequence[int], Sequence[int]]  # pieces of a source and of an output to it

_DRAWN, _LENGTH = 16, 16  # sentences of drawn pieces, and their pieces


class Frost(NamedTuple):
    """A model made ready, or why there is none in this precision; then it is one in float32, if there is one at all."""

    frozen: Frozen | Compiled | None
    refusal: str = ""


def freeze(model: EncoderDecoder, precision: str, pairs: Sequence[Pair] = ()) -> Frost:
    """Make the form that runs on a CPU, in compiled kernels where it can; `pairs` are sentences whose numbers int8 is fitted to."""
    refusal = freezing_refusal(model)
    if refusal:
        return Frost(None, refusal)
    compiled = None if laying_refusal(model) else kernels()
    if precision == INT8:
        refusal = int8_refusal()
        if compiled is not None and compiled.dragoman_has_int8():
            return Frost(Compiled(model, compiled, iter(_ranges(model, pairs))))
        if not refusal:
            ranges = iter(_ranges(model, pairs))
            return Frost(Frozen(model, lambda weight, bias, *, relu=False: int8(weight, bias, next(ranges), relu=relu)))
    return Frost(Frozen(model, packed) if compiled is None else Compiled(model, compiled), refusal)


def _ranges(model: EncoderDecoder, pairs: Sequence[Pair]) -> list[Range]:
    """See what numbers each product meets, in the order of their making."""
    watching = _Watching()
    frozen = Frozen(model, watching)
    vocabularies = [len(model._embedding(side).weight) for side in ("src", "tgt")]
    for src, tgt in [*pairs, *_drawn(*vocabularies)]:
        _run(frozen, src, tgt)
    return watching.seen


class _Watching:
    """Makes plain products, and notes the range of what each of them meets in the order of their making."""

    def __init__(self) -> None:
        self.seen: list[Range] = []

    def __call__(self, weight: Tensor, bias: Tensor | None, *, relu: bool = False) -> Product:
        """Make one."""
        number, multiply = len(self.seen), plain(weight, bias, relu=relu)
        self.seen.append(Range(0.0, 0.0))

        def watched(x: Tensor) -> Tensor:
            low, high = self.seen[number]
            met = [each for each in (float(x.min()), float(x.max())) if math.isfinite(each)]  # overflow has no scale
            self.seen[number] = Range(min([low, *met]), max([high, *met]))
            return multiply(x)

        return watched


@torch.inference_mode()
def _run(frozen: Frozen, src: Sequence[int], tgt: Sequence[int]) -> None:
    """Send a source and its output through every product."""
    state = frozen.start(frozen.encode(*pack_sources([src])))
    for token in [BOS, *tgt]:
        _, state = frozen.step(torch.tensor([token]), state)


def _drawn(src_vocabulary: int, tgt_vocabulary: int) -> list[Pair]:
    """Draw sentences of any pieces, always the same: a bundle has few of its own, and every piece may come up."""
    generator = torch.Generator().manual_seed(0)

    def draw(vocabulary: int) -> list[int]:
        return torch.randint(min(len(SPECIALS), vocabulary - 1), vocabulary, (_LENGTH,), generator=generator).tolist()

    return [(draw(src_vocabulary), draw(tgt_vocabulary)) for _ in range(_DRAWN)]
