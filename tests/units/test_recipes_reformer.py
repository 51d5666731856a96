"""The Reformer's recipes say what the paper's released settings say; their miniatures learn, and are drawn layer by layer."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from torch import Tensor

from dragoman.cli.drawing import draw_stack
from dragoman.config import from_dict, read_config, to_dict
from dragoman.models.build import build_model, describe
from dragoman.models.reformer import HashedLayer, Reformer
from dragoman.recipes import reformer
from dragoman.recipes.mini import mini
from dragoman.recipes.reformer import kitaev2020, kitaev2020_wmt
from dragoman.registry import catalogue
from dragoman.text.specials import BOS, EOS

NAMES = ["kitaev2020", "kitaev2020_wmt"]
STEPS = 300


def test_the_translation_model_has_the_released_numbers() -> None:
    """google/trax, reformer_wmt_ende.gin."""
    config = kitaev2020_wmt()
    assert (config.model.width, config.model.heads, config.model.feedforward, config.model.dropout) == (512, 8, 2048, 0.1)
    assert (config.train.beta1, config.train.beta2, config.train.epsilon, config.train.warmup) == (0.9, 0.98, 1e-9, 8000)
    rate = catalogue("schedule").load("noam")(8000, config.train, 512)
    assert rate == pytest.approx(0.088 * 8000**-0.5, rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_is_found_by_name_and_is_a_run_on_both_sides(name: str) -> None:
    config = read_config(recipe=name)
    assert config.problems() == []
    assert from_dict(to_dict(config)) == config
    with torch.device("meta"):
        model = build_model(config.model, src_vocabulary=100, tgt_vocabulary=100)
    for stack in (model.encoder, model.decoder):
        (run,) = (block for _, block in stack.blocks())
        assert isinstance(run, Reformer)
        assert run.depth == 6
        assert all(isinstance(layer, HashedLayer) == (name == "kitaev2020") for _, layer in run.layers())
        assert stack.norm is not None


def test_the_recipe_keeps_the_papers_rule_of_buckets() -> None:
    model = kitaev2020().model
    assert model.encoder == model.decoder == ("reformer(layers=6, rounds=4, buckets=64, window=64, chunks=4)",)
    assert 2 * model.max_positions // 64 == 64


def test_a_run_is_drawn_layer_by_layer() -> None:
    config = kitaev2020().model
    lines = draw_stack(describe(config, src_vocabulary=100, tgt_vocabulary=100), config)
    assert sum("layers 0.0 to 0.5, each" in line for line in lines) == 2
    assert sum("LSHAttention" in line for line in lines) == 2
    assert any("cross " in line and "CrossAttention" in line for line in lines)


def test_every_line_of_the_recipes_says_why() -> None:
    """A setting without a source is a superstition."""
    source = inspect.getsource(reformer)
    lines = source.splitlines()
    tree = ast.parse(source)
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant | ast.Tuple)]
    values += [value for node in ast.walk(tree) if isinstance(node, ast.Dict) for value in node.values]
    assert len(values) > 30
    for value in values:
        assert "#" in lines[value.end_lineno - 1], lines[value.end_lineno - 1]  # type: ignore[operator]


def sentences(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make sources that end in their end, and what they are backwards."""
    pieces = torch.randint(4, 12, (rows, 6), generator=generator)
    return torch.cat([pieces, torch.full((rows, 1), EOS)], 1), pieces.flip(1)


@pytest.mark.parametrize("name", ["kitaev2020", pytest.param("kitaev2020_wmt", marks=pytest.mark.slow)])
def test_the_miniature_learns_to_reverse(name: str) -> None:
    torch.manual_seed(0)
    config = mini(read_config(recipe=name))
    model = build_model(config.model, src_vocabulary=12, tgt_vocabulary=12)
    optimiser = torch.optim.Adam(model.parameters(), config.train.learning_rate, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = config.train.learning_rate * min(step / 30, (STEPS - step) / (STEPS - 30))
        src, tgt = sentences(48, generator)
        logits = model(src, torch.cat([torch.full((48, 1), BOS), tgt[:, :-1]], 1))
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tgt.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    model.eval()
    src, tgt = sentences(100, generator)
    with torch.inference_mode():
        state, tokens, output = model.start(model.encode(src)), torch.full((100,), BOS), []
        for _ in range(6):
            logits, state = model.step(tokens, state)
            tokens = logits.argmax(-1)
            output.append(tokens)
    assert (torch.stack(output, 1) == tgt).all(1).float().mean() >= 0.9
