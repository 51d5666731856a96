"""Atomic writing of bundles, through a temporary directory; the manifest is moved last.

The directory may already contain a training run, which is not changed. Without its manifest the
directory is not a bundle, and loading it raises BundleError.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dragoman._version import __version__
from dragoman.bundle import format as layout
from dragoman.bundle.card import Card, write_card
from dragoman.bundle.golden_vectors import GoldenInput, make_golden
from dragoman.bundle.non_translation_bundle_loader import (
    build_loaded_task_model,
    make_task_golden,
    task_text_files,
)
from dragoman.bundle.translation_bundle_loader import build_loaded_model
from dragoman.config import Config, to_dict
from dragoman.config.device_engine_and_precision_names import check_bundle_quantization
from dragoman.config.root_config import CORPUS_SETTINGS, file_names
from dragoman.errors import BundleError
from dragoman.evaluate.confidence_calibration import ConfidenceMap
from dragoman.models.factory import count_parameters
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import (
    FileRecord,
    sync_directory,
    temporary_name,
    write_file,
)
from dragoman.storage.disk_space_and_errors import os_errors_converted, require_writable
from dragoman.storage.int8_quantization import dequantize_tensors, quantize_tensors
from dragoman.storage.tensor_files import check_finite, write_tensors
from dragoman.tasks.non_translation_task import TrainingTask
from dragoman.text.language_identification import LanguageIdentifier
from dragoman.text.sentencepiece_tokenizer import Tokenizers, save_tokenizers

_LEFTOVER_PATTERN = re.compile(re.escape(layout.TEMPORARY_PREFIX) + r"\d+-[0-9a-f]{8}")


def write_bundle(
    path: str | Path,
    *,
    config: Config,
    tokenizers: Tokenizers,
    weights: Mapping[str, Tensor],
    card: Card | str | None = None,
    golden: Sequence[str | GoldenInput] = (),
    identifier: LanguageIdentifier | None = None,
    manifest_fields: Mapping[str, Any] | None = None,
    calibration: ConfidenceMap | None = None,
    quantization: str = "float32",
) -> None:
    """Write a bundle into a directory, replacing an existing one.

    `golden` are the inputs of the golden vectors. `identifier` detects the source language of a
    multilingual model. `card` is the contents of the model card or its whole text.
    `manifest_fields` are added to the manifest, for `dragoman info`. `calibration` is that of the
    confidence with these weights. The quantization int8 stores the weights in a quarter of the
    space. Corpus files are recorded by base name only.
    """
    check_bundle_quantization(quantization)
    config = strip_directories(config)
    weights = {name: tensor.detach().float().cpu() for name, tensor in weights.items()}
    check_finite(weights, "weight")
    fields = dict(manifest_fields or {})
    fields.pop("quantization", None)
    stored: Mapping[str, Tensor] = weights
    if quantization == "int8":
        stored = quantize_tensors(weights)
        weights = dequantize_tensors(dict(stored), weights)
        fields["quantization"] = quantization
    model = build_loaded_model(config, tokenizers, weights)
    with tempfile.TemporaryDirectory(prefix="dragoman-") as folder:
        save_tokenizers(tokenizers, Path(folder))
        text_files = {each.name: each.read_bytes() for each in sorted(Path(folder).iterdir())}
    if identifier is not None:
        text_files[layout.LANGUAGE_ID] = identifier.to_bytes()
    if config.data.directions:
        fields["directions"] = list(config.data.directions)
    _write_bundle(
        Path(path),
        config=config,
        weights=stored,
        parameters=count_parameters(model),
        card=card,
        golden=make_golden(model, tokenizers, golden),
        text_files=text_files,
        manifest_fields=fields,
        calibration=calibration,
    )


def write_task_bundle(
    path: str | Path,
    *,
    task: TrainingTask,
    weights: Mapping[str, Tensor],
    card: Card | None = None,
    golden: Sequence[Any] = (),
    manifest_fields: Mapping[str, Any] | None = None,
) -> None:
    """Write the bundle of a task other than translation; see `write_bundle`."""
    config = strip_directories(task.config)
    weights = {name: tensor.detach().float().cpu() for name, tensor in weights.items()}
    check_finite(weights, "weight")
    model = build_loaded_task_model(task, weights)
    _write_bundle(
        Path(path),
        config=config,
        weights=weights,
        parameters=count_parameters(model),
        card=card,
        golden=make_task_golden(task, model, golden),
        text_files=task_text_files(task),
        manifest_fields=manifest_fields or {},
    )


def _write_bundle(
    path: Path,
    *,
    config: Config,
    weights: Mapping[str, Tensor],
    parameters: int,
    card: Card | str | None,
    golden: Mapping[str, Any],
    text_files: Mapping[str, bytes],
    manifest_fields: Mapping[str, Any],
    calibration: ConfidenceMap | None = None,
) -> None:
    """Write all files into a temporary directory and move them into place."""
    if not isinstance(card, str):
        card = write_card(card or Card(), config, parameters=parameters, calibration=calibration)
    small_files = {
        layout.CARD: card.encode("utf-8", "backslashreplace"),
        layout.CONFIG: manifest.canonical_json(to_dict(config)),
        layout.GOLDEN: manifest.canonical_json(golden),
    }
    if calibration is not None:
        small_files[layout.CALIBRATION] = manifest.canonical_json(calibration.to_dict())
    fields = {
        **manifest_fields,
        "kind": layout.MANIFEST_KIND,
        "bundle_format": layout.FORMAT_VERSION,
        "created_by": f"dragoman {__version__}",
        "parameters": parameters,
    }
    is_new = not path.exists()
    require_writable(path)
    if (path / layout.TEXT).is_symlink():
        found = f"a symbolic link to {os.readlink(path / layout.TEXT)!r:.120}"
        raise BundleError(
            f"{path / layout.TEXT} must be a folder of the model itself",
            found=found,
            fix="remove the link",
        )
    with os_errors_converted(path):
        _remove_leftovers(path)
        temporary = path / temporary_name("bundle")
        try:
            _write_temporary(temporary, text_files, weights, small_files, fields)
            _move_into_place(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if is_new and not (path / manifest.MANIFEST_NAME).exists():
                with contextlib.suppress(OSError):  # it may hold files of another process
                    path.rmdir()


def strip_directories(config: Config) -> Config:
    """Return a configuration with base names of its corpus files and without its cache folder."""
    data: dict[str, object] = {"cache_dir": ""}
    for name in CORPUS_SETTINGS:
        names = tuple(Path(each).name for each in file_names(getattr(config.data, name)))
        data[name] = names if len(names) > 1 else "".join(names)
    return config.replace(data=data)


def _write_temporary(
    temporary: Path,
    text_files: Mapping[str, bytes],
    weights: Mapping[str, Tensor],
    small_files: Mapping[str, bytes],
    fields: Mapping[str, Any],
) -> None:
    """Write and sync every file into the temporary directory."""
    files: dict[str, FileRecord] = {}
    os.mkdir(temporary)
    files[layout.WEIGHTS] = write_tensors(temporary / layout.WEIGHTS, weights)
    for name, data in small_files.items():
        files[name] = write_file(temporary / name, [data])
    os.mkdir(temporary / layout.TEXT)
    for name, data in sorted(text_files.items()):
        files[f"{layout.TEXT}/{name}"] = write_file(temporary / layout.TEXT / name, [data])
    sync_directory(temporary / layout.TEXT)
    manifest.write_manifest(temporary, files, fields)
    sync_directory(temporary)


def _move_into_place(temporary: Path, path: Path) -> None:
    """Remove the old manifest, move the files, and move the new manifest last."""
    (path / manifest.MANIFEST_NAME).unlink(missing_ok=True)
    sync_directory(path)
    text = path / layout.TEXT
    text.mkdir(exist_ok=True)
    for old in layout.TEXT_FILES:
        (text / old).unlink(missing_ok=True)
    for each in (temporary / layout.TEXT).iterdir():
        os.replace(each, text / each.name)
    sync_directory(text)
    (path / layout.CALIBRATION).unlink(missing_ok=True)  # the new bundle may have none
    for each in sorted(temporary.iterdir()):
        if each.is_file() and each.name != manifest.MANIFEST_NAME:
            os.replace(each, path / each.name)
    sync_directory(path)
    os.replace(temporary / manifest.MANIFEST_NAME, path / manifest.MANIFEST_NAME)
    sync_directory(path)


def _remove_leftovers(path: Path) -> None:
    """Remove temporary directories of interrupted writes."""
    for each in path.glob(f"{layout.TEMPORARY_PREFIX}*"):
        if _LEFTOVER_PATTERN.fullmatch(each.name) and each.is_dir() and not each.is_symlink():
            shutil.rmtree(each, ignore_errors=True)  # follows no links
