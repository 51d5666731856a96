"""Read and write checkpoints: safetensors files of the parts or their shards, state.json, manifest.

The tensors come from `training/model_and_optimizer_checkpoint.py`. state.json is
`TrainerState.state_dict` (`training/trainer_state.py`): step, epoch, batch, counters, best metrics,
token limits, divergence, precision and seconds, and no state of a random generator. A resuming run
opens the newest intact checkpoint (`RunDirectory.latest`): `open_checkpoint` verifies its files by
SHA-256 (`verify_files` in `storage/manifest.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dragoman.errors import CorruptError, DivergedError, StoppedError
from dragoman.runtime import signals
from dragoman.storage import fault_injection, manifest
from dragoman.storage.atomic_and_safe_file_io import (
    FileRecord,
    native_path,
    publish_directory,
    remove_flat_directory,
    sync_directory,
    temporary_name,
    write_file,
)
from dragoman.storage.tensor_files import (
    TensorInfo,
    check_tensors_match,
    read_header,
    read_tensors,
    write_tensors,
)

RowSelector = Callable[[str], slice | None]  # name of a tensor -> rows to read; None for all
_SHARD_FILE = re.compile(r"(\w+)-(\d+)-of-(\d+)\.safetensors")


def shard_file_names(part: str, names: Collection[str]) -> list[str]:
    """Return the files of a part: one, or all of its shards in order.

    Empty where any is missing.
    """
    if f"{part}.safetensors" in names:
        return [f"{part}.safetensors"]
    found = [match for match in map(_SHARD_FILE.fullmatch, names) if match and match[1] == part]
    wanted = [f"{part}-{number}-of-{len(found)}.safetensors" for number in range(len(found))]
    return wanted if set(wanted) <= set(names) else []


class ShardedTensors:
    """One part of a checkpoint, such as the weights, in one file or in shards."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._headers = {path: read_header(path) for path in self._paths}

    @property
    def header(self) -> dict[str, TensorInfo]:
        """Dtypes and full shapes of the tensors; raises CorruptError where shards do not match."""
        whole: dict[str, TensorInfo] = {}
        for path, header in self._headers.items():
            for name, shard in header.items():
                whole[name] = (
                    shard if name not in whole else _concat_shapes(path, name, whole[name], shard)
                )
        return whole

    def check_shapes_match(self, expected: Mapping[str, Tensor]) -> None:
        """Raise CorruptError if the tensors do not match a model's."""
        check_tensors_match(self._paths[0], self.header, expected)

    def read(
        self, *, expected: Mapping[str, Tensor] | None = None, rows: RowSelector | None = None
    ) -> dict[str, Tensor]:
        """Return all tensors, or the selected rows of each."""
        if len(self._paths) == 1 and rows is None:
            return read_tensors(self._paths[0], expected=expected)
        if expected is not None:
            self.check_shapes_match(expected)
        found: dict[str, list[Tensor]] = {}
        row_offsets: dict[str, int] = {}
        for path in self._paths:
            for name, tensor, start in self._read_shards(path, row_offsets, rows):
                found.setdefault(name, []).append(tensor)
                row_offsets[name] = start
        return {
            name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()
        }

    def _read_shards(
        self, path: Path, row_offsets: Mapping[str, int], rows: RowSelector | None
    ) -> Iterator[tuple[str, Tensor, int]]:
        """Yield the selected rows of each tensor in a file, and the first row of the next file."""
        try:
            with native_path(path) as readable, safe_open(readable, framework="pt") as file:
                for name, shape in self._headers[path].items():
                    wanted = rows(name) if rows is not None else None
                    if not shape.shape:
                        yield name, file.get_tensor(name), 0
                        continue
                    start, count = row_offsets.get(name, 0), shape.shape[0]
                    first, last = (
                        (0, count)
                        if wanted is None
                        else (wanted.start - start, wanted.stop - start)
                    )
                    first, last = min(max(first, 0), count), min(max(last, 0), count)
                    yield name, file.get_slice(name)[first:last], start + count
        except (SafetensorError, OSError) as error:
            raise manifest.corrupt_file_error(path, str(error)) from error


def _concat_shapes(path: Path, name: str, above: TensorInfo, below: TensorInfo) -> TensorInfo:
    """Return the shape of two shards concatenated by rows."""
    if (
        above.dtype != below.dtype
        or not above.shape
        or not below.shape
        or above.shape[1:] != below.shape[1:]
    ):
        found = f"{name} {below.dtype} {list(below.shape)} after {above.dtype} {list(above.shape)}"
        fix = "restore it from a copy, or use an older checkpoint"
        raise CorruptError(f"{path} must hold shards that match the others", found=found, fix=fix)
    return TensorInfo(above.dtype, (above.shape[0] + below.shape[0], *above.shape[1:]))


TENSOR_PARTS = ("weights", "optimizer", "ema", "carried")
_STEP_DIRECTORY = re.compile(r"step-(\d{8,})")
_MAX_STATE_BYTES = 256 << 20  # token limits and excluded steps make it grow
_MAX_NUMBER = 1 << 62
# Types of the manifest's fields.
_MANIFEST_TYPES: dict[str, Any] = {
    "step": int,
    "run_id": str,
    "data_sha256": str,
    "config_sha256": str,
    "env": dict,
    "metrics": dict,
    "suspect": bool,
}

CheckpointTensors = Mapping[str, Mapping[str, Tensor] | None]
WriteTensors = Callable[[Path, CheckpointTensors], Mapping[str, FileRecord]]


@dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint whose files were verified."""

    step: int
    path: Path
    manifest: Mapping[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """The training state without tensors, as it was saved."""
        return manifest.read_json(self.path / "state.json", max_bytes=_MAX_STATE_BYTES)

    @property
    def metrics(self) -> dict[str, Any]:
        """Validation metrics of this step."""
        return dict(self.manifest.get("metrics", {}))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device and threads that bit-exact results depend on."""
        return dict(self.manifest.get("env", {}))

    def load_weights(
        self, expected: Mapping[str, Tensor] | None = None, *, rows: RowSelector | None = None
    ) -> dict[str, Tensor]:
        """Return the model's weights, or some rows of each, however many ranks saved them."""
        return self._sharded_tensors("weights").read(expected=expected, rows=rows)

    def load_optimizer(
        self, expected: Mapping[str, Tensor] | None = None, *, rows: RowSelector | None = None
    ) -> dict[str, Tensor]:
        """Return the optimizer's tensors, named `<parameter>.<slot>`."""
        return self._sharded_tensors("optimizer").read(expected=expected, rows=rows)

    def load_ema(
        self, expected: Mapping[str, Tensor] | None = None, *, rows: RowSelector | None = None
    ) -> dict[str, Tensor] | None:
        """Return the EMA of the weights; None where there is none."""
        if not shard_file_names("ema", self.manifest["files"]):
            return None
        return self._sharded_tensors("ema").read(expected=expected, rows=rows)

    def load_carried(self) -> dict[str, Tensor]:
        """Return the task's carried state, such as Transformer-XL's memory; empty without one."""
        if not shard_file_names("carried", self.manifest["files"]):
            return {}
        return self._sharded_tensors("carried").read()

    def check_shapes_match(self, expected: CheckpointTensors) -> None:
        """Raise CorruptError if the checkpoint belongs to another model; reads headers only."""
        for part, tensors in expected.items():
            if tensors is not None:
                self._sharded_tensors(part).check_shapes_match(tensors)

    def _sharded_tensors(self, part: str) -> ShardedTensors:
        return ShardedTensors(
            [
                self.path / name
                for name in shard_file_names(part, self.manifest["files"])
                or [f"{part}.safetensors"]
            ]
        )


def step_directory_name(step: int) -> str:
    """Return the name of a step's directory, zero-padded so that names sort by step."""
    return f"step-{step:08d}"


def list_steps(run: Path) -> list[int]:
    """Return the steps saved in a directory, oldest first, unverified."""
    names = os.listdir(run) if run.is_dir() else []
    return sorted(
        int(match[1])
        for match in map(_STEP_DIRECTORY.fullmatch, names)
        if match and step_directory_name(int(match[1])) == match[0]
    )


def open_checkpoint(path: Path, *, sizes_only: bool = False) -> Checkpoint:
    """Open a checkpoint after its files were compared with the sizes and SHA-256 of its manifest.

    `sizes_only` leaves out the SHA-256, for a checkpoint that was just written. Raise CorruptError
    naming the first damaged file.
    """
    if path.is_symlink():  # its target may belong to another run and must not be pruned
        raise manifest.corrupt_file_error(path, "a symbolic link")
    content = manifest.verify_files(path, sizes_only=sizes_only)
    names = set(content["files"])
    known = {part: shard_file_names(part, names) for part in TENSOR_PARTS}
    if not known["weights"] or names != {"state.json"}.union(*known.values()):
        raise manifest.corrupt_file_error(
            path / manifest.MANIFEST_NAME, f"the files {', '.join(sorted(names))}"
        )
    for field, kind in _MANIFEST_TYPES.items():
        if not has_json_type(content.get(field, kind()), kind):
            raise manifest.corrupt_file_error(
                path / manifest.MANIFEST_NAME, f"{field} {content[field]!r:.100}"
            )
    if path.name != step_directory_name(content.get("step", -1)):
        raise manifest.corrupt_file_error(
            path / manifest.MANIFEST_NAME, f"step {content.get('step')} under the name {path.name}"
        )
    return Checkpoint(content["step"], path, content)


def has_json_type(value: Any, kind: Any) -> bool:
    """Whether a JSON value has a type; numbers must be finite and in range."""
    if kind is int:
        return type(value) is int and 0 <= value <= _MAX_NUMBER
    if kind is float:
        # NaN fails both comparisons.
        return type(value) in (int, float) and -_MAX_NUMBER <= value <= _MAX_NUMBER
    if get_origin(kind) in (dict, list):
        parts = value.values() if isinstance(value, dict) else value
        return isinstance(value, get_origin(kind)) and all(
            has_json_type(part, get_args(kind)[-1]) for part in parts
        )
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def write_tensor_files(
    folder: Path, tensors: CheckpointTensors, *, file_suffix: str = ""
) -> dict[str, FileRecord]:
    """Write one file per part; `file_suffix`, such as "-0-of-2", names the shards of a rank."""
    files = {}
    for part in TENSOR_PARTS:
        values = tensors.get(part)
        if values is not None:
            raise_on_second_interrupt()
            files[f"{part}{file_suffix}.safetensors"] = write_tensors(
                folder / f"{part}{file_suffix}.safetensors",
                values,
                point=f"publish.write.{part}.safetensors",
            )
    return files


def write_checkpoint(
    run: Path,
    step: int,
    tensors: CheckpointTensors,
    state: Mapping[str, Any],
    fields: Mapping[str, Any],
    write: WriteTensors = write_tensor_files,
) -> Checkpoint:
    """Write a checkpoint into a temporary directory and publish it with one atomic rename.

    `write` writes the tensors. On any failure before the rename the temporary directory is removed.
    An existing checkpoint of the step with the same tensors is kept; one with other tensors, which
    belongs to another run, raises DivergedError.
    """
    final = run / step_directory_name(step)
    temporary = run / temporary_name(f"{step:08d}")
    try:
        fault_injection.point("publish.mkdir")
        os.mkdir(temporary)
        files = dict(write(temporary, tensors))
        files["state.json"] = write_file(
            temporary / "state.json",
            [manifest.canonical_json(state)],
            point="publish.write.state.json",
        )
        content = manifest.write_manifest(temporary, files, {**fields, "step": step})
        raise_on_second_interrupt()
        if final.exists():
            return _require_same_tensors(open_checkpoint(final), content, temporary)
        publish_directory(temporary, final)
    except BaseException:
        remove_flat_directory(temporary)
        raise
    return open_checkpoint(final, sizes_only=True)


def _require_same_tensors(
    published: Checkpoint, content: Mapping[str, Any], temporary: Path
) -> Checkpoint:
    """Return the existing checkpoint if it has the same tensors as the new one."""
    # state.json holds timings, so it is not compared.
    for name, record in content["files"].items():
        if name != "state.json" and published.manifest["files"].get(name) != record:
            raise DivergedError(
                f"{published.path} must hold the tensors that this run computes",
                found=f"a different {name}",
                fix="train in another directory: two different runs were saved in this one",
            )
    remove_flat_directory(temporary)
    sync_directory(published.path.parent)
    return published


def raise_on_second_interrupt() -> None:
    """Raise StoppedError at a second stop request, between two files."""
    if signals.is_stop_urgent():
        raise StoppedError(
            "a second stop request saves no checkpoint",
            found=signals.stop_reason(),
            fix="run the same command again to resume from the last checkpoint",
        )
