"""Deterministic SentencePiece training, with readable errors."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import sentencepiece

from dragoman.config.root_config import TextConfig
from dragoman.errors import DataError, DiskError
from dragoman.runtime import signals
from dragoman.runtime.counter_rng import splitmix64_outputs
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

logger = logging.getLogger(__name__)

_MODEL_TYPES = {"bpe": "bpe", "unigram": "unigram", "characters": "char"}
# The trainer silently skips lines above a length, and its BPE counts positions within a word in 16
# bits; so long lines are passed in parts of this many characters.
_MAX_LINE_CHARACTERS = 4096
_MIN_BYTE_FALLBACK_VOCAB = 256 + 4 + 1  # 256 bytes, the special tokens and the space
# the trainer skips lines with its own mark for unknown; it is replaced by a space
_UNK_SURFACE = "\u2585"
# Fixed, because unigram adds its expectations thread by thread: the result depends on the number of
# threads, though not on their timing.
_THREADS = {"bpe": 1, "unigram": 8, "characters": 1}
# Most UTF-8 bytes of the sample. SentencePiece needs about 5 bytes of memory for each with BPE and
# 25 with unigram, whose suffix array holds every position: training stays below 1 GiB.
MAX_SAMPLE_BYTES = {"bpe": 32 << 20, "unigram": 12 << 20, "characters": 32 << 20}
_MAX_IN_PROCESS_BYTES = 2 << 20  # smaller samples are trained on in this process, which is faster
_POLL_SECONDS = 0.2


class VocabularyError(DataError):
    """A vocabulary size that the corpus does not allow: above `largest`, or below `smallest`.

    `allowed` is a size to take instead, and `reason` says why.
    """

    def __init__(self, *, found: int, largest: int = 0, smallest: int = 0) -> None:
        super().__init__(
            f"text.vocab_size must be at least {smallest} to cover this corpus's characters"
            if smallest
            else f"text.vocab_size must be at most {largest}, all that this corpus allows",
            found=str(found),
            fix=f"add --set text.vocab_size={smallest + 100}, or lower text.character_coverage"
            if smallest
            else f"add --set text.vocab_size={largest}, or add training data",
        )
        # Room for subwords beside the characters: half of what was asked for.
        self.allowed = smallest + max(100, found // 2) if smallest else largest
        self.reason = (
            f"for the characters of this corpus, which need {smallest:,}"
            if smallest
            else "the largest for this corpus"
        )


def train_sentencepiece(
    lines: Iterable[str], config: TextConfig, control_tokens: Sequence[str] = ()
) -> bytes:
    """Train a SentencePiece model on normalized lines and return its bytes.

    `control_tokens` have the ids after the special tokens; no text is encoded as one of them.
    """
    sample = sample_lines(lines, config.sample_lines, MAX_SAMPLE_BYTES[config.tokenizer])
    if not any(line.strip() for line in sample.texts()):
        found = f"{sample.seen:,} lines, all blank" if sample.seen else "no lines at all"
        raise DataError(
            "the training corpus must contain text", found=found, fix="check the training files"
        )
    options: dict[str, Any] = {
        "model_type": _MODEL_TYPES[config.tokenizer],
        "vocab_size": config.vocab_size,
        "character_coverage": config.character_coverage,
        "byte_fallback": config.byte_fallback,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "pad_id": PAD,
        "bos_id": BOS,
        "eos_id": EOS,
        "unk_id": UNK,
        "num_threads": _THREADS[config.tokenizer],
        "max_sentence_length": 4 * _MAX_LINE_CHARACTERS + 16,
        "shuffle_input_sentence": False,
        "minloglevel": 2,
        # Given only if there are some: the options are recorded in the model's bytes.
        **({"control_symbols": list(control_tokens)} if control_tokens else {}),
    }
    try:
        if sample.bytes < _MAX_IN_PROCESS_BYTES:
            return _run_trainer(sample.texts(), options)
        return _train_in_subprocess(sample, options)
    except RuntimeError as error:
        raise _explain_trainer_error(str(error), config, len(control_tokens)) from error


class LineSample(NamedTuple):
    """Sampled UTF-8 lines in order, the number of lines seen, and the sample's size in bytes."""

    lines: list[bytes]
    bytes: int
    seen: int

    def texts(self) -> Iterator[str]:
        """Yield the lines as text."""
        return (line.decode("utf-8", "surrogatepass") for line in self.lines)


def sample_lines(lines: Iterable[str], most_lines: int, most_bytes: int) -> LineSample:
    """Return a deterministic, even sample of a stream with at most so many lines and bytes.

    Every line has a rank that depends on its position alone; the lowest ranks stay. Memory is
    bounded by one and a half times the result, however long the stream is.
    """
    kept: list[bytes] = []
    ranks: list[int] = []
    size = seen = 0
    block: list[int] = []
    cutoff = 1 << 64  # ranks from here on are not kept
    for line in lines:
        if not seen % 65_536:
            block = splitmix64_outputs(0, np.arange(seen, seen + 65_536)).tolist()
        rank = block[seen % 65_536]
        seen += 1
        if rank >= cutoff:
            continue
        raw = line.encode("utf-8", "surrogatepass")
        kept.append(raw)
        ranks.append(rank)
        size += len(raw)
        if len(kept) > 1.5 * most_lines + 1 or size > 1.5 * most_bytes:
            kept, ranks, size, cutoff = _keep_lowest_ranks(
                kept, ranks, most_lines, most_bytes, cutoff
            )
    kept, ranks, size, cutoff = _keep_lowest_ranks(kept, ranks, most_lines, most_bytes, cutoff)
    if len(kept) < seen:
        shown = f"{len(kept):,} lines ({size / 2**20:.1f} MiB)"
        logger.info(
            "training the tokenizer on %s, sampled evenly from %s (text.sample_lines)",
            shown,
            f"{seen:,}",
        )
    return LineSample(kept, size, seen)


def _keep_lowest_ranks(
    kept: list[bytes], ranks: list[int], most_lines: int, most_bytes: int, cutoff: int
) -> tuple[list[bytes], list[int], int, int]:
    """Keep the lines of the lowest ranks that fit, at least one.

    Return them, their ranks, their size and the new cutoff.
    """
    order = np.argsort(np.asarray(ranks, np.uint64), kind="stable")
    sizes = np.cumsum(np.fromiter((len(kept[index]) for index in order), np.int64, len(order)))
    fitting = min(most_lines, max(1, int(np.searchsorted(sizes, most_bytes, side="right"))))
    if fitting >= len(order):
        return kept, ranks, int(sizes[-1]) if len(sizes) else 0, cutoff
    cutoff = ranks[order[fitting]]
    chosen = np.sort(order[:fitting]).tolist()
    return (
        [kept[index] for index in chosen],
        [ranks[index] for index in chosen],
        int(sizes[fitting - 1]),
        cutoff,
    )


def _run_trainer(lines: Iterable[str], options: dict[str, Any]) -> bytes:
    """Run SentencePiece's trainer in this process."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_split_long_lines(lines), model_writer=writer, **options
    )
    return writer.getvalue()


def _train_in_subprocess(sample: LineSample, options: dict[str, Any]) -> bytes:
    """Run the trainer in a subprocess, whose memory is freed and which a stop request ends."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [
        sys.executable,
        "-c",
        "from dragoman.text.sentencepiece_trainer import worker_main; worker_main()",
    ]
    with tempfile.TemporaryFile() as answer:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=answer, env=environment)
        assert child.stdin, "made with a pipe"
        try:
            with contextlib.suppress(BrokenPipeError):
                # the child has ended; its exit code is checked below
                child.stdin.write(json.dumps(options).encode() + b"\n")
                for line in sample.lines:
                    child.stdin.write(len(line).to_bytes(4, "little") + line)
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            while child.poll() is None:
                signals.raise_if_stop_requested()
                signals.wait_for_stop(_POLL_SECONDS)
        finally:
            child.kill()
            child.wait()
        answer.seek(0)
        content = answer.read()
    if child.returncode == _TRAINER_ERROR_EXIT:
        raise RuntimeError(content.decode("utf-8", "replace"))
    if child.returncode:
        code = child.returncode
        found = f"one that ended with {f'signal {-code}' if code < 0 else f'code {code}'}"
        raise DiskError(
            "the process that trains the tokenizer must not be killed",
            found=found,
            fix="free some memory, or lower text.sample_lines",
        )
    return content


_TRAINER_ERROR_EXIT = 3  # exit code of the child if the trainer raised; its message is on stdout


def worker_main() -> None:
    """Train on the lines that `_train_in_subprocess` sends and write the model to stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    source = sys.stdin.buffer
    options = json.loads(source.readline())

    def lines() -> Iterator[str]:
        while head := source.read(4):
            yield source.read(int.from_bytes(head, "little")).decode("utf-8", "surrogatepass")

    try:
        content = _run_trainer(lines(), options)
    except RuntimeError as error:
        sys.stdout.buffer.write(str(error).encode())
        raise SystemExit(_TRAINER_ERROR_EXIT) from None
    sys.stdout.buffer.write(content)


def _split_long_lines(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        clean = line.replace(_UNK_SURFACE, " ").replace("\0", " ")
        for start in range(0, len(clean), _MAX_LINE_CHARACTERS):
            yield clean[start : start + _MAX_LINE_CHARACTERS]


def _explain_trainer_error(
    message: str, config: TextConfig, num_control_tokens: int = 0
) -> DataError:
    """Return our error for a message of the trainer."""
    too_high = re.search(r"Vocabulary size too high \((\d+)\).*<= (\d+)", message)
    if too_high:
        return VocabularyError(largest=int(too_high[2]), found=config.vocab_size)
    too_low = re.search(r"smaller than required_chars\. (\d+) vs (\d+)", message)
    if too_low:
        return VocabularyError(smallest=int(too_low[2]), found=config.vocab_size)
    least = _MIN_BYTE_FALLBACK_VOCAB + num_control_tokens
    if config.byte_fallback and config.vocab_size < least:
        return DataError(
            f"text.vocab_size must be at least {least} with text.byte_fallback, whose bytes take "
            "256",
            found=str(config.vocab_size),
            fix="raise it, or set text.byte_fallback=false",
        )
    return DataError(
        "a vocabulary must be trainable on the corpus",
        found=message,
        fix="check the training files",
    )
