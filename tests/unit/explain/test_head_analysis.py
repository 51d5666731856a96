"""Labels of heads by their definitions; head ablation against changed weights and fresh runs."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from teacher_forcing_kit import tiny_language_model, tiny_model, tiny_pair
from torch import Tensor

from dragoman.attention.hooks import record
from dragoman.errors import DataError
from dragoman.explain import teacher_forcing
from dragoman.explain.explanation import AttentionSite, HeadSummary, Token, TokenizedText
from dragoman.explain.head_analysis import (
    ablate_heads,
    attention_parts,
    estimate_head_effects,
    heads_switched_off,
    measure_head_effects,
    rank_correlation,
    summarize_heads,
)
from dragoman.explain.teacher_forcing import scaled_heads
from dragoman.models.encoder_decoder import EncoderDecoder

WORDS = ["the", " hou", "ses", ",", " the", " sea", "."]
RANKS = [0, 50, 60, 1, 0, 99, 2]


def text_of(words: list[str]) -> TokenizedText:
    tokens = [Token(at + 4, word, (0, 0), rank=RANKS[at]) for at, word in enumerate(words)]
    return TokenizedText(
        text="".join(words),
        tokens=[*tokens, Token(2, "</s>", (0, 0), special=True)],
        words=[(0, 1), (1, 3), (3, 4), (4, 5), (5, 6), (6, 7)],
    )


TEXT = text_of(WORDS)
LENGTH = len(TEXT.tokens)


def summary_of(weights: np.ndarray, kind: str = "self", **more: object) -> HeadSummary:
    group = {"self": "encoder", "cross": "cross"}[kind]
    query = "source" if kind == "self" else "target"
    site = AttentionSite("e0", "encoder.0.self", kind, group, 0, 1, query, "source")
    [found] = summarize_heads(
        [site],
        {"e0.w": weights[None].astype(np.float32)},
        TEXT,
        TEXT,
        ranks={"source": 100, "target": 100},
        **more,  # type: ignore[arg-type]
    )
    return found


def labels_of(weights: np.ndarray, kind: str = "self", **more: object) -> dict[str, float]:
    return dict(summary_of(weights, kind, **more).labels)


def onto(*keys: int) -> np.ndarray:
    """Return weights of which every row is spread over the same keys."""
    weights = np.zeros((LENGTH, LENGTH))
    weights[:, list(keys)] = 1 / len(keys)
    return weights


@pytest.mark.parametrize("distance", [-2, -1, 0, 1, 2])
def test_offset(distance: int) -> None:
    weights = np.full((LENGTH, LENGTH), 0.01)
    for row in range(LENGTH):
        weights[row, np.clip(row + distance, 0, LENGTH - 1)] = 1.0
    labels = labels_of(weights / weights.sum(1, keepdims=True))
    name = "offset 0" if not distance else f"offset {distance:+d}"
    assert labels[name] == pytest.approx(1.0)
    assert [label for label in labels if label.startswith("offset")] == [name]


def test_offset_needs_sixty_percent_of_the_rows() -> None:
    weights = np.zeros((LENGTH, LENGTH))
    for row in range(LENGTH):
        weights[row, row - 1 if 1 <= row <= 4 else (row * 3 + 2) % LENGTH] = 1.0
    assert not [label for label in labels_of(weights) if label.startswith("offset -1")]


def test_offset_needs_three_rows_where_it_could_be() -> None:
    """Only two of eight queries have a key six positions ahead, and both read it."""
    weights = np.full((LENGTH, LENGTH), 0.01)
    for row, key in enumerate([6, 7, 2, 5, 3, 5, 4, 0]):
        weights[row, key] = 1.0
    assert not [label for label in labels_of(weights) if label.startswith("offset")]


def test_of_equally_frequent_offsets_the_nearest_is_the_label() -> None:
    """Two of the three rows that could read +5 do, and four of the six that could read -2."""
    weights = np.full((LENGTH, LENGTH), 0.01)
    for row, key in enumerate([5, 6, 3, 3, 2, 3, 4, 5]):
        weights[row, key] = 1.0
    found = [each for each in labels_of(weights).items() if each[0].startswith("offset")]
    assert found == [("offset -2", pytest.approx(2 / 3))]


@pytest.mark.parametrize(
    ("name", "keys"),
    [("sink", [0, LENGTH - 1]), ("end", [LENGTH - 1]), ("punctuation", [3, 6]), ("rare", [5])],
)
def test_labels_of_keys(name: str, keys: list[int]) -> None:
    labels = labels_of(onto(*keys))
    assert labels[name] == pytest.approx(1.0)
    assert name not in labels_of(onto(1, 2, 4))


@pytest.mark.parametrize(("source", "target", "is_rare"), [(10, 10_000, True), (10_000, 10, False)])
def test_rare_keys_are_rare_in_the_vocabulary_of_their_side(
    source: int, target: int, is_rare: bool
) -> None:
    site = AttentionSite("x0", "decoder.0.cross", "cross", "cross", 0, 1, "target", "source")
    ranks = {"source": source, "target": target}
    [found] = summarize_heads([site], {"x0.w": onto(5)[None]}, TEXT, TEXT, ranks=ranks)
    assert ("rare" in dict(found.labels)) == is_rare
    # The decoder's inputs are the target's tokens, one position later.
    site = AttentionSite("d0", "decoder.0.self", "self", "decoder", 0, 1, "target", "target_in")
    [found] = summarize_heads([site], {"d0.w": onto(6)[None]}, TEXT, TEXT, ranks=ranks)
    assert ("rare" in dict(found.labels)) != is_rare


def test_queries_of_a_memory_are_the_tokens_that_were_read() -> None:
    site = AttentionSite(
        "d0", "decoder.0.self", "memory", "decoder", 0, 1, "target", "memory+target_in"
    )
    [found] = summarize_heads([site], {"d0.w": np.eye(LENGTH)[None]}, TEXT, TEXT)
    assert dict(found.labels)["same token"] == pytest.approx(1.0)


def test_a_head_that_reads_what_is_everywhere_has_no_label() -> None:
    """Where most tokens are rare, so is what any head reads."""
    rare = TokenizedText(
        TEXT.text, tokens=[*(Token(9, "x", (0, 0), rank=99),) * 7, TEXT.tokens[-1]]
    )
    site = AttentionSite("e0", "encoder.0.self", "self", "encoder", 0, 1, "source", "source")
    arrays = {"e0.w": onto(1, 2, 3)[None]}
    [found] = summarize_heads([site], arrays, rare, rare, ranks={"source": 100, "target": 100})
    assert "rare" not in dict(found.labels)


def test_same_token_and_same_word() -> None:
    weights = np.full((LENGTH, LENGTH), 1 / LENGTH)
    weights[0], weights[4] = onto(4)[0], onto(0)[0]  # the two "the"
    assert labels_of(weights)["same token"] == pytest.approx(1.0)
    assert "same word" not in labels_of(weights)
    weights = np.full((LENGTH, LENGTH), 1 / LENGTH)
    weights[1], weights[2] = onto(2)[0], onto(1)[0]  # the subwords of "houses"
    assert labels_of(weights)["same word"] == pytest.approx(1.0)
    assert "same token" not in labels_of(weights)
    assert "same word" not in labels_of(np.eye(LENGTH))  # a token itself is no other subword


def test_align_and_monotonic_are_labels_of_cross_attention() -> None:
    diagonal = np.eye(LENGTH)
    labels = labels_of(diagonal, "cross", attribution=diagonal)
    assert labels["align"] == labels["monotonic"] == pytest.approx(1.0)
    assert not [label for label in labels if label.startswith("offset")]
    assert "align" not in labels_of(diagonal, "cross", attribution=diagonal[::-1])
    assert "monotonic" not in labels_of(diagonal[::-1], "cross")
    assert "align" not in labels_of(diagonal, "cross")
    assert "monotonic" not in labels_of(diagonal)


def test_broad_and_focused() -> None:
    assert labels_of(np.full((LENGTH, LENGTH), 1 / LENGTH))["broad"] == pytest.approx(1.0)
    assert labels_of(np.eye(LENGTH))["focused"] == pytest.approx(0.0)
    assert not {"broad", "focused"} & set(labels_of(onto(1, 2)))


def test_causal_rows_count_only_the_keys_they_may_see() -> None:
    site = AttentionSite(
        "d0", "decoder.0.self", "self", "decoder", 0, 1, "target", "target_in", causal=True
    )
    weights = np.tril(np.ones((LENGTH, LENGTH)))
    weights /= weights.sum(1, keepdims=True)
    [found] = summarize_heads([site], {"d0.w": weights[None]}, TEXT, TEXT)
    assert dict(found.labels)["broad"] == pytest.approx(1.0)
    assert "end" not in dict(found.labels)
    first = np.zeros((LENGTH, LENGTH))
    first[:, 0] = 1.0
    [found] = summarize_heads([site], {"d0.w": first[None]}, TEXT, TEXT)
    assert dict(found.labels)["sink"] == pytest.approx(1.0)


def test_a_head_that_contributes_nothing_is_dead() -> None:
    site = AttentionSite("e0", "encoder.0.self", "self", "encoder", 0, 2, "source", "source")
    weights = np.stack([np.eye(LENGTH)] * 2)
    contributions = weights * np.asarray([1.0, 0.001])[:, None, None]
    living, dead = summarize_heads([site], {"e0.w": weights, "e0.c": contributions}, TEXT, TEXT)
    assert "dead" not in dict(living.labels)
    assert dict(dead.labels)["dead"] == pytest.approx(0.001, rel=0.01)


def test_entropy_and_distance_are_means_of_rows() -> None:
    assert summary_of(np.eye(LENGTH)).entropy == pytest.approx(0.0)
    assert summary_of(np.eye(LENGTH)).distance == pytest.approx(0.0)
    broad = summary_of(np.full((LENGTH, LENGTH), 1 / LENGTH))
    assert broad.entropy == pytest.approx(np.log(LENGTH))
    shifted = np.roll(np.eye(LENGTH), 1, axis=1)
    assert summary_of(shifted[:-1]).distance == pytest.approx(1.0)
    assert summary_of(np.zeros((LENGTH, LENGTH)), "cross").entropy == 0.0  # a head that stopped


def test_sets_have_no_distance() -> None:
    site = AttentionSite("e0", "x", "set", "encoder", 0, 1, "element", "element", ordered=False)
    [found] = summarize_heads([site], {"e0.w": np.eye(3)[None]}, TEXT, TEXT)
    assert found.distance is None
    assert not [name for name, _ in found.labels if name.startswith("offset")]


def test_rank_correlation_against_its_closed_form() -> None:
    one = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    other = np.array([1.0, 2.0, 3.0, 5.0, 4.0])
    # Without ties: 1 - 6 sum d^2 / (n (n^2 - 1)).
    assert rank_correlation(one, other) == pytest.approx(1 - 6 * (4 + 1 + 1) / (5 * 24))
    assert rank_correlation(one, -one) == pytest.approx(-1.0)
    assert rank_correlation(np.array([1, 1, 2]), np.array([1, 1, 9])) == pytest.approx(1.0)
    tied = rank_correlation(np.array([1, 1, 2, 3]), np.array([1, 2, 3, 4]))
    assert tied == pytest.approx(0.9487, abs=1e-4)
    assert rank_correlation(one, np.zeros(5)) is None


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
    forced = tiny_pair(model)
    effect = ablate_heads(forced, {path: [head]})
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_submodule(path).output.weight[:, 8 * head : 8 * head + 8] = 0.0  # type: ignore[union-attr, index]
        expected = tiny_pair(changed).baseline() - forced.baseline()
    np.testing.assert_allclose(effect, expected, atol=1e-5)
    assert np.abs(effect).max() > 1e-3


def test_all_heads_off_leave_the_bias_alone() -> None:
    model = tiny_model()
    forced, seen = tiny_pair(model), list[Tensor]()
    cross = model.get_submodule("decoder.1.cross")
    handle = cross.register_forward_hook(lambda _, __, output: seen.append(output))
    ablate_heads(forced, {"decoder.1.cross": [0, 1]})
    handle.remove()
    assert torch.equal(seen[-1], cross.output.bias.expand(1, 6, -1))  # type: ignore[union-attr, operator]
    assert not torch.equal(seen[0], seen[-1])


def test_the_context_vector_of_an_rnn_is_zero() -> None:
    model = tiny_model("bilstm", "gru(attention=dot, decoder=bahdanau)")
    forced = tiny_pair(model)
    with record(model) as records, heads_switched_off(model, {"decoder.0.cross": [0]}):
        forced.baseline()
    assert not records["decoder.0.cross"].output.any()
    assert np.abs(ablate_heads(forced, {"decoder.0.cross": [0]})).max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_nothing_off_is_the_baseline_bit_for_bit(name: str) -> None:
    model = MODELS[name]()
    forced = tiny_pair(model)
    assert not ablate_heads(forced, {}).any()
    path = next(iter(attention_parts(model)))
    assert not ablate_heads(forced, {path: []}).any()
    with record(model):
        recorded = forced.baseline()
    with heads_switched_off(model, {path: []}, sources=forced.src_length):
        assert torch.equal(forced.baseline(), recorded)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_bytes", [1, 400_000_000])
def test_batched_effects_are_those_of_fresh_runs(
    name: str, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_forcing, "MAX_BATCH_BYTES", max_bytes)
    model = MODELS[name]()
    forced = tiny_pair(model)
    parts = attention_parts(model)
    found = list(measure_head_effects(forced))
    assert sorted((each.path, each.head) for each in found) == sorted(
        (path, head) for path, part in parts.items() for head in range(part.heads)
    )
    for each in found:
        np.testing.assert_allclose(
            each.changes, ablate_heads(forced, {each.path: [each.head]}), atol=1e-5
        )
        assert each.total == pytest.approx(float(each.changes.sum()))


@pytest.mark.parametrize("name", MODELS)
def test_estimates_take_the_log_odds_for_linear(name: str) -> None:
    model = MODELS[name]().double()
    forced, step = tiny_pair(model), 1e-6
    estimates = estimate_head_effects(forced)

    def log_odds() -> Tensor:
        log_probs = forced.baseline()
        return log_probs - torch.log(-torch.expm1(log_probs))

    for path, part in attention_parts(model).items():
        for head in range(part.heads):
            values = []
            for change in (step, -step, 0.0):
                scale = torch.ones(1, part.heads, dtype=torch.float64)
                scale[0, head] += change
                with scaled_heads(model, {path: scale}, sources=forced.src_length):
                    values.append(log_odds())
            slopes, before = (values[0] - values[1]) / (2 * step), values[2]
            expected = torch.sigmoid(before - slopes).log() - torch.sigmoid(before).log()
            assert estimates[path][head] == pytest.approx(float(expected.sum()), abs=1e-4)


def test_a_prefix_lms_parts_make_up_its_attention() -> None:
    model = tiny_model("", architecture="prefix_lm")
    forced = tiny_pair(model)
    assert list(attention_parts(model)) == [
        *("encoder.0.self", "encoder.1.self", "decoder.0.cross", "decoder.1.cross"),
        *("decoder.0.self", "decoder.1.self"),
    ]
    names = ("encoder.0.self", "decoder.0.cross", "decoder.0.self")
    whole = copy.deepcopy(model)
    with torch.no_grad():
        whole.get_submodule("decoder.0.self").output.weight[:, :8] = 0.0  # type: ignore[union-attr, index]
        expected = tiny_pair(whole).baseline() - forced.baseline()
    np.testing.assert_allclose(
        ablate_heads(forced, {name: [0] for name in names}), expected, atol=1e-5
    )
    with record(model, ["decoder.0.self"]) as records:
        forced.baseline()
        with heads_switched_off(model, {"decoder.0.cross": [1]}, sources=forced.src_length):
            forced.baseline()
    before, after = (each.weights[0].clone() for each in records.calls("decoder.0.self"))
    assert not after[1, 5:, :5].any()  # from target to source
    before[1, 5:, :5] = 0.0
    assert torch.equal(after, before)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "language model"])
def test_decoding_step_by_step_honours_what_is_off(name: str) -> None:
    model = MODELS[name]()
    forced = tiny_pair(model)
    assert isinstance(model, EncoderDecoder)
    assert forced.src is not None
    parts = attention_parts(model)
    off = {path: [part.heads - 1] for path, part in parts.items()}
    with torch.no_grad(), heads_switched_off(model, off, sources=forced.src_length):
        expected = model(forced.src, forced.tgt_in)[0]
        state = model.start(model.encode(forced.src))
        for position in range(forced.tgt_length):
            logits, state = model.step(forced.tgt_in[:, position], state)
            torch.testing.assert_close(logits[0], expected[position], atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(model(forced.src, forced.tgt_in)[0], expected, atol=1e-3)


def test_a_model_without_attention_has_no_heads() -> None:
    forced = tiny_pair(tiny_model("lstm", "lstm"))
    assert estimate_head_effects(forced) == {}
    assert list(measure_head_effects(forced)) == []
    with pytest.raises(DataError, match=r"found 'decoder\.0\.cross'; its attentions are none"):
        ablate_heads(forced, {"decoder.0.cross": [0]})


def test_heads_that_do_not_exist_are_named() -> None:
    forced = tiny_pair(tiny_model())
    with pytest.raises(DataError, match=r"from 0 to 1; found 2; heads are counted from 0"):
        ablate_heads(forced, {"decoder.0.cross": [0, 2]})
    with pytest.raises(DataError, match=r"found 'decoder\.7\.cross'; its attentions are encoder"):
        ablate_heads(forced, {"decoder.7.cross": [0]})


@pytest.mark.parametrize(("agreeing", "is_label"), [(4, False), (5, True)])
def test_align_needs_sixty_percent_of_the_rows(agreeing: int, is_label: bool) -> None:
    attribution = np.eye(LENGTH)
    weights = np.eye(LENGTH)
    weights[agreeing:] = np.roll(weights, 1, axis=1)[agreeing:]
    labels = labels_of(weights, "cross", attribution=attribution)
    assert ("align" in labels) == is_label


@pytest.mark.parametrize(("mass", "is_label"), [(0.45, False), (0.55, True)])
def test_labels_of_keys_need_half_of_the_weight(mass: float, is_label: bool) -> None:
    weights = mass * onto(3, 6) + (1 - mass) * onto(1, 2, 4)
    assert ("punctuation" in labels_of(weights)) == is_label


@pytest.mark.parametrize(("mass", "is_label"), [(0.53, False), (0.6, True)])
def test_labels_of_keys_need_one_and_a_half_times_uniform_weight(
    mass: float, is_label: bool
) -> None:
    """Three of eight tokens are rare: uniform weights would give them 0.375."""
    site = AttentionSite("e0", "encoder.0.self", "self", "encoder", 0, 1, "source", "source")
    weights = mass * onto(1, 2, 5) + (1 - mass) * onto(3, 4)
    [found] = summarize_heads([site], {"e0.w": weights[None]}, TEXT, TEXT, ranks={"source": 50})
    assert ("rare" in dict(found.labels)) == is_label


@pytest.mark.parametrize(("ranks", "is_label"), [(66, True), (70, False)])
def test_rare_tokens_are_the_rarest_tenth(ranks: int, is_label: bool) -> None:
    site = AttentionSite("e0", "encoder.0.self", "self", "encoder", 0, 1, "source", "source")
    arrays = {"e0.w": onto(2)[None]}
    [found] = summarize_heads([site], arrays, TEXT, TEXT, ranks={"source": ranks})
    assert ("rare" in dict(found.labels)) == is_label


@pytest.mark.parametrize(
    ("order", "is_label"), [([2, 1, 0, 3, 4, 5, 6, 7], True), ([2, 1, 0, 3, 6, 5, 4, 7], False)]
)
def test_monotonic_heads_have_a_rank_correlation_of_nine_tenths(
    order: list[int], is_label: bool
) -> None:
    """Exchanging two tokens at a distance of two costs 6 * 8 / 504."""
    assert ("monotonic" in labels_of(np.eye(LENGTH)[order], "cross")) == is_label


@pytest.mark.parametrize(
    ("keys", "expected"),
    [((1,), {"focused"}), ((1, 2), set()), ((0, 1, 2, 3, 4), set()), (range(1, 7), {"broad"})],
)
def test_thresholds_of_entropy(keys: tuple[int, ...], expected: set[str]) -> None:
    assert {"broad", "focused"} & set(labels_of(onto(*keys))) == expected


@pytest.mark.parametrize(("fraction", "is_dead"), [(0.005, True), (0.015, False)])
def test_a_dead_head_has_less_than_a_hundredth_of_the_contributions(
    fraction: float, is_dead: bool
) -> None:
    site = AttentionSite("e0", "encoder.0.self", "self", "encoder", 0, 2, "source", "source")
    shape = (LENGTH, LENGTH)
    contributions = np.stack([np.full(shape, fraction), np.full(shape, 1 - fraction)])
    arrays = {site.tensor: np.stack([onto(1)] * 2), site.contribution: contributions}
    first, second = summarize_heads([site], arrays, TEXT, TEXT)
    assert ("dead" in dict(first.labels)) == is_dead
    assert "dead" not in dict(second.labels)
