"""Beam search by CUDA graphs: equals eager search in every configuration and batch, and without
capture.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_kit import needs_gpu
from model_kit import build_perturbed_transformer

from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.search_interface import search
from dragoman.errors import DivergedError
from dragoman.inference import NativeEngine, SearchRequest
from dragoman.inference.cpu.cpu_engine_conversion import FLOAT16, FLOAT32
from dragoman.inference.cuda import graph_beam_search
from dragoman.inference.cuda.cuda_backend import CudaBackend, default_precision
from dragoman.inference.cuda.cuda_graph_buffers import round_batch, round_length
from dragoman.inference.cuda.cuda_transformer import CudaTransformer, cuda_unsupported_reason
from dragoman.inference.cuda.graph_beam_search import GraphBeamSearch
from dragoman.inference.engine_selection import resolve_precision
from dragoman.models.encoder_decoder import EncoderDecoder

VOCABULARY = 40
PENALTY = WuLengthPenalty()


def make(
    seed: int = 0,
    *,
    end: float = 0.0,
    device: str = "cpu",
    vocabulary: int = VOCABULARY,
    **settings: Any,
) -> EncoderDecoder:
    model = build_perturbed_transformer(vocabulary, seed=seed, **({"output_bias": True} | settings))
    with torch.no_grad():
        if model.output_bias is not None:
            model.output_bias[3] += end  # so that outputs end sooner or later
    return model.to(device)


def sources(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [
        torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


def request(rows: list[list[int]], strategy: Any = None, **more: Any) -> SearchRequest:
    many = len(rows)
    limits = [2 * len(row) + 5 for row in rows]
    given: dict[str, Any] = {
        "sources": rows,
        "limits": limits,
        "prefixes": [[]] * many,
        "strategy": strategy or BeamSearch(4),
        "sample_ids": range(many),
    }
    return SearchRequest(**{**given, **more})


def plainly(model: EncoderDecoder, query: SearchRequest) -> list[list[Hypothesis]]:
    with torch.inference_mode():
        memory = model.encode(*pad_sources(query.sources, model.output_weight.device))
    return search(
        model,
        memory,
        limits=torch.tensor(query.limits),
        strategy=query.strategy,
        min_length=query.min_length,
    )


def again(action: Callable[[], None]) -> Callable[[], None]:
    """Fake capture: replay calls the function again."""
    return action


@torch.inference_mode()
def run(beam: GraphBeamSearch, query: SearchRequest) -> list[list[Hypothesis]]:
    size, nbest = (
        (1, 1)
        if isinstance(query.strategy, GreedySearch)
        else (query.strategy.size, query.strategy.nbest)
    )  # type: ignore[attr-defined]
    return beam.run(query, size=size, nbest=nbest, penalty=query.strategy.penalty)  # type: ignore[attr-defined]


def same(
    found: list[list[Hypothesis]], expected: list[list[Hypothesis]], within: float = 1e-4
) -> None:
    assert [[each.tokens for each in row] for row in found] == [
        [each.tokens for each in row] for row in expected
    ]
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.finished == other.finished
            assert one.score == pytest.approx(other.score, abs=within)
            assert one.log_probs == pytest.approx(other.log_probs, abs=within)


WIRINGS: dict[str, dict[str, Any]] = {
    "post": {"residual": "post_norm"},
    "pre": {"residual": "pre_norm"},
    "rms": {"residual": "pre_norm", "norm": "rms"},
    "swiglu": {"activation": "swiglu", "ffn_bias": False, "attention_bias": False},
    "learned": {
        "positions": "learned",
        "max_positions": 46,
    },  # one more than the longest output has
    "rotary": {"positions": "rotary"},
    "no positions": {"positions": "none"},
    "wide heads": {"head_width": 16},
    "narrow embeddings": {"embedding_width": 8},
}


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize(
    "strategy",
    [GreedySearch(), BeamSearch(4, 4), BeamSearch(3, penalty=WuLengthPenalty(0.0))],
    ids=["greedy", "n best", "beam"],
)
def test_graph_search_equals_the_model(wiring: str, strategy: Any) -> None:
    """Long enough that the cached length grows, sentences finish at different steps, and beams are
    reordered.
    """
    model = make(end=1.0, **WIRINGS[wiring])
    assert cuda_unsupported_reason(model) == ""
    query = request(sources(13), strategy, min_length=17)
    beam = GraphBeamSearch(CudaTransformer(model, torch.float32), graph_capturer=again)
    expected = plainly(model, query)
    assert max(len(row[0].tokens) for row in expected) > 16, "some outputs must be long"
    for _ in range(2):  # the second time by replay
        same(run(beam, query), expected)
    assert beam.num_graphs


def test_done_sentences_are_dropped_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make(end=3.0)
    rows = sources(60)
    query = request(rows, limits=[30 if at % 9 == 0 else 3 for at in range(60)])
    seen: list[int] = []
    taken = GraphBeamSearch._step

    def watched(self: GraphBeamSearch, beam_state: Any, count: int, read: int) -> None:
        seen.append(count)
        taken(self, beam_state, count, read)

    monkeypatch.setattr(GraphBeamSearch, "_step", watched)
    same(
        run(
            GraphBeamSearch(CudaTransformer(model, torch.float32), graph_capturer=again),
            query,
        ),
        plainly(model, query),
    )
    assert seen[0] == 64
    assert seen[-1] == 8


def test_no_state_is_left_between_batches() -> None:
    """Of other sizes, lengths and beams, in the same memory."""
    model = make(end=2.0)
    beam = GraphBeamSearch(CudaTransformer(model, torch.float32), graph_capturer=again)
    batches = [
        request(sources(count, seed), BeamSearch(size))
        for seed, (count, size) in enumerate([(9, 4), (40, 2), (3, 4), (9, 4), (17, 1)])
    ]
    for query in [*batches, *batches]:
        same(run(beam, query), plainly(model, query))


def test_captured_graphs_use_fixed_addresses() -> None:
    """Only a GPU notices a tensor that moved: here the addresses are compared."""
    model = make(end=2.0)

    def where() -> list[int]:
        beam_state = next(iter(beam._beam_states.values()))
        tables = (
            beam_state.step,
            beam_state.all_finite,
            beam_state.limits,
            beam_state.active_beams,
            beam_state.finished,
            beam_state.truncated,
            beam_state.parents,
            beam_state.tokens,
            beam_state.log_probs,
        )
        return [
            each.data_ptr()
            for each in (
                *beam._buffers._storage.values(),
                *tables,
                beam_state.length_divisors,
                beam._beam_stepper.min_length,
            )
        ]

    def graph_capturer(action: Callable[[], None]) -> Callable[[], None]:
        then = where()

        def replay() -> None:
            assert where() == then
            action()

        return replay

    beam = GraphBeamSearch(CudaTransformer(model, torch.float32), graph_capturer=graph_capturer)
    for seed in (0, 1, 0, 1, 2):
        run(beam, request(sources(9 + 20 * seed, seed)))
    assert beam.num_graphs


def test_pool_memory_is_not_used_after_the_last_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch has it: a pool that no graph holds any more must not be captured into."""

    class Pool:
        def __init__(self) -> None:
            self.given = weakref.WeakSet[Any]()
            self.used = False

        def __call__(self, action: Callable[[], None]) -> Callable[[], None]:
            assert len(self.given) or not self.used, "nothing holds this pool"

            def replay() -> None:
                action()

            self.used = True
            self.given.add(replay)
            return replay

    monkeypatch.setattr(graph_beam_search, "build_graph_capturer", lambda _: Pool())
    monkeypatch.setattr(graph_beam_search, "MAX_GRAPHS", 5)
    model = make(end=1.0)
    beam = GraphBeamSearch(CudaTransformer(model, torch.float32))
    for seed, size in ((0, 4), (1, 4), (1, 2), (0, 4), (2, 3)):
        query = request(sources(9 + 20 * seed, seed), BeamSearch(size))
        same(run(beam, query), plainly(model, query))
    assert beam.num_graphs


def test_min_length_forbids_eos() -> None:
    model = make(end=9.0)
    query = request(sources(5), BeamSearch(3), min_length=2)
    found = run(GraphBeamSearch(CudaTransformer(model, torch.float32), graph_capturer=again), query)
    same(found, plainly(model, query))
    assert min(len(row[0].tokens) for row in found) >= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_finds_nearly_the_same(dtype: torch.dtype) -> None:
    model = make(end=1.0)
    query = request(sources(40), GreedySearch())
    found = run(GraphBeamSearch(CudaTransformer(model, dtype), graph_capturer=again), query)
    expected = plainly(model, query)
    first = [
        abs(one[0].log_probs[0] - two[0].log_probs[0])
        for one, two in zip(found, expected, strict=True)
    ]
    assert 0 < max(first) < (0.02 if dtype == torch.float16 else 0.15)


def test_a_batch_of_one_and_of_many_agree() -> None:
    model = make(end=1.0)
    rows = sources(24)
    beam = GraphBeamSearch(CudaTransformer(model, torch.float32), graph_capturer=again)
    together = run(beam, request(rows))
    alone = [run(beam, request([row]))[0] for row in rows]
    same(together, alone)


def test_weights_kept_in_half_precision_search_too() -> None:
    model = make(end=1.0)
    query = request(sources(7))
    whole = run(
        GraphBeamSearch(CudaTransformer(model, torch.bfloat16), graph_capturer=again),
        query,
    )
    half = run(
        GraphBeamSearch(
            CudaTransformer(make(end=1.0).bfloat16(), torch.bfloat16), graph_capturer=again
        ),
        query,
    )
    assert [row[0].log_probs[0] for row in half] == pytest.approx(
        [row[0].log_probs[0] for row in whole], abs=0.1
    )


def test_failed_capture_is_reported_once_and_runs_eagerly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing_capturer(action: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    model, query = make(end=1.0), request(sources(9))
    beam = GraphBeamSearch(CudaTransformer(model, torch.float32), graph_capturer=failing_capturer)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            same(run(beam, query), plainly(model, query))
    assert caplog.text.count("kernel by kernel") == 1
    assert "not permitted when stream" in caplog.text
    assert beam.num_graphs == 0


def test_graphs_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_beam_search, "MAX_GRAPHS", 3)
    beam = GraphBeamSearch(CudaTransformer(make(end=1.0), torch.float32), graph_capturer=again)
    for seed in range(4):
        run(beam, request(sources(5 + 12 * seed, seed)))
    assert beam.num_graphs <= 3


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, 8), (8, 8), (9, 16), (64, 64), (65, 72), (1000, 1024), (1025, 1152), (3000, 3072)],
)
def test_sentences_are_counted_in_levels(count: int, expected: int) -> None:
    assert round_batch(count) == expected


@pytest.mark.parametrize(("length", "expected"), [(1, 16), (16, 16), (17, 32)])
def test_lengths_are_counted_in_steps(length: int, expected: int) -> None:
    assert round_length(length) == expected


def on_device(
    model: EncoderDecoder,
    precision: str,
    query: SearchRequest,
    form: CudaBackend | None = None,
) -> list[list[Hypothesis]] | None:
    with torch.inference_mode():
        return (form or CudaBackend(precision)).generate(model, 1, query)


def test_model_that_overflows_half_precision_falls_back_to_float32(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make(end=1.0)
    with torch.no_grad():
        block: Any
        for _, block in model.decoder.blocks():
            block.ffn.inner.weight.mul_(1e7)
    query, form = request(sources(4)), CudaBackend(FLOAT16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = on_device(model, FLOAT16, query, form)
            assert found is not None
            same(found, plainly(model, query), within=1e-2)
    assert caplog.text.count("float16 overflows") == 1


@pytest.mark.parametrize("factor", [float("nan"), 1e30])
@pytest.mark.parametrize("precision", [FLOAT32, FLOAT16])
def test_nonfinite_float32_outputs_fall_back_to_the_model(factor: float, precision: str) -> None:
    model, query = make(), request(sources(2))
    with torch.no_grad():
        for part in ("inner", "outer"):
            model.get_parameter(f"decoder.0.ffn.{part}.weight").mul_(factor)
    assert on_device(model, precision, query) is None
    with pytest.raises(DivergedError, match="NaN at output position 1"):
        plainly(model, query)


def test_weights_past_half_precision_are_kept_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    model, query = make(), request(sources(3))
    with torch.no_grad():
        model.get_parameter("decoder.0.ffn.inner.bias")[
            1
        ] = -7e4  # a unit that is off; as float16 it would be infinite
    with caplog.at_level(logging.WARNING):
        found = on_device(model, FLOAT16, query)
    assert found is not None
    same(found, plainly(model, query))
    assert "float16 overflows for this model" in caplog.text


def test_failing_packed_form_is_reported_once_and_falls_back_to_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(CudaTransformer, "step", fail)
    form, query = CudaBackend(FLOAT32), request(sources(3))
    with caplog.at_level(logging.WARNING):
        assert on_device(make(), FLOAT32, query, form) is None
        assert on_device(make(), FLOAT32, query, form) is None
    assert caplog.text.count("no kernel image is available") == 1


def test_out_of_memory_is_raised_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    form, query = CudaBackend(FLOAT32), request(sources(3))
    with monkeypatch.context() as patch:
        patch.setattr(CudaTransformer, "step", fill)
        with pytest.raises(torch.OutOfMemoryError):
            on_device(make(), FLOAT32, query, form)
    found = on_device(make(), FLOAT32, query, form)
    assert found is not None


def test_unsupported_models_fall_back_to_the_model(caplog: pytest.LogCaptureFixture) -> None:
    recurrent = make(encoder=["gru"], decoder=["gru(attention=additive)"], positions="none")
    with caplog.at_level(logging.INFO):
        assert on_device(recurrent, FLOAT16, request(sources(2))) is None
    assert "is a" in caplog.text
    model = make()
    assert on_device(model, FLOAT16, request(sources(2), BeamSearch(64))) is None
    assert on_device(model, FLOAT16, request(sources(2), prefixes=[[5], []])) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert on_device(model, FLOAT16, request(sources(2))) is None


def test_weights_that_change_are_packed_again() -> None:
    model, query, form = make(end=1.0), request(sources(3)), CudaBackend(FLOAT32)
    with torch.inference_mode():
        first = form.generate(model, 1, query)
        other = make(seed=9, end=1.0)
        second = form.generate(other, 2, query)
    assert first is not None
    assert second is not None
    same(first, plainly(model, query))
    same(second, plainly(other, query))


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [
        ("cpu", (9, 0), FLOAT32),
        ("cuda", (9, 0), FLOAT16),
        ("cuda", (7, 0), FLOAT16),
        ("cuda", (6, 1), FLOAT32),
    ],
)
def test_default_precision_on_a_gpu_with_half_precision_matmuls(
    monkeypatch: pytest.MonkeyPatch, device: str, capability: tuple[int, int], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert default_precision(torch.device(device)) == expected


def test_half_precision_on_a_cpu_becomes_float32(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_precision("float16", torch.device("cpu")) == FLOAT32
    assert "the precision float16 runs on a GPU: cpu computes in float32" in caplog.text


@needs_gpu
@pytest.mark.parametrize("wiring", WIRINGS)
def test_on_a_gpu_replayed_steps_equal_plain_ones(wiring: str) -> None:
    torch.set_float32_matmul_precision("highest")
    model = make(end=1.0, device="cuda", **WIRINGS[wiring])
    query = request(sources(40))
    engine = NativeEngine(lambda: model)
    expected = plainly(model, query)
    for _ in range(3):
        found = engine.generate(query)
        same(found, expected, within=1e-3)
    assert engine._cuda._search is not None
    assert engine._cuda._search.num_graphs


@needs_gpu
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_on_a_gpu_half_precision_finds_nearly_the_same(precision: str) -> None:
    model = make(end=1.0, device="cuda", vocabulary=4096)
    query = request(sources(200), GreedySearch())
    engine = NativeEngine(lambda: model, precision=precision)
    engine.generate(query)
    found, expected = engine.generate(query), plainly(model, query)
    assert (
        sum(
            one[0].tokens[:1] == two[0].tokens[:1] for one, two in zip(found, expected, strict=True)
        )
        >= 190
    )
    assert engine._cuda._search is not None
    assert engine._cuda._search.num_graphs
