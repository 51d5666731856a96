"""Entries of a model's directory that its manifest does not list."""

from __future__ import annotations

from pathlib import Path

from dragoman.storage.manifest import MANIFEST_NAME
from dragoman.storage.verification import list_unlisted_files


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
