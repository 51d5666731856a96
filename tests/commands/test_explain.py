"""`dragoman explain` as a user runs it: report, JSON, figures, page, and invalid arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.cells import cell_len

from dragoman.cli.app import main
from dragoman.explain import Explanation
from tests.classifier_kit import write_classifier

TEXT = "Guten Morgen."


def test_the_report_in_a_subprocess(dragoman, bundle) -> None:
    done = dragoman("explain", "-m", bundle, TEXT, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{TEXT}\n→ ")
    for part in (
        "Cross-attention, layer 0, mean of 2 heads",
        "Tokens: probability",
        "What each word relied on",
    ):
        assert part in done.stdout
    assert "rows: target tokens; columns: source tokens" in done.stdout
    assert "\x1b" not in done.stdout  # no styles without a terminal
    assert max(cell_len(line) for line in done.stdout.splitlines()) <= 80


def test_one_head_of_another_kind(bundle, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    arguments = ["explain", "-m", str(bundle), TEXT, "--kind", "encoder", "--head", "1"]
    assert main([*arguments, "--layer", "0"]) == 0
    out = capsys.readouterr().out
    assert "Encoder self-attention, layer 0, head 1" in out
    assert "rows: encoder input; columns: encoder input" in out
    assert max(cell_len(line) for line in out.splitlines()) <= 60


def test_json_is_an_explanation_per_line(bundle, typed, capsys, tmp_path) -> None:
    typed(f"{TEXT}\nEin Haus.\n")
    assert main(["explain", "-m", str(bundle), "--json", "--beam", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [Explanation.from_json(line) for line in lines]
    assert [each.text for each in found] == [TEXT, "Ein Haus."]
    assert json.loads(lines[0])["format"] == "dragoman.explanation"
    file = tmp_path / "lines.txt"
    file.write_text("Ein Haus.\nZwei\n", encoding="utf-8")
    assert main(["explain", "-m", str(bundle), "--input", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Ein Haus.\n")
    assert "only the first line is explained; --json explains every line" in captured.err


def test_figures_and_the_page(bundle, capsys, tmp_path) -> None:
    files = {kind: tmp_path / f"map.{kind}" for kind in ("png", "svg", "pdf", "html")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    assert main(["explain", "-m", str(bundle), TEXT, *options]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("written to") == 4
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!"}
    for kind, start in starts.items():
        assert files[kind].read_bytes().startswith(start)


def test_prefix_reference_and_penalty_reach_the_search(bundle, capsys) -> None:
    command = ["explain", "-m", str(bundle), TEXT]
    assert main([*command, "--prefix", "Good"]) == 0
    out = capsys.readouterr().out
    assert "→ Good" in out
    assert out.count("(forced") in (4, 5)  # a space may be a token of its own
    assert main([*command, "--reference", "Good morning.", "--length-penalty", "0"]) == 0
    out = capsys.readouterr().out
    assert "→ Good morning." in out
    assert "explained is the reference" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind", "self"], "--kind must be encoder, decoder or cross; found 'self'"),
        (["--layer", "7"], "--layer must be 0, those in the cross-attention; found 7"),
        (["--head", "9"], "--head must be 0 or 1, those of the cross-attention"),
        (["--off", "x3"], "--off must name heads such as x3.2,d0.1; found 'x3'"),
        (["--attribution", "magic"], "--attribution must be attention_x_gradient"),
        (["--png", "map.svg"], "--png must name a .png file; found map.svg; use --svg"),
        (["--svg", "map.txt"], "--svg must end in .png, .svg or .pdf; found '.txt'"),
        (["--pdf", "no/where.pdf"], "--pdf must be in an existing directory; found no"),
        (["--html", "."], "--html must name a file; found the directory"),
        (["--input", "x.txt"], "a text and --input exclude each other"),
        *(
            ([option, ""], f"{option} must have a value; found ''; leave it out")
            for option in ("--reference", "--off", "--prefix", "--to", "--from")
        ),
        (["--text-field", "1"], "--text-field is for files with fields; found '1' beside a text"),
        (["--beam", "0"], "--beam"),
        (["--layer", "-1"], "--layer"),
    ],
)
def test_invalid_arguments_are_one_line(bundle, capsys, arguments, message) -> None:
    assert main(["explain", "-m", str(bundle), TEXT, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_later_line_need_not_be_right(tmp_path: Path, capsys) -> None:
    model = write_classifier(tmp_path / "model")
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "good film"}\nnot JSON\n')
    assert main(["explain", "-m", str(model), "-i", str(path)]) == 0
    assert "only the first line is explained" in capsys.readouterr().err


def test_a_line_of_megabytes_is_an_error(bundle, tmp_path: Path, capsys) -> None:
    path = tmp_path / "in.txt"
    path.write_text("a" * ((1 << 20) + 1))
    assert main(["explain", "-m", str(bundle), "-i", str(path)]) == 2
    assert "in.txt line 1 must have at most 1,048,576 characters" in capsys.readouterr().err


def test_a_long_text_is_noted(bundle, capsys) -> None:
    assert main(["explain", "-m", str(bundle), "Guten Morgen. " * 150, "--json"]) == 0
    captured = capsys.readouterr()
    note = json.loads(captured.out)["missing"]["text"]
    assert note.startswith("Segment 1 of ")
    assert note in captured.err


def test_nothing_to_explain(bundle, capsys, typed) -> None:
    typed("")
    assert main(["explain", "-m", str(bundle)]) == 2
    assert "standard input must hold a text to explain; found no line" in capsys.readouterr().err
    assert main(["explain", "-m", "nowhere", TEXT]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_options_of_a_search_are_rejected_for_labels(tmp_path: Path, capsys) -> None:
    model = write_classifier(tmp_path / "model")
    assert main(["explain", "-m", str(model), "good", "--beam", "2"]) == 2
    assert (
        "--beam is for translation models; found a model of the task classify; leave it out"
        in capsys.readouterr().err
    )
    assert main(["explain", "-m", str(model), "good", "--beam-tree"]) == 2
    assert "--beam-tree is for translation models; found a model" in capsys.readouterr().err


def test_the_beam_tree_is_shown_below(bundle, capsys) -> None:
    assert main(["explain", "-m", str(bundle), TEXT, "--beam", "2", "--beam-tree"]) == 0
    assert "beam of 2, " in capsys.readouterr().out


def test_branches_are_stored_for_the_page(bundle, capsys, tmp_path) -> None:
    command = ["explain", "-m", str(bundle), TEXT, "--beam", "2", "--branches", "2"]
    assert main([*command, "--json"]) == 0
    found = Explanation.from_json(capsys.readouterr().out)
    assert len(found.branches) == 2 * len(found.steps)
    for name, branch in found.branches.items():
        step, token = map(int, name.split(":"))
        assert branch["target"]["tokens"][step]["id"] == token
        assert branch["changes"]["summary"]
    page = tmp_path / "page.html"
    assert main([*command, "--html", str(page)]) == 0
    assert page.stat().st_size > 10_000
    capsys.readouterr()
    assert main(command) == 2
    assert "--branches needs --html or --json; found --branches 2 alone" in capsys.readouterr().err


def test_ablations_are_stored_for_the_page(bundle, capsys) -> None:
    command = ["explain", "-m", str(bundle), TEXT, "--beam", "2"]
    assert main([*command, "--ablations", "x0.0,e0.1", "--json"]) == 0
    found = Explanation.from_json(capsys.readouterr().out)
    assert list(found.ablations) == ["x0.0", "e0.1"]
    assert found.model["path"] == bundle.name  # no folders of its maker
    assert len(found.ablations["x0.0"]["effect"]) == len(found.steps)
    assert main([*command, "--ablations", "top8"]) == 2
    error = capsys.readouterr().err
    assert "--ablations needs --html or --json; found --ablations top8 alone" in error
