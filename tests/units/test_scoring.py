"""Scores: the numbers are sacreBLEU's own, and every one carries its signature."""

from __future__ import annotations

import pytest
import sacrebleu
from sacrebleu.metrics import BLEU

from dragoman.errors import ConfigError, DataError
from dragoman.evaluate import scoring
from dragoman.evaluate.scoring import bleu, choose_tokeniser, exact_match, metrics, score

HYPOTHESES = ["The cat sat on the mat.", "A dog runs through the snow.", "Two men are talking."]
REFERENCES = ["The cat sat on a mat.", "A dog is running through the snow.", "Two men talk."]


def test_scores_equal_sacrebleus_own() -> None:
    found = score(HYPOTHESES, REFERENCES)
    assert found.bleu.value == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert found.chrf.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert found.ter.value == pytest.approx(sacrebleu.corpus_ter(HYPOTHESES, [REFERENCES]).score)
    assert found.sentences == 3


def test_every_score_carries_its_signature() -> None:
    """Which BLEU is it? (fairseq#2593, #637)"""
    found = score(HYPOTHESES, REFERENCES)
    assert found.bleu.signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}"
    assert "nc:6|nw:0" in found.chrf.signature
    assert "tok:tercom" in found.ter.signature
    assert str(found.bleu).startswith(f"BLEU {found.bleu.value:.2f}  nrefs:1")


def test_training_and_evaluation_give_one_bleu() -> None:
    """Training and generate disagreed on BLEU (fairseq#3245); here both call the same code."""
    assert bleu(HYPOTHESES, REFERENCES) == score(HYPOTHESES, REFERENCES).bleu


def test_lowercase_and_tokenizer_show_in_the_signature() -> None:
    found = score(["THE CAT SAT ON THE MAT."], ["the cat sat on the mat."], lowercase=True, tokenize="intl")
    assert found.bleu.value == pytest.approx(100.0)
    assert "case:lc" in found.bleu.signature
    assert "tok:intl" in found.bleu.signature
    assert "case:lc" in found.chrf.signature


def test_chinese_is_cut_by_character() -> None:
    found = score(["我喜欢猫。"], ["我喜欢狗。"], tgt_lang="zh")
    assert "tok:zh" in found.bleu.signature
    assert found.ter.value < 100, "a sentence counted as one word would be all wrong"
    assert choose_tokeniser("", "zh_TW") == ("zh", ())


@pytest.mark.parametrize("language", ["ja", "ko"])
def test_japanese_and_korean_fall_back_to_characters_and_say_so(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(tokenize: str = "", **rest: object) -> BLEU:
        if tokenize.endswith("mecab"):
            raise RuntimeError("install mecab")
        return BLEU(tokenize=tokenize, **rest)  # type: ignore[arg-type]

    missing.TOKENIZERS = BLEU.TOKENIZERS  # type: ignore[attr-defined]
    monkeypatch.setattr(scoring, "BLEU", missing)
    found = score(["私は猫が好きです。"], ["私は犬が好きです。"], tgt_lang=language)
    assert "tok:char" in found.bleu.signature
    assert f"{language}-mecab" in found.notes[0]
    assert "tok:char" in found.notes[0]


def test_an_installed_mecab_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BLEU", lambda **_: None)
    assert choose_tokeniser("", "ja") == ("ja-mecab", ())


def test_an_unknown_tokenizer_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="found '13b'; did you mean 13a"):
        score(HYPOTHESES, REFERENCES, tokenize="13b")


def test_a_tokenizer_without_its_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> BLEU:
        raise RuntimeError("Please install MeCab")

    broken.TOKENIZERS = BLEU.TOKENIZERS  # type: ignore[attr-defined]
    monkeypatch.setattr(scoring, "BLEU", broken)
    with pytest.raises(ConfigError, match=r"--tokenize ja-mecab must be usable here; found Please install MeCab; .*--tokenize char"):
        metrics(tokenize="ja-mecab")


def test_unequal_counts_are_told_with_both_numbers() -> None:
    """Line counts that disagree (OpenNMT-py#2488)."""
    with pytest.raises(DataError, match="found 3 and 2"):
        score(HYPOTHESES, REFERENCES[:2])


def test_nothing_to_score_is_told() -> None:
    with pytest.raises(DataError, match="found 0 lines"):
        score([], [])


def test_exact_match_counts_whole_lines() -> None:
    assert exact_match(["1979-05-03", "1979-05-04"], ["1979-05-03", "1979-05-05"]) == 0.5


def test_scores_turn_into_plain_values() -> None:
    values = score(HYPOTHESES, REFERENCES).as_dict()
    assert set(values["scores"]) == {"BLEU", "chrF2", "TER"}
    assert values["scores"]["BLEU"]["signature"].startswith("nrefs:1")
    assert values["sentences"] == 3
