"""Learning the pieces: SentencePiece's trainer, made repeatable, with its refusals put into a person's words."""

from __future__ import annotations

import heapq
import io
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import sentencepiece

from dragoman.config.tree import TextConfig
from dragoman.errors import DataError
from dragoman.text.draws import mixed
from dragoman.text.specials import BOS, EOS, PAD, UNK

logger = logging.getLogger(__name__)

_MODEL_TYPES = {"bpe": "bpe", "unigram": "unigram", "characters": "char"}
# The trainer skips a line above a length without a word, and its BPE counts places within a word in 16 bits; so long
# lines are handed over in parts of this many characters.
_PART = 4096
_BYTES = 256 + 4 + 1  # every byte, the special pieces, and the space
_RESERVED = "\u2585"  # lines with the trainer's own mark for unknown are skipped by it; a space keeps the rest of the line
# A fixed number, for the sums of unigram's expectations are added thread by thread and the result depends on the
# number of threads, though not on their timing.
_THREADS = {"bpe": 1, "unigram": 8, "characters": 1}


class VocabularyError(DataError):
    """A vocabulary larger than the text allows."""

    def __init__(self, largest: int, *, found: int) -> None:
        super().__init__(
            f"text.vocabulary must be at most {largest}, all that this text allows",
            found=str(found),
            fix=f"add --set text.vocabulary={largest}, or give more text",
        )
        self.largest = largest


def learn_model(lines: Iterable[str], config: TextConfig) -> bytes:
    """Learn a SentencePiece model from lines that are normalised already, and return its bytes."""
    writer = io.BytesIO()
    sample = sample_lines(lines, config.sample_lines)
    if not any(line.strip() for line in sample):
        found = f"{len(sample):,} lines, all blank" if sample else "no lines at all"
        raise DataError("the training text must hold words", found=found, fix="check the training files")
    options: dict[str, Any] = {
        "model_type": _MODEL_TYPES[config.kind],
        "vocab_size": config.vocabulary,
        "character_coverage": config.coverage,
        "byte_fallback": config.byte_fallback,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "pad_id": PAD,
        "bos_id": BOS,
        "eos_id": EOS,
        "unk_id": UNK,
        "num_threads": _THREADS[config.kind],
        "max_sentence_length": 4 * _PART + 16,
        "shuffle_input_sentence": False,
        "minloglevel": 2,
    }
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=_parts(sample), model_writer=writer, **options)
    except RuntimeError as error:
        raise _explained(str(error), config) from error
    return writer.getvalue()


def sample_lines(lines: Iterable[str], limit: int) -> list[str]:
    """Keep at most `limit` lines, chosen evenly over the whole stream and always the same, in their order."""
    kept: list[tuple[int, int, str]] = []  # a heap on the negated rank: the highest rank leaves first
    count = 0
    ranks: list[int] = []
    for number, line in enumerate(lines):
        if not number % 65_536:
            ranks = mixed(0, np.arange(number, number + 65_536)).tolist()
        count += 1
        entry = (-ranks[number % 65_536], number, line)
        if len(kept) < limit:
            kept.append(entry)
            if len(kept) == limit:
                heapq.heapify(kept)
        elif entry > kept[0]:
            heapq.heapreplace(kept, entry)
    if count > limit:
        logger.info("the vocabulary is learnt from %d lines, spread evenly over %d (text.sample_lines)", limit, count)
    kept.sort(key=lambda entry: entry[1])
    return [line for _, _, line in kept]


def _parts(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        clean = line.replace(_RESERVED, " ").replace("\0", " ")
        for start in range(0, len(clean), _PART):
            yield clean[start : start + _PART]


def _explained(message: str, config: TextConfig) -> DataError:
    """Turn the trainer's message into what must hold, what was found and what to do."""
    too_high = re.search(r"Vocabulary size too high \((\d+)\).*<= (\d+)", message)
    if too_high:
        return VocabularyError(int(too_high[2]), found=config.vocabulary)
    too_low = re.search(r"smaller than required_chars\. (\d+) vs (\d+)", message)
    if too_low:
        return DataError(
            f"text.vocabulary must be at least {too_low[2]} to hold this text's characters",
            found=str(config.vocabulary),
            fix=f"add --set text.vocabulary={int(too_low[2]) + 100}, or lower text.coverage",
        )
    if config.byte_fallback and config.vocabulary < _BYTES:
        return DataError(
            f"text.vocabulary must be at least {_BYTES} with text.byte_fallback, whose bytes take 256",
            found=str(config.vocabulary),
            fix="raise it, or set text.byte_fallback=false",
        )
    return DataError("a vocabulary must be learnable from the training text", found=message, fix="check the training files")
