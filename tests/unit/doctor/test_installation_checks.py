"""Checks of the installation, on this machine and with parts that are missing or broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dragoman.cli.app import main
from dragoman.doctor import installation_checks
from dragoman.doctor.check_result import CheckResult
from dragoman.doctor.installation_checks import run_installation_checks
from dragoman.runtime.optional_package_checks import EXTRAS


def check(name: str) -> CheckResult:
    """Run one check alone: the others compile kernels and open GPUs."""
    only = [each for each in installation_checks._checks() if each[0] == name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation_checks, "_checks", lambda: only)
        [result] = run_installation_checks()
    return result


def test_every_check_reports_its_finding() -> None:
    names = []
    results = list(run_installation_checks(on_check=names.append))
    assert [result.name for result in results] == names
    assert len(set(names)) == len(names)
    assert set(EXTRAS) < set(names)
    assert all(result.note for result in results)
    assert torch.__version__ in results[0].note
    assert results[0].passed


def test_an_old_torch_fails_and_a_new_one_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert check("PyTorch").passed is False
    assert "must be 2.11 or later" in check("PyTorch").note
    monkeypatch.setattr(torch, "__version__", "2.99.0a0+git123")
    assert check("PyTorch").passed
    assert "tested up to" in check("PyTorch").note


@pytest.mark.parametrize(
    ("problem", "driver", "cuda", "passed", "note"),
    [
        (None, None, None, None, "none; the CPU is used"),
        (None, "/usr/bin/nvidia-smi", None, False, "is built for CPUs only"),
        (None, "/usr/bin/nvidia-smi", "13.0", None, "none; the CPU is used"),
        ("the GPU cannot be used (driver too old)", None, "13.0", False, "driver too old"),
    ],
)
def test_a_gpu_that_cannot_be_used_fails_and_none_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
    problem: str | None,
    driver: str | None,
    cuda: str | None,
    passed: bool | None,
    note: str,
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(installation_checks, "cuda_problem", lambda *_, **__: problem)
    monkeypatch.setattr(shutil, "which", lambda _: driver)
    result = check("GPU")
    assert result.passed is passed
    assert note in result.note


def test_a_wrong_product_of_a_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    installation_checks._compare_matmul(torch.device("cpu"))
    monkeypatch.setattr(installation_checks, "MATMUL_TOLERANCE", -1.0)
    with pytest.raises(installation_checks._BrokenError, match="off that on the CPU"):
        installation_checks._compare_matmul(torch.device("cpu"))


def test_a_device_that_fails_is_named() -> None:
    with pytest.raises(installation_checks._BrokenError, match="meta"):
        installation_checks._compare_matmul(torch.device("meta"))


def test_missing_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation_checks, "load_kernel_library", lambda: None)
    assert check("C++ engine").passed is False
    assert "g++" in check("C++ engine").note


def test_a_cache_directory_that_cannot_be_used_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DRAGOMAN_CACHE", str(tmp_path / "file"))
    assert check("cache directory").passed is False
    assert "DRAGOMAN_CACHE" in check("cache directory").note
    monkeypatch.setenv("DRAGOMAN_CACHE", str(tmp_path / "new"))
    assert check("cache directory").passed
    assert str(tmp_path / "new") in check("cache directory").note


def test_a_damaged_built_in_model_fails_and_none_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(installation_checks.box_path(), tmp_path / "box"))
    monkeypatch.setattr("dragoman.bundle.format.BOX", copy)
    assert check("built-in model").passed
    text = (copy / "config.json").read_text(encoding="utf-8")
    (copy / "config.json").write_text(text.replace("1", "2", 1), encoding="utf-8")
    assert check("built-in model").passed is False
    assert "config.json" in check("built-in model").note
    shutil.rmtree(copy)
    assert check("built-in model").passed is None


def test_optional_packages_are_skipped_if_missing_and_fail_if_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reasons = {"optuna": "no optuna", "onnx": "an onnx that does not load (ImportError: x)"}
    monkeypatch.setattr(installation_checks, "missing_reason", lambda name: reasons.get(name, ""))
    monkeypatch.setattr(installation_checks.importlib.metadata, "version", lambda name: "1.2.3")
    assert check("optuna").passed is None
    assert "pip install 'dragoman[tune]'" in check("optuna").note
    assert check("onnx").passed is False
    assert "ImportError: x" in check("onnx").note
    assert check("babel").note == "1.2.3"


def test_the_command_prints_a_table_or_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [
        CheckResult(name="PyTorch", passed=True, note="2.13.0"),
        CheckResult(name="GPU", passed=None, note="none; the CPU is used"),
    ]
    monkeypatch.setattr(installation_checks, "run_installation_checks", lambda **_: iter(results))
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "PASS" in printed
    assert "SKIP" in printed
    assert "none; the CPU is used" in printed
    results.append(CheckResult(name="C++ engine", passed=False, note="no kernels"))
    assert main(["doctor", "--json"]) == 2
    output = capsys.readouterr()
    values = json.loads(output.out)
    assert values["ok"] is False
    assert [row["verdict"] for row in values["checks"]] == ["PASS", "SKIP", "FAIL"]
    assert "found 1 of 3 failed: C++ engine" in output.err


def test_options_of_the_models_checks_need_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("ein Satz\n", encoding="utf-8")
    assert main(["doctor", "--src", str(tmp_path / "text")]) == 2
    assert "name its directory" in capsys.readouterr().err
