"""The packed PyTorch Transformer: equals the model in every configuration; int8 does not depend on
the batch.
"""

from __future__ import annotations

import copy
import itertools
import logging
from typing import Any

import pytest
import torch
from model_kit import build_perturbed_transformer
from search_kit import search_with_own_backend as search

from dragoman.attention.attention_weight_hooks import edit, record
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.sampling import Sampling
from dragoman.inference import NativeEngine, SearchRequest
from dragoman.inference.cpu.cpu_engine_conversion import INT8, convert_model
from dragoman.inference.cpu.packed_linear import (
    ActivationRange,
    int8_linear,
    int8_unsupported_reason,
    packed_linear,
    plain_linear,
)
from dragoman.inference.cpu.packed_weight_torch_transformer import (
    TorchTransformer,
    torch_unsupported_reason,
)
from dragoman.models.encoder_decoder import EncoderDecoder

VOCABULARY = 30
SOURCES = [[5, 6, 7, 8, 9], [9, 8], [11, 12, 13, 4, 5, 6, 7], [20], [21, 22, 23, 24, 25]]
needs_int8 = pytest.mark.skipif(
    bool(int8_unsupported_reason()), reason=f"int8 {int8_unsupported_reason()}"
)


def make(seed: int = 0, **settings: Any) -> EncoderDecoder:
    return build_perturbed_transformer(VOCABULARY, seed=seed, **settings)


def run(model: Any, strategy: Any, *, limit: int = 24, return_scores: bool = True) -> list[Any]:
    with torch.inference_mode():
        memory = model.encode(*pad_sources(SOURCES))
    limits = torch.tensor([limit, 3, limit, 1, limit])
    return search(
        model,
        memory,
        limits=limits,
        strategy=strategy,
        prefixes=[[], [], [7, 8], [], []],
        return_scores=return_scores,
    )


def request(**more: Any) -> SearchRequest:
    many = len(SOURCES)
    given = {
        "sources": SOURCES,
        "limits": [24] * many,
        "prefixes": [[]] * many,
        "strategy": GreedySearch(),
        "sample_ids": range(many),
    }
    return SearchRequest(**{**given, **more})


WIRINGS: dict[str, dict[str, Any]] = {
    "post": {"residual": "post_norm"},
    "pre": {"residual": "pre_norm"},
    "rms": {"residual": "pre_norm", "norm": "rms"},
    "swiglu": {"activation": "swiglu", "ffn_bias": False, "attention_bias": False},
    "learned": {"positions": "learned", "max_positions": 64},
    "rotary": {"positions": "rotary"},
    "no positions": {"positions": "none"},
    "wide heads": {"head_width": 16},
    "narrow embeddings": {"embedding_width": 8},
}


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize(
    "strategy",
    [GreedySearch(), BeamSearch(4, 4), BeamSearch(3), Sampling(samples=2)],
    ids=lambda each: type(each).__name__,
)
def test_packed_model_search_equals_the_model(wiring: str, strategy: Any) -> None:
    """Long enough that caches grow, rows finish at different steps, and beams are reordered."""
    model = make(**WIRINGS[wiring])
    assert torch_unsupported_reason(model) == ""
    for ours, theirs in zip(
        run(TorchTransformer(model, packed_linear), strategy), run(model, strategy), strict=True
    ):
        assert [each.tokens for each in ours] == [each.tokens for each in theirs]
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-4, rtol=1e-4)


def test_reordering_beams_equals_copying_their_caches() -> None:
    model = make()
    frozen = TorchTransformer(model, plain_linear)
    with torch.inference_mode():
        states = [each.start(each.encode(*pad_sources(SOURCES[:2]))) for each in (frozen, model)]
        generator = torch.Generator().manual_seed(1)
        fan = 1
        for step, wider in enumerate([3, 3, 2, 4, 4, 1, 2, 2]):
            tokens = torch.randint(4, VOCABULARY, (2 * fan,), generator=generator)
            (ours, mine), (theirs, plainly) = (
                frozen.step(tokens, states[0]),
                model.step(tokens, states[1]),
            )
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=f"step {step}")
            rows = (
                torch.arange(2)[:, None] * fan
                + torch.randint(0, fan, (2, wider), generator=generator)
            ).flatten()
            states, fan = [mine.reorder(rows), plainly.reorder(rows)], wider
        last = torch.tensor([1])
        tokens = torch.tensor([5, 6])
        ours, theirs = (
            each.step(tokens, state.keep(last))[0]
            for each, state in zip((frozen, model), states, strict=True)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_beams_can_be_selected_as_separate_sentences() -> None:
    model = make()
    frozen = TorchTransformer(model, plain_linear)
    with torch.inference_mode():
        state = frozen.start(frozen.encode(*pad_sources(SOURCES[:2])))
        _, state = frozen.step(torch.tensor([4, 5]), state)
        _, state = frozen.step(
            torch.tensor([6, 7, 8, 9]), state.reorder(torch.tensor([0, 0, 1, 1]))
        )
        after, _ = frozen.step(torch.tensor([10, 10, 10, 10]), state)
        alone, _ = frozen.step(torch.tensor([10, 10]), state.select(torch.tensor([3, 0])))
    torch.testing.assert_close(alone, after[[3, 0]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"decoder": ["lstm"], "encoder": ["bilstm"]}, "is a"),
        ({"positions": "t5"}, "relative position bias or an attention window"),
        ({"window": 3}, "relative position bias or an attention window"),
        ({"kv_heads": 2}, "another kind of attention heads"),
        ({"talking_heads": True}, "another kind of attention heads"),
        ({"qk_norm": "layer"}, "another kind of attention heads"),
    ],
)
def test_unsupported_models_run_unpacked(
    settings: dict[str, Any], found: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(**settings)
    assert found in torch_unsupported_reason(model)
    with caplog.at_level(logging.WARNING, logger="dragoman"):
        [ours] = NativeEngine(lambda: model, precision=INT8).generate(
            request(sources=SOURCES[:1], limits=[9], prefixes=[[]], sample_ids=[0])
        )
    assert found in caplog.text
    [[plainly]] = search(
        model,
        model.encode(*pad_sources(SOURCES[:1])),
        limits=torch.tensor([9]),
        strategy=GreedySearch(),
    )
    assert ours[0].tokens == plainly.tokens


def test_scores_are_omitted_unless_requested() -> None:
    model = make()
    with_scores, without = (
        run(TorchTransformer(model, packed_linear), GreedySearch(), return_scores=return_scores)
        for return_scores in (True, False)
    )
    assert [each.tokens for [each] in with_scores] == [each.tokens for [each] in without]
    assert all(each.log_probs for [each] in with_scores)
    assert all(each.log_probs == [] and each.score == 0.0 for [each] in without)


def test_engine_follows_recording_and_editing_of_the_model() -> None:
    model = make()
    native = NativeEngine(lambda: model)
    plainly = native.generate(request())
    with record(model) as notes:
        assert [each[0].tokens for each in native.generate(request())] == [
            each[0].tokens for each in plainly
        ]
    assert notes
    off = {
        "decoder.0.cross": lambda weights: torch.zeros_like(weights),
        "decoder.1.cross": lambda weights: torch.zeros_like(weights),
    }
    with edit(model, off):
        edited = native.generate(request())
    assert [each[0].log_probs for each in edited] != [each[0].log_probs for each in plainly]


def test_user_hooks_and_overridden_methods_are_respected() -> None:
    model = make()
    native = NativeEngine(lambda: model)
    plainly = [each[0].log_probs for each in native.generate(request())]
    hook = model.decoder.get_submodule("1.ffn").register_forward_hook(
        lambda module, given, out: 3.0 * out
    )
    assert [each[0].log_probs for each in native.generate(request())] != plainly
    hook.remove()
    assert [each[0].log_probs for each in native.generate(request())] == plainly
    ffn = model.decoder.get_submodule("1.ffn")
    hook = ffn.register_forward_pre_hook(lambda module, given: (3.0 * given[0],))
    assert [each[0].log_probs for each in native.generate(request())] != plainly
    hook.remove()
    forward = ffn.forward
    ffn.forward = lambda x: 3.0 * forward(x)  # type: ignore[method-assign]
    assert [each[0].log_probs for each in native.generate(request())] != plainly
    del ffn.forward
    assert [each[0].log_probs for each in native.generate(request())] == plainly
    read = model.encode
    model.encode = lambda src, mask=None: read(src.flip(0), mask)  # type: ignore[method-assign, assignment]
    assert [each[0].log_probs for each in native.generate(request())] != plainly


def test_weights_that_change_are_noticed() -> None:
    model = make()
    native = NativeEngine(lambda: model)
    before = native.generate(request())
    with torch.no_grad():
        model.decoder.get_parameter("0.ffn.inner.weight").mul_(-1.0)
    after = native.generate(request())
    assert before != after
    fresh = NativeEngine(lambda: copy.deepcopy(model)).generate(request())
    assert [each[0].tokens for each in after] == [each[0].tokens for each in fresh]


def test_workers_leave_the_number_of_threads_as_it_was() -> None:
    model, before = make(), torch.get_num_threads()
    one, two = (
        NativeEngine(lambda: model, workers=workers).generate(request()) for workers in (1, 2)
    )
    assert torch.get_num_threads() == before
    assert [each[0].tokens for each in one] == [each[0].tokens for each in two]


@needs_int8
@pytest.mark.parametrize("size", [(24, 16), (1100, 1000)], ids=["fbgemm", "onednn"])
def test_int8_matmul_error_is_rounding_only(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(*size), torch.randn(size[0]), torch.randn(7, size[1])
    exact = torch.nn.functional.linear(x, weight, bias)
    found = int8_linear(weight, bias, ActivationRange(float(x.min()), float(x.max())))(x)
    assert (found - exact).abs().max() < 0.02 * exact.abs().max()
    assert not torch.equal(found, exact)
    if size[0] < 100:
        activated = int8_linear(
            weight, bias, ActivationRange(float(x.min()), float(x.max())), relu=True
        )(x)
        torch.testing.assert_close(activated, found.relu())


@needs_int8
def test_int8_does_not_depend_on_other_rows() -> None:
    """To the last bit: sums are whole numbers, and ranges are the model's own."""
    model = make()
    native = NativeEngine(lambda: model, precision=INT8, pairs=lambda: [(SOURCES[0], SOURCES[1])])
    assert native.name == "native-int8"
    together = native.generate(request())
    for number, source in enumerate(SOURCES):
        [alone] = native.generate(
            request(sources=[source], limits=[24], prefixes=[[]], sample_ids=[number])
        )
        assert alone[0].tokens == together[number][0].tokens


@needs_int8
def test_int8_is_close_to_the_model() -> None:
    model = make()
    frozen = convert_model(model, INT8).model
    assert frozen is not None
    with torch.inference_mode():
        states = [each.start(each.encode(*pad_sources(SOURCES))) for each in (model, frozen)]
        tokens = torch.tensor([4, 5, 6, 7, 8])
        exact, rounded = (
            each.step(tokens, state)[0].log_softmax(-1)
            for each, state in zip((model, frozen), states, strict=True)
        )
    assert 1e-5 < (exact - rounded).abs().max() < 0.25


def test_packed_matmul_equals_the_plain_one() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(512, 300), torch.randn(512)
    for rows, (relu, given) in itertools.product(
        (1, 5, 130), ((False, bias), (True, bias), (False, None))
    ):
        x = torch.randn(rows, 300)
        torch.testing.assert_close(
            packed_linear(weight, given, relu=relu)(x),
            plain_linear(weight, given, relu=relu)(x),
            atol=1e-3,
            rtol=1e-4,
        )


def test_without_packed_kernels_plain_matmul_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_runtime_error(*_: Any) -> None:
        raise RuntimeError("no such layout")

    target = "dragoman.inference.cpu.packed_linear._run_packed_linear"
    monkeypatch.setattr(target, raise_runtime_error)
    weight, x = torch.randn(512, 300), torch.randn(2, 300)
    torch.testing.assert_close(packed_linear(weight, None)(x), x @ weight.t(), atol=1e-3, rtol=1e-4)


def test_packed_matmul_that_differs_from_the_plain_one_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = "dragoman.inference.cpu.packed_linear._run_packed_linear"
    monkeypatch.setattr(target, lambda x, **_: torch.zeros(len(x), 512))
    weight, x = torch.randn(512, 300), torch.randn(2, 300)
    torch.testing.assert_close(packed_linear(weight, None)(x), x @ weight.t(), atol=1e-3, rtol=1e-4)


@needs_int8
def test_inputs_beyond_seven_bits_are_clamped_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    torch.manual_seed(0)
    linear = int8_linear(torch.randn(24, 16), None, ActivationRange(-1.0, 1.0))
    at_the_end = linear(torch.ones(1, 16))
    torch.testing.assert_close(linear(torch.full((1, 16), 1.8)), at_the_end)
    torch.testing.assert_close(linear(torch.full((1, 16), -1.8)), linear(-torch.ones(1, 16)))
