"""Head ablation: outputs without heads, and estimates of their effects."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from teacher_forcing_kit import measure_head_effects, tiny_language_model, tiny_model, tiny_pair
from torch import Tensor

from dragoman.attention.attention_weight_hooks import record
from dragoman.errors import DataError
from dragoman.explain import teacher_forced_pass
from dragoman.explain.attribution import attribute_with_heads
from dragoman.explain.head_ablation import (
    ablate_heads,
    attention_parts,
    heads_switched_off,
    linear_head_estimates,
)
from dragoman.explain.teacher_forced_pass import scaled_heads
from dragoman.models.encoder_decoder import EncoderDecoder

MODELS = {
    "transformer": lambda: tiny_model(),
    "grouped heads": lambda: tiny_model(heads=4, kv_heads=2),
    "talking heads": lambda: tiny_model(talking_heads=True),
    "RNN": lambda: tiny_model("bilstm", "lstm(attention=additive)"),
    "ConvS2S": lambda: tiny_model("conv", "conv(layers=2)"),
    "Reformer": lambda: tiny_model("reformer(window=4, buckets=4)", "reformer(window=4)"),
    "prefix LM": lambda: tiny_model("", architecture="prefix_lm"),
    "language model": lambda: tiny_language_model(),
}


@pytest.mark.parametrize("path", ["encoder.1.self", "decoder.0.self", "decoder.1.cross"])
@pytest.mark.parametrize("head", [0, 1])
def test_a_head_off_is_a_slice_of_the_output_matrix_of_zeros(path: str, head: int) -> None:
    model = tiny_model()
    pair = tiny_pair(model)
    effect = ablate_heads(pair, {path: [head]})
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_submodule(path).output.weight[:, 8 * head : 8 * head + 8] = 0.0  # type: ignore[union-attr, index]
        expected = tiny_pair(changed).baseline() - pair.baseline()
    np.testing.assert_allclose(effect, expected, atol=1e-5)
    assert np.abs(effect).max() > 1e-3


def test_all_heads_off_leave_the_bias_alone() -> None:
    model = tiny_model()
    pair, seen = tiny_pair(model), list[Tensor]()
    cross = model.get_submodule("decoder.1.cross")
    handle = cross.register_forward_hook(lambda _, __, output: seen.append(output))
    ablate_heads(pair, {"decoder.1.cross": [0, 1]})
    handle.remove()
    assert torch.equal(seen[-1], cross.output.bias.expand(1, 6, -1))  # type: ignore[union-attr, operator]
    assert not torch.equal(seen[0], seen[-1])


def test_the_context_vector_of_an_rnn_is_zero() -> None:
    model = tiny_model("bilstm", "gru(attention=dot, decoder=bahdanau)")
    pair = tiny_pair(model)
    with record(model) as records, heads_switched_off(model, {"decoder.0.cross": [0]}):
        pair.baseline()
    assert not records["decoder.0.cross"].output.any()
    assert np.abs(ablate_heads(pair, {"decoder.0.cross": [0]})).max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_nothing_off_is_the_baseline_bit_for_bit(name: str) -> None:
    model = MODELS[name]()
    pair = tiny_pair(model)
    assert not ablate_heads(pair, {}).any()
    path = next(iter(attention_parts(model)))
    assert not ablate_heads(pair, {path: []}).any()
    with record(model):
        recorded = pair.baseline()
    with heads_switched_off(model, {path: []}, sources=pair.src_length):
        assert torch.equal(pair.baseline(), recorded)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_bytes", [1, 400_000_000])
def test_batched_effects_are_those_of_fresh_runs(
    name: str, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_forced_pass, "MAX_BATCH_BYTES", max_bytes)
    model = MODELS[name]()
    pair = tiny_pair(model)
    parts = attention_parts(model)
    found = measure_head_effects(pair)
    assert sorted((each.path, each.head) for each in found) == sorted(
        (path, head) for path, part in parts.items() for head in range(part.heads)
    )
    for each in found:
        np.testing.assert_allclose(
            each.changes, ablate_heads(pair, {each.path: [each.head]}), atol=1e-5
        )
        assert each.total == pytest.approx(float(each.changes.sum()))


@pytest.mark.parametrize("name", MODELS)
def test_linear_estimates_are_slopes_of_the_log_probability(name: str) -> None:
    model = MODELS[name]().double()
    pair, step = tiny_pair(model), 1e-6
    estimates = linear_head_estimates(pair)
    for path, part in attention_parts(model).items():
        for head in range(part.heads):
            values = []
            for change in (step, -step):
                scale = torch.ones(1, part.heads, dtype=torch.float64)
                scale[0, head] += change
                with scaled_heads(model, {path: scale}, sources=pair.src_length):
                    values.append(float(pair.baseline().sum()))
            slope = (values[0] - values[1]) / (2 * step)
            assert estimates[path][head] == pytest.approx(-slope, abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_estimates_take_the_log_odds_for_linear(name: str) -> None:
    model = MODELS[name]().double()
    pair, step = tiny_pair(model), 1e-6
    estimates = attribute_with_heads(pair)[1]

    def log_odds() -> Tensor:
        log_probs = pair.baseline()
        return log_probs - torch.log(-torch.expm1(log_probs))

    for path, part in attention_parts(model).items():
        for head in range(part.heads):
            values = []
            for change in (step, -step, 0.0):
                scale = torch.ones(1, part.heads, dtype=torch.float64)
                scale[0, head] += change
                with scaled_heads(model, {path: scale}, sources=pair.src_length):
                    values.append(log_odds())
            slopes, before = (values[0] - values[1]) / (2 * step), values[2]
            expected = torch.sigmoid(before - slopes).log() - torch.sigmoid(before).log()
            assert estimates[path][head] == pytest.approx(float(expected.sum()), abs=1e-4)


def test_a_prefix_lms_parts_make_up_its_attention() -> None:
    model = tiny_model("", architecture="prefix_lm")
    pair = tiny_pair(model)
    assert list(attention_parts(model)) == [
        *("encoder.0.self", "encoder.1.self", "decoder.0.cross", "decoder.1.cross"),
        *("decoder.0.self", "decoder.1.self"),
    ]
    names = ("encoder.0.self", "decoder.0.cross", "decoder.0.self")
    whole = copy.deepcopy(model)
    with torch.no_grad():
        whole.get_submodule("decoder.0.self").output.weight[:, :8] = 0.0  # type: ignore[union-attr, index]
        expected = tiny_pair(whole).baseline() - pair.baseline()
    np.testing.assert_allclose(
        ablate_heads(pair, {name: [0] for name in names}), expected, atol=1e-5
    )
    with record(model, ["decoder.0.self"]) as records:
        pair.baseline()
        with heads_switched_off(model, {"decoder.0.cross": [1]}, sources=pair.src_length):
            pair.baseline()
    before, after = (each.weights[0].clone() for each in records.calls("decoder.0.self"))
    assert not after[1, 5:, :5].any()  # from target to source
    before[1, 5:, :5] = 0.0
    assert torch.equal(after, before)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "language model"])
def test_decoding_step_by_step_respects_heads_that_are_off(name: str) -> None:
    model = MODELS[name]()
    pair = tiny_pair(model)
    assert isinstance(model, EncoderDecoder)
    assert pair.src is not None
    parts = attention_parts(model)
    off = {path: [part.heads - 1] for path, part in parts.items()}
    with torch.no_grad(), heads_switched_off(model, off, sources=pair.src_length):
        expected = model(pair.src, pair.tgt_in)[0]
        state = model.start(model.encode(pair.src))
        for position in range(pair.tgt_length):
            logits, state = model.step(pair.tgt_in[:, position], state)
            torch.testing.assert_close(logits[0], expected[position], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(model(pair.src, pair.tgt_in)[0], expected, atol=1e-3)


def test_a_model_without_attention_has_no_heads() -> None:
    pair = tiny_pair(tiny_model("lstm", "lstm"))
    assert attribute_with_heads(pair)[1] == {}
    assert measure_head_effects(pair) == []
    with pytest.raises(DataError, match=r"found 'decoder\.0\.cross'; its attentions are none"):
        ablate_heads(pair, {"decoder.0.cross": [0]})


def test_heads_that_do_not_exist_are_named() -> None:
    pair = tiny_pair(tiny_model())
    with pytest.raises(DataError, match=r"from 0 to 1; found 2; heads are counted from 0"):
        ablate_heads(pair, {"decoder.0.cross": [0, 2]})
    with pytest.raises(DataError, match=r"found 'decoder\.7\.cross'; its attentions are encoder"):
        ablate_heads(pair, {"decoder.7.cross": [0]})
