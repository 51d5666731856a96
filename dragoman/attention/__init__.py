"""Attention to use alone in anybody's PyTorch model: scores, alignments, heads, masks, positions, recording.

Names are fetched when they are asked for, so that reading the catalogue does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dragoman.errors import nearest

if TYPE_CHECKING:
    from dragoman.attention.alignments import Alignment as Alignment
    from dragoman.attention.alignments import Hard as Hard
    from dragoman.attention.alignments import Smoothed as Smoothed
    from dragoman.attention.alignments import Softmax as Softmax
    from dragoman.attention.local import LocalM as LocalM
    from dragoman.attention.local import LocalP as LocalP
    from dragoman.attention.lsh import LSHAttention as LSHAttention
    from dragoman.attention.mechanism import Attended as Attended
    from dragoman.attention.mechanism import Mechanism as Mechanism
    from dragoman.attention.monotonic import Mocha as Mocha
    from dragoman.attention.monotonic import Monotonic as Monotonic
    from dragoman.attention.multihead import CrossAttention as CrossAttention
    from dragoman.attention.multihead import MultiHead as MultiHead
    from dragoman.attention.multihead import SelfAttention as SelfAttention
    from dragoman.attention.pooling import AttentionPooling as AttentionPooling
    from dragoman.attention.pooling import Pooled as Pooled
    from dragoman.attention.pooling import StructuredPooling as StructuredPooling
    from dragoman.attention.pooling import overlap_penalty as overlap_penalty
    from dragoman.attention.positions import Learned as Learned
    from dragoman.attention.positions import Positions as Positions
    from dragoman.attention.positions import Sinusoidal as Sinusoidal
    from dragoman.attention.positions import SinusoidalHalves as SinusoidalHalves
    from dragoman.attention.positions import Within as Within
    from dragoman.attention.recording import Note as Note
    from dragoman.attention.recording import Notes as Notes
    from dragoman.attention.recording import Watched as Watched
    from dragoman.attention.recording import attentions as attentions
    from dragoman.attention.recording import edit as edit
    from dragoman.attention.recording import heads_off as heads_off
    from dragoman.attention.recording import record as record
    from dragoman.attention.relative import BucketBias as BucketBias
    from dragoman.attention.relative import LinearBias as LinearBias
    from dragoman.attention.relative import RelativeKeys as RelativeKeys
    from dragoman.attention.relative import Rotation as Rotation
    from dragoman.attention.relative import SinusoidKeys as SinusoidKeys
    from dragoman.attention.remembering import Coverage as Coverage
    from dragoman.attention.remembering import LocationCumulative as LocationCumulative
    from dragoman.attention.remembering import LocationSensitive as LocationSensitive
    from dragoman.attention.remembering import coverage_loss as coverage_loss
    from dragoman.attention.scores import AdditiveScore as AdditiveScore
    from dragoman.attention.scores import CosineScore as CosineScore
    from dragoman.attention.scores import DotScore as DotScore
    from dragoman.attention.scores import GeneralScore as GeneralScore
    from dragoman.attention.scores import LearnedScaleDotScore as LearnedScaleDotScore
    from dragoman.attention.scores import LocationScore as LocationScore
    from dragoman.attention.scores import NormedAdditiveScore as NormedAdditiveScore
    from dragoman.attention.scores import ScaledDotScore as ScaledDotScore
    from dragoman.attention.scores import Score as Score
    from dragoman.attention.sequence import SequenceSelfAttention as SequenceSelfAttention

_HOMES = {
    "alignments": ("Alignment", "Hard", "Smoothed", "Softmax"),
    "local": ("LocalM", "LocalP"),
    "lsh": ("LSHAttention",),
    "mechanism": ("Attended", "Mechanism"),
    "monotonic": ("Mocha", "Monotonic"),
    "multihead": ("CrossAttention", "MultiHead", "SelfAttention"),
    "pooling": ("AttentionPooling", "Pooled", "StructuredPooling", "overlap_penalty"),
    "positions": ("Learned", "Positions", "Sinusoidal", "SinusoidalHalves", "Within"),
    "recording": ("Note", "Notes", "Watched", "attentions", "edit", "heads_off", "record"),
    "remembering": ("Coverage", "LocationCumulative", "LocationSensitive", "coverage_loss"),
    "relative": ("BucketBias", "LinearBias", "RelativeKeys", "Rotation", "SinusoidKeys"),
    "scores": (
        "AdditiveScore",
        "CosineScore",
        "DotScore",
        "GeneralScore",
        "LearnedScaleDotScore",
        "LocationScore",
        "NormedAdditiveScore",
        "ScaledDotScore",
        "Score",
    ),
    "sequence": ("SequenceSelfAttention",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Fetch a public name from the module that holds it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {nearest(name, _HOME)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
