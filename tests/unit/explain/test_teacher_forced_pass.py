"""Gradients of all targets at once: both batching methods, groups, and finite log-odds."""

from __future__ import annotations

import pytest
import torch
from teacher_forcing_kit import tiny_language_model, tiny_model, tiny_pair

from dragoman.explain import teacher_forced_pass
from dragoman.explain.teacher_forced_pass import attention_parts


def test_both_batchings_of_the_backward_passes_agree() -> None:
    pair = tiny_pair(tiny_model().double(), tgt=7)
    embedded = pair.embed_source(), pair.embed_target()
    heads = {path: part.heads for path, part in attention_parts(pair.model).items()}
    for first, end in ((0, 3), (3, 7)):
        by_vmap, by_rows = (
            teacher_forced_pass._group_gradients(
                pair, *embedded, heads, first, end, by_rows=by_rows
            )
            for by_rows in (False, True)
        )
        torch.testing.assert_close(by_vmap, by_rows)
        assert by_vmap.tgt.shape == (end - first, end, 16)
        assert by_vmap.keys["decoder.1.cross"].shape[:2] == (end - first, 2)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("decoder", ["transformer*2", "gru(attention=dot)"])
def test_groups_of_targets_change_nothing(
    size: int, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tiny_pair(tiny_model(decoder=decoder).double(), tgt=7)
    embedded = pair.embed_source(), pair.embed_target()
    heads = {"encoder.0.self": 2}
    whole = teacher_forced_pass.target_gradients(pair, *embedded, heads)
    monkeypatch.setattr(teacher_forced_pass, "TARGETS_PER_PASS", size)
    parts = teacher_forced_pass.target_gradients(pair, *embedded, heads)
    torch.testing.assert_close(parts, whole)


def test_log_odds_are_exact_where_the_model_is_sure() -> None:
    model = tiny_language_model()
    with torch.no_grad():
        model.output_weight.mul_(500.0)
    pair = tiny_pair(model)
    with torch.no_grad():
        pair = pair._replace(tgt_out=model(pair.tgt_in)[0].argmax(-1))
        hidden = pair.hidden(None, pair.embed_target())
        log_odds = pair.log_odds(hidden)[0]
        logits = model.project(hidden)[0].double()
    best = logits.topk(2, dim=-1).values
    assert (pair.log_probs(hidden)[0] == 0.0).any()  # the probability is 1 in float32
    assert torch.isfinite(log_odds).all()
    sure = best[:, 0] - best[:, 1] > 50
    assert sure.any()
    torch.testing.assert_close(
        log_odds[sure].double(), (best[:, 0] - best[:, 1])[sure], rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("lengths", [(3, 9), (9, 3)])
def test_a_batch_of_copies_is_bounded_by_its_longer_side(
    lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice what the linear layers write for the longer side, and three tensors of logits."""
    model = tiny_model()
    pair = tiny_pair(model, src=lengths[0], tgt=lengths[1])
    written = [each.weight.size(0) for each in model.modules() if isinstance(each, torch.nn.Linear)]
    row = 4 * (2 * 9 * sum(written) + 3 * lengths[1] * model.output_weight.size(0))
    for budget, rows in ((5 * row, 5), (5 * row - 1, 4), (1, 1)):
        monkeypatch.setattr(teacher_forced_pass, "MAX_BATCH_BYTES", budget)
        assert pair.max_rows() == rows
