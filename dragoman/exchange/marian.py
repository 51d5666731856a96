"""From Hugging Face's Marian, such as OPUS-MT, and Pegasus: a directory becomes a bundle that translates as it did.

Marian's vocabulary has another order and no beginning: an output starts from the padding's vector. Here that vector becomes
our `<s>`, which is never written. The bundle appears only after it was compared with the original.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dragoman.bundle import Bundle, Card, write_bundle
from dragoman.bundle.card import command_line
from dragoman.bundle.loading import expected_weights
from dragoman.config import Config, from_dict, to_dict
from dragoman.engines.installed import is_installed
from dragoman.errors import BundleError, ConfigError, CorruptError, DivergedError, DragomanError
from dragoman.exchange.directory import ACTIVATIONS, AGAIN, SIDES, Source, read_sentencepiece, read_source, read_vocabulary
from dragoman.exchange.exporting import golden_texts, new_directory, require_close
from dragoman.exchange.names import from_hugging_face
from dragoman.exchange.parity import Parity, compare_texts
from dragoman.exchange.transformers_side import Transformers
from dragoman.files.atomic import staged_directory
from dragoman.files.disk import explaining
from dragoman.text.foreign import ForeignTokenizer
from dragoman.text.normalise import FORMS
from dragoman.text.settings import KINDS
from dragoman.text.specials import BOS, SPECIALS
from dragoman.text.tokenizer import Tokenizer, Tokenizers

logger = logging.getLogger(__name__)

_MOST_POSITIONS = 1024  # of a text that is compared
_NEVER = -1e9  # the output bias of a token that is never written
_ARCHITECTURES = {"marian": "MarianMTModel", "pegasus": "PegasusForConditionalGeneration"}
_ODD = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, RuntimeError, TypeError, ValueError)


class Imported(NamedTuple):
    """What was made, and how it compares; None where there was nothing to compare with."""

    path: Path
    parity: Parity | None


class Vocabulary(NamedTuple):
    """One side's ids there, in the order that they have here."""

    order: list[int]  # their id of each of our tokens
    pieces: list[str]
    start_is_copied: bool  # whether our `<s>` is a copy, which must never be written


def import_marian(directory: str | Path, out: str | Path, *, texts: Sequence[str] = (), src_lang: str = "", tgt_lang: str = "") -> Imported:
    """Turn a Marian or Pegasus directory into a bundle at `out`; compare them where `transformers` is installed.

    Raise BundleError or CorruptError for a directory that is damaged; then nothing is left behind.
    """
    directory, out = Path(directory), new_directory(out)
    with _refusing(directory), explaining(out), staged_directory(out, "import") as temporary:
        source = read_source(directory)
        listed = _vocabularies(source)
        tgt = _vocabulary(listed[1], source.tgt_vocabulary, _start(listed[1], source))
        src = tgt if source.joint else _vocabulary(listed[0], source.settings["vocab_size"], listed[0]["<pad>"])
        models = [read_sentencepiece(directory / f"{side}.spm", each) for side, each in zip(("source", "target"), listed, strict=True)]
        tokenizers = _tokenizers(source, models, src, tgt)
        config = _config(source, tokenizers, src_lang=src_lang, tgt_lang=tgt_lang)
        weights = _weights(source.weights(), source, src, tgt, config)
        _require_fit(weights, expected_weights(config, tokenizers), directory)
        card = Card(title=f"{directory.resolve().name}, imported", command=command_line(["import", str(directory), "--out", str(out)]))
        golden, facts = list(texts)[:8], {"imported": source.kind}
        write_bundle(temporary, config=config, tokenizers=tokenizers, weights=weights, card=card, golden=golden, facts=facts)
        parity = _compare(source, listed, models, temporary, texts)
    return Imported(out, parity)


@contextlib.contextmanager
def _refusing(directory: Path) -> Iterator[None]:
    """Turn whatever a damaged directory causes into one line: transformers and SentencePiece raise what they like."""
    try:
        yield
    except DivergedError as error:
        raise BundleError(f"{directory} must compute finite numbers", found=error.found, fix=AGAIN) from error
    except ConfigError as error:
        raise BundleError(f"{directory} must be a model that can be built here", found="; ".join(error.problems[:3]), fix=AGAIN) from error
    except DragomanError:
        raise
    except _ODD as error:
        logger.debug("the import failed", exc_info=True)
        found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BundleError(f"{directory} must be a model that can be imported", found=found, fix=f"{AGAIN}; nothing was kept") from error


def _vocabularies(source: Source) -> tuple[dict[str, int], dict[str, int]]:
    """Read the vocabularies of both sides, which may be one."""
    shared = source.path / "vocab.json"
    src = read_vocabulary(shared, source.settings["vocab_size"])
    if source.joint:
        return src, src
    own = source.path / "target_vocab.json"
    return src, read_vocabulary(own if os.path.lexists(own) else shared, source.tgt_vocabulary)


def _start(listed: Mapping[str, int], source: Source) -> int:
    """Return the id from which an output starts; raise BundleError where config.json has other ids than the vocabulary."""
    for name, token in (("pad_token_id", "<pad>"), ("eos_token_id", "</s>")):
        given = source.settings[name]
        if given not in (None, listed[token]):
            must = f"the vocabulary in {source.path} must fit config.json, by which {name} is {given}"
            raise BundleError(must, found=f"{listed[token]} for {token}", fix=AGAIN)
    start = source.settings["decoder_start_token_id"]
    return listed["<pad>"] if start is None else int(start)


def _vocabulary(listed: Mapping[str, int], size: int, start: int) -> Vocabulary:
    """Put a vocabulary into our order: padding, beginning, end and unknown first, the rest as it was."""
    pad, end, unknown = (listed[SPECIALS[each]] for each in (0, 2, 3))
    first = [pad, start, end, unknown]
    spelt = {number: piece for piece, number in listed.items()}
    rest = [number for number in range(size) if number not in first]
    # A spelling of ours that is an ordinary token there, and ids without a token, get one that no text is cut into.
    taken = set(SPECIALS)
    pieces = [spelt[each] if each in spelt and spelt[each] not in taken else f"<unused {each}>" for each in rest]
    return Vocabulary([*first, *rest], [*SPECIALS, *pieces], start in (pad, end, unknown))


def _tokenizers(source: Source, models: Sequence[bytes], src: Vocabulary, tgt: Vocabulary) -> Tokenizers:
    """Make tokenizers of SentencePiece models and vocabularies; one that our own export noted becomes what it was."""
    noted = source.extra.get("text")
    if isinstance(noted, dict) and noted.get("kind") in KINDS and noted.get("normalisation") in [*FORMS]:
        with contextlib.suppress(BundleError):
            ours = [Tokenizer(model, kind=noted["kind"], normalisation=noted["normalisation"]) for model in models]
            if all(each.pieces(range(len(each))) == there.pieces for each, there in zip(ours, (src, tgt), strict=True)):
                return Tokenizers(ours[0], ours[0] if source.joint and models[0] == models[1] else ours[1])
    return Tokenizers(ForeignTokenizer(models[0], src.pieces), ForeignTokenizer(models[1], tgt.pieces))


def _config(source: Source, tokenizers: Tokenizers, *, src_lang: str, tgt_lang: str) -> Config:
    """Translate its settings into ours; what our own export noted is restored."""
    theirs, pre = source.settings, source.kind == "pegasus"
    tie = "none" if not theirs["tie_word_embeddings"] else "all" if source.joint else "target"
    blocks = {
        side: f"self(heads={theirs[f'{side}_attention_heads']}, feedforward={theirs[f'{side}_ffn_dim']})*{theirs[f'{side}_layers']}"
        for side in SIDES
    }
    noted = {name: part if isinstance(part := source.extra.get(name), dict) else {} for name in ("data", "decode")}
    longest = theirs["max_position_embeddings"] - 12
    data = {"src_lang": "", "tgt_lang": "", "max_length": longest, **noted["data"]}
    data |= {name: value for name, value in (("src_lang", src_lang), ("tgt_lang", tgt_lang)) if value}
    size, first = max(map(len, tokenizers)), tokenizers.src
    kind = {"kind": first.kind, "normalisation": first.normalisation}
    config = Config().replace(
        text={"vocabulary": size, "joint": source.joint, "byte_fallback": False, **kind},
        data=data,
        model={
            "encoder": [blocks["encoder"]],
            "decoder": [blocks["decoder"]],
            "width": theirs["d_model"],
            "heads": theirs["encoder_attention_heads"],
            "feedforward": theirs["encoder_ffn_dim"],
            "activation": ACTIVATIONS[theirs["activation_function"]],
            "positions": "sinusoidal_halves",
            "residual": "pre" if pre else "post",
            "norm_epsilon": 1e-5,
            "tie": tie,
            "scale_embeddings": theirs["scale_embedding"],
            "output_bias": True,
            "dropout": float(theirs["dropout"]),
        },
        decode={"beam": source.beam, "length_penalty": 1.0, **noted["decode"]},
    )
    return from_dict(to_dict(config))  # which validates what `replace` takes as it is


def _weights(theirs: Mapping[str, Tensor], source: Source, src: Vocabulary, tgt: Vocabulary, config: Config) -> dict[str, Tensor]:
    """Return the weights under our parameter names, with the embedding rows in our vocabulary's order."""
    ours: dict[str, Tensor] = {}
    for side in SIDES:
        ours |= from_hugging_face(theirs, side, source.settings[f"{side}_layers"])
    own = [f"model.{side}.embed_tokens.weight" for side in SIDES]
    shared = "model.shared.weight" if "model.shared.weight" in theirs else own[1]
    tables = [theirs[shared if config.model.tie == "all" or name not in theirs else name] for name in own]
    if config.model.tie == "all":
        ours["embeddings.shared.weight"] = tables[1][tgt.order]
    else:
        ours |= {"embeddings.src.weight": tables[0][src.order], "embeddings.tgt.weight": tables[1][tgt.order]}
    if config.model.tie == "none":
        ours["output.weight"] = theirs["lm_head.weight"][tgt.order]
    bias = theirs.get("final_logits_bias", torch.zeros(1, source.tgt_vocabulary))[0][tgt.order].clone()
    if tgt.start_is_copied:
        bias[BOS] = _NEVER
    ours["output.bias"] = bias
    return {name: tensor.float().contiguous() for name, tensor in ours.items()}


def _require_fit(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raise BundleError for weights of other names or shapes than our model has."""
    for name in sorted({*ours, *expected}):
        wanted, found = (list(each[name].shape) if name in each else "none" for each in (expected, ours))
        if found != wanted:
            raise BundleError(f"{path} must fit its config.json, by which {name} is {wanted}", found=str(found), fix=AGAIN)


def _compare(
    source: Source, listed: Sequence[Mapping[str, int]], models: Sequence[bytes], made: Path, texts: Sequence[str]
) -> Parity | None:
    """Translate with both, where the other is installed; raise CorruptError where they differ by more than rounding."""
    if not is_installed("transformers"):
        return None
    bundle = Bundle.load(made)
    original = made / ".tmp-original"
    _write_original(source, listed, models, original)
    try:
        translate = Transformers(original).translate
        short = [text for text in texts if len(bundle.tokenizers.src.encode(text)) < _positions(source) - 2]
        parity = compare_texts(bundle, "huggingface", translate, short or golden_texts(bundle), None)
    finally:
        shutil.rmtree(original, ignore_errors=True)
    require_close(parity.difference, exact=True)
    if parity.sentences and not parity.equal:
        raise CorruptError(
            "an import must translate as the original does",
            found=f"0 of {parity.sentences} greedy outputs equal",
            fix="nothing was kept; please report the model's settings",
        )
    return parity


def _positions(source: Source) -> int:
    """Return how many positions the two are compared on; the original has no more, and no way to split a text."""
    return min(int(source.settings["max_position_embeddings"]), _MOST_POSITIONS)


def _write_original(source: Source, listed: Sequence[Mapping[str, int]], models: Sequence[bytes], directory: Path) -> None:
    """Write what was validated for `transformers` to read, and nothing else of a directory that may be anybody's."""
    special = {name: listed[1][token] for name, token in (("pad_token_id", "<pad>"), ("eos_token_id", "</s>"))}
    special["decoder_start_token_id"] = _start(listed[1], source)
    # What our search never writes: the two are compared as models, not as searches.
    never = {special["pad_token_id"], special["decoder_start_token_id"], listed[1]["<unk>"]} - {special["eos_token_id"]}
    settings = {**source.settings, **special, "model_type": source.kind, "architectures": [_ARCHITECTURES[source.kind]]}
    if not any("embed_positions" in name for name in source.places):
        settings["max_position_embeddings"] = _positions(source)  # for which it computes a table, slowly
    if source.kind == "pegasus":
        del settings["share_encoder_decoder_embeddings"], settings["decoder_vocab_size"]
    files: dict[str, Any] = {
        "config.json": settings,
        "generation_config.json": {**special, "suppress_tokens": sorted(never)},
        "tokenizer_config.json": {"tokenizer_class": "MarianTokenizer", "separate_vocabs": not source.joint},
        "vocab.json": listed[0],
    }
    if not source.joint:
        files["target_vocab.json"] = listed[1]
    if len(set(source.places.values())) > 1:
        names = {name: path.name for name, path in source.places.items()}
        files["model.safetensors.index.json"] = {"metadata": {}, "weight_map": names}
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (directory / name).write_bytes(model)
    for path in set(source.places.values()):
        (directory / path.name).symlink_to(path.resolve())
