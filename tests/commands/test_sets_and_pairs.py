"""Models of sets and of sentence pairs through the commands: train, resume, predict, load."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from dragoman.cli.app import main

SMALL = [
    "train.steps=60",
    "train.validate_every=30",
    "train.checkpoint_every=30",
    "model.width=16",
    "model.ffn_width=16",
    "train.device=cpu",
    "train.threads=1",
]


def train(out: Path, *arguments: str, settings: tuple[str, ...] = ()) -> int:
    chosen = [option for each in (*SMALL, *settings) for option in ("--set", each)]
    return main(["train", *arguments, "--mini", *chosen, "--out", str(out)])


def weights(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """Write sets of numbers whose target is their sum."""
    draw = random.Random(1)
    sets = [[draw.randint(0, 9) for _ in range(draw.randint(1, 6))] for _ in range(200)]
    lines = [json.dumps({"set": each, "target": sum(each)}) for each in sets]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:160]) + "\n")
    (tmp_path / "valid.jsonl").write_text("\n".join(lines[160:]) + "\n")
    return tmp_path


def test_sets_of_a_file(counted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import dragoman
    from dragoman.inference.predictors.unordered_set_predictor import SetModel

    out = counted / "model"
    files = ["--train", str(counted / "train.jsonl"), "--valid", str(counted / "valid.jsonl")]
    settings = ("sets.encoder=mlp", "sets.pooling=sum", "train.batch_tokens=256")
    assert train(out, "--task", "sets", *files, settings=settings) == 0
    assert f"try: dragoman predict -m {out} '[1, 1]'" in capsys.readouterr().err
    model = dragoman.load(str(out))
    assert isinstance(model, SetModel)
    found = [each.value for each in model.predict([[1, 2, 3], [9, 9, 9, 9]])]
    assert found[1] - found[0] > 10
    assert main(["predict", "-m", str(out), "[1, 2, 3]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == pytest.approx(found[0], rel=1e-4)
    assert main(["predict", "-m", str(out), "-i", str(counted / "valid.jsonl")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 40
    (counted / "gap.txt").write_text("[1, 2, 3]\n\n")
    assert main(["predict", "-m", str(out), "-i", str(counted / "gap.txt")]) == 0
    captured = capsys.readouterr()
    assert [bool(line) for line in captured.out.split("\n")] == [True, False, False]
    assert "line 2: the line is empty: there is no set" in captured.err
    assert main(["predict", "-m", str(out), "one"]) == 2
    assert "must be a JSON list of numbers; found 'one'" in capsys.readouterr().err
    assert main(["verify", str(out)]) == 0
    assert "regression of sets" in (out / "card.md").read_text()


def test_generated_sets_need_no_file_and_resume_exactly(tmp_path: Path) -> None:
    arguments = ("--task", "sets", "--recipe", "zaheer2017_max")
    settings = ("sets.validation_sets=50", "train.final_checkpoint=last", "train.schedule=constant")
    assert train(tmp_path / "whole", *arguments, settings=settings) == 0
    half = (*settings, "train.steps=30")
    assert train(tmp_path / "half", *arguments, settings=half) == 0
    resumed = ["train", "--out", str(tmp_path / "half"), "--resume", "--set", "train.steps=60"]
    assert main(resumed) == 0
    assert weights(tmp_path / "half") == weights(tmp_path / "whole")


def test_a_file_is_needed_where_nothing_is_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "model", "--task", "sets", "--recipe", "lee2019") == 2
    assert "name a file, or generate sets: --set sets.problem=maximum" in capsys.readouterr().err


def test_sentence_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import dragoman
    from dragoman.inference.predictors.sentence_pair_classifier import PairClassifier

    draw = random.Random(1)
    nouns, verbs = ["dog", "cat", "man", "boy", "girl", "bird"], ["runs", "sleeps", "eats", "sings"]
    lines = []
    for _ in range(240):
        noun, verb = draw.choice(nouns), draw.choice(verbs)
        if draw.random() < 0.5:
            other, label, score = f"the {noun} {verb}", "same", 4.5
        else:
            other = f"the {draw.choice([each for each in nouns if each != noun])} {verb}"
            label, score = "other", 2.0
        lines.append(
            json.dumps({"a": f"a {noun} {verb}", "b": other, "label": label, "relatedness": score})
        )
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:200]) + "\n")
    (tmp_path / "valid.jsonl").write_text("\n".join(lines[200:]) + "\n")
    out = tmp_path / "model"
    files = ["--train", str(tmp_path / "train.jsonl"), "--valid", str(tmp_path / "valid.jsonl")]
    assert train(out, "--task", "pairs", *files, settings=("train.batch_tokens=128",)) == 0
    example = r"$'A man sleeps.\tHe is awake.'"
    assert f"try: dragoman predict -m {out} {example}" in capsys.readouterr().err
    model = dragoman.load(str(out))
    assert isinstance(model, PairClassifier)
    same, other = model.predict([("a dog runs", "the dog runs"), ("a dog runs", "the cat runs")])
    assert (same.label, other.label) == ("same", "other")
    assert same.score > other.score + 1
    assert main(["predict", "-m", str(out), "a dog runs\tthe dog runs"]) == 0
    label, probability, score = capsys.readouterr().out.rstrip("\n").split("\t")
    assert label == "same"
    assert float(probability) == pytest.approx(same.probabilities["same"], abs=1e-3)
    assert float(score) == pytest.approx(same.score, abs=1e-2)
    assert main(["predict", "-m", str(out), "--explain", "a dog runs\tthe dog runs"]) == 0
    assert "dog\tdog" in capsys.readouterr().out
    (tmp_path / "named.csv").write_text("id,x,y\n1,a dog runs,the dog runs\n")
    named = ["predict", "-m", str(out), "-i", str(tmp_path / "named.csv")]
    assert main([*named, "--text-field", "x", "--text-field", "y"]) == 0
    assert capsys.readouterr().out.startswith("same\t")
    assert main([*named, "--text-field", "x", "--text-field", "x"]) == 2
    assert "must name two different fields; found x twice;" in capsys.readouterr().err
    assert main(named) == 2
    assert "name them: --text-field id --text-field x" in capsys.readouterr().err
    (tmp_path / "bare.csv").write_text("a,b\na dog runs,the dog runs\n")
    assert main(["evaluate", str(out), "--test", str(tmp_path / "bare.csv")]) == 2
    found = "bare.csv must have labels or scores, as in training; found none in 1 pairs; name their"
    assert found in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text(lines[0] + "\n" + '{"a": "x", "relatedness": 2}\n')
    assert train(tmp_path / "none", "--task", "pairs", "--train", str(tmp_path / "bad.jsonl")) == 2
    assert "bad.jsonl line 2" in capsys.readouterr().err
