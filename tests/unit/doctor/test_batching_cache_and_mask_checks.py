"""Doctor checks detect errors: a model is broken on purpose, and the right check fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from doctor_kit import LINES, Parts, make_parts, make_tokenizers
from torch import Tensor

from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.doctor import (
    CHECKS,
    CheckResult,
    ModelUnderTest,
    run_checks,
)
from dragoman.doctor import batching_cache_and_mask_checks as checks
from dragoman.doctor.check_result import Measurement, NotApplicableError
from dragoman.doctor.model_under_test import ReferenceEngine
from dragoman.errors import BundleError
from dragoman.inference import NativeEngine, SearchRequest
from dragoman.models.decoder_state import DecoderState
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.models.forward_context import Memory
from dragoman.text.sentencepiece_tokenizer import Tokenizers, train_tokenizers
from dragoman.text.special_tokens import UNK


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return make_tokenizers()


@pytest.fixture
def parts(tokenizers: Tokenizers) -> Parts:
    return make_parts(tokenizers)


def failed(verdicts: Mapping[str, str]) -> set[str]:
    """Name the rows that failed."""
    return {name for name, verdict in verdicts.items() if verdict == "FAIL"}


def test_a_sound_model_passes_all(parts: Parts) -> None:
    verdicts = parts.verdicts()
    assert list(verdicts) == [*CHECKS, "exported engines"]
    assert {name for name, verdict in verdicts.items() if verdict != "PASS"} == {"exported engines"}


def test_attention_to_later_positions_is_detected(parts: Parts) -> None:
    whole = parts.model.decode

    def decode(tgt_in: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        hidden = whole(tgt_in, memory, mask)
        return hidden + 0.1 * torch.cat([hidden[:, 1:], hidden[:, -1:]], 1)

    parts.model.decode = decode  # type: ignore[method-assign]
    verdicts = parts.verdicts()
    assert "causality" in failed(verdicts)
    assert (
        verdicts["beam 1 = greedy"] == verdicts["source padding"] == verdicts["batching"] == "PASS"
    )


def test_dependence_on_source_padding_is_detected(parts: Parts) -> None:
    """Masks that are dropped on the way (fairseq#427, pytorch/translate#308)."""
    read = parts.model.encode
    parts.model.encode = lambda src, mask=None: read(src)  # type: ignore[method-assign, assignment]
    assert failed(parts.verdicts()) == {
        "source padding",
        "batching",
        "batch independence",
        "beam scores",
    }


def test_dependence_on_target_padding_is_detected(parts: Parts) -> None:
    whole = parts.model.decode

    def decode(tgt_in: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        hidden = whole(tgt_in, memory, mask)
        return hidden + 0.05 * hidden[:, -1:]

    parts.model.decode = decode  # type: ignore[method-assign]
    assert "target padding" in failed(parts.verdicts())


def test_dependence_on_the_batch_is_detected(parts: Parts) -> None:
    """A sentence's numbers are its own (OpenNMT-py#2208)."""
    read = parts.model.encode

    def encode(src: Tensor, mask: Tensor | None = None) -> Memory:
        memory = read(src, mask)
        return memory._replace(
            values=memory.values + 0.2 * memory.values[:, :1].mean(0, keepdim=True)
        )

    parts.model.encode = encode  # type: ignore[method-assign, assignment]
    verdicts = parts.verdicts()
    assert {"batch independence", "batching"} <= failed(verdicts)
    assert verdicts["source padding"] == verdicts["causality"] == "PASS"


def test_wrong_cache_is_detected(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions off by one after the first step are found (tensor2tensor#917)."""
    placed = parts.model.tgt_input.forward

    def forward(embedded: Tensor, *, first: int = 0, position_ids: Tensor | None = None) -> Tensor:
        return placed(embedded, first=first + (first > 0), position_ids=position_ids)

    monkeypatch.setattr(parts.model.tgt_input, "forward", forward)
    assert failed(parts.verdicts()) == {"KV cache", "beam scores"}


def test_caches_that_are_not_reordered_are_detected(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    reorder = DecoderState.reorder
    monkeypatch.setattr(
        DecoderState, "reorder", lambda state, rows: reorder(state, rows.sort().values)
    )
    assert failed(parts.verdicts()) == {
        "beam scores",
        "native engine",
    }  # the engine's own caches do not move


def test_wrong_beam_is_detected(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(BeamSearch):
        """Returns the second-best token."""

        def run(self, *arguments: Any) -> list[list[Hypothesis]]:
            return [hypotheses[1:] for hypotheses in BeamSearch(2, 2).run(*arguments)]

    monkeypatch.setattr(checks, "BeamSearch", Second)
    assert failed(parts.verdicts()) == {"beam 1 = greedy"}


def test_wrong_scores_of_the_native_engine_are_detected(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(self: NativeEngine, request: SearchRequest) -> list[list[Hypothesis]]:
        found = ReferenceEngine(self.model).generate(request)
        return [
            [
                Hypothesis(each.tokens, each.log_probs, each.score - 0.01, each.finished)
                for each in row
            ]
            for row in found
        ]

    monkeypatch.setattr(NativeEngine, "generate", generate)
    assert failed(parts.verdicts()) == {"native engine"}


def test_native_engine_that_is_wrong_without_scores_is_detected(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = NativeEngine.generate

    def shortened(self: NativeEngine, request: SearchRequest) -> list[list[Hypothesis]]:
        found = generate(self, request)
        return (
            found
            if request.return_scores
            else [[Hypothesis(each.tokens[:-1], [], 0.0, False) for each in row] for row in found]
        )

    monkeypatch.setattr(NativeEngine, "generate", shortened)
    assert failed(parts.verdicts()) == {"native engine"}


def damaged_number(golden: dict[str, Any]) -> None:
    golden["cases"][2]["log_probs"][1] += 0.1


def damaged_tokens(golden: dict[str, Any]) -> None:
    golden["cases"][0]["src"] = golden["cases"][0]["src"][::-1]


def damaged_text(golden: dict[str, Any]) -> None:
    golden["cases"][0]["output"] += "!"


def damaged_form(golden: dict[str, Any]) -> None:
    golden["cases"][0]["tgt"] = [10**6]


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (damaged_number, "4 sentences"),
        (damaged_tokens, "other tokens or text for 'ein mann geht'"),
        (damaged_text, "other tokens or text for 'ein mann geht'"),
        (damaged_form, "found tgt that is not a list"),
    ],
)
def test_damaged_golden_vectors_are_detected(
    parts: Parts, damage: Callable[[dict[str, Any]], None], note: str
) -> None:
    golden = json.loads(json.dumps(parts.golden))
    damage(golden)
    subject = parts.subject(golden=golden)
    findings = {finding.name: finding for finding in run_checks(subject)}
    assert failed({name: finding.verdict for name, finding in findings.items()}) == {
        "golden vectors"
    }
    assert note in findings["golden vectors"].note
    if damage is damaged_number:
        assert findings["golden vectors"].error == pytest.approx(0.1, abs=1e-3)


def test_nan_weights_are_counted(parts: Parts) -> None:
    parts.model.get_parameter("decoder.1.cross.query.weight")[3, 4:6] = math.nan
    findings = {finding.name: finding for finding in run_checks(parts.subject())}
    assert (findings["finite weights"].passed, findings["finite weights"].error) == (False, 2)
    assert "decoder.1.cross.query.weight" in findings["finite weights"].note
    assert findings["KV cache"].passed is False, "NaN is never within a tolerance"
    assert math.isnan(findings["causality"].error or 0)
    assert "found NaN at output position 1" in findings["batching"].note


def test_vocabularies_of_another_size_are_detected(parts: Parts) -> None:
    fewer = train_tokenizers(
        LINES * 3, LINES * 3, parts.config.replace(text={"vocab_size": 290}).text
    )
    findings = {
        finding.name: finding
        for finding in run_checks(parts.subject(tokenizers=fewer, golden=None))
    }
    assert (findings["vocabulary sizes"].passed, findings["vocabulary sizes"].error) == (False, 10)
    assert findings["golden vectors"].verdict == findings["tokenizer round trip"].verdict == "SKIP"


def test_a_model_that_cannot_be_built_is_reported_once_and_not_tried_again(parts: Parts) -> None:
    calls = []

    def load() -> EncoderDecoder:
        calls.append(1)
        raise BundleError("weights must fit the model", found="F32 [300, 32]", fix="copy it")

    subject = ModelUnderTest(
        load, config=parts.config, tokenizers=parts.tokenizers, golden=parts.golden
    )
    findings = {finding.name: finding for finding in run_checks(subject)}
    assert findings["vocabulary sizes"].verdict == "FAIL"
    assert "found F32 [300, 32]" in findings["vocabulary sizes"].note
    assert findings["tokenizer round trip"].verdict == "PASS", (
        "what needs no model is still checked"
    )
    others = [
        finding
        for name, finding in findings.items()
        if name not in ("vocabulary sizes", "tokenizer round trip", "exported engines")
    ]
    assert {(finding.verdict, finding.note) for finding in others} == {
        ("SKIP", "the model cannot be built")
    }
    assert calls == [1]


def test_text_that_does_not_round_trip_is_detected(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(parts.tokenizers.src),
        "decode",
        lambda self, ids: "".join(self.tokens(ids)).replace("▁", ""),
    )
    finding = next(
        finding for finding in run_checks(parts.subject()) if finding.name == "tokenizer round trip"
    )
    assert finding.passed is False
    assert "'ein mann geht' changed" in finding.note


def test_letters_that_the_vocabulary_lacks_are_left_out_of_the_round_trip(parts: Parts) -> None:
    text = parts.config.replace(
        text={"tokenizer": "characters", "byte_fallback": False, "vocab_size": 40}
    ).text
    letters = train_tokenizers(LINES * 3, LINES * 3, text)
    case = {
        "input": "日",
        "src": [UNK],
        "tgt": [],
        "finished": True,
        "output": "語",
        "log_probs": [0.0],
    }
    golden = {"format": 1, "cases": [case]}
    finding = next(
        finding
        for finding in run_checks(parts.subject(tokenizers=letters, golden=golden))
        if finding.name == "tokenizer round trip"
    )
    assert (finding.verdict, finding.note) == (
        "SKIP",
        "every golden sentence has characters unknown to the vocabulary",
    )


def test_model_that_rounding_changes_fails_the_low_precision_checks(parts: Parts) -> None:
    """With huge weights every softmax is nearly one-hot, and rounding changes outputs."""
    for weight in parts.model.parameters():
        if weight.dim() > 1:
            weight.mul_(16.0)
    subject = parts.subject(golden=None, texts=[*LINES, *(line[::-1] for line in LINES)])
    findings = list(
        run_checks(
            subject, {name: CHECKS[name] for name in ("bfloat16", "int8", "beam 1 = greedy")}
        )
    )
    assert [finding.verdict for finding in findings] == ["FAIL", "FAIL", "PASS"]


def test_a_check_that_a_model_crashes_fails_and_the_next_one_is_made(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(tgt_in: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        raise IndexError("index 300 is out of range")

    monkeypatch.setattr(parts.model, "decode", decode)
    findings = {finding.name: finding for finding in run_checks(parts.subject())}
    assert (findings["causality"].verdict, findings["causality"].note) == (
        "FAIL",
        "IndexError: index 300 is out of range",
    )
    assert findings["batching"].verdict == "PASS", "a search never decodes at once"


def test_a_decoder_without_a_cache_is_skipped(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(memory: Memory) -> None:
        raise NotImplementedError

    monkeypatch.setattr(parts.model, "start", start)
    [finding] = run_checks(parts.subject(), {"KV cache": checks.check_kv_cache})
    assert (finding.verdict, finding.note) == ("SKIP", "this decoder has no KV cache")


def test_sentences_are_the_given_ones_or_the_golden_ones_or_made_up(parts: Parts) -> None:
    given = parts.subject(texts=[*LINES, "der letzte"], sentences=4)
    assert given.sources == parts.tokenizers.src.encode_batch(LINES)
    assert given.origin == "4 given sentences"
    assert parts.subject().sources == given.sources
    assert parts.subject().origin == "4 golden sentences"
    few = parts.subject(texts=["hunde"])
    assert few.origin == "1 given sentence and 6 random sentences"
    alone = parts.subject(golden=None)
    assert alone.origin == "6 random sentences"
    assert len(set(map(len, alone.sources))) >= 4
    assert alone.sources == parts.subject(golden=None).sources, "the same each time"


def test_long_sentences_are_cut_to_the_learned_positions(parts: Parts) -> None:
    config = parts.config.replace(model={"positions": "learned", "max_positions": 16})
    torch.manual_seed(0)
    model = build_model(config.model, src_vocab_size=300, tgt_vocab_size=300).eval()
    subject = ModelUnderTest(
        lambda: model, config=config, tokenizers=parts.tokenizers, texts=[" ".join(LINES)]
    )
    assert max(map(len, subject.sources)) == 11  # 16, less an end and what is padded
    assert failed({finding.name: finding.verdict for finding in run_checks(subject)}) == set()


def test_verdict_follows_from_error_and_tolerance() -> None:
    assert CheckResult.from_measurement("it", Measurement(0.5, 0.5)).verdict == "PASS"
    assert CheckResult.from_measurement("it", Measurement(0.6, 0.5)).verdict == "FAIL"
    assert CheckResult.from_measurement("it", Measurement(math.nan, math.inf)).verdict == "FAIL"
    assert (
        json.loads(
            json.dumps(CheckResult.from_measurement("it", Measurement(math.inf, 1.0)).to_dict())
        )["error"]
        == "inf"
    )


def test_a_new_check_is_a_function_and_a_line(parts: Parts) -> None:
    def few_sentences(subject: ModelUnderTest) -> Measurement:
        return Measurement(len(subject.sources), 3)

    def not_here(subject: ModelUnderTest) -> Measurement:
        raise NotApplicableError("it is Sunday")

    reported: list[str] = []
    found = list(
        run_checks(
            parts.subject(), {"few": few_sentences, "other": not_here}, on_check=reported.append
        )
    )
    assert [(finding.verdict, finding.note) for finding in found] == [
        ("FAIL", ""),
        ("SKIP", "it is Sunday"),
    ]
    assert reported == ["few", "other"]


def test_tolerances_are_those_of_the_documentation(parts: Parts) -> None:
    exact = dict.fromkeys(("vocabulary sizes", "finite weights", "tokenizer round trip"), 0)
    rounded = dict.fromkeys(set(CHECKS) - set(exact), 1e-3)
    expected = rounded | exact | {"bfloat16": 0.5, "int8": 1.0}
    found = {each.name: each.tolerance for each in run_checks(parts.subject(), CHECKS)}
    assert found == expected


def test_no_more_sentences_are_taken_than_requested(parts: Parts) -> None:
    texts = [f"{'ein ' * (1 + number % 6)}mann" for number in range(20)]
    assert parts.subject(texts=texts).origin == "16 given sentences"
    assert parts.subject(texts=["", *texts], sentences=5).origin == "4 given sentences"
    assert parts.subject(sentences=1).origin == "1 golden sentence and 6 random sentences"


@pytest.mark.parametrize(
    ("lengths", "added"), [((1, 2, 3), 6), ((1, 2, 3, 3), 6), ((1, 2, 3, 4), 0)]
)
def test_random_sentences_are_added_to_fewer_than_four_lengths(
    parts: Parts, lengths: tuple[int, ...], added: int
) -> None:
    golden = json.loads(json.dumps(parts.golden))
    for case, length in zip(golden["cases"], lengths, strict=False):
        case["src"] = [5] * length
    del golden["cases"][len(lengths) :]
    subject = parts.subject(golden=golden)
    assert [len(each) for each in subject.sources[: len(lengths)]] == list(lengths)
    assert len(subject.sources) == len(lengths) + added


def test_outputs_are_limited_by_the_source_and_the_models_own_limit(parts: Parts) -> None:
    config = parts.config.replace(decode={"max_length_ratio": 2.0, "max_length_extra": 50})
    subject = parts.subject(config=config)
    lengths = [len(source) for source in subject.sources]
    request = subject.request(BeamSearch(size=1), range(len(lengths)))
    assert request.limits == [2 * length + 10 for length in lengths]
    config = parts.config.replace(decode={"max_length_ratio": 1.0, "max_length_extra": 3})
    limits = parts.subject(config=config).request(BeamSearch(size=1), [1, 0]).limits
    assert limits == [lengths[1] + 3, lengths[0] + 3]


def test_every_sentence_is_in_one_batch_of_eight(parts: Parts) -> None:
    subject = parts.subject(texts=[f"{'ein ' * (1 + at % 6)}mann" for at in range(11)])
    batches = list(subject.pairs())
    assert [len(each.sources) for each in batches] == [8, 3]
    assert [source for each in batches for source in each.sources] == subject.sources
    assert all(len(each.targets) == len(each.sources) for each in batches)
    assert len(set(map(len, batches[0].targets))) > 4, "targets need padding too"


def test_attention_to_the_next_but_one_position_alone_is_detected(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first positions are right: only a change of later tokens alone shows it."""
    original = parts.model.decode

    def decode(tgt_in: Tensor, memory: Memory, mask: Tensor | None = None) -> Tensor:
        hidden = original(tgt_in, memory, mask)
        if hidden.size(1) < 5:
            return hidden
        leak = 0.1 * (tgt_in[:, 4:] % 7).unsqueeze(-1)
        return torch.cat([hidden[:, :2], hidden[:, 2:-2] + leak, hidden[:, -2:]], dim=1)

    monkeypatch.setattr(parts.model, "decode", decode)
    [finding] = run_checks(parts.subject(), {"causality": checks.check_causality})
    assert finding.verdict == "FAIL"
