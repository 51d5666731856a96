"""ctypes mirrors of the structs in `csrc/`: fields and their order must agree."""

from __future__ import annotations

import ctypes

_pointer, _count, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _pointers(names: str) -> tuple[tuple[str, type[ctypes.c_void_p]], ...]:
    """Return pointer fields from their names, separated by spaces."""
    return tuple((name, _pointer) for name in names.split())


def _counts(names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    """Return int64 fields from their names, separated by spaces."""
    return tuple((name, _count) for name in names.split())


class CLinear(ctypes.Structure):
    """A linear layer: weight matrix and bias, packed in panels; int8 if it has scales."""

    _fields_ = (
        *_pointers("weight scale bias"),
        *_counts("in_features out_features"),
        ("inv_scale", _number),
        ("zero_point", _number),
    )


class CNorm(ctypes.Structure):
    """A layer norm, or an RMS norm without a bias; the identity without a weight."""

    _fields_ = (*_pointers("weight bias"), ("epsilon", _number))


class CResidualNorms(ctypes.Structure):
    """The norms of a residual connection: pre-norm or post-norm."""

    _fields_ = (("pre_norm", CNorm), ("post_norm", CNorm))


class CLayer(ctypes.Structure):
    """A Transformer layer of the encoder or the decoder."""

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
    """An encoder-decoder Transformer with packed weights."""

    _fields_ = (
        ("encoder", ctypes.POINTER(CLayer)),
        ("decoder", ctypes.POINTER(CLayer)),
        *_counts("encoder_layers decoder_layers"),
        ("encoder_norm", CNorm),
        ("decoder_norm", CNorm),
        ("down_proj", CLinear),
        ("output", CLinear),
        ("embedding_table", _pointer),
        ("embedding_scale", _number),
        *_counts("width heads head_width"),
    )


class CInt8Filter(ctypes.Structure):
    """The output projection in int8, with bounds on its difference from float32 logits."""

    _fields_ = (
        ("quantized_linear", CLinear),
        *_pointers("bias error_norms weight_norms float_weight"),
        ("bias_slack", _number),
    )


class CArgmax(ctypes.Structure):
    """Where the argmax of each row of logits is written, and which tokens it may be."""

    _fields_ = (*_pointers("values ids"), *_counts("num_special eos vocab_size"))


class CDecodeStep(ctypes.Structure):
    """One decoder step of all rows."""

    _fields_ = (
        *_pointers("hidden_states tokens position logits kv_cache memory"),
        *_pointers("cache_ids source_starts lengths past_slots"),
        *_pointers("output_subset ids subset_columns subset_ends sentence_ids"),
        ("argmax", CArgmax),
        ("int8_filter", _pointer),
        *_counts("rows beams_per_sentence steps past_stride cache_count slots source_positions"),
    )


class CGreedyRun(ctypes.Structure):
    """Several decoder steps that take the largest logit each time."""

    _fields_ = (
        ("step", CDecodeStep),
        *_pointers("position_table limits rows ids logits"),
        *_counts("num_rows first_step max_steps min_length eos rows_stepped rescored"),
    )


class CBeamStep(ctypes.Structure):
    """One beam search step: candidates and beams in, new beams out, beam state updated."""

    _fields_ = (
        *_pointers("log_probs ids sentences sums alive"),
        *_pointers("all_finite limits active_beams finished truncated truncated_at"),
        *_pointers("history_parents history_tokens history_log_probs length_divisors"),
        *_pointers("new_tokens new_parents new_sums new_alive"),
        *_counts("count beams_per_sentence candidates beam_size nbest eos step rows"),
    )
