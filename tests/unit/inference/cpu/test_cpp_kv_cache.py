"""Parts of a decoding step on a CPU outside its kernels: equal to the reference bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dragoman.config import Config
from dragoman.decoding.search_interface import mask_invalid_tokens
from dragoman.inference.cpu.cpp_kv_cache import CppKVCache
from dragoman.inference.cpu.cpp_transformer import CachedPositionVectors
from dragoman.models.factory import build_model
from dragoman.text.special_tokens import BOS, EOS, PAD, UNK


@pytest.mark.parametrize(("step", "banned"), [(1, {PAD, BOS, EOS, UNK}), (2, {PAD, BOS, UNK})])
def test_only_allowed_tokens_keep_their_logits(step: int, banned: set[int]) -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    left = mask_invalid_tokens(
        logits.clone(), forced=np.array([-1, -1, EOS if step == 2 else 5]), step=step, min_length=2
    )
    for row in range(2):
        assert {each for each in range(7) if left[row, each] == -torch.inf} == banned
        assert all(left[row, each] == logits[row, each] for each in set(range(7)) - banned)
    assert left[2].isfinite().nonzero().tolist() == [[EOS if step == 2 else 5]]


@pytest.mark.parametrize("beams_per_sentence", [1, 3])
def test_each_beam_writes_to_its_own_cache_position(beams_per_sentence: int) -> None:
    sentences = np.arange(2)
    past_slots = (
        np.arange(2 * beams_per_sentence, dtype=np.int32)[:, None] % beams_per_sentence
    )  # what the first step wrote
    state = CppKVCache(
        torch.zeros(1, 2, 2, beams_per_sentence, 4),
        torch.zeros(1, 2, 5, 4),
        sentences,
        sentences,
        sentences,
        past_slots,
        sentences,
        beams_per_sentence=beams_per_sentence,
        filled=beams_per_sentence,
    )
    further = state.advance()
    assert further.past_slots.tolist() == [
        [beam, beams_per_sentence + beam] for _ in range(2) for beam in range(beams_per_sentence)
    ]
    assert further.past_slots.flags.c_contiguous
    assert further.past_slots.dtype == np.int32
    assert (further.filled, further.steps) == (2 * beams_per_sentence, 2)
    assert further.kv_cache.size(3) >= 2 * beams_per_sentence


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions": "learned"},
        {"positions": "none"},
        {"embedding_width": 8},
        {"fix_norm": True},
        {"scale_embeddings": False},
    ],
)
def test_the_position_table_equals_the_models_positions(settings: dict[str, object]) -> None:
    torch.manual_seed(0)
    shape = {
        "encoder": ["transformer"],
        "decoder": ["transformer"],
        "width": 32,
        "heads": 2,
        "ffn_width": 32,
    }
    model = build_model(
        Config().replace(model={**shape, **settings}).model, src_vocab_size=20, tgt_vocab_size=20
    ).eval()
    tokens = torch.tensor([5, 9, 19, 5])
    with torch.inference_mode():
        for position in (0, 7):
            expected = model.tgt_input(
                model._embedding("tgt")(tokens[:, None]), first=position
            ).squeeze(1)
            embedded = model._embedding("tgt")(tokens)
            added = CachedPositionVectors(model.tgt_input.positions).vectors(position, 1)
            assert torch.equal(embedded if added is None else embedded + added, expected)
