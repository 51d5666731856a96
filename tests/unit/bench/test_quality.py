"""The rows of bench/quality.py can be run, and their scores are those of sacreBLEU."""

from __future__ import annotations

import importlib
import json
import os
import random
import shlex
from pathlib import Path

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from dragoman.cli.app import app, build_command
from dragoman.config import read_config

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("DRAGOMAN_DATA", ROOT.parent / "shared" / "data"))
MODEL = ROOT / "tests" / "fixtures" / "before_renames" / "transformer"
# Tokens of the references, from the README of the Multi30k repository.
TOKENS = {
    "test_2016_flickr": {"de": 12_103, "en": 12_968, "fr": 13_988},
    "test_2017_flickr": {"de": 10_758, "en": 11_376, "fr": 12_596},
}


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.quality")


@pytest.fixture
def scores(quality):
    """The module of the scores; `quality` has made it importable."""
    return importlib.import_module("bench.quality_scores")


def test_rows_name_rows_and_settings_that_exist(quality):
    assert len(quality.NAMES) == len(quality.ROWS)
    for row in quality.ROWS:
        assert row.corpus in quality.CORPORA
        assert not row.baseline or quality.find_row(row.baseline).corpus == row.corpus
        assert row.needs(1) or row.train
        arguments = iter(shlex.split(row.train))
        settings = [next(arguments) for each in arguments if each == "--set"]
        recipe = "small" if "--recipe small" in row.train else ""
        read_config(recipe=recipe, overrides=settings)
    ensemble = quality.find_row("m30k_ende_ensemble").needs(1)
    assert sorted(ensemble.values()) == [("m30k_ende", seed) for seed in (1, 2, 3)]


def test_commands_of_all_rows_are_parsed(quality, tmp_path):
    """A misspelt option would end a run on a GPU that was waited for."""
    commands = build_command(app).commands
    runner = quality.Runner(data=tmp_path, work=tmp_path, out=tmp_path, jobs=1)
    for row in quality.ROWS:
        fields = runner._fields(quality.CORPORA[row.corpus], quality.QualityRun(row, 1))
        fields |= dict.fromkeys(row.needs(1), str(MODEL))
        translate = f"{row.models or f'-m {MODEL}'} {row.translate} --input x --output y"
        lines = {"train": row.train and f"{row.train} --out m", "augment": row.augment}
        for name, line in (lines | {"translate": translate}).items():
            if line:
                commands[name].make_context(name, quality.fill(line, fields))


def test_one_seed_gives_the_p_value_of_sacrebleu(scores):
    draw = random.Random(4)
    words = ["the", "a", "dog", "cat", "runs", "sits", "on", "in", "red", "green", "house", "tree"]
    references = [" ".join(draw.choices(words, k=9)) for _ in range(40)]

    def replace_words(rate: float) -> list[str]:
        return [
            " ".join(draw.choice(words) if draw.random() < rate else word for word in line.split())
            for line in references
        ]

    baseline, system = replace_words(0.25), replace_words(0.2)
    metric = scores.Metric("BLEU", BLEU())
    statistics = [metric.statistics(lines, references, "en") for lines in (system, baseline)]
    difference, p = scores.bootstrap(metric, statistics[:1], statistics[1:])
    _, scores = PairedTest(
        [("baseline", baseline), ("system", system)], {"BLEU": BLEU()}, [references],
        test_type="bs", n_samples=1000,
    )()  # fmt: skip
    assert difference == pytest.approx(scores["BLEU"][1].score - scores["BLEU"][0].score)
    assert 0.005 < p < 0.9
    assert p == pytest.approx(scores["BLEU"][1].p_value, abs=0.002)


def test_seeds_are_averaged_in_every_sample(scores):
    references = [f"{at} one two three four five" for at in range(30)]
    good = [line if at % 3 else "one two" for at, line in enumerate(references)]
    metric = scores.Metric("BLEU", BLEU())
    same, other = (metric.statistics(lines, references, "en") for lines in (references, good))
    assert scores.bootstrap(metric, [same, other], [other, same])[0] == pytest.approx(0)
    difference, p = scores.bootstrap(metric, [same, same], [other, same])
    alone, _ = scores.bootstrap(metric, [same], [other])
    assert difference == pytest.approx(alone / 2)
    assert p < 0.05


@pytest.mark.parametrize("part", TOKENS)
@pytest.mark.parametrize("language", ["de", "en", "fr"])
def test_references_have_as_many_tokens_as_published(quality, scores, part, language):
    pytest.importorskip("sacremoses")
    path = DATA / "multi30k" / f"{part}.{language}.xz"
    if not path.exists():
        pytest.skip(f"no {path}")
    tokenize = scores.moses_tokenizer(language)
    tokens = sum(len(tokenize(line).split()) for line in quality.read_lines(path))
    assert tokens == TOKENS[part][language]


def test_models_are_trained_before_the_rows_that_use_them(quality, tmp_path, monkeypatch):
    for part, count in (("dev", 2), ("test_2016_flickr", 3), ("test_2017_flickr", 1)):
        (tmp_path / "multi30k").mkdir(exist_ok=True)
        quality.write_text(tmp_path / f"multi30k/{part}.en", "a\n" * count)
    monkeypatch.setattr(
        quality.CorpusFiles, "file", lambda _, part, lang: f"multi30k/{part}.{lang}"
    )
    ran = []

    def run(self, run, arguments):
        ran.append(arguments)
        if arguments[2] == "train":
            model = Path(arguments[arguments.index("--out") + 1])
            (model / "training").mkdir(parents=True)
            quality.write_text(model / "config.json", "{}")
            record = {"event": "validation", "step": 7, "loss": 2.0}
            quality.write_text(model / "training" / "log.jsonl", json.dumps(record) + "\n")
        else:
            output = Path(arguments[arguments.index("--output") + 1])
            quality.write_text(output, "".join(f"line {at}\n" for at in range(6)))
        return "command", 1.0

    monkeypatch.setattr(quality.Runner, "_run", run)
    folders = {name: tmp_path / name for name in ("work", "out")}
    (tmp_path / "out").mkdir()
    runner = quality.Runner(data=tmp_path, jobs=1, **folders)
    tuned = quality.QualityRun(quality.find_row("ab_m30k_ende_bidirectional"), 2)
    record = runner.finish(tuned)
    first = str(tmp_path / "work" / "ab_m30k_ende_both-2")
    assert [arguments[2] for arguments in ran] == ["train", "translate", "train", "translate"]
    assert first in ran[0]
    assert ran[2][ran[2].index("--init-from") + 1] == first
    assert (record["best_step"], record["seed"]) == (7, 2)
    texts = [(tmp_path / "out" / f"{tuned.key}.{part}").read_text() for part in ("dev", *TOKENS)]
    assert texts == ["line 0\nline 1\n", "line 2\nline 3\nline 4\n", "line 5\n"]
    assert runner.finish(tuned) == record
    assert len(ran) == 4, "finished runs are skipped"
