"""What a step on a CPU does beside its kernels, in few calls: the same numbers as the longer ways, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.config import Config
from dragoman.decoding.stepping import restrict
from dragoman.engines.cpu.building import kernels
from dragoman.engines.cpu.compiled import Compiled
from dragoman.engines.cpu.recalling import Recall
from dragoman.models.build import build_model
from dragoman.text.specials import BOS, EOS, PAD, UNK


@pytest.mark.parametrize(("step", "banned"), [(1, {PAD, BOS, EOS, UNK}), (2, {PAD, BOS, UNK})])
def test_only_what_may_be_produced_is_left(step: int, banned: set[int]) -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    left = restrict(logits.clone(), forced=np.array([-1, -1, EOS if step == 2 else 5]), step=step, at_least=2)
    for row in range(2):
        assert {each for each in range(7) if left[row, each] == -torch.inf} == banned
        assert all(left[row, each] == logits[row, each] for each in set(range(7)) - banned)
    assert left[2].isfinite().nonzero().tolist() == [[EOS if step == 2 else 5]]


@pytest.mark.parametrize("fan", [1, 3])
def test_each_beam_writes_into_a_slot_of_its_own(fan: int) -> None:
    sentences = np.arange(2)
    past = np.arange(2 * fan, dtype=np.int32)[:, None] % fan  # what the first step wrote
    state = Recall(
        torch.zeros(1, 2, 2, fan, 4), torch.zeros(1, 2, 5, 4), sentences, sentences, sentences, past, sentences, fan=fan, filled=fan
    )
    further = state.advance()
    assert further.past.tolist() == [[beam, fan + beam] for _ in range(2) for beam in range(fan)]
    assert further.past.flags.c_contiguous
    assert further.past.dtype == np.int32
    assert (further.filled, further.steps) == (2 * fan, 2)
    assert further.own.size(3) >= 2 * fan


@pytest.mark.skipif(kernels() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    "settings",
    [{}, {"positions": "learned"}, {"positions": "none"}, {"embedding_width": 8}, {"fix_norm": True}, {"scale_embeddings": False}],
)
def test_a_step_begins_with_what_the_entrance_gives(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    shape = {"encoder": ["self"], "decoder": ["self"], "width": 32, "heads": 2, "feedforward": 32}
    model = build_model(Config().replace(model={**shape, **settings}).model, src_vocabulary=20, tgt_vocabulary=20).eval()
    tokens = torch.tensor([5, 9, 19, 5])
    with torch.inference_mode():
        for place in (0, 7):
            expected = model.tgt_entrance(model._embedding("tgt")(tokens[:, None]), first=place).squeeze(1)
            assert torch.equal(Compiled(model, kernels())._entered(tokens, place), expected)
