"""Parallel tokenization in subprocesses that exchange length-prefixed frames over pipes.

Not `multiprocessing`: forking a process with torch's threads is unsafe, and spawning runs the
caller's script again, so that a script without a main guard would start itself without end.
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dragoman.errors import DiskError
from dragoman.text.imported_tokenizer import tokenizer_from_frames
from dragoman.text.sentencepiece_tokenizer import Tokenizer, Tokenizers

_FRAME = struct.Struct("<Q")


class TextBlock(NamedTuple):
    """A block of pairs as text, with their line numbers."""

    line_numbers: list[int]
    src: list[str]
    tgt: list[str]
    directions: Sequence[str] = ()  # of each pair, in a multilingual corpus


class EncodedTexts(NamedTuple):
    """One side's token ids, one text after another, and the number of tokens of each text."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.uint32]


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> EncodedTexts:
    """Encode texts as flat arrays."""
    rows = tokenizer.encode_batch(texts)
    lengths = np.fromiter(map(len, rows), dtype=np.uint32, count=len(rows))
    total = int(lengths.sum())
    ids = np.fromiter(itertools.chain.from_iterable(rows), dtype=np.uint32, count=total)
    return EncodedTexts(ids, lengths)


def encode_blocks(
    blocks: Iterable[TextBlock], tokenizers: Tokenizers, workers: int
) -> Iterator[tuple[TextBlock, EncodedTexts, EncodedTexts]]:
    """Yield encoded blocks in order, from `workers` processes; with 1, from this process."""
    if workers <= 1:
        for block in blocks:
            yield (
                block,
                encode_texts(tokenizers.src, block.src),
                encode_texts(tokenizers.tgt, block.tgt),
            )
        return
    pool = [_TokenizerWorker(tokenizers) for _ in range(workers)]
    waiting: list[tuple[TextBlock, _TokenizerWorker]] = []
    try:
        for number, block in enumerate(blocks):
            worker = pool[number % workers]
            # A worker has one block at a time, or both ends could block on a full pipe.
            if len(waiting) == workers:
                done, _ = waiting.pop(0)
                yield done, *worker.receive()
            worker.send(block)
            waiting.append((block, worker))
        for block, worker in waiting:
            yield block, *worker.receive()
    finally:
        for worker in pool:
            worker.close()


class _TokenizerWorker:
    """A subprocess that encodes blocks."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [
            sys.executable,
            "-c",
            "from dragoman.data.tokenizer_workers import worker_main; worker_main()",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        both = tokenizers[:1] if tokenizers.shared_vocab else tokenizers
        frames = [part for each in both for part in each.frames()]
        self._send([len(both).to_bytes(1, "little"), *frames])

    def send(self, block: TextBlock) -> None:
        """Send a block."""
        self._send([*_pack_texts(block.src), *_pack_texts(block.tgt)])

    def receive(self) -> tuple[EncodedTexts, EncodedTexts]:
        """Wait for the block's ids."""
        assert self._process.stdout, "made with a pipe"
        frames = [_read_frame(self._process.stdout) for _ in range(4)]
        if any(frame is None for frame in frames):
            raise self._ended()
        ids = [np.frombuffer(frame or b"", dtype=np.uint32) for frame in frames]
        return EncodedTexts(ids[0], ids[1]), EncodedTexts(ids[2], ids[3])

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        self._process.communicate()

    def _send(self, frames: Sequence[bytes]) -> None:
        assert self._process.stdin, "made with a pipe"
        try:
            for frame in frames:
                _write_frame(self._process.stdin, frame)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _ended(self) -> DiskError:
        code = self._process.wait()
        found = f"one that ended with {f'signal {-code}' if code < 0 else f'code {code}'}"
        return DiskError(
            "the processes that tokenize the corpus must not be killed",
            found=found,
            fix="free some memory and start again",
        )


def _pack_texts(texts: Sequence[str]) -> list[bytes]:
    raw = [text.encode() for text in texts]
    return [np.fromiter(map(len, raw), dtype=np.uint32, count=len(raw)).tobytes(), b"".join(raw)]


def _unpack_texts(lengths: bytes, raw: bytes) -> list[str]:
    ends = np.cumsum(np.frombuffer(lengths, dtype=np.uint32), dtype=np.int64).tolist()
    return [raw[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]


def _write_frame(file: IO[bytes], frame: bytes) -> None:
    file.write(_FRAME.pack(len(frame)))
    file.write(frame)


def _read_frame(file: IO[bytes]) -> bytes | None:
    """Read one frame; None at the end of the pipe."""
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    (length,) = _FRAME.unpack(head)
    frame = file.read(length)
    return frame if len(frame) == length else None


def worker_main() -> None:
    """Encode the blocks from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process with the pipe
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    made = []
    for _ in range(int.from_bytes(_read_frame(source) or b"\0", "little")):
        made.append(tokenizer_from_frames([_read_frame(source) or b"" for _ in range(3)]))
    while True:
        frames = [_read_frame(source) for _ in range(4)]
        if any(frame is None for frame in frames):
            return
        for tokenizer, at in ((made[0], 0), (made[-1], 2)):
            encoded = encode_texts(
                tokenizer, _unpack_texts(frames[at] or b"", frames[at + 1] or b"")
            )
            _write_frame(sink, encoded.ids.tobytes())
            _write_frame(sink, encoded.lengths.tobytes())
        sink.flush()
