"""Traces of beam search over real models: every architecture, the compiled kernels, and
constraints.
"""

from __future__ import annotations

import dataclasses
import json
import random
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from beam_kit import check_trace, derive_reasons, enumerate_beam
from search_kit import SOURCES, VOCABULARY, build_random_model, next_log_probs

from dragoman.bundle.format import BOX
from dragoman.config import Config
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.beam_trace import BeamObserver
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.output_constraint_definitions import (
    EqualLength,
    Mirror,
    NoCopy,
    Punctuation,
    Regex,
)
from dragoman.decoding.search_interface import search
from dragoman.explain.explanation_json import decode_tensor
from dragoman.inference import NativeEngine, Translator
from dragoman.inference.cpu.cpu_engine_conversion import FLOAT32, convert_model
from dragoman.inference.long_line_segments import Segment
from dragoman.inference.translation_options import TranslationOptions
from dragoman.models.factory import build_model
from dragoman.text.sentencepiece_tokenizer import train_tokenizers
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK

MODELS = {
    "transformer": {},
    "relative": {"positions": "t5", "residual": "pre_norm"},
    "prefix_lm": {"architecture": "prefix_lm", "encoder": (), "residual": "pre_norm"},
    "rnn": {"encoder": ("bilstm",), "decoder": ("lstm(attention=additive)",)},
    "conv": {"encoder": ("conv*2",), "decoder": ("conv*2",), "positions": "learned"},
}
LIMIT = 5


@cache
def build(name: str):
    return build_random_model(**MODELS[name])


def forbidden_reason(words: tuple[int, ...], token: int) -> str | None:
    return "constraint" if token in (PAD, BOS, UNK) else None


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_trace_equals_a_search_over_all_candidates_without_cache(name: str, size: int) -> None:
    model, penalty = build(name), WuLengthPenalty(0.2 * size)
    nbest = max(1, size // 2)
    observer = BeamObserver()
    with torch.no_grad():
        memory = model.encode(*pad_sources(SOURCES))
    found = search(
        model,
        memory,
        limits=[LIMIT] * len(SOURCES),
        strategy=BeamSearch(size, nbest, penalty),
        observer=observer,
    )
    for hypotheses, trace in zip(found, observer.traces, strict=True):
        check_trace(
            trace,
            hypotheses,
            nbest=nbest,
            limit=LIMIT,
            penalty=penalty,
            forbidden_reason=forbidden_reason,
        )
    source, trace = SOURCES[size % len(SOURCES)], observer.traces[size % len(SOURCES)]
    expected = enumerate_beam(
        lambda words: next_log_probs(model, source, words).tolist(),
        vocabulary=VOCABULARY,
        size=size,
        nbest=nbest,
        limit=LIMIT,
        penalty=penalty,
        forbidden_reason=forbidden_reason,
    )
    for node in range(1, len(trace)):
        fate = expected.fates[tuple(trace.tokens(node))]
        assert trace.reason_name(node) == fate.reason
        assert trace.cum[node] == pytest.approx(fate.cum, abs=1e-4)
        assert trace.cut[node] == pytest.approx(fate.cut, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("size", [1, 4])
def test_the_compiled_kernels_have_the_trace_of_the_model(size: int) -> None:
    model = build("transformer")
    converted = convert_model(model, FLOAT32).model
    assert converted is not None
    traces = []
    for runs, backend in ((model, None), (converted, converted.search_backend)):
        observer = BeamObserver()
        with torch.inference_mode():
            memory = runs.encode(*pad_sources(SOURCES))
        options = {} if backend is None else {"backend": backend}
        found = search(
            runs,
            memory,
            limits=[LIMIT] * len(SOURCES),
            strategy=BeamSearch(size, size),
            observer=observer,
            **options,
        )
        plain = search(
            runs, memory, limits=[LIMIT] * len(SOURCES), strategy=BeamSearch(size, size), **options
        )
        assert found == plain, "an observer changes nothing"
        traces.append(observer.traces)
    for one, other in zip(*traces, strict=True):
        np.testing.assert_array_equal(one.parent, other.parent)
        np.testing.assert_array_equal(one.token, other.token)
        np.testing.assert_array_equal(one.reason, other.reason)
        np.testing.assert_allclose(one.cum, other.cum, atol=1e-4)


LINES = ["春风又绿江南岸", "明月何时照我还", "处处山，家家水", "云开见日", "高山流水觅知音"]


@cache
def couplets() -> Translator:
    config = Config().replace(
        text={"tokenizer": "characters", "vocab_size": 400},
        model={"width": 16, "heads": 2, "ffn_width": 32}
        | {"encoder": ("transformer*1",), "decoder": ("transformer*1",)},
    )
    tokenizers = train_tokenizers(LINES * 5, LINES * 5, config.text)
    torch.manual_seed(3)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return Translator(model, tokenizers, config)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_tokens_that_a_constraint_forbids_are_marked(size: int) -> None:
    """A pattern of few texts: a token may come if some text begins with what it makes, byte by
    byte.
    """
    translator = couplets()
    options = TranslationOptions(beam=size, nbest=size, constraints=[Regex("[山水][云月风]")])
    texts = [(one + other).encode() for one in "山水" for other in "云月风"]
    names = translator.tokenizers.tgt.tokens(range(len(translator.tokenizers.tgt)))

    def written(tokens: tuple[int, ...]) -> bytes:
        parts = [
            bytes([int(names[each][3:5], 16)])
            if names[each].startswith("<0x")
            else names[each].replace("▁", " ").encode()
            for each in tokens
        ]
        return b"".join([part.removeprefix(b" ") for part in parts[:1]] + parts[1:])

    def pattern_forbidden_reason(words: tuple[int, ...], token: int) -> str | None:
        if token == EOS:
            return None if written(words) in texts else "constraint"
        begins = token > UNK and any(each.startswith(written((*words, token))) for each in texts)
        return None if begins else "constraint"

    hypotheses, trace, limit = trace_text(translator, "云开见日", options)
    penalty = options.strategy(translator.config.decode).penalty
    check_trace(
        trace,
        hypotheses,
        nbest=size,
        limit=limit,
        penalty=penalty,
        forbidden_reason=pattern_forbidden_reason,
    )
    assert any(trace.reason_name(node) == "constraint" for node in range(len(trace)))


@pytest.mark.parametrize("size", [1, 4])
def test_constraints_that_need_a_search_of_their_own_are_traced_too(size: int) -> None:
    translator = couplets()
    constraints = (EqualLength(), Mirror(), NoCopy(), Punctuation())
    options = TranslationOptions(beam=size, nbest=size, constraints=constraints)
    text = "处处山，家家水"
    hypotheses, trace, limit = trace_text(translator, text, options)
    penalty = options.strategy(translator.config.decode).penalty
    check_trace(
        trace,
        hypotheses,
        nbest=size,
        limit=limit,
        penalty=penalty,
        forbidden_reason=partial(recorded_forbidden_reason, trace),
    )
    forbidden = [node for node in range(len(trace)) if trace.reason_name(node) == "constraint"]
    assert forbidden
    for node in forbidden:
        *before, token = trace.tokens(node)
        assert token <= UNK or not any(
            [*before, token] == hypothesis.tokens[: len(before) + 1] for hypothesis in hypotheses
        )


def recorded_forbidden_reason(trace, words: tuple[int, ...], token: int) -> str | None:
    """Return the `forbidden` reason of the trace; all other reasons follow from scores."""
    for node in np.flatnonzero(trace.step == len(words)).tolist():
        if trace.tokens(node) == [*words, token]:
            name = trace.reason_name(node)
            return name if name in ("constraint", "no_repeat") else None
    raise AssertionError("only nodes of the trace are asked about")


def trace_text(translator: Translator, text: str, options: TranslationOptions):
    """Return the n best of a text, their trace and the limit."""
    source = translator.tokenizers.src.encode(text)
    observer = BeamObserver()
    strategy = options.strategy(translator.config.decode)
    request = translator._batch_translator.build_request(
        [Segment(0, 0, text, source)], options, strategy
    )
    request = dataclasses.replace(request, observer=observer)
    [hypotheses] = translator._native.generate(request)
    return hypotheses, observer.traces[0], int(request.max_lengths[0])


def test_the_native_engine_traces_greedy_search_and_beams_wider_than_its_kernels() -> None:
    model = build("transformer")
    engine = NativeEngine(lambda: model)
    for strategy in (GreedySearch(), BeamSearch(4), BeamSearch(40)):
        observer = BeamObserver()
        translator = couplets()
        request = dataclasses.replace(
            translator._batch_translator.build_request(
                [Segment(0, 0, "x", SOURCES[0])], TranslationOptions(), strategy
            ),
            limits=[LIMIT],
            observer=observer,
        )
        [[best, *_]] = engine.generate(request)
        [[plain, *_]] = engine.generate(dataclasses.replace(request, observer=None))
        assert best.tokens == plain.tokens
        [trace] = observer.traces
        assert trace.width == strategy.beam_size
        assert trace.tokens(trace.leaves[0])[: len(best.tokens)] == best.tokens


class BeamRecord:
    """The beam of an explanation as the page reads it: numbers of nodes, decoded from JSON."""

    def __init__(self, explanation: dict[str, Any]) -> None:
        tensors, beam = explanation["tensors"], explanation["beam"]
        nodes = {name: decode_tensor(tensors[tensor]) for name, tensor in beam["nodes"].items()}
        self.parent, self.token, self.step = nodes["parent"], nodes["token"], nodes["step"]
        self.cum, self.cut = nodes["cum"].astype(float), nodes["cut"].astype(float)
        self.reasons = [beam["reasons"][each] for each in nodes["reason"]]
        self.width, self.dropped = beam["width"], beam["dropped"]

    def __len__(self) -> int:
        return len(self.parent)

    def tokens(self, node: int) -> list[int]:
        """Return the tokens from the root to a node."""
        return [*self.tokens(self.parent[node]), int(self.token[node])] if node else []


@pytest.mark.skipif(not BOX.is_dir(), reason=f"no built-in model in {BOX}")
def test_200_pruning_reasons_follow_from_the_records_of_the_page() -> None:
    """Of the built-in model, whose searches end, and a random one, whose searches do not."""
    texts = ["Zwei Kinder haben einen alten Ball gefunden.", "Guten Morgen!", "Das Haus ist alt."]
    records: list[tuple[BeamRecord, list[str], np.ndarray]] = []
    built_in, english = Translator.load(device="cpu"), {"target_language": "en"}
    searches = [
        *((built_in, text, {"beam": beam} | english) for text in texts for beam in (4, 7)),
        (built_in, texts[0], {"beam": 5, "length_penalty": 0.0} | english),
        (couplets(), LINES[0], {"beam": 4}),
    ]
    for translator, text, options in searches:
        explanation = json.loads(json.dumps(translator.explain(text, **options).to_dict()))
        record, request = BeamRecord(explanation), explanation["request"]
        assert not record.dropped
        tags = [id for id, text in explanation["token_texts"].items() if text.startswith("<2")]
        reasons, cuts = derive_reasons(
            record,
            nbest=request["nbest"],
            limit=request["max_len"],
            penalty=WuLengthPenalty(request["length_penalty"]),
            forbidden_reason=lambda _, token, tags=tags: (
                "constraint" if token in (PAD, BOS, UNK) or str(token) in tags else None
            ),
        )
        records.append((record, reasons, cuts))
    pruned = [
        (record.reasons[node], record.cut[node], reasons[node], cuts[node])
        for record, reasons, cuts in records
        for node in range(len(record))
        if record.reasons[node] not in ("kept", "finished")
    ]
    rare = [each for each in pruned if each[0] != "beam_full"]
    common = [each for each in pruned if each[0] == "beam_full"]
    chosen = rare[:100] + random.Random(0).sample(common, 200 - len(rare[:100]))
    assert len(chosen) == 200
    for reason, cut, expected, expected_cut in chosen:
        assert reason == expected
        assert cut == pytest.approx(expected_cut, abs=1e-4, nan_ok=True)
    assert {"beam_full", "worse_finished", "length_cap", "early_stop", "constraint"} <= {
        reason for reason, *_ in chosen
    }
