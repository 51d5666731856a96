"""`dragoman demo` with few steps; the slow tests run it whole."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dragoman.cli.app import main
from dragoman.demo import training_and_evaluation as run
from dragoman.demo.date_corpus import DatePair, make_date_splits
from dragoman.errors import StoppedError
from dragoman.explain.explanation import Explanation
from dragoman.inference import Translator

pytest.importorskip("babel")

SMALL = (
    "model.width=16", "model.heads=2", "model.ffn_width=32", "train.steps=4",
    "train.warmup_steps=1", "train.checkpoint_every=2",
    "train.validate_every=2", "train.validate_sentences=4", "train.threads=1",
)  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the demo for a quick test."""
    monkeypatch.setattr(run, "DEMO_SETTINGS", (*run.DEMO_SETTINGS, *SMALL))
    monkeypatch.setattr(
        run, "make_date_splits", functools.partial(make_date_splits, train=400, valid=20, test=40)
    )


@pytest.mark.usefixtures("small")
def test_demo_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus is generated, so that no download is needed (annotated-transformer#96)."""
    model = tmp_path / "demo-model"
    assert main(["demo", "--out", str(model)]) == 0
    captured = capsys.readouterr()
    assert re.search(r"held-out dates: \d+\.\d% of 40 translated exactly", captured.out)
    assert "Held-out dates" in captured.out
    assert "Cross-attention weights of" in captured.out
    assert "dragoman translate -m" in captured.out, "the next commands to try are printed"
    assert (model / "training" / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert "steps" in captured.err, "progress goes to stderr"
    assert main(["verify", str(model)]) == 0, "what the demo leaves is a whole model"
    commands = [
        line.split() for line in captured.out.splitlines() if line.startswith("  dragoman evaluate")
    ]
    assert commands, "the suggested commands are whole"
    capsys.readouterr()
    assert main([*commands[0][1:], "--json"]) == 0, "and they work"
    assert json.loads(capsys.readouterr().out)["sentences"] == 40
    explained, explain = list[str](), Translator.explain

    def spy(translator: Translator, text: str) -> Explanation:
        explained.append(text)
        return explain(translator, text)

    monkeypatch.setattr(Translator, "explain", spy)
    assert main(["demo", "--out", str(model)]) == 0
    captured = capsys.readouterr()
    assert "is already trained and is reused" in captured.err
    table = captured.out.partition("Held-out dates:")[2].splitlines()
    rows = [line for line in table if line.strip()][1:]
    assert rows[0].strip().startswith(explained[0]), "the first example is the one plotted"
    assert len(explained) == 1


@pytest.mark.usefixtures("small")
def test_another_model_is_left_alone(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (bundle / "weights.safetensors").read_bytes()
    assert main(["demo", "--out", str(bundle)]) == 2
    assert "found another model in" in capsys.readouterr().err
    assert (bundle / "weights.safetensors").read_bytes() == before


@pytest.mark.usefixtures("small")
def test_a_stop_reports_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise StoppedError(
            "training runs to its end",
            found="SIGINT at update 12",
            fix="go on with: dragoman train --resume",
        )

    monkeypatch.setattr("dragoman.runs.training_run.train", stopped)
    assert main(["demo", "--out", str(tmp_path / "m")]) == 75
    assert (
        "found SIGINT at update 12; run the same command again to resume" in capsys.readouterr().err
    )


def test_the_settings_can_be_run(tmp_path: Path) -> None:
    config = run.demo_config(tmp_path, seed=7, seconds=30, device="cpu")
    assert config.train.seed == 7
    assert config.train.time_budget == 30
    assert config.train.device == "cpu"
    assert Path(config.data.src) == tmp_path / "train.text"


def test_the_corpus_is_written_as_aligned_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run, "make_date_splits", functools.partial(make_date_splits, train=30, valid=5, test=7)
    )
    corpus = run.write_corpus(tmp_path / "dates", seed=2)
    for name, part in zip(("train", "valid", "test"), corpus, strict=True):
        texts = (tmp_path / "dates" / f"{name}.text").read_text(encoding="utf-8").split("\n")[:-1]
        dates = (tmp_path / "dates" / f"{name}.iso").read_text(encoding="utf-8").split("\n")[:-1]
        assert [(pair.text, pair.iso) for pair in part] == list(zip(texts, dates, strict=True))


class StubTranslator:
    """A stub translator with given outputs."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    def translate(self, texts: list[str]) -> list[str]:
        return [self.answers.get(text, "?") for text in texts]


def test_measuring_counts_whole_dates_by_language() -> None:
    pairs = [
        DatePair("3 mai 1979", "1979-05-03", "fr"),
        DatePair("4 mai 1979", "1979-05-04", "fr"),
        DatePair("May 3, 1979", "1979-05-03", "en"),
    ]
    found = run.evaluate_dates(
        StubTranslator(
            {"3 mai 1979": "1979-05-03", "4 mai 1979": "1979-05-40", "May 3, 1979": "1979-05-03"}
        ),
        pairs,
    )  # type: ignore[arg-type]
    assert found.exact == pytest.approx(2 / 3)
    assert found.by_locale == {"fr": 0.5, "en": 1.0}
    assert found.wrong == [(pairs[1], "1979-05-40")]


def test_examples_are_held_out_dates_in_different_languages() -> None:
    corpus = make_date_splits(train=100, valid=5, test=300)
    shown = run.pick_examples(corpus.test)
    assert len({pair.locale for pair in shown}) == len(shown) >= 4
    assert not {pair.iso for pair in shown} & {pair.iso for pair in corpus.train}


@pytest.mark.slow
def test_the_whole_demo_reaches_its_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number in the README: at least 98 % exact matches on held-out dates."""
    assert main(["demo", "--out", str(tmp_path / "demo-model")]) == 0
    out = capsys.readouterr().out
    accuracy = re.search(r"held-out dates: (\d+\.\d)%", out)
    assert accuracy
    assert float(accuracy[1]) >= 98.0, out


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("recipe", "attends"), [("bahdanau2015", True), ("sutskever2014", False)])
def test_it_takes_the_miniature_of_a_recipe(
    recipe: str,
    attends: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "RECIPE_SETTINGS", (*run.RECIPE_SETTINGS, *SMALL))
    model = tmp_path / "demo-model"
    assert main(["demo", "--recipe", recipe, "--out", str(model)]) == 0
    captured = capsys.readouterr()
    assert re.search(r"held-out dates: \d+\.\d% of 40 translated exactly", captured.out)
    assert ("Cross-attention weights of" in captured.out) == attends
    assert ("no cross-attention" in captured.out) != attends
    assert (model / "training" / "attention.png").exists() == attends
    assert json.loads((model / "config.json").read_text())["recipe"] == recipe
    assert main(["demo", "--out", str(model)]) == 2
    assert f"found a model of {recipe} in {model}; choose another --out" in capsys.readouterr().err


def test_recipes_of_other_tasks_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--recipe", "yang2016", "--out", str(tmp_path / "demo")]) == 2
    stderr = capsys.readouterr().err
    assert "found yang2016, whose task is classify; use bahdanau2015" in stderr
    assert main(["demo", "--recipe", "bahdanau2016", "--out", str(tmp_path / "demo")]) == 2
    assert "bahdanau2015" in capsys.readouterr().err
