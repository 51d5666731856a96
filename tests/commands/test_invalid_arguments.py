"""Invalid arguments: each ends in one line with what must hold, what was found, what to do."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

import pytest

from dragoman.__main__ import open_streams
from dragoman.cli.app import _reword_value_error, main
from dragoman.cli.terminal_output import print_result


def error_line(*arguments: object, capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that must fail; return its error line."""
    assert main([str(argument) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--beam", "99999"], "found '99999'"),  # which took all the memory there was
        (["--nbest", "600"], "found '600'"),
        (["--length-penalty", "1000"], "found '1000'"),  # which overflowed
        (
            ["--sample", "--temperature", "inf"],
            "temperature must be a finite number above 0; found inf",
        ),
        (["--device", "meta"], "found 'meta'"),
    ],
)
def test_numbers_that_no_search_can_use(
    options: list[str], words: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error_line("translate", "-m", bundle, *options, "Guten Morgen.", capsys=capsys)


def test_path_without_a_model_suggests_one_nearby(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("nothing of interest")
    shutil.copytree(bundle, tmp_path / "mine")
    line = error_line("translate", "-m", text, "Hallo", capsys=capsys)
    assert f"found the file {text}; did you mean {tmp_path / 'mine'}" in line
    line = error_line(
        "translate", "-m", tmp_path / "mine" / "weights.safetensors", "Hallo", capsys=capsys
    )
    assert f"pass its directory, {tmp_path / 'mine'}" in line
    (tmp_path / "mine" / "training").mkdir()
    line = error_line("translate", "-m", tmp_path / "mine" / "training", "Hallo", capsys=capsys)
    assert f"the run that a model came from; pass the model itself, {tmp_path / 'mine'}" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["data", "chekc"],
            "dragoman: error: No such command 'chekc'. Did you mean 'check'? See dragoman data "
            "--help",
        ),
        (
            ["settings", "nope"],
            "there is no setting or section 'nope'; choose one of classify, data, decode, "
            "language, "
            "model, pairs, sets, tag, text, train",
        ),
        (
            ["settings", "model.widht"],
            "there is no setting or section 'model.widht'; did you mean model.width?",
        ),
        (
            ["train", "--out", "m", "--max-tokens", "4000"],
            "No such option: --max-tokens; it is a setting: --set train.batch_tokens=VALUE; see "
            "dragoman train --help",
        ),
        (
            ["train", "--arch", "transformer"],
            "No such option: --arch; did you mean --recipe? See dragoman train --help",
        ),
        (
            ["train", "--model.width", "64"],
            "No such option: --model.width; it is a setting: --set model.width=VALUE;",
        ),
        (["translate", "--lenpen", "1"], "option: --lenpen; did you mean --length-penalty?"),
        (["evaluate", "--beam-size", "4"], "No such option: --beam-size; did you mean --beam?"),
        (["evaluate", "--seed", "4"], "No such option: --seed"),
        (
            ["data", "check", "memory.tsv"],
            "a parallel corpus must be named by options; found memory.tsv; use --pairs FILE, or "
            "--src FILE --tgt FILE, or name another --task",
        ),
        (["verify", "nowhere"], "nowhere must be a model or a run; found nothing there"),
    ],
)
def test_the_line_reads_well(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line in error_line(*arguments, capsys=capsys)


def test_more_resamplings_than_fit_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(
        "compare",
        "--ref",
        tmp_path / "r",
        tmp_path / "a",
        tmp_path / "b",
        "--samples",
        "999999999",
        capsys=capsys,
    )
    assert "found '999999999'" in line


def test_a_tokeniser_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of sacreBLEU's tokenizers are downloaded on first use, which needs a network."""
    from dragoman.errors import ConfigError
    from dragoman.evaluate import translation_metrics

    def unreachable(**options: object) -> None:
        raise OSError("<urlopen error: no route>")

    monkeypatch.setattr(
        translation_metrics,
        "BLEU",
        type(
            "BLEU",
            (),
            {"TOKENIZERS": ["flores200"], "__new__": lambda cls, **options: unreachable()},
        ),
    )
    with pytest.raises(
        ConfigError,
        match="--tokenize flores200 must be usable here; found <urlopen error: no route>; install "
        "it or use",
    ):
        translation_metrics.build_metrics(tokenize="flores200")


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_stream_that_was_closed_is_replaced(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some schedulers start programs without one; results on a closed stdout are an error."""
    monkeypatch.setattr(sys, stream, None)
    open_streams(keep_working=True)
    with getattr(sys, stream) as opened:
        assert opened.name == os.devnull


def test_translations_are_utf8_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is read as UTF-8 in every locale, so it is written as UTF-8."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    open_streams()
    print_result("日本 – €")
    assert raw.getvalue().decode("utf-8") == "日本 – €\n"


def test_the_last_of_repeated_values_is_reported(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line("translate", "-m", bundle, "--beam", "8", "--beam=0", "a", capsys=capsys)
    assert "found '0'" in line
    assert "Input should" not in line


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("greater than or equal to 1", "at least 1"),
        ("less than or equal to 256", "at most 256"),
        ("a valid integer, unable to parse string as an integer", "a whole number"),
    ],
)
def test_errors_of_values_are_in_our_words(theirs: str, ours: str) -> None:
    message = f"Invalid value for '--beam': Input should be {theirs}"
    assert _reword_value_error(message) == f"--beam must be {ours}"
    assert _reword_value_error("No such option: --x") == "No such option: --x"


@pytest.mark.parametrize("content", ["{", "", '{"task": "classify"}'])
@pytest.mark.parametrize("command", [("translate", "-m"), ("predict", "-m"), ("generate", "-m")])
def test_a_damaged_configuration_is_corruption(
    content: str,
    command: tuple[str, str],
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(bundle, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(content)
    text = ["--prompt", "a"] if command[0] == "generate" else ["a"]
    line = error_line(*command, tmp_path / "model", *text, capsys=capsys, code=65)
    assert "config.json must be as it was written; found" in line


@pytest.mark.parametrize(
    ("out", "found"),
    [
        ("missing/a", "--out must be in an existing directory; found no"),
        ("file", "--out must be a directory; found a file at"),
        ("file/a", "--out must be in a directory; found a file at"),
    ],
)
@pytest.mark.parametrize("command", [["average"], ["export", "--to", "dragoman"]])
def test_a_new_model_is_written_in_an_existing_directory(
    out: str,
    found: str,
    command: list[str],
    bundle: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    assert found in error_line(*command, bundle, "--out", tmp_path / out, capsys=capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
