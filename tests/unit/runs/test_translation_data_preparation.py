"""Tokenizers that a run learns, caches and replaces, and the pairs that it holds out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dragoman.bundle.format import TEXT_FILES
from dragoman.config import Config
from dragoman.config.root_config import DataConfig, TextConfig
from dragoman.errors import BundleError
from dragoman.runs import translation_data_preparation as data_preparation
from dragoman.runs.validation_split import is_held_out
from dragoman.text.sentencepiece_tokenizer import load_tokenizers, train_tokenizers
from dragoman.text.special_tokens import UNK
from dragoman.training.progress_display import QuietProgress


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


def prepare(folder: Path, name: str, **data: str) -> data_preparation.PreparedData:
    """Prepare the data of a run with the cache that all runs share."""
    config = Config().replace(
        text={
            "tokenizer": "characters",
            "byte_fallback": False,
            "vocab_size": 300,
            "character_coverage": 1.0,
        },
        data={"cache_dir": str(folder / "cache"), **data},
    )
    return data_preparation.prepare_data(config, folder / name / "text", QuietProgress())


def test_other_columns_of_a_file_have_a_tokenizer_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text(json.dumps({"de": "aab", "en": "ccd", "fr": "eef"}) + "\n")
    for source, text in (("de", "aab"), ("fr", "eef"), ("de", "aab")):
        found = prepare(tmp_path, source, pairs=str(path), src_field=source, tgt_field="en")
        assert UNK not in found.tokenizers.src.encode(text), source
        assert found.train.report.unknown_fraction() == 0


def test_a_cached_tokenizer_of_all_pairs_is_not_that_of_a_split_corpus(tmp_path: Path) -> None:
    """Held-out pairs may not add to the vocabulary, whatever an earlier run learnt from."""
    corpus, other = tmp_path / "corpus.txt", tmp_path / "other.txt"
    corpus.write_text("".join(f"{chr(0x4E00 + n)}\n" for n in range(60)))  # a letter in each line
    other.write_text("a\n")
    files = {"src": str(corpus), "tgt": str(corpus)}
    whole = prepare(tmp_path, "whole", **files, valid_src=str(other), valid_tgt=str(other))
    split = prepare(tmp_path, "split", **files)
    held_out = [pair.src for pair in split.sentences]
    assert held_out
    for text in held_out:
        assert UNK not in whole.tokenizers.src.encode(text)
        assert UNK in split.tokenizers.src.encode(text)
