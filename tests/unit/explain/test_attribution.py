"""Attribution: closed forms of a linear model, finite differences, and recomputation token by
token.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from teacher_forcing_kit import VOCABULARY, tiny_language_model, tiny_model, tiny_pair
from torch import Tensor

from dragoman.attention.attention_weight_hooks import edit, find_attentions
from dragoman.errors import DataError
from dragoman.explain.attribution import (
    GRADIENT_METHODS,
    METHODS,
    attention_x_gradient,
    attribute_one,
    attribute_tokens,
    attribute_with_heads,
    attribution_note,
    clenshaw_curtis,
    input_x_gradient,
    integrated_gradients,
    known_methods,
    occlusion,
    value_zeroing,
)
from dragoman.explain.teacher_forced_pass import TeacherForcedPair
from dragoman.models.encoder_decoder import EncoderDecoder

DECODERS = (
    "transformer*2",
    "lstm(attention=additive)",
    "gru(attention=dot, decoder=bahdanau, input_feeding=true)",
    "conv(layers=2)",
    "sru",
    "reformer(layers=2, attention=full)",
)


class LinearTranslator(EncoderDecoder):
    """Hidden states that are fixed linear maps of the embeddings: attributions in closed form."""

    def hidden_embedded(
        self, src_embedded: Tensor, tgt_embedded: Tensor, *_: object, **__: object
    ) -> Tensor:  # type: ignore[override]
        sources, targets = src_embedded.size(1), tgt_embedded.size(1)
        return (
            self.from_source(targets, sources).to(src_embedded) @ src_embedded
            + self.from_target(targets).to(src_embedded) @ tgt_embedded
        )

    @staticmethod
    def from_source(targets: int, sources: int) -> Tensor:
        rows, columns = torch.arange(targets).unsqueeze(1), torch.arange(sources)
        return torch.sin(1.0 + 3 * rows + 7 * columns)

    @staticmethod
    def from_target(targets: int) -> Tensor:
        rows, columns = torch.arange(targets).unsqueeze(1), torch.arange(targets)
        return torch.cos(2.0 + 5 * rows + 3 * columns).tril()


def linear_pair() -> TeacherForcedPair:
    model = tiny_model().double()
    model.__class__ = LinearTranslator
    return tiny_pair(model)


def brute_force(pair: TeacherForcedPair, src: Tensor | None, tgt: Tensor) -> Tensor:
    """Return log-probabilities (T,) by the model's own methods, from embeddings (1, S, D)."""
    model = pair.model
    if isinstance(model, EncoderDecoder):
        assert src is not None
        hidden = model.hidden_embedded(src, tgt)
    else:
        from dragoman.models.forward_context import ForwardContext

        hidden = model.output(model.decoder(model.stack_input(tgt), ForwardContext()))
    log_probs = torch.log_softmax(model.project(hidden)[0], dim=-1)
    return log_probs[torch.arange(len(pair.tgt_out)), pair.tgt_out]


def test_a_linear_model_has_the_gradient_of_its_formula() -> None:
    pair = linear_pair()
    model = pair.model
    src, tgt = pair.embed_source(), pair.embed_target()
    assert src is not None
    hidden = pair.hidden(src, tgt)[0]
    # d log p_t / d h_t = W^T (onehot - p), and h_t is linear in the embeddings.
    weight = model.output_weight
    probabilities = torch.softmax(model.project(hidden), -1)
    slopes = (torch.nn.functional.one_hot(pair.tgt_out, VOCABULARY) - probabilities) @ weight
    source = LinearTranslator.from_source(6, 5) * (slopes @ src[0].T)
    target = LinearTranslator.from_target(6) * (slopes @ tgt[0].T)
    found = input_x_gradient(pair)
    np.testing.assert_allclose(found.source, source.float(), atol=1e-6)
    np.testing.assert_allclose(found.target, target.float(), atol=1e-6)


def test_a_linear_models_occlusion_is_the_closed_form() -> None:
    pair = linear_pair()
    src, tgt = pair.embed_source(), pair.embed_target()
    assert src is not None
    model = pair.model
    assert isinstance(model, EncoderDecoder)
    mean = model._embedding("src")(torch.arange(VOCABULARY)).mean(0)
    hidden = pair.hidden(src, tgt)[0]
    found = occlusion(pair)
    for position in range(5):
        shift = LinearTranslator.from_source(6, 5)[:, position, None] * (mean - src[0, position])
        changed = torch.log_softmax(model.project(hidden + shift), -1)
        before = torch.log_softmax(model.project(hidden), -1)
        rows = torch.arange(6)
        expected = (before - changed)[rows, pair.tgt_out]
        np.testing.assert_allclose(found.source[:, position], expected.float(), atol=1e-6)


@pytest.mark.parametrize("decoder", DECODERS)
def test_input_x_gradient_is_a_directional_derivative(decoder: str) -> None:
    pair = tiny_pair(tiny_model("transformer + bigru", decoder).double())
    src, tgt = pair.embed_source(), pair.embed_target()
    assert src is not None
    found, step = input_x_gradient(pair), 1e-6
    for side, attributed in ((src, found.source), (tgt, found.target)):
        for position in range(side.size(1)):
            values = []
            for sign in (1, -1):
                moved = side.clone()
                moved[0, position] *= 1 + sign * step
                both = (moved, tgt) if side is src else (src, moved)
                values.append(brute_force(pair, *both))
            slope = (values[0] - values[1]) / (2 * step)
            np.testing.assert_allclose(attributed[:, position], slope, atol=2e-5)


@pytest.mark.parametrize("decoder", [each for each in DECODERS if each != "sru"])
def test_attention_x_gradient_is_the_slope_of_each_heads_input(decoder: str) -> None:
    """Scale all weights that one head gives one source token, by the model's public hooks."""
    pair = tiny_pair(tiny_model("transformer", decoder).double())
    model, step = pair.model, 1e-6

    def log_odds(path: str, head: int, key: int, scale: float) -> Tensor:
        def scale_key(weights: Tensor) -> Tensor:
            weights = weights.clone()
            weights[:, head, :, key] *= scale
            return weights

        with edit(model, {path: scale_key}):
            log_probs = brute_force(pair, pair.embed_source(), pair.embed_target())
        return log_probs - torch.log1p(-log_probs.exp())

    found = attention_x_gradient(pair)
    expected = {"cross": np.zeros((6, 5)), "self": np.zeros((6, 6))}
    for path, attention in find_attentions(model).items():
        if path.startswith("encoder."):
            continue
        side = "self" if path.endswith(".self") else "cross"
        for head in range(getattr(attention, "heads", 1)):
            for key in range(expected[side].shape[1]):
                ahead, back = (log_odds(path, head, key, 1 + sign * step) for sign in (1, -1))
                slope = ((ahead - back) / (2 * step)).detach().numpy()
                expected[side][:, key] += np.maximum(slope, 0.0)
    assert expected["cross"].max() > 1e-3
    np.testing.assert_allclose(found.source, expected["cross"], atol=2e-5)
    np.testing.assert_allclose(found.target, expected["self"], atol=2e-5)


def test_attention_x_gradient_needs_cross_attention() -> None:
    pair = tiny_pair(tiny_model("sru", "sru"))
    assert "attention_x_gradient" not in known_methods(pair.model)
    with pytest.raises(DataError, match="needs a decoder with cross-attention"):
        attribute_tokens(pair, "attention_x_gradient")


def test_attributions_share_backward_passes() -> None:
    pair = tiny_pair(tiny_model())
    (by_attention, found), _ = attribute_with_heads(pair)
    np.testing.assert_allclose(by_attention.source, attention_x_gradient(pair).source, atol=1e-6)
    alone = input_x_gradient(pair)
    np.testing.assert_allclose(found.source, alone.source, atol=1e-6)
    np.testing.assert_allclose(found.target, alone.target, atol=1e-6)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("method", GRADIENT_METHODS)
def test_one_token_is_attributed_as_all_are(decoder: str, method: str) -> None:
    pair = tiny_pair(tiny_model(decoder=decoder))
    if method not in known_methods(pair.model):
        return
    whole = attribute_tokens(pair, method)
    for at in range(pair.tgt_length):
        one = attribute_one(pair, method, at)
        for found, expected in ((one.source, whole.source), (one.target, whole.target)):
            rows = np.zeros_like(expected)
            rows[at] = expected[at]
            np.testing.assert_allclose(found, rows, atol=1e-5)


def test_one_token_needs_a_gradient_method() -> None:
    with pytest.raises(DataError, match="found 'occlusion'; use attention_x_gradient or input"):
        attribute_one(tiny_pair(tiny_model()), "occlusion", 0)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("residual", ["post_norm", "pre_norm"])
def test_integrated_gradients_are_complete_within_five_percent(decoder: str, residual: str) -> None:
    pair = tiny_pair(tiny_model(decoder=decoder, residual=residual))
    found = integrated_gradients(pair)
    assert found.gap is not None
    assert found.gap <= 0.05
    model = pair.model
    assert isinstance(model, EncoderDecoder)
    means = [
        model._embedding(side)(torch.arange(VOCABULARY)).mean(0).expand(1, count, -1)
        for side, count in (("src", 5), ("tgt", 6))
    ]
    src, tgt = pair.embed_source(), pair.embed_target()
    change = brute_force(pair, src, tgt) - brute_force(pair, *means)
    sums = torch.from_numpy(found.source.sum(1) + found.target.sum(1))
    gap = float((sums - change).abs().sum() / change.abs().sum())
    assert gap == pytest.approx(found.gap, abs=1e-3)


def test_integrated_gradients_of_a_linear_function_are_exact_with_the_fewest_points() -> None:
    points, weights = clenshaw_curtis(9)
    assert points[0] == 0.0
    assert points[-1] == 1.0
    assert sum(weights) == pytest.approx(1.0)
    for power in range(9):  # exact for polynomials of degree 8
        total = sum(weight * point**power for point, weight in zip(points, weights, strict=True))
        assert total == pytest.approx(1 / (power + 1), abs=1e-9)
    assert set(points) <= set(clenshaw_curtis(17)[0])


def test_a_gap_that_no_number_of_points_closes_is_reported() -> None:
    pair = tiny_pair(tiny_model(decoder="lstm(attention=additive, alignment=hard)"))
    found = integrated_gradients(pair, max_gap=0.0)
    assert found.gap is not None
    assert found.gap > 0


@pytest.mark.parametrize("decoder", DECODERS)
def test_occlusion_is_a_recomputation(decoder: str) -> None:
    pair = tiny_pair(tiny_model(decoder=decoder))
    model = pair.model
    assert isinstance(model, EncoderDecoder)
    src, tgt = pair.embed_source(), pair.embed_target()
    assert src is not None
    before, found = brute_force(pair, src, tgt), occlusion(pair)
    for name, side, attributed in (("src", src, found.source), ("tgt", tgt, found.target)):
        for position in range(side.size(1)):
            changed = side.clone()
            changed[0, position] = model._embedding(name)(torch.arange(VOCABULARY)).mean(0)
            both = (changed, tgt) if name == "src" else (src, changed)
            expected = before - brute_force(pair, *both)
            np.testing.assert_allclose(attributed[:, position], expected, atol=1e-5)


def zero_value(position_: int, _: object, __: object, output: Tensor) -> Tensor:
    """Set the values of one position to zero, in a projection whose last third or half they are."""
    output = output.clone()
    output[:, position_, -16:] = 0.0
    return output


def test_value_zeroing_is_a_run_without_the_values() -> None:
    """The values are set to zero in the output of the projections, by hooks of torch."""
    pair = tiny_pair(tiny_model())
    model, found = pair.model, value_zeroing(pair)
    src, tgt = pair.embed_source(), pair.embed_target()
    before = pair.hidden(src, tgt)[0]
    for position in range(5 + 6):
        handles = []
        for path, module in model.named_modules():
            is_self = path.endswith("self.query_key_value")
            on_source = path.startswith("encoder.") or path.endswith("cross.key_value")
            if not (is_self or path.endswith("cross.key_value")) or on_source != (position < 5):
                continue

            position_ = position if position < 5 else position - 5
            handles.append(module.register_forward_hook(functools.partial(zero_value, position_)))
        after = pair.hidden(src, tgt)[0]
        for handle in handles:
            handle.remove()
        expected = (1 - torch.cosine_similarity(before, after, dim=-1)).clamp_min(0)
        column = found.source[:, position] if position < 5 else found.target[:, position - 5]
        np.testing.assert_allclose(column, expected, atol=2e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("decoder", [*DECODERS, "lstm(attention=additive, alignment=monotonic)"])
def test_no_token_explains_an_earlier_one(method: str, decoder: str) -> None:
    pair = tiny_pair(tiny_model(decoder=decoder))
    if method == "value_zeroing" and decoder == "sru":
        pair = tiny_pair(tiny_model("transformer", decoder))
    if method == "attention_x_gradient" and decoder == "sru":
        pair = tiny_pair(tiny_model(decoder="sru + transformer"))
    found = attribute_tokens(pair, method)
    assert found.method == method
    assert found.source is not None
    assert found.source.shape == (6, 5)
    assert found.target.shape == (6, 6)
    assert np.array_equal(found.target, np.tril(found.target))
    assert np.isfinite(found.source).all()
    assert np.isfinite(found.target).all()
    assert found.signed == (method not in ("value_zeroing", "attention_x_gradient"))
    assert (found.gap is not None) == (method == "integrated_gradients")


@pytest.mark.parametrize("method", [each for each in METHODS if each != "attention_x_gradient"])
@pytest.mark.parametrize("decoder", ["transformer*2", "lstm + transformer"])
def test_a_language_model_has_only_its_own_tokens(method: str, decoder: str) -> None:
    pair = tiny_pair(tiny_language_model(decoder))
    found = attribute_tokens(pair, method)
    assert found.source is None
    assert found.target.shape == (6, 6)
    if method == "occlusion":
        tgt = pair.embed_target()
        before = brute_force(pair, None, tgt)
        tgt[0, 2] = pair.model.embedding(torch.arange(VOCABULARY)).mean(0)  # type: ignore[operator]
        expected = before - brute_force(pair, None, tgt)
        np.testing.assert_allclose(found.target[:, 2], expected, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_lm_attributes_to_both_sides(method: str) -> None:
    pair = tiny_pair(tiny_model("", architecture="prefix_lm"))
    found = attribute_tokens(pair, method)
    assert found.source is not None
    assert np.abs(found.source).max() > 1e-4
    assert np.abs(found.target).max() > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_it_runs_in_inference_mode_and_leaves_the_model_alone(method: str) -> None:
    model = tiny_model("transformer", "gru(attention=general)").requires_grad_(True)
    pair = tiny_pair(model)
    outside = attribute_tokens(pair, method)
    with torch.inference_mode():
        inside = attribute_tokens(tiny_pair(model), method)
    np.testing.assert_allclose(inside.source, outside.source, atol=1e-6)
    assert all(weight.grad is None for weight in model.parameters())


def test_models_that_choose_positions_are_named() -> None:
    assert attribution_note(tiny_pair(tiny_model())) == ""
    hard = tiny_model(decoder="lstm(attention=additive, alignment=monotonic)")
    assert attribution_note(tiny_pair(hard)).startswith(
        "MonotonicAlignment chooses positions by comparison, which has no gradient"
    )
    hashed = tiny_model("reformer(window=4, buckets=4)")
    assert attribution_note(tiny_pair(hashed)).startswith("LSHAttention chooses")


def test_unsupported_attribution_methods_are_rejected() -> None:
    pair = tiny_pair(tiny_model("lstm", "lstm"))
    with pytest.raises(
        DataError, match="value zeroing needs a model with attention; found a model without any"
    ):
        attribute_tokens(pair, "value_zeroing")
    with pytest.raises(DataError, match="found 'gradients'"):
        attribute_tokens(pair, "gradients")
