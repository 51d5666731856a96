"""Talking heads, against a loop written from the paper's definition."""

from __future__ import annotations

import pytest
import torch

from dragoman.attention import CrossAttention, SelfAttention, record
from dragoman.attention.relative_position_encodings import ShawRelativeKeys


def talking_heads(attention: SelfAttention | CrossAttention) -> None:
    """Build talking heads with random mixing matrices."""
    for matrix in (attention.mix_scores, attention.mix_weights):
        assert matrix is not None
        torch.nn.init.normal_(matrix)


def test_heads_talk_before_and_after_the_softmax() -> None:
    torch.manual_seed(0)
    attention = CrossAttention(8, 2, talking_heads=True).double()
    talking_heads(attention)
    x, memory = torch.randn(1, 3, 8, dtype=torch.float64), torch.randn(1, 5, 8, dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False]).view(1, 1, 5)
    query = attention.query(x)[0].view(3, 2, 4)
    key, value = (part[0].view(5, 2, 4) for part in attention.key_value(memory).chunk(2, -1))
    before, after = attention.mix_scores, attention.mix_weights
    assert before is not None
    assert after is not None
    weights = torch.zeros(2, 3, 5, dtype=torch.float64)
    for t in range(3):
        scores = torch.stack(
            [torch.stack([query[t, h] @ key[s, h] / 4**0.5 for s in range(4)]) for h in range(2)]
        )  # (H, S)
        mixed = torch.stack([sum(before[g, h] * scores[h] for h in range(2)) for g in range(2)])  # type: ignore[arg-type, misc]
        probabilities = mixed.softmax(-1)
        weights[:, t, :4] = torch.stack(
            [sum(after[g, h] * probabilities[h] for h in range(2)) for g in range(2)]
        )  # type: ignore[arg-type, misc]
    expected = attention.output(torch.einsum("hts,shd->thd", weights, value).flatten(1)).unsqueeze(
        0
    )
    with record(attention) as notes:
        torch.testing.assert_close(attention(x, memory, mask=mask), expected)
    torch.testing.assert_close(notes[""].weights[0], weights)  # as mixed
    torch.testing.assert_close(notes[""].weights @ notes[""].values, notes[""].output)


def test_heads_start_as_if_they_did_not_talk() -> None:
    torch.manual_seed(0)
    plain, talks = (
        SelfAttention(8, 2, relative_position=ShawRelativeKeys(4)),
        SelfAttention(8, 2, relative_position=ShawRelativeKeys(4), talking_heads=True),
    )
    talks.load_state_dict(plain.state_dict(), strict=False)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(talks(x, causal=True), plain(x, causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_masked_keys_are_hidden_from_all_heads(causal: bool) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(8, 4, kv_heads=2, window=1, talking_heads=True).double()
    talking_heads(attention)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4:] += 1.0
    torch.testing.assert_close(
        attention(changed, causal=causal)[:, :3], attention(x, causal=causal)[:, :3]
    )
