"""Reading the texts that are scored: whole files, line by line, by the same rules as a corpus."""

from __future__ import annotations

from pathlib import Path

from dragoman.config import DataConfig
from dragoman.data.lines import open_lines


def read_text(path: Path) -> list[str]:
    """Read a file of sentences, plain, .gz or .xz; empty lines stay, because they keep the files aligned."""
    return [line.text for line in open_lines(path, max_line_bytes=DataConfig().max_line_bytes)]
