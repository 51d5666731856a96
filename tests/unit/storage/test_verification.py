"""Entries of a model's directory that its manifest does not list."""

from __future__ import annotations

from pathlib import Path

from dragoman.storage.atomic import hash_file
from dragoman.storage.manifest import MANIFEST_NAME, write_manifest
from dragoman.storage.verification import list_unlisted_files, verify_directory


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
