"""The miniature of every recipe learns to write words backwards, or forwards where it reads along,
and generates what it learnt.

In two forms: letters alone, and with a space between any two. A recipe that cannot is exempt in its
registry entry ("learns"). One recipe of each family learns short words quickly; all others, and
long words, are slow: `make test-slow`.
`bench/mini_recipes.py` does the same through the commands.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_kit import generate_greedy
from torch import Tensor

from dragoman.config import Config, read_config
from dragoman.data.collate import Batch
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.models.factory import build_model
from dragoman.recipes.catalogue import RECIPES, recipes_of
from dragoman.recipes.recipe_miniature import mini
from dragoman.registry import catalogue
from dragoman.tasks.translation import TranslationTask
from dragoman.text.special_tokens import BOS, EOS

QUICK = {
    "tiny",
    "su2021",
    "bahdanau2015",
    "gehring2017",
    "domhan2018_cnn_mh",
}  # one of each family
LETTERS, ENOUGH = 10, 0.9
SHORT, LONG = range(3, 5), range(4, 9)  # lengths of words
SPACE = 4 + LETTERS  # the id after the last letter's


def words(
    rows: int, generator: torch.Generator, lengths: range, *, backwards: bool, spaced: bool
) -> tuple[Tensor, Tensor]:
    """Return words of one random length and their targets, both with </s>."""
    length = int(torch.randint(lengths.start, lengths.stop, (1,), generator=generator))
    letters, end = (
        torch.randint(4, 4 + LETTERS, (rows, length), generator=generator),
        torch.full((rows, 1), EOS),
    )
    sides = letters, letters.flip(1) if backwards else letters
    if spaced:
        sides = tuple(
            torch.stack([side, torch.full_like(side, SPACE)], 2).flatten(1)[:, :-1]
            for side in sides
        )
    return torch.cat([sides[0], end], 1), torch.cat([sides[1], end], 1)


def batch(src: Tensor, tgt: Tensor) -> Batch:
    """Put words of one length together as the trainer gets them."""
    rows = src.size(0)
    sizes = np.array([[src.size(1), tgt.size(1)]] * rows)
    start = torch.full((rows, 1), BOS)
    return Batch(
        src=src,
        src_lengths=torch.from_numpy(sizes[:, 0]),
        tgt_in=torch.cat([start, tgt[:, :-1]], 1),
        tgt_out=tgt,
        tgt_lengths=torch.from_numpy(sizes[:, 1]),
        examples=np.arange(rows),
        sizes=sizes,
    )


@torch.no_grad()
def accuracy(
    model: EncoderDecoder,
    generator: torch.Generator,
    lengths: range,
    *,
    backwards: bool,
    spaced: bool,
) -> float:
    """Return the accuracy of greedy outputs on unseen words."""
    right = 0
    for _ in range(5):
        src, tgt = words(40, generator, lengths, backwards=backwards, spaced=spaced)
        right += int((generate_greedy(model, src, tgt.size(1)) == tgt).all(1).sum())
    model.train()
    return right / 200


def learn(config: Config, lengths: range, *, backwards: bool, spaced: bool) -> float:
    """Train with the miniature's settings until the accuracy is high enough."""
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, src_vocab_size=SPACE + 1, tgt_vocab_size=SPACE + 1).train()
    optimizer = catalogue("optimizer").load(config.train.optimizer)(model, config.train)
    rate = catalogue("schedule").load(config.train.schedule)
    generator = torch.Generator().manual_seed(config.train.seed)
    longest = 2 * lengths[-1] if spaced else lengths[-1] + 1
    rows, right, task = config.train.batch_tokens // longest, 0.0, TranslationTask(smoothing=0.0)
    for update in range(1, config.train.steps + 1):
        src, tgt = words(rows, generator, lengths, backwards=backwards, spaced=spaced)
        loss = task.loss(
            model, batch(src, tgt)
        )  # with what members add to it, and rewards where choices learn from them
        optimizer.zero_grad()
        (loss.total / loss.count).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(update, config.train, config.model.width)
        optimizer.step()
        if update % 100 == 0:
            right = accuracy(model, generator, lengths, backwards=backwards, spaced=spaced)
            if right >= ENOUGH:
                break
    return right


def test_the_quick_ones_are_of_every_family() -> None:
    assert {RECIPES[name].family for name in QUICK} == {
        RECIPES[name].family for name in recipes_of("translate")
    }


def check_learns(name: str, lengths: range, *, spaced: bool) -> None:
    """Check that a recipe's miniature learns words of these lengths."""
    reason = (RECIPES[name].exempt or {}).get("learns")
    if reason:
        pytest.skip(f"{name}: {reason}")
    config = read_config(recipe=name, scale=mini)
    walks = any(
        "monotonic" in block or "mocha" in block for block in config.model.decoder
    )  # never back: forwards only
    assert learn(config, lengths, backwards=not walks, spaced=spaced) >= ENOUGH


@pytest.mark.parametrize("name", sorted(QUICK))
def test_the_miniature_learns_short_words(name: str) -> None:
    check_learns(name, SHORT, spaced=False)


@pytest.mark.slow
@pytest.mark.parametrize("spaced", [False, True], ids=["plain", "spaced"])
@pytest.mark.parametrize("name", recipes_of("translate"))
def test_the_miniature_learns(name: str, spaced: bool) -> None:
    check_learns(name, LONG, spaced=spaced)
