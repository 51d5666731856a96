"""Folders of tokenizers that a run replaces, and what it warns of."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.bundle.format import TEXT_FILES
from dragoman.errors import BundleError
from dragoman.runs import data_preparation


def test_only_a_folder_of_tokenizers_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in TEXT_FILES:
        (folder / name).write_text("{}")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"'notes\.txt' in it"):
        data_preparation._remove_tokenizers(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(BundleError, match="a symbolic link"):
        data_preparation._remove_tokenizers(link)
    assert sorted(each.name for each in folder.iterdir()) == sorted(TEXT_FILES)
    data_preparation._remove_tokenizers(folder)
    assert not list(folder.glob("*"))
