"""Atomic writing, injected faults, and errors of the file system."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sync_kit import SyncRecorder

from dragoman.errors import BundleError, ConfigError, DiskError, PermissionDeniedError
from dragoman.storage import disk_space_and_errors, fault_injection
from dragoman.storage.atomic_and_safe_file_io import (
    hash_file,
    is_process_alive,
    native_path,
    publish_directory,
    read_regular,
    remove_flat_directory,
    replace_file,
    staged_directory,
    write_file,
)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    fault_injection.arm_faults("")


def test_write_returns_the_size_and_hash_of_the_file(tmp_path):
    record = write_file(tmp_path / "a", [b"one", b"", b"two" * 1000])
    data = b"one" + b"two" * 1000
    assert (tmp_path / "a").read_bytes() == data
    assert record == (len(data), hashlib.sha256(data).hexdigest())


def test_mode_follows_the_umask(tmp_path):
    """A server under another user reads what training wrote; safetensors' writer leaves 0600."""
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "a", [b"x"])
        replace_file(tmp_path / "b", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o640


def test_an_existing_file_is_never_overwritten(tmp_path):
    write_file(tmp_path / "a", [b"first"])
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", [b"second"])
    assert (tmp_path / "a").read_bytes() == b"first"


def test_reading_back_fewer_bytes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "dragoman.storage.atomic_and_safe_file_io.hash_file",
        lambda path: (lambda r: r._replace(bytes=r.bytes - 1))(hash_file(path)),
    )
    with pytest.raises(OSError, match="wrote 3 bytes and read back 2"):
        write_file(tmp_path / "a", [b"abc"])


def test_partial_writes_are_completed(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
    assert write_file(tmp_path / "a", [b"x" * 100]).bytes == 100


def test_replace_leaves_old_or_new(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    replace_file(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="no"):
            replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["status.json"]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_links_and_pipes_are_not_read(tmp_path):
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="symbolic links"):
        hash_file(tmp_path / "link")
    with pytest.raises(OSError, match="not a regular file"):
        hash_file(tmp_path / "pipe")


def test_a_file_that_grows_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path, read = tmp_path / "a", os.read
    path.write_bytes(b"x" * 10)
    assert read_regular(path, 10) == b"x" * 10
    with pytest.raises(OSError, match="more than 9 bytes: 10"):
        read_regular(path, 9)

    def read_after_append(descriptor: int, count: int) -> bytes:
        with path.open("ab") as file:
            file.write(b"y")
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", read_after_append)
    with pytest.raises(OSError, match="grows while it is read"):
        read_regular(path, 100)


def test_publishing_never_replaces_a_full_directory(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(b"")
    with pytest.raises(OSError, match="not empty"):
        publish_directory(tmp_path / "new", tmp_path / "old")
    assert os.listdir(tmp_path / "old") == ["old"]


def test_a_directory_is_synced_before_it_is_published_and_its_name_after(tmp_path, monkeypatch):
    """The name must not become durable only through a later write in the same directory."""
    (tmp_path / "new").mkdir()
    recorder = SyncRecorder(monkeypatch)
    write_file(tmp_path / "new" / "a", [b"some", b"bytes"])
    publish_directory(tmp_path / "new", tmp_path / "final")
    recorder.check_published(tmp_path / "final")
    assert len(recorder.events) == 4  # the file, its directory, the rename, the parent


def test_a_replaced_file_is_synced_before_it_is_renamed_and_its_name_after(tmp_path, monkeypatch):
    recorder, path = SyncRecorder(monkeypatch), tmp_path / "status.json"
    replace_file(path, b"{}")
    moved = recorder.moved(path)
    assert recorder.synced(path) == [moved - 1]
    assert recorder.synced(tmp_path) == [moved + 1]


def test_remove_flat_keeps_unknown_entries(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    (theirs / "folder").mkdir(parents=True)
    ours.mkdir()
    (ours / "file").write_bytes(b"")
    assert remove_flat_directory(ours)
    assert remove_flat_directory(ours)  # gone is gone
    assert not remove_flat_directory(theirs)
    assert (theirs / "folder").is_dir()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("publish.mkdri:1:kill", "'publish.mkdri'"),
        ("publish.mkdir:1:explode", "'explode'"),
        ("publish.mkdir:0:kill", "'0'"),
        ("publish.mkdir", "''"),
    ],
)
def test_an_unknown_fault_is_an_error(text, found):
    with pytest.raises(ConfigError, match="DRAGOMAN_FAULT must") as caught:
        fault_injection.arm_faults(text)
    assert found in str(caught.value)


def test_a_fault_is_triggered_at_its_passage_only():
    fault_injection.arm_faults("publish.rename:2:enospc,prune.unlink:1:eio")
    fault_injection.point("publish.rename")
    with pytest.raises(OSError, match=r"injected at publish\.rename") as caught:
        fault_injection.point("publish.rename")
    assert caught.value.errno == errno.ENOSPC
    fault_injection.point("publish.rename")
    with pytest.raises(OSError, match=r"injected at prune\.unlink"):
        fault_injection.point("prune.unlink")


def test_a_fault_in_a_write_leaves_half_of_it(tmp_path):
    fault_injection.arm_faults("publish.manifest:1:short")
    with pytest.raises(OSError, match="injected"):
        write_file(tmp_path / "a", [b"0123456789"])
    assert (tmp_path / "a").read_bytes() == b"01234"


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("stop", -signal.SIGTERM)])
def test_faults_come_from_the_environment(action, code):
    program = "from dragoman.storage import fault_injection as faults\nfaults.point('step.before')"
    environment = os.environ | {"DRAGOMAN_FAULT": f"step.before:1:{action}"}
    assert (
        subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode
        == code
    )


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOSPC, disk_space_and_errors.DiskFullError, 74),
        (errno.EDQUOT, disk_space_and_errors.DiskFullError, 74),
        (errno.EFBIG, DiskError, 74),
        (errno.EIO, DiskError, 74),
        (errno.EACCES, PermissionDeniedError, 77),
        (errno.EPERM, PermissionDeniedError, 77),
        (errno.EROFS, PermissionDeniedError, 77),
    ],
)
def test_system_errors_become_ours(tmp_path, number, kind, code):
    with pytest.raises(kind) as caught, disk_space_and_errors.os_errors_converted(tmp_path):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert caught.value.exit_code == code
    assert os.strerror(number) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_require_disk_space_reports_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_space_and_errors, "free_disk_bytes", lambda path: 1_500_000)
    disk_space_and_errors.require_disk_space(tmp_path, 1_500_000, "the checkpoints")
    with pytest.raises(DiskError, match=r"must fit on the disk: 2\.0 GB; found 1\.5 MB free"):
        disk_space_and_errors.require_disk_space(tmp_path, 2_000_000_000, "the checkpoints")


def test_format_bytes():
    assert [disk_space_and_errors.format_bytes(n) for n in (999, 1000, 1500, 2.5e6, 3e9, 4e12)] == [
        "999 bytes",
        "1.0 kB",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.0 TB",
    ]


def test_writable_makes_the_directory(tmp_path):
    disk_space_and_errors.require_writable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="file"):
        disk_space_and_errors.require_writable(tmp_path / "file")


def test_is_process_alive() -> None:
    assert is_process_alive(os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not is_process_alive(ended.pid)


def test_a_process_of_another_user_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_permission_error(pid: int, signal: int) -> None:
        assert signal == 0, "no process is to be ended"
        raise PermissionError(pid)

    monkeypatch.setattr(os, "kill", raise_permission_error)
    assert is_process_alive(1)


def test_no_signal_is_sent_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    monkeypatch.setattr(os, "name", "nt")
    try:
        assert is_process_alive(1)
    finally:
        monkeypatch.undo()  # before pytest looks for paths


@pytest.mark.parametrize("existing", [False, True])
def test_a_failed_export_leaves_no_directory_that_it_made(tmp_path: Path, existing: bool) -> None:
    final = tmp_path / "a" / "b" / "model"
    if existing:
        (tmp_path / "a").mkdir()

    def export(error: Exception | None) -> None:
        with staged_directory(final, "model") as folder:
            assert folder.parent == final.parent
            (folder / "weights").write_bytes(b"x")
            assert not final.exists()
            if error:
                raise error

    with pytest.raises(ValueError, match="failed"):
        export(ValueError("failed"))
    assert list(tmp_path.rglob("*")) == ([tmp_path / "a"] if existing else [])
    export(None)
    assert [each.name for each in final.parent.iterdir()] == ["model"]
    assert (final / "weights").read_bytes() == b"x"


def test_only_temporary_directories_of_ended_processes_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = f"{ended.pid}-0a1b2c3d"
    names = {
        "dead": f".tmp-model-{dead}",
        "alive": f".tmp-model-{os.getpid()}-0a1b2c3d",
        "another label": f".tmp-data-{dead}",
        "another form": f".tmp-model-{dead}-mine",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"")
    link = tmp_path / f".tmp-model-{ended.pid}-ffffffff"
    link.symlink_to(tmp_path / names["alive"])
    with staged_directory(tmp_path / "model", "model"):
        pass
    assert {name for name in names if (tmp_path / names[name]).exists()} == {
        "alive",
        "another label",
        "another form",
    }
    assert link.is_symlink()
    assert (tmp_path / names["alive"] / "file").exists()


def test_a_relative_path_that_is_no_text_is_linked_for_native_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(os.fsdecode(b"\xff.txt"))
    path.write_bytes(b"contents")
    with native_path(path) as name:
        assert name.encode("utf-8").endswith(b".txt")
        assert Path(name).read_bytes() == b"contents"
    assert not os.path.lexists(name)


def test_a_link_in_a_flat_directory_is_removed_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_bytes(b"")
    (tmp_path / "ours" / "link").symlink_to(tmp_path / "theirs")
    assert remove_flat_directory(tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    assert (tmp_path / "theirs" / "file").exists()


def test_the_file_of_a_system_error_is_named(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with (
        pytest.raises(DiskError, match=f"at {path}"),
        disk_space_and_errors.os_errors_converted(tmp_path / "another"),
    ):
        path.read_bytes()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: path.mkdir(), "an empty directory at"),
        (lambda path: (path.mkdir(), (path / "x").touch()), "a directory with files at"),
        (lambda path: path.touch(), "a file at"),
        (lambda path: path.symlink_to("nowhere"), "a symbolic link at"),
    ],
)
def test_an_output_directory_must_be_new(
    tmp_path: Path, make: Callable[[Path], object], found: str
) -> None:
    out = tmp_path / "out"
    disk_space_and_errors.require_new_directory(out)
    assert not out.exists()
    make(out)
    with pytest.raises(BundleError, match=f"--out must be a new directory; found {found} {out}"):
        disk_space_and_errors.require_new_directory(out)


def test_an_output_directory_needs_a_directory_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(BundleError, match=f"found a file at {tmp_path}/file"):
        disk_space_and_errors.require_new_directory(tmp_path / "file" / "a" / "out")
    with pytest.raises(BundleError, match=f"found a broken link at {tmp_path}/broken"):
        disk_space_and_errors.require_new_directory(tmp_path / "broken" / "out")
    disk_space_and_errors.require_new_directory(tmp_path / "a" / "b" / "out")
    checked = list[str]()
    monkeypatch.setattr(os, "access", lambda path, mode: bool(checked.append(str(path))))
    with pytest.raises(PermissionDeniedError, match=f"Permission denied at {tmp_path}"):
        disk_space_and_errors.require_new_directory(tmp_path / "a" / "b" / "out")
    assert checked == [str(tmp_path)]
    assert not (tmp_path / "a").exists()


def test_an_output_directory_in_an_existing_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    disk_space_and_errors.require_parent_directory(tmp_path)
    disk_space_and_errors.require_parent_directory(tmp_path / "new")
    with pytest.raises(BundleError, match=f"--out must be a directory; found a file at {tmp_path}"):
        disk_space_and_errors.require_parent_directory(tmp_path / "file")
    with pytest.raises(BundleError, match="--out must be in a directory; found a file at"):
        disk_space_and_errors.require_parent_directory(tmp_path / "file" / "new")
    with pytest.raises(BundleError, match=f"existing directory; found no {tmp_path}/missing"):
        disk_space_and_errors.require_parent_directory(tmp_path / "missing" / "new")


def test_a_directory_that_another_process_finished_first_is_named(tmp_path: Path) -> None:
    """It was reported as a disk error of the temporary directory, which is gone."""
    final = tmp_path / "export"

    def export() -> None:
        with disk_space_and_errors.os_errors_converted(final), staged_directory(final, "engine"):
            final.mkdir()
            (final / "file").touch()

    with pytest.raises(
        BundleError, match=r"new directory; found files of another process at \S*/e"
    ):
        export()
    assert [each.name for each in tmp_path.iterdir()] == ["export"]
