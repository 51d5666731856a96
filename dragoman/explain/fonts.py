"""Fonts for pieces in any script: those that are installed, and spelling out what none of them can draw."""

from __future__ import annotations

import functools

# Fonts by the scripts that they add, in the order in which they are tried; what is not installed is passed over.
_WANTED = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "Yu Gothic",
    "SimHei",
    "Malgun Gothic",
    "Apple SD Gothic Neo",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Nirmala UI",
    "Arial Unicode MS",
    "Droid Sans Fallback",
    "Unifont",
)


@functools.cache
def families() -> tuple[str, ...]:
    """List the installed fonts to draw with, matplotlib's own first."""
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(name for name in _WANTED if name in installed)


@functools.cache
def _drawable() -> frozenset[int]:
    """Collect the characters that some font of ours has."""
    from matplotlib import font_manager, ft2font

    characters: set[int] = set()
    for name in families():
        path = font_manager.findfont(font_manager.FontProperties(family=name))
        characters |= ft2font.FT2Font(path).get_charmap().keys()
    return frozenset(characters)


def spelt(piece: str) -> str:
    """Write a piece so that it can be drawn: its space mark as an open box, and what no font has as its code point.

    Left to itself matplotlib draws an empty box and warns.
    """
    shown = piece.replace("\u2581", "\u2423")
    known = _drawable()
    return "".join(char if ord(char) in known and char.isprintable() else f"<{ord(char):X}>" for char in shown).replace("$", r"\$")
