"""The output directory of a run, its files, and the settings that a resumed run may change.

my-model/
  training/          the run: see checkpoint/run_directory.py
    request.json     the configuration as given
    init.safetensors initial weights of a fine-tuning run
    data.json        corpus and tokenizer files with their hashes
    config.json      the resolved configuration; its presence marks a started run
    text/            the tokenizers
  …                  the bundle, once training has finished
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.config import Config, from_dict, to_dict
from dragoman.data.compressed_input_streams import file_sha256
from dragoman.errors import (
    BundleError,
    ConfigError,
    CorruptError,
    DragomanError,
    PermissionDeniedError,
)
from dragoman.storage import manifest
from dragoman.storage.atomic_and_safe_file_io import replace_file
from dragoman.storage.disk_space_and_errors import os_errors_converted, require_disk_space
from dragoman.storage.lock import DirectoryLock

TRAINING_DIRECTORY = "training"

# Resolved at the start of a run: to a name with a digest, and to the number of tokens found.
RESOLVED_SETTINGS = {"train.init_from", "train.extend_vocabulary"}

# Settings that a resumed run may change.
CHANGEABLE_SETTINGS = {
    "train": {
        "steps", "checkpoint_every", "validate_every", "validate_sentences", "keep_checkpoints",
        "average_checkpoints", "final_checkpoint", "patience", "target_exact", "time_budget",
        "device", "threads", "compile", "fsdp", "tensorboard", "deterministic",
    },
    "decode": None,  # any
    "data": {"cache_dir"},
}  # fmt: skip


class DataFile(NamedTuple):
    """A file that a run reads, with its size and hash at the start of the run."""

    part: str  # "train", "valid", "text" (tokenizer) or "init" (initial weights)
    path: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, part: str, path: Path) -> DataFile:
        """Return the record of a file as it is now."""
        digest = file_sha256(path)
        return cls(part, str(path), path.stat().st_size, digest)


def require_same_files(before: Sequence[DataFile], now: Sequence[DataFile]) -> None:
    """Raise CorruptError, naming the file, if any has changed since the run started."""
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
            "a run must read the files that it started with",
            found=f"{names[0]} instead of {names[1]}",
            fix="restore them, or train in another --out directory",
        )
    old, new = changed[0]
    others = f", and {len(changed) - 1} more changed" if len(changed) > 1 else ""
    raise CorruptError(
        f"{new.path} must not change after the start of the run",
        found=f"{new.bytes} bytes with SHA-256 {new.sha256[:12]}… instead of {old.bytes} "
        f"with {old.sha256[:12]}…{others}",
        fix="restore it, or train in another --out directory",
    )


class OutputDirectory:
    """The output directory of a training run."""

    def __init__(self, out: str | Path) -> None:
        self.path = Path(out)
        self.training = self.path / TRAINING_DIRECTORY
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(
                [f"--out must be a directory; found the file {self.path}; choose another name"]
            )
        above = next(
            (each for each in self.path.parents if each.exists() and not each.is_dir()), None
        )
        if above is not None:
            raise ConfigError(
                [
                    f"--out must be in a directory; found {self.path} below the file {above}; "
                    "choose another path"
                ]
            )

    @property
    def tokenizer_dir(self) -> Path:
        """The folder of the run's tokenizers."""
        return self.training / "text"

    @property
    def has_model(self) -> bool:
        """Whether the directory has a finished model."""
        return (self.path / manifest.MANIFEST_NAME).exists()

    @property
    def has_run(self) -> bool:
        """Whether the directory has a started run."""
        return (self.training / "config.json").exists()

    @property
    def was_started(self) -> bool:
        """Whether a process has locked the directory, even if it ended during preparation."""
        return (self.training / "run.json").exists()

    def require_resumable(self) -> None:
        """Raise ConfigError if there is nothing to resume."""
        if not self.has_run:
            why = ": it was stopped during data preparation" if self.was_started else ""
            raise ConfigError(
                [
                    f"--resume needs a run; found no run in {self.path}{why}; "
                    "leave out --resume to start one"
                ]
            )

    def require_unlocked(self) -> None:
        """Raise if the directory is locked by another process or not writable; writes nothing."""
        DirectoryLock(self.training).require_unlocked()
        there = next(
            each
            for each in (self.training, self.path, *self.path.absolute().parents)
            if each.is_dir()
        )
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionDeniedError(
                "the directory must be writable",
                found=f"{os.strerror(errno.EACCES)} at {there}",
                fix="change its permissions or choose another directory",
            )

    def require_disk_space(self, needed: int) -> None:
        """Raise if the checkpoints of a run do not fit on the disk."""
        there = next(each for each in (self.path, *self.path.absolute().parents) if each.is_dir())
        require_disk_space(there, needed, "the checkpoints")

    def require_usable(self) -> None:
        """Raise BundleError if the directory has other files and no run."""
        if self.has_run or not self.path.exists():
            return
        others = sorted(
            each.name for each in self.path.iterdir() if each.name != TRAINING_DIRECTORY
        )
        if others:
            raise BundleError(
                f"--out must be a new or empty directory, or one with a run; {self.path} is "
                "neither",
                found=f"{', '.join(others[:3])}{' …' if len(others) > 3 else ''} in it",
                fix="choose another directory",
            )

    def require_run(self) -> None:
        """Raise BundleError unless there is a run whose checkpoints can be averaged."""
        if not self.has_run:
            raise BundleError(
                f"{self.path} must hold the run whose checkpoints are averaged",
                found=f"no {self.training / 'config.json'}",
                fix="pass a directory written by dragoman train, with its training/",
            )

    def require_no_run(self) -> None:
        """Raise BundleError if the directory has a run or other files."""
        self.require_usable()
        if self.has_run:
            raise BundleError(
                "--out must be a new directory", found=f"a run in {self.path}", fix="choose another"
            )

    def request(self) -> Config:
        """Return the configuration as given when the run was started."""
        return self._read("request.json")

    def config(self) -> Config:
        """Return the resolved configuration of the run."""
        return self._read("config.json")

    def data_files(self) -> list[DataFile]:
        """Return the files that the run started with; empty if none were recorded."""
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
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptError(
                f"{path} must list the run's files",
                found=f"{type(error).__name__}: {error}",
                fix="restore it, or train in another directory",
            ) from error

    def write(self, request: Config, config: Config, data: Sequence[DataFile]) -> None:
        """Write the given configuration, the data files, and last the resolved configuration."""
        listed = {"format": 1, "files": [each._asdict() for each in data]}
        with os_errors_converted(self.training):
            replace_file(self.training / "data.json", manifest.canonical_json(listed))
            replace_file(self.training / "request.json", manifest.canonical_json(to_dict(request)))
            replace_file(self.training / "config.json", manifest.canonical_json(to_dict(config)))

    def resume_config(
        self, request: Config | None, explicit_settings: Collection[str] = ()
    ) -> Config:
        """Return the run's configuration with the changes of a new request.

        Raise ConfigError for another task, and for a change outside CHANGEABLE_SETTINGS; if the
        recipe is another, for the recipe alone. A setting counts as changed if it differs from the
        first request, or is in `explicit_settings` ("model.width"), and differs from the resolved
        configuration.
        """
        config = self.config()
        if request is None:
            return config
        self.require_same_task(request.task)  # each task has sections of its own
        before, has, now = to_dict(self.request()), to_dict(config), to_dict(request)
        changes: dict[str, dict[str, Any]] = {}
        problems = []
        for section, values in now.items():
            if not isinstance(values, dict):
                continue
            for name, value in values.items():
                path = f"{section}.{name}"
                is_same = value == before[section][name] and (
                    path not in explicit_settings or path in RESOLVED_SETTINGS
                )
                if is_same or value == has[section][name]:
                    continue
                allowed = CHANGEABLE_SETTINGS.get(section, set())
                if allowed is not None and name not in allowed:
                    problems.append(
                        f"{path} cannot change in the run in {self.path}; found {value!r} instead "
                        "of "
                        f"{has[section][name]!r}; leave it, or choose another --out"
                    )
                changes.setdefault(section, {})[name] = (
                    tuple(value) if isinstance(value, list) else value
                )
        if problems and request.recipe not in (before["recipe"], config.recipe):
            found = f"{request.recipe or 'none'} instead of {config.recipe or 'none'}"
            problems = [
                f"the recipe cannot change in the run in {self.path}; found {found}; "
                "repeat the same command, or choose another --out"
            ]
        if problems:
            raise ConfigError(problems)
        return config.replace(**changes)

    def require_same_task(self, task: str) -> None:
        """Raise ConfigError if the run in the directory is of another task."""
        own = self.config().task
        if task != own:
            raise ConfigError(
                [
                    f"the task cannot change in the run in {self.path}; found {task} instead of "
                    f"{own}; choose another --out"
                ]
            )

    def _read(self, name: str) -> Config:
        path = self.training / name
        try:
            return from_dict(manifest.read_json(path))
        except DragomanError as error:
            found = "; ".join(error.problems[:3]) if isinstance(error, ConfigError) else error.found
            raise CorruptError(
                f"{path} must hold the run's configuration",
                found=found,
                fix="restore it, or train in another directory",
            ) from error
