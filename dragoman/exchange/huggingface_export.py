"""Export to Hugging Face: a directory that `transformers` loads, with its tokenizer.

A post-norm Transformer becomes a Marian model, a pre-norm one a Pegasus model.
"""

from __future__ import annotations

import errno
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from dragoman.attention.absolute_position_encodings import (
    SinusoidalHalvesPositions,
    SinusoidalPositions,
)
from dragoman.config import Config
from dragoman.exchange.huggingface_runner import quiet_transformers
from dragoman.exchange.huggingface_weight_names import reorder_sinusoids, to_hugging_face
from dragoman.exchange.transformer_export_spec import (
    TransformerStructure,
    embedding_table,
    export_problem,
    output_matrix,
    raise_problems,
    read_transformer_structure,
)
from dragoman.layers.feed_forward import GELU, ReLU, Swish
from dragoman.layers.norms_and_residuals import LayerNorm, PostNorm, PreNorm
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.storage.atomic_and_safe_file_io import native_path
from dragoman.text.imported_tokenizer import marian_language_code
from dragoman.text.sentencepiece_tokenizer import Tokenizer, Tokenizers
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

PROGRAM = "Hugging Face"
_ACTIVATIONS = {ReLU: "relu", GELU: "gelu", Swish: "swish"}
_NORM_EPSILON = 1e-5  # fixed in transformers


def save_hugging_face(
    model: EncoderDecoder, tokenizers: Tokenizers, config: Config, directory: Path
) -> None:
    """Write model and tokenizer into a directory for `transformers`."""
    shape = read_transformer_structure(model, PROGRAM)
    raise_problems(_unsupported_settings(shape, model, tokenizers))
    with quiet_transformers(), native_path(directory) as folder:
        try:
            _build_model(shape, model, config, tokenizers).save_pretrained(folder)
        except SafetensorError as error:  # of writing, such as a full disk
            raise OSError(errno.EIO, str(error)) from error
        _save_tokenizer(tokenizers, config, Path(folder))


def _unsupported_settings(
    shape: TransformerStructure, model: EncoderDecoder, tokenizers: Tokenizers
) -> list[str]:
    """Yield the settings that neither Marian nor Pegasus can express."""
    found: list[str] = []

    def must(holds: bool, what: str, got: object) -> None:
        if not holds:
            found.append(export_problem(PROGRAM, what, getattr(got, "__name__", got)))

    sides = (shape.encoder, shape.decoder)
    is_pre_norm = shape.encoder.residual is PreNorm
    for name, side in zip(("encoder", "decoder"), sides, strict=True):
        must(
            side.residual in (PostNorm, PreNorm),
            "model.residual must be post_norm or pre_norm",
            side.residual,
        )
        must(side.norm_type is LayerNorm, "model.norm must be layer", side.norm_type)
        must(
            side.epsilon <= 2 * _NORM_EPSILON,
            f"model.norm_epsilon must be near {_NORM_EPSILON:g}",
            side.epsilon,
        )
        must(
            side.activation in _ACTIVATIONS,
            "model.activation must be relu, gelu or swish",
            side.activation,
        )
        must(
            type(side.positions) in (SinusoidalPositions, SinusoidalHalvesPositions),
            "model.positions must be sinusoidal",
            type(side.positions),
        )
        must(
            side.relative_position is None,
            "model.positions must be sinusoidal",
            side.relative_position,
        )
        must(side.qk_norm is None, "model.qk_norm must be none", side.qk_norm)
        must(not side.window, "model.window must be 0, no limit", side.window)
        must(
            side.heads * side.head_width == side.first.self.width,
            "heads must share the width",
            f"head_width={side.head_width}",
        )
        must(
            (side.norm is not None) == is_pre_norm,
            f"model.{name} must end in a norm with pre-norm and without one else",
            side.norm,
        )
    must(
        shape.encoder.residual is shape.decoder.residual,
        "both stacks must have one residual",
        "two",
    )
    one = "shared" in model.embeddings or (tokenizers.shared_vocab and not is_pre_norm)
    must(
        one or not is_pre_norm,
        "a pre-norm model must have one embedding for both sides, model.tie_embeddings=all",
        "model.tie_embeddings=target or none",
    )
    return list(dict.fromkeys(found))


def _build_model(
    shape: TransformerStructure, model: EncoderDecoder, config: Config, tokenizers: Tokenizers
) -> Any:
    """Build the `transformers` model from our weights."""
    import transformers

    library: Any = transformers  # its classes are lazily typed
    is_pre_norm = shape.encoder.residual is PreNorm
    named = to_hugging_face(shape.encoder, "encoder") | to_hugging_face(shape.decoder, "decoder")
    embeddings, settings = _name_embeddings(model, named)
    if type(shape.encoder.positions) is SinusoidalPositions:
        named = reorder_sinusoids(named | embeddings, config.model.width)
    else:
        named |= embeddings
    bias = model.output_bias
    named["final_logits_bias"] = (
        torch.zeros(1, len(tokenizers.tgt)) if bias is None else bias.detach().float().cpu()[None]
    )
    make, kind = (
        (library.PegasusConfig, library.PegasusForConditionalGeneration)
        if is_pre_norm
        else (library.MarianConfig, library.MarianMTModel)
    )
    theirs = kind(make(**_config_arguments(shape, config, tokenizers), **settings)).eval()
    missing, unexpected = theirs.load_state_dict(named, strict=False)
    theirs.tie_weights()
    rest = [
        name
        for name in missing
        if "embed_positions" not in name and "embed_tokens" not in name and name != "lm_head.weight"
    ]
    assert not rest, f"missing weights: {rest[:3]}"
    assert not unexpected, f"unexpected weights: {unexpected[:3]}"
    _set_generation_config(theirs.generation_config, config)
    # Settings that config.json cannot express, restored by `dragoman import`.
    data = {name: getattr(config.data, name) for name in ("src_lang", "tgt_lang", "max_length")}
    dragoman_settings: dict[str, Any] = {"data": data, "decode": asdict(config.decode)}
    if all(type(tokenizer) is Tokenizer for tokenizer in tokenizers):
        dragoman_settings["text"] = {
            "kind": tokenizers.src.algorithm,
            "normalisation": tokenizers.src.normalization,
        }
    theirs.config.dragoman = dragoman_settings
    return theirs


def _name_embeddings(
    model: EncoderDecoder, named: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return embeddings and output by name, and their tying; an unsupported scale is folded in."""
    (src, src_scale), (tgt, tgt_scale) = (
        embedding_table(model, "src"),
        embedding_table(model, "tgt"),
    )
    output = output_matrix(model)
    scaled = math.isclose(src_scale, math.sqrt(src.size(1))) and src_scale == tgt_scale
    shared, tied = (
        src is tgt and src_scale == tgt_scale,
        output is tgt and (scaled or tgt_scale == 1.0),
    )
    if not scaled:
        src, tgt = src * src_scale, tgt * tgt_scale
    tables = (
        {"model.shared.weight": src}
        if shared
        else {"model.encoder.embed_tokens.weight": src, "model.decoder.embed_tokens.weight": tgt}
    )
    if shared:
        tables |= {
            "model.encoder.embed_tokens.weight": src,
            "model.decoder.embed_tokens.weight": src,
        }
    tables["lm_head.weight"] = output
    settings = {"scale_embedding": scaled, "tie_word_embeddings": tied}
    if not shared:
        settings["share_encoder_decoder_embeddings"] = False
    return {name: table.detach().float().cpu() for name, table in tables.items()}, settings


def _config_arguments(
    shape: TransformerStructure, config: Config, tokenizers: Tokenizers
) -> dict[str, Any]:
    """Return the configuration for `transformers`; ids stay ours, and decoding starts at `<s>`."""
    return {
        "vocab_size": len(tokenizers.src),
        "decoder_vocab_size": len(tokenizers.tgt),
        "d_model": config.model.width,
        "encoder_layers": len(shape.encoder.layers),
        "decoder_layers": len(shape.decoder.layers),
        "encoder_attention_heads": shape.encoder.heads,
        "decoder_attention_heads": shape.decoder.heads,
        "encoder_ffn_dim": shape.encoder.first.ffn.inner.out_features,
        "decoder_ffn_dim": shape.decoder.first.ffn.inner.out_features,
        "activation_function": _ACTIVATIONS[shape.encoder.activation],
        "max_position_embeddings": max(
            512, 2 * config.data.max_length + config.decode.max_length_extra
        ),
        "dropout": config.model.dropout,
        "attention_dropout": config.model.attention_dropout,
        "activation_dropout": config.model.ffn_dropout,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
        "forced_eos_token_id": None,
    }


def _set_generation_config(settings: Any, config: Config) -> None:
    """Set the generation defaults to the model's decode settings."""
    settings.max_length = max(512, 2 * config.data.max_length + config.decode.max_length_extra)
    settings.num_beams = config.decode.beam
    settings.length_penalty = config.decode.length_penalty
    settings.suppress_tokens = [PAD, BOS, UNK]
    settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = PAD, BOS, EOS
    settings.decoder_start_token_id, settings.forced_eos_token_id = BOS, None


def _save_tokenizer(tokenizers: Tokenizers, config: Config, directory: Path) -> None:
    """Write SentencePiece models and vocabularies under Marian's file names."""
    import transformers

    files = {"source.spm": tokenizers.src.model, "target.spm": tokenizers.tgt.model}
    for name, tokenizer in (("vocab.json", tokenizers.src), ("target_vocab.json", tokenizers.tgt)):
        if name == "vocab.json" or not tokenizers.shared_vocab:
            codes = {
                number: marian_language_code(language)
                for language, number in tokenizer.tag_ids.items()
            }
            ids = {
                codes.get(number, token): number
                for number, token in enumerate(tokenizer.tokens(range(len(tokenizer))))
            }
            files[name] = json.dumps(ids, ensure_ascii=False, indent=1).encode()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    theirs: Any = transformers.MarianTokenizer(
        str(directory / "source.spm"),
        str(directory / "target.spm"),
        str(directory / "vocab.json"),
        target_vocab_file=None if tokenizers.shared_vocab else str(directory / "target_vocab.json"),
        separate_vocabs=not tokenizers.shared_vocab,
        source_lang=config.data.src_lang or None,
        target_lang=config.data.tgt_lang or None,
        model_max_length=config.data.max_length,
    )
    theirs.save_pretrained(str(directory))
