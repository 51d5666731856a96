"""Read and validate a Hugging Face directory of a Marian or Pegasus model: untrusted input.

Everything in config.json is validated and compared with the headers of the weights before
anything is allocated in proportion to it. Links, pipes and pickles are not opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dragoman.attention.absolute_position_encodings import SinusoidalHalvesPositions
from dragoman.errors import BundleError, CorruptError
from dragoman.storage.atomic_and_safe_file_io import native_path, open_regular
from dragoman.storage.disk_space_and_errors import format_bytes
from dragoman.storage.manifest import corrupt_file_error, read_json
from dragoman.storage.tensor_files import TensorInfo, read_header
from dragoman.text.special_tokens import SPECIAL_TOKENS

CONFIG, GENERATION, WEIGHTS, INDEX = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
SIDES = ("encoder", "decoder")
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
MODEL_TYPES = ("marian", "pegasus")
RETRY_HINT = "download the directory again"

_MAX_BYTES = 64 << 20  # of a tokenizer or a vocabulary
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_REQUIREMENT = "an import must be a directory of a Hugging Face Marian or Pegasus model"


class _IntegerRange(NamedTuple):
    """The range of an integer setting, and its default; None if it is required."""

    low: int
    high: int
    default: int | None = None


_INTEGER_SETTINGS = {
    "vocab_size": _IntegerRange(5, 10_000_000),
    "d_model": _IntegerRange(1, 65_536),
    "max_position_embeddings": _IntegerRange(32, 1 << 16, 512),
    **{f"{side}_layers": _IntegerRange(1, 1000) for side in SIDES},
    **{f"{side}_attention_heads": _IntegerRange(1, 1024) for side in SIDES},
    **{f"{side}_ffn_dim": _IntegerRange(1, 1 << 20) for side in SIDES},
}
_BOOLEAN_SETTINGS = {
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "share_encoder_decoder_embeddings": True,
}
# Settings that would change the architecture.
_FIXED_SETTINGS: dict[str, dict[str, bool]] = {
    "marian": {"normalize_before": False, "add_final_layer_norm": False},
    "pegasus": {"normalize_before": True, "add_final_layer_norm": True},
}
_COMMON_FIXED_SETTINGS = {
    "normalize_embedding": False,
    "static_position_embeddings": True,
    "is_encoder_decoder": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceDirectory:
    """A directory with consistent settings and weights."""

    path: Path
    kind: str
    settings: dict[str, Any]  # known settings of config.json, validated
    extra: dict[str, Any]  # settings recorded by our export
    beam: int
    weight_files: dict[str, Path]  # file of each weight in use

    @property
    def shared_vocab(self) -> bool:
        """Whether both sides share vocabulary and embedding."""
        return bool(self.settings["share_encoder_decoder_embeddings"])

    @property
    def tgt_vocab_size(self) -> int:
        """The vocabulary size of the target side."""
        return int(self.settings["decoder_vocab_size"])

    def weights(self) -> dict[str, Tensor]:
        """Read the weights in float32; raise CorruptError if a number is not finite."""
        found: dict[str, Tensor] = {}
        for path in sorted(set(self.weight_files.values())):
            try:
                with native_path(path) as readable, safe_open(readable, framework="pt") as file:
                    found |= {
                        name: file.get_tensor(name).float()
                        for name, file_path in self.weight_files.items()
                        if file_path == path
                    }
            except (SafetensorError, OSError) as error:
                raise corrupt_file_error(path, str(error)) from error
        for name, tensor in found.items():
            if not bool(torch.isfinite(tensor).all()):
                must, many = (
                    f"{self.weight_files[name]} must hold finite numbers",
                    int((~torch.isfinite(tensor)).sum()),
                )
                raise CorruptError(
                    must, found=f"{many} of {tensor.numel()} in {name} that are not", fix=RETRY_HINT
                )
        _require_sinusoidal(found, self.weight_files)
        return found


def read_directory(directory: Path) -> HuggingFaceDirectory:
    """Validate a directory's settings and the headers of its weights; nothing large is read."""
    hf_config = _read_config(directory)
    kind = str(hf_config["model_type"])
    settings = _validate_settings(hf_config, kind, directory / CONFIG)
    extra = hf_config.get("dragoman")
    headers = _read_headers(directory)
    weight_files = _match_weights(headers, settings, kind, directory)
    _require_memory(headers, weight_files)
    beam = _read_beam(directory, hf_config)
    return HuggingFaceDirectory(
        path=directory,
        kind=kind,
        settings=settings,
        extra=extra if isinstance(extra, dict) else {},
        beam=beam,
        weight_files=weight_files,
    )


def read_vocabulary(path: Path, size: int) -> dict[str, int]:
    """Read the id of each token; ids are below `size` and differ, and tokens are text."""
    with _as_bundle_error(path):
        listed = read_json(path, max_bytes=_MAX_BYTES)
    for token, number in listed.items():
        if type(number) is not int or not 0 <= number < size:
            raise BundleError(
                f"{path} must assign each token an id below {size}",
                found=f"{number!r:.60} for {token!r:.60}",
                fix=RETRY_HINT,
            )
        try:
            token.encode()
        except UnicodeEncodeError as error:
            raise BundleError(
                f"{path} must hold tokens of Unicode text", found=f"{token!a:.60}", fix=RETRY_HINT
            ) from error
    if len(set(listed.values())) != len(listed):
        raise BundleError(
            f"{path} must assign each token a unique id", found="one id twice", fix=RETRY_HINT
        )
    missing = [name for name in ("<pad>", "</s>", "<unk>") if name not in listed]
    if missing:
        raise BundleError(
            f"{path} must hold <pad>, </s> and <unk>", found=f"no {missing[0]}", fix=RETRY_HINT
        )
    return listed


def read_sentencepiece(path: Path, vocabulary: Mapping[str, int]) -> bytes:
    """Read a SentencePiece model; some of its pieces must be in the vocabulary."""
    data = read_bytes(path)
    try:
        if not data:
            raise RuntimeError("an empty file")
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
        subwords = [processor.id_to_piece(number) for number in range(processor.get_piece_size())]
        processor.decode(processor.encode("a b", out_type=str))
    except (RuntimeError, ValueError, UnicodeError) as error:
        found = f"{len(data)} bytes of another format ({' '.join(str(error).split())[:80]})"
        raise BundleError(
            f"{path} must be a SentencePiece model", found=found, fix=RETRY_HINT
        ) from error
    if vocabulary.keys().isdisjoint(set(subwords) - set(SPECIAL_TOKENS)):
        raise BundleError(
            f"{path} must have its pieces in vocab.json",
            found=f"none of {len(subwords)} there",
            fix=RETRY_HINT,
        )
    return data


def read_bytes(path: Path) -> bytes:
    """Read a small file whole, never through a link."""
    with (
        _as_bundle_error(path),
        open_regular(path) as descriptor,
        os.fdopen(os.dup(descriptor), "rb") as file,
    ):
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise BundleError(
            f"{path} must have at most {_MAX_BYTES} bytes", found="more", fix=RETRY_HINT
        )
    return data


@contextmanager
def _as_bundle_error(path: Path) -> Iterator[None]:
    """Convert an OSError into a BundleError with the reason."""
    try:
        yield
    except (OSError, CorruptError) as error:
        file_type = _describe_file_type(path)
        found = file_type or (
            error.found if isinstance(error, CorruptError) else error.strerror or str(error)
        )
        fix = (
            "copy the files that the links lead to, as by cp -rL"
            if file_type == "a symbolic link"
            else RETRY_HINT
        )
        raise BundleError(
            f"{path} must be a file that can be read", found=found, fix=fix
        ) from error


def _describe_file_type(path: Path) -> str:
    """Describe a path that is no regular file; empty for a regular file."""
    if path.is_symlink():
        return "a symbolic link"
    if path.is_dir():
        return "a directory"
    if not path.exists():
        return "no such file"
    return "" if path.is_file() else "a pipe, a socket or a device"


def _read_config(directory: Path) -> dict[str, Any]:
    """Read config.json of a model that can be imported."""
    if not directory.is_dir():
        found = f"the file {directory}" if directory.exists() else f"no directory at {directory}"
        raise BundleError(
            _REQUIREMENT, found=found, fix="pass a directory such as one of Helsinki-NLP/opus-mt"
        )
    if not os.path.lexists(directory / CONFIG):
        raise BundleError(
            _REQUIREMENT,
            found=f"no {CONFIG} in {directory}",
            fix="pass a directory such as one of Helsinki-NLP/opus-mt",
        )
    with _as_bundle_error(directory / CONFIG):
        hf_config = read_json(directory / CONFIG)
    if hf_config.get("model_type") not in MODEL_TYPES:
        found = f"model_type {hf_config.get('model_type')!r:.60}"
        raise BundleError(
            _REQUIREMENT, found=found, fix="only Marian's and Pegasus's models can be imported"
        )
    return hf_config


def _validate_settings(hf_config: Mapping[str, Any], kind: str, path: Path) -> dict[str, Any]:
    """Return the validated settings; raise BundleError with all that are wrong."""
    problems: list[str] = []
    settings: dict[str, Any] = {}
    for name, (low, high, default) in _INTEGER_SETTINGS.items():
        settings[name] = value = hf_config.get(name, default)
        if type(value) is not int or not low <= value <= high:
            problems.append(
                f"{name} {value!r:.40} that is not an integer from {low} to {high}"
                if name in hf_config
                else f"no {name}"
            )
    for name, flag in _BOOLEAN_SETTINGS.items():
        settings[name] = hf_config.get(name, flag)
        if not isinstance(settings[name], bool):
            problems.append(f"{name} {settings[name]!r:.40} that is neither true nor false")
    for name, fixed in {**_COMMON_FIXED_SETTINGS, **_FIXED_SETTINGS[kind]}.items():
        if hf_config.get(name, fixed) is not fixed:
            problems.append(f"{name} {hf_config[name]!r:.40} where {kind} has {fixed}")
    settings["dropout"] = dropout = hf_config.get("dropout", 0.1)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        problems.append(f"dropout {dropout!r:.40} that is no number from 0 to 1")
    settings["activation_function"] = activation = hf_config.get("activation_function")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        problems.append(
            f"activation_function {activation!r:.40} that is none of {', '.join(ACTIVATIONS)}"
        )
    if not problems:
        problems = _consistency_problems(hf_config, settings, kind)
    if problems:
        found = "; ".join(problems[:3]) + (
            f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        )
        raise BundleError(
            f"{path} must describe a {kind.capitalize()} model that can be imported",
            found=found,
            fix=RETRY_HINT,
        )
    return settings


def _consistency_problems(
    hf_config: Mapping[str, Any], settings: dict[str, Any], kind: str
) -> list[str]:
    """Yield inconsistent settings, and fill in those that follow from others."""
    problems = [
        f"{side}_attention_heads {settings[f'{side}_attention_heads']} "
        f"that do not divide d_model {settings['d_model']}"
        for side in SIDES
        if settings["d_model"] % settings[f"{side}_attention_heads"]
    ]
    if settings["d_model"] % 2:
        problems.append(f"an odd d_model {settings['d_model']}")
    if kind == "pegasus" and not settings["share_encoder_decoder_embeddings"]:
        problems.append("share_encoder_decoder_embeddings False, which Pegasus does not know")
    own = hf_config.get("decoder_vocab_size")
    size = settings["vocab_size"] if own is None else own
    low, high, _ = _INTEGER_SETTINGS["vocab_size"]
    if type(size) is not int or not low <= size <= high:
        problems.append(
            f"decoder_vocab_size {size!r:.40} that is not an integer from {low} to {high}"
        )
    elif settings["share_encoder_decoder_embeddings"] and size != settings["vocab_size"]:
        problems.append(
            f"one embedding for a vocab_size of {settings['vocab_size']} "
            f"and a decoder_vocab_size of {size}"
        )
    settings["decoder_vocab_size"] = size
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        settings[name] = number = hf_config.get(name)
        if number is not None and (
            type(number) is not int or type(size) is not int or not 0 <= number < size
        ):
            problems.append(f"{name} {number!r:.40} that is no id below {size!r:.40}")
    return problems


def _read_beam(directory: Path, hf_config: Mapping[str, Any]) -> int:
    """Return the beam size of generation_config.json or, in older directories, of config.json."""
    path = directory / GENERATION
    generation: Mapping[str, Any] = {}
    if os.path.lexists(path):
        with _as_bundle_error(path):
            generation = read_json(path)
    beam = next(
        (
            each["num_beams"]
            for each in (generation, hf_config)
            if each.get("num_beams") is not None
        ),
        4,
    )
    if type(beam) is not int or not 1 <= beam <= 256:
        raise BundleError(
            f"{path} must have num_beams from 1 to 256",
            found=f"{beam!r:.60}",
            fix="correct it, or remove the file",
        )
    return beam


def _read_headers(directory: Path) -> dict[str, tuple[Path, TensorInfo]]:
    """Return the file, dtype and shape of each weight in one or several safetensors files."""
    if os.path.lexists(directory / WEIGHTS):
        with _as_bundle_error(directory / WEIGHTS):
            return {
                name: (directory / WEIGHTS, shape)
                for name, shape in read_header(directory / WEIGHTS).items()
            }
    if not os.path.lexists(directory / INDEX):
        raise _missing_weights_error(directory)
    with _as_bundle_error(directory / INDEX):
        listed = read_json(directory / INDEX, max_bytes=_MAX_BYTES).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise BundleError(
            f"{directory / INDEX} must have a weight_map of file names",
            found=f"{listed!r:.80}",
            fix=RETRY_HINT,
        )
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for file in sorted(set(listed.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise BundleError(
                f"{directory / INDEX} must name safetensors files beside it",
                found=f"{file!r:.120}",
                fix=RETRY_HINT,
            )
        with _as_bundle_error(directory / file):
            header = read_header(directory / file)
        found |= {
            name: (directory / file, shape)
            for name, shape in header.items()
            if listed.get(name) == file
        }
    lost = sorted(listed.keys() - found.keys())
    if lost:
        raise BundleError(
            f"{directory / listed[lost[0]]} must hold {lost[0]!r:.120}, as listed in {INDEX}",
            found="no such weight",
            fix=RETRY_HINT,
        )
    return found


def _missing_weights_error(directory: Path) -> BundleError:
    """Return the error for a directory without safetensors: pickles can run code."""
    old = sorted(
        each.name
        for each in directory.iterdir()
        if each.name.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"))
    )
    again = (
        "from transformers import AutoModelForSeq2SeqLM as M; "
        f"M.from_pretrained('{directory}').save_pretrained('NEW')"
    )
    fix = f"""make one with transformers, which reads them more safely: python -c "{again}" """
    found = (
        f"only {old[0]!r:.120}, a pickle or another format, "
        "which is not opened because it can run code"
        if old
        else "none"
    )
    return BundleError(
        f"{directory} must hold {WEIGHTS}",
        found=found,
        fix=fix.strip() if old else "download the whole directory",
    )


def _expected_weights(
    settings: Mapping[str, Any], kind: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each required weight, without the embeddings."""
    width = settings["d_model"]
    for side in SIDES:
        inner = settings[f"{side}_ffn_dim"]
        attentions = ("self_attn",) if side == "encoder" else ("self_attn", "encoder_attn")
        for number in range(settings[f"{side}_layers"]):
            layer = f"model.{side}.layers.{number}"
            linears = {
                f"{attention}.{name}_proj": (width, width)
                for attention in attentions
                for name in ("q", "k", "v", "out")
            }
            for name, shape in {**linears, "fc1": (inner, width), "fc2": (width, inner)}.items():
                yield f"{layer}.{name}.weight", shape
                yield f"{layer}.{name}.bias", shape[:1]
            for name in (
                *(f"{attention}_layer_norm" for attention in attentions),
                "final_layer_norm",
            ):
                yield f"{layer}.{name}.weight", (width,)
                yield f"{layer}.{name}.bias", (width,)
        if kind == "pegasus":
            yield f"model.{side}.layer_norm.weight", (width,)
            yield f"model.{side}.layer_norm.bias", (width,)


def _match_weights(
    headers: Mapping[str, tuple[Path, TensorInfo]],
    settings: Mapping[str, Any],
    kind: str,
    directory: Path,
) -> dict[str, Path]:
    """Return the file of each weight in use; raise BundleError if any does not fit."""
    width, positions = settings["d_model"], settings["max_position_embeddings"]
    src, tgt = (settings["vocab_size"], width), (settings["decoder_vocab_size"], width)
    joint, tied = settings["share_encoder_decoder_embeddings"], settings["tie_word_embeddings"]
    required = dict(_expected_weights(settings, kind))
    tables = {"model.encoder.embed_tokens.weight": src, "model.decoder.embed_tokens.weight": tgt}
    if joint:
        tables["model.shared.weight"] = src
        required |= (
            {"model.shared.weight": src}
            if "model.shared.weight" in headers
            else {"model.decoder.embed_tokens.weight": tgt}
        )
    else:
        required |= tables
    if not tied:
        required["lm_head.weight"] = tgt
    optional = {**tables, "lm_head.weight": tgt, "final_logits_bias": (1, tgt[0])}
    optional |= {f"model.{side}.embed_positions.weight": (positions, width) for side in SIDES}
    where = directory / WEIGHTS if (directory / WEIGHTS).exists() else directory / INDEX
    for name, shape in {**optional, **required}.items():
        if name not in headers:
            if name in required:
                must = f"{where} must fit {CONFIG}, by which there is {name}"
                raise BundleError(must, found=f"no {name}", fix=RETRY_HINT)
            continue
        path, found = headers[name]
        if found.shape != shape or found.dtype not in _FLOAT_DTYPES:
            must = f"{path} must fit {CONFIG}, by which {name} is {list(shape)} of floating point"
            raise BundleError(
                must, found=f"{list(found.shape)!s:.80} of {found.dtype!s:.20}", fix=RETRY_HINT
            )
    unknown = sorted(headers.keys() - optional.keys() - required.keys())
    if unknown:
        must = f"{where} must fit {CONFIG} and hold no more weights"
        raise BundleError(
            must,
            found=f"{unknown[0]!r:.120}"
            + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""),
            fix=RETRY_HINT,
        )
    own = set() if tied else set(tables)  # without tying, transformers stores a table for each side
    used = {
        *required,
        *own,
        "final_logits_bias",
        *(f"model.{side}.embed_positions.weight" for side in SIDES),
    }
    return {name: path for name, (path, _) in headers.items() if name in used}


def _require_memory(
    headers: Mapping[str, tuple[Path, TensorInfo]], weight_files: Mapping[str, Path]
) -> None:
    """Raise BundleError if three float32 copies of the weights do not fit in free memory."""
    needed = 0
    for name in weight_files:
        count = 12
        for axis in headers[name][1].shape:
            count *= axis
        needed += count
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(
                int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")
            )
    except (OSError, ValueError, AttributeError, StopIteration):
        return
    if needed > free:
        must = f"the weights must fit into memory, {format_bytes(needed)}"
        raise BundleError(
            must, found=f"{format_bytes(free)} available", fix="use a machine with more memory"
        )


def _require_sinusoidal(weights: Mapping[str, Tensor], weight_files: Mapping[str, Path]) -> None:
    """Raise BundleError for stored positions that are not sinusoidal."""
    for side in SIDES:
        name = f"model.{side}.embed_positions.weight"
        if name in weights:
            table = weights[name]
            wanted = SinusoidalHalvesPositions(width=table.size(1)).vectors(0, table.size(0))
            off = float((table - wanted).abs().max())
            if off > 0.01:
                must = f"{weight_files[name]} must have sinusoidal positions as {name}"
                raise BundleError(
                    must, found=f"others, {off:.3g} off", fix="such a model cannot be imported"
                )
