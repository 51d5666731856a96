"""What the kernels in `source/` read, field by field as they declare it: the two must agree on every structure."""

from __future__ import annotations

import ctypes

_pointer, _count, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class CLinear(ctypes.Structure):
    """A fixed matrix and bias, laid out in panels."""

    _fields_ = (
        *((name, _pointer) for name in ("weight", "scale", "bias")),
        ("in_features", _count),
        ("out_features", _count),
        ("inv_scale", _number),
        ("zero_point", _number),
    )


class CNorm(ctypes.Structure):
    """A norm; without a weight it changes nothing."""

    _fields_ = (("weight", _pointer), ("bias", _pointer), ("epsilon", _number))


class CResidualNorms(ctypes.Structure):
    """The norms on either side of a part."""

    _fields_ = (("pre_norm", CNorm), ("post_norm", CNorm))


class CLayer(ctypes.Structure):
    """A layer of an encoder or of a decoder."""

    _fields_ = (
        *((name, CResidualNorms) for name in ("self_norms", "cross_norms", "ffn_norms")),
        *(
            (name, CLinear)
            for name in (
                "query_key_value",
                "output",
                "query",
                "key_value",
                "cross_output",
                "inner",
                "outer",
            )
        ),
    )


class CModel(ctypes.Structure):
    """What the kernels know of a model."""

    _fields_ = (
        ("encoder", ctypes.POINTER(CLayer)),
        ("decoder", ctypes.POINTER(CLayer)),
        ("encoder_layers", _count),
        ("decoder_layers", _count),
        ("encoder_norm", CNorm),
        ("decoder_norm", CNorm),
        ("narrow", CLinear),
        ("output", CLinear),
        ("embedding_table", _pointer),
        ("embedding_scale", _number),
        ("width", _count),
        ("heads", _count),
        ("head_width", _count),
    )


class CInt8Filter(ctypes.Structure):
    """An output in eight bits, and what tells how far its scores can be from those in float32."""

    _fields_ = (
        ("quantized_linear", CLinear),
        *((name, _pointer) for name in ("bias", "error_norms", "weight_norms", "float_weight")),
        ("bias_slack", _number),
    )


class CArgmax(ctypes.Structure):
    """What a search takes of each row of logits, and where that is written."""

    _fields_ = (
        *((name, _pointer) for name in ("values", "ids")),
        *((name, _count) for name in ("num_special", "eos", "vocab_size")),
    )


class CDecodeStep(ctypes.Structure):
    """One step of a search."""

    _fields_ = (
        *(
            (name, _pointer)
            for name in ("hidden_states", "tokens", "position", "logits", "kv_cache", "memory")
        ),
        *((name, _pointer) for name in ("cache_ids", "source_starts", "lengths", "past_slots")),
        *(
            (name, _pointer)
            for name in ("output_subset", "ids", "subset_columns", "subset_ends", "sentence_ids")
        ),
        ("argmax", CArgmax),
        ("int8_filter", _pointer),
        *(
            (name, _count)
            for name in (
                "rows",
                "beams_per_sentence",
                "steps",
                "past_stride",
                "cache_count",
                "slots",
                "source_positions",
            )
        ),
    )


class CGreedyRun(ctypes.Structure):
    """Several steps of a search that takes the largest logit each time."""

    _fields_ = (
        ("step", CDecodeStep),
        *((name, _pointer) for name in ("position_table", "limits", "rows", "ids", "logits")),
        *(
            (name, _count)
            for name in (
                "num_rows",
                "first_step",
                "max_steps",
                "min_length",
                "eos",
                "rows_stepped",
                "rescored",
            )
        ),
    )
