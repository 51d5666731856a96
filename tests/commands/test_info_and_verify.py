"""`dragoman info` and `dragoman verify`: what a directory is, and whether it is whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from confidence_kit import add_calibration
from kernel_kit import cache_with_kernels

from dragoman.bundle import Bundle, write_bundle
from dragoman.cli.app import main
from dragoman.cli.info import _describe_run
from dragoman.storage.atomic_and_safe_file_io import FileRecord
from dragoman.storage.manifest import write_manifest


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit % len(data)] ^= 1 << (bit % 8)
    path.write_bytes(data)


def test_info_describes_a_model(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle)]) == 0
    out = capsys.readouterr().out
    assert "de to en" in out
    assert "characters" in out
    assert "Settings that differ from the recipe tiny" in out
    assert "model.width" in out
    assert "128" in out, "what the recipe has stands beside"
    assert "model.norm " not in out, "what is as in the recipe is not listed"


def test_info_as_json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["changed"]["model.width"] == {"value": "16", "was": "128"}
    assert values["recipe"] == "tiny"
    assert {name: type(value) for name, value in values.items()} == {
        "model": str,
        "task": str,
        "recipe": str,
        "src_lang": str,
        "tgt_lang": str,
        "directions": list,
        "parameters": int,
        "encoder": list,
        "decoder": list,
        "width": int,
        "tokenizer": str,
        "shared_vocabulary": bool,
        "src_vocab_size": int,
        "tgt_vocab_size": int,
        "confidence": type(None),
        "bytes": int,
        "manifest": dict,
        "engines": list,
        "changed": dict,
        "run": dict,
    }
    assert values["parameters"] > 1000
    assert values["bytes"] == sum(
        each.stat().st_size
        for each in bundle.rglob("*")
        if each.is_file() and each.name != "manifest.json"
    )
    assert values["manifest"]["bundle_format"] == 1


def test_info_shows_the_error_of_the_confidence(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrated = add_calibration(bundle, tmp_path / "calibrated")
    assert main(["info", str(calibrated)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "expected calibration error 5.2 %, AUROC 0.81; good: chrF 61.5+" in out
    assert main(["info", str(calibrated), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["confidence"] == {
        "map": "logistic",
        "good_chrf": 61.5,
        "calibration_error": 0.052,
        "chance_error": 0.04,
        "auroc": 0.812,
        "fitted_on": 400,
        "measured_on": 410,
    }
    assert main(["verify", str(calibrated)]) == 0


def test_the_card(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(bundle), "--card"]) == 0
    assert "# Translator from de to en" in capsys.readouterr().out


def test_a_directory_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["info", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "notes.txt" in err
    assert len(err.splitlines()) == 1


def test_a_path_that_is_not_there_names_a_model_nearby(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(bundle.parent / "my-modle")]) == 2
    assert f"did you mean {bundle}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({"reason": "deadline"}, "finished at step 12: its time budget was used up"),
        ({"reason": "patience"}, "finished at step 12: no better for train.patience validations"),
        ({"reason": ""}, "finished at step 12"),
        ({"state": "stopped", "reason": "SIGTERM"}, "stopped at step 12: SIGTERM"),
    ],
)
def test_info_reports_in_words_why_a_run_ended(status: dict[str, str], words: str) -> None:
    assert _describe_run({"state": "finished", "step": 12, **status}) == words


def test_info_of_an_unfinished_run_reports_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "status.json").write_text(
        json.dumps({"state": "running", "step": 1200})
    )
    assert main(["info", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "unfinished training run" in out
    assert "1200" in out
    assert main(["info", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] is False


def test_a_whole_model_verifies(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(bundle)]) == 0
    assert "all checksums match" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        "weights.safetensors",
        "config.json",
        "golden.json",
        "card.md",
        "text/text.json",
        "text/shared.model",
        "manifest.json",
    ],
)
def test_one_flipped_bit_is_found_and_the_file_named(
    copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(copy / name, 1001)
    assert main(["verify", str(copy)]) == 65
    captured = capsys.readouterr()
    assert name in captured.out
    assert name in captured.err
    assert main(["verify", str(copy), "--json"]) == 65
    report = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in report["files"] if not each["ok"]] == [name]


def test_extra_files_are_named_and_ignored(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "notes \x1b[31m.txt").write_text("mine")
    (copy / "more").mkdir()
    (copy / "engines").symlink_to(copy.parent)
    (copy / "training").mkdir()
    assert main(["verify", str(copy)]) == 0
    captured = capsys.readouterr()
    assert (
        "3 extra files, not part of the model: engines, more/, notes \\x1b[31m.txt" in captured.err
    )
    assert "all checksums match" in captured.out
    assert main(["verify", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["extra"] == [
        "engines",
        "more/",
        "notes \x1b[31m.txt",
    ]


def test_names_that_are_not_utf8_are_shown(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(os.fsencode(copy / "text") + b"/caf\xe9", "wb"):
        pass
    assert main(["verify", str(copy)]) == 65
    assert "text/caf\\udce9" in capsys.readouterr().out


def test_a_missing_file_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "weights.safetensors").unlink()
    assert main(["verify", str(copy)]) == 65
    assert "weights.safetensors" in capsys.readouterr().err


def test_a_directory_that_is_neither_model_nor_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "found no manifest.json in it" in capsys.readouterr().err


@pytest.fixture
def with_engines(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model with a sound engine, one of other weights, and one without a manifest."""
    pytest.importorskip("ctranslate2")
    from dragoman.exchange.export import export_ctranslate2

    monkeypatch.setenv("DRAGOMAN_CACHE", str(cache_with_kernels(tmp_path / "cache")))
    loaded = Bundle.load(copy)
    config = loaded.config.replace(
        decode={"beam": 1}
    )  # with a beam the native engine translates, and nothing is measured
    write_bundle(
        copy,
        config=config,
        tokenizers=loaded.tokenizers,
        weights=loaded.model.state_dict(),
        golden=["Guten Morgen."],
    )
    for quantization in ("float32", "int8", "int8_float32"):
        folder = export_ctranslate2(copy, quantization=quantization).path
        if quantization == "int8":
            manifest = json.loads((folder / "manifest.json").read_text())
            (folder / "manifest.json").unlink()
            write_manifest(
                folder,
                {name: FileRecord(**record) for name, record in manifest["files"].items()},
                {
                    **{
                        name: manifest[name]
                        for name in ("kind", "engine", "quantisation", "parity")
                    },
                    "model_sha256": "0" * 64,
                },
            )
        if quantization == "int8_float32":
            (folder / "manifest.json").unlink()
    return copy


def test_info_lists_the_engines(with_engines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(with_engines)]) == 0
    out = capsys.readouterr().out
    table = out[out.index("Engines") : out.index("Settings that differ")]
    assert "ctranslate2-float32       float32" in table
    assert "1 of 1 equal" in table
    assert "stale: export it again" in table
    assert "damaged: export it again" in table
    assert max(map(len, map(str.rstrip, table.splitlines()))) <= 100


def test_info_shows_stored_measurements(
    with_engines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("int8", "int8_float32"):
        shutil.rmtree(with_engines / "engines" / f"ctranslate2-{name}")
    assert main(["translate", "-m", str(with_engines), "Guten Morgen."]) == 0
    assert main(["info", str(with_engines), "--json"]) == 0
    engines = json.loads(capsys.readouterr().out.splitlines()[-1])["engines"]
    assert [engine["name"] for engine in engines] == ["native", "ctranslate2-float32"]
    assert all(engine["rate"] > 0 for engine in engines)
    assert [engine["chosen"] for engine in engines].count(True) == 1
    assert main(["info", str(with_engines)]) == 0
    assert "default" in capsys.readouterr().out


def test_without_engines_nothing_is_reported(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(bundle)]) == 0
    assert "Engines" not in capsys.readouterr().out
