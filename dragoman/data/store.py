"""The store: a corpus as piece ids on disk, memory-mapped, in a folder named by the hash of all that decides it.

src.bin, tgt.bin                piece ids, one sentence after another; uint16 where the vocabulary allows, else uint32
src.offsets, tgt.offsets        uint64: where each sentence starts, and the end of the last
src.lengths, tgt.lengths        uint16: pieces of each sentence, without start or end
numbers                         uint64: the line of the corpus that each pair comes from
manifest.json                   sizes and SHA-256 of these, the key, and what was set aside; written last
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dragoman.config.tree import DataConfig
from dragoman.data.corpus import Corpus
from dragoman.data.preparing import Progress, StoreReport, prepare_folder
from dragoman.data.streams import file_digest
from dragoman.errors import CorruptError
from dragoman.files.atomic import read_record
from dragoman.files.cache import cache_folder
from dragoman.files.disk import explaining
from dragoman.files.manifest import canonical_json, read_manifest
from dragoman.text.specials import PAD
from dragoman.text.tokenizer import Tokenizers

logger = logging.getLogger(__name__)

FORMAT = 1  # raise it when the same inputs would give other contents


class Store:
    """A prepared corpus: pairs of piece ids by number, read from the disk as they are needed."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.report = StoreReport(**manifest["report"])
        self.digest = str(manifest["key"])
        self._files: dict[str, Any] = manifest["files"]
        self._sound: set[str] = set()
        self._count = self.report.pairs
        ids = np.uint16 if manifest["id_bytes"] == 2 else np.uint32
        self._ids = {side: self._map(f"{side}.bin", ids, None) for side in ("src", "tgt")}
        self._offsets = {side: self._map(f"{side}.offsets", np.uint64, self._count + 1) for side in ("src", "tgt")}
        self.src_lengths: NDArray[np.uint16] = self._map("src.lengths", np.uint16, self._count)
        self.tgt_lengths: NDArray[np.uint16] = self._map("tgt.lengths", np.uint16, self._count)
        self.numbers: NDArray[np.uint64] = self._map("numbers", np.uint64, self._count)
        for name in ("src.lengths", "tgt.lengths", "src.offsets", "tgt.offsets", "numbers"):
            self._touch(name)

    @classmethod
    def prepare(
        cls,
        corpus: Corpus,
        tokenizers: Tokenizers,
        *,
        folder: Path,
        data: DataConfig,
        progress: Callable[[Progress], None] | None = None,
        workers: int | None = None,
        digests: list[str] | None = None,
    ) -> Store:
        """Open the store of a corpus below `folder`, after making it on all cores when it is not there yet.

        `digests` are the SHA-256 of the corpus's files where they are known: what is read must have them.
        """
        digests = digests or [file_digest(path) for path in corpus.files]
        key = store_key(corpus, digests, tokenizers, data)
        final = Path(folder) / f"store-{key[:32]}"
        if final.exists():
            try:
                return cls.open(final)
            except CorruptError as error:
                aside = final.with_name(f"{final.name}.damaged-{os.getpid()}")
                logger.warning("the prepared data was damaged and is made anew: %s; the old is in %s", error.found, aside)
                with explaining(final):
                    os.rename(final, aside)
        prepare_folder(corpus, tokenizers, final=final, key=key, digests=digests, data=data, progress=progress, workers=workers)
        return cls.open(final)

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Open a finished store; sizes are checked now, contents when first used."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        for name, record in manifest["files"].items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else -1
            if size != record["bytes"]:
                found = f"{size} bytes" if size >= 0 else "no such file"
                raise CorruptError(f"{path} must have {record['bytes']} bytes", found=found, fix=_REMAKE.format(folder))
        return cls(folder, manifest)

    def __len__(self) -> int:
        """Count the pairs."""
        return self._count

    def pair(self, index: int) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
        """Return a pair's piece ids, source and target, without start or end; the numbers are counted from 0."""
        return self.ids("src", index), self.ids("tgt", index)

    def ids(self, side: str, index: int) -> NDArray[np.integer[Any]]:
        """Return one side of a pair, a view of the mapped file."""
        if not 0 <= index < self._count:
            raise IndexError(f"the store has pairs 0 to {self._count - 1}; found {index}")
        self._touch(f"{side}.bin")
        offsets = self._offsets[side]
        return self._ids[side][int(offsets[index]) : int(offsets[index + 1])]

    def table(self, side: str, examples: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return one side of several pairs as rows, filled up with PAD to a width that holds the longest."""
        if len(examples) and not (examples.min() >= 0 and examples.max() < self._count):
            raise IndexError(f"the store has pairs 0 to {self._count - 1}; found {examples.min()} to {examples.max()}")
        self._touch(f"{side}.bin")
        offsets = self._offsets[side]
        first = np.asarray(offsets[examples], np.int64)
        inside = np.arange(width) < (np.asarray(offsets[examples + 1], np.int64) - first)[:, None]
        rows = np.full(inside.shape, PAD, np.int64)
        rows[inside] = self._ids[side][(first[:, None] + np.arange(width))[inside]]
        return rows

    def verify(self) -> None:
        """Compare every file with its SHA-256 now, about half a second a gigabyte."""
        for name in self._files:
            self._touch(name)

    def _touch(self, name: str) -> None:
        """Check a file's contents when they are first used."""
        if name in self._sound:
            return
        path = self.folder / name
        with explaining(path):
            found = read_record(path).sha256
        if found != self._files[name]["sha256"]:
            raise CorruptError(f"{path} must be as it was written", found=f"SHA-256 {found[:12]}…", fix=_REMAKE.format(self.folder))
        self._sound.add(name)

    def _map(self, name: str, dtype: Any, count: int | None) -> Any:
        path = self.folder / name
        size = path.stat().st_size
        if count is not None and size != count * np.dtype(dtype).itemsize:
            raise CorruptError(
                f"{path} must hold {count} numbers", found=f"{size} bytes", fix=_REMAKE.format(self.folder)
            )  # a manifest of another format
        if not size:
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)  # slices of the subclass cost microseconds more


_REMAKE = "delete {} and run the same command: it is made anew"


def store_key(corpus: Corpus, digests: list[str], tokenizers: Tokenizers, data: DataConfig) -> str:
    """Hash everything that decides a store's contents: files, reading, tokenizers, limits."""
    inputs = {
        "format": FORMAT,
        "files": digests,
        "layout": corpus.layout(),
        "tokenizers": [tokenizers.src.digest, tokenizers.tgt.digest],
        "max_length": data.max_length,
        "max_line_bytes": corpus.max_line_bytes,
        "on_bad_line": corpus.on_bad_line,
    }
    return hashlib.sha256(canonical_json(inputs)).hexdigest()


def prepared_folder(data: DataConfig) -> Path:
    """Return where prepared data goes: `data.cache`, or the cache folder."""
    return Path(data.cache) if data.cache else cache_folder()
