"""Attention layers used alone: pooling and self-attention by any score, against loops, and errors
for invalid input.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dragoman.attention
from dragoman.attention import (
    AdditiveScore,
    AttentionPooling,
    CrossAttention,
    DotScore,
    GeneralScore,
    LocalMonotonicAlignment,
    Mechanism,
    NormedAdditiveScore,
    Score,
    SelfAttention,
    SequenceSelfAttention,
    Softmax,
    StructuredPooling,
    edit,
    masks,
    overlap_penalty,
    record,
)
from dragoman.errors import DragomanError

ROOT = Path(__file__).resolve().parents[3]
D, LENGTHS = 4, (5, 3)
MASK = torch.tensor([[position < length for position in range(5)] for length in LENGTHS])
SCORES: dict[str, Callable[[], Score]] = {
    "additive": lambda: AdditiveScore(query_width=D, key_width=D, score_width=6),
    "normed": lambda: NormedAdditiveScore(query_width=D, key_width=D, score_width=6),
    "general": lambda: GeneralScore(query_width=D, key_width=D),
}


def sequences() -> Tensor:
    return torch.randn(2, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def pooling(hops: int = 3) -> StructuredPooling:
    torch.manual_seed(0)
    return StructuredPooling(D, hops=hops, score_width=6, bias=True).double()


def self_attention(score: str, window: int = 0) -> SequenceSelfAttention:
    torch.manual_seed(0)
    return SequenceSelfAttention(SCORES[score](), window=window).double()


def softmax(numbers: list[float]) -> list[float]:
    parts = [math.exp(number - max(numbers)) for number in numbers]
    return [part / sum(parts) for part in parts]


@torch.no_grad()
def test_structured_pooling_is_the_papers_equation() -> None:
    layer, x = pooling(), sequences()
    vectors, weights = layer(x, mask=MASK)
    first, bias, second = layer.hidden.weight, layer.hidden.bias, layer.queries.weight
    for row, length in enumerate(LENGTHS):
        for hop in range(3):
            energies = [
                float(second[hop] @ torch.tanh(first @ x[row, s] + bias)) for s in range(length)
            ]
            expected = softmax(energies)
            wanted = sum(key_weight * x[row, s] for s, key_weight in enumerate(expected))
            torch.testing.assert_close(vectors[row, hop], wanted)
            assert weights[row, hop].tolist() == pytest.approx([*expected, *[0.0] * (5 - length)])
    assert vectors.shape == (2, 3, D)


@torch.no_grad()
def test_only_pooling_with_one_query_has_a_bias_by_default() -> None:
    assert StructuredPooling(4, hops=2).hidden.bias is None
    assert AttentionPooling(4).hidden.bias is not None


def test_attention_pooling_is_one_hop_and_the_mean_with_zero_queries() -> None:
    torch.manual_seed(0)
    layer, x = AttentionPooling(D).double(), sequences()
    vectors, weights = layer(x, mask=MASK)
    assert (vectors.shape, weights.shape) == ((2, D), (2, 5))
    energy = torch.tanh(x @ layer.hidden.weight.T + layer.hidden.bias) @ layer.queries.weight[0]
    wanted = energy.masked_fill(~MASK, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, wanted)
    torch.testing.assert_close(vectors, torch.einsum("bs,bsd->bd", wanted, x))
    nn.init.zeros_(layer.queries.weight)
    torch.testing.assert_close(layer(x).vectors, x.mean(dim=1))


def test_padding_and_other_rows_do_not_matter_to_pooling() -> None:
    layer, x = pooling(), sequences()
    together = layer(x, mask=MASK).vectors
    torch.testing.assert_close(layer(x[1:, :3]).vectors, together[1:])
    changed = x.clone()
    changed[1, 3:] = 1e6
    changed[0] = 7.0
    torch.testing.assert_close(layer(changed, mask=MASK).vectors[1], together[1])


def test_nothing_to_pool_gives_zeros_and_finite_gradients() -> None:
    layer, x = pooling(), sequences().requires_grad_()
    vectors, weights = layer(x, mask=torch.zeros_like(MASK))
    assert not vectors.any()
    assert not weights.any()
    (vectors.sum() + overlap_penalty(weights).sum()).backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_gradients_of_pooling_and_its_penalty_equal_finite_differences(mask: Tensor | None) -> None:
    layer, x = pooling(2), sequences().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, mask=mask).vectors, (x,))
    assert torch.autograd.gradcheck(lambda x: overlap_penalty(layer(x, mask=mask).weights), (x,))
    layer(x, mask=mask).vectors.square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters()
    )


def test_the_penalty_is_a_frobenius_norm() -> None:
    weights = torch.rand(2, 3, 5, dtype=torch.float64).softmax(-1)
    for row, found in enumerate(overlap_penalty(weights)):
        gap = weights[row] @ weights[row].T - torch.eye(3, dtype=torch.float64)
        assert float(found) == pytest.approx(float(torch.linalg.matrix_norm(gap, "fro")) ** 2)
    assert overlap_penalty(torch.eye(3).unsqueeze(0)).tolist() == [0.0]  # each its own position
    same = torch.zeros(1, 2, 3)
    same[:, :, 0] = 1
    assert overlap_penalty(same).tolist() == [2.0]  # two that attend to one position


def test_the_penalty_of_self_attention_counts_no_padding() -> None:
    layer, x = self_attention("additive"), sequences()
    together = overlap_penalty(layer(x, mask=MASK).weights, rows=MASK)
    alone = overlap_penalty(layer(x[1:, :3]).weights)
    torch.testing.assert_close(together[1:], alone)


def test_the_penalty_drives_hops_apart() -> None:
    layer, x = pooling(2), sequences()
    optimizer = torch.optim.Adam(layer.parameters(), 0.05)
    penalties = []
    for _ in range(60):
        penalty = overlap_penalty(layer(x, mask=MASK).weights).mean()
        optimizer.zero_grad()
        penalty.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        penalties.append(penalty.item())
    assert penalties[-1] < penalties[0] / 4


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 2])
@pytest.mark.parametrize("score", SCORES)
def test_self_attention_by_any_score_is_a_loop_over_the_window(
    score: str, window: int, causal: bool
) -> None:
    layer, x = self_attention(score, window), sequences()
    context, weights = layer(x, mask=MASK, causal=causal)
    energies = layer.score(x, layer.score.prepare(x))
    for row, length in enumerate(LENGTHS):
        for t in range(5):
            seen = [
                s
                for s in range(length)
                if (not window or abs(s - t) <= window) and not (causal and s > t)
            ]
            expected = (
                dict(zip(seen, softmax([float(energies[row, t, s]) for s in seen]), strict=True))
                if seen
                else {}
            )
            assert weights[row, t].tolist() == pytest.approx(
                [expected.get(s, 0.0) for s in range(5)]
            )
            wanted = sum(
                (key_weight * x[row, s] for s, key_weight in expected.items()),
                torch.zeros(D, dtype=torch.float64),
            )
            torch.testing.assert_close(context[row, t], wanted)


@torch.no_grad()
def test_additive_and_multiplicative_are_the_written_equations() -> None:
    x = sequences()
    additive, general = self_attention("additive"), self_attention("general")
    energy = torch.empty(5, 5, dtype=torch.float64)
    score = additive.score
    for t in range(5):
        for s in range(5):
            hidden = torch.tanh(score.query_proj.weight @ x[0, t] + score.key_proj.weight @ x[0, s])  # type: ignore[operator, union-attr]
            energy[t, s] = score.energy.weight[0] @ hidden  # type: ignore[index, union-attr]
    torch.testing.assert_close(additive(x).weights[0], energy.softmax(-1))
    matrix = general.score.key_proj.weight  # type: ignore[union-attr]
    torch.testing.assert_close(general(x).weights[0], (x[0] @ matrix @ x[0].T).softmax(-1))  # type: ignore[operator]


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("score", SCORES)
def test_self_attention_ignores_padding_and_other_rows(score: str, window: int) -> None:
    layer, x = self_attention(score, window), sequences()
    together = layer(x, mask=MASK).context
    torch.testing.assert_close(
        layer(x[1:, :3]).context, together[1:, :3]
    )  # neither other rows nor padding matter
    changed = x.clone()
    changed[1, 3:] = 1e6
    torch.testing.assert_close(layer(changed, mask=MASK).context[1, :3], together[1, :3])
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, mask=MASK, causal=True).context, (x,))
    layer(x).context.square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in layer.parameters()
    )


@pytest.mark.parametrize("recorded", [False, True])
@torch.no_grad()
def test_beams_attend_to_their_own_sentence(recorded: bool) -> None:
    torch.manual_seed(0)
    layer = Mechanism(SCORES["additive"](), Softmax()).double()
    keys, query = sequences(), torch.randn(6, 1, D, dtype=torch.float64)  # 3 beams a sentence
    every = {"key": keys.repeat_interleave(3, 0), "value": keys.repeat_interleave(3, 0)}
    mask = MASK.repeat_interleave(3, 0)
    expected = layer(query=query, **every, mask=mask)
    prepared = layer.prepare(key=keys, value=keys, mask=MASK)
    if recorded:
        with record(layer) as notes:
            found, _ = layer.step(query, prepared, {"mask": mask})
        torch.testing.assert_close(notes[""].weights.squeeze(1), expected.weights)
        assert notes[""].values.shape == (6, 1, 5, D)  # by row, not by sentence
    else:
        found, _ = layer.step(query, prepared, {"mask": mask})
    torch.testing.assert_close(found.context, expected.context)
    torch.testing.assert_close(found.weights, expected.weights)


def test_the_new_layers_are_recorded_and_edited() -> None:
    model = nn.ModuleDict({"near": self_attention("general", 1), "pool": pooling()})
    x = sequences()

    def run() -> Tensor:
        return model["pool"](model["near"](x, mask=MASK).context, mask=MASK).vectors

    before = run()
    with record(model) as notes:
        run()
    assert set(notes) == {"near", "pool"}
    for note in notes.values():
        torch.testing.assert_close(note.weights @ note.values, note.output)
    assert notes["pool"].weights.shape == (2, 1, 3, 5)
    with edit(model, {"pool": torch.zeros_like}):
        assert not run().any()
    torch.testing.assert_close(run(), before)


X, MEMORY = torch.zeros(2, 5, 8), torch.zeros(2, 3, 6)
ATTENTION, CROSS = SelfAttention(8, 2), CrossAttention(8, 2, memory_width=6)
MECHANISM = Mechanism(AdditiveScore(query_width=8, key_width=6, score_width=4), Softmax())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: SelfAttention(10, 4),
            "found 4 heads and width 10; use 2 or 5 heads, or set head_width",
        ),
        (lambda: SelfAttention(8, 0), "found 0 heads and width 8"),
        (
            lambda: SelfAttention(8, 4, kv_heads=3),
            "found 4 heads and kv_heads=3; use kv_heads=2 or 4",
        ),
        (lambda: ATTENTION(X[0]), "(B, T, D); found shape (5, 8); add a batch axis"),
        (
            lambda: ATTENTION(X[..., :6]),
            "width 8, as the attention was built; found shape (2, 5, 6); build it with width 6",
        ),
        (
            lambda: ATTENTION(X, mask=torch.ones(2, 5)),
            "must be boolean; found torch.float32; use a boolean mask",
        ),
        (
            lambda: ATTENTION(X, mask=torch.ones(2, 5, dtype=torch.long)),
            "found torch.int64; use a boolean mask, True for",
        ),
        (
            lambda: ATTENTION(X, mask=MASK),
            "broadcast to (B, T, S), here (2, 5, 5); found shape (2, 5); add an axis for the "
            "queries",
        ),
        (
            lambda: ATTENTION(X, mask=masks.causal(4)),
            "found shape (4, 4); make it with dragoman.attention.masks",
        ),
        (lambda: ATTENTION(X, mask=torch.ones(5, dtype=torch.bool)), "found shape (5,)"),
        (
            lambda: CROSS(X, X),
            "a memory must have width 6, as the attention was built; found shape (2, 5, 8); "
            "build the attention with memory_width=8",
        ),
        (
            lambda: CROSS(X, MEMORY[:1]),
            "a sequence and its memory must have equal batch sizes; found (2,) and (1,)",
        ),
        (
            lambda: CROSS(X, MEMORY, mask=torch.ones(2, 4, dtype=torch.bool)),
            "here (2, 5, 3); found shape (2, 4)",
        ),
        (
            lambda: MECHANISM(query=X, key=X, value=X),
            "keys must have width 6, as the attention was built; found shape (2, 5, 8); "
            "build the score with key_width=8",
        ),
        (
            lambda: MECHANISM(query=MEMORY, key=MEMORY, value=MEMORY),
            "queries must have width 8, as the attention was built; found shape (2, 3, 6)",
        ),
        (
            lambda: MECHANISM(query=X, key=MEMORY, value=X),
            "keys and values must have equal batch sizes and lengths; found (2, 3) and (2, 5)",
        ),
        (
            lambda: MECHANISM(query=X[:1], key=MEMORY, value=MEMORY),
            "queries and keys must have equal batch sizes; found (1,) and (2,)",
        ),
        (
            lambda: MECHANISM(
                query=X, key=MEMORY, value=MEMORY, mask=torch.ones(2, 1, 3, dtype=torch.bool)
            ),
            "must be (B, S), here (2, 3); found shape (2, 1, 3); make it from the lengths",
        ),
        (
            lambda: MECHANISM(query=X, key=MEMORY, value=MEMORY, mask=torch.ones(2, 3)),
            "must be boolean; found torch.float32",
        ),
        (
            lambda: Mechanism(DotScore(query_width=8, key_width=6), LocalMonotonicAlignment()),
            "equal width; found 8 and 6",
        ),
        (
            lambda: AttentionPooling(8)(X, mask=torch.ones(5, 2, dtype=torch.bool)),
            "(B, S), here (2, 5); found shape (5, 2)",
        ),
        (lambda: AttentionPooling(8)(MEMORY), "a sequence to pool must have width 8"),
        (lambda: StructuredPooling(8, hops=0), "at least one hop; found hops=0"),
        (lambda: overlap_penalty(torch.zeros(2, 5)), "(B, R, S); found shape (2, 5)"),
        (
            lambda: overlap_penalty(torch.zeros(2, 3, 5), rows=MASK),
            "here (2, 3); found shape (2, 5)",
        ),
        (
            lambda: SequenceSelfAttention("additive"),
            "a score must be a Score; found 'additive'; build one",
        ),  # type: ignore[arg-type]
        (
            lambda: SequenceSelfAttention(GeneralScore(query_width=8, key_width=6)),
            "equal query_width and key_width; found 8 and 6",
        ),
        (
            lambda: SequenceSelfAttention(DotScore(query_width=8, key_width=8), window=-1),
            "found window=-1",
        ),
        (
            lambda: SequenceSelfAttention(DotScore(query_width=8, key_width=8))(MEMORY),
            "a sequence must have width 8",
        ),
    ],
)
def test_invalid_input_raises_a_clear_error(call: object, message: str) -> None:
    with pytest.raises(DragomanError) as caught:
        call()  # type: ignore[operator]
    assert message in str(caught.value)


def test_masks_of_all_broadcastable_shapes_are_accepted() -> None:
    for mask in (
        torch.ones(5, 5),
        torch.ones(1, 5),
        torch.ones(2, 1, 5),
        torch.ones(2, 5, 5),
        torch.ones(2, 2, 5, 5),
        torch.ones(1, 1, 1, 5),
    ):
        assert ATTENTION(X, mask=mask.bool()).shape == X.shape


def test_the_public_names_are_one_list() -> None:
    """What a type checker sees, what is fetched, and what is listed are the same, and all of it can
    be had.
    """
    source = (ROOT / "dragoman" / "attention" / "__init__.py").read_text(encoding="utf-8")
    typed = {
        alias.asname
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert typed == set(dragoman.attention.__all__) == set(dir(dragoman.attention))
    for name in dragoman.attention.__all__:
        assert getattr(dragoman.attention, name).__doc__, name
    assert issubclass(dragoman.attention.AdditiveScore, Score)
    with pytest.raises(
        AttributeError, match="no attribute 'AttentionPoling'; did you mean AttentionPooling"
    ):
        _ = dragoman.attention.AttentionPoling


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, dragoman.attention; print('torch' in sys.modules, 'AttentionPooling' in "
        "dir(dragoman.attention))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.split() == ["False", "True"]
