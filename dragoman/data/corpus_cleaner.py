"""Corpus cleaning: remove the lines that the checks found, in two passes and bounded memory.

`corpus_checks.py` decides on the lines, such as those with an outlying length ratio. Whatever is
cleaned, training leaves out pairs of more than `data.max_length` tokens: `_StoreWriter.add` in
`token_store_builder.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dragoman.data.corpus_checks import CorpusFinding, examine_corpus
from dragoman.data.parallel_corpus import Corpus, SentencePair, TabularCorpus
from dragoman.errors import ConfigError, DataError, suggest_name
from dragoman.storage.user_output_files import check_output_file, open_output

UNUSABLE_CODES = ("invalid", "broken", "overlong")  # always removed: there is no text to write
REMOVABLE_CODES = ("empty", "duplicate", "length-ratio", "copy", "tokenised", "leak", "source-leak")
"""Codes of the findings whose lines can be removed or kept."""


@dataclass(frozen=True, slots=True)
class CleaningResult:
    """Pairs read and kept, and the removed lines by the code of the reason."""

    read: int
    kept: int
    reasons: dict[str, int]
    remaining: tuple[CorpusFinding, ...]  # findings that removing single lines does not fix


def clean_corpus(
    corpus: Corpus,
    outputs: Sequence[Path],
    *,
    held_out: Corpus | None = None,
    keep: Collection[str] = (),
    progress: Callable[[int], None] | None = None,
) -> CleaningResult:
    """Write the pairs without findings, in order; a pair with several counts under the first.

    A corpus of two files is written to two, a file of pairs to one of the same format with all its
    columns. Nothing is written if the sides have different numbers of lines or no pair would be
    left.
    """
    check_outputs(corpus, outputs, held_out)
    for code in keep:
        if code not in REMOVABLE_CODES:
            raise ConfigError(
                [
                    f"--keep must name a finding that can be kept; found {code!r:.60}; "
                    f"{suggest_name(code, REMOVABLE_CODES)}"
                ]
            )
    examined = examine_corpus(corpus, held_out=held_out, progress=progress)
    if examined.line_count_error is not None:
        raise examined.line_count_error
    reasons = examined.lines_to_remove(
        [code for code in (*UNUSABLE_CODES, *REMOVABLE_CODES) if code not in keep]
    )
    removed = np.sort(np.concatenate([*reasons.values(), np.zeros(0, np.uint64)]))
    read = examined.pairs
    if not read or len(removed) == read:
        found = f"all {read:,} removed" if read else "no line at all"
        raise DataError(
            "cleaning must leave some pairs",
            found=found,
            fix="see what is wrong: dragoman data check",
        )
    _write_kept_records(corpus, outputs, removed)
    remaining = tuple(
        each for each in examined.findings if not each.ok and each.code == "misaligned"
    )
    return CleaningResult(
        read, read - len(removed), {code: len(lines) for code, lines in reasons.items()}, remaining
    )


def check_outputs(corpus: Corpus, outputs: Sequence[Path], held_out: Corpus | None = None) -> None:
    """Raise ConfigError if outputs are inputs, or have another format than the corpus."""
    inputs = [*corpus.files, *(held_out.files if held_out else ())]
    flags = ["--out-pairs"] if isinstance(corpus, TabularCorpus) else ["--out-src", "--out-tgt"]
    for number, (flag, path) in enumerate(zip(flags, outputs, strict=True)):
        check_output_file(flag, path, inputs=inputs, others=outputs[:number])
    if isinstance(corpus, TabularCorpus) and TabularCorpus(outputs[0]).format != corpus.format:
        found = f"{outputs[0].name} for {corpus.path.name}"
        raise ConfigError(
            [
                f"--out-pairs must have the format of --pairs; found {found}; end its name in "
                f"{corpus.format}"
            ]
        )


def _write_kept_records(
    corpus: Corpus, outputs: Sequence[Path], removed: NDArray[np.uint64]
) -> None:
    """Copy all records but the removed ones."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open_output(path)) for path in outputs]
        left_out = iter(removed.tolist())
        next_removed = next(left_out, None)
        for number, texts in _record_texts(corpus):
            while next_removed is not None and next_removed < number:  # a line without text
                next_removed = next(left_out, None)
            if number == next_removed:
                continue
            for file, text in zip(files, texts, strict=True):
                file.write(f"{text}\n")


def _record_texts(corpus: Corpus) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield each record's number and the text to write; None for records without text."""
    if isinstance(corpus, TabularCorpus):
        for number, text in corpus.raw_records():
            yield number, (text,)
        return
    for record in corpus.records():
        yield record.number, (record.src, record.tgt) if isinstance(record, SentencePair) else ()
