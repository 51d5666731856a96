"""Rules of a language model's settings; those with a task are in
tests/unit/tasks/test_language_model.py.
"""

from __future__ import annotations

import pytest
from language_kit import config_of

from dragoman.models.block_catalogue import BLOCKS
from dragoman.models.language_model_config_checks import RECURRENT_BLOCKS


def test_recurrent_blocks_are_those_that_carry_a_state() -> None:
    assert {*RECURRENT_BLOCKS} == {name for name in BLOCKS if BLOCKS.load(name).has_recurrent_state}


@pytest.mark.parametrize("block", RECURRENT_BLOCKS)
def test_recurrent_blocks_need_models_without_absolute_positions(block: str) -> None:
    model = {"decoder": (block,), "positions": "sinusoidal"}
    problems = config_of("transformer").replace(model=model).problems()
    assert any(
        "found model.positions=sinusoidal; set model.positions=none" in problem
        for problem in problems
    ), problems


def test_messages_name_the_blocks_of_the_language_model_alone() -> None:
    model = {"decoder": ("gru",), "positions": "rotary"}
    problems = config_of("transformer").replace(model=model).problems()
    assert any("found gru; try sinusoidal, or none for RNNs" in each for each in problems), problems


def test_one_recurrent_block_is_enough() -> None:
    model = {"decoder": ("transformer", "gru"), "positions": "sinusoidal"}
    problems = config_of("transformer").replace(model=model).problems()
    assert any("state continues from segment to segment" in each for each in problems), problems


@pytest.mark.parametrize(("max_positions", "fits"), [(32, True), (31, False)])
def test_a_segment_may_be_as_long_as_the_learned_positions(max_positions: int, fits: bool) -> None:
    model = {"positions": "learned", "max_positions": max_positions}
    problems = config_of("transformer").replace(model=model, language={"segment": 32}).problems()
    assert any("found 32 and 31; raise" in each for each in problems) != fits
    assert any("language.segment must be" in each for each in problems) != fits


def test_recurrent_blocks_go_with_relative_positions_of_others() -> None:
    model = {"decoder": ("transformer", "gru"), "positions": "rotary"}
    problems = config_of("transformer").replace(model=model).problems()
    assert not any("state continues" in each for each in problems), problems
