"""Metrics: scores and signatures are sacreBLEU's."""

from __future__ import annotations

import pytest
import sacrebleu
from sacrebleu.metrics import BLEU

from dragoman.errors import ConfigError, DataError
from dragoman.evaluate import translation_metrics
from dragoman.evaluate.translation_metrics import (
    bleu_score,
    build_metrics,
    choose_tokenizer,
    score_translations,
)

HYPOTHESES = ["The cat sat on the mat.", "A dog runs through the snow.", "Two men are talking."]
REFERENCES = ["The cat sat on a mat.", "A dog is running through the snow.", "Two men talk."]


def test_scores_equal_sacrebleus_own() -> None:
    found = score_translations(HYPOTHESES, REFERENCES)
    assert found.bleu.value == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert found.chrf.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert found.ter.value == pytest.approx(sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score)
    assert found.sentences == 3


def test_every_score_carries_its_signature() -> None:
    """Which BLEU is it? (fairseq#2593, #637)"""
    found = score_translations(HYPOTHESES, REFERENCES)
    assert (
        found.bleu.signature
        == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    )
    assert "nc:6|nw:0" in found.chrf.signature
    assert "tok:tercom" in found.ter.signature
    assert str(found.bleu).startswith(f"BLEU {found.bleu.value:.2f}  nrefs:1")


def test_training_and_evaluation_give_one_bleu() -> None:
    """Training and generate disagreed on BLEU (fairseq#3245); here both call the same code."""
    assert bleu_score(HYPOTHESES, REFERENCES) == score_translations(HYPOTHESES, REFERENCES).bleu


def test_lowercase_and_tokenizer_show_in_the_signature() -> None:
    found = score_translations(
        ["THE CAT SAT ON THE MAT."], ["the cat sat on the mat."], lowercase=True, tokenize="intl"
    )
    assert found.bleu.value == pytest.approx(100.0)
    assert "case:lc" in found.bleu.signature
    assert "tok:intl" in found.bleu.signature
    assert "case:lc" in found.chrf.signature


def test_chinese_is_cut_by_character() -> None:
    found = score_translations(["我喜欢猫。"], ["我喜欢狗。"], tgt_lang="zh")
    assert "tok:zh" in found.bleu.signature
    assert found.ter.value < 100, "a sentence counted as one word would be all wrong"


@pytest.mark.parametrize(
    ("language", "text", "instead"),
    [("ja", "私は猫が好きです。", "char"), ("ko", "저는 고양이를 좋아합니다.", "13a")],
)
def test_missing_mecab_is_replaced_with_a_note(
    language: str, text: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(tokenize: str = "", **rest: object) -> BLEU:
        if tokenize.endswith("mecab"):
            raise RuntimeError("install mecab")
        return BLEU(tokenize=tokenize, **rest)  # type: ignore[arg-type]

    missing.TOKENIZERS = BLEU.TOKENIZERS  # type: ignore[attr-defined]
    monkeypatch.setattr(translation_metrics, "BLEU", missing)
    for tag in (language, ""):  # the language and the script give the same
        found = score_translations([text], [text], tgt_lang=tag)
        assert f"tok:{instead}" in found.bleu.signature
        assert found.notes[0].startswith(f"BLEU tokenizer {instead}: ")
        assert f"{language}-mecab" in found.notes[1]
        assert f"tok:{instead}" in found.notes[1]


def test_an_installed_mecab_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation_metrics, "BLEU", lambda **_: None)
    assert choose_tokenizer("", "ja").name == "ja-mecab"
    assert choose_tokenizer("", "ja").warnings == ()


def test_unknown_tokenizer_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="found '13b'; did you mean 13a"):
        score_translations(HYPOTHESES, REFERENCES, tokenize="13b")


def test_a_tokenizer_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> BLEU:
        raise RuntimeError("Please install MeCab")

    broken.TOKENIZERS = BLEU.TOKENIZERS  # type: ignore[attr-defined]
    monkeypatch.setattr(translation_metrics, "BLEU", broken)
    with pytest.raises(
        ConfigError,
        match=r"--tokenize ja-mecab must be usable here; found Please install MeCab; .*--tokenize "
        r"char",
    ):
        build_metrics(tokenize="ja-mecab")


def test_unequal_counts_are_reported_with_both_counts() -> None:
    """Line counts that disagree (OpenNMT-py#2488)."""
    with pytest.raises(DataError, match="found 3 and 2"):
        score_translations(HYPOTHESES, REFERENCES[:2])


def test_nothing_to_score_is_reported() -> None:
    with pytest.raises(DataError, match="found 0 lines"):
        score_translations([], [])


def test_references_without_text_are_reported() -> None:
    with pytest.raises(DataError, match="references must hold text; found 2 empty lines"):
        score_translations(["a", "b"], ["", " "])
    notes = score_translations(["a cat", "b"], ["a cat", ""]).notes
    assert notes[-1].startswith("1 of 2 references empty")


def test_scores_turn_into_plain_values() -> None:
    values = score_translations(HYPOTHESES, REFERENCES).to_dict()
    assert set(values["scores"]) == {"BLEU", "chrF2", "TER"}
    assert values["scores"]["BLEU"]["signature"].startswith("nrefs:1")
    assert values["sentences"] == 3


CHINESE = (["我喜欢猫。", "他昨天买了一台 iPhone。"], ["我喜欢狗。", "他昨天买了两台 iPhone。"])
THAI = (["ฉันชอบแมวมาก"], ["ฉันชอบหมามาก"])


@pytest.mark.parametrize(
    "tag", ["", "zh", "ZH", "zh-TW", "zh_Hans", "cmn", "yue", "zho_Hant", "no-such-tag", "iso"]
)
def test_chinese_is_recognised_by_tag_or_script(tag: str) -> None:
    """Without a language tag, Chinese had BLEU 0.0 and TER 4661; "zh-TW" had TER 200."""
    hypotheses, references = CHINESE
    found = score_translations(
        hypotheses, references, tgt_lang=tag if tag != "no-such-tag" else "qaa"
    )
    assert found.bleu.value == pytest.approx(
        sacrebleu.corpus_bleu(hypotheses, [references], tokenize="zh").score
    )
    expected = sacrebleu.corpus_ter(hypotheses, [references], normalized=True, asian_support=True)
    assert found.ter.value == pytest.approx(expected.score)
    assert found.bleu == bleu_score(hypotheses, references, tgt_lang=tag)
    assert found.notes[0].startswith("BLEU tokenizer zh: ")
    assert ("script" in found.notes[0]) == (tag in ("", "no-such-tag", "iso")), (
        "the reason is the language or the script"
    )


@pytest.mark.parametrize("tag", ["", "th", "tha_Thai"])
def test_thai_is_counted_by_character(tag: str) -> None:
    hypotheses, references = THAI
    found = score_translations(hypotheses, references, tgt_lang=tag)
    assert found.bleu.value == pytest.approx(
        sacrebleu.corpus_bleu(hypotheses, [references], tokenize="char").score
    )
    spaced = [[" ".join(text) for text in texts] for texts in (hypotheses, references)]
    assert found.ter.value == pytest.approx(sacrebleu.corpus_ter(spaced[0], [spaced[1]]).score)
    assert "tok:char" in found.bleu.signature
    assert "tok:char" in found.ter.signature, "sacreBLEU's own TER says tok:tercom"
    assert 0 < found.ter.value < 50


@pytest.mark.parametrize("tag", ["kok", "jav", "korean", "jp"])
def test_other_tags_are_not_mistaken_for_asian_ones(tag: str) -> None:
    found = score_translations(HYPOTHESES, REFERENCES, tgt_lang=tag)
    assert found.bleu == score_translations(HYPOTHESES, REFERENCES).bleu
    assert found.ter == score_translations(HYPOTHESES, REFERENCES).ter


@pytest.mark.parametrize(
    ("tag", "texts", "tokenizer", "found"),
    [
        (
            "de",
            CHINESE[1],
            "13a",
            "the target language is de, but the references are written in Chinese script",
        ),
        (
            "zh",
            REFERENCES,
            "zh",
            "the target language is zh, but the references have spaces between words",
        ),
        ("ja-Latn", CHINESE[1], "13a", "the target language is ja-Latn"),
        (
            "ja",
            ["汉字" * 40],
            "",
            "the target language is ja, but the references are written in Chinese script",
        ),
    ],
)
def test_a_language_wins_over_the_script_with_a_warning(
    tag: str, texts: list[str], tokenizer: str, found: str
) -> None:
    choice = choose_tokenizer("", tag, texts)
    assert choice.name == tokenizer or not tokenizer
    assert choice.warnings[0].startswith(found)


@pytest.mark.parametrize(
    ("tag", "texts"),
    [
        ("lo", THAI[1]),
        ("en", REFERENCES),
        ("en", ["1234"]),
        ("ja", ["東京都"]),
        ("zh-TW", CHINESE[1]),
    ],
)
def test_matching_languages_raise_no_warning(tag: str, texts: list[str]) -> None:
    assert not [
        each for each in choose_tokenizer("", tag, texts).warnings if "but the references" in each
    ]


def test_a_requested_tokenizer_is_used_and_ter_keeps_the_script() -> None:
    hypotheses, references = CHINESE
    found = score_translations(hypotheses, references, tokenize="char")
    assert found.notes == ("BLEU tokenizer char: set by --tokenize",)
    assert "asian:yes" in found.ter.signature


@pytest.mark.parametrize(("tag", "asian"), [("de", "asian:no"), ("zh", "asian:yes")])
def test_the_target_language_decides_ter_with_any_tokenizer(tag: str, asian: str) -> None:
    for hypotheses, references in (CHINESE, (HYPOTHESES, REFERENCES)):
        found = score_translations(hypotheses, references, tokenize="char", tgt_lang=tag)
        assert "tok:char" in found.bleu.signature
        assert asian in found.ter.signature


@pytest.mark.parametrize("metric", [bleu_score, score_translations])
def test_unequal_counts_are_reported_in_order(metric) -> None:
    with pytest.raises(
        DataError,
        match="translations and references must have the same number of lines; found 3 and 1;",
    ):
        metric(["a", "b", "c"], ["a"])
    with pytest.raises(DataError, match="found 0 lines"):
        metric([], [])


@pytest.mark.parametrize(("characters", "warned"), [(49, False), (50, True)])
def test_fifty_han_characters_without_kana_are_not_japanese(characters: int, warned: bool) -> None:
    choice = choose_tokenizer("", "ja", ["汉" * characters])
    assert any("but the references" in each for each in choice.warnings) == warned


def test_chrf_depends_on_case_unless_lowercased() -> None:
    found = score_translations(["A cat sat."], ["a cat sat."], lowercase=True)
    assert found.chrf.value == pytest.approx(100.0)
    assert score_translations(["A cat sat."], ["a cat sat."]).chrf.value < 100.0
