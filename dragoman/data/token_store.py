"""Token store: a tokenized corpus on disk, memory-mapped, in a directory named by its key.

The key is a hash of everything that decides the contents.

    src.bin, tgt.bin            token ids, concatenated; uint16, or uint32 for large vocabularies
    src.offsets, tgt.offsets    uint64: start of each sentence, and the end of the last
    src.lengths, tgt.lengths    uint16: tokens of each sentence, without BOS and EOS
    numbers                     uint64: the corpus line of each pair
    directions                  uint16: the direction of each pair, an index of the manifest's list;
                                multilingual corpora only, whose sources begin with a language tag
    manifest.json               sizes and SHA-256 of these, the key and the report; written last
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

from dragoman.config.root_config import DataConfig
from dragoman.data.compressed_input_streams import file_sha256
from dragoman.data.parallel_corpus import Corpus
from dragoman.data.token_store_builder import BuildProgress, StoreReport, build_store
from dragoman.errors import CorruptError
from dragoman.storage.atomic_and_safe_file_io import hash_file
from dragoman.storage.disk_space_and_errors import os_errors_converted
from dragoman.storage.manifest import canonical_json, read_manifest
from dragoman.storage.trusted_cache_directory import cache_dir
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import PAD

logger = logging.getLogger(__name__)

FORMAT = 2  # increase it when the same inputs give other contents


class TokenStore:
    """A tokenized corpus: pairs of token ids by index, read from the disk on demand."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.report = StoreReport(**manifest["report"])
        self.digest = str(manifest["key"])
        self._files: dict[str, Any] = manifest["files"]
        self._verified: set[str] = set()
        self._count = self.report.pairs
        ids = np.uint16 if manifest["id_bytes"] == 2 else np.uint32
        self._ids = {side: self._map(f"{side}.bin", ids, None) for side in ("src", "tgt")}
        self._offsets = {
            side: self._map(f"{side}.offsets", np.uint64, self._count + 1)
            for side in ("src", "tgt")
        }
        self.src_lengths: NDArray[np.uint16] = self._map("src.lengths", np.uint16, self._count)
        self.tgt_lengths: NDArray[np.uint16] = self._map("tgt.lengths", np.uint16, self._count)
        self.line_numbers: NDArray[np.uint64] = self._map("numbers", np.uint64, self._count)
        self.direction_names: list[str] = list(manifest.get("directions", ()))
        has_directions = ["directions"] if self.direction_names else []
        self.directions: NDArray[np.uint16] = (  # indices of `direction_names`, or empty
            self._map("directions", np.uint16, self._count)
            if has_directions
            else np.zeros(0, np.uint16)
        )
        for name in (
            *("src.lengths", "tgt.lengths", "src.offsets", "tgt.offsets", "numbers"),
            *has_directions,
        ):
            self._verify_once(name)

    @classmethod
    def prepare(
        cls,
        corpus: Corpus,
        tokenizers: Tokenizers,
        *,
        folder: Path,
        data: DataConfig,
        progress: Callable[[BuildProgress], None] | None = None,
        workers: int | None = None,
        digests: list[str] | None = None,
    ) -> TokenStore:
        """Open the store of a corpus below `folder`; build it on all cores if it does not exist.

        `digests` are the SHA-256 of the corpus's files if known; the files must match them.
        """
        digests = digests or [file_sha256(path) for path in corpus.files]
        key = store_key(corpus, digests, tokenizers, data)
        final = Path(folder) / f"store-{key[:32]}"
        if final.exists():
            try:
                return cls.open(final)
            except CorruptError as error:
                aside = final.with_name(f"{final.name}.damaged-{os.getpid()}")
                logger.warning(
                    "the token store was damaged and is built again: %s; the old is in %s",
                    error.found,
                    aside,
                )
                with os_errors_converted(final):
                    os.rename(final, aside)
        build_store(
            corpus,
            tokenizers,
            final=final,
            key=key,
            digests=digests,
            data=data,
            progress=progress,
            workers=workers,
        )
        return cls.open(final)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Open a finished store; sizes are checked now, contents on first use."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        for name, record in manifest["files"].items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else -1
            if size != record["bytes"]:
                found = f"{size} bytes" if size >= 0 else "no such file"
                raise CorruptError(
                    f"{path} must have {record['bytes']} bytes",
                    found=found,
                    fix=_REBUILD_HINT.format(folder),
                )
        return cls(folder, manifest)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return self._count

    def direction_examples(self) -> dict[str, NDArray[np.int64]]:
        """Return the pairs of each direction, by its name; empty without directions."""
        return {
            name: np.flatnonzero(self.directions == number)
            for number, name in enumerate(self.direction_names)
        }

    def pair(self, index: int) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
        """Return the source and target token ids of a pair, without BOS and EOS."""
        return self.ids("src", index), self.ids("tgt", index)

    def ids(self, side: str, index: int) -> NDArray[np.integer[Any]]:
        """Return one side of a pair, a view of the mapped file."""
        if not 0 <= index < self._count:
            raise IndexError(f"the store has pairs 0 to {self._count - 1}; found {index}")
        self._verify_once(f"{side}.bin")
        offsets = self._offsets[side]
        return self._ids[side][int(offsets[index]) : int(offsets[index + 1])]

    def padded_ids(self, side: str, examples: NDArray[np.int64], width: int) -> NDArray[np.int64]:
        """Return one side of several pairs as rows, padded with PAD to `width`."""
        if len(examples) and not (examples.min() >= 0 and examples.max() < self._count):
            raise IndexError(
                f"the store has pairs 0 to {self._count - 1}; found {examples.min()} to "
                f"{examples.max()}"
            )
        self._verify_once(f"{side}.bin")
        offsets = self._offsets[side]
        first = np.asarray(offsets[examples], np.int64)
        inside = np.arange(width) < (np.asarray(offsets[examples + 1], np.int64) - first)[:, None]
        rows = np.full(inside.shape, PAD, np.int64)
        rows[inside] = self._ids[side][(first[:, None] + np.arange(width))[inside]]
        return rows

    def verify(self) -> None:
        """Compare every file with its SHA-256 now, about half a second per gigabyte."""
        for name in self._files:
            self._verify_once(name)

    def _verify_once(self, name: str) -> None:
        """Verify a file's contents on first use."""
        if name in self._verified:
            return
        path = self.folder / name
        with os_errors_converted(path):
            found = hash_file(path).sha256
        if found != self._files[name]["sha256"]:
            raise CorruptError(
                f"{path} must be as it was written",
                found=f"SHA-256 {found[:12]}…",
                fix=_REBUILD_HINT.format(self.folder),
            )
        self._verified.add(name)

    def _map(self, name: str, dtype: Any, count: int | None) -> Any:
        path = self.folder / name
        size = path.stat().st_size
        if count is not None and size != count * np.dtype(dtype).itemsize:
            # A manifest of another format.
            raise CorruptError(
                f"{path} must hold {count} numbers",
                found=f"{size} bytes",
                fix=_REBUILD_HINT.format(self.folder),
            )
        if not size:
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        # Slices of the memmap subclass are microseconds slower.
        return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


_REBUILD_HINT = "delete {} and run the same command: it is created again"


def store_key(corpus: Corpus, digests: list[str], tokenizers: Tokenizers, data: DataConfig) -> str:
    """Return the hash of everything that decides a store: files, layout, tokenizers, limits."""
    inputs = {
        "format": FORMAT,
        "files": digests,
        "layout": corpus.layout(),
        "tokenizers": [tokenizers.src.digest, tokenizers.tgt.digest],
        "max_length": data.max_length,
        "max_line_bytes": corpus.max_line_bytes,
        "on_bad_line": corpus.on_bad_line,
        **({"directions": list(data.directions)} if data.directions else {}),
    }
    return hashlib.sha256(canonical_json(inputs)).hexdigest()


def prepared_data_directory(data: DataConfig) -> Path:
    """Return the directory of tokenized data: `data.cache_dir`, or the cache directory."""
    return Path(data.cache_dir) if data.cache_dir else cache_dir()
