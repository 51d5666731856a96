"""Folders of tokenizers that a run replaces, and what it warns of."""

from __future__ import annotations

from pathlib import Path

import pytest

from dragoman.bundle.format import TEXT_FILES
from dragoman.config import Config
from dragoman.config.config import DataConfig, TextConfig
from dragoman.errors import BundleError
from dragoman.runs import data_preparation
from dragoman.runs.validation_split import is_held_out
from dragoman.text.tokenizer import load_tokenizers, train_tokenizers


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


@pytest.mark.parametrize("pairs", [49, 50])
def test_fifty_pairs_are_enough_to_hold_one_out(tmp_path: Path, pairs: int) -> None:
    for side in ("src", "tgt"):
        (tmp_path / side).write_text("".join(f"{n}\n" for n in range(pairs)))
    config = Config().replace(data={"src": str(tmp_path / "src"), "tgt": str(tmp_path / "tgt")})
    corpora = data_preparation.open_corpora(config.data)
    parts = [[pair.number for pair in each.pairs()] for each in corpora[:2] if each is not None]
    if pairs < 50:
        assert parts == [[*range(1, 50)]]
        assert (corpora.held_out, corpora.note) == (
            False,
            "no validation set: fewer than 50 sentence pairs",
        )
    else:
        assert sorted(parts[0] + parts[1]) == [*range(1, 51)]
        assert len(parts[1]) == 1
        assert corpora.held_out


@pytest.mark.parametrize("languages", [{}, {"languages": ("de-en",), "directions": ("de-en",)}])
def test_bad_lines_are_skipped_on_both_sides_of_the_split(
    tmp_path: Path, languages: dict[str, tuple[str, ...]]
) -> None:
    lines = [f"{n}".encode() for n in range(1, 101)]
    held_out = [number for number in range(1, 101) if is_held_out(number)]
    bad = [held_out[0], 7]
    for number in bad:
        lines[number - 1] = b"caf\xe9"
    (tmp_path / "src").write_bytes(b"\n".join(lines))
    (tmp_path / "tgt").write_text("\n".join(f"{n}" for n in range(1, 101)))
    files = {"src": str(tmp_path / "src"), "tgt": str(tmp_path / "tgt")}
    settings = DataConfig(**files, **languages, on_bad_line="skip")
    train, valid = data_preparation.open_corpora(settings)[:2]
    assert valid is not None
    assert [int(pair.src) for pair in valid.pairs()] == held_out[1:]
    assert [int(pair.src) for pair in train.pairs()] == [
        number for number in range(1, 101) if number not in (*held_out, *bad)
    ]


def test_tokenizers_of_an_earlier_attempt_are_replaced(tmp_path: Path) -> None:
    first, second = (
        train_tokenizers([text], [text], TextConfig(tokenizer="characters", byte_fallback=False))
        for text in ("ab" * 9, "cd" * 9)
    )
    folder = tmp_path / "text"
    for tokenizers in (first, second, second):
        data_preparation._replace_tokenizers(tokenizers, folder)
        assert load_tokenizers(folder).src.digest == tokenizers.src.digest
    assert [each.name for each in tmp_path.iterdir()] == ["text"]
