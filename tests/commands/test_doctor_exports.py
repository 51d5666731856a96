"""`dragoman doctor --export`: exports are compared with their model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dragoman.bundle import Bundle
from dragoman.cli.app import main
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.doctor.export_directory_opener import HuggingFaceEngine
from dragoman.doctor.model_under_test import load_model_under_test
from dragoman.doctor.precision_and_engine_agreement import check_exported_engine
from dragoman.exchange.export import EXPORTERS
from dragoman.inference.exported_engine_files import model_digest
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import hash_file

PACKAGES = {"onnx": "onnxruntime", "huggingface": "transformers", "ctranslate2": "ctranslate2"}


@pytest.fixture(scope="module")
def exported(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Export the model to every program that is installed."""
    folder = tmp_path_factory.mktemp("exports")
    made = {}
    for program, package in PACKAGES.items():
        pytest.importorskip(package)
        more = {"quantization": "int8"} if program == "ctranslate2" else {}
        made[program] = EXPORTERS[program](bundle, folder / program, **more).path
    return made


def examined(
    bundle: Path, *exports: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, dict[str, object]]:
    """Run the command; return its rows by name."""
    main(
        [
            "doctor",
            str(bundle),
            "--json",
            *(word for path in exports for word in ("--export", str(path))),
        ]
    )
    return {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def test_every_export_is_compared_with_the_model(
    bundle: Path, exported: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # "dragoman" writes a model directory, which the doctor examines as such.
    programs = set(EXPORTERS) - {"dragoman"}
    assert set(exported) == programs, "a new program must be one that the doctor can open"
    checks = examined(bundle, *exported.values(), capsys=capsys)
    found = {
        name: (checks[name]["verdict"], checks[name]["tolerance"])
        for name in ("onnx", "huggingface", "ctranslate2-int8")
    }
    assert found == {
        "onnx": ("PASS", 1e-3),
        "huggingface": ("PASS", 1e-3),
        "ctranslate2-int8": ("PASS", 1.0),
    }
    assert checks["onnx"]["note"] == checks["huggingface"]["note"] == "7 of 7 equal"
    assert "exported engines" not in checks


def test_an_export_of_other_weights_and_a_damaged_one_fail(
    bundle: Path, exported: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Path(shutil.copytree(exported["onnx"], tmp_path / "other"))
    fields = manifest.read_manifest(other)
    files = {name: hash_file(other / name) for name in fields.pop("files")}
    (other / manifest.MANIFEST_NAME).unlink()
    kept = {name: fields[name] for name in ("kind", "program")}
    manifest.write_manifest(other, files, {**kept, "model_sha256": "0" * 64})
    assert examined(bundle, other, capsys=capsys)["onnx"] == {
        "check": "onnx",
        "verdict": "FAIL",
        "error": None,
        "tolerance": None,
        "note": f"{other} must be exported from this model; "
        "found one exported from other weights; export it again",
    }
    damaged = Path(shutil.copytree(exported["onnx"], tmp_path / "damaged"))
    with (damaged / "encoder.onnx").open("ab") as file:
        file.write(b"more")
    check = examined(bundle, damaged, capsys=capsys)["onnx"]
    assert check["verdict"] == "FAIL"
    assert f"{damaged / 'encoder.onnx'} must be as it was written" in str(check["note"])


def test_a_directory_that_is_no_export_is_rejected(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(bundle), "--export", str(bundle)]) == 2
    assert "must be an export; found kind 'dragoman bundle'" in capsys.readouterr().err
    assert main(["doctor", str(bundle), "--export", str(tmp_path)]) != 0
    assert "manifest.json" in capsys.readouterr().err


def test_export_with_other_outputs_is_detected(bundle: Path, exported: dict[str, Path]) -> None:
    """The check runs transformers; it does not trust the manifest."""
    loaded = Bundle.load(bundle)
    engine = HuggingFaceEngine(exported["huggingface"], loaded.tokenizers)
    subject = load_model_under_test(bundle)
    subject.engines["huggingface"] = lambda: engine
    assert check_exported_engine(subject, "huggingface").error < 1e-3
    with torch.no_grad():
        engine._runner.model.model.decoder.layers[0].fc1.weight.mul_(1.5)
    assert check_exported_engine(subject, "huggingface").error > 1e-3
    assert engine.unsupported_reason(BeamSearch(2)) == "does not support beam search"
    assert engine.unsupported_reason(GreedySearch(), 10**6).startswith("was exported for ")
    assert json.loads((exported["huggingface"] / manifest.MANIFEST_NAME).read_text())[
        "model_sha256"
    ] == model_digest(loaded)
