"""Export to CTranslate2: convert a Transformer's weights and settings to its model format.

A setting that CTranslate2 cannot express raises an error with the reason. The export is compared
with our log-probabilities before it is published (`dragoman.exchange.export_parity`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.absolute_position_encodings import LearnedPositions
from dragoman.attention.relative_position_encodings import (
    RotaryEmbedding,
    ShawRelativeKeys,
    T5RelativeBias,
)
from dragoman.config import Config
from dragoman.config.device_engine_and_precision_names import check_quantization
from dragoman.errors import ConfigError
from dragoman.exchange.transformer_export_spec import (
    StackSpec,
    TransformerStructure,
    embedding_table,
    export_problem,
    output_matrix,
    raise_problems,
    read_transformer_structure,
)
from dragoman.layers.feed_forward import GEGLU, GELU, GatedActivation, ReLU, SwiGLU, Swish
from dragoman.layers.norms_and_residuals import LayerNorm, PostNorm, PreNorm, RMSNorm, T5Norm
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.transformer_blocks import TransformerLayer
from dragoman.runtime.optional_package_checks import require_packages
from dragoman.storage.atomic_and_safe_file_io import native_path
from dragoman.text.sentencepiece_tokenizer import Tokenizer, Tokenizers
from dragoman.text.special_tokens import BOS, EOS, SPECIAL_TOKENS, UNK

PROGRAM = "CTranslate2"
MIN_TABLE_ROWS = 1024  # of a position table: spare positions for prefixes, at almost no cost

_ACTIVATIONS = {ReLU: "RELU", GELU: "GELU", Swish: "SWISH", SwiGLU: "SWISH", GEGLU: "GELU"}
_RMS_NORMS = (RMSNorm, T5Norm)
_SUPPORTED: dict[
    str, dict[type | None, str]
] = {  # supported values of each setting, with CTranslate2's
    "activation": {ReLU: "relu", GELU: "gelu", Swish: "swish", SwiGLU: "swiglu", GEGLU: "geglu"},
    "residual": {PostNorm: "post", PreNorm: "pre"},
    "norm_type": {LayerNorm: "layer", RMSNorm: "rms", T5Norm: "t5"},
    "relative_position": {
        None: "sinusoidal, sinusoidal_halves, learned, none",
        RotaryEmbedding: "rotary",
        T5RelativeBias: "t5",
        ShawRelativeKeys: "shaw",
    },
    "qk_norm": {None: "none"},  # CTranslate2 has one, but its results differed
}
_SETTING_NAMES = {
    "norm_type": "norm",
    "relative_position": "positions",
}  # settings with another name


def save_ctranslate2(
    model: EncoderDecoder,
    tokenizers: Tokenizers,
    config: Config,
    directory: Path,
    *,
    quantization: str,
) -> None:
    """Write `model.bin`, `config.json` and the vocabularies of CTranslate2 into a directory."""
    check_quantization(quantization)
    require_packages("ctranslate2")
    shape = read_transformer_structure(model, PROGRAM)
    raise_problems(_unsupported_settings(shape))
    spec = _build_spec(shape, model, config)
    for register, tokenizer in (
        (spec.register_source_vocabulary, tokenizers.src),
        (spec.register_target_vocabulary, tokenizers.tgt),
    ):
        register(vocabulary_tokens(tokenizer))
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (
        SPECIAL_TOKENS[each] for each in (BOS, EOS, UNK)
    )
    spec.config.decoder_start_token, spec.config.add_source_eos = SPECIAL_TOKENS[BOS], True
    spec.config.layer_norm_epsilon = shape.encoder.epsilon
    spec.validate()
    spec.optimize(quantization=quantization)
    with native_path(directory) as folder:
        spec.save(folder)


def vocabulary_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens as strings, which must be unique: CTranslate2 identifies tokens by them."""
    tokens = tokenizer.tokens(range(len(tokenizer)))
    if len(set(tokens)) != len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise ConfigError(
            [export_problem(PROGRAM, "every token must have a distinct string", f"{twice!r} twice")]
        )
    return tokens


def position_table_rows(config: Config) -> int:
    """Return the number of positions needed: the longest source, and its longest output."""
    longest = config.data.max_length
    return max(
        MIN_TABLE_ROWS,
        longest + 2,
        int(config.decode.max_length_ratio * longest) + config.decode.max_length_extra + 2,
    )


def _unsupported_settings(shape: TransformerStructure) -> list[str]:
    """Yield the settings that CTranslate2 cannot express."""
    found: list[str] = []
    for name, known in _SUPPORTED.items():
        unsupported = {
            getattr(side, name) for side in (shape.encoder, shape.decoder)
        } - known.keys()
        if unsupported:
            must = (
                f"model.{_SETTING_NAMES.get(name, name)} must be one of {', '.join(known.values())}"
            )
            found.append(
                export_problem(
                    PROGRAM, must, " and ".join(sorted(each.__name__ for each in unsupported))
                )
            )
    if shape.encoder.window or shape.decoder.window:
        windows = f"{shape.encoder.window} and {shape.decoder.window}"
        found.append(export_problem(PROGRAM, "model.window must be 0, no limit", windows))
    if shape.encoder.epsilon != shape.decoder.epsilon:
        both = f"{shape.encoder.epsilon} and {shape.decoder.epsilon}"
        found.append(export_problem(PROGRAM, "both stacks must have one norm_epsilon", both))
    return found


def _build_spec(shape: TransformerStructure, model: EncoderDecoder, config: Config) -> Any:
    """Fill the model specification of CTranslate2 with our weights."""
    from ctranslate2.specs import transformer_spec as specs

    encoder = specs.TransformerEncoderSpec(
        len(shape.encoder.layers), shape.encoder.heads, **_spec_arguments(shape.encoder)
    )
    decoder = specs.TransformerDecoderSpec(
        len(shape.decoder.layers), shape.decoder.heads, **_spec_arguments(shape.decoder)
    )
    rows = position_table_rows(config)
    for spec, side in ((encoder, shape.encoder), (decoder, shape.decoder)):
        _fill_positions(spec, side, rows)
        for layer, block in zip(spec.layer, side.layers, strict=True):
            _fill_layer(layer, block)
        if side.norm is not None:
            _fill_norm(spec.layer_norm, side.norm)
        spec.pre_norm = issubclass(side.residual, PreNorm)
    for spec, embeddings, name in (
        (encoder, encoder.embeddings[0], "src"),
        (decoder, decoder.embeddings, "tgt"),
    ):
        table, scale = embedding_table(model, name)
        embeddings.weight = _copy_array(table)
        spec.scale_embeddings = scale if scale != 1.0 else False
    decoder.projection.weight = _copy_array(output_matrix(model))
    if model.output_bias is not None:
        decoder.projection.bias = _copy_array(model.output_bias)
    return specs.TransformerSpec(encoder, decoder)


def _spec_arguments(side: StackSpec) -> dict[str, Any]:
    """Set the options of a stack in CTranslate2's specification."""
    from ctranslate2.specs.common_spec import Activation

    return {
        "pre_norm": True,  # adds a final norm, which the engine applies to post-norm stacks as well
        "no_final_norm": side.norm is None,
        "activation": Activation[_ACTIVATIONS[side.activation]],
        "ffn_glu": issubclass(side.activation, GatedActivation),
        "rms_norm": side.norm_type in _RMS_NORMS,
        "num_heads_kv": side.kv_heads if side.kv_heads != side.heads else None,
        "head_dim": side.head_width
        if side.heads * side.head_width != side.first.self.width
        else None,
        "relative_position": side.relative_position is ShawRelativeKeys,
        "relative_attention_bias": side.relative_position is T5RelativeBias,
        "rotary_dim": 0 if side.relative_position is RotaryEmbedding else None,  # 0: the whole head
        "rotary_interleave": True,
    }


def _fill_positions(spec: Any, side: StackSpec, rows: int) -> None:
    """Set the position table; without one, CTranslate2 would compute its own, which differs."""
    if side.relative_position is not None:
        if hasattr(
            spec, "position_encodings"
        ):  # present in an encoder's specification even with rotary positions
            del spec.position_encodings
        return
    positions = side.positions
    table = positions.vectors(
        0, positions.max_positions if isinstance(positions, LearnedPositions) else rows
    )
    spec.position_encodings.encodings = (
        np.zeros((rows, positions.width), np.float32) if table is None else _copy_array(table)
    )


def _fill_layer(spec: Any, block: TransformerLayer) -> None:
    """Fill one layer: self-attention, cross-attention in a decoder, feed-forward network."""
    _fill_linear(spec.self_attention.linear[0], block.self.query_key_value)
    _fill_linear(spec.self_attention.linear[1], block.self.output)
    _fill_norm(spec.self_attention.layer_norm, block.self_residual.norm)
    relative_position = block.self.relative_position
    if isinstance(relative_position, T5RelativeBias):
        spec.self_attention.relative_attention_bias = _copy_array(relative_position.weight)
        spec.self_attention.relative_attention_max_distance = np.dtype("int32").type(
            relative_position.max_distance
        )
    if isinstance(relative_position, ShawRelativeKeys):
        spec.self_attention.relative_position_keys = _copy_array(relative_position.weight)
        spec.self_attention.relative_position_values = np.zeros_like(
            _copy_array(relative_position.weight)
        )
    if block.has_cross:
        for part, linear in zip(
            spec.attention.linear,
            (block.cross.query, block.cross.key_value, block.cross.output),
            strict=True,
        ):
            _fill_linear(part, linear)
        _fill_norm(spec.attention.layer_norm, block.cross_residual.norm)
    _fill_feed_forward(spec.ffn, block)


def _fill_feed_forward(spec: Any, block: TransformerLayer) -> None:
    """Fill a feed-forward network; of a gated one, the activated half comes first."""
    inner = block.ffn.inner
    if isinstance(block.ffn.activation, GatedActivation):
        halves = (spec.linear_0, spec.linear_0_noact)
        for part, weight in zip(halves, inner.weight.chunk(2), strict=True):
            part.weight = _copy_array(weight)
        for part, bias in (
            zip(halves, inner.bias.chunk(2), strict=True) if inner.bias is not None else ()
        ):
            part.bias = _copy_array(bias)
    else:
        _fill_linear(spec.linear_0, inner)
    _fill_linear(spec.linear_1, block.ffn.outer)
    _fill_norm(spec.layer_norm, block.ffn_residual.norm)


def _fill_linear(spec: Any, linear: nn.Linear) -> None:
    """Fill a linear layer, with its bias if it has one."""
    spec.weight = _copy_array(linear.weight)
    if linear.bias is not None:
        spec.bias = _copy_array(linear.bias)


def _fill_norm(spec: Any, norm: Any) -> None:
    """Fill a norm, with its bias if it has one."""
    spec.gamma = _copy_array(norm.weight)
    if isinstance(norm, LayerNorm):
        spec.beta = _copy_array(norm.bias)


def _copy_array(tensor: Tensor) -> NDArray[np.float32]:
    """Copy a tensor: quantization is in place and would change the model."""
    return np.array(tensor.detach().float().cpu().numpy(), copy=True, order="C")
