"""The direction of each text: named, identified, or an error that lists what there is."""

from __future__ import annotations

import pytest

from dragoman.config import Config
from dragoman.config.translation_directions import Direction
from dragoman.errors import ConfigError
from dragoman.inference.translation_direction_choice import DirectionChooser
from dragoman.text.language_identification import LanguageIdentifier

IDENTIFIER = LanguageIdentifier.train(
    {
        "de": ["Guten Morgen, wie geht es dir?", "Das ist ein Haus."],
        "en": ["Good morning, how are you?", "This is a house."],
        "fr": ["Bonjour, comment vas-tu ?", "C'est une maison."],
    }
)


def chooser(*directions: str, identifier: LanguageIdentifier | None = IDENTIFIER):
    config = Config().replace(data={"directions": directions}, text={"language_tags": True})
    return DirectionChooser(config, identifier)


def names(found: list[Direction]) -> list[str]:
    return [str(each) for each in found]


FOUR = ("de-en", "en-de", "fr-en", "en-fr")
TEXTS = ["Wie geht es?", "C'est une", "", "Das ist"]


def test_sources_are_identified_and_targets_follow() -> None:
    found = chooser(*FOUR).choose(TEXTS)
    assert names(found) == ["de-en", "fr-en", "de-en", "de-en"]
    assert names(chooser(*FOUR).choose(["This is"], target="de")) == ["en-de"]
    assert names(chooser(*FOUR).choose(TEXTS, source="fr")) == ["fr-en"] * 4


def test_an_empty_name_of_a_language_is_none() -> None:
    found = chooser(*FOUR).choose(["This is a house."], source="", target="fr")
    assert names(found) == ["en-fr"]
    assert names(chooser(*FOUR).choose(["Das ist"], source="de", target="")) == ["de-en"]


def test_a_blank_text_needs_no_language() -> None:
    several = chooser("en-de", "en-fr", "de-en", identifier=None)
    assert names(several.choose([" ", ""])) == ["en-de", "en-de"]


def test_only_languages_of_the_target_are_candidates() -> None:
    """English text to English is read as one of the languages that are translated into it."""
    assert chooser(*FOUR).choose(["This is a house."], target="en")[0].source in ("de", "fr")


def test_one_direction_needs_no_languages_and_no_identifier() -> None:
    assert names(chooser("de-en", identifier=None).choose(TEXTS)) == ["de-en"] * 4


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"source": "de", "target": "fr"}, "found --from 'de' and --to 'fr'; its directions are"),
        ({"target": "zh"}, "found --to 'zh'; its directions are de-en, en-de, fr-en, en-fr"),
        ({"source": "zh"}, "found --from 'zh'"),
        (
            {"source": "en"},
            "in en, which the model translates into de and fr; add --to de or --to fr",
        ),
    ],
)
def test_an_unsupported_direction_is_an_error(named: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        chooser(*FOUR).choose(["This is a house."], **named)
    assert message in str(caught.value)
    assert "another language" not in str(caught.value)


def test_a_language_that_may_be_mistaken_can_be_named() -> None:
    with pytest.raises(ConfigError, match="--to fr, or --from if it is in another language"):
        chooser(*FOUR).choose(["This is a house."])


def test_without_an_identifier_the_source_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"--from.*must be named.*found none of de, fr"):
        chooser(*FOUR, identifier=None).choose(TEXTS, target="en")


def test_models_of_one_direction_accept_their_own_languages() -> None:
    config = Config().replace(data={"src_lang": "de", "tgt_lang": "en"})
    single = DirectionChooser(config)
    assert not single.has_tags
    assert single.choose(["x"], source="de", target="en") == [Direction("de", "en")]
    with pytest.raises(
        ConfigError,
        match=r"target_language \(--to\) must be a language of the model; found 'fr' for a ",
    ):
        single.choose(["x"], target="fr")
    with pytest.raises(ConfigError, match="for a model of unknown languages; leave it out"):
        DirectionChooser(Config()).choose(["x"], target="fr")


def test_a_source_is_identified_among_some_languages() -> None:
    found = chooser(*FOUR)
    assert found.identify("This is a house.") == "en"
    assert found.identify("This is a house.", ["fr"]) == "fr"
    assert found.identify("Das ist ein", ["en", "de"]) == "de"


def test_a_text_may_be_in_another_language_than_the_source() -> None:
    found, direction = chooser(*FOUR), Direction("en", "de")
    assert found.other_language("Guten Morgen, wie geht es dir?", direction) == "de"
    assert found.other_language("Good morning, how are you?", direction) == ""
    assert found.other_language("Bonjour, comment vas-tu ?", direction) == "fr"
    for unsure in ("", " ", "s", "Tom", "42"):
        assert found.other_language(unsure, direction) == "", unsure
    none = chooser(*FOUR, identifier=None)
    assert none.other_language("Guten Morgen, wie geht es dir?", direction) == ""
