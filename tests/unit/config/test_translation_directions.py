"""Directions, and the settings of multilingual models."""

from __future__ import annotations

import pytest

from dragoman.config import Config
from dragoman.config.translation_directions import Direction, list_languages, parse_direction
from dragoman.errors import ConfigError


def test_directions_are_two_languages() -> None:
    assert parse_direction("de-en") == Direction("de", "en")
    assert str(Direction("de", "en").reverse) == "en-de"
    assert parse_direction("pt_BR-en") == Direction("pt_BR", "en")
    for wrong in ("de", "de-", "de-de", "de-en-fr", "<2>-en", "d-e", ""):
        assert parse_direction(wrong) is None
    assert list_languages(["de-en", "en-fr"]) == ["de", "en", "fr"]


def problems(**data: object) -> str:
    tags = {"language_tags": bool(data.pop("tags", True))}
    return "\n".join(Config().replace(data=data, text=tags).problems())


FILES = {"src": "a.de", "tgt": "a.en"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tags": True}, "text.language_tags is for models with data.directions"),
        (
            {"directions": ("de-en",), "tags": False},
            r"found data.directions=['de-en'] without it",
        ),
        ({"directions": ("deutsch",)}, "such as de-en or pt_BR-en; found 'deutsch'"),
        ({"directions": ("de-en", "de-en")}, "must name each direction once; found de-en, de-en"),
        (
            {"directions": ("de-en",), **FILES},
            "found 0 for 1 file pairs; use --pair de-en FILE FILE",
        ),
        (
            {"directions": ("de-en",), "languages": ("de-en",), "pairs": ("a.tsv", "b.tsv")},
            "found 1 for 2 file pairs; use --pair de-en FILE FILE",
        ),
        (
            {"directions": ("de-en", "fr-en"), "languages": ("de-en", "fr-en"), **FILES},
            "found 2 for 1 file pairs; use --pair de-en FILE FILE",
        ),
        (
            {"directions": ("de-en",), "languages": ("fr-en",), **FILES},
            "data.languages must name languages of data.directions; found fr-en",
        ),
        (
            {"directions": ("de-en", "fr-en"), "languages": ("de-en",), **FILES},
            "found no file for fr-en; add --pair fr-en FILE FILE",
        ),
        (
            {"languages": ("de-en",), "tags": False, **FILES},
            "data.languages is for multilingual models; found de-en without data.directions",
        ),
    ],
)
def test_inconsistent_settings_are_listed(data: dict[str, object], message: str) -> None:
    assert message in problems(**data)


def test_consistent_settings_are_accepted() -> None:
    both = {"directions": ("de-en", "en-de"), "languages": ("de-en",), **FILES}
    assert problems(**both) == ""
    assert problems(directions=("de-en", "en-de")) == ""  # a finished model needs no files
    assert (
        problems(
            directions=("de-en", "fr-en"),
            src=("a.de", "a.fr"),
            tgt=("a.en", "b.en"),
            languages=("de-en", "fr-en"),
            valid_src="v.de",
            valid_tgt="v.en",
            valid_languages=("de-en",),
        )
        == ""
    )  # validation may leave out a direction


def test_tags_need_one_vocabulary() -> None:
    config = Config().replace(
        data={"directions": ("de-en",)},
        text={"language_tags": True, "shared_vocab": False},
        model={"tie_embeddings": "target"},
    )
    assert "text.language_tags needs one vocabulary" in "\n".join(config.problems())
    with pytest.raises(ConfigError, match=r"there is no setting data\.direction"):
        config.replace(data={"direction": "de-en"})
