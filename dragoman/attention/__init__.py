"""Attention modules for any PyTorch model: scores, alignments, multi-head, positions, recording.

Names are imported on first access, so that the catalogue can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dragoman.errors import suggest_name

if TYPE_CHECKING:
    from dragoman.attention.absolute_position_encodings import LearnedPositions as LearnedPositions
    from dragoman.attention.absolute_position_encodings import Positions as Positions
    from dragoman.attention.absolute_position_encodings import RelativePosition as RelativePosition
    from dragoman.attention.absolute_position_encodings import (
        SinusoidalHalvesPositions as SinusoidalHalvesPositions,
    )
    from dragoman.attention.absolute_position_encodings import (
        SinusoidalPositions as SinusoidalPositions,
    )
    from dragoman.attention.attention_mechanism import Attended as Attended
    from dragoman.attention.attention_mechanism import Mechanism as Mechanism
    from dragoman.attention.attention_mechanism import (
        SequenceSelfAttention as SequenceSelfAttention,
    )
    from dragoman.attention.attention_pooling import AttentionPooling as AttentionPooling
    from dragoman.attention.attention_pooling import (
        MultiDimensionalPooling as MultiDimensionalPooling,
    )
    from dragoman.attention.attention_pooling import Pooled as Pooled
    from dragoman.attention.attention_pooling import StructuredPooling as StructuredPooling
    from dragoman.attention.attention_pooling import overlap_penalty as overlap_penalty
    from dragoman.attention.attention_weight_hooks import AttentionRecord as AttentionRecord
    from dragoman.attention.attention_weight_hooks import AttentionRecords as AttentionRecords
    from dragoman.attention.attention_weight_hooks import RecordableAttention as RecordableAttention
    from dragoman.attention.attention_weight_hooks import edit as edit
    from dragoman.attention.attention_weight_hooks import find_attentions as find_attentions
    from dragoman.attention.attention_weight_hooks import heads_off as heads_off
    from dragoman.attention.attention_weight_hooks import record as record
    from dragoman.attention.dense_softmax_attention import FeatureGate as FeatureGate
    from dragoman.attention.dense_softmax_attention import PositionGate as PositionGate
    from dragoman.attention.location_and_coverage import CoverageAlignment as CoverageAlignment
    from dragoman.attention.location_and_coverage import (
        CumulativeLocationAlignment as CumulativeLocationAlignment,
    )
    from dragoman.attention.location_and_coverage import (
        LocationSensitiveAlignment as LocationSensitiveAlignment,
    )
    from dragoman.attention.location_and_coverage import coverage_loss as coverage_loss
    from dragoman.attention.lsh import LSHAttention as LSHAttention
    from dragoman.attention.luong_local_alignment import (
        LocalMonotonicAlignment as LocalMonotonicAlignment,
    )
    from dragoman.attention.luong_local_alignment import (
        LocalPredictiveAlignment as LocalPredictiveAlignment,
    )
    from dragoman.attention.monotonic import MochaAlignment as MochaAlignment
    from dragoman.attention.monotonic import MonotonicAlignment as MonotonicAlignment
    from dragoman.attention.multi_head import CrossAttention as CrossAttention
    from dragoman.attention.multi_head import MultiHead as MultiHead
    from dragoman.attention.multi_head import SelfAttention as SelfAttention
    from dragoman.attention.relative_position_encodings import AlibiBias as AlibiBias
    from dragoman.attention.relative_position_encodings import RotaryEmbedding as RotaryEmbedding
    from dragoman.attention.relative_position_encodings import ShawRelativeKeys as ShawRelativeKeys
    from dragoman.attention.relative_position_encodings import T5RelativeBias as T5RelativeBias
    from dragoman.attention.relative_position_encodings import (
        TransformerXLBias as TransformerXLBias,
    )
    from dragoman.attention.score_functions import AdditiveScore as AdditiveScore
    from dragoman.attention.score_functions import CosineScore as CosineScore
    from dragoman.attention.score_functions import DotScore as DotScore
    from dragoman.attention.score_functions import FixedScore as FixedScore
    from dragoman.attention.score_functions import GeneralScore as GeneralScore
    from dragoman.attention.score_functions import LearnedScaleDotScore as LearnedScaleDotScore
    from dragoman.attention.score_functions import LocationScore as LocationScore
    from dragoman.attention.score_functions import NormedAdditiveScore as NormedAdditiveScore
    from dragoman.attention.score_functions import ScaledDotScore as ScaledDotScore
    from dragoman.attention.score_functions import Score as Score
    from dragoman.attention.softmax_and_gumbel_alignment import Alignment as Alignment
    from dragoman.attention.softmax_and_gumbel_alignment import HardAlignment as HardAlignment
    from dragoman.attention.softmax_and_gumbel_alignment import SmoothedSoftmax as SmoothedSoftmax
    from dragoman.attention.softmax_and_gumbel_alignment import Softmax as Softmax

_HOMES = {
    "softmax_and_gumbel_alignment": (
        "Alignment",
        "HardAlignment",
        "SmoothedSoftmax",
        "Softmax",
    ),
    "dense_softmax_attention": (
        "FeatureGate",
        "PositionGate",
    ),
    "luong_local_alignment": (
        "LocalMonotonicAlignment",
        "LocalPredictiveAlignment",
    ),
    "location_and_coverage": (
        "CoverageAlignment",
        "CumulativeLocationAlignment",
        "LocationSensitiveAlignment",
        "coverage_loss",
    ),
    "lsh": ("LSHAttention",),
    "attention_mechanism": (
        "Attended",
        "Mechanism",
        "SequenceSelfAttention",
    ),
    "monotonic": (
        "MochaAlignment",
        "MonotonicAlignment",
    ),
    "multi_head": (
        "CrossAttention",
        "MultiHead",
        "SelfAttention",
    ),
    "attention_pooling": (
        "AttentionPooling",
        "MultiDimensionalPooling",
        "Pooled",
        "StructuredPooling",
        "overlap_penalty",
    ),
    "absolute_position_encodings": (
        "LearnedPositions",
        "Positions",
        "RelativePosition",
        "SinusoidalHalvesPositions",
        "SinusoidalPositions",
    ),
    "attention_weight_hooks": (
        "AttentionRecord",
        "AttentionRecords",
        "RecordableAttention",
        "find_attentions",
        "edit",
        "heads_off",
        "record",
    ),
    "relative_position_encodings": (
        "AlibiBias",
        "RotaryEmbedding",
        "ShawRelativeKeys",
        "T5RelativeBias",
        "TransformerXLBias",
    ),
    "score_functions": (
        "AdditiveScore",
        "CosineScore",
        "DotScore",
        "FixedScore",
        "GeneralScore",
        "LearnedScaleDotScore",
        "LocationScore",
        "NormedAdditiveScore",
        "ScaledDotScore",
        "Score",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; {suggest_name(name, _HOME)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names."""
    return list(__all__)
