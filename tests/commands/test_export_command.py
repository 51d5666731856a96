"""`dragoman export` and `dragoman import`: their output and their errors."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from dragoman.bundle import Bundle
from dragoman.cli.app import main

pytest.importorskip("ctranslate2")


@pytest.fixture
def model(bundle: Path, tmp_path: Path) -> Path:
    """Copy the model, to put engines into."""
    return Path(shutil.copytree(bundle, tmp_path / "my-model"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "some.de"
    path.write_text("Guten Morgen.\n\nDas ist ein Haus.\n", encoding="utf-8")
    return path


def test_export_prints_the_path_and_the_parity_and_translate_uses_it(
    model: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "-m", str(model), "--beam", "1", "Guten Morgen."]) == 0
    before = capsys.readouterr().out
    assert (
        main(
            [
                "export",
                str(model),
                "--to",
                "ctranslate2",
                "--quantization",
                "float32",
                "--check",
                str(texts),
            ]
        )
        == 0
    )
    directory, parity = capsys.readouterr().out.splitlines()
    assert directory == str(model / "engines" / "ctranslate2-float32")
    assert parity.startswith(
        "parity: greedy outputs equal on 3 of 3 sentences (100.0 %), largest difference of a "
        "log-probability"
    )
    assert main(["translate", "-m", str(model), "--beam", "1", "Guten Morgen."]) == 0
    assert capsys.readouterr().out == before
    assert main(["translate", "-m", str(model), "--beam", "1", "--json", "Guten Morgen."]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == before.rstrip("\n")
    assert len(found["alignment"]) == len(found["tokens"])
    assert main(["verify", str(model)]) == 0


def test_a_model_in_int8_is_smaller_and_used_like_any_other(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    (model / "training").mkdir()
    (model / "training" / "log.jsonl").write_text("{}")
    arguments = ["export", str(model), "--to", "dragoman", "--quantization", "int8", "--json"]
    assert main([*arguments, "-o", str(small), "--src", str(texts), "--ref", str(texts)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(small)
    assert found["parity"]["sentences"] == 3
    assert "bleu_native" in found["parity"]
    sizes = [(each / "weights.safetensors").stat().st_size for each in (small, model)]
    assert sizes[0] < 0.5 * sizes[1]
    assert not (small / "training").exists()
    assert main(["info", str(small), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["manifest"]["quantization"] == "int8"
    assert main(["info", str(small), "--card"]) == 0
    assert "stored in int8" in capsys.readouterr().out
    assert main(["verify", str(small)]) == 0
    assert main(["translate", "-m", str(small), "Guten Morgen."]) == 0
    # In float32 again, and a copy of the copy, nothing is lost any more.
    assert main(["export", str(small), "--to", "dragoman", "-o", str(tmp_path / "large")]) == 0
    assert "equal on" in capsys.readouterr().out
    assert main(["info", str(tmp_path / "large"), "--json"]) == 0
    assert "quantization" not in json.loads(capsys.readouterr().out)["manifest"]
    one, other = (Bundle.load(each).model.state_dict() for each in (small, tmp_path / "large"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_export_compares_bleu_and_writes_json(
    model: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "export",
        str(model),
        "--to",
        "ctranslate2",
        "--src",
        str(texts),
        "--ref",
        str(texts),
        "--json",
    ]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parity"]["sentences"] == 3
    assert {"bleu", "bleu_native"} <= found["parity"].keys()


def test_unsupported_requests_are_reported_once(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(model), "--to", "ctranslate2", "--quantization", "int8"]) == 0
    capsys.readouterr()
    assert (
        main(
            [
                "translate",
                "-m",
                str(model),
                "--engine",
                "ctranslate2-int8",
                "--sample",
                "Guten Morgen.",
                "Das ist ein Haus.",
            ]
        )
        == 0
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if "engine" in line]
    assert lines == [
        "the engine ctranslate2-int8 does not support sampling: the native engine is used"
    ]


def test_a_damaged_engine_is_named_by_verify_and_passed_over_by_translate(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(model), "--to", "ctranslate2", "--quantization", "int8"]) == 0
    with (model / "engines" / "ctranslate2-int8" / "model.bin").open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\xff")
    capsys.readouterr()
    assert main(["verify", str(model)]) == 65
    assert "engines/ctranslate2-int8/model.bin" in capsys.readouterr().err
    assert main(["translate", "-m", str(model), "--engine", "ctranslate2", "Guten Morgen."]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    [warning] = [line for line in captured.err.splitlines() if "warning" in line]
    assert "ctranslate2-int8 is not used" in warning
    assert "model.bin" in warning


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "tensorrt"], "found 'tensorrt'"),
        (["--to", "onnx"], "found no --out"),
        (["--to", "dragoman"], "found no --out"),
        (["--to", "dragoman", "--quantization", "int8_float32", "--out", "new"], "'int8_float32'"),
        (["--to", "dragoman", "--quantization", "int8", "--out", "OUT"], "a file at"),
        (["--to", "ctranslate2", "--quantization", "int4"], "found 'int4'"),
        (
            ["--to", "onnx", "--quantization", "int8", "--out", "new"],
            "found --quantization int8; quantize its graphs with onnxruntime",
        ),
        (
            ["--to", "huggingface", "--quantization", "int8", "--out", "new"],
            "found --quantization int8; load it with",
        ),
        (["--to", "onnx", "--out", "OUT/below"], "found a file at"),
        (["--to", "ctranslate2", "--src", "a"], "found only a"),
        (["--to", "ctranslate2", "--check", "no-such-file"], "no-such-file"),
        (["--to", "huggingface", "--out", "OUT"], "a file at"),
    ],
)
def test_invalid_arguments_are_one_line(
    model: Path,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "taken").write_text("mine")
    arguments = [each.replace("OUT", str(tmp_path / "taken")) for each in arguments]
    assert main(["export", str(model), *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (model / "engines").exists() or not list((model / "engines").iterdir())


def test_paths_that_are_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none"), "--to", "ctranslate2"]) == 2
    assert "found nothing at" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--to", "onnx", "--out", str(tmp_path / "x")]) == 2
    assert "which is empty" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "none"), "--out", str(tmp_path / "x")]) == 2
    assert "no directory at" in capsys.readouterr().err


def test_an_empty_text_to_compare_on_is_rejected(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text("\n\n")
    assert (
        main(["export", str(model), "--to", "ctranslate2", "--check", str(tmp_path / "empty")]) == 2
    )
    assert "found none in" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_path_is_rejected(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.chmod(0o500)
    try:
        assert main(["export", str(model), "--to", "ctranslate2"]) == 77
        assert "must be writable" in capsys.readouterr().err
    finally:
        model.chmod(0o700)


def test_import_prints_the_path_and_the_parity(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert (
        main(["export", str(model), "--to", "huggingface", "--out", str(tmp_path / "theirs")]) == 0
    )
    capsys.readouterr()
    assert (
        main(
            [
                "import",
                str(tmp_path / "theirs"),
                "--out",
                str(tmp_path / "back"),
                "--check",
                str(texts),
            ]
        )
        == 0
    )
    directory, parity = capsys.readouterr().out.splitlines()
    assert directory == str(tmp_path / "back")
    assert "equal on 2 of 2 sentences" in parity
