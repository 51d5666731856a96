"""`dragoman doctor`: its table, JSON and exit code."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from dragoman.bundle import Bundle
from dragoman.bundle.golden_vectors import DEVICE_TOLERANCE, TOLERANCE
from dragoman.cli.app import main
from dragoman.cli.doctor import _format_number
from dragoman.doctor import CHECKS
from dragoman.doctor.non_translation_model_checks import BF16_TOLERANCE
from dragoman.doctor.precision_and_engine_agreement import BFLOAT16_TOLERANCE, INT8_TOLERANCE
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import hash_file
from dragoman.storage.tensor_files import write_tensors


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundle, tmp_path / "copy"))


def signed(path: Path) -> None:
    """Write the manifest anew, as whoever changed a file on purpose would."""
    fields = manifest.read_manifest(path)
    files = {name: hash_file(path / name) for name in fields.pop("files")}
    (path / manifest.MANIFEST_NAME).unlink()
    manifest.write_manifest(
        path,
        files,
        {name: fields[name] for name in ("kind", "bundle_format", "created_by", "parameters")},
    )


def test_a_sound_model_passes(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(bundle)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0] == f"{bundle}, on 1 golden sentence and 6 random sentences"
    assert lines[1].split() == ["check", "result", "error", "tolerance", "note"]
    for name in CHECKS:
        [row] = [line for line in lines if line.startswith(f"{name}  ")]
        assert row.removeprefix(name).split()[0] == "PASS"
    assert re.search(r"exported engines +SKIP", captured.out)
    assert lines[-1] == f"{len(CHECKS)} checks passed, 1 skipped"


def test_as_json_on_sentences_of_ones_own(
    bundle: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["doctor", str(bundle), "--src", str(corpus / "dev.de"), "--sentences", "5", "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["sentences"], report["origin"]) == (True, 5, "5 given sentences")
    assert [check["check"] for check in report["checks"]] == [*CHECKS, "exported engines"]
    cached = next(check for check in report["checks"] if check["check"] == "KV cache")
    assert cached["verdict"] == "PASS"
    assert 0 <= cached["error"] <= cached["tolerance"]


def test_golden_vectors_that_were_changed_fail_with_65_and_are_named(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = json.loads((copy / "golden.json").read_text())
    golden["cases"][0]["log_probs"][0] -= 0.5
    (copy / "golden.json").write_text(json.dumps(golden))
    signed(copy)
    assert main(["verify", str(copy)]) == 0, "every byte is as it was written, now"
    assert main(["doctor", str(copy)]) == 65
    captured = capsys.readouterr()
    [row] = [line for line in captured.out.splitlines() if line.startswith("golden vectors")]
    assert row.split()[2:4] == ["FAIL", "0.500"]
    assert captured.err == (
        f"dragoman: error: every check of {copy} must pass; found 1 of {len(CHECKS) + 1} failed: "
        "golden vectors; "
        "see docs/doctor.md for each check\n"
    )
    assert main(["doctor", str(copy), "--json"]) == 65
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_weights_that_are_not_finite_are_a_row_and_not_the_end(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {
        name: tensor.clone() for name, tensor in Bundle.load(copy).model.state_dict().items()
    }
    weights["decoder.0.ffn.inner.weight"][0, 0] = torch.inf
    (copy / "weights.safetensors").unlink()
    write_tensors(copy / "weights.safetensors", weights)
    signed(copy)
    assert main(["doctor", str(copy)]) == 65
    captured = capsys.readouterr()
    assert "in decoder.0.ffn.inner.weight" in captured.out
    assert "finite weights" in captured.err


def test_weights_of_another_shape_are_a_row_and_the_rest_is_skipped(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {
        name: tensor.clone() for name, tensor in Bundle.load(copy).model.state_dict().items()
    }
    weights["embeddings.shared.weight"] = weights["embeddings.shared.weight"][:-1].contiguous()
    (copy / "weights.safetensors").unlink()
    write_tensors(copy / "weights.safetensors", weights)
    signed(copy)
    assert main(["doctor", str(copy), "--json"]) == 65
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["vocabulary sizes"]["verdict"] == "FAIL"
    assert "found embeddings.shared.weight F32" in checks["vocabulary sizes"]["note"]
    assert checks["int8"]["note"] == "the model cannot be built"


def test_engines_in_the_model_have_rows_of_their_own(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2")
    for quantization in ("float32", "int8"):
        assert (
            main(["export", str(copy), "--to", "ctranslate2", "--quantisation", quantization]) == 0
        )
    capsys.readouterr()
    assert main(["doctor", str(copy), "--json"]) == 0
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    exact, eight = checks["ctranslate2-float32"], checks["ctranslate2-int8"]
    assert (exact["verdict"], exact["tolerance"]) == ("PASS", 1e-3)
    assert (eight["verdict"], eight["tolerance"]) == ("PASS", 1.0)
    assert exact["error"] < eight["error"]
    with (copy / "engines" / "ctranslate2-int8" / "model.bin").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    assert main(["doctor", str(copy)]) == 65
    assert "found 1 of" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    assert main(["doctor", str(copy), "--json"]) == 65
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["ctranslate2-float32"]["verdict"] == "SKIP"
    assert "found no ctranslate2" in checks["ctranslate2-float32"]["note"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_a_terminal(
    bundle: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["doctor", str(bundle)]) == 0
    lines = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", shown.getvalue()).splitlines()[1:]
    assert max(map(len, lines)) <= width
    wrapped = [line for line in lines if line.startswith(" ")]
    assert len(wrapped) <= (3 if width == 80 else 0), wrapped  # only the reason for a SKIP is long


def test_the_page_explains_every_check_and_its_tolerance() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert re.findall(
        r"^\| ([A-Za-z][\w =]+?) \| [^|]+ \| [^|]+ \|$",
        page.split("## Tolerances")[0],
        flags=re.MULTILINE,
    )[1:] == [*CHECKS]
    limits = re.findall(
        r"^\| .+? \| ([\d.]+) \|", page.split("## Tolerances")[1], flags=re.MULTILINE
    )
    assert list(map(float, limits)) == [
        TOLERANCE,
        DEVICE_TOLERANCE,
        BFLOAT16_TOLERANCE,
        BF16_TOLERANCE,
        INT8_TOLERANCE,
    ]


def test_a_file_without_sentences_is_rejected(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blank.txt").write_text("\n  \n")
    assert main(["doctor", str(bundle), "--src", str(tmp_path / "blank.txt")]) == 2
    assert f"found none in {tmp_path / 'blank.txt'}" in capsys.readouterr().err


def test_path_without_a_model_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "which is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (0, "0"),
        (0.0, "0"),
        (12, "12"),
        (float("nan"), "nan"),
        (3.2e-6, "3e-06"),
        (0.5, "0.500"),
    ],
)
def test_numbers_are_short(value: float | None, shown: str) -> None:
    assert _format_number(value) == shown


def test_long_notes_are_below_the_table(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "engines" / "ctranslate2-float32").mkdir(parents=True)
    assert main(["doctor", str(copy)]) == 65
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    [row] = [line for line in lines if line.startswith("ctranslate2-float32  ")]
    assert row.endswith("see below")
    assert max(map(len, lines[1 : lines.index(row)])) <= 80
    assert lines[-1].startswith("ctranslate2-float32: ")
    assert "manifest.json" in lines[-1]
