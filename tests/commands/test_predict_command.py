"""`dragoman predict` on a small predictor: inputs, outputs, explanations, and mistakes."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.cli.app import main
from dragoman.inference.predictors.catalogue import PREDICTORS
from dragoman.registry import Entry


def make_length_classifier() -> Any:
    """Define a predictor that labels texts as short or long; made here, as it imports torch."""
    from torch import nn

    from dragoman.config import Config
    from dragoman.data.labeled_records import find_text_field
    from dragoman.explain.classification_occlusion import SentenceSpans, explain_text, find_spans
    from dragoman.inference.predictors.base import Predictor

    @dataclass(frozen=True)
    class Length:
        text: str
        long: float
        notes: tuple[str, ...] = ()

        def to_line(self, *, top=1):
            ranked = sorted(
                {"long": self.long, "short": 1 - self.long}.items(), key=lambda x: -x[1]
            )
            return "\t".join([f"{name}\t{value:.4f}" for name, value in ranked[:top]] + [self.text])

        def to_dict(self):
            return {"text": self.text, "probabilities": {"long": self.long}}

    class LengthClassifier(Predictor):
        task_name = "classify"
        has_alternatives = True

        @classmethod
        def load(cls, path, *, device="auto"):
            return cls(nn.Linear(1, 1), SimpleNamespace(config=Config()))

        def read_record(self, record, *, text_field=""):
            return record.text(find_text_field(record, text_field))

        def encode(self, inputs):
            return inputs

        def length(self, encoded):
            return len(encoded)

        def predict_batch(self, model, encoded, device):
            return [
                Length(text, min(1.0, len(text) / 20), () if text else ("the text is empty",))
                for text in encoded
            ]

        def explain_words(self, each):
            words = each.split()
            value = min(1.0, len(each) / 20)
            return explain_text(
                each,
                [
                    SentenceSpans(
                        words=find_spans(each, words), word_weights=[1 / len(words)] * len(words)
                    )
                ],
                {"long": value, "short": 1 - value},
                "long",
                lambda texts: [min(1.0, len(text) / 20) for text in texts],
            )

    return LengthClassifier


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory whose task is run by the small predictor."""
    module = types.ModuleType("length_predictor")
    module.LengthClassifier = make_length_classifier()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "length_predictor", module)
    entry = Entry("length_predictor:LengthClassifier", "A test.", family="predict")
    monkeypatch.setitem(PREDICTORS._entries, "classify", entry)
    return write_model(tmp_path / "my-model", "classify")


def write_model(path: Path, task: str) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    (path / "config.json").write_text(json.dumps({"task": task}))
    return path


def test_texts_as_arguments(model, capsys):
    assert main(["predict", "-m", str(model), "a text", "a text of 20 letters"]) == 0
    assert capsys.readouterr().out == "short\t0.7000\ta text\nlong\t1.0000\ta text of 20 letters\n"


def test_top_adds_labels_and_json_has_all(model, capsys):
    assert main(["predict", "-m", str(model), "--top", "2", "a text"]) == 0
    assert capsys.readouterr().out == "short\t0.7000\tlong\t0.3000\ta text\n"
    assert main(["predict", "-m", str(model), "--json", "a text"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "line": 1,
        "text": "a text",
        "probabilities": {"long": 0.3},
    }


def test_standard_input_keeps_order_and_empty_lines(model, capsys, typed):
    typed("one\n\nthree words here\r\n")
    assert main(["predict", "-m", str(model)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split("\t")[-1] for line in lines] == ["one", "", "three words here"]
    assert "line 2: the text is empty" in captured.err


def test_json_lines_on_standard_input_are_noted_once(model, capsys, typed):
    line = '{"text": "first"}'
    for content, noted in ((f"{line}\n{line}\n", True), ("{}: none\n[1]\n", False)):
        typed(content)
        assert main(["predict", "-m", str(model)]) == 0
        captured = capsys.readouterr()
        assert [each.split("\t")[-1] for each in captured.out.splitlines()] == content.splitlines()
        found = "standard input has JSON lines but is read as plain text; "
        assert captured.err.count(found) == noted
        assert ("pass --input FILE.jsonl" in captured.err) == noted


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.txt", "first\nsecond\n"),
        ("t.jsonl", '{"text": "first", "label": 1}\n{"text": "second"}\n'),
        ("t.csv", 'label,text\nx,first\ny,"second"\n'),
        ("t.tsv", "text\tlabel\nfirst\tx\nsecond\ty\n"),
    ],
)
def test_files_of_every_format(model, tmp_path, capsys, name, content):
    path = tmp_path / name
    path.write_text(content)
    out = tmp_path / "out.tsv"
    assert main(["predict", "-m", str(model), "-i", str(path), "-o", str(out)]) == 0
    assert [line.split("\t")[-1] for line in out.read_text().splitlines()] == ["first", "second"]
    assert capsys.readouterr().out == ""


def test_a_column_can_be_named(model, tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("id,headline,text\n1,short,a much longer body of text\n")
    assert main(["predict", "-m", str(model), "-i", str(path), "--text-field", "headline"]) == 0
    assert capsys.readouterr().out == "short\t0.7500\tshort\n"
    assert main(["predict", "-m", str(model), "-i", str(path), "--text-field", "headlines"]) == 2
    err = capsys.readouterr().err
    assert "t.csv line 2 must have the field 'headlines'" in err
    assert "found id, headline, text; did you mean headline?" in err


def test_a_named_column_makes_the_first_row_a_header(model, tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("headline,story\nshort,a much longer body of text\n")
    assert main(["predict", "-m", str(model), "-i", str(path), "--text-field", "headline"]) == 0
    assert capsys.readouterr().out == "short\t0.7500\tshort\n"


def test_an_explanation_in_the_terminal_as_json_and_as_a_page(model, tmp_path, capsys):
    text = "a <b>fairly</b> long text"
    assert main(["predict", "-m", str(model), "--explain", "long enough"]) == 0
    out = capsys.readouterr().out
    assert "long 0.550" in out
    assert "0.500  +0.350  ██████████  enough" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["predict", "-m", str(model), "--explain", "--json", "long enough"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sentences"][0]["words"][1]["word"] == "enough"
    page = tmp_path / "page.html"
    assert main(["predict", "-m", str(model), "--html", str(page), text, "another text"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 explanations written to" in captured.err
    assert "&lt;b&gt;fairly&lt;/b&gt;" in page.read_text()


def test_a_file_name_given_as_a_text_is_noticed(model, tmp_path, capsys):
    path = tmp_path / "t.txt"
    path.write_text("a\n")
    assert main(["predict", "-m", str(model), str(path)]) == 0
    assert f"warning: {path} is a file name but is predicted as text" in capsys.readouterr().err


# Mistakes


def error(capsys) -> str:
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "error:" in line]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize(("content", "found"), [("", "no line at all")])
def test_empty_input(model, tmp_path, capsys, typed, content, found):
    path = tmp_path / "t.txt"
    path.write_text(content)
    assert main(["predict", "-m", str(model), "-i", str(path)]) == 2
    assert f"t.txt must hold texts to predict; found {found}" in error(capsys)
    typed(content)
    assert main(["predict", "-m", str(model)]) == 2
    assert f"standard input must hold texts to predict; found {found}" in error(capsys)


def test_bad_encoding_names_the_line(model, tmp_path, capsys, typed):
    path = tmp_path / "t.txt"
    path.write_bytes(b"good\n" + b"caf\xe9 au lait\n")
    assert main(["predict", "-m", str(model), "-i", str(path)]) == 2
    captured = capsys.readouterr()
    assert "short\t0.8000\tgood" in captured.out, "the lines before it are predicted"
    assert "line 2" in captured.err
    assert "UTF-8" in captured.err
    typed(path.read_bytes())
    assert main(["predict", "-m", str(model)]) == 2
    assert "line 2 of standard input must be UTF-8; found the byte 0xe9" in capsys.readouterr().err


def test_a_huge_line_names_the_line(model, tmp_path, capsys, typed):
    text = "good\n" + "x" * ((1 << 20) + 1) + "\n"
    path = tmp_path / "t.txt"
    path.write_text(text)
    for run in (["-i", str(path)], []):
        typed(text)
        assert main(["predict", "-m", str(model), *run]) == 2
        captured = capsys.readouterr()
        assert captured.out == "short\t0.8000\tgood\n"
        assert (
            "line 2 must have at most 1,048,576 characters in 'text'; found 1,048,577"
            in captured.err
        )


def test_a_broken_row_names_the_line(model, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "good"}\n{"text": 3]\n')
    assert main(["predict", "-m", str(model), "-i", str(path)]) == 2
    assert "t.jsonl line 2" in error(capsys)
    path.write_text('{"text": "good"}\n{"other": "x"}\n')
    assert main(["predict", "-m", str(model), "-i", str(path)]) == 2
    assert "found other" in error(capsys)


def test_texts_and_files_exclude_each_other(model, tmp_path, capsys):
    path = tmp_path / "t.txt"
    path.write_text("a\n")
    assert main(["predict", "-m", str(model), "text", "-i", str(path)]) == 2
    assert f"texts and --input exclude each other; found 'text' and {path}" in error(capsys)


def test_the_output_is_not_one_of_the_inputs(model, tmp_path, capsys):
    path = tmp_path / "t.txt"
    path.write_text("a\n")
    assert main(["predict", "-m", str(model), "-i", str(path), "-o", str(path)]) == 2
    assert path.read_text() == "a\n"


@pytest.mark.parametrize(
    ("task", "arguments", "command"),
    [
        ("translate", ["predict", "-m", "MODEL", "text"], "translate"),
        ("language", ["predict", "-m", "MODEL", "text"], "generate"),
        ("classify", ["translate", "-m", "MODEL", "text"], "predict"),
        ("language", ["translate", "-m", "MODEL", "text"], "generate"),
        ("classify", ["score", "-m", "MODEL", "--src", "a", "--tgt", "b"], "predict"),
        ("tag", ["export", "MODEL", "--to", "onnx", "--out", "x"], "predict"),
    ],
)
def test_a_model_of_another_task_names_its_command(tmp_path, capsys, task, arguments, command):
    model = write_model(tmp_path / "model", task)
    assert main([str(model) if each == "MODEL" else each for each in arguments]) == 2
    found = error(capsys)
    assert f"`dragoman {arguments[0]}` needs" in found
    assert (
        f"found {model}, a model of the task {task}; use `dragoman {command} -m {model}`" in found
    )


def test_compare_names_the_command_of_another_task(tmp_path, capsys):
    model = write_model(tmp_path / "model", "classify")
    other = tmp_path / "hyp.txt"
    other.write_text("a\n")
    arguments = ["compare", str(other), str(model), "--ref", str(other), "--src", str(other)]
    assert main(arguments) == 2
    assert (
        f"`dragoman compare` needs a translation model; found {model}, a model of the task classify"
        in error(capsys)
    )


@pytest.mark.parametrize(
    ("task", "arguments"),
    [
        ("classify", ["predict", "-m", "MODEL", "text", "--output", "MODEL/config.json"]),
        ("classify", ["predict", "-m", "MODEL", "text", "--html", "MODEL/page.html"]),
        ("classify", ["explain", "-m", "MODEL", "text", "--html", "MODEL/config.json"]),
        ("classify", ["explain", "-m", "MODEL", "text", "--png", "MODEL/a.png"]),
        ("classify", ["explore", "MODEL", "text", "--html", "MODEL/config.json"]),
        ("classify", ["evaluate", "MODEL", "--test", "FILE", "--hyp", "MODEL/config.json"]),
        (
            "translate",
            ["evaluate", "MODEL", "--src", "FILE", "--ref", "FILE", "--hyp", "MODEL/config.json"],
        ),
        ("translate", ["translate", "-m", "MODEL", "text", "--output", "MODEL/config.json"]),
        (
            "translate",
            [
                *("augment", "-m", "MODEL", "-i", "FILE", "--method", "distillation"),
                *("--output-src", "MODEL/config.json", "--output-tgt", "new", "--overwrite"),
            ],
        ),
        ("classify", ["plot", "MODEL", "--out", "MODEL/plots"]),
        ("classify", ["plot", "MODEL", "--out", "MODEL"]),
        ("classify", ["plot", "MODEL", "--what", "curves", "--out", "MODEL/curves.png"]),
    ],
)
def test_an_output_inside_the_model_is_an_error(tmp_path, capsys, task, arguments):
    model = write_model(tmp_path / "model", task)
    (tmp_path / "file.txt").write_text("a\n")
    before = {path: path.read_bytes() for path in model.iterdir()}
    paths = {"MODEL": str(model), "FILE": str(tmp_path / "file.txt")}
    for name, target_path in paths.items():
        arguments = [each.replace(name, target_path) for each in arguments]
    assert main(arguments) == 2
    assert "must be outside the model directory that the command reads; found" in error(capsys)
    assert {path: path.read_bytes() for path in model.iterdir()} == before
