"""Manifests: no byte of a directory changes unnoticed, and every error names its file."""

from __future__ import annotations

import json
import os
import random

import pytest
from sync_kit import SyncRecorder

from dragoman.errors import BundleError, CorruptError
from dragoman.storage import fault_injection, manifest
from dragoman.storage.atomic_and_safe_file_io import write_file
from dragoman.storage.checksum_verification import verify_directory


def make(directory, names=("a.bin", "b.json"), **fields):
    directory.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in names:
        (directory / name).parent.mkdir(exist_ok=True)
        files[name] = write_file(directory / name, [name.encode() * 50])
    manifest.write_manifest(directory, files, fields)
    return directory


def test_written_files_verify(tmp_path):
    content = manifest.verify_files(make(tmp_path / "d", step=7))
    assert content["step"] == 7
    assert content["format"] == manifest.FORMAT
    assert set(content["files"]) == {"a.bin", "b.json"}


@pytest.mark.parametrize("name", ["a.bin", "b.json", manifest.MANIFEST_NAME])
def test_every_bit_matters(tmp_path, name):
    listed_dir = make(tmp_path / "d")
    path = listed_dir / name
    good = path.read_bytes()
    choose = random.Random(3)
    for _ in range(60):
        bit = choose.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises((CorruptError, BundleError)) as caught:
            manifest.verify_files(listed_dir)
        assert str(path) in str(caught.value)
    path.write_bytes(good)
    manifest.verify_files(listed_dir)


@pytest.mark.parametrize(
    ("damage", "name", "found"),
    [
        (lambda d: (d / "a.bin").unlink(), "a.bin", "missing"),
        (lambda d: (d / "c").write_bytes(b""), "c", "not listed"),
        (lambda d: (d / "c").symlink_to(d.parent), "c", "not listed"),
        (lambda d: os.truncate(d / "a.bin", 3), "a.bin", "3 bytes where 250 were written"),
        (lambda d: (d / "a.bin").write_bytes(b"x" * 250), "a.bin", "SHA-256"),
        (lambda d: (d / manifest.MANIFEST_NAME).unlink(), manifest.MANIFEST_NAME, "No such file"),
        (
            lambda d: (d / manifest.MANIFEST_NAME).write_bytes(b"[1]"),
            manifest.MANIFEST_NAME,
            "list instead of an object",
        ),
        (
            lambda d: (d / manifest.MANIFEST_NAME).write_bytes(b"\xff"),
            manifest.MANIFEST_NAME,
            "utf-8",
        ),
        (
            lambda d: (d / manifest.MANIFEST_NAME).write_bytes(b'{"a": 1, "a": 2}'),
            manifest.MANIFEST_NAME,
            "'a' twice",
        ),
        (
            lambda d: (d / manifest.MANIFEST_NAME).write_bytes(
                b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}"
            ),
            manifest.MANIFEST_NAME,
            "nested deeper than 32",
        ),
        (
            lambda d: (d / manifest.MANIFEST_NAME).write_bytes(b'{"a": ' + b"[" * 200_000),
            manifest.MANIFEST_NAME,
            "nested deeper than 32",
        ),
        (
            lambda d: (d / manifest.MANIFEST_NAME).write_bytes(b" " * (1 << 21)),
            manifest.MANIFEST_NAME,
            "more than 1048576 bytes",
        ),
        (
            lambda d: ((d / "a.bin").rename(d / "x"), (d / "a.bin").symlink_to("x")),
            "a.bin",
            "a symbolic link",
        ),
    ],
)
def test_damage_is_reported_with_the_file(tmp_path, damage, name, found):
    listed_dir = make(tmp_path / "d")
    damage(listed_dir)
    with pytest.raises(CorruptError) as caught:
        manifest.verify_files(listed_dir)
    assert str(listed_dir / name) in str(caught.value)
    assert found in str(caught.value)
    assert caught.value.exit_code == 65


def rewrite(listed_dir, change) -> None:
    """Change a manifest and recompute its own hash."""
    content = json.loads((listed_dir / manifest.MANIFEST_NAME).read_bytes())
    change(content)
    content["manifest_sha256"] = manifest._self_hash(content)
    (listed_dir / manifest.MANIFEST_NAME).write_bytes(manifest.canonical_json(content))


def test_another_format_is_rejected_not_called_damage(tmp_path):
    listed_dir = make(tmp_path / "d")
    rewrite(listed_dir, lambda content: content.update(format=2))
    with pytest.raises(BundleError, match="format 2"):
        manifest.verify_files(listed_dir)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a//b", ".", "", "a\0b", "manifest.json"]
)
def test_no_name_leads_outside(tmp_path, name):
    listed_dir = make(tmp_path / "d")
    rewrite(listed_dir, lambda content: content["files"].update({name: {"bytes": 0, "sha256": ""}}))
    with pytest.raises(CorruptError, match="an invalid list of files"):
        manifest.verify_files(listed_dir)


@pytest.mark.parametrize("innermost", [[], {}, [1], {"a": 1}])
def test_values_are_nested_up_to_the_limit_and_no_deeper(tmp_path, innermost):
    """An empty list or object is a level like any other; the manifest itself is the first."""
    listed_dir, value = make(tmp_path / "d"), innermost
    for _ in range(manifest._MAX_DEPTH - 2):
        value = [value]
    rewrite(listed_dir, lambda content: content.update(extra=value))
    manifest.verify_files(listed_dir)
    rewrite(listed_dir, lambda content: content.update(extra=[value]))
    with pytest.raises(CorruptError, match="nested deeper than 32"):
        manifest.verify_files(listed_dir)


def test_the_right_values_in_another_form_are_damage(tmp_path):
    listed_dir = make(tmp_path / "d")
    content = json.loads((listed_dir / manifest.MANIFEST_NAME).read_bytes())
    (listed_dir / manifest.MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(CorruptError, match="another JSON form"):
        manifest.verify_files(listed_dir)


def test_nan_is_never_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        manifest.canonical_json({"loss": float("nan")})


def test_sizes_only_still_sees_a_truncation(tmp_path):
    listed_dir = make(tmp_path / "d")
    os.truncate(listed_dir / "b.json", 1)
    with pytest.raises(CorruptError, match="1 bytes where"):
        manifest.verify_files(listed_dir, sizes_only=True)


def test_only_listed_files_are_removed(tmp_path):
    listed_dir = make(tmp_path / "d")
    (listed_dir / "mine.txt").write_text("a user's file")
    content = manifest.read_manifest(listed_dir)
    with pytest.raises(OSError, match="not empty"):
        manifest.remove_listed_files(listed_dir, content)
    assert os.listdir(listed_dir) == ["mine.txt"]


def test_verify_directory_checks_a_model_and_its_run(tmp_path):
    model = make(tmp_path / "model", ("weights.safetensors", "config.json", "text/shared.model"))
    make(model / "training" / "step-00000001", ("weights.safetensors",))
    make(model / "training" / "keep" / "step-00000001", ("weights.safetensors",))
    make(model / "engines" / "ctranslate2", ("model.bin",))
    (model / "notes.txt").write_text("a user's own file")
    checks = verify_directory(model)
    assert all(check.ok for check in checks)
    assert {
        "text/shared.model",
        "training/step-00000001/weights.safetensors",
        "engines/ctranslate2/model.bin",
    } <= {c.name for c in checks}
    os.truncate(model / "training" / "step-00000001" / "weights.safetensors", 1)
    (model / "text" / "stray").write_text("")
    bad = [check for check in verify_directory(model) if not check.ok]
    assert [check.name for check in bad] == [
        "text/stray",
        "training/step-00000001/weights.safetensors",
    ]
    assert all(check.ok for check in verify_directory(model / "engines" / "ctranslate2"))


def test_verify_directory_finds_damage_of_a_kept_checkpoint(tmp_path):
    model = make(tmp_path / "model", ("weights.safetensors",))
    kept = make(model / "training" / "keep" / "step-00000001", ("weights.safetensors",))
    os.truncate(kept / "weights.safetensors", 1)
    for listed_dir, prefix in ((model, "training/"), (model / "training", "")):
        bad = [check.name for check in verify_directory(listed_dir) if not check.ok]
        assert bad == [f"{prefix}keep/step-00000001/weights.safetensors"]


def test_verify_directory_of_a_run_and_of_one_step(tmp_path):
    step = make(tmp_path / "training" / "step-00000001", ("weights.safetensors",))
    assert [check.name for check in verify_directory(tmp_path / "training")] == [
        "step-00000001/manifest.json",
        "step-00000001/weights.safetensors",
    ]
    (step / "extra").write_text("")
    assert [check.name for check in verify_directory(step) if not check.ok] == ["extra"]


def test_verify_directory_lists_the_model_then_its_engines_then_its_steps_in_order(tmp_path):
    model = make(tmp_path / "model", ("weights.safetensors",))
    cases = [
        "engines/a",
        "engines/b",
        "training/step-00000001",
        "training/step-00000002",
        "training/keep/step-00000001",
    ]
    for listed_dir in reversed(cases):
        (model / listed_dir).parent.mkdir(parents=True, exist_ok=True)
        make(model / listed_dir, ("weights.safetensors",))
    found = [
        check.name.rpartition("/")[0]
        for check in verify_directory(model)
        if check.name.endswith("weights.safetensors")
    ]
    assert found == ["", *cases]


def test_verify_directory_of_a_model_that_lost_its_manifest(tmp_path):
    model = make(tmp_path / "model", ("weights.safetensors",))
    (model / manifest.MANIFEST_NAME).unlink()
    assert [check.name for check in verify_directory(model) if not check.ok] == [
        manifest.MANIFEST_NAME
    ]


def test_verify_directory_of_something_else(tmp_path):
    with pytest.raises(BundleError, match=r"no manifest\.json"):
        verify_directory(tmp_path)


def test_a_removal_is_durable(tmp_path, monkeypatch):
    listed_dir = make(tmp_path / "d")
    recorder = SyncRecorder(monkeypatch)
    manifest.remove_listed_files(listed_dir, manifest.read_manifest(listed_dir))
    assert not listed_dir.exists()
    assert recorder.synced(tmp_path) == [len(recorder.events) - 1]


@pytest.mark.parametrize(
    "record",
    [
        {"bytes": "0", "sha256": ""},
        {"bytes": 0, "sha256": 7},
        {"bytes": 0},
        {"bytes": 0, "sha256": "", "mode": 0o777},
        "sha256",
    ],
)
def test_a_record_of_another_form_is_damage(tmp_path, record):
    listed_dir = make(tmp_path / "d")
    rewrite(listed_dir, lambda content: content["files"].update({"c": record}))
    with pytest.raises(CorruptError, match="an invalid list of files"):
        manifest.verify_files(listed_dir)


def test_the_manifest_is_removed_last(tmp_path):
    """A directory whose removal was interrupted is damaged, and never one without a manifest."""
    listed_dir = make(tmp_path / "d")
    fault_injection.arm_faults("prune.unlink:3:eio")
    try:
        with pytest.raises(OSError, match="injected"):
            manifest.remove_listed_files(listed_dir, manifest.read_manifest(listed_dir))
    finally:
        fault_injection.arm_faults("")
    assert os.listdir(listed_dir) == [manifest.MANIFEST_NAME]
