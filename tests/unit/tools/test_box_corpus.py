"""The corpus of the model in the box: nothing held out is trained on, numbers are spelt right."""

from __future__ import annotations

import importlib.util
import lzma
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[3] / "tools" / "box_corpus.py"


@pytest.fixture(scope="module")
def box_corpus() -> ModuleType:
    pytest.importorskip("babel")
    spec = importlib.util.spec_from_file_location("box_corpus", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["box_corpus"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Two corpora of a few pairs, some of whose training sentences are held out elsewhere."""
    splits = {
        "tatoeba_ende": {
            "train": [
                ("Hallo!", "Hello!"),
                ("Ich weiß es.", "I KNOW it"),  # a test sentence of the other corpus, but for case
                ("Straße", "Street"),
                ("STRASSE.", "Road"),  # a validation sentence of its own corpus
                ("Fünf Äpfel", "Five apples"),
            ],
            "dev": [("strasse", "way")],
            "test": [("Guten Tag.", "Good day.")],
        },
        "tatoeba_enfr": {
            "train": [("Bonjour.", "Good  day!"), ("Salut\u00a0!", "Hi!"), ("Un café.", "A café.")],
            "dev": [("Merci.", "Thanks.")],
            "test": [("Je le sais.", "I know it.")],
        },
    }
    for name, parts in splits.items():
        foreign = name[-2:] if name == "tatoeba_enfr" else "de"
        (tmp_path / name).mkdir()
        for split, pairs in parts.items():
            for language, side in zip((foreign, "en"), zip(*pairs, strict=True), strict=True):
                text = "".join(f"{line}\n" for line in side)
                file = tmp_path / name / f"{split}.{language}.xz"
                file.write_bytes(lzma.compress(text.encode()))
    return tmp_path


def test_sentences_held_out_of_either_corpus_are_dropped(
    box_corpus: ModuleType, corpora: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    box_corpus.write_corpus(corpora, out, seed=1, generated=20)
    german = (out / "train.de-en.de").read_text(encoding="utf-8").splitlines()
    french = (out / "train.fr-en.fr").read_text(encoding="utf-8").splitlines()
    assert {"Hallo!", "Fünf Äpfel"} <= set(german)
    assert not {"Ich weiß es.", "Straße", "STRASSE."} & set(german)
    assert {"Salut\u00a0!", "Un café."} <= set(french)
    assert "Bonjour." not in french


def test_files_are_aligned_and_the_same_for_a_seed(
    box_corpus: ModuleType, corpora: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        box_corpus.write_corpus(corpora, tmp_path / name, seed=3, generated=30)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert len(files) == 16  # four splits of two language pairs
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    german, english = (
        (tmp_path / "a" / f"train.de-en.{language}").read_text(encoding="utf-8").splitlines()
        for language in ("de", "en")
    )
    assert len(german) == len(english) > 20
    assert english[german.index("Hallo!")] == "Hello!"


def test_held_out_quantities_are_not_trained_on(
    box_corpus: ModuleType, corpora: Path, tmp_path: Path
) -> None:
    box_corpus.write_corpus(corpora, tmp_path / "out", seed=1, generated=2_000)
    for languages in ("de-en", "fr-en"):
        for language in languages.split("-"):
            trained, held_out = (
                (tmp_path / "out" / f"{split}.{languages}.{language}").read_text(encoding="utf-8")
                for split in ("train", "numbers")
            )
            assert not set(trained.splitlines()) & set(held_out.splitlines())


def test_missing_corpora_are_reported(box_corpus: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--data must hold tatoeba_ende.*; found .*; name"):
        box_corpus.write_corpus(tmp_path, tmp_path / "out", seed=1)


# From the grammars: Duden for German, the traditional spelling of the Académie for French.
@pytest.mark.parametrize(
    ("number", "english", "german", "french"),
    [
        (0, "zero", "null", "zéro"),
        (1, "one", "eins", "un"),
        (16, "sixteen", "sechzehn", "seize"),
        (17, "seventeen", "siebzehn", "dix-sept"),
        (21, "twenty-one", "einundzwanzig", "vingt et un"),
        (30, "thirty", "dreißig", "trente"),
        (66, "sixty-six", "sechsundsechzig", "soixante-six"),
        (70, "seventy", "siebzig", "soixante-dix"),
        (71, "seventy-one", "einundsiebzig", "soixante et onze"),
        (77, "seventy-seven", "siebenundsiebzig", "soixante-dix-sept"),
        (80, "eighty", "achtzig", "quatre-vingts"),
        (81, "eighty-one", "einundachtzig", "quatre-vingt-un"),
        (91, "ninety-one", "einundneunzig", "quatre-vingt-onze"),
        (99, "ninety-nine", "neunundneunzig", "quatre-vingt-dix-neuf"),
        (100, "one hundred", "einhundert", "cent"),
        (101, "one hundred one", "einhunderteins", "cent un"),
        (200, "two hundred", "zweihundert", "deux cents"),
        (280, "two hundred eighty", "zweihundertachtzig", "deux cent quatre-vingts"),
        (1000, "one thousand", "eintausend", "mille"),
        (1984, "one thousand nine hundred eighty-four", "eintausendneunhundertvierundachtzig",
         "mille neuf cent quatre-vingt-quatre"),
        (21_000, "twenty-one thousand", "einundzwanzigtausend", "vingt et un mille"),
        (80_000, "eighty thousand", "achtzigtausend", "quatre-vingt mille"),
        (200_300, "two hundred thousand three hundred", "zweihunderttausenddreihundert",
         "deux cent mille trois cents"),
    ],
)  # fmt: skip
def test_numbers_in_words(
    box_corpus: ModuleType, number: int, english: str, german: str, french: str
) -> None:
    assert box_corpus.spell_number(number, "en") == english
    assert box_corpus.spell_number(number, "de") == german
    assert box_corpus.spell_number(number, "fr") == french


def test_british_numbers_have_an_and(box_corpus: ModuleType) -> None:
    assert box_corpus.spell_number(1205, "en", british=True) == (
        "one thousand two hundred and five"
    )
    assert box_corpus.spell_number(42, "en", british=True) == "forty-two"


def test_every_quantity_is_filled_in(box_corpus: ModuleType) -> None:
    for language in ("de", "fr"):
        pairs = box_corpus.generate_pairs(language, 3_000, random.Random(1))
        assert len(pairs) == len(set(pairs)) == 3_000
        assert not [pair for pair in pairs if "{" in "".join(pair)]


def test_the_first_of_a_month_is_an_ordinal_in_french(box_corpus: ModuleType) -> None:
    pairs = box_corpus.generate_pairs("fr", 8_000, random.Random(1))
    firsts = [pair for pair in pairs if pair[1].startswith("May 1, ")]
    assert firsts
    assert all("1er mai" in french for french, _ in firsts)
