"""Builds the token store: tokenizes a corpus on all cores in bounded memory.

Pairs that are empty or longer than `data.max_length` tokens are left out: the long ones in
`_StoreWriter.add`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.config.root_config import DataConfig
from dragoman.data.compressed_input_streams import file_sha256
from dragoman.data.parallel_corpus import BadPair, Corpus
from dragoman.data.tokenizer_workers import EncodedTexts, TextBlock, encode_blocks
from dragoman.errors import CorruptError, DataError
from dragoman.storage.atomic_and_safe_file_io import (
    FileRecord,
    publish_directory,
    remove_flat_directory,
    staged_directory,
)
from dragoman.storage.disk_space_and_errors import os_errors_converted
from dragoman.storage.manifest import write_manifest
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import UNK

BLOCK_PAIRS = 8192  # pairs encoded in one block: some MB
_MIN_PARALLEL_PAIRS = 40_000  # pairs below which starting processes takes longer than it saves
_MAX_REPORTED_LINES = 5  # line numbers kept for each reason


class BuildProgress(NamedTuple):
    """Progress of building: pairs read, the fraction of the files, and seconds since the start."""

    pairs: int
    fraction: float
    seconds: float


@dataclass(kw_only=True)
class StoreReport:
    """Pairs kept, and pairs skipped by reason with the first lines of each."""

    read: int = 0
    pairs: int = 0
    src_tokens: int = 0
    tgt_tokens: int = 0
    unknown: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    # Text where several files are read: "12 of b.src".
    lines: dict[str, list[int | str]] = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)  # pairs read from each of several corpora

    def record_skipped(self, reason: str, line: int | str) -> None:
        """Count a skipped pair; `line` is from Corpus.describe_line."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        named = self.lines.setdefault(reason, [])
        if len(named) < _MAX_REPORTED_LINES:
            named.append(line)

    def summary(self) -> str:
        """Return a summary in one line."""
        parts = [
            f"{count} {reason} (line{'s' if count > 1 else ''} "
            f"{', '.join(map(str, self.lines[reason]))}"
            f"{' …' if count > _MAX_REPORTED_LINES else ''})"
            for reason, count in sorted(self.skipped.items())
        ]
        return f"{self.pairs} of {self.read} pairs kept" + (
            f"; skipped: {'; '.join(parts)}" if parts else ""
        )

    def unknown_fraction(self) -> float:
        """Return the fraction of unknown tokens; above 1 % the tokenizer does not fit."""
        return self.unknown / max(1, self.src_tokens + self.tgt_tokens)


def build_store(
    corpus: Corpus,
    tokenizers: Tokenizers,
    *,
    final: Path,
    key: str,
    digests: list[str],
    data: DataConfig,
    progress: Callable[[BuildProgress], None] | None,
    workers: int | None,
) -> None:
    """Build the store's directory; several processes may build the same one concurrently."""
    with (
        os_errors_converted(final),
        staged_directory(final, f"store-{_host_id()}", publish=_publish_if_absent) as temporary,
    ):
        with contextlib.ExitStack() as stack:
            writer = _StoreWriter(temporary, corpus, tokenizers, data, stack)
            _encode_corpus(writer, corpus, tokenizers, progress, workers)
            files = writer.finish()
        report = writer.report
        report.parts = corpus.part_counts()
        check_files_unchanged(corpus, digests)
        if not report.pairs:
            raise DataError(
                f"{' and '.join(map(str, corpus.files))} must have a usable sentence pair",
                found=report.summary(),
                fix="check the files and data.max_length",
            )
        fields = {"key": key, "id_bytes": writer.id_bytes, "report": dataclasses.asdict(report)}
        if data.directions:
            fields["directions"] = list(data.directions)
        write_manifest(temporary, files, fields)


def _publish_if_absent(temporary: Path, final: Path) -> None:
    """Rename the store to its name, or remove it if another process has built the same one."""
    try:
        publish_directory(temporary, final)
    except OSError:
        if not final.exists():
            raise
        remove_flat_directory(temporary)


def _encode_corpus(
    writer: _StoreWriter,
    corpus: Corpus,
    tokenizers: Tokenizers,
    progress: Callable[[BuildProgress], None] | None,
    workers: int | None,
) -> None:
    blocks = _text_blocks(corpus, writer.report)
    first = [
        block for _, block in zip(range(_MIN_PARALLEL_PAIRS // BLOCK_PAIRS), blocks, strict=False)
    ]
    count = (
        workers
        if workers is not None
        else len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    if workers is None and len(first) * BLOCK_PAIRS < _MIN_PARALLEL_PAIRS - BLOCK_PAIRS:
        count = 1
    begun = time.monotonic()
    for block, src, tgt in encode_blocks(_chain_releasing(first, blocks), tokenizers, count):
        writer.add(block, src, tgt)
        if progress:
            progress(
                BuildProgress(writer.report.read, corpus.fraction_read(), time.monotonic() - begun)
            )


def _chain_releasing(first: list[TextBlock], rest: Iterator[TextBlock]) -> Iterator[TextBlock]:
    while first:
        yield first.pop(0)
    yield from rest


def _text_blocks(corpus: Corpus, report: StoreReport) -> Iterator[TextBlock]:
    """Yield blocks of good pairs; pairs skipped before encoding are counted here."""
    directions = list[str]()
    block = TextBlock([], [], [], directions)
    for record in corpus.records():
        report.read += 1
        if isinstance(record, BadPair):
            if record.line.kind != "overlong" and corpus.on_bad_line == "stop":
                raise record.line.error(training=True)
            report.record_skipped(
                "with an overlong line" if record.line.kind == "overlong" else "with a bad line",
                corpus.describe_line(record.number),
            )
        elif not record.src.strip() or not record.tgt.strip():
            report.record_skipped("with an empty side", corpus.describe_line(record.number))
        else:
            block.line_numbers.append(record.number)
            block.src.append(record.src)
            block.tgt.append(record.tgt)
            if record.direction:
                directions.append(record.direction)
            if len(block.line_numbers) == BLOCK_PAIRS:
                yield block
                directions = []
                block = TextBlock([], [], [], directions)
    if block.line_numbers:
        yield block


class _StoreWriter:
    """Appends encoded pairs to the store's files and hashes them."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        tokenizers: Tokenizers,
        data: DataConfig,
        stack: contextlib.ExitStack,
    ) -> None:
        self._directions = {name: number for number, name in enumerate(data.directions)}
        self._tags = tokenizers.src.tag_ids
        names = [
            f"{side}.{part}" for side in ("src", "tgt") for part in ("bin", "offsets", "lengths")
        ] + ["numbers", *(["directions"] if data.directions else [])]
        self._files: dict[str, IO[bytes]] = {
            name: stack.enter_context((folder / name).open("xb")) for name in names
        }
        self._hashes = {name: hashlib.sha256() for name in names}
        self._ends = {"src": 0, "tgt": 0}
        self._corpus, self._max_length = corpus, data.max_length
        self.id_bytes = 2 if max(map(len, tokenizers)) <= 1 << 16 else 4
        self.report = StoreReport()
        for side in ("src", "tgt"):
            self._write(f"{side}.offsets", np.zeros(1, np.uint64))

    def add(self, block: TextBlock, src: EncodedTexts, tgt: EncodedTexts) -> None:
        """Append the pairs of a block that are within the length limit."""
        has_text = (src.lengths > 0) & (tgt.lengths > 0)
        if block.directions:
            src = self._tag_sources(src, block.directions)
        keep = (src.lengths <= self._max_length) & (tgt.lengths <= self._max_length) & has_text
        for index in np.flatnonzero(~keep).tolist():
            reason = (
                "with an empty side" if not has_text[index] else f"over {self._max_length} tokens"
            )
            self.report.record_skipped(
                reason, self._corpus.describe_line(block.line_numbers[index])
            )
        for side, encoded in (("src", src), ("tgt", tgt)):
            ids = encoded.ids[np.repeat(keep, encoded.lengths)]
            lengths = encoded.lengths[keep]
            ends = self._ends[side] + np.cumsum(lengths, dtype=np.uint64)
            self._ends[side] += len(ids)
            self._write(f"{side}.bin", ids.astype(np.uint16 if self.id_bytes == 2 else np.uint32))
            self._write(f"{side}.offsets", ends.astype(np.uint64))
            self._write(f"{side}.lengths", lengths.astype(np.uint16))
            self.report.unknown += int((ids == UNK).sum())
        self.report.src_tokens, self.report.tgt_tokens = self._ends["src"], self._ends["tgt"]
        self.report.pairs += int(keep.sum())
        self._write("numbers", np.asarray(block.line_numbers, np.uint64)[keep])
        if block.directions:
            numbers = [self._directions[each] for each in block.directions]
            self._write("directions", np.asarray(numbers, np.uint16)[keep])

    def _tag_sources(self, src: EncodedTexts, directions: Sequence[str]) -> EncodedTexts:
        """Return the sources with the tag of each one's target language as first token."""
        tags = [self._tags[each.rpartition("-")[2]] for each in directions]
        starts = np.cumsum(src.lengths, dtype=np.int64) - src.lengths
        return EncodedTexts(np.insert(src.ids, starts, tags), src.lengths + np.uint32(1))

    def finish(self) -> dict[str, FileRecord]:
        """Flush the files to the disk and return their manifest records."""
        records = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            records[name] = FileRecord(file.tell(), self._hashes[name].hexdigest())
        return records

    def _write(self, name: str, values: NDArray[np.integer[Any]]) -> None:
        data = values.tobytes()
        self._files[name].write(data)
        self._hashes[name].update(data)


def check_files_unchanged(corpus: Corpus, digests: list[str]) -> None:
    """Raise CorruptError if a file changed since it was hashed."""
    for stream, digest in zip(corpus.streams, digests, strict=True):
        # A corpus may stop reading after its first lines.
        after = stream.digest or file_sha256(stream.path)
        if after != digest:
            raise CorruptError(
                f"{stream.path} must stay as it is while it is prepared",
                found=f"SHA-256 {digest[:12]}… before and {after[:12]}… after",
                fix="start again when nothing writes to it",
            )


def _host_id() -> str:
    """Return a hash of the host name: a cache may be shared by several machines."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]
