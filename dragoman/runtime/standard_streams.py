"""Standard streams that may go away: a closed pipe, a full disk or a hung-up terminal costs what is shown, never the work.

Only the standard library is imported: the command's streams are protected before anything slow is imported.
"""

from __future__ import annotations

import os
from typing import IO, Any

lost_streams: dict[str, str] = {}  # name -> reason, until `pop_lost_streams`


class TolerantStream:
    """A text stream whose errors cost only what would have been shown; everything else is the stream's own."""

    def __init__(self, stream: IO[str], name: str) -> None:
        self._stream, self._name = stream, name
        self._lost = False

    def write(self, text: str) -> int:
        """Write text, or lose it; a disk that has room again is written to again."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: somebody closed it
            self._record_loss(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what was written, or lose it."""
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
    """Return a stream that raises no error when what it writes to goes away."""
    return stream if isinstance(stream, TolerantStream) else TolerantStream(stream, name)  # type: ignore[return-value]


def pop_lost_streams() -> dict[str, str]:
    """Return which streams were lost since the last call, and why."""
    taken = dict(lost_streams)
    lost_streams.clear()
    return taken


def open_missing_descriptors() -> None:
    """Open /dev/null where a standard descriptor is closed, or the next file that is opened would be written to as stderr."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
