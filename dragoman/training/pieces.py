"""Tensors that lie in several files: each rank's rows in a file of its own, in the order of the ranks.

`weights-0-of-2.safetensors` and `weights-1-of-2.safetensors` hold the same names; a tensor is its pieces one below the other.
What only the first file has, such as a number, is whole there. So no index is needed, and any number of ranks can read any rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dragoman.errors import CorruptError
from dragoman.files.atomic import native_path
from dragoman.training.tensors import Shape, corrupt, read_header, read_tensors, require_fit

Rows = Callable[[str], slice | None]  # a tensor's name -> which of its rows are wanted; None for all
_PIECE = re.compile(r"(\w+)-(\d+)-of-(\d+)\.safetensors")


def file_names(part: str, names: Collection[str]) -> list[str]:
    """List a part's files among a directory's, in order: one, or all of its pieces; empty where there are none or some are missing."""
    if f"{part}.safetensors" in names:
        return [f"{part}.safetensors"]
    found = [match for match in map(_PIECE.fullmatch, names) if match and match[1] == part]
    wanted = [f"{part}-{number}-of-{len(found)}.safetensors" for number in range(len(found))]
    return wanted if set(wanted) <= set(names) else []


class Pieces:
    """One part of a checkpoint, such as the weights, in one file or several."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self._headers = {path: read_header(path) for path in self._paths}

    @property
    def header(self) -> dict[str, Shape]:
        """Give types and whole shapes; raises CorruptError where pieces do not fit together."""
        whole: dict[str, Shape] = {}
        for path, header in self._headers.items():
            for name, piece in header.items():
                whole[name] = piece if name not in whole else _joined(path, name, whole[name], piece)
        return whole

    def require_fit(self, expected: Mapping[str, Tensor]) -> None:
        """Refuse what was made for another model."""
        require_fit(self._paths[0], self.header, expected)

    def read(self, *, expected: Mapping[str, Tensor] | None = None, rows: Rows | None = None) -> dict[str, Tensor]:
        """Read all tensors, or only the wanted rows of each."""
        if len(self._paths) == 1 and rows is None:
            return read_tensors(self._paths[0], expected=expected)
        if expected is not None:
            self.require_fit(expected)
        found: dict[str, list[Tensor]] = {}
        begun: dict[str, int] = {}
        for path in self._paths:
            for name, tensor, start in self._pieces(path, begun, rows):
                found.setdefault(name, []).append(tensor)
                begun[name] = start
        return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()}

    def _pieces(self, path: Path, begun: Mapping[str, int], rows: Rows | None) -> Iterator[tuple[str, Tensor, int]]:
        """Give what is wanted of each tensor in a file, and the row that the next file begins at."""
        try:
            with native_path(path) as readable, safe_open(readable, framework="pt") as file:
                for name, shape in self._headers[path].items():
                    wanted = rows(name) if rows is not None else None
                    if not shape.shape:
                        yield name, file.get_tensor(name), 0
                        continue
                    start, count = begun.get(name, 0), shape.shape[0]
                    first, last = (0, count) if wanted is None else (wanted.start - start, wanted.stop - start)
                    first, last = min(max(first, 0), count), min(max(last, 0), count)
                    yield name, file.get_slice(name)[first:last], start + count
        except (SafetensorError, OSError) as error:
            raise corrupt(path, str(error)) from error


def _joined(path: Path, name: str, above: Shape, below: Shape) -> Shape:
    """Put one piece's shape below another's."""
    if above.dtype != below.dtype or not above.shape or not below.shape or above.shape[1:] != below.shape[1:]:
        found = f"{name} {below.dtype} {list(below.shape)} below {above.dtype} {list(above.shape)}"
        fix = "restore it from a copy, or use an older checkpoint"
        raise CorruptError(f"{path} must hold pieces that fit the others", found=found, fix=fix)
    return Shape(above.dtype, (above.shape[0] + below.shape[0], *above.shape[1:]))
