"""Write the corpus of the built-in model: `python tools/box_corpus.py --data DATA --out DIR`.

Tatoeba de-en and fr-en, without the training pairs that share a sentence with a validation or
test set of either corpus, and generated pairs of dates and numbers in the formats of CLDR (Babel).
"""

from __future__ import annotations

import argparse
import datetime
import lzma
import random
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from babel.dates import format_date, format_skeleton, format_time
from babel.numbers import format_currency, format_decimal, format_percent

CORPORA = {"de-en": "tatoeba_ende", "fr-en": "tatoeba_enfr"}
LOCALES = {"de": "de_DE", "fr": "fr_FR", "en": "en_US"}
GENERATED, GENERATED_DEV = 8_000, 500  # pairs of each language pair
DATE_FORMATS = ("full", "long", "medium")
DATE_SKELETONS = ("MMMMd", "yMMMM", "yMMMEd")
CURRENCIES = ("EUR", "USD", "GBP", "CHF")
FIRST_DAY, DAYS = datetime.date(1800, 1, 1), 100_000
# Aligned in English, German and French; {…} is a quantity, written as each language writes it.
SENTENCES = (
    ("Today is {date}.", "Heute ist der {date}.", "Aujourd'hui, nous sommes le {date}."),
    ("She was born on {date}.", "Sie wurde am {date} geboren.", "Elle est née le {date}."),
    ("He died on {date}.", "Er starb am {date}.", "Il est mort le {date}."),
    ("The shop opens on {date}.", "Der Laden öffnet am {date}.", "Le magasin ouvre le {date}."),
    ("We got married on {date}.", "Wir haben am {date} geheiratet.",
     "Nous nous sommes mariés le {date}."),
    ("My birthday is {day}.", "Mein Geburtstag ist der {day}.", "Mon anniversaire est le {day}."),
    ("The meeting is on {day}.", "Das Treffen ist am {day}.", "La réunion est le {day}."),
    ("The war ended in {year}.", "Der Krieg endete {year}.", "La guerre a pris fin en {year}."),
    ("The house was built in {year}.", "Das Haus wurde {year} gebaut.",
     "La maison a été construite en {year}."),
    ("I have lived here since {year}.", "Ich wohne seit {year} hier.",
     "J'habite ici depuis {year}."),
    ("The train leaves at {time}.", "Der Zug fährt um {time} Uhr ab.", "Le train part à {time}."),
    ("The film begins at {time}.", "Der Film beginnt um {time} Uhr.",
     "Le film commence à {time}."),
    ("We are meeting at {time}.", "Wir treffen uns um {time} Uhr.",
     "Nous nous retrouvons à {time}."),
    ("It costs {price}.", "Es kostet {price}.", "Ça coûte {price}."),
    ("I paid {price} for this book.", "Ich habe für dieses Buch {price} bezahlt.",
     "J'ai payé ce livre {price}."),
    ("The ticket costs {price}.", "Die Fahrkarte kostet {price}.", "Le billet coûte {price}."),
    ("The price rose by {percent}.", "Der Preis stieg um {percent}.",
     "Le prix a augmenté de {percent}."),
    ("Only {percent} of them agreed.", "Nur {percent} von ihnen stimmten zu.",
     "Seulement {percent} d'entre eux étaient d'accord."),
    ("The city has {integer} inhabitants.", "Die Stadt hat {integer} Einwohner.",
     "La ville compte {integer} habitants."),
    ("The book has {integer} pages.", "Das Buch hat {integer} Seiten.",
     "Le livre a {integer} pages."),
    ("There are {integer} students at this school.",
     "An dieser Schule gibt es {integer} Schüler.", "Il y a {integer} élèves dans cette école."),
    ("The bridge is {integer} meters long.", "Die Brücke ist {integer} Meter lang.",
     "Le pont fait {integer} mètres de long."),
    ("The temperature is {decimal} degrees.", "Die Temperatur beträgt {decimal} Grad.",
     "La température est de {decimal} degrés."),
    ("The distance is {decimal} kilometers.", "Die Entfernung beträgt {decimal} Kilometer.",
     "La distance est de {decimal} kilomètres."),
    ("It weighs {decimal} kilograms.", "Es wiegt {decimal} Kilogramm.",
     "Ça pèse {decimal} kilogrammes."),
    ("I have read {words} books.", "Ich habe {words} Bücher gelesen.", "J'ai lu {words} livres."),
    ("He is {words} years old.", "Er ist {words} Jahre alt.", "Il a {words} ans."),
    ("We waited for {words} days.", "Wir haben {words} Tage gewartet.",
     "Nous avons attendu {words} jours."),
)  # fmt: skip

Writer = Callable[[str], str]  # a quantity in the language of this code


def normalize(sentence: str) -> str:
    """Return the letters and digits of a sentence, case-folded, after NFKC."""
    return "".join(
        each for each in unicodedata.normalize("NFKC", sentence).casefold() if each.isalnum()
    )


def read_pairs(data: Path, languages: str, split: str) -> list[tuple[str, str]]:
    """Return one split of a Tatoeba corpus: foreign and English sentences."""
    columns = []
    for language in languages.split("-"):
        path = data / CORPORA[languages] / f"{split}.{language}.xz"
        try:
            columns.append(lzma.decompress(path.read_bytes()).decode().splitlines())
        except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
            sys.exit(
                f"--data must hold {path.relative_to(data)}; found {error}; name its directory"
            )
    return list(zip(*columns, strict=True))


def without_held_out(
    pairs: Iterable[tuple[str, str]], held_out: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield the pairs neither side of which is one of these normalized sentences."""
    for foreign, english in pairs:
        if normalize(foreign) not in held_out and normalize(english) not in held_out:
            yield foreign, english


def generate_pairs(language: str, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Return distinct pairs of dates and numbers, half of them within a sentence."""
    bare = tuple(QUANTITIES)
    column = 1 if language == "de" else 2
    pairs: dict[tuple[str, str], None] = {}
    while len(pairs) < count:
        if rng.random() < 0.5:
            write = QUANTITIES[rng.choice(bare)](rng)
            pair = (write(language), write("en"))
        else:
            sentence = rng.choice(SENTENCES)
            name = re.findall(r"{(\w+)}", sentence[0])[0]
            write = (IN_SENTENCES.get(name) or QUANTITIES[name])(rng)
            foreign = sentence[column].replace(f"{{{name}}}", write(language))
            pair = (foreign, sentence[0].replace(f"{{{name}}}", write("en")))
        pairs[pair] = None
    return list(pairs)


def _date(rng: random.Random, formats: tuple[str, ...] = DATE_FORMATS + DATE_SKELETONS) -> Writer:
    day = FIRST_DAY + datetime.timedelta(days=rng.randrange(DAYS))
    name = rng.choice(formats)

    def write(language: str) -> str:
        locale = LOCALES[language]
        if name in DATE_FORMATS:
            written = format_date(day, name, locale=locale)
        else:
            written = format_skeleton(name, day, locale=locale)
        if language == "fr":  # CLDR's patterns have no form for the first of a month
            written = re.sub(r"(?<!\d)1 (?=\D)", "1er ", written)
        return written

    return write


def _time(rng: random.Random) -> Writer:
    when = datetime.time(rng.randrange(24), rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50, 55)))
    return lambda language: format_time(when, "short", locale=LOCALES[language]).replace(
        "\u202f", " "
    )


def _integer(rng: random.Random) -> Writer:
    number = _log_uniform(rng, 10_000_000) + 1
    return lambda language: format_decimal(number, locale=LOCALES[language])


def _decimal(rng: random.Random) -> Writer:
    digits = rng.choice((1, 1, 2))
    number = round(_log_uniform(rng, 100_000) / 10 + rng.random(), digits)
    pattern = "#,##0." + "0" * digits
    return lambda language: format_decimal(number, pattern, locale=LOCALES[language])


def _percent(rng: random.Random) -> Writer:
    number = rng.choice((rng.randrange(1, 101), rng.randrange(1, 1000) / 10))
    form = {"en": "#,##0.#%"}
    return lambda language: format_percent(
        number / 100, form.get(language, "#,##0.#\u00a0%"), locale=LOCALES[language]
    )


def _price(rng: random.Random) -> Writer:
    currency = rng.choice(CURRENCIES)
    amount = _log_uniform(rng, 100_000) + rng.choice((0.0, 0.5, 0.95, 0.99, rng.random()))

    def write(language: str) -> str:
        written = format_currency(round(amount, 2), currency, locale=LOCALES[language])
        return re.sub(r"(?<=[$£])(US|GB)", "", written)  # French "3,00 $US", seldom written so

    return write


def _words(rng: random.Random) -> Writer:
    number, british = _log_uniform(rng, 9_000) + 1, rng.random() < 0.5
    return lambda language: spell_number(number, language, british=british)


def _year(rng: random.Random) -> Writer:
    year = rng.randrange(1500, 2051)
    return lambda language: str(year)


def _log_uniform(rng: random.Random, limit: int) -> int:
    return int(limit ** rng.random())


QUANTITIES: dict[str, Callable[[random.Random], Writer]] = {
    "date": _date,
    "time": _time,
    "integer": _integer,
    "decimal": _decimal,
    "percent": _percent,
    "price": _price,
    "words": _words,
}
IN_SENTENCES: dict[str, Callable[[random.Random], Writer]] = {
    "date": lambda rng: _date(rng, ("long",)),
    "day": lambda rng: _date(rng, ("MMMMd",)),
    "year": _year,
}

_ONES = {
    "en": "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen",
    "de": "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
    "fünfzehn sechzehn siebzehn achtzehn neunzehn",
    "fr": "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze "
    "seize dix-sept dix-huit dix-neuf",
}
_TENS = {
    "en": "- - twenty thirty forty fifty sixty seventy eighty ninety",
    "de": "- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    "fr": "- - vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt",
}


def spell_number(number: int, language: str, *, british: bool = False) -> str:
    """Return a cardinal below a million in words; `british` writes "one hundred and five"."""
    assert 0 <= number < 1_000_000, f"number must be below a million; found {number}"
    thousands, rest = divmod(number, 1000)
    hundreds, below = divmod(rest, 100)
    ones = _ONES[language].split()
    if language == "de":
        text = f"{_german_prefix(thousands)}tausend" if thousands else ""
        text += f"{_german_prefix(hundreds)}hundert" if hundreds else ""
        return text + (_german_below_hundred(below) if below or not number else "")
    parts = []
    if language == "fr":
        if thousands:
            head = spell_number(thousands, "fr")
            head = re.sub(r"(vingt|cent)s$", r"\1", head)
            parts.append("mille" if thousands == 1 else f"{head} mille")
        if hundreds:
            many = "cents" if hundreds > 1 and not below else "cent"
            parts.append("cent" if hundreds == 1 else f"{ones[hundreds]} {many}")
        if below or not number:
            parts.append(_french_below_hundred(below))
        return " ".join(parts)
    parts += [f"{spell_number(thousands, 'en', british=british)} thousand"] if thousands else []
    parts += [f"{ones[hundreds]} hundred"] if hundreds else []
    if below or not number:
        tens, unit = divmod(below, 10)
        name = _TENS["en"].split()[tens]
        small = ones[below] if below < 20 else f"{name}-{ones[unit]}" if unit else name
        parts.append(f"and {small}" if british and number >= 100 else small)
    return " ".join(parts)


def _german_prefix(number: int) -> str:
    """Return the number in front of "hundert" or "tausend": "ein", not "eins"."""
    return re.sub("eins$", "ein", spell_number(number, "de"))


def _german_below_hundred(number: int) -> str:
    if number < 20:
        return _ONES["de"].split()[number]
    tens, unit = divmod(number, 10)
    name = _TENS["de"].split()[tens]
    return f"{_german_prefix(unit)}und{name}" if unit else name


def _french_below_hundred(number: int) -> str:
    ones = _ONES["fr"].split()
    if number < 20:
        return ones[number]
    if number == 80:
        return "quatre-vingts"
    tens, unit = divmod(number, 10)
    unit += 10 * (tens in (7, 9))
    name = _TENS["fr"].split()[tens]
    if unit in (1, 11) and tens < 8:
        return f"{name} et {ones[unit]}"
    return f"{name}-{ones[unit]}" if unit else name


def write_corpus(data: Path, out: Path, *, seed: int, generated: int = GENERATED) -> list[str]:
    """Write the files of all splits; return a line of statistics for each language pair."""
    held_out = {
        normalize(sentence)
        for languages in CORPORA
        for split in ("dev", "test")
        for pair in read_pairs(data, languages, split)
        for sentence in pair
    }
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for languages in CORPORA:
        rng = random.Random(f"{seed} {languages}")
        train = read_pairs(data, languages, "train")
        kept = list(without_held_out(train, held_out))
        numbers = list(
            without_held_out(
                generate_pairs(languages[:2], generated + GENERATED_DEV, rng), held_out
            )
        )
        numbers_dev = numbers[:GENERATED_DEV]
        # No quantity of the held-out part is trained on, in either language.
        unseen = {normalize(sentence) for pair in numbers_dev for sentence in pair}
        numbers = list(without_held_out(numbers[GENERATED_DEV:], unseen))
        mixed = kept + numbers
        rng.shuffle(mixed)
        _write(out, "train", languages, mixed)
        _write(out, "numbers", languages, numbers_dev)
        for split in ("dev", "test"):
            _write(out, split, languages, read_pairs(data, languages, split))
        lines.append(
            f"{languages}: {len(train):,} training pairs of Tatoeba, {len(train) - len(kept):,} "
            f"dropped as held out, {len(numbers):,} generated; {len(mixed):,} written"
        )
    return lines


def _write(out: Path, split: str, languages: str, pairs: Iterable[tuple[str, str]]) -> None:
    """Write `train.de-en.de` and `train.de-en.en`."""
    for language, side in zip(languages.split("-"), zip(*pairs, strict=True), strict=True):
        text = "".join(f"{sentence}\n" for sentence in side)
        (out / f"{split}.{languages}.{language}").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="directory of tatoeba_ende, …")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for line in write_corpus(arguments.data, arguments.out, seed=arguments.seed):
        print(line)
