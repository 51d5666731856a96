"""`dragoman recipes`: every recipe parses, and shows what it is."""

from __future__ import annotations

import json

import pytest

from dragoman.cli.app import main
from dragoman.cli.layer_diagram import format_stack
from dragoman.cli.recipes import TASK_TITLES
from dragoman.cli.settings_reference import list_all_settings
from dragoman.config import ModelConfig, from_dict, read_config, to_dict
from dragoman.models.factory import build_model, count_parameters, summarize_model
from dragoman.recipes.catalogue import RECIPES


def test_most_used_names() -> None:
    assert {"tiny", "small", "vaswani2017_base", "vaswani2017_big"} <= set(RECIPES)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_parses_and_reads_back(name: str) -> None:
    """A shipped configuration that cannot be used (OpenNMT-py#2087, eole#378)."""
    config = read_config(recipe=name)
    assert config.problems() == []
    assert config.recipe == name
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


TRANSLATION = sorted(name for name, entry in RECIPES.items() if entry.task == "translate")


@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(TRANSLATION)))
def test_a_recipe_of_another_task_shows_its_settings(name, capsys) -> None:
    assert main(["recipes", "show", name]) == 0
    out = capsys.readouterr().out
    task = RECIPES[name].task
    assert out.startswith(f"{name}: {RECIPES[name].summary}\ntask {task}: ")
    assert f"dragoman train --task {task} --recipe {name} --train" in out
    assert main(["recipes", "show", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["task"] == task


@pytest.mark.parametrize("name", TRANSLATION)
def test_every_recipe_shows_its_stack(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", name]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{name}: ")
    if read_config(recipe=name).model.encoder:
        assert "encoder  (B, S, " in out
        assert "decoder  (B, T, " in out
    else:
        assert "decoder  (B, S + T, " in out
    assert max(map(len, out.partition("\nsetting ")[0].splitlines())) <= 160, (
        "a drawing that a terminal would break is none"
    )
    (heads,) = [row for row in list_all_settings() if row.path == "model.heads"]
    assert heads.sentence in out
    assert main(["recipes", "show", name, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert f"{shown['parameters']:,} parameters" in out


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and entry.summary in out for name, entry in RECIPES.items())
    assert max(map(len, out.splitlines())) <= 80, "a narrow terminal shows one line each"
    assert main(["recipes", "--json"]) == 0
    assert [row["recipe"] for row in json.loads(capsys.readouterr().out)] == list(RECIPES)


def test_the_list_of_one_task(capsys: pytest.CaptureFixture[str]) -> None:
    for task in TASK_TITLES:
        assert main(["recipes", "--task", task, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert {row["task"] for row in shown} <= {task}
        assert [row["recipe"] for row in shown] == [
            name for name, entry in RECIPES.items() if entry.task == task
        ]
    assert main(["recipes", "--task", "clasify"]) == 2
    err = capsys.readouterr().err
    assert "--task must name a task; found 'clasify'; did you mean classify?" in err


def test_the_list_is_grouped_by_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(entry.family for entry in RECIPES.values())
    assert main(["recipes"]) == 0
    shown = [
        line.strip() if line.rstrip().endswith(":") else line.split()[0]
        for line in capsys.readouterr().out.splitlines()[1:]
    ]
    headings = {
        name: entry.family if entry.task == "translate" else TASK_TITLES[entry.task]
        for name, entry in RECIPES.items()
    }
    tasks = list(TASK_TITLES)
    ordered = sorted(RECIPES, key=lambda name: tasks.index(RECIPES[name].task))
    families = list(dict.fromkeys(headings[name] for name in ordered))
    assert {"Transformer", "RNN", "CNN"} <= set(families)
    expected = []
    for family in families:
        expected += [
            f"{family}:",
            *(name for name in ordered if headings[name] == family),
        ]
    assert shown == expected
    assert main(["recipes", "--json"]) == 0
    found = {row["family"] for row in json.loads(capsys.readouterr().out)}
    assert found == {entry.family for entry in RECIPES.values()}


def test_unknown_recipe_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "vaswani2017base"]) == 2
    assert (
        "there is no recipe named 'vaswani2017base'; did you mean vaswani2017_base, "
        in capsys.readouterr().err
    )


def test_equal_layers_are_drawn_once_and_all_weights_are_counted() -> None:
    config = ModelConfig(
        encoder=("transformer*3",), decoder=("transformer*1",), width=8, heads=2, ffn_width=16
    )
    rows = summarize_model(config, src_vocab_size=20, tgt_vocab_size=20)
    lines = format_stack(rows, config)
    assert sum("layers 0 to 2, each" in line for line in lines) == 1
    assert sum("layer 0" in line for line in lines) == 1
    assert any("20x8" in line for line in lines)
    model = build_model(config, src_vocab_size=20, tgt_vocab_size=20)
    assert sum(row.parameters for row in rows) == count_parameters(model)


def test_a_stack_of_equal_cells_is_counted() -> None:
    block = (
        "lstm(layers=8, attention=normed_additive, decoder=gnmt, initial_state=zero, "
        "residual_connection=false)"
    )
    config = ModelConfig(
        encoder=("lstm(layers=3)",), decoder=(block,), width=8, heads=2, positions="none"
    )
    lines = format_stack(summarize_model(config, src_vocab_size=20, tgt_vocab_size=20), config)
    assert any("3 x ih 32x8, 3 x hh 32x8" in line for line in lines)
    assert any(
        "ih 32x16, hh 32x8, 7 x upper_layers ih 32x16, 7 x upper_layers hh 32x8" in line
        for line in lines
    )
    assert any("query 8x8, key 8x8, energy 1x8" in line for line in lines)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("vaswani_bases", "vaswani2017_base, vaswani2017_bytes or vaswani2017_tagger"),
        ("luong201", "luong2015_dot, luong2015_concat or luong2015_general"),
        ("_RNN", "domhan2018_rnn, domhan2018_rnn_mh or domhan2018_rnn_pos"),
        ("transformer_big", "vaswani2017_big"),
        ("alibi", "press2022"),
    ],
)
def test_unknown_name_suggests_the_three_nearest(
    written: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["recipes", "show", written],
        ["train", "--recipe", written, "--src", "a", "--tgt", "b", "--out", "c"],
    ):
        assert main(command) == 2
        line = (
            f"dragoman: error: there is no recipe named {written!r}; did you mean {meant}? "
            "See `dragoman recipes`\n"
        )
        assert capsys.readouterr().err == line


@pytest.mark.parametrize("name", ["nope", "bogus", ""])
def test_a_name_like_no_other_has_no_suggestion(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipes", "show", name]) == 2
    line = f"dragoman: error: there is no recipe named {name!r}; see `dragoman recipes`\n"
    assert capsys.readouterr().err == line
