"""Translators of several models: outputs, batches, memory, long lines, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from translator_kit import CONFIG, TEXT, write_random_bundle

import dragoman
from dragoman.attention.attention_weight_hooks import find_attentions, record
from dragoman.bundle import write_bundle
from dragoman.cli.app import main
from dragoman.config import Config
from dragoman.decoding.search_interface import SearchRequest
from dragoman.errors import BundleError, ConfigError, DivergedError
from dragoman.inference import Translator
from dragoman.inference.ensemble_engine import EnsembleEngine
from dragoman.models.factory import build_model
from dragoman.text.language_identification import LanguageIdentifier
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers

LINES = [" ".join(TEXT[at % 5].split()[: 1 + at % 3]) + f" {at}" for at in range(12)]
RECURRENT = {"encoder": ("lstm",), "decoder": ("lstm(attention=additive)",)}


def write_other(path: Path, tokenizers: Tokenizers, config: Config, **more: Any) -> Path:
    """Write a model of other random weights."""
    torch.manual_seed(8)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    weights = {
        name: tensor * 2.5 if tensor.dim() > 1 else tensor
        for name, tensor in model.state_dict().items()
    }
    config = config.replace(decode={"max_length_ratio": 1.0, "max_length_extra": 6})
    write_bundle(
        path, config=config, tokenizers=tokenizers, weights=weights, golden=TEXT[:2], **more
    )
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory, tokenizers: Tokenizers) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    recurrent = CONFIG.replace(model=RECURRENT, data={"max_length": 20})
    return [
        write_random_bundle(folder / "a", tokenizers),
        write_other(folder / "b", tokenizers, recurrent),
    ]


@pytest.fixture(scope="module")
def ensemble(paths: list[Path]) -> Translator:
    return Translator.load(paths, device="cpu")


def texts(translator: Translator, **options: Any) -> list[str]:
    return translator.translate(LINES, **options)


def test_two_models_decide_together(paths: list[Path], ensemble: Translator) -> None:
    alone = [texts(Translator.load(path, device="cpu"), beam=3) for path in paths]
    together = texts(ensemble, beam=3)
    assert together not in alone
    assert texts(Translator.load(paths[::-1], device="cpu"), beam=3) == together
    assert "ensemble of 2" in repr(ensemble)


def test_the_same_model_twice_changes_nothing(paths: list[Path]) -> None:
    twice = Translator.load([paths[0], str(paths[0])], device="cpu")
    for options in ({"beam": 1}, {"beam": 4}, {"sample": True, "seed": 3}):
        assert texts(twice, **options) == texts(Translator.load([paths[0]]), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 1},
        {"beam": 4, "nbest": 2},
        {"sample": True, "seed": 5},
        {"mbr": "chrf", "samples": 4},
    ],
)
def test_other_rows_in_the_batch_change_nothing(
    ensemble: Translator, options: dict[str, Any]
) -> None:
    one = list(ensemble.stream(LINES, batch_size=1, **options))
    many = list(ensemble.stream(LINES, batch_size=64, **options))
    assert [each.text for each in many] == [each.text for each in one]
    assert [each.score for each in many] == pytest.approx([each.score for each in one], abs=1e-4)


def test_lines_are_split_for_the_shortest_member(ensemble: Translator) -> None:
    """The second was trained on sources of at most 20 tokens, the first of 40."""
    [found] = ensemble.stream(["Ein Mann geht. Eine Frau steht! " * 2])
    assert any("more than the 20" in note for note in found.notes)


def test_an_ensemble_keeps_the_target_language_that_it_was_loaded_with(tmp_path: Path) -> None:
    config = CONFIG.replace(data={"directions": ("de-en", "de-zh")}, text={"language_tags": True})
    tagged = train_tokenizers(TEXT, TEXT, config.text, languages=["en", "zh"])
    folders = [write_other(tmp_path / name, tagged, config) for name in ("a", "b")]
    ensemble = Translator.load(folders, device="cpu", target_language="zh")
    [found] = ensemble.stream(LINES[:1])
    assert found.target_language == "zh"
    assert found.text == ensemble.translate(LINES[:1], target_language="zh")[0]
    [other] = ensemble.stream(LINES[:1], target_language="en")
    assert other.target_language == "en"
    with pytest.raises(ConfigError, match="add --to en or --to zh"):
        Translator.load(folders, device="cpu").translate(LINES[:1])


def test_an_ensemble_identifies_languages_as_its_first_model_does(tmp_path: Path) -> None:
    config = CONFIG.replace(data={"directions": ("de-en", "zh-en")}, text={"language_tags": True})
    tagged = train_tokenizers(TEXT, TEXT, config.text, languages=["en"])
    identifier = LanguageIdentifier.train({"de": TEXT[:3], "zh": TEXT[3:4]})
    folders = [
        write_other(tmp_path / name, tagged, config, identifier=identifier) for name in ("a", "b")
    ]
    ensemble = Translator.load(folders, device="cpu")
    found = ensemble.stream(["Ein Mann", "你好"])
    assert [each.source_language for each in found] == ["de", "zh"]


def test_all_members_have_the_precision_that_is_named(paths: list[Path]) -> None:
    ensemble = Translator.load(paths, device="cpu", precision="int8")
    assert ensemble.engine.name == "native-int8 ensemble of 2"
    engine: Any = ensemble.engine
    assert [member.precision for member in engine.members] == ["int8", "int8"]


def test_recording_one_member_is_noticed(paths: list[Path]) -> None:
    engine: Any = Translator.load(paths, device="cpu").engine
    assert not engine.has_hooks
    for model in engine.models:
        with record(model, list(find_attentions(model))[:1]):
            assert engine.has_hooks


def test_the_alignment_is_the_mean_of_the_members(paths: list[Path], ensemble: Translator) -> None:
    [found] = ensemble.stream(LINES[2:3], alignment=True, beam=2)
    assert found.alignment is not None
    assert found.alignment.sum(axis=1) == pytest.approx(np.ones(len(found.tokens)), abs=1e-4)
    ids = {
        subword: number for number, subword in enumerate(ensemble.tokenizers.tgt.tokens(range(330)))
    }
    forced = [ids[token] for token in found.tokens]
    alone = [
        next(iter(Translator.load(path).stream(LINES[2:3], alignment=True, prefix_ids=forced)))
        for path in paths
    ]
    mean = np.mean([each.alignment[: len(forced)] for each in alone], axis=0)
    assert found.alignment == pytest.approx(mean, abs=1e-4)


def test_a_batch_that_overflows_in_a_converted_form_runs_the_models(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = Translator.load(paths, device="cpu")
    expected = texts(ensemble, beam=2)
    original, forms = EnsembleEngine._search_with, list[bool]()

    def overflow_once(self: EnsembleEngine, models: Any, request: SearchRequest) -> Any:
        forms.append(models[0] is self.models[0])
        if not forms[-1]:
            raise DivergedError("finite", found="NaN", fix="")
        return original(self, models, request)

    monkeypatch.setattr(EnsembleEngine, "_search_with", overflow_once)
    assert texts(ensemble, beam=2) == expected
    assert True in forms


def test_a_copy_on_the_cpu_translates_the_same(ensemble: Translator) -> None:
    copied = ensemble._native.copy_to_cpu(ensemble.config, ensemble.tokenizers)
    other = Translator(copied, ensemble.tokenizers, ensemble.config)
    assert texts(other, beam=2) == texts(ensemble, beam=2)


def test_options_that_need_one_model_are_rejected(ensemble: Translator) -> None:
    for call in (
        lambda: ensemble.explain("Ein Mann"),
        lambda: ensemble.score(["Ein Mann"], ["A man"]),
        lambda: ensemble.model,
    ):
        with pytest.raises(ConfigError, match="found an ensemble of 2; load one of them"):
            call()


def test_other_vocabularies_are_rejected_by_name(paths: list[Path], tmp_path: Path) -> None:
    smaller = CONFIG.replace(text={"vocab_size": 300})
    path = write_other(tmp_path / "c", train_tokenizers(TEXT, TEXT, smaller.text), smaller)
    with pytest.raises(BundleError) as error:
        Translator.load([paths[0], path], device="cpu")
    assert "same source vocabulary" in str(error.value)
    assert str(paths[0]) in str(error.value)
    assert str(path) in str(error.value)
    with pytest.raises(BundleError, match="same source vocabulary"):
        Translator.load([paths[0], paths[0], path], device="cpu")


@pytest.mark.parametrize("side", ["source", "target"])
def test_other_vocabularies_of_the_same_size_are_rejected(tmp_path: Path, side: str) -> None:
    config = CONFIG.replace(text={"shared_vocab": False}, model={"tie_embeddings": "none"})
    ours = train_tokenizers(TEXT, TEXT, config.text)
    reversed_text = [line[::-1] for line in TEXT]
    other = train_tokenizers(reversed_text, reversed_text, config.text).src
    theirs = Tokenizers(other, ours.tgt) if side == "source" else Tokenizers(ours.src, other)
    assert [len(each) for each in theirs] == [len(each) for each in ours]
    paths = [
        write_other(tmp_path / name, tokenizers, config)
        for name, tokenizers in (("a", ours), ("b", theirs))
    ]
    with pytest.raises(BundleError, match=f"same {side} vocabulary"):
        Translator.load(paths, device="cpu")


def test_other_languages_are_rejected_by_name(tokenizers: Tokenizers, tmp_path: Path) -> None:
    paths = [
        write_other(
            tmp_path / source,
            tokenizers,
            CONFIG.replace(data={"src_lang": source, "tgt_lang": "en"}),
        )
        for source in ("de", "fr")
    ]
    with pytest.raises(BundleError, match=r"from de-en and .* from fr-en"):
        Translator.load(paths, device="cpu")
    unnamed = write_other(tmp_path / "unnamed", tokenizers, CONFIG)
    assert Translator.load([paths[0], unnamed], device="cpu").translate(LINES[:1])


def test_other_directions_of_multilingual_models_are_rejected_by_name(tmp_path: Path) -> None:
    """The target languages, and so the vocabularies, are the same."""
    tagged = CONFIG.replace(text={"language_tags": True})
    tokenizers = train_tokenizers(TEXT, TEXT, tagged.text, languages=["en", "zh"])
    directions = [("de-en", "de-zh"), ("fr-en", "fr-zh")]
    paths = [
        write_other(tmp_path / each[0], tokenizers, tagged.replace(data={"directions": each}))
        for each in directions
    ]
    with pytest.raises(BundleError, match=r"from de-en, de-zh and .* from fr-en, fr-zh"):
        Translator.load(paths, device="cpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "ctranslate2"}, "found the engine ctranslate2"),
        ({"shortlist": ("a", "b")}, "found a shortlist"),
    ],
)
def test_engines_and_shortlists_are_rejected(
    paths: list[Path], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Translator.load(paths, **options)


def test_no_model_is_no_ensemble() -> None:
    with pytest.raises(ConfigError, match="found none"):
        Translator.load([])


def test_load_takes_several_paths(paths: list[Path], ensemble: Translator) -> None:
    assert dragoman.load(paths).translate(LINES[:2]) == ensemble.translate(LINES[:2])


def test_a_model_that_is_not_a_path_is_named() -> None:
    for load in (Translator.load, dragoman.load):
        with pytest.raises(ConfigError, match=r"must be the path of a directory.*found 3 \(int\)"):
            load(3)
        with pytest.raises(ConfigError, match="found None"):
            load(["model", None])


def test_half_precision_on_a_gpu_is_rejected(paths: list[Path]) -> None:
    with pytest.raises(ConfigError, match="found the precision float16"):
        EnsembleEngine.load(paths, torch.device("cuda"), precision="float16")


def test_the_command_takes_several_models(
    paths: list[Path], ensemble: Translator, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [part for path in paths for part in ("-m", str(path))]
    assert main(["translate", *models, "--device", "cpu", "--json", "--beam", "3", LINES[0]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == ensemble.translate(LINES[:1], beam=3)[0]
    assert main(["translate", *models, "-m", "nowhere", "x"]) == 2
    assert "nowhere" in capsys.readouterr().err
