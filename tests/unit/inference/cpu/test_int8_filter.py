"""The int8 logit filter: its error bound holds, and the argmax is bit-exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_kit import build_perturbed_transformer, convert_to_cpp
from search_kit import search_with_own_backend as search

from dragoman.data.inference_batches import pad_sources
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.search_interface import mask_invalid_tokens
from dragoman.errors import DivergedError, DragomanError
from dragoman.inference.cpu import cpp_transformer
from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library
from dragoman.inference.cpu.cpp_transformer import AdaptiveInt8Filter, CppTransformer
from dragoman.inference.cpu.cpp_weight_packing import ZERO_POINT, pack_int8_filter
from dragoman.inference.cpu.cpu_engine_conversion import FLOAT32, INT8
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.ops.topk import blocked_argmax
from dragoman.text.special_tokens import BOS, EOS, SPECIAL_TOKENS, UNK

VOCABULARY = 1_003  # neither whole vectors nor whole panels
needs_kernels = pytest.mark.skipif(load_kernel_library() is None, reason="no C++ compiler")
needs_int8 = pytest.mark.skipif(
    (_found := load_kernel_library()) is None or not _found.dragoman_has_int8(),
    reason="no AVX-512 VNNI",
)
SETTINGS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"residual": "pre_norm"},
    "no norm": {"residual": "no_norm"},
    "no positions": {"positions": "none"},
    "an output of its own": {"tie_embeddings": "none"},
}


def make(vocabulary: int = VOCABULARY, **settings: Any) -> EncoderDecoder:
    sizes = {"encoder": ["transformer*1"], "width": 48, "heads": 3, "ffn_width": 64}
    return build_perturbed_transformer(vocabulary, **(sizes | settings))


def sources(count: int) -> list[list[int]]:
    return [
        [4 + (7 * at + 3 * number) % 900 for at in range(1 + number % 6)] for number in range(count)
    ]


def encoded(form: Any, count: int) -> Any:
    with torch.inference_mode():
        return form.encode(*pad_sources(sources(count)))


def begun(form: Any, count: int) -> Any:
    return form.start(encoded(form, count))


def favourites(model: EncoderDecoder) -> list[int]:
    """Return the tokens with the largest logits, most frequent first."""
    form = convert_to_cpp(model)
    with torch.inference_mode():
        first = largest_of_all(
            form.step(torch.full((27,), BOS), begun(form, 27))[0], may_end=False
        ).ids
    distinct, counts = first.unique(return_counts=True)
    return distinct[counts.argsort(descending=True, stable=True)].tolist()


def first_taken(form: CppTransformer) -> set[int]:
    """Name what is taken first."""
    with torch.inference_mode():
        return set(
            form.greedy_decoder.decode(begun(form, 27), np.ones(27, dtype=np.int64), min_length=0)
            .tokens[:, 0]
            .tolist()
        )


def largest_of_all(logits: torch.Tensor, *, may_end: bool) -> Any:
    return blocked_argmax(
        mask_invalid_tokens(
            logits, forced=np.full(len(logits), -1), step=0, min_length=0 if may_end else 1
        )
    )


def assert_same_greedy_outputs(form: CppTransformer, rows: int, steps: int = 6) -> None:
    """Follow the largest logit step by step through all logits, and find what is followed in one
    call, to the last bit.
    """
    with torch.inference_mode():
        found = form.greedy_decoder.decode(
            begun(form, rows), np.full(rows, steps - 1), min_length=steps
        )
        state, tokens = begun(form, rows), torch.full((rows,), BOS)
        for step in range(steps):
            logits, state = form.step(tokens, state)
            tokens, values = (
                (expected := largest_of_all(logits, may_end=False)).ids,
                expected.values,
            )
            if step < steps - 1:  # past its limit a row takes nothing but its end, and none may
                assert torch.equal(torch.from_numpy(found.tokens[:, step]), tokens), step
                assert torch.equal(torch.from_numpy(found.logits[:, step]), values), step
    assert (found.tokens[:, steps - 1 :] == -1).all()


@needs_kernels
@pytest.mark.parametrize("precision", [FLOAT32, INT8])
@pytest.mark.parametrize("setting", SETTINGS)
def test_argmax_is_bit_exact(setting: str, precision: str) -> None:
    form = convert_to_cpp(make(**SETTINGS[setting]), precision)
    for rows in (1, 2, 13, 27):
        assert_same_greedy_outputs(form, rows)


@needs_int8
@pytest.mark.parametrize("width", [16, 48, 512])
def test_no_logit_is_further_from_its_int8_value_than_the_bound(width: int) -> None:
    """By the definition in `int8_filter.h`, in float64; outliers make the bound wide, and plain
    numbers leave it narrow.
    """
    chance = np.random.default_rng(width)
    weight = chance.standard_normal((70, width)) * chance.gamma(1.0, 1.0, (70, 1))
    weight[3], weight[4, 0], weight[5] = 0.0, 300.0, 1e-12
    packed = pack_int8_filter(torch.from_numpy(weight).float(), None, panel=32, lanes=16)
    whole, scale, shift, _, lost, kept, exact = packed.buffers
    eighths = (
        whole.transpose(1, 2).reshape(-1, width).double().numpy()[:70]
    )  # panels back into rows
    assert np.array_equal(exact.numpy(), weight.astype(np.float32))
    for spread in (1.0, 40.0):
        x = chance.standard_normal(width)
        x[0] *= spread
        step = np.abs(x).max() / 127
        rounded = np.round(x / step)
        rough = (
            eighths @ (rounded + ZERO_POINT) * scale.double().numpy()[:70]
            + shift.double().numpy()[:70]
        ) * step
        bound = lost.double().numpy()[:70] * np.linalg.norm(x) + kept.double().numpy()[
            :70
        ] * np.linalg.norm(x - rounded * step)
        apart = np.abs(weight @ x - rough)
        assert (apart <= bound + 1e-9).all()
        lengths = np.linalg.norm(weight, axis=1) * np.linalg.norm(x)
        ordinary = np.delete(np.arange(70), [3, 4, 5])
        if spread == 1.0:
            assert (bound[ordinary] < 0.06 * lengths[ordinary]).all(), (
                "a bound that lets everything through is none"
            )


@needs_int8
def test_few_logits_are_computed_in_float32() -> None:
    form = convert_to_cpp(make())
    assert_same_greedy_outputs(form, 27)
    held: Any = form.greedy_decoder.int8_filter
    assert held.is_worthwhile
    assert held._rescored / held._rows < 0.03 * VOCABULARY


@needs_int8
def test_ties_go_to_the_first_token_and_near_ties_to_the_larger_logit() -> None:
    model = make(tie_embeddings="none")
    with torch.no_grad():
        weight: Any = model.output_weight
        favourite = favourites(model)[0]
        weight[950], weight[990] = weight[favourite], weight[favourite]
        weight[970] = weight[favourite] * (1 + 1e-6)  # equal in int8
    assert 4 <= favourite < 950
    form = convert_to_cpp(model)
    assert_same_greedy_outputs(form, 27)
    with torch.inference_mode():
        logits, _ = form.step(torch.full((27,), BOS), begun(form, 27))
    taken = first_taken(form)
    assert (logits[:, favourite] == logits[:, 950]).all()
    assert 970 in taken
    assert not taken & {favourite, 950, 990}, "less by a millionth"
    with torch.no_grad():
        weight[970] = weight[favourite]
    form = convert_to_cpp(model)
    taken = first_taken(form)
    assert favourite in taken
    assert not taken & {950, 970, 990}


@needs_int8
def test_filter_is_disabled_where_all_logits_are_nearly_equal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpp_transformer, "_MIN_OBSERVED_ROWS", 50)
    model = make(tie_embeddings="none")
    with torch.no_grad():
        weight: Any = model.output_weight
        weight.copy_(weight[7] + 1e-4 * torch.randn_like(weight))
    form = convert_to_cpp(model)
    assert_same_greedy_outputs(form, 27)
    held: Any = form.greedy_decoder.int8_filter
    assert not held.is_worthwhile
    before = held._rows
    assert_same_greedy_outputs(form, 5)
    assert held._rows == before, "the whole product is used from then on"


def test_the_filter_is_evaluated_after_enough_rows() -> None:
    held = AdaptiveInt8Filter(
        pack_int8_filter(torch.randn(64, 16), torch.randn(64), panel=32, lanes=16)
    )
    held.record(cpp_transformer._MIN_OBSERVED_ROWS - 1, 64 * cpp_transformer._MIN_OBSERVED_ROWS)
    assert held.is_worthwhile
    held.record(1, 0)
    assert not held.is_worthwhile
    fine = AdaptiveInt8Filter(pack_int8_filter(torch.randn(64, 16), None, panel=32, lanes=16))
    fine.record(
        10 * cpp_transformer._MIN_OBSERVED_ROWS, 10 * cpp_transformer._MIN_OBSERVED_ROWS * 4
    )  # a sixteenth of 64
    assert fine.is_worthwhile


@needs_kernels
@pytest.mark.parametrize("precision", [FLOAT32, INT8])
def test_nan_is_reported_unless_the_token_is_forbidden(precision: str) -> None:
    model = make(tie_embeddings="none")
    fitted = convert_to_cpp(model, precision)  # int8's ranges are made from sound weights
    weight: Any = model.output_weight

    def searched(at: int, value: float) -> list[list[int]]:
        kept = weight[at, 3].item()
        with torch.no_grad():
            weight[at, 3] = value
        try:
            form = convert_to_cpp(model, precision)
            found = search(
                form,
                form.encode(*pad_sources(sources(5))),
                limits=torch.full((5,), 7),
                strategy=GreedySearch(),
                return_scores=False,
            )
            return [each[0].tokens for each in found]
        finally:
            with torch.no_grad():
                weight[at, 3] = kept

    if precision == FLOAT32:
        with pytest.raises(DivergedError, match="output position 1"):
            searched(611, torch.nan)
    expected = search(
        fitted,
        fitted.encode(*pad_sources(sources(5))),
        limits=torch.full((5,), 7),
        strategy=GreedySearch(),
        return_scores=False,
    )
    assert searched(UNK, torch.nan if precision == FLOAT32 else 9.0) == [
        each[0].tokens for each in expected
    ]


@needs_int8
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, 3e38, 1e30, torch.nan])
def test_nonfinite_hidden_states_disable_the_filter(value: float) -> None:
    """Nothing bounds it, so all logits are computed in float32."""
    model = make()
    with torch.no_grad():
        norm: Any = [block for _, block in model.decoder.blocks()][-1].ffn_residual.norm
        norm.bias[5] = value
    form = convert_to_cpp(model)
    if value == value:
        with torch.inference_mode():
            expected = largest_of_all(
                form.step(torch.full((5,), BOS), begun(form, 5))[0], may_end=False
            )
            found = form.greedy_decoder.decode(begun(form, 5), np.full(5, 1), min_length=9)
        finite = expected.values.isfinite().numpy()
        assert (found.tokens[:, 0] == np.where(finite, expected.ids.numpy(), -1)).all()
        assert (found.logits[finite, 0] == expected.values.numpy()[finite]).all()
        return
    with pytest.raises(DivergedError, match="NaN at output position 1"):
        search(
            form,
            form.encode(*pad_sources(sources(5))),
            limits=torch.full((5,), 7),
            strategy=GreedySearch(),
            return_scores=False,
        )


@needs_kernels
@pytest.mark.parametrize("precision", [FLOAT32, INT8])
@pytest.mark.parametrize(
    "more", [{}, {"min_length": 5}, {"prefixes": [[], [9, 8, 7], [], [UNK], []]}]
)
def test_a_search_finds_the_same_with_and_without_scores(
    precision: str, more: dict[str, Any]
) -> None:
    form = convert_to_cpp(make(), precision)
    limits = torch.tensor([9, 2, 7, 1, 12])

    def found(return_scores: bool) -> list[list[int]]:
        memory = form.encode(*pad_sources(sources(5)))
        return [
            each[0].tokens
            for each in search(
                form,
                memory,
                limits=limits,
                strategy=GreedySearch(),
                return_scores=return_scores,
                **more,
            )
        ]

    assert found(False) == found(True)


@needs_kernels
def test_rows_that_end_leave_and_the_others_continue() -> None:
    model = make(tie_embeddings="none")
    with torch.no_grad():
        weight: Any = model.output_weight
        weight[EOS] = 1.01 * weight[favourites(model)[0]]  # some end at once
    form = convert_to_cpp(model)
    memory = form.encode(*pad_sources(sources(40)))
    limits = torch.arange(40) % 7 + 3
    quickly, plainly = (
        [
            each[0]
            for each in search(
                form, memory, limits=limits, strategy=GreedySearch(), return_scores=s
            )
        ]
        for s in (False, True)
    )
    assert [each.tokens for each in quickly] == [each.tokens for each in plainly]
    assert [each.finished for each in quickly] == [each.finished for each in plainly]
    assert {each.finished for each in quickly} == {True, False}
    assert len({len(each.tokens) for each in quickly}) > 4
    assert all(token >= len(SPECIAL_TOKENS) for each in quickly for token in each.tokens)


@needs_kernels
def test_greedy_decoding_keeps_to_the_shortlist() -> None:
    form = convert_to_cpp(make())
    allowed = [np.array([EOS, *range(20 + number, 900, 5)]) for number in range(5)]

    def found(return_scores: bool) -> list[list[int]]:
        memory = form.restrict_to_shortlist(form.encode(*pad_sources(sources(5))), allowed)
        return [
            each[0].tokens
            for each in search(
                form,
                memory,
                limits=torch.full((5,), 6),
                strategy=GreedySearch(),
                return_scores=return_scores,
            )
        ]

    assert (
        form.decode_greedy(
            form.start(form.restrict_to_shortlist(form.encode(*pad_sources(sources(5))), allowed)),
            np.ones(5),
            min_length=0,
        )
        is None
    )
    assert found(False) == found(True)
    assert all(
        set(tokens) <= set(ids.tolist()) for tokens, ids in zip(found(False), allowed, strict=True)
    )


@needs_kernels
def test_embeddings_that_are_no_table_take_single_steps() -> None:
    form = convert_to_cpp(make(embedding_width=9))
    assert form.decode_greedy(begun(form, 5), np.full(5, 6), min_length=0) is None
    found = [
        search(
            form,
            encoded(form, 5),
            limits=torch.full((5,), 6),
            strategy=GreedySearch(),
            return_scores=s,
        )
        for s in (False, True)
    ]
    assert [each[0].tokens for each in found[0]] == [each[0].tokens for each in found[1]]


@needs_kernels
@pytest.mark.parametrize("positions", [6, 7, 20, 64])
def test_decoding_ends_where_positions_do_and_not_before(positions: int) -> None:
    """The cache is allocated for more steps than are taken; learned positions end at exactly their
    limit.
    """
    form = convert_to_cpp(make(positions="learned", max_positions=positions))
    memory = encoded(form, 5)
    found = search(
        form,
        memory,
        limits=torch.full((5,), positions - 1),
        strategy=GreedySearch(),
        return_scores=False,
        min_length=positions - 1,
    )
    assert {len(each[0].tokens) for each in found} == {positions - 1}
    with pytest.raises(DragomanError, match=f"{positions} learned positions"):
        search(
            form,
            memory,
            limits=torch.full((5,), positions),
            strategy=GreedySearch(),
            return_scores=False,
            min_length=positions,
        )


@needs_kernels
@pytest.mark.parametrize("precision", [FLOAT32, INT8])
def test_long_outputs_grow_the_cache(precision: str) -> None:
    """Past the initial capacity, twice, with rows that finish in between."""
    form = convert_to_cpp(make(), precision)
    limits = torch.tensor([70, 3, 41, 17, 16, 15, 90, 1])
    quickly, plainly = (
        search(
            form,
            encoded(form, 8),
            limits=limits,
            strategy=GreedySearch(),
            return_scores=return_scores,
            min_length=90,
        )
        for return_scores in (False, True)
    )
    assert [each[0].tokens for each in quickly] == [each[0].tokens for each in plainly]
    assert [len(each[0].tokens) for each in quickly] == limits.tolist()


@needs_kernels
def test_zero_rows_give_zero_outputs() -> None:
    form = convert_to_cpp(make())
    none = form.start(encoded(form, 3)).select(torch.empty(0, dtype=torch.long))
    assert form.greedy_decoder.decode(
        none, np.empty(0, dtype=np.int64), min_length=0
    ).tokens.shape == (0, 0)


@needs_kernels
def test_sampling_gets_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    form = convert_to_cpp(make())
    monkeypatch.setattr(
        form, "decode_greedy", lambda *_, **__: pytest.fail("sampling draws from all of them")
    )
    memory = form.encode(*pad_sources(sources(5)))
    assert search(
        form, memory, limits=torch.full((5,), 4), strategy=Sampling(), return_scores=False
    )


@needs_kernels
@pytest.mark.parametrize("token_id", [-1, VOCABULARY])
def test_an_unknown_token_is_an_error(token_id: int) -> None:
    form = convert_to_cpp(make())
    with torch.inference_mode(), pytest.raises(IndexError, match=f"vocabulary size, {VOCABULARY}"):
        form.step(torch.tensor([4, token_id]), begun(form, 2))
