"""The demo's corpus: correct dates, deterministic, and disjoint splits."""

from __future__ import annotations

import builtins
import datetime
import re
from typing import Any

import pytest

from dragoman.demo.date_corpus import (
    LOCALES,
    DatePair,
    DateWriter,
    make_date_splits,
    ordinal,
    unambiguous_patterns,
)
from dragoman.errors import DataError

pytest.importorskip("babel")


@pytest.fixture(scope="module")
def writer() -> DateWriter:
    return DateWriter()


def test_common_date_formats(writer: DateWriter) -> None:
    """The first lesson needs no download (annotated-transformer#96)."""
    day = datetime.date(1979, 5, 3)
    assert "3. Mai 1979" in writer.forms(day, "de")
    assert "le 3 mai 1979" in writer.forms(day, "fr")
    assert "May 3rd, 1979" in writer.forms(day, "en")
    assert "1979年5月3日" in writer.forms(day, "zh")
    assert "3 мая 1979 г." in writer.forms(day, "ru"), (
        "the narrow no-break space is put back to a plain one"
    )


def test_many_languages() -> None:
    assert len({locale.partition("_")[0] for locale in LOCALES}) >= 20
    assert {"de", "fr", "en", "zh", "ja", "ru", "es", "ar"} <= set(LOCALES)


@pytest.mark.parametrize("locale", LOCALES)
def test_every_form_holds_its_year_and_day(writer: DateWriter, locale: str) -> None:
    for day in (datetime.date(1979, 5, 3), datetime.date(2031, 11, 22)):
        for text in writer.forms(day, locale):
            numbers = re.findall(r"\d+", text)
            assert str(day.year) in numbers
            assert {str(day.day), f"{day.day:02d}"} & set(numbers)


@pytest.mark.parametrize("locale", LOCALES)
def test_no_form_can_be_read_as_two_dates(locale: str) -> None:
    for pattern in unambiguous_patterns(locale):
        assert re.search(r"[ML]{3}|[ML]{1,2}月", pattern), (
            f"{pattern} has a bare number for the month"
        )


def test_no_text_has_two_dates() -> None:
    meaning: dict[str, str] = {}
    writer = DateWriter()
    for month in range(1, 13):
        for day in (1, 3, 12, 25):
            date = datetime.date(1999, month, day)
            for locale in LOCALES:
                for text in writer.forms(date, locale):
                    assert meaning.setdefault(text, date.isoformat()) == date.isoformat(), text


def test_the_parts_share_no_date() -> None:
    parts = make_date_splits(train=3000, valid=100, test=200)
    train, valid, test = ({pair.iso for pair in part} for part in parts)
    assert not train & valid
    assert not train & test
    assert not valid & test
    assert (len(parts.train), len(parts.valid), len(parts.test)) == (3000, 100, 200)
    assert len(test) == 200, "every held-out date stands once"


def test_a_seed_decides_everything() -> None:
    assert make_date_splits(seed=3, train=50, valid=5, test=5) == make_date_splits(
        seed=3, train=50, valid=5, test=5
    )
    assert make_date_splits(seed=3, train=50, valid=5, test=5) != make_date_splits(
        seed=4, train=50, valid=5, test=5
    )


def test_every_language_is_sampled_evenly() -> None:
    counts = dict.fromkeys(LOCALES, 0)
    for pair in make_date_splits(train=len(LOCALES) * 50, valid=1, test=1).train:
        counts[pair.locale] += 1
    assert min(counts.values()) > 20


def test_pairs_read_back_as_dates() -> None:
    for pair in make_date_splits(train=200, valid=1, test=1).train:
        assert isinstance(pair, DatePair)
        assert datetime.date.fromisoformat(pair.iso).year >= 1900


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (11, "11th"),
        (13, "13th"),
        (22, "22nd"),
        (31, "31st"),
    ],
)
def test_ordinals(number: int, text: str) -> None:
    assert ordinal(number) == text


def test_too_much_held_out_is_reported() -> None:
    with pytest.raises(DataError, match="found 60,000 of 54,787"):
        make_date_splits(valid=30_000, test=30_000)


def test_without_babel_one_line_reports_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undeclared imports crash a first run (peer comparison: eole, JoeyNMT)."""
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("babel"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(
        DataError, match=r"found no module named babel; pip install 'dragoman\[demo\]'"
    ):
        DateWriter()
