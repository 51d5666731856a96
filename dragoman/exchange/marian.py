"""From Hugging Face's Marian, such as OPUS-MT: a directory becomes a bundle that translates as it did.

Its vocabulary has another order and no beginning: an output starts from the padding's vector. Here that vector becomes our `<s>`,
which is never written. Weights are read from safetensors alone: the older `.bin` files are pickles, which run code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.bundle import Bundle, Card, write_bundle
from dragoman.bundle.card import command_line
from dragoman.bundle.loading import expected_weights
from dragoman.config import Config
from dragoman.engines.installed import is_installed
from dragoman.errors import BundleError, ConfigError
from dragoman.exchange.exporting import golden_texts, new_directory
from dragoman.exchange.names import from_hugging_face
from dragoman.exchange.parity import Parity, compare_texts
from dragoman.exchange.transformers_side import Transformers
from dragoman.files.atomic import open_regular
from dragoman.files.manifest import read_json
from dragoman.text.foreign import ForeignTokenizer
from dragoman.text.specials import BOS, SPECIALS
from dragoman.text.tokenizer import Tokenizers
from dragoman.training.tensors import read_tensors

_WEIGHTS = "model.safetensors"
_MOST = 64 << 20  # bytes of a tokenizer or a vocabulary
_NEVER = -1e9  # what makes a piece impossible
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
# What would be another model than the one that Marian's name stands for.
_FIXED = {"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False, "static_position_embeddings": True}


class Imported(NamedTuple):
    """What was made, and how it compares; None where there was nothing to compare with."""

    path: Path
    parity: Parity | None


class Vocabulary(NamedTuple):
    """One side's numbers there, in the order that they have here."""

    order: list[int]  # their number of each of our pieces
    pieces: list[str]
    start_is_copied: bool  # whether our `<s>` is a copy, which must never be written


def import_marian(directory: str | Path, out: str | Path, *, texts: Sequence[str] = (), src_lang: str = "", tgt_lang: str = "") -> Imported:
    """Turn a Marian directory into a bundle at `out`; compare them where `transformers` is installed."""
    directory, out = Path(directory), new_directory(out)
    theirs = _read_config(directory)
    joint = bool(theirs.get("share_encoder_decoder_embeddings", True))
    src = _vocabulary(directory / "vocab.json", int(theirs.get("vocab_size", 0)), theirs)
    tgt = src
    if not joint:
        own = directory / "target_vocab.json"
        size = int(theirs.get("decoder_vocab_size") or theirs.get("vocab_size", 0))
        tgt = _vocabulary(own if own.exists() else directory / "vocab.json", size, theirs)
    tokenizers = Tokenizers(
        ForeignTokenizer(_bytes(directory / "source.spm"), src.pieces), ForeignTokenizer(_bytes(directory / "target.spm"), tgt.pieces)
    )
    weights = _read_weights(directory)
    config = _config(theirs, tokenizers, weights, joint=joint, src_lang=src_lang, tgt_lang=tgt_lang)
    ours = _weights(weights, theirs, src, tgt, config)
    _require_fit(ours, expected_weights(config, tokenizers), directory / _WEIGHTS)
    card = Card(title=f"{directory.resolve().name}, imported", command=command_line(["import", str(directory), "--out", str(out)]))
    write_bundle(out, config=config, tokenizers=tokenizers, weights=ours, card=card, golden=list(texts)[:8], facts={"imported": "marian"})
    return Imported(out, _compare(directory, out, texts))


def _compare(directory: Path, out: Path, texts: Sequence[str]) -> Parity | None:
    """Translate with both, where the other is installed."""
    if not is_installed("transformers"):
        return None
    bundle = Bundle.load(out)
    return compare_texts(bundle, "huggingface", Transformers(directory).translate, texts or golden_texts(bundle), None)


def _read_config(directory: Path) -> dict[str, Any]:
    """Read `config.json` and refuse what is not Marian's model."""
    must = "an import must be a directory of a Hugging Face Marian model"
    if not (directory / "config.json").is_file():
        found = f"no config.json in {directory}" if directory.is_dir() else f"no directory at {directory}"
        raise BundleError(must, found=found, fix="give a directory such as one of Helsinki-NLP/opus-mt")
    theirs = read_json(directory / "config.json")
    if theirs.get("model_type") != "marian":
        raise BundleError(must, found=f"model_type {theirs.get('model_type')!r:.60}", fix="only Marian's models can be imported")
    problems = [
        f"{directory / 'config.json'} must have {name}={value}, as Marian's models do; found {theirs[name]!r}; it cannot be imported"
        for name, value in _FIXED.items()
        if theirs.get(name, value) != value
    ]
    if theirs.get("activation_function") not in _ACTIVATIONS:
        found = f"{theirs.get('activation_function')!r:.60}"
        problems.append(f"activation_function must be one of {', '.join(_ACTIVATIONS)}; found {found}; it cannot be imported")
    if problems:
        raise ConfigError(problems)
    return theirs


def _vocabulary(path: Path, size: int, theirs: Mapping[str, Any]) -> Vocabulary:
    """Read a vocabulary and put it into our order: padding, beginning, end and unknown first, the rest as it was."""
    listed = read_json(path, max_bytes=_MOST)
    if not all(isinstance(number, int) and 0 <= number < size for number in listed.values()) or len(set(listed.values())) != len(listed):
        raise BundleError(f"{path} must give each piece a number below {size} of its own", found="others", fix="download it again")
    missing = [name for name in (SPECIALS[0], SPECIALS[2], SPECIALS[3]) if name not in listed]
    if missing:
        raise BundleError(f"{path} must hold <pad>, </s> and <unk>", found=f"no {missing[0]}", fix="download it again")
    pad, end, unknown = (int(listed[SPECIALS[place]]) for place in (0, 2, 3))
    start = int(theirs.get("decoder_start_token_id", pad))
    first = [pad, start, end, unknown]
    spelt = {number: piece for piece, number in listed.items()}
    rest = [number for number in range(size) if number not in first]
    # A spelling of ours that is an ordinary piece there, and numbers without a piece, get one that no text is cut into.
    taken = set(SPECIALS)
    pieces = [spelt[each] if each in spelt and spelt[each] not in taken else f"<unused {each}>" for each in rest]
    return Vocabulary([*first, *rest], [*SPECIALS, *pieces], start in (pad, end, unknown))


def _config(
    theirs: Mapping[str, Any], tokenizers: Tokenizers, weights: Mapping[str, Tensor], *, joint: bool, src_lang: str, tgt_lang: str
) -> Config:
    """Write its settings as ours."""
    untied = not theirs.get("tie_word_embeddings", True) and "lm_head.weight" in weights
    tie = "none" if untied else "all" if joint else "target"
    blocks = {
        side: f"self(heads={theirs[f'{side}_attention_heads']}, feedforward={theirs[f'{side}_ffn_dim']})*{theirs[f'{side}_layers']}"
        for side in ("encoder", "decoder")
    }
    return Config().replace(
        text={"kind": "unigram", "vocabulary": max(map(len, tokenizers)), "joint": joint, "byte_fallback": False, "normalisation": "none"},
        data={"src_lang": src_lang, "tgt_lang": tgt_lang, "max_length": int(theirs.get("max_position_embeddings", 512)) - 12},
        model={
            "encoder": [blocks["encoder"]],
            "decoder": [blocks["decoder"]],
            "width": theirs["d_model"],
            "heads": theirs["encoder_attention_heads"],
            "feedforward": theirs["encoder_ffn_dim"],
            "activation": _ACTIVATIONS[theirs["activation_function"]],
            "positions": "sinusoidal_halves",
            "residual": "post",
            "norm_epsilon": 1e-5,
            "tie": tie,
            "scale_embeddings": bool(theirs.get("scale_embedding", False)),
            "output_bias": True,
            "dropout": float(theirs.get("dropout", 0.1)),
        },
        decode={"beam": int(theirs.get("num_beams") or 4), "length_penalty": 1.0},
    )


def _weights(
    theirs: Mapping[str, Tensor], settings: Mapping[str, Any], src: Vocabulary, tgt: Vocabulary, config: Config
) -> dict[str, Tensor]:
    """Give every weight its name here, and the rows of pieces their order."""
    try:
        ours = from_hugging_face(theirs, "encoder", settings["encoder_layers"])
        ours |= from_hugging_face(theirs, "decoder", settings["decoder_layers"])
        shared = theirs.get("model.shared.weight")
        tables = {side: theirs.get(f"model.{side}.embed_tokens.weight", shared) for side in ("encoder", "decoder")}
        if tables["encoder"] is None or tables["decoder"] is None:
            raise KeyError("model.shared.weight")
        source, target = tables["encoder"][src.order], tables["decoder"][tgt.order]
        if config.model.tie == "all":
            ours["embeddings.shared.weight"] = target
        else:
            ours |= {"embeddings.src.weight": source, "embeddings.tgt.weight": target}
        if config.model.tie == "none":
            ours["output.weight"] = theirs["lm_head.weight"][tgt.order]
    except (KeyError, IndexError) as error:
        found = f"no {error.args[0]}" if isinstance(error, KeyError) else "too few rows of pieces"
        raise BundleError("the weights must be those that config.json describes", found=found, fix="download them again") from error
    bias = theirs.get("final_logits_bias", torch.zeros(1, max(tgt.order) + 1))[0][tgt.order].clone()
    if tgt.start_is_copied:
        bias[BOS] = _NEVER
    ours["output.bias"] = bias
    return {name: tensor.float().contiguous() for name, tensor in ours.items()}


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """Read the weights, from safetensors alone."""
    if not (directory / _WEIGHTS).exists():
        old = sorted(each.name for each in directory.glob("*.bin"))
        again = f"MarianMTModel.from_pretrained('{directory}').save_pretrained('NEW')"
        fix = f"""make one with transformers, which reads them more safely: python -c "from transformers import MarianMTModel; {again}" """
        found = f"only {old[0]}, a pickle, which is not opened because it can run code" if old else "none"
        raise BundleError(f"{directory} must hold {_WEIGHTS}", found=found, fix=fix.strip() if old else "download the whole directory")
    return read_tensors(directory / _WEIGHTS)


def _require_fit(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights of other shapes than the settings give."""
    for name, wanted in expected.items():
        found = list(ours[name].shape) if name in ours else "none"
        if found != list(wanted.shape):
            must = f"{path} must fit its config.json, by which {name} is {list(wanted.shape)}"
            raise BundleError(must, found=str(found), fix="download the directory again")


def _bytes(path: Path) -> bytes:
    """Read a small file whole."""
    try:
        with open_regular(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(_MOST + 1)
    except OSError as error:
        raise BundleError(
            "a Marian directory must hold source.spm and target.spm", found=f"{path}: {error.strerror}", fix="download it whole"
        ) from error
    if len(data) > _MOST:
        raise BundleError(f"{path} must have at most {_MOST} bytes", found="more", fix="download it again")
    return data
