"""Labels of heads by their definitions; head ablation against changed weights and fresh runs."""

from __future__ import annotations

import numpy as np
import pytest

from dragoman.explain.attention_head_roles import rank_correlation, summarize_heads
from dragoman.explain.explanation import AttentionSite, HeadSummary, Token, TokenizedText

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


def test_no_head_is_labelled_rare_where_most_tokens_are_rare() -> None:
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
