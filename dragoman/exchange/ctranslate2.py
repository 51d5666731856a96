"""To CTranslate2: a Transformer's weights in the form that its engine reads, which on a CPU runs them several times as fast.

Every setting that it can express is; anything else is refused with the reason. What was made is compared with our own numbers before
it is kept (`dragoman.exchange.parity`), because two programs may mean different things by the same word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.positions import Learned
from dragoman.attention.relative import BucketBias, RelativeKeys, Rotation
from dragoman.config import Config
from dragoman.config.names import check_quantisation
from dragoman.engines.installed import require
from dragoman.errors import ConfigError
from dragoman.exchange.shape import Shape, Side, embedding_table, output_matrix, problem, read_shape, refuse
from dragoman.files.atomic import native_path
from dragoman.layers.feedforward import GEGLU, GELU, Gated, ReLU, SwiGLU, Swish
from dragoman.layers.norms import LayerNorm, RMSNorm, T5Norm
from dragoman.layers.residual import PostNorm, PreNorm
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.transformer import TransformerLayer
from dragoman.text.specials import BOS, EOS, SPECIALS, UNK
from dragoman.text.tokenizer import Tokenizer, Tokenizers

PROGRAM = "CTranslate2"
LEAST_ROWS = 1024  # of a table of positions: room for prefixes, at next to no cost

_ACTIVATIONS = {ReLU: "RELU", GELU: "GELU", Swish: "SWISH", SwiGLU: "SWISH", GEGLU: "GELU"}
_RMS = (RMSNorm, T5Norm)
_KNOWN: dict[str, dict[type | None, str]] = {  # settings with what CTranslate2 knows of them, by its name in the settings
    "activation": {ReLU: "relu", GELU: "gelu", Swish: "swish", SwiGLU: "swiglu", GEGLU: "geglu"},
    "residual": {PostNorm: "post", PreNorm: "pre"},
    "norms": {LayerNorm: "layer", RMSNorm: "rms", T5Norm: "t5"},
    "within": {None: "sinusoidal, sinusoidal_halves, learned, none", Rotation: "rotary", BucketBias: "t5", RelativeKeys: "shaw"},
    "qk_norm": {None: "none"},  # it has one, which on trial gave other numbers
}
_SETTINGS = {"norms": "norm", "within": "positions"}  # where the setting has another name


def save_ctranslate2(model: EncoderDecoder, tokenizers: Tokenizers, config: Config, directory: Path, *, quantisation: str) -> None:
    """Write a model into an existing directory as CTranslate2 reads it: `model.bin`, `config.json` and the vocabularies."""
    check_quantisation(quantisation)
    require("ctranslate2")
    shape = read_shape(model, PROGRAM)
    refuse(_problems(shape))
    spec = _spec(shape, model, config)
    for register, tokenizer in (
        (spec.register_source_vocabulary, tokenizers.src),
        (spec.register_target_vocabulary, tokenizers.tgt),
    ):
        register(vocabulary(tokenizer))
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = (SPECIALS[each] for each in (BOS, EOS, UNK))
    spec.config.decoder_start_token, spec.config.add_source_eos = SPECIALS[BOS], True
    spec.config.layer_norm_epsilon = shape.encoder.epsilon
    spec.validate()
    spec.optimize(quantization=quantisation)
    with native_path(directory) as folder:
        spec.save(folder)


def vocabulary(tokenizer: Tokenizer) -> list[str]:
    """Spell every piece; CTranslate2 knows pieces by their spelling, which must therefore be theirs alone."""
    pieces = tokenizer.pieces(range(len(tokenizer)))
    if len(set(pieces)) != len(pieces):
        twice = next(piece for piece in pieces if pieces.count(piece) > 1)
        raise ConfigError([problem(PROGRAM, "every piece must have a spelling of its own", f"{twice!r} twice")])
    return pieces


def table_rows(config: Config) -> int:
    """Count the places that a model may meet: its longest source, and the longest output to that."""
    longest = config.data.max_length
    return max(LEAST_ROWS, longest + 2, int(config.decode.max_ratio * longest) + config.decode.max_extra + 2)


def _problems(shape: Shape) -> list[str]:
    """Say what CTranslate2 cannot express."""
    found: list[str] = []
    for name, known in _KNOWN.items():
        wrong = {getattr(side, name) for side in (shape.encoder, shape.decoder)} - known.keys()
        if wrong:
            must = f"model.{_SETTINGS.get(name, name)} must be one of {', '.join(known.values())}"
            found.append(problem(PROGRAM, must, " and ".join(sorted(each.__name__ for each in wrong))))
    if shape.encoder.window or shape.decoder.window:
        windows = f"{shape.encoder.window} and {shape.decoder.window}"
        found.append(problem(PROGRAM, "model.window must be 0, no limit", windows))
    if shape.encoder.epsilon != shape.decoder.epsilon:
        both = f"{shape.encoder.epsilon} and {shape.decoder.epsilon}"
        found.append(problem(PROGRAM, "both stacks must have one norm_epsilon", both))
    return found


def _spec(shape: Shape, model: EncoderDecoder, config: Config) -> Any:
    """Fill CTranslate2's description of a model with our weights."""
    from ctranslate2.specs import transformer_spec as specs

    encoder = specs.TransformerEncoderSpec(len(shape.encoder.layers), shape.encoder.heads, **_arguments(shape.encoder))
    decoder = specs.TransformerDecoderSpec(len(shape.decoder.layers), shape.decoder.heads, **_arguments(shape.decoder))
    rows = table_rows(config)
    for spec, side in ((encoder, shape.encoder), (decoder, shape.decoder)):
        _positions(spec, side, rows)
        for layer, block in zip(spec.layer, side.layers, strict=True):
            _layer(layer, block)
        if side.norm is not None:
            _norm(spec.layer_norm, side.norm)
        spec.pre_norm = issubclass(side.residual, PreNorm)
    for spec, embeddings, name in ((encoder, encoder.embeddings[0], "src"), (decoder, decoder.embeddings, "tgt")):
        table, scale = embedding_table(model, name)
        embeddings.weight = _array(table)
        spec.scale_embeddings = scale if scale != 1.0 else False
    decoder.projection.weight = _array(output_matrix(model))
    if model.output_bias is not None:
        decoder.projection.bias = _array(model.output_bias)
    return specs.TransformerSpec(encoder, decoder)


def _arguments(side: Side) -> dict[str, Any]:
    """Say in CTranslate2's words what a stack is made of."""
    from ctranslate2.specs.common_spec import Activation

    return {
        "pre_norm": True,  # what makes room for a norm at the end, which its engine reads after post-norm layers as well
        "no_final_norm": side.norm is None,
        "activation": Activation[_ACTIVATIONS[side.activation]],
        "ffn_glu": issubclass(side.activation, Gated),
        "rms_norm": side.norms in _RMS,
        "num_heads_kv": side.kv_heads if side.kv_heads != side.heads else None,
        "head_dim": side.head_width if side.heads * side.head_width != side.first.self.width else None,
        "relative_position": side.within is RelativeKeys,
        "relative_attention_bias": side.within is BucketBias,
        "rotary_dim": 0 if side.within is Rotation else None,  # 0 is all of a head
        "rotary_interleave": True,
    }


def _positions(spec: Any, side: Side, rows: int) -> None:
    """Give the table of positions; without one, the engine would make its own, which is not ours."""
    if side.within is not None:
        if hasattr(spec, "position_encodings"):  # an encoder's description has it even where attention tells places
            del spec.position_encodings
        return
    positions = side.positions
    table = positions.vectors(0, positions.max_positions if isinstance(positions, Learned) else rows)
    spec.position_encodings.encodings = np.zeros((rows, positions.width), np.float32) if table is None else _array(table)


def _layer(spec: Any, block: TransformerLayer) -> None:
    """Fill one layer: self-attention, in a decoder attention to the source, feed-forward."""
    _linear(spec.self_attention.linear[0], block.self.query_key_value)
    _linear(spec.self_attention.linear[1], block.self.output)
    _norm(spec.self_attention.layer_norm, block.self_residual.norm)
    within = block.self.within
    if isinstance(within, BucketBias):
        spec.self_attention.relative_attention_bias = _array(within.weight)
        spec.self_attention.relative_attention_max_distance = np.dtype("int32").type(within.farthest)
    if isinstance(within, RelativeKeys):
        spec.self_attention.relative_position_keys = _array(within.weight)
        spec.self_attention.relative_position_values = np.zeros_like(_array(within.weight))
    if block.has_cross:
        for part, linear in zip(spec.attention.linear, (block.cross.query, block.cross.key_value, block.cross.output), strict=True):
            _linear(part, linear)
        _norm(spec.attention.layer_norm, block.cross_residual.norm)
    _feedforward(spec.ffn, block)


def _feedforward(spec: Any, block: TransformerLayer) -> None:
    """Fill a feed-forward layer; of a gated one, the half that bends stands first."""
    inner = block.feedforward.inner
    if isinstance(block.feedforward.activation, Gated):
        halves = (spec.linear_0, spec.linear_0_noact)
        for part, weight in zip(halves, inner.weight.chunk(2), strict=True):
            part.weight = _array(weight)
        for part, bias in zip(halves, inner.bias.chunk(2), strict=True) if inner.bias is not None else ():
            part.bias = _array(bias)
    else:
        _linear(spec.linear_0, inner)
    _linear(spec.linear_1, block.feedforward.outer)
    _norm(spec.layer_norm, block.feedforward_residual.norm)


def _linear(spec: Any, linear: nn.Linear) -> None:
    """Fill a product, and its bias where it has one."""
    spec.weight = _array(linear.weight)
    if linear.bias is not None:
        spec.bias = _array(linear.bias)


def _norm(spec: Any, norm: Any) -> None:
    """Fill a norm: its scale, and its shift where it has one."""
    spec.gamma = _array(norm.weight)
    if isinstance(norm, LayerNorm):
        spec.beta = _array(norm.bias)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    """Copy a tensor: quantising writes into what it is given, which would otherwise be the living model."""
    return np.array(tensor.detach().float().cpu().numpy(), copy=True, order="C")
