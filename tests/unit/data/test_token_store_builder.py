"""Token stores that are damaged, changed or incomplete are detected and built again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from store_kit import ENGLISH, GERMAN, prepare_store, write_corpus
from sync_kit import SyncRecorder

from dragoman.config.root_config import DataConfig, TextConfig
from dragoman.data import token_store_builder
from dragoman.data.parallel_corpus import ParallelFiles
from dragoman.data.token_store import TokenStore
from dragoman.errors import CorruptError, DiskError, PermissionDeniedError
from dragoman.storage.atomic_and_safe_file_io import hash_file
from dragoman.storage.manifest import read_manifest
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

FILES = [f"{side}.{part}" for side in ("src", "tgt") for part in ("bin", "offsets", "lengths")] + [
    "numbers"
]


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return train_tokenizers(
        GERMAN * 20, ENGLISH * 20, TextConfig(vocab_size=330, character_coverage=1.0)
    )


@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_noticed_when_opened_and_built_again(
    tmp_path: Path, tokenizers: Tokenizers, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    store = prepare_store(corpus, tokenizers, tmp_path / "cache")
    size = (store.folder / name).stat().st_size
    os.truncate(store.folder / name, size - 1)
    with pytest.raises(
        CorruptError, match=f"{name} must have {size} bytes; found {size - 1} bytes; delete"
    ):
        TokenStore.open(store.folder)
    again = prepare_store(corpus, tokenizers, tmp_path / "cache")
    again.verify()
    assert "is built again" in caplog.text
    assert len(list((tmp_path / "cache").glob("*.damaged-*"))) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_noticed_before_it_is_used(
    tmp_path: Path, tokenizers: Tokenizers, name: str
) -> None:
    store = prepare_store(write_corpus(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    path = store.folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(
        CorruptError, match=f"{name} must be as it was written; found SHA-256 "
    ) as caught:
        TokenStore.open(store.folder).pair(0)
    assert caught.value.exit_code == 65


def test_every_file_is_durable_and_hashed_before_the_store_is_visible(
    tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = SyncRecorder(monkeypatch)
    folder = prepare_store(
        write_corpus(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache"
    ).folder
    recorder.check_published(folder)
    content = read_manifest(folder)
    assert sorted(content["files"]) == sorted(FILES)
    for name in FILES:
        assert content["files"][name] == hash_file(folder / name)._asdict()


def test_a_missing_file_and_an_edited_manifest_are_noticed(
    tmp_path: Path, tokenizers: Tokenizers
) -> None:
    store = prepare_store(write_corpus(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    copy = tmp_path / "copy"
    shutil.copytree(store.folder, copy)
    (copy / "tgt.bin").unlink()
    with pytest.raises(CorruptError, match=r"tgt\.bin must have .*; found no such file"):
        TokenStore.open(copy)
    manifest = json.loads((store.folder / "manifest.json").read_text())
    manifest["report"]["pairs"] = 2
    (store.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match=r"manifest\.json"):
        TokenStore.open(store.folder)


def test_a_folder_without_a_manifest_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"manifest\.json.*No such file"):
        TokenStore.open(tmp_path)


def test_a_corpus_that_changes_between_hashing_and_reading_is_rejected(
    tmp_path: Path, tokenizers: Tokenizers
) -> None:
    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    real = corpus.records

    def edited():
        corpus.src.write_text("".join(f"{line}!\n" for line in GERMAN), encoding="utf-8")
        return real()

    corpus.records = edited  # type: ignore[method-assign]
    with pytest.raises(
        CorruptError,
        match=r"x\.de must stay as it is while it is prepared; found SHA-256 \w+… before and \w+… "
        r"after",
    ):
        prepare_store(corpus, tokenizers, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_corpus_that_stops_reading_early_is_still_checked(
    tmp_path: Path, tokenizers: Tokenizers
) -> None:
    class Half(ParallelFiles):
        def records(self):
            for record in super().records():
                if record.number > 2:
                    return
                yield record

    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    assert len(prepare_store(Half(*corpus.files), tokenizers, tmp_path / "cache")) == 2


def test_temporary_directories_of_ended_processes_are_removed(
    tmp_path: Path, tokenizers: Tokenizers
) -> None:
    cache = tmp_path / "cache"
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    mine = token_store_builder._host_id()
    for host, pid in ((mine, dead), (mine, str(os.getpid())), ("00000000", dead)):
        leftover = cache / f".tmp-store-{host}-{pid}-0000aaff"
        leftover.mkdir(parents=True)
        (leftover / "src.bin").write_bytes(b"half")
    prepare_store(write_corpus(tmp_path, GERMAN, ENGLISH), tokenizers, cache)
    left = {path.name for path in cache.iterdir() if path.name.startswith(".tmp")}
    assert left == {
        f".tmp-store-{mine}-{os.getpid()}-0000aaff",
        f".tmp-store-00000000-{dead}-0000aaff",
    }


def test_two_processes_may_build_the_same_store(
    tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    real = token_store_builder.publish_directory

    def beaten(temporary: Path, final: Path) -> None:
        shutil.copytree(temporary, final)
        real(temporary, final)

    monkeypatch.setattr(token_store_builder, "publish_directory", beaten)
    store = prepare_store(corpus, tokenizers, tmp_path / "cache")
    assert len(store) == 3
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [store.folder.name]


def test_a_full_disk_leaves_nothing_behind(
    tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_store_builder, "write_manifest", full)
    with pytest.raises(
        DiskError, match=r"must have space.*found No space left on device"
    ) as caught:
        prepare_store(write_corpus(tmp_path, GERMAN, ENGLISH), tokenizers, tmp_path / "cache")
    assert caught.value.exit_code == 74
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_may_not_be_written_exits_77(
    tmp_path: Path, tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_permission_error(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    corpus = write_corpus(tmp_path, GERMAN, ENGLISH)
    monkeypatch.setattr(Path, "mkdir", raise_permission_error)
    with pytest.raises(PermissionDeniedError, match="Permission denied"):
        prepare_store(corpus, tokenizers, tmp_path / "cache")


def test_a_store_is_published_once_or_the_error_is_raised(tmp_path: Path) -> None:
    """Another process may have built the same one; other errors are not taken for that."""
    first, second, final = (tmp_path / name for name in ("first", "second", "store"))
    for folder in (first, second):
        folder.mkdir()
        (folder / "ids.bin").write_text(folder.name)
    token_store_builder._publish_if_absent(first, final)
    token_store_builder._publish_if_absent(second, final)
    assert (final / "ids.bin").read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    with pytest.raises(OSError, match="No such file"):
        token_store_builder._publish_if_absent(first, tmp_path / "missing" / "store")


@pytest.mark.parametrize(
    ("sizes", "id_bytes"), [((65_536, 9), 2), ((65_537, 9), 4), ((9, 65_537), 4)]
)
def test_ids_have_space_for_the_larger_vocabulary(
    sizes: tuple[int, int], id_bytes: int, tmp_path: Path
) -> None:
    tokenizers: Any = Tokenizers(*(MagicMock(tag_ids={}) for _ in sizes))
    for each, size in zip(tokenizers, sizes, strict=True):
        each.__len__.return_value = size
    corpus: Any = None
    with contextlib.ExitStack() as stack:
        writer = token_store_builder._StoreWriter(tmp_path, corpus, tokenizers, DataConfig(), stack)
        assert writer.id_bytes == id_bytes
