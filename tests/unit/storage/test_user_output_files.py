"""Output files: checked before the work, and written atomically."""

from __future__ import annotations

import gzip
import lzma
import os
import stat
import threading
from pathlib import Path

import pytest
from sync_kit import SyncRecorder

from dragoman.errors import ConfigError, PermissionDeniedError
from dragoman.storage.user_output_files import check_output_file, open_output, write_output


def test_writable_paths_pass(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for path in (tmp_path / "new", tmp_path / "old", Path("/dev/null"), Path("relative-name")):
        check_output_file("--hyp", path)


def test_unwritable_outputs_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "file")
    with pytest.raises(
        ConfigError,
        match=rf"--hyp must be in an existing directory; found no {tmp_path}/missing; make it: "
        r"mkdir -p",
    ):
        check_output_file("--hyp", tmp_path / "missing" / "out.txt")
    with pytest.raises(ConfigError, match=rf"found a file at {tmp_path}/file"):
        check_output_file("--hyp", tmp_path / "file" / "out.txt")
    with pytest.raises(
        ConfigError, match=rf"--hyp must name a file; found the directory {tmp_path}"
    ):
        check_output_file("--hyp", tmp_path)
    with pytest.raises(ConfigError, match=rf"found no {tmp_path}/nowhere"):
        check_output_file("--hyp", tmp_path / "link")


@pytest.mark.parametrize("name", ["text", "./text", "link", "hard"])
def test_an_input_is_never_overwritten(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("x")
    Path("link").symlink_to("text")
    os.link("text", "hard")
    with pytest.raises(
        ConfigError, match=f"--output must not be a file that the command reads; found {Path(name)}"
    ):
        check_output_file("--output", Path(name), inputs=[Path("text")])
    with pytest.raises(ConfigError, match="found new twice"):
        check_output_file("--out-tgt", Path("new"), others=[tmp_path / "new"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(
            PermissionDeniedError,
            match=f"--hyp must be writable; found no permission to write {tmp_path}",
        ):
            check_output_file("--hyp", tmp_path / "out")
    finally:
        tmp_path.chmod(0o700)


def test_an_os_permission_error_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(
        PermissionDeniedError,
        match=f"--hyp must be writable; found no permission to write {tmp_path}",
    ):
        check_output_file("--hyp", tmp_path / "out")


def test_a_write_protected_file_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is writable, so that a rename would replace the file all the same."""
    # The mode decides for root, too.
    monkeypatch.setattr(os, "access", lambda path, _: bool(os.stat(path).st_mode & stat.S_IWUSR))
    path = tmp_path / "out"
    path.write_text("old")
    check_output_file("--hyp", path)
    path.chmod(0o400)
    with pytest.raises(
        PermissionDeniedError,
        match=f"--hyp must be writable; found no permission to write {path}",
    ):
        check_output_file("--hyp", path)


def test_a_file_appears_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with open_output(path) as file:
        file.write("één\n")
        assert not path.exists()
    assert path.read_bytes() == "één\n".encode()
    assert os.listdir(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("name", ["out.txt", "out.txt.gz"])
def test_an_output_is_synced_before_it_replaces_the_old_file_and_its_name_after(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_text("old")
    recorder = SyncRecorder(monkeypatch)
    with open_output(path) as file:
        file.writelines(f"line {n}\n" for n in range(1000))
    moved = recorder.moved(path)
    assert recorder.synced(path) == [moved - 1]
    assert recorder.synced(tmp_path) == [moved + 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")

    def write() -> None:
        with open_output(path) as file:
            file.write("new\n")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_links_and_modes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    with open_output(tmp_path / "link") as file:
        file.write("new\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new\n"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_names_decide_the_compression(tmp_path: Path) -> None:
    for name, unpack in (("a.gz", gzip.decompress), ("a.XZ", lzma.decompress)):
        for _ in range(2):
            with open_output(tmp_path / name) as file:
                file.writelines(f"line {n}\n" for n in range(1000))
        assert unpack((tmp_path / name).read_bytes()).decode() == "".join(
            f"line {n}\n" for n in range(1000)
        )


def test_a_pipe_is_written_to_directly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read = list[str]()
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    check_output_file("--output", tmp_path / "pipe")
    with open_output(tmp_path / "pipe") as file:
        file.write("line\n")
    reader.join(timeout=30)
    assert read == ["line\n"]


def test_a_long_file_name_has_a_valid_temporary_name(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    with open_output(path) as file:
        file.write("x\n")
    assert path.exists()


def test_a_pipe_is_written_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = list[bytes]()
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, b"page")
    reader.join()
    assert received == [b"page"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_bytes_are_written_through_links_with_the_old_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_output(link, b"new")
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["model/config.json", "model/new/out", "link/out"])
def test_an_output_is_never_inside_a_model_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model/new").mkdir(parents=True)
    Path("model/config.json").write_text("{}")
    Path("link").symlink_to("model")
    with pytest.raises(
        ConfigError, match=f"--output must be outside the model directory .* found {name} in model"
    ):
        check_output_file("--output", Path(name), inputs=[Path("model")])
    check_output_file("--output", Path("model-2"), inputs=[Path("model")])


def test_a_compressed_file_has_neither_a_name_nor_a_time(tmp_path: Path) -> None:
    with open_output(tmp_path / "a.gz") as file:
        file.write("line\n")
    header = (tmp_path / "a.gz").read_bytes()[:8]
    assert header[3] == 0
    assert header[4:8] == bytes(4)
