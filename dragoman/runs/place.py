"""Where a run lives: the output directory, what it already holds, and what may change when a run goes on.

my-model/
  training/          the run: see training/checkpoint.py
    request.json     what was asked for
    config.json      what came of it: the same, with everything chosen
    text/            the tokenizers
  …                  the bundle, once training has ended
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dragoman.config import Config, from_dict, to_dict
from dragoman.errors import BundleError, ConfigError, CorruptError, DragomanError
from dragoman.files import manifest
from dragoman.files.atomic import replace_file
from dragoman.files.disk import explaining

TRAINING = "training"

# What a person may change when a run goes on. Anything else would make it another run.
CHANGEABLE = {
    "train": {
        "steps", "checkpoint_every", "validate_every", "validate_sentences", "keep", "average", "choose", "patience", "target_exact",
        "budget", "device", "threads", "compile", "shard", "tensorboard", "deterministic",
    },
    "decode": None,  # any
    "data": {"cache"},
}  # fmt: skip


class Place:
    """An output directory."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)
        self.training = self.out / TRAINING
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError([f"--out must be a directory; found the file {self.out}; choose another name"])
        above = next((each for each in self.out.parents if each.exists() and not each.is_dir()), None)
        if above is not None:
            raise ConfigError([f"--out must lie in a directory; found {self.out} below the file {above}; choose another place"])

    @property
    def text(self) -> Path:
        """Where the run keeps its tokenizers."""
        return self.training / "text"

    @property
    def finished(self) -> bool:
        """Whether a finished model is there."""
        return (self.out / manifest.NAME).exists()

    @property
    def begun(self) -> bool:
        """Whether a run was begun there."""
        return (self.training / "config.json").exists()

    def check_empty_enough(self) -> None:
        """Refuse to write a model among somebody's other files."""
        if self.begun or not self.out.exists():
            return
        others = sorted(each.name for each in self.out.iterdir() if each.name != TRAINING)
        if others:
            raise BundleError(
                f"--out must be a new or an empty directory, or one with a run to go on with; {self.out} is neither",
                found=f"{', '.join(others[:3])}{' …' if len(others) > 3 else ''} in it",
                fix="choose another directory",
            )

    def require_run(self) -> None:
        """Raise BundleError unless there is a run whose checkpoints can be averaged."""
        if not self.begun:
            raise BundleError(
                f"{self.out} must hold the run whose checkpoints are averaged",
                found=f"no {self.training / 'config.json'}",
                fix="give a directory that dragoman train wrote, with its training/ in it",
            )

    def require_no_run(self) -> None:
        """Raise BundleError if there is a run, or anybody's other files."""
        self.check_empty_enough()
        if self.begun:
            raise BundleError("--out must be a new directory", found=f"a run in {self.out}", fix="choose another")

    def request(self) -> Config:
        """Read what was asked for when the run began."""
        return self._read("request.json")

    def config(self) -> Config:
        """Read what the run was begun with."""
        return self._read("config.json")

    def write(self, request: Config, config: Config) -> None:
        """Keep what was asked for and what came of it; the latter last, for it says that a run was begun."""
        with explaining(self.training):
            replace_file(self.training / "request.json", manifest.canonical_json(to_dict(request)))
            replace_file(self.training / "config.json", manifest.canonical_json(to_dict(config)))

    def go_on(self, request: Config | None) -> Config:
        """Give the run's configuration, with what the new request may change; refuse what it may not."""
        config = self.config()
        if request is None:
            return config
        before, now = to_dict(self.request()), to_dict(request)
        changes: dict[str, dict[str, Any]] = {}
        problems = []
        for section, values in now.items():
            if not isinstance(values, dict):
                continue
            for name, value in values.items():
                if value == before[section][name]:
                    continue
                allowed = CHANGEABLE.get(section, set())
                if allowed is not None and name not in allowed:
                    problems.append(
                        f"{section}.{name} must stay as the run in {self.out} began; found {value!r} where it was "
                        f"{before[section][name]!r}; leave it, or choose another --out"
                    )
                changes.setdefault(section, {})[name] = tuple(value) if isinstance(value, list) else value
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
                f"{path} must hold the run's settings", found=found, fix="restore it, or train in another directory"
            ) from error
