"""What the kernels in `source/` read, field by field as they declare it: the two must agree on every structure."""

from __future__ import annotations

import ctypes

_pointer, _count, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Product(ctypes.Structure):
    """A fixed matrix and bias, laid out in panels."""

    _fields_ = (
        *((name, _pointer) for name in ("weight", "scale", "bias")),
        ("input_width", _count),
        ("output_width", _count),
        ("inverse", _number),
        ("zero", _number),
    )


class Norm(ctypes.Structure):
    """A norm; without a weight it changes nothing."""

    _fields_ = (("weight", _pointer), ("bias", _pointer), ("epsilon", _number))


class Around(ctypes.Structure):
    """The norms on either side of a part."""

    _fields_ = (("before", Norm), ("after", Norm))


class Layer(ctypes.Structure):
    """A layer of an encoder or of a decoder."""

    _fields_ = (
        *((name, Around) for name in ("around_self", "around_cross", "around_feed")),
        *((name, Product) for name in ("query_key_value", "output", "query", "key_value", "cross_output", "inner", "outer")),
    )


class Model(ctypes.Structure):
    """What the kernels know of a model."""

    _fields_ = (
        ("encoder", ctypes.POINTER(Layer)),
        ("decoder", ctypes.POINTER(Layer)),
        ("encoder_layers", _count),
        ("decoder_layers", _count),
        ("encoder_norm", Norm),
        ("decoder_norm", Norm),
        ("narrow", Product),
        ("pieces", Product),
        ("table", _pointer),
        ("table_scale", _number),
        ("width", _count),
        ("heads", _count),
        ("head_width", _count),
    )


class Screen(ctypes.Structure):
    """An output in eight bits, and what tells how far its scores can be from those in float32."""

    _fields_ = (
        ("rough", Product),
        *((name, _pointer) for name in ("bias", "lost", "kept", "exact")),
        ("slack", _number),
    )


class Taken(ctypes.Structure):
    """What a search takes of each row of logits, and where that is written."""

    _fields_ = (*((name, _pointer) for name in ("values", "ids")), *((name, _count) for name in ("few", "end", "width")))


class Step(ctypes.Structure):
    """One step of a search."""

    _fields_ = (
        *((name, _pointer) for name in ("stream", "tokens", "place", "logits", "own", "memory")),
        *((name, _pointer) for name in ("caches", "firsts", "lengths", "past")),
        *((name, _pointer) for name in ("some", "ids", "columns", "list_ends", "numbers")),
        ("taken", Taken),
        ("screen", _pointer),
        *((name, _count) for name in ("rows", "fan", "steps", "past_room", "cache_count", "slots", "places")),
    )


class Walk(ctypes.Structure):
    """Several steps of a search that takes the largest logit each time."""

    _fields_ = (
        ("step", Step),
        *((name, _pointer) for name in ("places", "limits", "rows", "ids", "logits")),
        *((name, _count) for name in ("all", "first", "most", "at_least", "end", "stepped", "settled")),
    )
