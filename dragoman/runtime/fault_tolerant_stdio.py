"""Standard streams that tolerate a closed pipe, a full disk or a hung-up terminal.

Only the standard library is imported: the streams are wrapped before torch is imported.
"""

from __future__ import annotations

import os
from typing import IO, Any

lost_streams: dict[str, str] = {}  # why each stream was lost, until it is reported


class TolerantStream:
    """A text stream whose write errors are recorded instead of raised."""

    def __init__(self, stream: IO[str], name: str) -> None:
        self._stream, self._name = stream, name
        self._lost = False

    def write(self, text: str) -> int:
        """Write text, or drop it after an error; later writes are tried again."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._record_loss(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream, or ignore the error."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._record_loss(error)

    def isatty(self) -> bool:
        """Whether the stream is an open terminal."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def __enter__(self) -> TolerantStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _record_loss(self, error: Exception) -> None:
        if not self._lost and not isinstance(error, BlockingIOError):  # a slow reader is no loss
            self._lost = True
            lost_streams[self._name] = getattr(error, "strerror", None) or str(error)


def make_tolerant(stream: IO[str], name: str = "stderr") -> IO[str]:
    """Return a stream that raises no error when its reader is gone."""
    return stream if isinstance(stream, TolerantStream) else TolerantStream(stream, name)  # type: ignore[return-value]


def pop_lost_streams() -> dict[str, str]:
    """Return the streams lost since the last call, with the reason."""
    taken = dict(lost_streams)
    lost_streams.clear()
    return taken


def open_missing_descriptors() -> None:
    """Open /dev/null for closed standard descriptors, so that no other file takes their numbers.

    stdout is opened for reading: results written to it are lost, so writing them must fail.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if descriptor == 1 else os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
