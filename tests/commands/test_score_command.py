"""`dragoman score`: a number for each pair, in order, and the totals on stderr."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

from dragoman.cli.app import main
from dragoman.inference import Translator


def numbers(capsys: pytest.CaptureFixture[str]) -> list[float]:
    return [float(line) for line in capsys.readouterr().out.splitlines()]


def test_a_number_for_each_pair_and_a_summary(
    bundle: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [corpus / "dev.de", corpus / "dev.en"]
    assert main(["score", "-m", str(bundle), "--src", str(files[0]), "--tgt", str(files[1])]) == 0
    captured = capsys.readouterr()
    texts = [path.read_text(encoding="utf-8").splitlines() for path in files]
    expected = Translator.load(bundle).score(*texts)
    assert [float(line) for line in captured.out.splitlines()] == pytest.approx(
        [each.log_prob for each in expected], abs=1e-4
    )
    tokens = sum(len(each.tokens) for each in expected)
    mean = sum(each.log_prob for each in expected) / tokens
    assert (
        f"6 pairs, {tokens} tokens: mean log-probability {mean:.4f} per token, perplexity "
        f"{math.exp(-mean):.4g}, " in captured.err
    )
    characters = sum(len(text) + 1 for text in texts[1])
    by_character = math.exp(-mean * tokens / characters)
    assert f", {by_character:.4g} per character" in captured.err


def test_json_and_normalized_numbers_agree(
    bundle: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--src", str(corpus / "dev.de"), "--tgt", str(corpus / "dev.en")]
    assert main(["score", "-m", str(bundle), *files, "--json", "--batch-size", "2"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["log_prob"] == pytest.approx(sum(row["log_probs"]), abs=1e-4)
        assert row["per_token"] == pytest.approx(row["log_prob"] / len(row["tokens"]), abs=1e-5)
        assert row["tokens"][-1] == "</s>"
        assert row["notes"] == []
    assert main(["score", "-m", str(bundle), *files, "--normalize"]) == 0
    assert numbers(capsys) == pytest.approx([row["per_token"] for row in rows], abs=1e-4)


def test_a_file_of_pairs_with_named_columns(
    bundle: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [corpus / "dev.de", corpus / "dev.en"]
    assert main(["score", "-m", str(bundle), "--src", str(files[0]), "--tgt", str(files[1])]) == 0
    expected = numbers(capsys)
    columns = [path.read_text(encoding="utf-8").splitlines() for path in files]
    path = tmp_path / "pairs.tsv.gz"
    path.write_bytes(
        gzip.compress(
            "".join(
                ["id\tB\tA\n", *(f"x\t{t}\t{s}\n" for s, t in zip(*columns, strict=True))]
            ).encode()
        )
    )
    assert (
        main(
            [
                "score",
                "-m",
                str(bundle),
                "--pairs",
                str(path),
                "--src-field",
                "A",
                "--tgt-field",
                "B",
            ]
        )
        == 0
    )
    assert numbers(capsys) == pytest.approx(expected, abs=1e-4)


def test_empty_lines_keep_their_numbers(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text("\nGuten Morgen.\n\n", "utf-8")
    (tmp_path / "b").write_text("Good morning.\n\n\n", "utf-8")
    assert (
        main(
            ["score", "-m", str(bundle), "--src", str(tmp_path / "a"), "--tgt", str(tmp_path / "b")]
        )
        == 0
    )
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 3
    assert "line 1: its source is empty" in captured.err
    assert "line 2: its target is empty" in captured.err


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (b"one\ntwo\n", "must have equally many lines; found 3 and 2"),
        (b"one\nGr\xfc\xdfe\nthree\n", "line 2 must be UTF-8"),
        (b"one\n" + b"x" * 70_000 + b"\nthree\n", "line 2 must have at most 65536 bytes"),
    ],
)
def test_files_that_do_not_fit_are_reported_before_the_model_is_opened(
    second: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_bytes(b"eins\nzwei\ndrei\n")
    (tmp_path / "b").write_bytes(second)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "manifest.json").write_text(
        "{}"
    )  # looks like a bundle; loading it would fail
    assert (
        main(
            [
                "score",
                "-m",
                str(tmp_path / "model"),
                "--src",
                str(tmp_path / "a"),
                "--tgt",
                str(tmp_path / "b"),
            ]
        )
        == 2
    )
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "a score needs text; found neither --src and --tgt nor --pairs"),
        (["--src", "a"], "found only a"),
        (
            ["--src", "a", "--tgt", "b", "--src-field", "x"],
            "--src-field names a column of --pairs; found 'x' without --pairs",
        ),
        (["--src", "nowhere.de", "--tgt", "nowhere.en"], "nowhere.de must exist"),
    ],
)
def test_options_that_name_no_pairs(
    options: list[str], words: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", "-m", str(bundle), *options]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_nothing_to_score(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        (tmp_path / name).touch()
    assert (
        main(
            ["score", "-m", str(bundle), "--src", str(tmp_path / "a"), "--tgt", str(tmp_path / "b")]
        )
        == 2
    )
    assert "must hold pairs to score; found no line at all" in capsys.readouterr().err


def test_no_mean_without_a_scored_pair(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long").write_text("ab " * 6000 + "\n")
    files = ["--src", str(tmp_path / "long"), "--tgt", str(tmp_path / "long")]
    assert main(["score", "-m", str(bundle), *files]) == 0
    captured = capsys.readouterr()
    assert captured.out == "nan\n"
    assert "no mean: none of 1 pair was scored" in captured.err
    assert "perplexity" not in captured.err
