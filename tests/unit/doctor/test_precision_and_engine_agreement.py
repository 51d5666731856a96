"""Doctor checks of engines: tolerances by dtype; skipped where an engine cannot run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from doctor_kit import SMALL, Parts, make_parts, make_tokenizers

from dragoman.config import Config
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.search_interface import SearchStrategy
from dragoman.doctor import CheckResult, run_checks
from dragoman.doctor.check_catalogue import select_checks
from dragoman.doctor.output_comparison import compare_outputs
from dragoman.doctor.precision_and_engine_agreement import INT8_TOLERANCE
from dragoman.errors import ConfigError, CorruptError
from dragoman.inference import Engine, NativeEngine, SearchRequest
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK


@pytest.fixture(scope="module")
def tokenizers() -> Tokenizers:
    return make_tokenizers()


@pytest.fixture
def parts(tokenizers: Tokenizers) -> Parts:
    return make_parts(tokenizers)


class Other:
    """An engine that runs its own model, and may modify the outputs."""

    workers, client_threads, batch_tokens = 1, 1, None

    def __init__(
        self,
        model: EncoderDecoder,
        name: str,
        modify: Callable[[Hypothesis], Hypothesis] = lambda found: found,
    ) -> None:
        self.name, self._native, self._modify = name, NativeEngine(lambda: model), modify

    def unsupported_reason(self, strategy: SearchStrategy, longest: int = 0) -> str:
        return "was exported for 8 positions" if self.name == "short" else ""

    def generate(self, request: SearchRequest) -> list[list[Hypothesis]]:
        return [
            [self._modify(each) for each in hypotheses]
            for hypotheses in self._native.generate(request)
        ]


def examined(parts: Parts, engine: Engine) -> CheckResult:
    """Examine one engine."""
    subject = parts.subject(engines={engine.name: lambda: engine})
    return next(run_checks(subject, {engine.name: select_checks(subject)[engine.name]}))


def nudged(model: EncoderDecoder, size: float) -> EncoderDecoder:
    """Copy a model with every weight a little off."""
    generator = torch.Generator().manual_seed(0)
    other = (
        build_model(Config().replace(model=SMALL).model, src_vocab_size=300, tgt_vocab_size=300)
        .eval()
        .requires_grad_(False)
    )
    other.load_state_dict(
        {
            name: w + size * torch.randn(w.shape, generator=generator)
            for name, w in model.state_dict().items()
        }
    )
    return other


@pytest.mark.parametrize(
    ("name", "size", "verdict"),
    [
        ("float32", 0.0, "PASS"),
        ("float32", 0.01, "FAIL"),
        ("ours-int8", 0.002, "PASS"),
        ("ours-int8", 0.3, "FAIL"),
    ],
)
def test_the_tolerance_of_an_engine_depends_on_its_precision(
    parts: Parts, name: str, size: float, verdict: str
) -> None:
    finding = examined(parts, Other(nudged(parts.model, size), name))
    assert finding.verdict == verdict
    assert finding.tolerance == (INT8_TOLERANCE if "int8" in name else 1e-3)


@pytest.mark.parametrize(
    ("modify", "error"),
    [
        (
            lambda found: Hypothesis(
                [UNK, *found.tokens], found.log_probs, found.score, found.finished
            ),
            math.inf,
        ),
        (
            lambda found: Hypothesis(found.tokens[:2], found.log_probs[:2], found.score, False),
            math.inf,
        ),
        (
            lambda found: Hypothesis(
                found.tokens, [math.nan, *found.log_probs[1:]], found.score, found.finished
            ),
            math.nan,
        ),
        (
            lambda found: Hypothesis(
                found.tokens, [each - 3 for each in found.log_probs], found.score, found.finished
            ),
            3.0,
        ),
    ],
)
def test_an_engine_whose_outputs_cannot_be_fails(
    parts: Parts, modify: Callable[[Hypothesis], Hypothesis], error: float
) -> None:
    finding = examined(parts, Other(parts.model, "modified-int8", modify))
    assert finding.verdict == "FAIL"
    assert finding.error == pytest.approx(error, nan_ok=True)


def test_unavailable_engine_is_skipped_and_damaged_engine_fails(
    parts: Parts,
) -> None:
    def missing() -> Engine:
        raise ConfigError(["the engine needs ctranslate2; found none; install it"])

    def damaged() -> Engine:
        raise CorruptError(
            "model.bin must be as it was written", found="another hash", fix="export it again"
        )

    engines = {"missing": missing, "damaged": damaged, "short": lambda: Other(parts.model, "short")}
    subject = parts.subject(engines=engines)
    findings = {
        finding.name: finding
        for finding in run_checks(subject, {name: select_checks(subject)[name] for name in engines})
    }
    assert {name: finding.verdict for name, finding in findings.items()} == {
        "missing": "SKIP",
        "damaged": "FAIL",
        "short": "SKIP",
    }
    assert "found none" in findings["missing"].note
    assert "found another hash" in findings["damaged"].note
    assert findings["short"].note == "the engine was exported for 8 positions"


def test_first_divergence_has_the_log_probability_gap_of_the_model(parts: Parts) -> None:
    """The gap is the reference's log-probability of its own token minus that of the other."""
    subject = parts.subject()
    ours, source = subject.single_outputs[0], subject.sources[0]
    with torch.inference_mode():
        given = torch.tensor([[1, *ours.tokens[:1]]])
        log_probs = parts.model(torch.tensor([[*source, EOS]]), given)[0, -1].log_softmax(-1)
    instead = int(log_probs.argsort()[7])
    theirs = Hypothesis([ours.tokens[0], instead], [ours.log_probs[0] + 0.25, -9.0], 0.0, True)
    found = compare_outputs(parts.model, [source], [ours], [theirs])
    assert found.score_gap == pytest.approx(
        float(log_probs[ours.tokens[1]] - log_probs[instead]), abs=1e-4
    )
    assert (found.equal, found.outputs, found.difference) == (0, 1, pytest.approx(0.25))


@pytest.mark.parametrize("token", [PAD, BOS, UNK])
def test_a_token_that_no_output_may_have_is_no_tie(parts: Parts, token: int) -> None:
    subject = parts.subject()
    ours, source = subject.single_outputs[0], subject.sources[0]
    theirs = Hypothesis([ours.tokens[0], token], ours.log_probs[:2], 0.0, False)
    found = compare_outputs(parts.model, [source], [ours], [theirs])
    assert found.score_gap == math.inf
    assert found.to_measurement(9.0).note == "0 of 1 equal; one invalid"


def test_the_error_of_outputs_is_the_larger_of_difference_and_gap(parts: Parts) -> None:
    subject = parts.subject()
    ours = subject.single_outputs[:2]
    shifted = [
        Hypothesis(each.tokens, [p - 0.25 * at for p in each.log_probs], 0.0, each.finished)
        for at, each in enumerate(ours)
    ]
    found = compare_outputs(parts.model, subject.sources[:2], ours, shifted)
    measured = found.to_measurement(0.5)
    assert (found.equal, found.score_gap, measured.tolerance) == (2, 0.0, 0.5)
    assert measured.error == pytest.approx(0.25)
    assert measured.note == "2 of 2 equal"
    assert found._replace(score_gap=0.75).to_measurement(0.5).error == 0.75
