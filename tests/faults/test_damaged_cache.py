"""The cache directory: damaged or foreign files never cause a crash or a wrong result."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.inference.cpu import cpp_kernel_library_loader
from dragoman.storage import trusted_cache_directory

ROOT = Path(__file__).resolve().parents[2]
COMPILER = next(filter(None, map(shutil.which, cpp_kernel_library_loader.COMPILERS)), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache folder of the test's own."""
    monkeypatch.setenv(trusted_cache_directory.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(trusted_cache_directory, "_warned_variables", set())
    return trusted_cache_directory.make_private_directory(trusted_cache_directory.cache_dir())


def flip(path: Path) -> None:
    """Change one bit in the middle of a file, keeping its mode."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    """Put a symbolic link to the same contents where a file was."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: Path) -> None:
    """Put a pipe without a writer where a file was."""
    path.unlink()
    os.mkfifo(path)


def make_untrusted(path: Path) -> None:
    """Change the owner of a file."""
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    os.chown(path, 12345, 12345)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "bit flipped": flip,
    "bit of the hash flipped": lambda path: flip(trusted_cache_directory.digest_path(path)),
    "hash gone": lambda path: trusted_cache_directory.digest_path(path).unlink(),
    "gone": lambda path: path.unlink(),
    "writable by all": lambda path: path.chmod(0o666),
    "writable by the group": lambda path: path.chmod(0o620),
    "hash writable by all": lambda path: trusted_cache_directory.digest_path(path).chmod(0o666),
    "a symbolic link": link,
    "a pipe": pipe,
    "another user's": make_untrusted,
    "hash of another user": lambda path: make_untrusted(trusted_cache_directory.digest_path(path)),
    "folder writable by all": lambda path: path.parent.chmod(0o777),
    "folder of another user": lambda path: make_untrusted(path.parent),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_file_is_not_returned(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "thing.so"
    trusted_cache_directory.write_cached(path, b"what was computed" * 100)
    assert trusted_cache_directory.read_cached(path) == b"what was computed" * 100
    DAMAGE[damage](path)
    assert trusted_cache_directory.read_cached(path) is None


def test_cached_files_are_private_with_any_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        inner = trusted_cache_directory.make_private_directory(folder / "a" / "b")
        trusted_cache_directory.write_cached(inner / "thing", b"x")
    finally:
        os.umask(before)
    found = {
        path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777
        for path in folder.rglob("*")
    }
    assert found == {"a": 0o700, "a/b": 0o700, "a/b/thing": 0o600, "a/b/thing.sha256": 0o600}
    assert trusted_cache_directory.read_cached(inner / "thing") == b"x"


def test_a_folder_above_within_the_cache_counts_too(folder: Path) -> None:
    inner = trusted_cache_directory.make_private_directory(folder / "a" / "b")
    trusted_cache_directory.write_cached(inner / "thing", b"x")
    (folder / "a").chmod(0o770)
    assert trusted_cache_directory.read_cached(inner / "thing") is None


def test_the_default_folder_of_an_earlier_release_is_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(trusted_cache_directory.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "dragoman").mkdir()
    (tmp_path / "dragoman").chmod(0o775)
    assert (
        trusted_cache_directory.make_private_directory(trusted_cache_directory.cache_dir())
        .stat()
        .st_mode
        & 0o777
        == 0o700
    )


def test_a_chosen_folder_that_others_write_to_is_left_alone_and_not_trusted(folder: Path) -> None:
    folder.chmod(0o775)
    with pytest.raises(PermissionError, match=r"others may write to .* \(mode 0775\)"):
        trusted_cache_directory.make_private_directory(folder)
    assert folder.stat().st_mode & 0o777 == 0o775


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"DRAGOMAN_CACHE": "/mine", "XDG_CACHE_HOME": "/xdg", "HOME": "/me"}, "/mine"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/me"}, "/xdg/dragoman"),
        ({"HOME": "/me"}, "/me/.cache/dragoman"),
        (
            {"DRAGOMAN_CACHE": "mine", "XDG_CACHE_HOME": "./xdg", "HOME": "/me"},
            "/me/.cache/dragoman",
        ),
        ({"DRAGOMAN_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/dragoman"),
        ({"DRAGOMAN_CACHE": "~/mine", "HOME": "/me"}, "/me/.cache/dragoman"),
    ],
)
def test_cache_dir_follows_the_environment(
    variables: dict[str, str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trusted_cache_directory, "_warned_variables", set())
    for name in ("DRAGOMAN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [trusted_cache_directory.cache_dir() for _ in range(3)] == [Path(expected)] * 3
    relative = [name for name, value in variables.items() if value and not value.startswith("/")]
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} must be an absolute path; found {variables[name]!r}: it is ignored"
        for name in relative
    ]


def test_without_a_home_the_folder_is_the_users_own_in_the_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("DRAGOMAN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        os.path, "expanduser", lambda path: path
    )  # what it returns for a user that the system does not know
    monkeypatch.setattr(trusted_cache_directory.tempfile, "gettempdir", lambda: str(tmp_path))
    assert trusted_cache_directory.cache_dir() == tmp_path / f"dragoman-cache-{os.getuid()}"
    monkeypatch.setattr(os.path, "expanduser", lambda path: "/")  # as in some containers
    assert trusted_cache_directory.cache_dir() == tmp_path / f"dragoman-cache-{os.getuid()}"
    trusted_cache_directory.cache_dir().symlink_to(tmp_path)  # another user created it first
    with pytest.raises(PermissionError, match="is a symbolic link"):
        trusted_cache_directory.make_private_directory(trusted_cache_directory.cache_dir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of root")
def test_files_of_root_are_trusted_and_those_of_others_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted_cache_directory.write_cached(folder / "thing", b"x")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert trusted_cache_directory.read_cached(folder / "thing") == b"x"


def fake_compiler(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Compile an empty library with the kernels' names instead of the kernels, which is fast."""
    made: list[Path] = []
    names = (
        *("has_int8", "panel_width", "encode", "project_memory", "decode_step"),
        *("topk", "log_sum_exp", "decode_greedy", "beam_step"),
    )
    source = "".join(f'extern "C" long dragoman_{name}() {{ return 7; }}\n' for name in names)

    def compile_(compiler: str, library: Path) -> None:
        made.append(library)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)],
            input=source,
            text=True,
            check=True,
        )

    monkeypatch.setattr(cpp_kernel_library_loader, "_compile", compile_)
    cpp_kernel_library_loader._load_kernel_library.cache_clear()
    return made


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_kernels_are_compiled_again(
    folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncated library gave a SIGBUS in each translation; a flipped bit changed results."""
    made = fake_compiler(monkeypatch)
    for _ in range(2):
        cpp_kernel_library_loader._load_kernel_library.cache_clear()
        assert cpp_kernel_library_loader._load_kernel_library(folder, "") is not None
    assert len(made) == 1
    [library] = folder.glob("*.so")
    # This process has the library mapped: what it truncates in place it cannot unload at its end.
    copy = Path(shutil.copy2(library, folder / "copy"))
    copy.replace(library)
    DAMAGE[damage](library)
    cpp_kernel_library_loader._load_kernel_library.cache_clear()
    found = cpp_kernel_library_loader._load_kernel_library(folder, "")
    assert found is not None
    assert found.dragoman_panel_width() == 7
    assert len(made) == 2
    assert not list(folder.glob(".tmp-*"))


@needs_compiler
@pytest.mark.parametrize("trouble", ["a file", "another user's", "writable by all", "a full disk"])
def test_kernels_are_built_without_a_usable_cache(
    folder: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = fake_compiler(monkeypatch)
    if trouble == "a file":
        folder.rmdir()
        folder.write_text("in the way")
    elif trouble == "another user's":
        make_untrusted(folder)
    elif trouble == "writable by all":
        folder.chmod(0o777)
    else:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(trusted_cache_directory, "replace_file", full)
    with caplog.at_level(logging.WARNING, logger="dragoman"):
        for _ in range(2):
            assert cpp_kernel_library_loader._load_kernel_library(folder, "") is not None
    assert len(made) == 1
    [message] = [record.getMessage() for record in caplog.records]
    assert "every run compiles them again" in message
    assert str(folder) in message


@needs_compiler
def test_two_builders_at_once_leave_a_sound_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_compiler(monkeypatch)
    compile_ = cpp_kernel_library_loader._compile

    def with_another(compiler: str, library: Path) -> None:
        compile_(compiler, library)
        trusted_cache_directory.write_cached(
            folder / library.name, b"what another process compiled meanwhile"
        )

    monkeypatch.setattr(cpp_kernel_library_loader, "_compile", with_another)
    found = cpp_kernel_library_loader._load_kernel_library(folder, "")
    assert found is not None
    assert found.dragoman_panel_width() == 7
    assert len(made) == 1
    assert cpp_kernel_library_loader._load_cached(folder / made[0].name) is not None


HOMES: tuple[dict[str, str], ...] = ({}, {"HOME": "/nowhere"}, {"HOME": "/"}, {"HOME": ""})

# One interpreter imports everything, and a child for each home becomes the unknown user. Only then:
# the interpreter's own files may be closed to others.
AS_UNKNOWN_USER = """
import json, os, sys
from dragoman.inference.cpu import cpp_kernel_library_loader
from dragoman.inference import engine_throughput
from dragoman.storage import trusted_cache_directory
from dragoman.training.torch_compile import _inductor_cache_dir
cpp_kernel_library_loader.COMPILERS = ()
for variables in json.loads(sys.argv[1]):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, variables
        continue
    os.environ.update(variables)
    os.setgid(54321); os.setuid(54321)
    path = engine_throughput._measurements_path(None)
    engine_throughput._write_measurements(path, {"a": {"b": 1.0}})
    measured = sorted(engine_throughput._read_measurements(path))
    library = cpp_kernel_library_loader.load_kernel_library()
    folder = trusted_cache_directory.cache_dir()
    print(library, folder, measured, os.path.isabs(_inductor_cache_dir()), flush=True)
    break
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_an_unknown_user_without_a_home_works() -> None:
    """As in a container that is started with a number for a user."""
    done = subprocess.run(
        [sys.executable, "-c", AS_UNKNOWN_USER, json.dumps(HOMES)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    shutil.rmtree(Path(tempfile.gettempdir()) / "dragoman-cache-54321", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    for variables, found in zip(HOMES, done.stdout.splitlines(), strict=True):
        kept = variables != {"HOME": "/nowhere"}  # a home that cannot be made
        assert found.startswith("None /")
        assert found.endswith("['a'] True" if kept else "[] True"), variables
