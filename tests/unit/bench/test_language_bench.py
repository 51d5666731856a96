"""The bench of language models runs at its smallest size, and compares models of one size."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dragoman.config import read_config
from dragoman.models.factory import count_parameters

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.language")


@pytest.mark.parametrize("member", ["words", "xl"])
def test_it_runs_and_prints_json_for_scripts(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    member: str,
) -> None:
    if member == "words":
        pytest.importorskip("transformers")
    options = ["--size", "tiny", "--steps", "1", "--device", "cpu", "--no-compile"]
    monkeypatch.setattr(sys, "argv", ["bench/language.py", *options, "--only", member])
    bench.main()
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [row["system"] for row in found["rows"]] == [
        f"{member}: ours, eager",
        f"{member}: plain",
    ]
    assert all(row["tokens_s"] > 0 for row in found["rows"])


@pytest.mark.parametrize("member", ["gpt", "words", "xl", "xl_bytes"])
def test_both_models_are_of_one_size(bench: ModuleType, member: str) -> None:
    if member in ("gpt", "words"):
        pytest.importorskip("transformers")
    recipe, _, settings = bench.MEMBERS[member]
    options = argparse.Namespace(size="tiny")
    task, _ = bench.build_task(bench.Member(recipe, 200, settings), options, CPU)
    config = read_config(recipe=recipe, task="language", overrides=list(settings))
    task = type(task)(config, task.text)
    with torch.device("meta"):
        plain = (
            bench.PlainTransformerXL(config, len(task.text))
            if task.carries
            else bench.gpt2(config, len(task.text))
        )
        ours = count_parameters(task.build_model())
    positions = 0 if task.carries else config.language.segment * config.model.width
    assert count_parameters(plain) - positions == pytest.approx(ours, rel=0.02)


def test_the_plain_transformer_xl_equals_ours(bench: ModuleType) -> None:
    """With the same weights, both give the same loss over two segments."""
    task, store = bench.build_task(bench.MEMBERS["xl"], argparse.Namespace(size="tiny"), CPU)
    torch.manual_seed(0)
    ours = task.build_model().eval()
    plain = bench.PlainTransformerXL(task.config, len(task.text)).eval()
    copy_weights(ours, plain)
    batches = bench.make_batches(task, store, 2)
    memory = plain.empty_memory(len(batches[0].examples), CPU)
    with torch.no_grad():
        for number, batch in enumerate(batches):
            found, memory = plain(batch.inputs, batch.targets, memory)
            if number:  # the first attends to zeros where ours has no memory yet
                expected = task.loss(ours, batch)
                torch.testing.assert_close(found, expected.nll / batch.tokens)
            else:
                task.loss(ours, batch)
                states = task.carried_state()
                for layer, each in enumerate(memory):
                    each.copy_(states[f"{layer}.hidden"])


def copy_weights(ours: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Copy the weights of our Transformer-XL into the plain one."""
    weights = dict(ours.named_parameters())
    with torch.no_grad():
        plain.embedding.weight.copy_(weights["embedding.weight"])
        plain.bias.copy_(weights["output.bias"])
        plain.norm.load_state_dict(
            {name: weights[f"decoder.norm.{name}"] for name in ("weight", "bias")}
        )
        for number, layer in enumerate(plain.layers):
            block = ours.decoder.get_submodule(str(number))
            packed = block.self.query_key_value.weight
            layer.query.weight.copy_(packed[: packed.size(1)])
            layer.key_value.weight.copy_(packed[packed.size(1) :])
            layer.position.weight.copy_(block.self.relative_position.proj.weight)
            layer.output.weight.copy_(block.self.output.weight)
            layer.content_bias.copy_(
                block.self.relative_position.content_bias.view_as(layer.content_bias)
            )
            layer.position_bias.copy_(
                block.self.relative_position.position_bias.view_as(layer.position_bias)
            )
            layer.norms[0].load_state_dict(block.self_residual.norm.state_dict())
            layer.norms[1].load_state_dict(block.ffn_residual.norm.state_dict())
            layer.ffn[0].load_state_dict(block.ffn.inner.state_dict())
            layer.ffn[3].load_state_dict(block.ffn.outer.state_dict())
