"""The C++ Transformer: equals the model, and no row depends on the rest of its batch."""

from __future__ import annotations

import logging
import platform
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from model_kit import build_perturbed_transformer, convert_to_cpp
from search_kit import search_with_own_backend as search

from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import SearchRequest
from dragoman.inference import NativeEngine
from dragoman.inference.cpu import cpp_kernel_library_loader, kernel_compiler
from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library
from dragoman.inference.cpu.cpp_transformer import ENCODER_CHUNK_POSITIONS, CppTransformer
from dragoman.inference.cpu.cpp_weight_packing import cpp_unsupported_reason
from dragoman.inference.cpu.cpu_engine_conversion import FLOAT32, INT8, PRECISIONS, convert_model
from dragoman.inference.cpu.packed_weight_torch_transformer import TorchTransformer
from dragoman.models.encoder_decoder import EncoderDecoder

VOCABULARY = 37
SOURCES = [[5, 6, 7, 8, 9], [9, 8], [11, 12, 13, 4, 5, 6, 7], [20], [21, 22, 23, 24, 25]]
STRATEGIES = [GreedySearch(), BeamSearch(4, 4), BeamSearch(3), Sampling(samples=2)]
needs_kernels = pytest.mark.skipif(load_kernel_library() is None, reason="no C++ compiler")

WIRINGS: dict[str, dict[str, Any]] = {
    "post": {"residual": "post_norm"},
    "pre": {"residual": "pre_norm"},
    "rms": {"residual": "pre_norm", "norm": "rms"},
    "t5 norm": {"residual": "pre_norm", "norm": "t5"},
    "no norm": {"residual": "no_norm"},
    "no biases": {"ffn_bias": False, "attention_bias": False},
    "learned": {"positions": "learned", "max_positions": 64},
    "no positions": {"positions": "none"},
    "wide heads": {"head_width": 24},
    "odd sizes": {"width": 48, "heads": 3, "ffn_width": 41},
    "narrow embeddings": {"embedding_width": 9},
    "unlike stacks": {"encoder": ["transformer*1"], "decoder": ["transformer*3"]},
}


def make(**settings: Any) -> EncoderDecoder:
    return build_perturbed_transformer(VOCABULARY, **settings)


def run(
    model: Any, strategy: Any, sources: Any = SOURCES, *, return_scores: bool = True
) -> list[Any]:
    limits = torch.tensor([24, 3, 40, 1, 24])
    with torch.inference_mode():
        memory = model.encode(*pad_sources(sources))
    prefixes = [[], [], [7, 8] if return_scores else [], [], []]
    return search(
        model,
        memory,
        limits=limits,
        strategy=strategy,
        prefixes=prefixes,
        return_scores=return_scores,
    )


@needs_kernels
@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda each: type(each).__name__)
def test_cpp_transformer_search_equals_the_model(wiring: str, strategy: Any) -> None:
    """Long enough that caches grow, rows finish at different steps, and beams are reordered."""
    model = make(**WIRINGS[wiring])
    for ours, theirs in zip(
        run(convert_to_cpp(model), strategy), run(model, strategy), strict=True
    ):
        assert [each.tokens for each in ours] == [each.tokens for each in theirs]
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-4, rtol=1e-4)


@needs_kernels
def test_many_and_long_sources_are_read_as_the_model_reads_them() -> None:
    """More positions than go through the encoder at once, and a source that is longer than that by
    itself.
    """
    model = make()
    sources = [
        [4 + (at * number) % 30 for at in range(length)]
        for number, length in enumerate((300, 1, 250, ENCODER_CHUNK_POSITIONS + 9, 40), 1)
    ]
    with torch.inference_mode():
        packed = pad_sources(sources)
        theirs, ours = model.encode(*packed), convert_to_cpp(model).encode(*packed)
    assert packed.mask is not None
    torch.testing.assert_close(ours.values, theirs.values[packed.mask], atol=1e-4, rtol=1e-4)


@needs_kernels
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instructions of x86")
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx"])
def test_cpus_with_shorter_simd_vectors_compute_the_same(without: str, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    compiler = next(filter(None, map(shutil.which, cpp_kernel_library_loader.COMPILERS)))
    flags = ["-O1" if each == "-O3" else each for each in kernel_compiler.COMPILER_FLAGS]
    subprocess.run(
        [
            compiler,
            *flags,
            "-march=native",
            without,
            "-Wno-psabi",
            "-o",
            library,
            kernel_compiler.SOURCE_DIRECTORY / kernel_compiler.MAIN_SOURCE,
        ],
        check=True,
    )
    shorter = cpp_kernel_library_loader._open_library(library)
    assert shorter.dragoman_panel_width() == {"-mno-avx512f": 16, "-mno-avx": 8}[without]
    assert not shorter.dragoman_has_int8()
    model = make(width=48, heads=3, ffn_width=41)
    for ours, theirs in zip(
        run(CppTransformer(model, shorter), BeamSearch(3)), run(model, BeamSearch(3)), strict=True
    ):
        assert [each.tokens for each in ours] == [each.tokens for each in theirs]
        torch.testing.assert_close(ours[0].log_probs, theirs[0].log_probs, atol=1e-4, rtol=1e-4)
    quickly, plainly = (
        run(each, GreedySearch(), return_scores=False)
        for each in (CppTransformer(model, shorter), model)
    )
    assert [each[0].tokens for each in quickly] == [each[0].tokens for each in plainly]


@needs_kernels
@pytest.mark.parametrize("precision", PRECISIONS)
def test_row_is_bit_exact_in_every_batch(precision: str) -> None:
    """Bit-exact, for every row count with its own kernel path."""
    form = convert_to_cpp(make(), precision)
    sources = [[4 + (3 * at + number) % 30 for at in range(1 + number % 5)] for number in range(27)]
    tokens = torch.arange(4, 31)

    def steps(numbers: range) -> torch.Tensor:
        with torch.inference_mode():
            state = form.start(form.encode(*pad_sources([sources[number] for number in numbers])))
            for _ in range(3):
                logits, state = form.step(tokens[list(numbers)], state)
        return logits

    together = steps(range(27))
    for count in range(1, 26):
        assert torch.equal(steps(range(count)), together[:count]), count
    assert torch.equal(steps(range(26, 27)), together[26:])


@needs_kernels
def test_reordering_beams_equals_copying_their_caches() -> None:
    model = make()
    form = convert_to_cpp(model)
    with torch.inference_mode():
        verbs: list[Any] = [form, model]
        states = [each.start(each.encode(*pad_sources(SOURCES[:2]))) for each in verbs]
        generator = torch.Generator().manual_seed(1)
        fan = 1
        for step, wider in enumerate([3, 3, 2, 4, 4, 1, 2, 2, 9, 9, 9]):
            tokens = torch.randint(4, VOCABULARY, (2 * fan,), generator=generator)
            (ours, mine), (theirs, plainly) = (
                form.step(tokens, states[0]),
                model.step(tokens, states[1]),
            )
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=f"step {step}")
            rows = (
                torch.arange(2)[:, None] * fan
                + torch.randint(0, fan, (2, wider), generator=generator)
            ).flatten()
            states, fan = [mine.reorder(rows), plainly.reorder(rows)], wider
        last, tokens = torch.tensor([1]), torch.arange(4, 4 + fan)
        ours, theirs = (
            each.step(tokens, state.keep(last))[0]
            for each, state in zip(verbs, states, strict=True)
        )
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@needs_kernels
def test_beams_can_be_selected_as_separate_sentences() -> None:
    """Also two of one sentence, which then write different things into what was one cache."""
    form = convert_to_cpp(make())
    with torch.inference_mode():
        state = form.start(form.encode(*pad_sources(SOURCES[:2])))
        _, state = form.step(torch.tensor([4, 5]), state)
        _, state = form.step(torch.tensor([6, 7, 8, 9]), state.reorder(torch.tensor([0, 0, 1, 1])))
        chosen = [3, 0, 2]
        apart = state.select(torch.tensor(chosen))
        _, after = form.step(torch.tensor([10, 11, 12, 13]), state)
        expected, _ = form.step(torch.tensor([20, 20, 20, 20]), after)
        _, apart = form.step(torch.tensor([10, 11, 12, 13])[chosen], apart)
        found, _ = form.step(torch.tensor([20, 20, 20]), apart)
    assert torch.equal(found, expected[chosen])


@needs_kernels
def test_int8_is_close_to_the_model_and_to_torch_int8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make()
    form = convert_to_cpp(model, INT8)
    monkeypatch.setattr(
        "dragoman.inference.cpu.cpu_engine_conversion.load_kernel_library", lambda: None
    )
    plainly = convert_model(model, INT8).model
    assert isinstance(plainly, TorchTransformer)

    def after_two(each: Any) -> torch.Tensor:
        with torch.inference_mode():
            _, state = each.step(
                torch.tensor([4, 5, 6, 7, 8]), each.start(each.encode(*pad_sources(SOURCES)))
            )
            return each.step(torch.tensor([9, 9, 9, 9, 9]), state)[0].log_softmax(-1)

    exact, ours, torchs = after_two(model), after_two(form), after_two(plainly)
    assert 1e-5 < (ours - exact).abs().max() < 0.25
    assert (ours - torchs).abs().mean() < 0.02


@needs_kernels
@pytest.mark.parametrize("width", [3, 16, 63, 64, 130, 4001])
def test_rows_are_ranked_as_torch_ranks_them(width: int) -> None:
    backend = convert_to_cpp(make()).search_backend
    torch.manual_seed(width)
    x = 5.0 * torch.randn(9, width)
    x[1, :2], x[2, 1:3], x[3, : width // 2], x[4] = (
        -torch.inf,
        x[2].max() + 1.0,
        -torch.inf,
        x[4].round(),
    )
    torch.testing.assert_close(
        backend.log_sum_exp(x), x.logsumexp(dim=-1, keepdim=True), atol=1e-5, rtol=1e-6
    )
    for count in (1, 2, 3):
        values, ids = backend.topk(x, count)
        assert torch.equal(values, x.topk(count).values)
        assert torch.equal(
            ids, x.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        )  # of equal ones the first
    first = backend.argmax(x)
    assert torch.equal(first.values, x.amax(dim=-1))
    assert torch.equal(first.ids, ids[:, 0])


@needs_kernels
@pytest.mark.parametrize(
    ("precision", "is_filtered"), [(FLOAT32, True), (FLOAT32, False), (INT8, False)]
)
def test_greedy_search_takes_the_lower_id_of_equal_logits(
    precision: str, is_filtered: bool
) -> None:
    """Each of the tokens 6 to 20 has a twin, mostly in the lane before it of a later vector."""
    model = make(tie_embeddings="none")
    with torch.no_grad():
        model.output.weight[21:36] = model.output.weight[6:21]
    form = convert_to_cpp(model, precision)
    form.greedy_decoder._use_int8_filter &= is_filtered
    for sources in (SOURCES, SOURCES[::-1]):
        plain, scored = (
            [
                row[0].tokens
                for row in search(
                    form,
                    form.encode(*pad_sources(sources)),
                    limits=[20] * 5,
                    strategy=GreedySearch(),
                    return_scores=return_scores,
                )
            ]
            for return_scores in (False, True)
        )
        assert plain == scored
        tokens = {token for row in plain for token in row}
        assert len(tokens & set(range(6, 21))) > 1
        assert not tokens & set(range(21, 36))


@needs_kernels
@pytest.mark.parametrize("at", [0, 70, 129])
def test_nan_is_reported(at: int) -> None:
    backend = convert_to_cpp(make()).search_backend
    x = torch.linspace(3.0, 0.0, 130).repeat(2, 1)
    x[1, at] = torch.nan
    for count in (1, 4):
        values = backend.topk(x, count).values
        assert values.isnan().any(dim=1).tolist() == [False, True]


@needs_kernels
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"activation": "swiglu"}, "encoder.0 has the activation SwiGLU"),
        ({"positions": "rotary"}, "encoder.0 has relative or rotary positions"),
        ({"residual": "scaled"}, "encoder.0 has another residual connection or norm"),
        (
            {"residual": "pre_norm", "norm": "scale"},
            "encoder.0 has another residual connection or norm",
        ),
        ({"width": 36}, "encoder.0 has width 36, no multiple of 16"),
    ],
)
def test_unsupported_models_use_the_packed_torch_backend(
    settings: dict[str, Any], found: str
) -> None:
    model = make(**settings)
    assert cpp_unsupported_reason(model) == found
    assert isinstance(convert_model(model, FLOAT32).model, TorchTransformer)


def request() -> SearchRequest:
    many = len(SOURCES)
    return SearchRequest(
        sources=SOURCES,
        limits=[24] * many,
        prefixes=[[]] * many,
        strategy=GreedySearch(),
        sample_ids=range(many),
    )


@pytest.mark.parametrize("compiler", ["", "not-a-compiler", "fails"])
def test_without_a_compiler_the_result_is_the_same_and_that_is_reported(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    expected = [each[0].tokens for each in NativeEngine(lambda: model).generate(request())]
    if compiler == "fails":
        compiler = str(_program(tmp_path / "cxx", "echo 'sorry: cannot do that' >&2; exit 1"))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpp_kernel_library_loader, "COMPILERS", ())
    with caplog.at_level(logging.INFO, logger="dragoman"):
        native = NativeEngine(lambda: model)
        found = [[each[0].tokens for each in native.generate(request())] for _ in range(2)]
    assert found == [expected, expected]
    messages = [each.message for each in caplog.records if "PyTorch's operations" in each.message]
    assert len(messages) == 1
    expected_message = {
        "": "found no C++ compiler",
        "not-a-compiler": "the compiler not-a-compiler was not found",
    }
    assert expected_message.get(compiler, "sorry: cannot do that") in messages[0]


@needs_kernels
def test_kernels_are_compiled_once_and_again_when_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    compile_ = cpp_kernel_library_loader._compile

    def noted(compiler: str, library: Path) -> None:
        made.append(library)
        compile_(compiler, library)

    monkeypatch.setattr(cpp_kernel_library_loader, "_compile", noted)
    monkeypatch.setattr(
        kernel_compiler,
        "COMPILER_FLAGS",
        tuple("-O0" if each == "-O3" else each for each in kernel_compiler.COMPILER_FLAGS),
    )
    for _ in range(2):
        cpp_kernel_library_loader._load_kernel_library.cache_clear()
        assert cpp_kernel_library_loader._load_kernel_library(tmp_path, "") is not None
    assert len(made) == 1
    other = tmp_path / "other"
    other.mkdir()
    (other / made[0].name).write_bytes(b"not a library")
    assert cpp_kernel_library_loader._load_kernel_library(other, "") is not None
    assert len(made) == 2
    assert sorted(path.suffix for path in other.iterdir()) == [".sha256", ".so"]


def _program(path: Path, script: str) -> Path:
    """Write a fake compiler."""
    path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_positions_past_the_table_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dragoman.attention.absolute_position_encodings import SinusoidalPositions
    from dragoman.inference.cpu import cpp_transformer

    monkeypatch.setattr(cpp_transformer, "MAX_TABLE_ROWS", 4)
    positions = SinusoidalPositions(width=8, max_positions=64)
    table = cpp_transformer.CachedPositionVectors(positions)
    for first, count in ((0, 4), (1, 2), (3, 5), (9, 2)):
        assert torch.equal(table.vectors(first, count), positions.vectors(first, count).float())
