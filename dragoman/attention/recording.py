"""Looking into attention while a model runs, and changing what it does, without a trace afterwards.

    with record(model) as notes:          notes["decoder.3.cross"].weights      (B, H, T, S)
    with edit(model, {"decoder.3.cross": heads_off([2])}):

An attention that nobody watches pays one comparison a call. A watched one takes the plain path, which has weights to show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dragoman.errors import DragomanError, nearest

Edit = Callable[[Tensor], Tensor]  # weights (B, H, T, S) to weights of the same shape


class Note(NamedTuple):
    """One call of one attention: `weights @ values` is `output`."""

    weights: Tensor  # (B, H, T, S), as used: after edits and dropout
    values: Tensor  # (B, H, S, Dh)
    output: Tensor  # (B, H, T, Dh), before the heads are joined


class Watch(NamedTuple):
    """What an attention does with its weights while it is watched."""

    edits: tuple[Edit, ...] = ()
    tell: tuple[Callable[[Note], None], ...] = ()


class Watched(nn.Module):
    """An attention that can be recorded and edited; every kind of attention is one."""

    watch: Watch | None = None  # on the class, so that an unwatched module carries nothing

    def edited(self, weights: Tensor) -> Tensor:
        """Apply the edits to weights (B, H, T, S)."""
        for change in self.watch.edits if self.watch else ():
            weights = change(weights)
        return weights

    def noted(self, note: Note) -> None:
        """Tell whoever records what this call did."""
        for tell in self.watch.tell if self.watch else ():
            tell(note)


class Notes(Mapping[str, Note]):
    """What was recorded, by module path such as `decoder.3.cross`; for several calls, the last of each."""

    def __init__(self) -> None:
        self._calls: dict[str, list[Note]] = {}

    def __getitem__(self, path: str) -> Note:
        """Find the last call of one attention."""
        return self.calls(path)[-1]

    def __iter__(self) -> Iterator[str]:
        """Go through the paths in the order in which they first ran."""
        return iter(self._calls)

    def __len__(self) -> int:
        """Count the attentions that ran."""
        return len(self._calls)

    def calls(self, path: str) -> list[Note]:
        """List every call of one attention, first to last: while generating there is one a step."""
        if path not in self._calls:
            raise _unknown(path, self._calls, "the notes hold only attentions that ran")
        return self._calls[path]

    def listener(self, path: str) -> Callable[[Note], None]:
        """Make the function that files the notes of one path."""
        return lambda note: self._calls.setdefault(path, []).append(note)


def attentions(model: nn.Module) -> dict[str, Watched]:
    """Find every attention in a model, by path."""
    return {_path(name): module for name, module in model.named_modules() if isinstance(module, Watched)}


@contextmanager
def record(model: nn.Module, paths: Sequence[str] | None = None) -> Iterator[Notes]:
    """Note weights, values and output of every attention (or of those named) while the block runs."""
    notes = Notes()
    found = attentions(model)
    chosen = list(found) if paths is None else list(paths)
    with _watching(found, {path: Watch(tell=(notes.listener(path),)) for path in chosen}):
        yield notes


@contextmanager
def edit(model: nn.Module, changes: Mapping[str, Edit]) -> Iterator[None]:
    """Pass the weights of the named attentions through a function while the block runs."""
    with _watching(attentions(model), {path: Watch(edits=(change,)) for path, change in changes.items()}):
        yield


def heads_off(heads: Sequence[int]) -> Edit:
    """Switch heads off: they look nowhere and add nothing."""

    def change(weights: Tensor) -> Tensor:
        for head in heads:
            if not 0 <= head < weights.size(1):
                raise DragomanError(
                    f"a head must be one of 0 to {weights.size(1) - 1}", found=str(head), fix="count this attention's heads from 0"
                )
        off = torch.zeros(weights.size(1), dtype=torch.bool, device=weights.device)
        off[list(heads)] = True
        return weights.masked_fill(off.view(1, -1, 1, 1), 0.0)

    return change


@contextmanager
def _watching(found: Mapping[str, Watched], watches: Mapping[str, Watch]) -> Iterator[None]:
    """Set watches on top of those that are there, and put the old ones back afterwards."""
    for path in watches:
        if path not in found:
            raise _unknown(path, found, "attentions are named by their module path")
    before = {path: found[path].watch for path in watches}
    try:
        for path, watch in watches.items():
            inner = found[path].watch or Watch()
            found[path].watch = Watch(inner.edits + watch.edits, inner.tell + watch.tell)
        yield
    finally:
        for path, watch_before in before.items():
            if watch_before is None:
                del found[path].watch  # back to the class's None
            else:
                found[path].watch = watch_before


def _path(name: str) -> str:
    """Strip what torch.compile and DistributedDataParallel put before a module's own path."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def _unknown(path: str, known: Mapping[str, object], must: str) -> DragomanError:
    """Answer a wrong path with the nearest right one."""
    return DragomanError(must, found=repr(path), fix=nearest(path, known) if known else "run the model first")
