"""Retention: the newest and the best checkpoints, within the free disk space."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from run_kit import checkpoint_tensors, flip_byte, save_checkpoint
from sync_kit import SyncRecorder

from dragoman.checkpoint.retention import prune_oldest
from dragoman.checkpoint.run_directory import RunDirectory
from dragoman.errors import CorruptError, DiskError
from dragoman.storage import disk_space_and_errors, fault_injection


def test_prune_keeps_the_newest(run):
    save_checkpoint(run, 1, 2, 3, 4)
    assert run.prune() == [1, 2]
    assert run.prune(1) == [3]
    assert run.prune(1) == []
    assert run.latest().step == 4


def test_best_is_exempt_from_pruning(run):
    """`keep_checkpoint 1` keeps the last and loses the best (OpenNMT-py#1856)."""
    save_checkpoint(run, 1)
    run.keep_best(1)
    save_checkpoint(run, 2, 3, 4)
    run.prune()
    assert run.steps() == [3, 4]
    assert run.best().step == 1
    assert torch.equal(run.best().load_weights()["layer.weight"], torch.full((8, 4), 1.0))
    run.keep_best(4)
    assert run.best().step == 4
    assert os.listdir(run.path / "keep") == ["step-00000004"]
    assert not list(run.path.glob(".*"))


def test_best_is_a_hard_link(run):
    save_checkpoint(run, 1)
    run.keep_best(1)
    run.keep_best(1)
    assert (run.path / "keep" / "step-00000001" / "weights.safetensors").stat().st_nlink == 2


def test_best_is_copied_without_hard_links(run, monkeypatch):
    def link(*args, **kwargs) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", link)
    save_checkpoint(run, 1)
    run.keep_best(1)
    assert run.best().step == 1
    assert (run.path / "keep" / "step-00000001" / "weights.safetensors").stat().st_nlink == 1


def test_crash_before_keeping_the_best_is_repaired(run):
    save_checkpoint(run, 1)
    run.keep_best(1)
    save_checkpoint(run, 2)
    run.ensure_best_kept(0)  # none known
    run.ensure_best_kept(7)  # not there any more
    assert run.best().step == 1
    run.ensure_best_kept(2)
    assert run.best().step == 2
    save_checkpoint(run, 3)
    flip_byte(run.path / "step-00000003" / "weights.safetensors")
    run.ensure_best_kept(3)
    assert run.best().step == 2


def test_after_a_crash_between_two_best_checkpoints_the_new_one_is_the_best(run):
    save_checkpoint(run, 1, 2)
    run.keep_best(1)
    fault_injection.arm_faults("prune.rename:1:eio")
    with pytest.raises(DiskError, match="Input/output error"):
        run.keep_best(2)
    assert sorted(os.listdir(run.path / "keep")) == ["step-00000001", "step-00000002"]
    assert run.best().step == 2
    flip_byte(run.path / "keep" / "step-00000002" / "weights.safetensors")
    assert run.best().step == 1


def test_a_damaged_best_is_replaced(run):
    save_checkpoint(run, 1, 2)
    run.keep_best(2)
    kept = run.path / "keep" / "step-00000002" / "weights.safetensors"
    data = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(data[:-1])
    assert run.best() is None
    run.keep_best(2)
    assert run.best().step == 2


def test_best_checkpoint_of_another_run_is_replaced(run):
    save_checkpoint(run, 2)
    run.keep_best(2)
    os.rename(run.path / "step-00000002", run.path.parent / "gone")
    run.save_checkpoint(2, checkpoint_tensors(9), {})
    run.keep_best(2)
    assert torch.equal(run.best().load_weights()["layer.weight"], torch.full((8, 4), 9.0))


def test_a_damaged_step_is_not_kept_as_the_best(run):
    save_checkpoint(run, 1)
    flip_byte(run.path / "step-00000001" / "weights.safetensors")
    with pytest.raises(CorruptError, match=r"weights\.safetensors"):
        run.keep_best(1)
    assert run.best() is None


def test_prune_never_touches_what_another_run_wrote(tmp_path):
    """TensorFlow's manager deleted checkpoints that it had not written (tensorflow#34234)."""
    with RunDirectory(tmp_path / "a", keep_checkpoints=1) as first:
        save_checkpoint(first, 1, 2)
    with RunDirectory(tmp_path / "b", keep_checkpoints=1) as run:
        os.rename(tmp_path / "a" / "step-00000001", run.path / "step-00000001")
        save_checkpoint(run, 3, 4)
        assert run.prune() == [3]
        assert run.steps() == [1, 4]


def test_prune_keeps_checkpoints_that_do_not_verify(run):
    save_checkpoint(run, 1, 2, 3)
    os.truncate(run.path / "step-00000001" / "weights.safetensors", 3)
    assert run.prune(1) == [2]
    assert run.steps() == [1, 3]


def test_the_last_step_before_a_spike_is_not_pruned(run):
    save_checkpoint(run, 1)
    save_checkpoint(run, 2, 3, 4, suspect=True)
    assert run.prune(1) == [2, 3]
    assert run.steps() == [1, 4]


def test_full_disk_removes_old_checkpoints_one_at_a_time(run, caplog):
    save_checkpoint(run, 1, 2, 3)
    fault_injection.arm_faults(
        "publish.write.optimizer.safetensors:1:enospc,publish.manifest:1:enospc"
    )
    with caplog.at_level(logging.WARNING):
        assert save_checkpoint(run, 4).step == 4
    assert run.steps() == [3, 4]
    assert "step-00000001 was removed for step-00000004" in caplog.text


def test_full_disk_never_removes_the_newest(run):
    save_checkpoint(run, 1)
    fault_injection.arm_faults("publish.write.weights.safetensors:1:enospc")
    with pytest.raises(DiskError, match="No space left on device") as caught:
        save_checkpoint(run, 2)
    assert caught.value.exit_code == 74
    assert run.latest().step == 1
    assert not list(run.path.glob(".tmp-*"))


def test_old_checkpoints_stay_if_removing_cannot_help(run, monkeypatch):
    save_checkpoint(run, 1, 2, 3)
    monkeypatch.setattr(disk_space_and_errors, "free_disk_bytes", lambda path: 10)
    monkeypatch.setattr("dragoman.checkpoint.retention.free_disk_bytes", lambda path: 10)
    monkeypatch.setattr("dragoman.checkpoint.retention._freed_bytes", lambda checkpoint: 1)
    with pytest.raises(DiskError, match="found 10 bytes free"):
        save_checkpoint(run, 4)
    assert run.steps() == [1, 2, 3]


@pytest.mark.parametrize(
    ("gain", "removed", "left"), [(44, None, [1, 2, 3]), (45, "step-00000001", [2, 3])]
)
def test_old_checkpoints_are_removed_only_if_that_frees_enough(
    run, monkeypatch, gain, removed, left
):
    """With 10 bytes free, 100 bytes fit if removing two old checkpoints frees 90."""
    save_checkpoint(run, 1, 2, 3)
    monkeypatch.setattr("dragoman.checkpoint.retention.free_disk_bytes", lambda path: 10)
    monkeypatch.setattr("dragoman.checkpoint.retention._freed_bytes", lambda checkpoint: gain)
    assert prune_oldest(run.path, run.run_id, 100) == removed
    assert run.steps() == left


@pytest.mark.parametrize(("missing", "removed"), [(0, "step-00000001"), (1, None)])
def test_hard_links_of_the_best_free_no_disk_space(run, monkeypatch, missing, removed):
    """Of the first two checkpoints, only the second has files of its own."""
    save_checkpoint(run, 1, 2, 3)
    run.keep_best(1)
    second = run.open_step(2)
    freed = sum((second.path / name).stat().st_size for name in second.manifest["files"])
    monkeypatch.setattr("dragoman.checkpoint.retention.free_disk_bytes", lambda path: 10)
    assert prune_oldest(run.path, run.run_id, 10 + freed + missing) == removed


def test_tolerated_full_disk_errors_are_limited(run, caplog):
    fault_injection.arm_faults(
        ",".join(f"publish.write.weights.safetensors:{n}:enospc" for n in range(1, 9))
    )
    with caplog.at_level(logging.WARNING):
        assert [save_checkpoint(run, step, tolerate_disk_errors=True) for step in (1, 2, 3)] == [
            None
        ] * 3
    assert "step 1 was not saved" in caplog.text
    with pytest.raises(DiskError, match="No space left"):
        save_checkpoint(run, 4, tolerate_disk_errors=True)
    assert not any(record.get("event") == "checkpoint" for record in run.records())


def test_tolerated_failures_reset_after_a_success(run):
    fault_injection.arm_faults(",".join(f"publish.mkdir:{n}:eio" for n in (1, 2, 4, 5, 6)))
    assert [
        save_checkpoint(run, step, tolerate_disk_errors=True) is None for step in (1, 2, 3, 4, 5)
    ] == [True, True, False, True, True]
    with pytest.raises(DiskError, match="Input/output error"):
        save_checkpoint(run, 6, tolerate_disk_errors=True)


def test_disk_space_is_checked_at_the_start(run, monkeypatch):
    run.require_checkpoint_space(checkpoint_tensors(1))
    monkeypatch.setattr(disk_space_and_errors, "free_disk_bytes", lambda path: 1000)
    with pytest.raises(DiskError, match="3 checkpoints") as caught:
        run.require_checkpoint_space(checkpoint_tensors(1))
    assert "1.0 kB free" in str(caught.value)


# Three tensors of 8 * 4 float32 are 384 bytes, and with a margin of a fifth 460.
@pytest.mark.parametrize(
    ("existing", "ranks", "needed"),
    [(0, 1, 1380), (1, 1, 920), (2, 1, 460), (4, 1, 460), (2, 2, 921)],
)
def test_disk_space_for_one_checkpoint_more_than_are_kept(
    run, monkeypatch, existing, ranks, needed
):
    save_checkpoint(run, *range(1, existing + 1))
    monkeypatch.setattr(disk_space_and_errors, "free_disk_bytes", lambda path: needed)
    run.require_checkpoint_space(checkpoint_tensors(1), ranks=ranks)
    monkeypatch.setattr(disk_space_and_errors, "free_disk_bytes", lambda path: needed - 1)
    with pytest.raises(disk_space_and_errors.DiskFullError, match="3 checkpoints of"):
        run.require_checkpoint_space(checkpoint_tensors(1), ranks=ranks)


@pytest.mark.parametrize(("ranks", "needed"), [(1, 460), (2, 921)])
def test_a_checkpoint_is_begun_only_if_it_fits_with_a_margin(run, monkeypatch, ranks, needed):
    monkeypatch.setattr(disk_space_and_errors, "free_disk_bytes", lambda path: needed - 1)
    with pytest.raises(
        disk_space_and_errors.DiskFullError, match="step-00000001 must fit on the disk"
    ):
        save_checkpoint(run, 1, ranks=ranks)
    monkeypatch.setattr(disk_space_and_errors, "free_disk_bytes", lambda path: needed)
    assert save_checkpoint(run, 1, ranks=ranks).step == 1


@pytest.mark.parametrize(("options", "left"), [({}, [3, 4, 5]), ({"keep_checkpoints": 0}, [5])])
def test_three_checkpoints_are_kept_by_default_and_never_none(tmp_path, options, left):
    with RunDirectory(tmp_path / "run", **options) as run:
        save_checkpoint(run, 1, 2, 3, 4, 5)
        run.prune()
        assert run.steps() == left


def test_a_damaged_checkpoint_is_not_removed_for_disk_space(run):
    save_checkpoint(run, 1, 2, 3)
    flip_byte(run.path / "step-00000001" / "weights.safetensors")
    assert prune_oldest(run.path, run.run_id, 0) == "step-00000002"
    assert run.steps() == [1, 3]
    assert prune_oldest(run.path, run.run_id, 0) is None


def test_after_a_crash_between_two_best_checkpoints_a_resumed_run_keeps_one(run):
    save_checkpoint(run, 1, 2)
    run.keep_best(1)
    fault_injection.arm_faults("prune.rename:1:eio")
    with pytest.raises(DiskError, match="Input/output error"):
        run.keep_best(2)
    run.ensure_best_kept(2)
    assert os.listdir(run.path / "keep") == ["step-00000002"]


def test_a_link_in_place_of_the_best_is_not_followed(run):
    save_checkpoint(run, 1)
    run.keep_best(1)
    os.rename(run.path / "keep", run.path.parent / "outside")
    (run.path / "keep").symlink_to(run.path.parent / "outside")
    assert run.best() is None
    with pytest.raises(CorruptError, match="a symbolic link"):
        run.keep_best(1)
    assert os.listdir(run.path.parent / "outside") == ["step-00000001"]


def test_the_renaming_of_a_damaged_or_removed_checkpoint_is_durable(run, monkeypatch):
    save_checkpoint(run, 1, 2, 3)
    flip_byte(run.path / "step-00000003" / "weights.safetensors")
    recorder = SyncRecorder(monkeypatch)
    assert run.latest().step == 2
    [bad] = run.path.glob("bad-step-*")
    assert max(recorder.synced(run.path)) > recorder.moved(bad)
    weights = (run.path / "step-00000001" / "weights.safetensors").stat().st_ino
    recorder.events.clear()
    assert run.prune(1) == [1]
    assert min(recorder.synced(run.path)) < recorder.removed(weights)


def test_the_directory_of_the_best_is_durable(run, monkeypatch):
    recorder = SyncRecorder(monkeypatch)
    save_checkpoint(run, 1)
    saved = len(recorder.events)
    run.keep_best(1)
    assert max(recorder.synced(run.path)) >= saved
    recorder.check_published(run.path / "keep" / "step-00000001")
