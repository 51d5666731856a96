"""Synthetic pairs from monolingual text: translated by blocks, filtered, resumable after a kill."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.errors import ConfigError, CorruptError
from dragoman.storage.atomic_and_safe_file_io import replace_file, sync_directory
from dragoman.storage.disk_space_and_errors import os_errors_converted
from dragoman.storage.manifest import canonical_json, read_json

METHODS = ("back-translation", "forward-translation", "distillation")
TAG = "<BT>"  # Caswell, Chelba and Grangier (2019)
BLOCK_LINES = 1024
DROP_REASONS = ("empty", "copy", "length-ratio")
_MIN_LENGTH_DIFFERENCE = 5  # tokens: short texts have any ratio

# Translates the lines of a block; the seed is the block's own.
BlockTranslator = Callable[[Sequence[str], int], Sequence[str]]


class PairFilter(NamedTuple):
    """Which synthetic pairs are kept."""

    count_tokens: Callable[[str, str], tuple[int, int]]  # of an input text and its translation
    max_ratio: float = 3.0  # of the longer side to the shorter one, in tokens; 0 keeps all
    drop_copies: bool = True

    def drop_reason(self, text: str, translation: str) -> str:
        """Return why a pair is dropped, one of DROP_REASONS; empty if it is kept."""
        if not text.strip() or not translation.strip():
            return "empty"
        if self.drop_copies and text.casefold().split() == translation.casefold().split():
            return "copy"
        if self.max_ratio:
            shorter, longer = sorted(self.count_tokens(text, translation))
            is_far = longer - shorter > _MIN_LENGTH_DIFFERENCE
            if is_far and longer > self.max_ratio * max(shorter, 1):
                return "length-ratio"
        return ""


@dataclass(frozen=True, slots=True)
class AugmentationResult:
    """How many lines were read, and how many pairs were written or dropped, by reason."""

    lines: int
    pairs: int
    dropped: Mapping[str, int]
    resumed_lines: int = 0  # done by a run before this one


@dataclass(slots=True)
class AugmentationRun:
    """Two output files that grow block by block beside their final names.

    `request` is everything that decides the output. After each block the files are synced and then
    the progress is replaced, so that a killed run continues from its last block and ends with the
    same bytes. At the end both files get their names.
    """

    output_src: Path
    output_tgt: Path
    request: Mapping[str, Any]
    overwrite: bool = False
    _counts: Counter[str] = field(default_factory=Counter)
    _sizes: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def progress_path(self) -> Path:
        """The file that records how far the run is."""
        return self.output_src.with_name(f"{self.output_src.name}.progress.json")

    @property
    def partial_paths(self) -> list[Path]:
        """The files that are written, source and target."""
        return [
            path.with_name(f"{path.name}.partial") for path in (self.output_src, self.output_tgt)
        ]

    def open(self) -> int:
        """Check that nothing is lost, and return the number of lines that are done already."""
        digest = hashlib.sha256(canonical_json(dict(self.request))).hexdigest()
        record = self._read_progress()
        is_other = record is not None and record.get("request") != digest
        if record and is_other and record["counts"]:
            raise ConfigError(
                [
                    "an unfinished augmentation must be continued by the same command; "
                    f"found {self.progress_path} of another; repeat that one, or --overwrite it"
                ]
            )
        if record is None or is_other:
            for path in (self.output_src, self.output_tgt):
                if path.exists() and not self.overwrite:
                    raise ConfigError(
                        [f"outputs must not exist yet; found {path}; rename it or add --overwrite"]
                    )
            self._counts, self._sizes = Counter(), [0, 0]
            with os_errors_converted(self.output_src):
                for path in self.partial_paths:
                    path.write_bytes(b"")
            self._record(digest)
            self.overwrite = False  # opened again, it continues
            return 0
        self._counts, self._sizes = Counter(record["counts"]), list(record["bytes"])
        if not record["done"]:
            self._truncate()
        return self.lines_done

    def _read_progress(self) -> dict[str, Any] | None:
        """Return what `_record` wrote; None if there is none, or if it is to be overwritten."""
        if self.overwrite or not self.progress_path.exists():
            return None
        try:
            record = read_json(self.progress_path)
            fields = [record[name] for name in ("request", "counts", "bytes", "done")]
            found = "" if [*map(type, fields)] == [str, dict, list, bool] else "other values"
        except CorruptError as error:
            found = error.found
        except KeyError as error:
            found = f"no {error}"
        if found:
            raise CorruptError(
                f"{self.progress_path} must be as it was written",
                found=found,
                fix="start again with --overwrite",
            )
        return record

    @property
    def lines_done(self) -> int:
        """Lines whose pairs are on disk."""
        return self._counts["lines"]

    def run(
        self,
        lines: Iterable[str],
        translate: BlockTranslator,
        pair_filter: PairFilter,
        *,
        seed: int = 1,
        advance: Callable[[int], object] = lambda count: None,
    ) -> AugmentationResult:
        """Translate the lines that are left, write the pairs that are kept, and finish."""
        resumed = self.open()
        digest = hashlib.sha256(canonical_json(dict(self.request))).hexdigest()
        advance(resumed)
        is_back = self.request["method"] == "back-translation"
        tag = f"{self.request['tag']} " if self.request.get("tag") else ""
        for number, block in _blocks(lines, skip=resumed):
            translations = translate(block, block_seed(seed, number))
            written = [list[str](), list[str]()]
            for text, translation in zip(block, translations, strict=True):
                reason = pair_filter.drop_reason(text, translation)
                self._counts[reason or "pairs"] += 1
                if not reason:
                    synthetic, given = translation.strip(), text.strip()
                    pair = (synthetic, given) if is_back else (given, synthetic)
                    written[0].append(f"{tag}{pair[0]}\n")
                    written[1].append(f"{pair[1]}\n")
            self._append(["".join(each).encode() for each in written])
            self._counts["lines"] += len(block)
            self._record(digest)
            advance(len(block))
        self._finish(digest)
        return AugmentationResult(
            self._counts["lines"],
            self._counts["pairs"],
            {reason: self._counts[reason] for reason in DROP_REASONS},
            resumed,
        )

    def _truncate(self) -> None:
        """Drop the lines after the last record; raise CorruptError if some are missing."""
        for path, size in zip(self.partial_paths, self._sizes, strict=True):
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise CorruptError(
                    f"{path} must have the {size:,} bytes that were written to it",
                    found=f"{found:,}",
                    fix="start again with --overwrite",
                )
            with open(path, "r+b") as file:
                file.truncate(size)

    def _append(self, blocks: Sequence[bytes]) -> None:
        """Append to both files and sync them."""
        for at, (path, data) in enumerate(zip(self.partial_paths, blocks, strict=True)):
            with os_errors_converted(path), open(path, "ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._sizes[at] += len(data)

    def _record(self, digest: str, *, done: bool = False) -> None:
        """Replace the progress file."""
        record = {
            "request": digest,
            "counts": dict(self._counts),
            "bytes": self._sizes,
            "done": done,
        }
        replace_file(self.progress_path, json.dumps(record, indent=1).encode())

    def _finish(self, digest: str) -> None:
        """Rename both files into place; a run killed between the two finishes it when resumed."""
        self._record(digest, done=True)
        with os_errors_converted(self.output_src):
            for partial, final in zip(
                self.partial_paths, (self.output_src, self.output_tgt), strict=True
            ):
                if partial.exists():
                    os.replace(partial, final)
                sync_directory(final.parent)
            self.progress_path.unlink()


def _blocks(lines: Iterable[str], *, skip: int) -> Iterator[tuple[int, list[str]]]:
    """Yield blocks of lines with their numbers, after those that are done."""
    rest = itertools.islice(lines, skip, None)
    for number in itertools.count(skip // BLOCK_LINES):
        block = list(itertools.islice(rest, BLOCK_LINES))
        if not block:
            return
        yield number, block


def block_seed(seed: int, number: int) -> int:
    """Return the seed of a block: equal lines of two blocks are not drawn alike."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
