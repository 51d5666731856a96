"""Fonts of figures: those installed after matplotlib wrote its list are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib import font_manager, ft2font
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dragoman.explain import plot_style as figure_style

FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    caches = (
        figure_style._installed_fonts,
        figure_style._list_new_fonts,
        figure_style.choose_fonts,
        figure_style._is_drawable,
    )
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_fonts_installed_after_the_list_was_written_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The warning about a missing font was repeated after the font was installed."""
    new, damaged = FONTS / "STIXGeneral.ttf", tmp_path / "damaged.ttf"
    damaged.write_bytes(b"not a font")
    base = [font for font in font_manager.fontManager.ttflist if font.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", base)
    added = set(ft2font.FT2Font(str(new)).get_charmap())
    char = chr(min(added - figure_style._covered_chars("DejaVu Sans")))
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    assert figure_style.undrawable_chars([char]) == [char]

    for each in (
        figure_style._list_new_fonts,
        figure_style.choose_fonts,
        figure_style._is_drawable,
    ):
        each.cache_clear()  # as in a new process
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(damaged), str(new)])
    assert figure_style.undrawable_chars([char]) == []
    assert figure_style.choose_fonts(char) == ("DejaVu Sans", "STIXGeneral")


def test_new_fonts_are_searched_only_for_a_missing_character(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: pytest.fail("slow"))
    assert figure_style.choose_fonts("abc é Ж") == ("DejaVu Sans",)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (2.1, 7.4, {"5"}),
        (1.5, 9.5, {"2", "5"}),
        (0.3, 7.0, {"0.5", "1", "2", "5"}),
        (3.1, 4.9, {"4"}),
        (0.05, 200.0, {"0.1", "1", "10", "100"}),
    ],
)
def test_a_logarithmic_axis_has_labels(low: float, high: float, labels: set[str]) -> None:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([0, 1], [low, high])
    figure_style.use_log_scale(axes, "y")
    axes.set_ylim(low, high)
    figure.draw_without_rendering()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    shown = {tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high} - {""}
    assert labels <= shown
    assert len(shown) <= 12
