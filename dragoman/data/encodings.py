"""Guessing in which encoding a line that is not UTF-8 was written, to tell a person what to type."""

from __future__ import annotations

import re

_HIGH_RUNS = re.compile(rb"[\x80-\xff]+")


def guess_encoding(line: bytes) -> str:
    """Name the likeliest encoding of a line that is not UTF-8, or return nothing."""
    runs = _HIGH_RUNS.findall(line)
    if not runs:
        return ""
    high = b"".join(runs)
    if _decodes(line, "gb18030") and sum(len(run) for run in runs if not len(run) % 2) > len(high) / 2 and _common_hanzi(high):
        return "GBK"
    if _decodes(line, "cp1251") and len(high) / len(runs) >= 2 and sum(byte >= 0xC0 for byte in high) > 0.9 * len(high):
        return "CP1251"
    return "CP1252" if _decodes(line, "cp1252") else ""


def utf16_by_head(head: bytes) -> str:
    """Recognise UTF-16 and UTF-32 by a file's first bytes: their mark, or a zero in every second byte."""
    if head.startswith((b"\xff\xfe\x00\x00", b"\x00\x00\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    for first, name in ((1, "UTF-16LE"), (0, "UTF-16BE")):
        half = head[first:1024:2]
        if len(half) >= 4 and half.count(0) > 0.6 * len(half) and head[1 - first : 1024 : 2].count(0) < 0.1 * len(half):
            return name
    return ""


def _decodes(line: bytes, encoding: str) -> bool:
    try:
        line.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _common_hanzi(high: bytes) -> bool:
    """Tell whether the lead bytes are mostly those of GB 2312's common characters, rows 16 to 55."""
    leads = high[::2]
    return sum(0xB0 <= byte <= 0xD7 or byte == 0xA3 or byte == 0xA1 for byte in leads) >= 0.6 * len(leads)
