"""Where a run lives: the output directory, what it already holds, and what may change when a run goes on.

my-model/
  training/          the run: see checkpoint/run_directory.py
    request.json     what was asked for
    init.safetensors the weights that fine-tuning starts from
    data.json        the files that were read, with their hashes, and the tokenizer's
    config.json      what came of it: the same, with everything chosen
    text/            the tokenizers
  …                  the bundle, once training has ended
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.config import Config, from_dict, to_dict
from dragoman.data.text_stream import file_sha256
from dragoman.errors import (
    BundleError,
    ConfigError,
    CorruptError,
    DragomanError,
    PermissionDeniedError,
)
from dragoman.storage import manifest
from dragoman.storage.atomic import replace_file
from dragoman.storage.disk import os_errors_converted, require_disk_space
from dragoman.storage.lock import DirectoryLock

TRAINING_DIRECTORY = "training"

# What a person may change when a run goes on. Anything else would make it another run.
CHANGEABLE_SETTINGS = {
    "train": {
        "steps", "checkpoint_every", "validate_every", "validate_sentences", "keep_checkpoints", "average_checkpoints", "final_checkpoint", "patience", "target_exact",
        "time_budget", "device", "threads", "compile", "fsdp", "tensorboard", "deterministic",
    },
    "decode": None,  # any
    "data": {"cache_dir"},
}  # fmt: skip


class DataFile(NamedTuple):
    """A file that a run reads, as it was when the run began."""

    part: str  # "train", "valid" or "text", the tokenizer's
    path: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, part: str, path: Path) -> DataFile:
        """Hash a file as it is now."""
        digest = file_sha256(path)
        return cls(part, str(path), path.stat().st_size, digest)


def require_same_files(before: Sequence[DataFile], now: Sequence[DataFile]) -> None:
    """Raise CorruptError that names the file if any differs from what the run began with."""
    changed = [
        (old, new) for old, new in zip(before, now, strict=False) if old.sha256 != new.sha256
    ]
    if not changed and len(before) == len(now):
        return
    if not changed:
        names = [
            ", ".join(Path(each.path).name for each in files) or "none" for files in (now, before)
        ]
        raise CorruptError(
            "a run must read the files that it began with",
            found=f"{names[0]} where there were {names[1]}",
            fix="restore them, or train in another --out directory",
        )
    old, new = changed[0]
    others = f", and {len(changed) - 1} more changed" if len(changed) > 1 else ""
    raise CorruptError(
        f"{new.path} must be as it was when the run began",
        found=f"{new.bytes} bytes with SHA-256 {new.sha256[:12]}… where it had {old.bytes} with {old.sha256[:12]}…{others}",
        fix="restore it, or train in another --out directory",
    )


class OutputDirectory:
    """An output directory."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)
        self.training = self.out / TRAINING_DIRECTORY
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(
                [f"--out must be a directory; found the file {self.out}; choose another name"]
            )
        above = next(
            (each for each in self.out.parents if each.exists() and not each.is_dir()), None
        )
        if above is not None:
            raise ConfigError(
                [
                    f"--out must be in a directory; found {self.out} below the file {above}; choose another path"
                ]
            )

    @property
    def text(self) -> Path:
        """Where the run keeps its tokenizers."""
        return self.training / "text"

    @property
    def finished(self) -> bool:
        """Whether a finished model is there."""
        return (self.out / manifest.MANIFEST_NAME).exists()

    @property
    def has_run(self) -> bool:
        """Whether a run was begun there."""
        return (self.training / "config.json").exists()

    @property
    def was_started(self) -> bool:
        """Whether a process took the directory, though it may have ended before the run was begun."""
        return (self.training / "run.json").exists()

    def require_resumable(self) -> None:
        """Raise ConfigError if there is nothing to resume."""
        if not self.has_run:
            why = ": it was stopped while it prepared its data" if self.was_started else ""
            raise ConfigError(
                [
                    f"--resume needs a run; found no run in {self.out} to resume{why}; leave out --resume to start one"
                ]
            )

    def require_unlocked(self) -> None:
        """Raise if a run could not write here, because another process has the directory or we may not; writes nothing."""
        DirectoryLock(self.training).require_unlocked()
        there = next(
            each
            for each in (self.training, self.out, *self.out.absolute().parents)
            if each.is_dir()
        )
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionDeniedError(
                "the directory must be writable",
                found=f"{os.strerror(errno.EACCES)} at {there}",
                fix="change its permissions or choose another directory",
            )

    def require_disk_space(self, needed: int) -> None:
        """Raise if the checkpoints of a run would not fit on the disk."""
        there = next(each for each in (self.out, *self.out.absolute().parents) if each.is_dir())
        require_disk_space(there, needed, "room for the checkpoints")

    def require_usable(self) -> None:
        """Refuse to write a model among somebody's other files."""
        if self.has_run or not self.out.exists():
            return
        others = sorted(each.name for each in self.out.iterdir() if each.name != TRAINING_DIRECTORY)
        if others:
            raise BundleError(
                f"--out must be a new or an empty directory, or one with a run to go on with; {self.out} is neither",
                found=f"{', '.join(others[:3])}{' …' if len(others) > 3 else ''} in it",
                fix="choose another directory",
            )

    def require_run(self) -> None:
        """Raise BundleError unless there is a run whose checkpoints can be averaged."""
        if not self.has_run:
            raise BundleError(
                f"{self.out} must hold the run whose checkpoints are averaged",
                found=f"no {self.training / 'config.json'}",
                fix="give a directory that dragoman train wrote, with its training/ in it",
            )

    def require_no_run(self) -> None:
        """Raise BundleError if there is a run, or anybody's other files."""
        self.require_usable()
        if self.has_run:
            raise BundleError(
                "--out must be a new directory", found=f"a run in {self.out}", fix="choose another"
            )

    def request(self) -> Config:
        """Read what was asked for when the run began."""
        return self._read("request.json")

    def config(self) -> Config:
        """Read what the run was begun with."""
        return self._read("config.json")

    def data(self) -> list[DataFile]:
        """Read which files the run began with; empty for a run that an older dragoman began."""
        path = self.training / "data.json"
        if not path.exists():
            return []
        try:
            listed = manifest.read_json(path)["files"]
            return [
                DataFile(
                    str(each["part"]), str(each["path"]), int(each["bytes"]), str(each["sha256"])
                )
                for each in listed
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(
                f"{path} must list the run's files",
                found=f"{type(error).__name__}: {error}",
                fix="restore it, or train in another directory",
            ) from error

    def write(self, request: Config, config: Config, data: Sequence[DataFile]) -> None:
        """Record what was asked for, what was read and what came of it; the last says that a run was begun."""
        listed = {"format": 1, "files": [each._asdict() for each in data]}
        with os_errors_converted(self.training):
            replace_file(self.training / "data.json", manifest.canonical_json(listed))
            replace_file(self.training / "request.json", manifest.canonical_json(to_dict(request)))
            replace_file(self.training / "config.json", manifest.canonical_json(to_dict(config)))

    def resume_config(
        self, request: Config | None, explicit_settings: Collection[str] = ()
    ) -> Config:
        """Return the run's configuration with what the new request may change; raise ConfigError for what it may not.

        A setting is changed where it differs from the first request, or where it was `asked` for by name ("model.width"),
        and from what the run has: a setting that was fitted is no default to return to.
        """
        config = self.config()
        if request is None:
            return config
        before, has, now = to_dict(self.request()), to_dict(config), to_dict(request)
        changes: dict[str, dict[str, Any]] = {}
        problems = []
        for section, values in now.items():
            if not isinstance(values, dict):
                continue
            for name, value in values.items():
                path = f"{section}.{name}"
                same = value == before[section][name] and (
                    path not in explicit_settings or path == "train.init_from"
                )  # settled as a digest
                if same or value == has[section][name]:
                    continue
                allowed = CHANGEABLE_SETTINGS.get(section, set())
                if allowed is not None and name not in allowed:
                    problems.append(
                        f"{path} must stay as the run in {self.out} began; found {value!r} where it was "
                        f"{has[section][name]!r}; leave it, or choose another --out"
                    )
                changes.setdefault(section, {})[name] = (
                    tuple(value) if isinstance(value, list) else value
                )
        if problems:
            raise ConfigError(problems)
        return config.replace(**changes)

    def _read(self, name: str) -> Config:
        path = self.training / name
        try:
            return from_dict(manifest.read_json(path))
        except DragomanError as error:
            found = "; ".join(error.problems[:3]) if isinstance(error, ConfigError) else error.found
            raise CorruptError(
                f"{path} must hold the run's settings",
                found=found,
                fix="restore it, or train in another directory",
            ) from error
