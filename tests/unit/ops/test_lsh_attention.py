"""LSH attention on sorted tokens, with and without torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dragoman.ops import lsh_attention
from dragoman.ops.lsh_attention import attend_sorted, hash_vectors, sort_by_bucket


@pytest.fixture(autouse=True)
def reset_torch_compile() -> Iterator[None]:
    """Reset torch.compile before each test."""
    lsh_attention.compile_with_fallback.cache_clear()
    yield
    lsh_attention.compile_with_fallback.cache_clear()


def run(tokens: int, *, causal: bool, torch_compile: bool) -> list[Tensor]:
    """Return the output and the gradients of two rounds."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, tokens, 16, requires_grad=True) for _ in range(3))
    order = sort_by_bucket(hash_vectors(query.detach(), torch.randn(2, 16, 2, 4), (8,)), 8)
    output = attend_sorted(
        query, key, value, order, window=8, causal=causal, torch_compile=torch_compile
    )
    return [output, *torch.autograd.grad(output.square().sum(), [query, key, value])]


def test_a_failing_torch_compile_is_logged_once_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: object, **_: object) -> object:
        def call(*_: object) -> None:
            raise RuntimeError("no compiler here")

        return call

    monkeypatch.setattr(torch, "compile", fail)
    for _ in range(2):
        for one, other in zip(
            run(40, causal=True, torch_compile=True),
            run(40, causal=True, torch_compile=False),
            strict=True,
        ):
            assert torch.equal(one, other)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2  # forward and backward pass
    assert all(
        "RuntimeError" in message and "set torch_compile=false" in message for message in messages
    )


def test_an_error_of_the_function_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)

    def wrong() -> None:
        raise ValueError("a mistake of ours")

    with pytest.raises(ValueError, match="a mistake of ours"):
        lsh_attention.compile_with_fallback(wrong)()


def test_out_of_memory_is_not_a_compiler_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def torch_compile() -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "compile", lambda function, **_: torch_compile)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        lsh_attention.compile_with_fallback(run)()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of its own doing
@pytest.mark.parametrize("causal", [True, False])
def test_compiled_functions_give_equal_results_at_any_length(
    causal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for tokens in (130, 257):
        for one, other in zip(
            run(tokens, causal=causal, torch_compile=True),
            run(tokens, causal=causal, torch_compile=False),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert "compiling failed" not in caplog.text


@pytest.mark.parametrize("causal", [True, False])
def test_visible_pairs_of_three_rounds_of_four_tokens(causal: bool) -> None:
    """By hand: a pair counts in the first round in which it is near, and never in two."""
    codes = torch.tensor([[10, 11, 90, 12], [50, 10, 51, 11], [1, 2, 3, 4]])  # rounds, tokens
    met = torch.zeros(4, 4, dtype=torch.int64)
    for round_ in range(3):
        scores = torch.zeros(1, 4, 4)
        exponentials, _, _ = lsh_attention.masked_exp(
            scores, codes[: round_ + 1].unsqueeze(1), codes[: round_ + 1].unsqueeze(1), 1, causal
        )
        met += (exponentials[0] > 0) * (round_ + 1)
    wanted = [[0, 1, 2, 0], [1, 0, 3, 1], [2, 3, 0, 3], [0, 1, 3, 0]]
    found = torch.tensor(wanted)
    assert torch.equal(met, found.tril() if causal else found)
