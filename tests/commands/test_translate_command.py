"""`dragoman translate` as a user runs it: one output line per input line, in order, unbuffered."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confidence_kit import CALIBRATION, add_calibration

from dragoman.cli.app import main
from dragoman.cli.input_lines import decode_lines

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
Typed = Callable[[str | bytes], None]
LINES = ["Guten Morgen.", "", "Zwei Männer reden.", "  ", "Das ist ein Haus.", "x", "€ 18.10", "🙂"]


def translate(bundle: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Translate in this process; return the output lines."""
    assert main(["translate", "-m", str(bundle), *arguments]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


def test_a_text_on_the_command_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(translate(bundle, "Guten Morgen.", capsys=capsys)) == 1
    assert len(translate(bundle, "Guten Morgen.", "Das ist ein Haus.", capsys=capsys)) == 2


def test_standard_input_keeps_lines_order_and_empty_lines(bundle: Path, dragoman: Run) -> None:
    """One output line per input line, in order (marian-dev#365, fairseq#2036)."""
    done = dragoman("translate", "-m", bundle, input="".join(f"{line}\n" for line in LINES))
    assert done.returncode == 0, done.stderr
    out = done.stdout.split("\n")
    assert out[-1] == ""
    assert len(out) - 1 == len(LINES)
    assert out[1] == "", "an empty line stays empty"
    assert all(out[number] for number, line in enumerate(LINES) if line.strip()), (
        "no text gets an empty translation (OpenNMT-py#2039)"
    )


@pytest.mark.parametrize(
    "search", [[], ["--beam", "1"], ["--beam", "4", "--length-penalty", "1.0"]]
)
def test_batch_size_does_not_change_results(
    search: list[str], bundle: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch size changed the translation (OpenNMT-py#2208, #318; CTranslate2#693)."""
    outputs = []
    for size in ("1", "2", "64"):
        typed("".join(f"{line}\n" for line in LINES * 2))
        outputs.append(translate(bundle, "--batch-size", size, *search, capsys=capsys))
    assert outputs[0] == outputs[1] == outputs[2]


def test_last_line_without_an_end_and_windows_lines(
    bundle: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Guten Morgen.\nx\n")
    plain = translate(bundle, capsys=capsys)
    typed("\ufeffGuten Morgen.\r\nx")
    assert translate(bundle, capsys=capsys) == plain


def test_empty_input_has_empty_output(
    bundle: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("")
    assert main(["translate", "-m", str(bundle)]) == 0
    assert capsys.readouterr() == ("", "")


def test_n_best_lines_have_number_score_and_text(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = translate(bundle, "--nbest", "3", "Guten Morgen.", "x", capsys=capsys)
    rows = [line.split("\t") for line in lines]
    assert [row[0] for row in rows] == ["1", "1", "1", "2", "2", "2"]
    for number in ("1", "2"):
        scores = [float(row[1]) for row in rows if row[0] == number]
        assert scores == sorted(scores, reverse=True), "best first"
    best = translate(bundle, "--beam", "3", "Guten Morgen.", capsys=capsys)
    assert rows[0][2] == best[0], "the first of the n best is the translation"


def test_json_of_a_model_without_attention_has_no_alignment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dragoman.bundle import write_bundle
    from dragoman.config import read_config
    from dragoman.models.factory import build_model
    from dragoman.text.sentencepiece_tokenizer import train_tokenizers

    sizes = [
        "model.width=16",
        "model.encoder=[lstm]",
        "model.decoder=[lstm]",
        "text.tokenizer=characters",
        "decode.max_length_extra=2",
    ]
    config = read_config(overrides=[*sizes, "decode.max_length_ratio=1"])
    tokenizers = train_tokenizers(["ein haus"] * 20, ["a house"] * 20, config.text)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    write_bundle(
        tmp_path / "model",
        config=config,
        tokenizers=tokenizers,
        weights=model.state_dict(),
        golden=["haus"],
    )
    found = [
        json.loads(line)
        for line in translate(tmp_path / "model", "--json", "ein haus", "haus", capsys=capsys)
    ]
    assert [each["alignment"] for each in found] == [None, None]


def test_json_has_scores_tokens_and_alignment(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requested attention was missing (sockeye#385); every row sums to 1."""
    lines = translate(bundle, "--json", "--nbest", "2", "Guten Morgen.", capsys=capsys)
    found = json.loads(lines[0])
    assert found["line"] == 1
    assert found["score"] <= 0
    assert len(found["log_probs"]) in (len(found["tokens"]), len(found["tokens"]) + 1)
    assert len(found["alternatives"]) == 2
    assert all(sum(row) == pytest.approx(1.0, abs=1e-3) for row in found["alignment"])
    assert {len(row) for row in found["alignment"]} == {len(found["src_tokens"])}


def test_json_has_a_confidence_where_the_model_has_a_calibration(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, scores and tokens are as without one; a blank line has none."""
    calibrated = add_calibration(bundle, tmp_path / "calibrated")
    lines = ["Guten Morgen.", "", "Das ist ein Haus."]
    assert translate(calibrated, *lines, capsys=capsys) == translate(bundle, *lines, capsys=capsys)
    before = [json.loads(line) for line in translate(bundle, "--json", *lines, capsys=capsys)]
    after = [json.loads(line) for line in translate(calibrated, "--json", *lines, capsys=capsys)]
    assert ["confidence" in each for each in before] == [False] * 3
    assert ["confidence" in each for each in after] == [True, False, True]
    for each in (after[0], after[2]):
        expected = CALIBRATION.confidence(
            tokens=each["tokens"], log_probs=each["log_probs"], src_tokens=each["src_tokens"]
        )
        assert each.pop("confidence") == pytest.approx(expected, abs=1e-5)
    assert after == before


def test_the_same_seed_draws_the_same(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--sample",
        "--temperature",
        "1.5",
        "--top-k",
        "20",
        "--top-p",
        "0.95",
        "Guten Morgen.",
        "Das ist ein Haus.",
    )
    first = translate(bundle, "--seed", "5", *options, capsys=capsys)
    assert translate(bundle, "--seed", "5", *options, capsys=capsys) == first
    assert translate(bundle, "--seed", "6", *options, capsys=capsys) != first


def test_minimum_bayes_risk_decoding_reports_the_utility(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--mbr", "chrf", "--samples", "8", "--epsilon", "0.001", "--seed", "3")
    texts = ("Guten Morgen.", "Das ist ein Haus.")
    plain = translate(bundle, *options, *texts, capsys=capsys)
    found = [
        json.loads(line)
        for line in translate(bundle, "--json", "--nbest", "2", *options, *texts, capsys=capsys)
    ]
    assert [each["text"] for each in found] == plain
    assert all(0 <= each["utility"] <= 100 for each in found)
    ranked = translate(bundle, "--nbest", "2", *options, texts[0], capsys=capsys)
    assert [line.split("\t")[1] for line in ranked] == [
        f"{each['utility']:.4f}" for each in found[0]["alternatives"]
    ]
    assert "utility" not in json.loads(translate(bundle, "--json", "x", capsys=capsys)[0])
    assert len(translate(bundle, "--mbr", "bleu", "--beam", "4", *texts, capsys=capsys)) == 2


def test_a_prefix_is_kept(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = translate(bundle, "--prefix", "Good", "Guten Morgen.", capsys=capsys)
    assert line.startswith("Good")


def test_no_n_gram_is_repeated(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for beam, size in (("1", 1), ("3", 2)):
        options = ["--beam", beam, "--no-repeat-ngram-size", str(size), "--json"]
        [line] = translate(bundle, "Guten Morgen.", *options, capsys=capsys)
        tokens = json.loads(line)["tokens"]
        grams = list(zip(*(tokens[at:] for at in range(size)), strict=False))
        assert len(grams) == len(set(grams))
    options = ["--no-repeat-ngram-size", "2", "--constraint", "equal-length"]
    assert main(["translate", "-m", str(bundle), "Guten Morgen.", *options]) == 2
    found = capsys.readouterr().err
    assert "no_repeat_ngram_size and constraints exclude each other" in found


def test_the_first_lines_come_before_the_last_are_read(bundle: Path) -> None:
    """The first window is written while the input is still open."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dragoman", "translate", "-m", str(bundle), "--beam", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"Guten Morgen.\n" * 40)
        process.stdin.flush()
        assert process.stdout.readline().endswith(b"\n")
        process.stdin.close()
        assert len(process.stdout.readlines()) == 39
    assert process.returncode == 0


def test_a_file_and_a_pipe_give_the_same(bundle: Path, dragoman: Run, tmp_path: Path) -> None:
    """A regular file and a pipe give the same translations in the same order."""
    text = "".join(f"{line}\n" for line in LINES * 12)
    piped = dragoman("translate", "-m", bundle, "--beam", "1", input=text)
    path = tmp_path / "text"
    path.write_text(text, "utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dragoman", "translate", "-m", str(bundle), "--beam", "1"]
    with path.open("rb") as file:
        read = subprocess.run(
            command, stdin=file, capture_output=True, env=environment, timeout=120
        )
    assert (piped.returncode, read.returncode) == (0, 0)
    assert read.stdout.decode() == piped.stdout
    assert len(piped.stdout.splitlines()) == len(LINES) * 12


def test_lines_before_invalid_utf8_are_translated(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"Guten Morgen.\n" * 60 + "Gr\u00fc\u00dfe\n".encode("latin1") + b"x\n")
    with path.open(encoding="latin1") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert main(["translate", "-m", str(bundle)]) == 2
    captured = capsys.readouterr()
    assert (
        "line 61 of standard input must be UTF-8; found the byte 0xfc at position 3"
        in captured.err.splitlines()[-1]
    )
    assert len(captured.out.splitlines()) == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "0.5"], "--temperature needs --sample"),
        (["--sample", "--beam", "4"], "found both, with --beam 4"),
        (["--device", "gpu"], "found 'gpu'"),
        (["--mbr", "comet"], "--mbr must be one of chrf, bleu; found 'comet'"),
        (["--samples", "8"], "--samples needs --mbr; found --samples 8"),
        (["--mbr", "chrf", "--sample"], "--mbr and --sample exclude each other"),
        (["--mbr", "chrf", "--samples", "8", "--beam", "4"], "found --samples 8 and --beam 4"),
        (["--mbr", "chrf", "--beam", "4", "--seed", "4"], "--seed and --beam exclude each other"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], words: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "-m", str(bundle), *arguments, "text"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_input_that_is_not_utf8_names_the_line_and_keeps_earlier_outputs(
    bundle: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text in another code page is explained (tensorflow/nmt#240)."""
    typed(b"Guten Morgen.\n" * 33 + "Gr\u00fc\u00dfe\n".encode("latin1"))
    assert main(["translate", "-m", str(bundle)]) == 2
    captured = capsys.readouterr()
    assert (
        "line 34 of standard input must be UTF-8; found the byte 0xfc at position 3"
        in captured.err.splitlines()[-1]
    )
    assert len(captured.out.splitlines()) == 33, "all that came before it is answered"


def test_notes_are_shown_and_counted(
    bundle: Path, typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Truncations, retries and limits are reported; a thousand such notes do not hide the rest."""
    typed("Das ist ein Haus.\n" * 10)
    assert main(["translate", "-m", str(bundle)]) == 0
    err = capsys.readouterr().err.splitlines()
    assert err[0].startswith("dragoman: line 1: stopped at ")
    assert err[-1] == "dragoman: 10 lines with notes in total; --json includes them"
    assert len(err) == 4
    assert main(["translate", "-m", str(bundle), "--json", "Das ist ein Haus."]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0].startswith("stopped at ")


def test_a_directory_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "-m", str(tmp_path / "nowhere"), "Hallo"]) == 2
    err = capsys.readouterr().err
    assert "nowhere" in err
    assert len(err.splitlines()) == 1


def test_a_corrupt_file_is_named(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    weights = copy / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 4
    weights.write_bytes(data)
    assert main(["translate", "-m", str(copy), "Hallo"]) == 65
    err = capsys.readouterr().err
    assert "weights.safetensors" in err
    assert len(err.splitlines()) == 1


def test_lines_end_in_lf_or_crlf_only(tmp_path: Path) -> None:
    """Other Unicode line breaks are text (code-docstring-corpus#12)."""
    path = tmp_path / "text"
    path.write_bytes("a\u2028b\r\nc\x0cd\n".encode())
    with path.open("rb") as stream:
        assert list(decode_lines(stream)) == ["a\u2028b", "c\x0cd"]


def test_lines_typed_at_a_terminal_are_translated_at_once(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a terminal a line is translated before the next is read, and a note explains how to
    quit.
    """
    written: list[int] = []

    class Keyboard:
        """Interactive input that records how many translations were written before each line."""

        def isatty(self) -> bool:
            return True

        @property
        def buffer(self) -> Iterator[bytes]:
            for line in (b"Guten Morgen.\n", b"x\n", b"y\n"):
                seen.append(capsys.readouterr())
                written.append(sum(len(each.out.splitlines()) for each in seen))
                yield line

    seen: list[Any] = []
    monkeypatch.setattr(sys, "stdin", Keyboard())
    assert main(["translate", "-m", str(bundle)]) == 0
    assert written == [0, 1, 2]
    assert "end with Ctrl-D" in "".join(each.err for each in seen)


def test_a_shortlist_is_made_from_two_texts(
    bundle: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [str(corpus / f"train.{language}") for language in ("de", "en")]
    once, alone = (
        translate(bundle, "--shortlist", *texts, *lines, capsys=capsys)
        for lines in (["Guten Morgen.", "x y z"], ["x y z"])
    )
    assert len(once) == 2
    assert once[1:] == alone
    (tmp_path / "short.en").write_text("one line\n", "utf-8")
    assert (
        main(
            [
                "translate",
                "-m",
                str(bundle),
                "--shortlist",
                texts[0],
                str(tmp_path / "short.en"),
                "x",
            ]
        )
        == 2
    )
    assert "1" in capsys.readouterr().err


def test_a_shortlist_needs_the_native_engine(
    bundle: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [str(corpus / f"train.{language}") for language in ("de", "en")]
    assert (
        main(
            ["translate", "-m", str(bundle), "--shortlist", *texts, "--engine", "ctranslate2", "x"]
        )
        == 2
    )
    assert "a shortlist needs the native engine; found ctranslate2" in capsys.readouterr().err


def test_constraints_on_the_command_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["Guten Morgen.", "Das ist ein Haus."]
    options = ["--constraint", "equal_length", "--constraint", "punctuation", "--json"]
    options += ["--require", "o", "--forbid", "x", "--forbid", "yy"]
    rows = [json.loads(line) for line in translate(bundle, *options, *lines, capsys=capsys)]
    for line, row in zip(lines, rows, strict=True):
        assert len(row["text"]) == len(line)
        assert row["constraints"] == ["equal_length", "punctuation", "require o", "forbid x yy"]
    [found] = translate(bundle, "--regex", "[a-c]{3} ?[d-f]+", lines[0], capsys=capsys)
    assert re.fullmatch("[a-c]{3} ?[d-f]+", found)
    [free] = translate(bundle, "--json", lines[0], capsys=capsys)
    assert "constraints" not in json.loads(free)


def test_constraints_that_conflict_are_named(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--constraint", "equal_length", "--require", "Hauptbahnhof"]
    assert main(["translate", "-m", str(bundle), *options, "Ja."]) == 2
    error = capsys.readouterr().err
    assert "none under equal_length (3 characters) and require Hauptbahnhof, for 'Ja.'" in error
    assert "Traceback" not in error
