"""The model in dragoman/box: its files, golden vectors, card and translations."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from dragoman.bundle import Bundle
from dragoman.bundle.format import BOX
from dragoman.cli.app import main
from dragoman.errors import ConfigError
from dragoman.inference import Translator
from dragoman.storage.checksum_verification import list_unlisted_files, verify_directory

ROOT = Path(__file__).resolve().parents[2]
DIRECTIONS = ["de-en", "en-de", "fr-en", "en-fr"]

pytestmark = pytest.mark.skipif(not BOX.is_dir(), reason=f"no built-in model in {BOX}")


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator.load(device="cpu")


def test_the_files_are_those_that_were_written_and_small() -> None:
    checks = verify_directory(BOX)
    assert all(check.ok for check in checks)
    assert not list_unlisted_files(BOX)
    assert sum(check.bytes for check in checks) <= 20_000_000


def test_the_golden_vectors_are_computed_again() -> None:
    bundle = Bundle.load(BOX)
    assert bundle.manifest["quantization"] == "int8"
    assert bundle.manifest["directions"] == DIRECTIONS
    languages = {case["target_language"] for case in bundle.golden["cases"]}
    assert languages == {"de", "en", "fr"}
    assert bundle.model.training is False  # loading compares tokens and log-probabilities


def test_confidence_is_calibrated_on_the_full_validation_sets() -> None:
    calibration = Bundle.load(BOX).calibration
    assert calibration is not None
    assert calibration.fitted_on + calibration.measured_on > 7_000


def test_the_card_states_source_scores_limits_and_licence() -> None:
    card = (BOX / "card.md").read_text(encoding="utf-8")
    for part in ("tatoeba.org", "manythings.org/anki", "CC BY 2.0", "dragoman train", "## Limits"):
        assert part in card
    for direction in DIRECTIONS:
        assert re.search(rf"BLEU \| \d\d\.\d\d \| Tatoeba {direction}, 2,000 pairs \| `nrefs", card)
        [table] = re.findall(rf"\| {direction}: source .*\n\| ---.*\n((?:\|.*\n)+)", card)
        assert len(table.splitlines()) == 10
    page = (ROOT / "docs" / "box.md").read_text(encoding="utf-8")
    assert card.partition("## Translations\n")[2].strip() in page, "run tools/box_card.py"


@pytest.mark.parametrize(
    ("text", "target", "translation"),
    [
        ("Guten Morgen, wie geht es dir?", "en", "Good morning, how are you?"),
        ("Merci beaucoup.", "en", "Thank you very much."),
        ("Where is the station?", "de", "Wo ist der Bahnhof?"),
        ("Where is the station?", "fr", "Où est la gare ?"),
        ("3. Mai 1979", "en", "May 3, 1979"),
    ],
)
def test_plain_sentences(translator: Translator, text: str, target: str, translation: str) -> None:
    [found] = translator.translate([text], target_language=target)
    assert " ".join(found.split()) == translation


def test_sentences_of_a_line_are_translated_one_by_one(translator: Translator) -> None:
    """As a whole the line lost its second sentence: few training lines have several."""
    sentences = ["Das ist gut.", "Das ist schlecht.", "Wo ist Tom?", "Er ist zu Hause."]
    one_by_one = translator.translate(sentences, target_language="en")
    [found] = translator.stream([" ".join(sentences)], target_language="en")
    assert found.text == " ".join(one_by_one)
    assert not found.notes
    assert found.confidence is not None
    explanation = translator.explain("Das ist gut. Wo ist Tom?", target_language="en")
    assert "The 2 sentences of this text are explained as one" in explanation.missing["text"]
    assert "text" not in translator.explain("Das ist gut.", target_language="en").missing


def test_lines_in_capitals_are_translated_in_sentence_case(translator: Translator) -> None:
    """As they are, they become nonsense: the training data has none."""
    options = {"target_language": "en"}
    typed = ["WO WOHNST DU? ICH WOHNE IN BERLIN.", "OÙ HABITES-TU ?", "NATO"]
    recased = ["Wo wohnst du? Ich wohne in berlin.", "Où habites-tu ?"]
    found = list(translator.stream(typed, **options))
    expected = list(translator.stream(recased, **options))
    for one, other in zip(found, expected, strict=False):
        assert one.text == other.text.upper()
        assert (one.score, one.tokens, one.source_language) == (
            other.score,
            other.tokens,
            other.source_language,
        )
        assert [each.text for each in one.alternatives] == [one.text]
    assert translator.translate(typed, **options) == [each.text for each in found]
    assert translator.identify_languages(typed[:2]) == ["de", "fr"]
    assert not translator.misplaced_lines(typed[:2], **options)
    explanation = translator.explain(typed[1], **options)
    assert explanation.missing["text"].startswith("The text is in capitals")
    assert explanation.target.text == expected[1].text


def test_no_full_stop_is_added_to_a_line_without_one(translator: Translator) -> None:
    """Without one, single words became sentences: "C cat is a cat"."""
    options = {"target_language": "en"}
    typed = ["Katze", "rotes Auto", "Ich liebe dich", "Danke.", "Danke!"]
    found = translator.translate(typed, **options)
    assert found == ["Cats", "red car", "I love you", "Thank you.", "Thanks."]
    assert translator.translate(["Katze."], **options) == ["Cats."]
    found = translator.translate(["ICH LIEBE DICH"], **options)
    assert found == ["I LOVE YOU"]
    explanation = translator.explain("Katze", **options)
    assert "with the full stop" in explanation.missing["text"]


def test_languages_are_detected(translator: Translator) -> None:
    texts = ["Wo wohnst du?", "Où habites-tu ?", "Where do you live?"]
    assert translator.identify_languages(texts) == ["de", "fr", "en"]
    assert translator.translate(texts[:2]) == ["Where do you live?"] * 2
    with pytest.raises(ConfigError, match="add --to de or --to fr"):
        translator.translate(texts[2:])
    with pytest.raises(ConfigError, match="its directions are de-en, en-de, fr-en, en-fr"):
        translator.translate(texts[:1], source_language="de", target_language="fr")


@pytest.mark.parametrize(
    ("text", "source", "note"),
    [
        ("Wo wohnst du?", "de", ""),
        ("你好，世界", None, "it seems to be in none of the model's languages"),
        ("Как дела? 🙂", None, "it seems to be in none of the model's languages"),
        ("Mi hermano trabaja en una fábrica.", "de", "its translation is likely wrong: the conf"),
    ],
)
def test_a_note_warns_of_texts_in_another_language(
    text: str, source: str | None, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "--to", "en", "--json", text]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found.get("source_language") == source
    assert (found["confidence"] < 0.05) == bool(note)
    assert err.count("line 1") == bool(note)
    assert note in err
    assert (note in "".join(found["notes"])) == (source != "de" or not note)


def test_a_text_of_another_script_is_not_taken_for_english(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["translate", "Привет"]) == 2
    assert "found 'Привет', whose characters it does not know" in capsys.readouterr().err


def test_a_named_source_language_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "--from", "fr", "--json", "你好，世界"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["source_language"] == "fr"
    assert "in none of the model's languages" in err


def test_info_reports_where_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for part in ("attribution", "tatoeba.org", "license", "trained", "quantization", "## Scores"):
        assert part in shown


def test_the_package_has_its_files() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "box/**" in settings["tool"]["setuptools"]["package-data"]["dragoman"]


@pytest.mark.parametrize(
    ("text", "language", "is_noted"),
    [
        ("Guten Morgen!", "de", False),
        ("你好，今天天气很好。", "", True),
        ("Ich mag 北京 sehr.", "de", False),
    ],
)
def test_an_explanation_notes_a_text_in_none_of_the_languages(
    translator: Translator, text: str, language: str, is_noted: bool
) -> None:
    explanation = translator.explain(text, beam=1, target_language="en")
    assert explanation.source.lang == explanation.request["source_lang"] == language
    assert ("in none of the model's languages" in explanation.missing.get("text", "")) == is_noted
    named = translator.explain(text, beam=1, source_language="de", target_language="en")
    assert named.source.lang == "de"
