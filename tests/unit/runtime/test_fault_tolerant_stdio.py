"""Tolerant streams: a write error does not raise, and is reported once, with the stream's name."""

from __future__ import annotations

import errno
import io
import os

import pytest

from dragoman.runtime.fault_tolerant_stdio import make_tolerant, pop_lost_streams


class Flaky(io.StringIO):
    """A stream whose writes fail while `full` is set."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


@pytest.fixture(autouse=True)
def forget() -> None:
    pop_lost_streams()


def test_writes_are_retried_and_a_lost_stream_is_reported_once_by_name() -> None:
    inner = Flaky()
    stream = make_tolerant(inner, "stdout")
    assert stream.write("lost") == 4
    assert pop_lost_streams() == {"stdout": "No space left on device"}
    stream.write("lost again")
    assert pop_lost_streams() == {}
    inner.full = False
    stream.writelines(["a", "b"])
    assert inner.getvalue() == "ab"


def test_a_context_closes_the_stream() -> None:
    inner = io.StringIO()
    with make_tolerant(inner) as stream:
        stream.write("x")
        assert stream.getvalue() == "x"  # type: ignore[attr-defined]
    assert inner.closed
