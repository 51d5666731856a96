"""Import a Hugging Face Marian (OPUS-MT) or Pegasus directory as a bundle with the same outputs.

Marian's vocabulary has another order and no BOS: decoding starts from the embedding of PAD. Here
that embedding becomes BOS. The bundle is published only after it was compared with the original.
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
from dragoman.bundle.card import format_command
from dragoman.bundle.translation_bundle_loader import expected_weights
from dragoman.config import Config, from_dict, to_dict
from dragoman.errors import BundleError, ConfigError, CorruptError, DivergedError, DragomanError
from dragoman.exchange.export import golden_texts, new_directory_path, require_close_log_probs
from dragoman.exchange.export_parity import Parity, compare_texts
from dragoman.exchange.huggingface_directory_reader import (
    ACTIVATIONS,
    RETRY_HINT,
    SIDES,
    HuggingFaceDirectory,
    read_directory,
    read_sentencepiece,
    read_vocabulary,
)
from dragoman.exchange.huggingface_runner import TransformersRunner
from dragoman.exchange.huggingface_weight_names import from_hugging_face
from dragoman.runtime.optional_package_checks import is_installed
from dragoman.storage.atomic_and_safe_file_io import staged_directory
from dragoman.storage.disk_space_and_errors import os_errors_converted
from dragoman.text.imported_tokenizer import ImportedTokenizer
from dragoman.text.sentencepiece_tokenizer import (
    NORMALIZATION_FORMS,
    TOKENIZER_ALGORITHMS,
    Tokenizer,
    Tokenizers,
)
from dragoman.text.special_tokens import BOS, SPECIAL_TOKENS

logger = logging.getLogger(__name__)

_MAX_COMPARED_POSITIONS = 1024  # tokens of a compared text
_FORBIDDEN_BIAS = -1e9  # output bias of a token that must not be produced
_ARCHITECTURES = {"marian": "MarianMTModel", "pegasus": "PegasusForConditionalGeneration"}
_UNEXPECTED_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ImportResult(NamedTuple):
    """The result of an import, and its parity; None without `transformers`."""

    path: Path
    parity: Parity | None


class VocabularyMapping(NamedTuple):
    """The vocabulary of one side in our order."""

    order: list[int]  # original id of each of our tokens
    tokens: list[str]
    has_copied_start: bool  # whether BOS is a copy of PAD, which must not be produced


def import_marian(
    directory: str | Path,
    out: str | Path,
    *,
    texts: Sequence[str] = (),
    src_lang: str = "",
    tgt_lang: str = "",
) -> ImportResult:
    """Import a Marian or Pegasus directory as a bundle at `out`; compare them with `transformers`.

    Raise BundleError or CorruptError for a directory that is damaged; then nothing is left behind.
    """
    directory, out = Path(directory), new_directory_path(out)
    with (
        _as_bundle_errors(directory),
        os_errors_converted(out),
        staged_directory(out, "import") as temporary,
    ):
        source = read_directory(directory)
        vocabularies = _read_vocabularies(source)
        tgt = _map_vocabulary(
            vocabularies[1], source.tgt_vocab_size, _start_token_id(vocabularies[1], source)
        )
        src = (
            tgt
            if source.shared_vocab
            else _map_vocabulary(
                vocabularies[0], source.settings["vocab_size"], vocabularies[0]["<pad>"]
            )
        )
        models = [
            read_sentencepiece(directory / f"{side}.spm", each)
            for side, each in zip(("source", "target"), vocabularies, strict=True)
        ]
        tokenizers = _build_tokenizers(source, models, src, tgt)
        config = _build_config(source, tokenizers, src_lang=src_lang, tgt_lang=tgt_lang)
        weights = _map_weights(source.weights(), source, src, tgt, config)
        _require_expected_weights(weights, expected_weights(config, tokenizers), directory)
        card = Card(
            title=f"{directory.resolve().name}, imported",
            command=format_command(["import", str(directory), "--out", str(out)]),
        )
        golden, facts = list(texts)[:8], {"imported": source.kind}
        write_bundle(
            temporary,
            config=config,
            tokenizers=tokenizers,
            weights=weights,
            card=card,
            golden=golden,
            manifest_fields=facts,
        )
        parity = _compare_with_original(source, vocabularies, models, temporary, texts)
    return ImportResult(out, parity)


@contextlib.contextmanager
def _as_bundle_errors(directory: Path) -> Iterator[None]:
    """Convert any error of a damaged directory: transformers and SentencePiece raise all kinds."""
    try:
        yield
    except DivergedError as error:
        raise BundleError(
            f"{directory} must compute finite numbers", found=error.found, fix=RETRY_HINT
        ) from error
    except ConfigError as error:
        raise BundleError(
            f"{directory} must be a model that can be built here",
            found="; ".join(error.problems[:3]),
            fix=RETRY_HINT,
        ) from error
    except DragomanError:
        raise
    except _UNEXPECTED_ERRORS as error:
        logger.debug("the import failed", exc_info=True)
        found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BundleError(
            f"{directory} must be a model that can be imported",
            found=found,
            fix=f"{RETRY_HINT}; nothing was kept",
        ) from error


def _read_vocabularies(source: HuggingFaceDirectory) -> tuple[dict[str, int], dict[str, int]]:
    """Read the vocabularies of both sides, which may be shared."""
    shared = source.path / "vocab.json"
    src = read_vocabulary(shared, source.settings["vocab_size"])
    if source.shared_vocab:
        return src, src
    own = source.path / "target_vocab.json"
    return src, read_vocabulary(own if os.path.lexists(own) else shared, source.tgt_vocab_size)


def _start_token_id(vocabularies: Mapping[str, int], source: HuggingFaceDirectory) -> int:
    """Return the id that decoding starts from; raise BundleError if config.json has other ids."""
    for name, token in (("pad_token_id", "<pad>"), ("eos_token_id", "</s>")):
        given = source.settings[name]
        if given not in (None, vocabularies[token]):
            must = (
                f"the vocabulary in {source.path} must fit config.json, by which {name} is {given}"
            )
            raise BundleError(must, found=f"{vocabularies[token]} for {token}", fix=RETRY_HINT)
    start = source.settings["decoder_start_token_id"]
    return vocabularies["<pad>"] if start is None else int(start)


def _map_vocabulary(vocabularies: Mapping[str, int], size: int, start: int) -> VocabularyMapping:
    """Return a vocabulary in our order: PAD, BOS, EOS and UNK first, the rest unchanged."""
    pad, end, unknown = (vocabularies[SPECIAL_TOKENS[each]] for each in (0, 2, 3))
    first = [pad, start, end, unknown]
    spelt = {number: subword for subword, number in vocabularies.items()}
    rest = [number for number in range(size) if number not in first]
    # A special token that is an ordinary token there, and ids without a token, get unused names.
    taken = set(SPECIAL_TOKENS)
    tokens = [
        spelt[each] if each in spelt and spelt[each] not in taken else f"<unused {each}>"
        for each in rest
    ]
    return VocabularyMapping(
        [*first, *rest], [*SPECIAL_TOKENS, *tokens], start in (pad, end, unknown)
    )


def _build_tokenizers(
    source: HuggingFaceDirectory,
    models: Sequence[bytes],
    src: VocabularyMapping,
    tgt: VocabularyMapping,
) -> Tokenizers:
    """Build tokenizers from SentencePiece models and vocabularies; our own exports are restored."""
    exported_settings = source.extra.get("text")
    if (
        isinstance(exported_settings, dict)
        and exported_settings.get("kind") in TOKENIZER_ALGORITHMS
        and exported_settings.get("normalisation") in [*NORMALIZATION_FORMS]
    ):
        with contextlib.suppress(BundleError):
            ours = [
                Tokenizer(
                    model,
                    algorithm=exported_settings["kind"],
                    normalization=exported_settings["normalisation"],
                )
                for model in models
            ]
            if all(
                each.tokens(range(len(each))) == there.tokens
                for each, there in zip(ours, (src, tgt), strict=True)
            ):
                return Tokenizers(
                    ours[0], ours[0] if source.shared_vocab and models[0] == models[1] else ours[1]
                )
    return Tokenizers(
        ImportedTokenizer(models[0], src.tokens), ImportedTokenizer(models[1], tgt.tokens)
    )


def _build_config(
    source: HuggingFaceDirectory, tokenizers: Tokenizers, *, src_lang: str, tgt_lang: str
) -> Config:
    """Convert its settings to ours; settings recorded by our export are restored."""
    theirs, is_pre_norm = source.settings, source.kind == "pegasus"
    tie = (
        "none" if not theirs["tie_word_embeddings"] else "all" if source.shared_vocab else "target"
    )
    blocks = {
        side: (
            f"transformer(heads={theirs[f'{side}_attention_heads']}, "
            f"ffn_width={theirs[f'{side}_ffn_dim']})*{theirs[f'{side}_layers']}"
        )
        for side in SIDES
    }
    exported_settings = {
        name: part if isinstance(part := source.extra.get(name), dict) else {}
        for name in ("data", "decode")
    }
    longest = theirs["max_position_embeddings"] - 12
    data = {"src_lang": "", "tgt_lang": "", "max_length": longest, **exported_settings["data"]}
    data |= {
        name: value for name, value in (("src_lang", src_lang), ("tgt_lang", tgt_lang)) if value
    }
    size, first = max(map(len, tokenizers)), tokenizers.src
    kind = {"tokenizer": first.algorithm, "normalization": first.normalization}
    config = Config().replace(
        text={
            "vocab_size": size,
            "shared_vocab": source.shared_vocab,
            "byte_fallback": False,
            **kind,
        },
        data=data,
        model={
            "encoder": [blocks["encoder"]],
            "decoder": [blocks["decoder"]],
            "width": theirs["d_model"],
            "heads": theirs["encoder_attention_heads"],
            "ffn_width": theirs["encoder_ffn_dim"],
            "activation": ACTIVATIONS[theirs["activation_function"]],
            "positions": "sinusoidal_halves",
            "residual": "pre_norm" if is_pre_norm else "post",
            "norm_epsilon": 1e-5,
            "tie_embeddings": tie,
            "scale_embeddings": theirs["scale_embedding"],
            "output_bias": True,
            "dropout": float(theirs["dropout"]),
        },
        decode={"beam": source.beam, "length_penalty": 1.0, **exported_settings["decode"]},
    )
    return from_dict(to_dict(config))  # validates what `replace` does not


def _map_weights(
    theirs: Mapping[str, Tensor],
    source: HuggingFaceDirectory,
    src: VocabularyMapping,
    tgt: VocabularyMapping,
    config: Config,
) -> dict[str, Tensor]:
    """Return the weights under our names, with embedding rows in the order of our vocabulary."""
    ours: dict[str, Tensor] = {}
    for side in SIDES:
        ours |= from_hugging_face(theirs, side, source.settings[f"{side}_layers"])
    own = [f"model.{side}.embed_tokens.weight" for side in SIDES]
    shared = "model.shared.weight" if "model.shared.weight" in theirs else own[1]
    tables = [
        theirs[shared if config.model.tie_embeddings == "all" or name not in theirs else name]
        for name in own
    ]
    if config.model.tie_embeddings == "all":
        ours["embeddings.shared.weight"] = tables[1][tgt.order]
    else:
        ours |= {
            "embeddings.src.weight": tables[0][src.order],
            "embeddings.tgt.weight": tables[1][tgt.order],
        }
    if config.model.tie_embeddings == "none":
        ours["output.weight"] = theirs["lm_head.weight"][tgt.order]
    bias = theirs.get("final_logits_bias", torch.zeros(1, source.tgt_vocab_size))[0][
        tgt.order
    ].clone()
    if tgt.has_copied_start:
        bias[BOS] = _FORBIDDEN_BIAS
    ours["output.bias"] = bias
    return {name: tensor.float().contiguous() for name, tensor in ours.items()}


def _require_expected_weights(
    ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path
) -> None:
    """Raise BundleError for weights of other names or shapes than our model's."""
    for name in sorted({*ours, *expected}):
        wanted, found = (
            list(each[name].shape) if name in each else "none" for each in (expected, ours)
        )
        if found != wanted:
            raise BundleError(
                f"{path} must fit its config.json, by which {name} is {wanted}",
                found=str(found),
                fix=RETRY_HINT,
            )


def _compare_with_original(
    source: HuggingFaceDirectory,
    vocabularies: Sequence[Mapping[str, int]],
    models: Sequence[bytes],
    made: Path,
    texts: Sequence[str],
) -> Parity | None:
    """Compare translations if `transformers` is installed; raise CorruptError if all differ."""
    if not is_installed("transformers"):
        return None
    bundle = Bundle.load(made)
    original = made / ".tmp-original"
    _write_original(source, vocabularies, models, original)
    try:
        translate = TransformersRunner(original).translate
        short = [
            text
            for text in texts
            if len(bundle.tokenizers.src.encode(text)) < _compared_positions(source) - 2
        ]
        parity = compare_texts(
            bundle, "huggingface", translate, short or golden_texts(bundle), None
        )
    finally:
        shutil.rmtree(original, ignore_errors=True)
    require_close_log_probs(parity.difference, exact=True)
    if parity.sentences and not parity.equal:
        raise CorruptError(
            "an import must translate as the original does",
            found=f"0 of {parity.sentences} greedy outputs equal",
            fix="nothing was kept; please report the model's settings",
        )
    return parity


def _compared_positions(source: HuggingFaceDirectory) -> int:
    """Return the number of positions that are compared: the original has no more."""
    return min(int(source.settings["max_position_embeddings"]), _MAX_COMPARED_POSITIONS)


def _write_original(
    source: HuggingFaceDirectory,
    vocabularies: Sequence[Mapping[str, int]],
    models: Sequence[bytes],
    directory: Path,
) -> None:
    """Write only validated files for `transformers` to read: the directory is untrusted."""
    special = {
        name: vocabularies[1][token]
        for name, token in (("pad_token_id", "<pad>"), ("eos_token_id", "</s>"))
    }
    special["decoder_start_token_id"] = _start_token_id(vocabularies[1], source)
    # Tokens that our search never produces: models are compared, not searches.
    never = {
        special["pad_token_id"],
        special["decoder_start_token_id"],
        vocabularies[1]["<unk>"],
    } - {special["eos_token_id"]}
    settings = {
        **source.settings,
        **special,
        "model_type": source.kind,
        "architectures": [_ARCHITECTURES[source.kind]],
    }
    if not any("embed_positions" in name for name in source.weight_files):
        settings["max_position_embeddings"] = _compared_positions(
            source
        )  # a table is computed for them, slowly
    if source.kind == "pegasus":
        del settings["share_encoder_decoder_embeddings"], settings["decoder_vocab_size"]
    files: dict[str, Any] = {
        "config.json": settings,
        "generation_config.json": {**special, "suppress_tokens": sorted(never)},
        "tokenizer_config.json": {
            "tokenizer_class": "MarianTokenizer",
            "separate_vocabs": not source.shared_vocab,
        },
        "vocab.json": vocabularies[0],
    }
    if not source.shared_vocab:
        files["target_vocab.json"] = vocabularies[1]
    if len(set(source.weight_files.values())) > 1:
        names = {name: path.name for name, path in source.weight_files.items()}
        files["model.safetensors.index.json"] = {"metadata": {}, "weight_map": names}
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (directory / name).write_bytes(model)
    for path in set(source.weight_files.values()):
        (directory / path.name).symlink_to(path.resolve())
