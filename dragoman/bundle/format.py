"""The bundle format: its files, their maximum sizes, and errors for other directories."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dragoman.errors import BundleError, ConfigError, CorruptError, suggest_any
from dragoman.registry import catalogue
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import hash_file

FORMAT_VERSION = 1
MANIFEST_KIND = "dragoman bundle"

WEIGHTS, CONFIG, GOLDEN, CARD = "weights.safetensors", "config.json", "golden.json", "card.md"
CALIBRATION = "calibration.json"  # of the confidence; not in every bundle
TEXT = "text"
LANGUAGE_ID = "language_id.npy"  # in TEXT
TEXT_FILES = (
    "shared.model",
    "source.model",
    "target.model",
    "source.pieces.json",
    "target.pieces.json",
    "text.json",
    LANGUAGE_ID,  # of translation models with several source languages
    # of tasks other than translation
    "words.json",
    "characters.json",
    "labels.json",
    "inputs.json",
    "auxiliary.json",
    "attributes.json",
    "features.json",
    "tagging.json",
    "ngrams.npy",
)

# Maximum bytes of each file. No file can name another: only these are ever opened.
MAX_FILE_BYTES = {
    CALIBRATION: 1 << 20,
    CARD: 1 << 20,
    CONFIG: 1 << 20,
    GOLDEN: 4 << 20,
    WEIGHTS: 40 << 30,
    **{f"{TEXT}/{name}": 1 << 20 if name == "text.json" else 64 << 20 for name in TEXT_FILES},
}
BOX = Path(__file__).parent.parent / "box"  # the built-in model
REQUIRED = frozenset({CARD, CONFIG, GOLDEN, WEIGHTS, f"{TEXT}/text.json"})
MAX_PARAMETERS = 10_000_000_000  # checked before anything is allocated
TEMPORARY_PREFIX = ".tmp-bundle-"

_FOREIGN_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".h5", ".onnx")


def box_path() -> Path:
    """Return the directory of the built-in model, which is used where no other is named.

    Raise BundleError if this installation has none.
    """
    if not (BOX / manifest.MANIFEST_NAME).exists():
        raise BundleError(
            "a model must be named where there is no built-in one",
            found=f"none in {BOX}",
            fix="name its directory, such as -m MODEL, train one with `dragoman train`, or install "
            "a release of dragoman, which comes with one",
        )
    return BOX


def model_paths(path: str | Path | Sequence[str | Path] | None) -> list[Path]:
    """Return the directories of a model or of an ensemble; without a path the built-in model's."""
    if path is None:
        return [box_path()]
    given: list[Any] = list(path) if isinstance(path, (list, tuple)) else [path]
    for each in given:
        if not isinstance(each, (str, Path)):
            raise ConfigError(
                [
                    "a model must be the path of a directory, or several in a list; found "
                    f"{each!r:.40} ({type(each).__name__}); pass a path such as 'my-model'"
                ]
            )
    return [Path(each) for each in given]


def require_bundle(path: Path) -> None:
    """Raise BundleError, with what was found instead, unless the path is a finished bundle."""
    must = "a model must be the directory of a finished bundle"
    if not path.exists():
        raise BundleError(must, found=f"nothing at {path}", fix=_suggest_bundle(path))
    if not path.is_dir():
        inside = (path.parent / manifest.MANIFEST_NAME).exists()
        raise BundleError(
            must,
            found=f"the file {path}",
            fix=f"pass its directory, {path.parent}" if inside else _suggest_bundle(path),
        )
    if (path / manifest.MANIFEST_NAME).exists() or (path / manifest.MANIFEST_NAME).is_symlink():
        return
    names = sorted(os.listdir(path))
    if path.resolve().name == "training" and (path.parent / manifest.MANIFEST_NAME).exists():
        raise BundleError(
            must,
            found=f"{path}, the run that a model came from",
            fix=f"pass the model itself, {path.parent}",
        )
    if any(name.startswith(TEMPORARY_PREFIX) for name in names) or WEIGHTS in names:
        found = f"{path} half-written: it has no {manifest.MANIFEST_NAME}, which is written last"
        raise BundleError(must, found=found, fix="run the command that was writing it again")
    if "training" in names:
        raise BundleError(
            must,
            found=f"{path} with an unfinished training run: training/ without "
            f"{manifest.MANIFEST_NAME}",
            fix="finish it with `dragoman train --resume`, or average its checkpoints: "
            f"`dragoman average {path} --out NEW`",
        )
    foreign = [name for name in names if name.endswith(_FOREIGN_SUFFIXES)]
    if foreign:
        raise BundleError(
            must,
            found=f"{path} with {foreign[0]}, another program's model, which is not opened",
            fix="pass a Dragoman model",
        )
    found = (
        f"{path} with {', '.join(names[:4])}{' …' if len(names) > 4 else ''}"
        if names
        else f"{path}, which is empty"
    )
    raise BundleError(must, found=found, fix=_suggest_bundle(path))


def read_task(path: Path) -> str:
    """Return the task in a bundle's configuration, which is verified only when it is loaded.

    Raise CorruptError for a configuration that cannot be read.
    """
    task = manifest.read_json(path / CONFIG).get("task", "translate")
    return task if isinstance(task, str) else repr(task)


def check_config(path: Path) -> None:
    """Raise CorruptError if a bundle's configuration is not the one that its manifest lists."""
    try:
        listed = manifest.read_manifest(path)["files"].get(CONFIG)
    except (CorruptError, BundleError):  # reported when the model is loaded
        return
    found = hash_file(path / CONFIG).sha256
    if listed is not None and found != listed["sha256"]:
        raise manifest.corrupt_file_error(
            path / CONFIG, f"SHA-256 {found[:12]}… where {listed['sha256'][:12]}… was written"
        )


def read_command(path: Path) -> str:
    """Return the command that runs a bundle's model; "" for a task that is not known."""
    task = read_task(path)
    if task not in catalogue("predictor"):
        return ""
    section = {} if task != "language" else manifest.read_json(path / CONFIG).get("language", {})
    return model_command(task, section.get("objective") if isinstance(section, dict) else None)


def model_command(task: str, objective: object = None) -> str:
    """Return the command that runs models of a task; a language model with masks predicts."""
    has_masks = task == "language" and objective in ("masked", "permuted")
    return "predict" if has_masks else catalogue("predictor")[task].family


def _suggest_bundle(path: Path) -> str:
    """Return a hint that names bundles inside or beside the path."""
    for folder in (path, path.parent):
        if folder.is_dir():
            manifests = sorted(folder.glob(f"*/{manifest.MANIFEST_NAME}"))[:3]
            if manifests:
                return suggest_any([str(each.parent) for each in manifests])
    return "check the path, or train a model first with `dragoman train`"
