"""The cache directory, for files that can be computed again, and the checks before one is loaded.

It is $DRAGOMAN_CACHE, else `dragoman` in $XDG_CACHE_HOME, else ~/.cache/dragoman, else (no home, as
in containers with an unknown user) a directory of this user in the system's temporary directory. A
relative path is ignored: it would depend on the current directory.

A cached file may be loaded as code. So it is trusted only if it belongs to this user or root,
nobody else may write to it or to a directory above it within the cache, and its SHA-256 is the one
stored beside it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path

from dragoman.storage.atomic_and_safe_file_io import read_regular, replace_file

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "DRAGOMAN_CACHE"
DIGEST_SUFFIX = ".sha256"  # suffix of the file with the SHA-256

_MAX_FILE_BYTES = 256 << 20  # largest cached file in bytes
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_warned_variables = set[str]()  # variables already warned about in this process


def cache_dir() -> Path:
    """Return the cache directory of this user; it may not exist yet."""
    for variable, below in ((CACHE_VARIABLE, ""), ("XDG_CACHE_HOME", "dragoman")):
        value = os.environ.get(variable, "")
        if os.path.isabs(value):
            return Path(value, below)
        if value and variable not in _warned_variables:
            _warned_variables.add(variable)
            logger.warning("%s must be an absolute path; found %r: it is ignored", variable, value)
    home = os.path.expanduser("~")  # unlike Path.home, no error for an unknown user
    if os.path.isabs(home) and home != "/":
        return Path(home, ".cache", "dragoman")
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir(), f"dragoman-cache-{user}")


def make_private_directory(folder: Path) -> Path:
    """Create a cache directory with mode 0700 and return it; raise OSError if it is not usable.

    A default directory that others may write to is closed to them; files that others own are not
    loaded. A directory from $DRAGOMAN_CACHE keeps its mode, and is not trusted if others may write
    to it.
    """
    *inner, outermost = _cache_parents(folder)
    outermost.parent.mkdir(parents=True, exist_ok=True)
    for each in (outermost, *reversed(inner)):
        each.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(each)
        ours = (
            hasattr(os, "geteuid") and found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode)
        )
        if ours and found.st_mode & _OTHERS_WRITE and not os.environ.get(CACHE_VARIABLE):
            os.chmod(each, 0o700)
    if problem := trust_problem(folder):
        raise PermissionError(errno.EPERM, problem, str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return folder


def trust_problem(path: Path) -> str:
    """Return why a cache file or directory is not trusted, or "".

    Owner and mode are checked up to the cache directory.
    """
    if not hasattr(os, "geteuid"):
        return ""
    for each in (path, *(() if path == cache_dir() else _cache_parents(path.parent))):
        found = os.lstat(each)
        if stat.S_ISLNK(found.st_mode):
            return f"{each} is a symbolic link"
        if found.st_uid not in (os.geteuid(), 0):
            return f"{each} belongs to another user ({found.st_uid})"
        if found.st_mode & _OTHERS_WRITE:
            return f"others may write to {each} (mode {stat.S_IMODE(found.st_mode):04o})"
    return ""


def write_cached(path: Path, data: bytes) -> None:
    """Write a cache file atomically with mode 0600, and its SHA-256 beside it."""
    replace_file(path, data, mode=0o600)
    replace_file(digest_path(path), hashlib.sha256(data).hexdigest().encode("ascii"), mode=0o600)


def read_cached(path: Path) -> bytes | None:
    """Return a cached file's contents, or None if it is absent, damaged or not trusted."""
    try:
        problem = trust_problem(path) or trust_problem(digest_path(path))
        data, digest = read_regular(path, _MAX_FILE_BYTES), read_regular(digest_path(path), 4096)
    except OSError:
        return None
    if not problem and hashlib.sha256(data).hexdigest().encode("ascii") != digest.strip():
        problem = "its SHA-256 is not the one beside it"
    if problem:
        logger.warning("%s in the cache is ignored and computed again: %s", path.name, problem)
        return None
    return data


def digest_path(path: Path) -> Path:
    """Return the path of a cached file's SHA-256."""
    return path.with_name(path.name + DIGEST_SUFFIX)


def _cache_parents(folder: Path) -> list[Path]:
    """Return a directory and its parents up to the cache directory."""
    root = cache_dir()
    if folder != root and root not in folder.parents:
        return [folder]
    return [folder, *(each for each in folder.parents if each == root or root in each.parents)]
