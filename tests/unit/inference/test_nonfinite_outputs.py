"""NaN and infinity are detected in every engine, precision and search, as by the native model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_kit import build_perturbed_transformer

from dragoman.attention import edit, find_attentions
from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import (
    SearchRequest,
    SearchStrategy,
    log_sum_exp,
    non_finite_error,
    search,
)
from dragoman.errors import DivergedError
from dragoman.inference import NativeEngine
from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library
from dragoman.inference.cpu.cpp_transformer import CppTransformer
from dragoman.inference.cpu.cpu_engine_conversion import (
    FLOAT32,
    INT8,
    _calibrate_ranges,
    convert_model,
)
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

NAN, INF = float("nan"), float("inf")
SOURCES = [[5, 6, 7, 8, 9], [9, 8], [11, 12, 13, 4, 5, 6, 7], [20]]
WAYS: list[tuple[SearchStrategy, bool]] = [
    (GreedySearch(), False),
    (GreedySearch(), True),
    (BeamSearch(3), True),
    (Sampling(), False),
]
WIRINGS = {
    "post": {"residual": "post_norm"},
    "rms": {"residual": "pre_norm", "norm": "rms"},
    "none": {"residual": "no_norm"},
}
# Which weight is damaged, and how: one of its numbers by another, or all by a factor.
DAMAGES: dict[str, Callable[[EncoderDecoder], object]] = {
    "NaN in an encoder's feed-forward": lambda model: put(model, "encoder.0.ffn.inner.weight", NAN),
    "infinity in a decoder's feed-forward": lambda model: put(
        model, "decoder.1.ffn.inner.bias", INF
    ),
    "NaN in keys": lambda model: put(model, "decoder.0.cross.key_value.weight", NAN),
    "NaN in queries": lambda model: put(model, "decoder.1.self.query_key_value.bias", NAN),
    "NaN in the last layer's output": lambda model: put(model, "decoder.1.ffn.outer.bias", NAN),
    "NaN in an embedding": lambda model: model.get_parameter("embeddings.shared.weight")[20].fill_(
        NAN
    ),
    "overflow of activations": lambda model: [
        model.get_parameter(f"encoder.1.ffn.{part}.weight").mul_(1e25)
        for part in ("inner", "outer")
    ],
    "overflow of scores": lambda model: model.get_parameter(
        "decoder.0.self.query_key_value.weight"
    ).mul_(1e30),
    "overflow of logits": lambda model: model.get_parameter("embeddings.shared.weight").mul_(1e38),
}
needs_kernels = pytest.mark.skipif(load_kernel_library() is None, reason="no C++ compiler")


def put(model: EncoderDecoder, name: str, value: float) -> None:
    """Put a value into the middle of a weight."""
    weight = model.get_parameter(name).view(-1)
    weight[weight.numel() // 2] = value


def make(**settings: Any) -> EncoderDecoder:
    """Build a small Transformer with random weights."""
    return build_perturbed_transformer(37, **settings).requires_grad_(False)


def forms(model: EncoderDecoder) -> dict[str, Callable[[], Any]]:
    """List what can compute a model, without the check of its weights that comes before."""

    def packed_int8() -> TorchTransformer:
        ranges = iter(_calibrate_ranges(model, ()))
        return TorchTransformer(
            model,
            lambda weight, bias, *, relu=False: int8_linear(weight, bias, next(ranges), relu=relu),
        )

    compiled = load_kernel_library()
    made: dict[str, Callable[[], Any]] = {"frozen": lambda: TorchTransformer(model, packed_linear)}
    if not int8_unsupported_reason():
        made["frozen int8"] = packed_int8
    if compiled is not None:
        made["compiled"] = lambda: CppTransformer(model, compiled)
        if compiled.dragoman_has_int8():
            made["compiled int8"] = lambda: CppTransformer(
                model, compiled, iter(_calibrate_ranges(model, ()))
            )
    return made


def diverges(
    model: Any, strategy: SearchStrategy, return_scores: bool, sources: list[list[int]] = SOURCES
) -> bool:
    """Whether a search raises DivergedError."""
    limits = torch.full((len(sources),), 8)
    try:
        with torch.inference_mode():
            search(
                model,
                model.encode(*pad_sources(sources)),
                limits=limits,
                strategy=strategy,
                return_scores=return_scores,
            )
    except DivergedError:
        return True
    return False


def request(
    strategy: SearchStrategy, *, return_scores: bool = True, sources: list[list[int]] = SOURCES
) -> SearchRequest:
    """Return an engine's outputs for some sources."""
    many = len(sources)
    return SearchRequest(
        sources=sources,
        limits=[8] * many,
        prefixes=[[]] * many,
        strategy=strategy,
        sample_ids=range(many),
        return_scores=return_scores,
    )


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_backend_detects_nonfinite_values(damage: str, wiring: str) -> None:
    model = make(**WIRINGS[wiring])
    DAMAGES[damage](model)
    made = {name: form() for name, form in forms(model).items()}
    for strategy, return_scores in WAYS:
        # Torch's fused attention gives zeros on a CPU where all scores of a row are NaN: what
        # counts is the definition.
        with edit(model, dict.fromkeys(find_attentions(model), lambda weights: weights)):
            assert diverges(model, strategy, return_scores), "a damage must be one to the model"
        assert {
            name: diverges(form, strategy, return_scores) for name, form in made.items()
        } == dict.fromkeys(made, True)


@pytest.mark.parametrize(("strategy", "return_scores"), WAYS)
def test_one_nonfinite_row_is_detected_among_others(
    strategy: SearchStrategy, return_scores: bool
) -> None:
    model = make()
    model.get_parameter("embeddings.shared.weight")[20].fill_(NAN)
    for name, form in forms(model).items():
        made = form()
        assert diverges(made, strategy, return_scores), name
    # Rows that do not read the token must not write it either: its logit is NaN too.
    for row in (0, 1, 2):
        assert diverges(model, strategy, return_scores, [SOURCES[row]])


@needs_kernels
@pytest.mark.parametrize("precision", [FLOAT32, INT8])
@pytest.mark.parametrize(("strategy", "return_scores"), WAYS)
def test_the_engine_raises_and_names_the_position(
    precision: str, strategy: SearchStrategy, return_scores: bool
) -> None:
    model = make()
    native = NativeEngine(lambda: model, precision=precision)
    assert len(native.generate(request(strategy, return_scores=return_scores))) == len(SOURCES)
    put(
        model, "decoder.1.cross.output.weight", NAN
    )  # a change of weights is noticed, and the new ones are
    with pytest.raises(
        DivergedError, match="must be finite numbers; found NaN at output position 1"
    ):
        native.generate(request(strategy, return_scores=return_scores))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_weights_that_are_not_finite_are_neither_packed_nor_quantised(value: float) -> None:
    model = make()
    assert torch_unsupported_reason(model) == ""
    model.get_parameter("encoder.0.self.output.bias")[3] = value
    assert torch_unsupported_reason(model) == "its weights are not all finite"
    assert convert_model(model, INT8) == (None, "its weights are not all finite")


def test_weights_whose_sum_overflows_are_finite() -> None:
    model = make()
    model.get_parameter("encoder.0.ffn.inner.weight").fill_(3e38)
    assert torch_unsupported_reason(model) == ""


@pytest.mark.parametrize(
    "name",
    [
        "encoder.0.self.query_key_value.bias",
        "decoder.1.self.query_key_value.bias",
        "decoder.0.cross.query.bias",
    ],
)
def test_engine_detects_nonfinite_values_that_fused_attention_hides(name: str) -> None:
    model = make()
    model.get_parameter(name).fill_(NAN)
    for precision in (FLOAT32, INT8):
        with pytest.raises(DivergedError, match="found NaN at output position 1"):
            NativeEngine(lambda: model, precision=precision).generate(
                request(GreedySearch(), sources=[[5, 6, 7]])
            )


@needs_kernels
def test_outputs_that_overflow_in_int8_are_computed_by_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Values past float16's range, in which int8 keeps them, but well within float32's."""
    model = make()
    for layer in ("decoder.0", "decoder.1"):
        half = model.get_parameter(f"{layer}.cross.key_value.weight").size(0) // 2
        for part in ("weight", "bias"):
            model.get_parameter(f"{layer}.cross.key_value.{part}")[half:].mul_(1e7)
        model.get_parameter(f"{layer}.cross.output.weight").mul_(1e-7)
    if "compiled int8" not in forms(model):
        pytest.skip("int8 needs VNNI")
    native, plainly = NativeEngine(lambda: model, precision=INT8), NativeEngine(lambda: model)
    with caplog.at_level(logging.WARNING):
        found = [native.generate(request(BeamSearch(3))) for _ in range(2)]
    expected = plainly.generate(request(BeamSearch(3)))
    for each in found:
        assert [row[0].tokens for row in each] == [row[0].tokens for row in expected]
    assert caplog.text.count("int8 overflows for this model: it runs in float32") == 1


@needs_kernels
def test_backend_that_overflows_is_disabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def overflow(*_: Any) -> None:
        raise non_finite_error(0)

    model, greedy_request = make(), request(GreedySearch())
    expected = NativeEngine(lambda: model).generate(greedy_request)
    monkeypatch.setattr(CppTransformer, "start", overflow)
    native = NativeEngine(lambda: model)
    with caplog.at_level(logging.WARNING):
        found = [native.generate(greedy_request) for _ in range(2)]
    for each in found:
        assert [row[0].tokens for row in each] == [row[0].tokens for row in expected]
    assert (
        caplog.text.count("packed weights overflow where the model does not: the model itself runs")
        == 1
    )


@needs_kernels
@pytest.mark.parametrize("damage", [NAN, INF])
@pytest.mark.parametrize("at", [0, 17, 63, 129])
def test_log_sum_exp_of_nonfinite_rows_is_nan(at: int, damage: float) -> None:
    backend = CppTransformer(make(), load_kernel_library()).search_backend  # type: ignore[arg-type]
    x = torch.linspace(3.0, 0.0, 130).repeat(3, 1)
    x[1, at] = damage
    found = backend.log_sum_exp(x)
    assert (x[1].amax() - found[1]).isnan().all()
    torch.testing.assert_close(found[::2], log_sum_exp(x)[::2])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("size", [64, 1024])  # by fbgemm and by oneDNN
def test_int8_matmuls_reject_nonfinite_inputs(value: float, size: int) -> None:
    if int8_unsupported_reason():
        pytest.skip(int8_unsupported_reason())
    torch.manual_seed(0)
    multiply = int8_linear(torch.randn(size, size), torch.randn(size), ActivationRange(-4.0, 4.0))
    x = torch.randn(3, size)
    multiply(x)
    x[1, 5] = value
    with pytest.raises(
        DivergedError,
        match=f"found 1 of {3 * size:,} that are NaN or infinite; its weights",
    ):
        multiply(x)


def test_packed_matmuls_keep_nan_through_relu() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(512, 512), torch.randn(512), torch.randn(3, 512)
    x[1, 5] = NAN
    for make_product in (packed_linear, plain_linear):
        assert make_product(weight, bias, relu=True)(x).isnan().all(dim=1).tolist() == [
            False,
            True,
            False,
        ]
