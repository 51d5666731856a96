"""The run directory: what is published is whole, and what is damaged is named and set aside."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_kit import checkpoint_tensors, flip_byte, save_checkpoint
from sync_kit import SyncRecorder

from dragoman.checkpoint import run_directory as checkpoints
from dragoman.checkpoint.checkpoint_io import (
    has_json_type,
    list_steps,
    step_directory_name,
    write_tensor_files,
)
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import BundleError, CorruptError, DivergedError, LockedError, StoppedError
from dragoman.runtime import signals
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import FileRecord, hash_file, write_file
from dragoman.storage.tensor_files import write_tensors
from dragoman.training.trainer_state import read_trainer_state


def test_checkpoint_round_trip(run):
    save_checkpoint(run, 1, 7)
    newest = run.latest(checkpoint_tensors(7))
    assert newest.step == 7
    assert newest.state == {"step": 7, "cursor": [0, 7]}
    assert newest.metrics == {"loss": 1 / 7}
    assert torch.equal(newest.load_weights()["layer.weight"], torch.full((8, 4), 7.0))
    assert torch.equal(newest.load_optimizer()["layer.weight.exp_avg"], torch.full((8, 4), 3.5))
    assert torch.equal(newest.load_ema()["layer.weight"], torch.full((8, 4), 7.0) / 3)
    assert newest.manifest["parent"]["step"] == 1
    assert (
        newest.manifest["parent"]["manifest_sha256"] == run.open_step(1).manifest["manifest_sha256"]
    )


def test_no_average_no_file(run):
    run.save_checkpoint(1, checkpoint_tensors(1) | {"ema": None}, {})
    assert run.latest().load_ema() is None
    assert sorted(os.listdir(run.latest().path)) == [
        "manifest.json",
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]


def test_nothing_is_pickled(run):
    """No file of a run can carry code (fairseq#5610)."""
    save_checkpoint(run, 1)
    run.keep_best(1)
    for folder, _, files in os.walk(run.path):
        for name in files:
            assert name == "lock" or name.endswith((".json", ".jsonl", ".safetensors")), (
                f"{folder}/{name}"
            )


def test_an_empty_directory_has_no_newest(run):
    assert run.latest() is None
    assert run.best() is None
    assert run.steps() == []
    assert RunDirectory(run.path / "nowhere").latest() is None


def test_damaged_checkpoint_is_quarantined_and_the_previous_used(run, caplog):
    save_checkpoint(run, 1, 2, 3)
    flip_byte(run.path / "step-00000003" / "optimizer.safetensors")
    with caplog.at_level(logging.WARNING):
        assert run.latest().step == 2
    assert "optimizer.safetensors" in caplog.text
    [bad] = run.path.glob("bad-step-00000003-*")
    assert "optimizer.safetensors" in (bad / "WHY.txt").read_text()
    assert run.latest().step == 2
    assert save_checkpoint(run, 3).step == 3  # the same number can be published again


def in_shards(folder, values):
    """Write the tensors of a step as two ranks do, a half of the rows each."""
    halves = [
        {
            part: {name: tensor.chunk(2)[rank] for name, tensor in named.items()}
            for part, named in values.items()
        }
        for rank in (0, 1)
    ]
    return {
        name: record
        for rank in (0, 1)
        for name, record in write_tensor_files(
            folder, halves[rank], file_suffix=f"-{rank}-of-2"
        ).items()
    }


def changed_digits(path):
    """Yield the file with one digit changed, for every digit of JSON.

    Of tensors, with one byte changed, some of the header's too.
    """
    good = path.read_bytes()
    binary = path.suffix == ".safetensors"
    for at in (
        [*range(8, len(good), 17), len(good) - 1]
        if binary
        else [at for at, byte in enumerate(good) if chr(byte).isdigit()]
    ):
        changed = good[at] ^ 1 if binary else ord("0") + (good[at] - ord("0") + 1) % 10
        yield good[:at] + bytes([changed]) + good[at + 1 :]


@pytest.mark.parametrize("write", [write_tensor_files, in_shards])
def test_changed_byte_in_any_checkpoint_file_is_detected(run, write):
    save_checkpoint(run, 1)
    checkpoint = save_checkpoint(run, 12, write=write)
    run.keep_best(1)  # so that no hard link shares the bytes
    names = sorted(os.listdir(checkpoint.path))
    labels = [""] if write is write_tensor_files else ["-0-of-2", "-1-of-2"]
    parts = [
        f"{part}{file_suffix}.safetensors"
        for part in ("ema", "optimizer", "weights")
        for file_suffix in labels
    ]
    assert names == sorted(["manifest.json", "state.json", *parts])
    for name in names:
        path = checkpoint.path / name
        good, tried = path.read_bytes(), 0
        for tried, changed in enumerate(changed_digits(path), start=1):
            path.write_bytes(changed)
            with pytest.raises(CorruptError) as caught:
                run.open_step(12)
            assert str(path) in str(caught.value)
            assert RunDirectory(run.path).latest().step == 1 or tried > 1  # once a file is enough
        assert tried > 2, name
        path.write_bytes(good)
    assert run.open_step(12).state == {"step": 12, "cursor": [0, 12]}


def test_without_the_lock_nothing_is_quarantined(run):
    save_checkpoint(run, 1, 2)
    flip_byte(run.path / "step-00000002" / "weights.safetensors")
    assert RunDirectory(run.path).latest().step == 1
    assert [each.step for each in RunDirectory(run.path).verified_checkpoints()] == [1]
    assert (run.path / "step-00000002").is_dir()


def test_a_run_never_restarts_silently(run):
    """All steps damaged: exit 65, nothing deleted."""
    save_checkpoint(run, 1, 2)
    for step in (1, 2):
        flip_byte(run.path / f"step-0000000{step}" / "weights.safetensors")
    for _ in range(2):
        with pytest.raises(CorruptError, match="2 checkpoints, none valid") as caught:
            run.latest()
    assert caught.value.exit_code == 65
    assert len(list(run.path.glob("bad-step-*/weights.safetensors"))) == 2


def test_a_run_whose_steps_were_deleted_does_not_restart_silently(run):
    save_checkpoint(run, 1)
    os.rename(run.path / "step-00000001", run.path.parent / "elsewhere")
    with pytest.raises(CorruptError, match="0 checkpoints, none valid"):
        run.latest()


def test_checkpoint_under_another_steps_name_is_corrupt(run):
    save_checkpoint(run, 1, 2)
    os.rename(run.path / "step-00000002", run.path / "step-00000009")
    assert run.latest().step == 1
    [bad] = run.path.glob("bad-step-00000009-*")
    assert "step 2 under the name step-00000009" in (bad / "WHY.txt").read_text()


def test_file_in_place_of_a_checkpoint_is_quarantined(run):
    save_checkpoint(run, 1)
    (run.path / "step-00000002").write_text("not a directory")
    assert run.latest().step == 1


def test_other_configuration_is_not_quarantined(run):
    """A wider model does not fit: exit 2, and the checkpoints stay."""
    save_checkpoint(run, 1)
    with pytest.raises(
        BundleError, match=r"which has layer.weight F32 \[16, 4\]; found layer.weight F32 \[8, 4\]"
    ) as caught:
        run.latest(checkpoint_tensors(1, width=16))
    assert caught.value.exit_code == 2
    assert run.steps() == [1]


def test_another_corpus_is_rejected(tmp_path):
    with RunDirectory(tmp_path, data_digest="a" * 64) as run:
        save_checkpoint(run, 1)
    with (
        RunDirectory(tmp_path, data_digest="b" * 64) as run,
        pytest.raises(CorruptError, match="found data bbbbbbbbbbbb…, and step-00000001"),
    ):
        run.latest()


def test_changed_thread_count_is_warned_about(tmp_path, caplog):
    environment = {"threads": 1, "torch": "2.13.0"}
    with RunDirectory(tmp_path, environment=lambda: environment) as run:
        save_checkpoint(run, 1)
        with caplog.at_level(logging.WARNING):
            assert run.latest().step == 1
            assert caplog.text == ""
            environment["threads"] = 2
            newest = run.latest()
        assert "resume is not bit-exact: threads 1 -> 2" in caplog.text
        assert run.environment_changes_since(newest) == ["threads 1 -> 2"]


def test_environment_covers_all_that_affects_bit_exactness(run):
    save_checkpoint(run, 1)
    assert run.latest().environment.keys() == {
        "torch",
        "threads",
        "simd",
        "device",
        "world",
        "deterministic",
    }


@pytest.mark.parametrize("part", ["weights", "optimizer", "ema", "carried"])
def test_no_tensor_that_is_not_finite_is_published(run, part):
    bad = checkpoint_tensors(2) | {"carried": {"layer.weight": torch.zeros(8, 4)}}
    next(iter(bad[part].values()))[3, 1] = float("nan")
    with pytest.raises(DivergedError, match=f"{part} layer.weight"):
        run.save_checkpoint(2, bad, {})
    assert run.steps() == []
    assert not list(run.path.glob(".tmp-*"))


def test_saving_the_same_step_again_does_nothing(run):
    save_checkpoint(run, 5)
    before = (run.path / "step-00000005").stat().st_ino
    assert save_checkpoint(run, 5).step == 5
    assert (run.path / "step-00000005").stat().st_ino == before
    assert not list(run.path.glob(".tmp-*"))


def test_other_tensors_of_the_same_step_are_rejected(run):
    save_checkpoint(run, 5)
    with pytest.raises(DivergedError, match=r"found a different weights\.safetensors") as caught:
        run.save_checkpoint(5, checkpoint_tensors(6), {})
    assert caught.value.exit_code == 70
    assert torch.equal(run.latest().load_weights()["layer.weight"], torch.full((8, 4), 5.0))
    assert not list(run.path.glob(".tmp-*"))


def test_damaged_checkpoint_is_saved_again(run):
    save_checkpoint(run, 5)
    flip_byte(run.path / "step-00000005" / "weights.safetensors")
    assert save_checkpoint(run, 5).step == 5
    assert run.latest().step == 5
    assert len(list(run.path.glob("bad-step-00000005-*"))) == 1


def test_only_one_trainer_a_directory(run):
    with pytest.raises(LockedError, match=f"process {os.getpid()}"):
        RunDirectory(run.path).lock()


def test_only_our_leftovers_are_removed(tmp_path):
    path = tmp_path / "training"
    ours = path / ".tmp-00000003-123-0a1b2c3d"
    ours.mkdir(parents=True)
    (ours / "weights.safetensors").write_bytes(b"part")
    (path / ".tmp-status.json-123-0a1b2c3d").write_bytes(b"{")
    odd = path / ".del-00000001-123-0a1b2c3d"
    (odd / "folder").mkdir(parents=True)
    theirs = path / ".tmp-mine"
    theirs.mkdir()
    with RunDirectory(path):
        assert not ours.exists()
        assert odd.exists()
        assert theirs.exists()
        assert not (path / ".tmp-status.json-123-0a1b2c3d").exists()


def test_second_stop_request_saves_no_checkpoint(run):
    save_checkpoint(run, 1)
    signals.request_stop("SIGTERM")
    assert save_checkpoint(run, 2).step == 2
    signals.request_stop("SIGTERM")
    with pytest.raises(StoppedError, match="SIGTERM, SIGTERM"):
        save_checkpoint(run, 3)
    assert run.steps() == [1, 2]
    assert not list(run.path.glob(".tmp-*"))


def test_log_is_truncated_to_the_last_checkpoint(run):
    save_checkpoint(run, 1, 2)
    run.training_log.append({"step": 3})
    assert run.truncate_log(run.latest().step) == 1
    assert [record["step"] for record in run.records()] == [1, 1, 2, 2]


def test_status_keeps_earlier_fields(run):
    run.status(state="running", step=0)
    run.status(step=1)
    run.status(state="stopped", exit_code=75, reason="SIGTERM")
    content = json.loads((run.path / "status.json").read_text())
    assert {key: content[key] for key in ("state", "step", "exit_code", "reason", "pid")} == {
        "state": "stopped",
        "step": 1,
        "exit_code": 75,
        "reason": "SIGTERM",
        "pid": os.getpid(),
    }


def test_failed_status_write_only_warns(run, monkeypatch, caplog):
    def fail(path, data) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dragoman.checkpoint.run_directory.replace_file", fail)
    with caplog.at_level(logging.WARNING):
        run.status(state="running")
    assert "No space left" in caplog.text


def test_run_id_is_written_once(tmp_path):
    with RunDirectory(tmp_path, config_digest="c" * 64) as run:
        first = run.run_id
    with RunDirectory(tmp_path) as run:
        assert run.run_id == first
    assert json.loads((tmp_path / "run.json").read_text())["config_sha256"] == "c" * 64
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CorruptError, match=r"run\.json"):
        RunDirectory(tmp_path).lock()


def test_names_that_others_import():
    assert set(checkpoints.__all__) == {"Checkpoint", "RunDirectory", "CheckpointTensors"}


def rewrite_signed(step: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a step's JSON file and sign its manifest anew, as an attacker would."""
    content = json.loads((step / name).read_bytes())
    change(content)
    listed = (
        content
        if name == manifest.MANIFEST_NAME
        else json.loads((step / manifest.MANIFEST_NAME).read_bytes())
    )
    if name != manifest.MANIFEST_NAME:
        (step / name).write_bytes(manifest.canonical_json(content))
        listed["files"][name] = hash_file(step / name)._asdict()
    listed.pop("manifest_sha256")
    files = {each: FileRecord(**record) for each, record in listed.pop("files").items()}
    (step / manifest.MANIFEST_NAME).unlink()
    manifest.write_manifest(step, files, listed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", None),
        ("step", True),
        ("step", -1),
        ("batch", 1 << 70),
        ("seconds", "1"),
        ("metrics", []),
        ("metrics", {"loss": "low"}),
        ("best", {"step": [4]}),
        ("token_limits", {"8x8": None}),
        ("precision", 7),
        ("divergence", {"recent_skips": True}),
        ("divergence", {"excluded_steps": ["4"]}),
        ("divergence", {"mean": {}}),
    ],
)
def test_a_state_of_wrong_types_is_rejected(tmp_path: Path, name: str, value: Any) -> None:
    with RunDirectory(tmp_path / "run") as run:
        save_checkpoint(run, 4)
    step = tmp_path / "run" / "step-00000004"
    rewrite_signed(step, "state.json", lambda state: state.update({name: value}))
    wrong = value if name != "divergence" else next(iter(value.values()))
    with pytest.raises(CorruptError) as caught:
        read_trainer_state(RunDirectory(tmp_path / "run").open_step(4))
    assert f"state.json must be as it was written; found {name}" in str(caught.value)
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", [4]),
        ("step", 4.0),
        ("env", []),
        ("metrics", "x"),
        ("data_sha256", 7),
        ("run_id", None),
        ("suspect", 1),
    ],
)
def test_a_manifest_of_wrong_types_is_rejected(tmp_path: Path, name: str, value: Any) -> None:
    with RunDirectory(tmp_path / "run") as run:
        save_checkpoint(run, 4)
    rewrite_signed(
        tmp_path / "run" / "step-00000004",
        manifest.MANIFEST_NAME,
        lambda content: content.update({name: value}),
    )
    with pytest.raises(CorruptError, match=re.escape(f"found {name} {value!r}")):
        RunDirectory(tmp_path / "run").open_step(4)


def test_symlinked_checkpoint_is_quarantined_and_its_target_kept(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        save_checkpoint(run, 2, 4)
        outside = tmp_path / "outside"
        (tmp_path / "run" / "step-00000004").rename(outside)
        (tmp_path / "run" / "step-00000004").symlink_to(outside)
        before = sorted(each.name for each in outside.iterdir())
        newest = run.latest()
        assert newest is not None
        assert newest.step == 2
        assert run.prune(keep_checkpoints=1) == []
    assert sorted(each.name for each in outside.iterdir()) == before
    [bad] = (tmp_path / "run").glob("bad-step-*")
    assert bad.is_symlink()


def test_unpadded_step_names_are_ignored(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as run:
        save_checkpoint(run, 4)
        (tmp_path / "run" / f"step-{'0' * 30}9").mkdir()
        assert run.steps() == [4]


@pytest.mark.parametrize(("first", "second"), [("a" * 64, ""), ("", "b" * 64)])
def test_a_run_without_a_digest_of_its_data_accepts_any(tmp_path, first, second):
    with RunDirectory(tmp_path, data_digest=first) as run:
        save_checkpoint(run, 1)
    with RunDirectory(tmp_path, data_digest=second) as run:
        assert run.latest().step == 1


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_checkpoint_has_its_own_files_and_no_others(run, change):
    """A manifest that verifies, of files that no checkpoint has, or without the weights."""
    path = save_checkpoint(run, 1).path
    content = manifest.read_manifest(path)
    files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
    if change == "more":
        files["extra.bin"] = write_file(path / "extra.bin", [b"extra"])
    else:
        for name in [name for name in files if name.startswith("weights")]:
            (path / name).unlink()
            del files[name]
    (path / manifest.MANIFEST_NAME).unlink()
    manifest.write_manifest(path, files, {"step": content["step"]})
    with pytest.raises(CorruptError, match=r"found the files .*state\.json"):
        run.open_step(1)


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (1 << 62, int, True),
        ((1 << 62) + 1, int, False),
        (0, int, True),
        (-1, int, False),
        (True, int, False),
        (1.0, int, False),
        (-1.5, float, True),
        (3, float, True),
        (float("nan"), float, False),
        (float("inf"), float, False),
        (float("-inf"), float, False),
        (True, float, False),
        ({"a": 1}, dict[str, int], True),
        ({"a": "1"}, dict[str, int], False),
        ([1, 2], list[int], True),
        ([1, None], list[int], False),
        ([1], dict[str, int], False),
        ("x", str, True),
        (None, str, False),
        (None, Any, True),
    ],
)
def test_json_values_have_types_and_finite_numbers(value: Any, kind: Any, found: bool) -> None:
    assert has_json_type(value, kind) is found


def test_steps_are_sorted_as_numbers(tmp_path: Path) -> None:
    for step in (100_000_000, 99_999_999, 5):
        (tmp_path / step_directory_name(step)).mkdir()
    (tmp_path / "step-6").mkdir()
    assert list_steps(tmp_path) == [5, 99_999_999, 100_000_000]


def test_a_resumed_run_names_the_checkpoint_that_it_continues(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        assert save_checkpoint(run, 3).manifest["parent"] is None
    with RunDirectory(tmp_path) as run:
        run.latest()
        parent = save_checkpoint(run, 4).manifest["parent"]
    assert parent == {"step": 3, "manifest_sha256": run.open_step(3).manifest["manifest_sha256"]}


def test_a_manifest_names_the_run_its_data_and_its_configuration(tmp_path: Path) -> None:
    with RunDirectory(tmp_path, data_digest="a" * 64, config_digest="b" * 64) as run:
        found = save_checkpoint(run, 1).manifest
        expected = {"data_sha256": "a" * 64, "config_sha256": "b" * 64, "run_id": run.run_id}
        assert expected.items() <= found.items()
        assert found["suspect"] is False
        assert save_checkpoint(run, 2, suspect=True).manifest["suspect"] is True
        assert run.run_id


def test_a_step_that_was_saved_with_other_timings_is_kept_as_it_is(run) -> None:
    run.save_checkpoint(5, checkpoint_tensors(5), {"seconds": 1.0})
    run.save_checkpoint(5, checkpoint_tensors(5), {"seconds": 2.0})
    assert run.latest().state == {"seconds": 1.0}


@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_second_stop_request_ends_the_saving_after_the_file(run, monkeypatch, written) -> None:
    parts = list[str]()

    def write(path: Path, *args: Any, **options: Any) -> FileRecord:
        parts.append(path.name)
        if len(parts) == written:
            signals.request_stop("SIGTERM")
            signals.request_stop("SIGTERM")
        return write_tensors(path, *args, **options)

    monkeypatch.setattr("dragoman.checkpoint.checkpoint_io.write_tensors", write)
    with pytest.raises(StoppedError, match="SIGTERM, SIGTERM"):
        save_checkpoint(run, 3)
    assert len(parts) == written
    assert run.steps() == []


def test_a_leftover_link_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / ".tmp-00000003-123-0a1b2c3d"
    link.symlink_to(tmp_path / "outside")
    with RunDirectory(tmp_path / "run"):
        assert not link.is_symlink()
    assert (tmp_path / "outside" / "file").exists()


def test_the_environment_of_a_run_and_its_changes() -> None:
    found = checkpoints.describe_environment(device="cpu", world=2, deterministic=True)
    assert found["torch"] == torch.__version__.split("+")[0]
    assert found["threads"] == torch.get_num_threads()
    assert (found["device"], found["world"], found["deterministic"]) == ("cpu", 2, True)
    assert checkpoints.environment_changes(found, found) == []
    assert checkpoints.environment_changes({"world": 1, "b": 1}, {"world": 2, "a": 0}) == [
        "a None -> 0",
        "b 1 -> None",
        "world 1 -> 2",
    ]


def test_the_log_is_durable_before_its_checkpoint_is_published(run, monkeypatch) -> None:
    run.training_log.append({"step": 1})
    log = (run.path / "log.jsonl").stat().st_ino
    recorder = SyncRecorder(monkeypatch)
    run.save_checkpoint(1, checkpoint_tensors(1), {})
    synced = [at for at, event in enumerate(recorder.events) if event.inode == log]
    assert min(synced) < recorder.moved(run.path / "step-00000001")
