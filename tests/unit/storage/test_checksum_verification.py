"""Entries of a model's directory that its manifest does not list."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.errors import BundleError
from dragoman.storage.atomic_and_safe_file_io import hash_file
from dragoman.storage.checksum_verification import list_unlisted_files, verify_directory
from dragoman.storage.manifest import MANIFEST_NAME, write_manifest


def test_a_directory_without_a_manifest_lists_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert list_unlisted_files(tmp_path) == []


def test_other_files_and_links_are_listed(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text('{"files": {}}')
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "training").mkdir()
    (tmp_path / "engines").mkdir()
    assert "notes.txt" in list_unlisted_files(tmp_path)
    assert "training" not in [name.rstrip("/") for name in list_unlisted_files(tmp_path)]


def test_a_link_in_place_of_a_listed_file_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"x")
    write_manifest(tmp_path, {"weights": hash_file(tmp_path / "weights")}, {})
    (tmp_path / "weights").rename(tmp_path.parent / "elsewhere")
    (tmp_path / "weights").symlink_to(tmp_path.parent / "elsewhere")
    (tmp_path / "mine").symlink_to(tmp_path.parent / "elsewhere")
    problems = [(each.name, each.problem) for each in verify_directory(tmp_path) if not each.ok]
    assert problems == [("weights", "a symbolic link")]
    assert list_unlisted_files(tmp_path) == ["mine"]


def write_listed(folder: Path, name: str) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_bytes(b"x")
    write_manifest(folder, {name: hash_file(folder / name)}, {})


def test_engines_are_part_of_a_model_and_other_files_among_them_are_not(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_listed(model, "weights")
    write_listed(model / "engines" / "onnx", "model.onnx")
    (model / "engines" / ".tmp-onnx").mkdir()
    (model / "engines" / "notes.txt").write_text("mine")
    (model / "engines" / "link").symlink_to(model / "engines" / "onnx")
    (model / "papers").mkdir()
    assert list_unlisted_files(model) == ["papers/", "engines/link", "engines/notes.txt"]
    assert [check.name for check in verify_directory(model)] == [
        MANIFEST_NAME,
        "weights",
        f"engines/onnx/{MANIFEST_NAME}",
        "engines/onnx/model.onnx",
    ]


@pytest.mark.parametrize("linked", ["training", "training/keep", "engines"])
def test_the_target_of_a_link_is_not_verified(tmp_path: Path, linked: str) -> None:
    model, outside = tmp_path / "model", tmp_path / "outside"
    write_listed(model, "weights")
    write_listed(outside / "step-00000001", "weights.safetensors")
    (model / linked).parent.mkdir(exist_ok=True)
    (model / linked).symlink_to(outside)
    assert [check.name for check in verify_directory(model)] == [MANIFEST_NAME, "weights"]


def test_a_path_that_is_not_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BundleError, match="found a file; pass the directory"):
        verify_directory(tmp_path / "file")
    with pytest.raises(BundleError, match="found nothing there"):
        verify_directory(tmp_path / "missing")
