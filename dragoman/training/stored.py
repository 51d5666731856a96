"""A checkpoint on disk: how one is written into a run directory, and what can be read from one that verifies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from torch import Tensor

from dragoman import stopping
from dragoman.errors import DivergedError, StoppedError
from dragoman.files import faults, manifest
from dragoman.files.atomic import FileRecord, publish_directory, remove_flat, sync_directory, temporary_name, write_file
from dragoman.training.pieces import Pieces, Rows, file_names
from dragoman.training.standing import Standing
from dragoman.training.tensors import write_tensors

PARTS = ("weights", "optimizer", "ema")
_STEP = re.compile(r"step-(\d{8,})")
_MAX_STATE = 256 << 20  # bytes; learnt token caps and excluded examples make it grow
_LARGEST = 1 << 62
# Types of what is read of a step's manifest, and of what `divergence.py` keeps in the state.
_FIELDS: dict[str, Any] = {
    "step": int,
    "run_id": str,
    "data_sha256": str,
    "config_sha256": str,
    "env": dict,
    "metrics": dict,
    "suspect": bool,
}
_DIVERGENCE: dict[str, Any] = {
    **dict.fromkeys(("skipped", "row"), int),
    **dict.fromkeys(("recent", "excluded"), list[int]),
    **dict.fromkeys(("mean", "variance", "seen"), float),
    **dict.fromkeys(("rolled_back", "suspect"), bool),
}

Tensors = Mapping[str, Mapping[str, Tensor] | None]
Write = Callable[[Path, Tensors], Mapping[str, FileRecord]]


@dataclass(frozen=True)
class Checkpoint:
    """A published step whose files were verified."""

    step: int
    path: Path
    manifest: Mapping[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """Everything but tensors that the run resumes from, as whoever published it gave it."""
        return manifest.read_json(self.path / "state.json", max_bytes=_MAX_STATE)

    @property
    def standing(self) -> dict[str, Any]:
        """The state as the trainer publishes it; raises CorruptError where a value has a type that it never writes."""
        state = self.state
        for name, problem in state_problems(state):
            raise manifest.corrupt(self.path / "state.json", f"{name} {problem}")
        return state

    @property
    def metrics(self) -> dict[str, Any]:
        """The validation's figures at this step."""
        return dict(self.manifest.get("metrics", {}))

    @property
    def environment(self) -> dict[str, Any]:
        """What the run's bits depended on when this was written."""
        return dict(self.manifest.get("env", {}))

    def load_weights(self, expected: Mapping[str, Tensor] | None = None, *, rows: Rows | None = None) -> dict[str, Tensor]:
        """Read the model's weights, whole or some rows of each, however many ranks wrote them."""
        return self._pieces("weights").read(expected=expected, rows=rows)

    def load_optimizer(self, expected: Mapping[str, Tensor] | None = None, *, rows: Rows | None = None) -> dict[str, Tensor]:
        """Read the optimiser's tensors, named `<parameter>.<slot>`."""
        return self._pieces("optimizer").read(expected=expected, rows=rows)

    def load_ema(self, expected: Mapping[str, Tensor] | None = None, *, rows: Rows | None = None) -> dict[str, Tensor] | None:
        """Read the running average of the weights; None where none was kept."""
        if not file_names("ema", self.manifest["files"]):
            return None
        return self._pieces("ema").read(expected=expected, rows=rows)

    def require_fit(self, expected: Tensors) -> None:
        """Refuse a model that this checkpoint was not made for, before any tensor is read."""
        for part, tensors in expected.items():
            if tensors is not None:
                self._pieces(part).require_fit(tensors)

    def _pieces(self, part: str) -> Pieces:
        return Pieces([self.path / name for name in file_names(part, self.manifest["files"]) or [f"{part}.safetensors"]])


def step_name(step: int) -> str:
    """Name a step's directory; the zeros make names sort as numbers do."""
    return f"step-{step:08d}"


def list_steps(run: Path) -> list[int]:
    """List the steps in a directory by number, oldest first, unverified."""
    names = os.listdir(run) if run.is_dir() else []
    return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match and step_name(int(match[1])) == match[0])


def open_checkpoint(path: Path, *, sizes_only: bool = False) -> Checkpoint:
    """Verify a step's directory and open it; raises CorruptError naming the first wrong file."""
    if path.is_symlink():  # what it leads to is not ours to prune
        raise manifest.corrupt(path, "a symbolic link")
    content = manifest.verify(path, sizes_only=sizes_only)
    names = set(content["files"])
    known = {part: file_names(part, names) for part in PARTS}
    if not known["weights"] or names != {"state.json"}.union(*known.values()):
        raise manifest.corrupt(path / manifest.NAME, f"the files {', '.join(sorted(names))}")
    for field, kind in _FIELDS.items():
        if not _fits(content.get(field, kind()), kind):
            raise manifest.corrupt(path / manifest.NAME, f"{field} {content[field]!r:.100}")
    if path.name != step_name(content.get("step", -1)):
        raise manifest.corrupt(path / manifest.NAME, f"step {content.get('step')} under the name {path.name}")
    return Checkpoint(content["step"], path, content)


def state_problems(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names in a checkpoint's state whose values are of another type than a run writes, with what was found."""
    hints = get_type_hints(Standing)
    for name, value in state.items():
        if name in hints and not _fits(value, hints[name]):
            yield name, f"{value!r:.100}"
    divergence = state.get("divergence")
    for name, value in divergence.items() if isinstance(divergence, dict) else ():
        if not _fits(value, _DIVERGENCE.get(name, Any)):
            yield f"divergence.{name}", f"{value!r:.100}"
    if "steps" not in state:
        yield "steps", "missing"


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON is of a type, numbers being those that a run can count."""
    if kind is int:
        return type(value) is int and 0 <= value <= _LARGEST
    if kind is float:
        return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST  # NaN is neither
    if get_origin(kind) in (dict, list):
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, get_origin(kind)) and all(_fits(part, get_args(kind)[-1]) for part in parts)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def write_parts(folder: Path, tensors: Tensors, *, label: str = "") -> dict[str, FileRecord]:
    """Write the parts into files of their own; a rank's `label`, such as "-0-of-2", tells its pieces from the others'."""
    files = {}
    for part in PARTS:
        values = tensors.get(part)
        if values is not None:
            leave_if_urgent()
            files[f"{part}{label}.safetensors"] = write_tensors(
                folder / f"{part}{label}.safetensors", values, point=f"publish.write.{part}.safetensors"
            )
    return files


def write_step(
    run: Path, step: int, tensors: Tensors, state: Mapping[str, Any], fields: Mapping[str, Any], write: Write = write_parts
) -> Checkpoint:
    """Write a step into a temporary directory and publish it by one rename; `write` puts the tensors into it.

    On any failure before the rename the temporary directory is removed. A step that is there already with the same
    tensors is left as it is; with others, two histories have met and nothing is published.
    """
    final = run / step_name(step)
    temporary = run / temporary_name(f"{step:08d}")
    try:
        faults.point("publish.mkdir")
        os.mkdir(temporary)
        files = dict(write(temporary, tensors))
        files["state.json"] = write_file(temporary / "state.json", [manifest.canonical_json(state)], point="publish.write.state.json")
        content = manifest.write_manifest(temporary, files, {**fields, "step": step})
        leave_if_urgent()
        if final.exists():
            return _same_or_raise(open_checkpoint(final), content, temporary)
        publish_directory(temporary, final)
    except BaseException:
        remove_flat(temporary)
        raise
    return open_checkpoint(final, sizes_only=True)


def _same_or_raise(published: Checkpoint, content: Mapping[str, Any], temporary: Path) -> Checkpoint:
    """Keep what is published when it has the tensors that we were about to publish."""
    # state.json may hold times for people, so it does not decide.
    for name, record in content["files"].items():
        if name != "state.json" and published.manifest["files"].get(name) != record:
            raise DivergedError(
                f"{published.path} must hold what this run computes for the step",
                found=f"another {name} in it",
                fix="train in another directory: two runs with different histories have met in this one",
            )
    remove_flat(temporary)
    sync_directory(published.path.parent)
    return published


def leave_if_urgent() -> None:
    """Stop between two files when somebody asked a second time."""
    if stopping.urgent():
        raise StoppedError(
            "a second request to stop publishes nothing",
            found=stopping.reason(),
            fix="run the same command again to go on from the last checkpoint",
        )
