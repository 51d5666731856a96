"""A generated corpus: dates written in many languages, with the ISO date as the translation.

Patterns, month names and weekdays come from CLDR through Babel. The corpus and its splits are a
deterministic function of the seed.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from dragoman.errors import DataError
from dragoman.runtime.counter_rng import derive_key

# Without Croatian: its "listopada" is October, in Polish it is November.
LOCALES = (
    "en", "en_GB", "de", "fr", "es", "it", "pt", "nl", "sv", "da", "pl", "cs",
    "ru", "uk", "tr", "el", "zh", "ja", "ko", "ar", "hi", "id", "he",
)  # fmt: skip
FIRST_DATE, LAST_DATE = datetime.date(1900, 1, 1), datetime.date(2049, 12, 31)
_LENGTHS = ("full", "long", "medium")
_SKELETONS = ("yMMMd", "yMMMMd", "yMMMEd", "yMMMMEEEEd")
# A month in letters, or a number with its unit (5月); other numbers could be the day.
_CLEAR_MONTH = re.compile(r"[ML]{3,}|[ML]{1,2}\w(?<![a-zA-Z])")
# Spoken forms, which CLDR does not have.
_SPOKEN_FORMS = {"fr": "le {}", "de": "den {}", "es": "el {}", "it": "il {}"}
_ENGLISH_FORMS = (
    "{month} {day}, {year}",
    "{day} {month} {year}",
    "the {day} of {month} {year}",
    "{day} of {month}, {year}",
)


class DatePair(NamedTuple):
    """A date in some language, and in ISO 8601."""

    text: str
    iso: str
    locale: str


class DateSplit(NamedTuple):
    """Training, validation and test sets without common dates."""

    train: list[DatePair]
    valid: list[DatePair]
    test: list[DatePair]


def make_date_splits(
    *, seed: int = 1, train: int = 60_000, valid: int = 300, test: int = 1_000
) -> DateSplit:
    """Return the three sets; held-out dates do not occur in the training set in any language."""
    days = [
        FIRST_DATE + datetime.timedelta(days=n) for n in range((LAST_DATE - FIRST_DATE).days + 1)
    ]
    days.sort(key=lambda day: derive_key(seed, "order", day, byteorder="big"))
    if valid + test >= len(days):
        raise DataError(
            "the held-out dates must leave some to train on",
            found=f"{valid + test:,} of {len(days):,}",
            fix="hold out fewer",
        )
    held, rest = days[: valid + test], days[valid + test :]
    again = (rest[n % len(rest)] for n in range(train))
    writer = DateWriter()
    return DateSplit(
        [
            writer.pair(day, derive_key(seed, n, day, byteorder="big"))
            for n, day in enumerate(again)
        ],
        [writer.pair(day, derive_key(seed, "valid", day, byteorder="big")) for day in held[:valid]],
        [writer.pair(day, derive_key(seed, "test", day, byteorder="big")) for day in held[valid:]],
    )


class DateWriter:
    """Writes dates in the CLDR formats of a set of locales, and in some spoken forms."""

    def __init__(self, locales: tuple[str, ...] = LOCALES) -> None:
        self._format = _babel().format_date
        self._forms = {locale: tuple(unambiguous_patterns(locale)) for locale in locales}

    def pair(self, day: datetime.date, choice: int) -> DatePair:
        """Return one pair; `choice` selects the language, uniformly, and then the format."""
        locales = tuple(self._forms)
        locale, choice = locales[choice % len(locales)], choice // len(locales)
        forms = self.forms(day, locale)
        return DatePair(forms[choice % len(forms)], day.isoformat(), locale)

    def forms(self, day: datetime.date, locale: str) -> list[str]:
        """Return a date in every format of one locale."""
        written = [
            _plain_spaces(self._format(day, pattern, locale=locale))
            for pattern in self._forms[locale]
        ]
        language = locale.partition("_")[0]
        if language == "en":
            month = self._format(day, "MMMM", locale=locale)
            written += [
                form.format(month=month, day=ordinal(day.day), year=day.year)
                for form in _ENGLISH_FORMS
            ]
        if language in _SPOKEN_FORMS:
            written.append(
                _SPOKEN_FORMS[language].format(
                    _plain_spaces(self._format(day, "long", locale=locale))
                )
            )
        return list(dict.fromkeys(written))


def unambiguous_patterns(locale: str) -> Iterator[str]:
    """Yield a locale's patterns in which month and day cannot be confused."""
    known = _babel().Locale.parse(locale)
    seen = [known.date_formats[length].pattern for length in _LENGTHS]
    seen += [
        known.datetime_skeletons[name].pattern
        for name in _SKELETONS
        if name in known.datetime_skeletons
    ]
    for pattern in dict.fromkeys(seen):
        if _CLEAR_MONTH.search(re.sub(r"'[^']*'", "", pattern)):
            yield pattern


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, 11th, 21st."""
    suffix = (
        "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{suffix}"


def _plain_spaces(text: str) -> str:
    """Replace non-breaking spaces by plain ones and remove direction marks."""
    return re.sub(r"[\u00a0\u202f]", " ", re.sub(r"[\u200e\u200f]", "", text))


def _babel() -> Any:
    """Return babel.dates; raise DataError if Babel is not installed."""
    try:
        import babel.dates
    except ImportError as error:
        raise DataError(
            "the demo needs Babel for its dates",
            found="no module named babel",
            fix="pip install 'dragoman[demo]'",
        ) from error
    return babel.dates
