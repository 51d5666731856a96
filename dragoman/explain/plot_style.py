"""Style of all figures: sizes for papers, colors, fonts for every script, and saving to a file.

matplotlib is imported when a figure is drawn, never with this module. Figures are drawn without
pyplot, which has global state and may need a window system.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dragoman.errors import ConfigError
from dragoman.storage.user_output_files import check_output_file, write_output

logger = logging.getLogger(__name__)

FORMATS = ("png", "svg", "pdf")
ONE_COLUMN, TWO_COLUMNS = 3.35, 6.9  # inches, of a page with two columns
DOTS_PER_INCH = 300.0
# Okabe and Ito (2008): distinguishable with every kind of color blindness, black last.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # with the colors, so that gray prints can be read
LIGHT, INK, FAINT = "#BFD9EA", "#222222", "#6B6B6B"
HEAT_MAP, SIGNED_MAP = "Blues", "RdBu_r"

_SHAPING_VERSION = (3, 11)  # of matplotlib, whose text layout joins and reorders letters
_BASE_FONT = "DejaVu Sans"  # comes with matplotlib
# Tried before all other installed fonts, in this order.
_PREFERRED_FONTS = (
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
    "Noto Naskh Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Nirmala UI",
    "Arial Unicode MS",
    "Droid Sans Fallback",
    "Unifont",
)
_PLACEHOLDERS = ("Last Resort", "LastResort", "Adobe Blank")  # boxes for every character
_INVISIBLE = frozenset("\u200b\u200c\u200d\ufe0e\ufe0f")  # no glyph of their own is missed
_SHOWN_MISSING = 6  # characters that a warning names


@contextlib.contextmanager
def figure_style(texts: Iterable[str] = ()) -> Iterator[None]:
    """Draw and save within this block: 8-point text, fonts that hold the texts, vector text."""
    import matplotlib

    settings: dict[str, Any] = {
        "font.family": list(choose_fonts("".join(texts))),
        "font.size": 8.0,
        "axes.titlesize": 9.0,
        "axes.labelsize": 8.0,
        "xtick.labelsize": 7.0,
        "ytick.labelsize": 7.0,
        "legend.fontsize": 7.0,
        "legend.frameon": False,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "axes.linewidth": 0.6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "lines.linewidth": 1.2,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E6E6E6",
        "grid.linewidth": 0.5,
        "text.parse_math": False,  # a dollar sign is a dollar sign
        "pdf.fonttype": 42,  # TrueType, as journals ask for, not outlines
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "dragoman",  # equal figures are equal files
        "figure.dpi": DOTS_PER_INCH,
        "savefig.dpi": "figure",
    }
    with matplotlib.rc_context(rc=cast(Any, settings)):
        yield


def save_figure(figure: Any, path: str | Path, *, tight: bool = False) -> None:
    """Save a figure as PNG, SVG or PDF by the suffix of the path, atomically.

    With `tight` the page grows to what stands outside of the axes.
    """
    path = Path(path)
    kind = figure_format(path)
    metadata: dict[str, Any] = {"Software": None} if kind == "png" else {}
    if kind == "svg":
        metadata = {"Date": None, "Creator": "dragoman"}
    elif kind == "pdf":
        metadata = {"CreationDate": None, "Creator": "dragoman"}
    drawn = io.BytesIO()
    more = {"bbox_inches": "tight", "pad_inches": 0.05} if tight else {}
    figure.savefig(drawn, format=kind, metadata=metadata, **more)
    write_output(path, drawn.getvalue())


def use_log_scale(axes: Any, axis: str) -> None:
    """Make the axis "x" or "y" logarithmic, its labels plain numbers and no formulas.

    Where fewer than two powers of ten are in view, ticks between them have labels as well.
    """
    from matplotlib.ticker import FuncFormatter

    def label_minor(value: float, _: int) -> str:
        low, high = sorted(math.log10(max(edge, 1e-300)) for edge in chosen.get_view_interval())
        if math.floor(high) - math.ceil(low) >= 1:
            return ""
        digit = round(value / 10 ** math.floor(math.log10(value)), 6)
        return f"{value:g}" if high - low < 0.5 or digit in (2, 5) else ""

    axes.set(**{f"{axis}scale": "log"})
    chosen = axes.xaxis if axis == "x" else axes.yaxis
    chosen.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    chosen.set_minor_formatter(FuncFormatter(label_minor))


def figure_format(path: Path, option: str = "") -> str:
    """Return the format that a suffix names; raise ConfigError for any other."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        found = f"{path.suffix!r} of {path}" if path.suffix else f"no suffix in {path}"
        raise ConfigError(
            [f"{option or 'a figure'} must end in .png, .svg or .pdf; found {found}; rename it"]
        )
    return kind


def check_figure_file(
    option: str, path: Path, *, kind: str = "", inputs: Iterable[Path] = ()
) -> None:
    """Raise an error unless a figure can be written: the suffix, the directory, the permission."""
    found = figure_format(path, option)
    if kind and found != kind:
        raise ConfigError([f"{option} must name a .{kind} file; found {path}; use --{found}"])
    check_output_file(option, path, inputs=inputs)


# Fonts


@functools.cache
def _installed_fonts() -> Mapping[str, tuple[str, ...]]:
    """Return the files of each installed family, those of upright regular faces first."""
    from matplotlib import font_manager

    files: dict[str, list[tuple[bool, str]]] = {}
    for font in font_manager.fontManager.ttflist:
        if not font.name.startswith(_PLACEHOLDERS):
            plain = font.style == "normal" and str(font.weight) in ("400", "normal", "regular")
            files.setdefault(font.name, []).append((not plain, font.fname))
    return {name: tuple(file for _, file in sorted(found)) for name, found in files.items()}


@functools.cache
def _covered_chars(family: str) -> frozenset[int]:
    """Return the code points that a family's first readable file has a glyph for."""
    from matplotlib import ft2font

    for file in _installed_fonts().get(family, ()):
        with contextlib.suppress(RuntimeError, OSError):
            return frozenset(ft2font.FT2Font(file).get_charmap())
    return frozenset()


@functools.cache
def _list_new_fonts() -> bool:
    """Add fonts installed since matplotlib wrote its list of them; return whether there are any."""
    from matplotlib import font_manager

    fonts = font_manager.fontManager
    listed = {font.fname for font in fonts.ttflist}
    for file in set(font_manager.findSystemFonts()) - listed:
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            fonts.addfont(file)
    _installed_fonts.cache_clear()
    return len(fonts.ttflist) > len(listed)


@functools.lru_cache(maxsize=64)
def choose_fonts(text: str) -> tuple[str, ...]:
    """Return the fewest installed families whose glyphs cover a text, matplotlib's own first."""
    chosen, missing = _choose_listed_fonts(text)
    if missing and _list_new_fonts():
        chosen, _ = _choose_listed_fonts(text)
    return chosen


def _choose_listed_fonts(text: str) -> tuple[tuple[str, ...], set[int]]:
    """Return the families chosen for a text, and the code points that they do not cover."""
    missing = {ord(char) for char in text if _needs_glyph(char)} - _covered_chars(_BASE_FONT)
    chosen = [_BASE_FONT]
    installed = _installed_fonts()
    names = [name for name in _PREFERRED_FONTS if name in installed]
    names += sorted(set(installed) - {_BASE_FONT, *_PREFERRED_FONTS})
    for name in names:
        if not missing:
            break
        if found := missing & _covered_chars(name):
            chosen.append(name)
            missing -= found
    return tuple(chosen), missing


def _needs_glyph(char: str) -> bool:
    return char.isprintable() and char not in _INVISIBLE


@functools.lru_cache(maxsize=4096)
def _is_drawable(char: str) -> bool:
    """Whether some installed font has a glyph for a character."""
    return any(ord(char) in _covered_chars(name) for name in choose_fonts(char))


def escape_undrawable(text: str) -> str:
    """Return a text with its space mark as an open box and uncovered characters as code points.

    matplotlib would draw an empty box in their place, and warn.
    """
    escaped = []
    for char in text.replace("\u2581", "\u2423"):
        if char in _INVISIBLE:
            escaped.append(char if _is_drawable(char) and shapes_text() else "")
        elif char.isprintable() and _is_drawable(char):
            escaped.append(char)
        else:
            escaped.append(f"<{ord(char):X}>")
    return "".join(escaped)


def undrawable_chars(texts: Iterable[str]) -> list[str]:
    """Return the printable characters that no installed font has a glyph for, in order."""
    found = dict.fromkeys(char for text in texts for char in text if _needs_glyph(char))
    return [char for char in found if char != "\u2581" and not _is_drawable(char)]


def warn_about_glyphs(texts: Sequence[str]) -> None:
    """Log one line about characters that no font can draw, or this matplotlib cannot shape."""
    missing = undrawable_chars(texts)
    if missing:
        shown = ", ".join(f"{char} U+{ord(char):04X}" for char in missing[:_SHOWN_MISSING])
        more = f" and {len(missing) - _SHOWN_MISSING} more" if len(missing) > _SHOWN_MISSING else ""
        logger.warning(
            "no installed font has %s%s: written as code points; install a font that has them, "
            "such as Noto Sans CJK or Noto Sans",
            shown,
            more,
        )
    if not shapes_text() and any(_needs_shaping(char) for text in texts for char in text):
        logger.warning(
            "this matplotlib draws Arabic, Hebrew and Indic letters unjoined and from left to "
            "right; matplotlib 3.11 or later shapes them"
        )


def shapes_text() -> bool:
    """Whether the installed matplotlib joins and reorders letters as their script demands."""
    import matplotlib

    parts = matplotlib.__version_info__
    return (parts.major, parts.minor) >= _SHAPING_VERSION


def _needs_shaping(char: str) -> bool:
    """Whether a character is of a script that is joined, reordered or written right to left."""
    return unicodedata.bidirectional(char) in ("R", "AL") or "\u0900" <= char <= "\u0dff"
