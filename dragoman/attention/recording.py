"""Looking into attention while a model runs, and changing what it does, without a trace afterwards.

    with record(model) as notes:          notes["decoder.3.cross"].weights      (B, H, T, S)
    with edit(model, {"decoder.3.cross": heads_off([2])}):

What is recorded or edited belongs to the thread of execution that entered the block, and to the calls it makes: it is kept in a
`contextvars.ContextVar`, and nothing is set on the modules. Other threads and tasks run the same model as if nobody recorded.

An attention that nobody watches pays one comparison a call. A watched one takes the plain path, which has weights to show.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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


class _Scope:
    """What one `record` or `edit` block asks of its attentions; empty once the block has ended."""

    def __init__(self, watches: dict[nn.Module, Watch], *, diverts: bool = False) -> None:
        self.watches = watches
        self.diverts = diverts  # whether its listeners hear the notes in place of those of the scopes around it


# Scopes that are open in this context, outermost first. A generator that is closed in another context than it was started in leaves
# its scope here, but empty; so does a task that was started within a block and outlives it.
_scopes: ContextVar[tuple[_Scope, ...]] = ContextVar("dragoman_recording", default=())
_counting = threading.Lock()
_open = 0  # scopes, in all threads
_any_open = False  # a plain global: torch.compile guards on it and recompiles, where reading a ContextVar breaks the graph


class Watched(nn.Module):
    """An attention that can be recorded and edited; every kind of attention is one."""

    @property
    def watch(self) -> Watch | None:
        """What the current thread of execution asks of this attention; None if it neither records nor edits it."""
        return _asked_of(self) if _any_open else None

    def edited(self, weights: Tensor) -> Tensor:
        """Apply the edits to weights (B, H, T, S)."""
        watch = self.watch
        for change in watch.edits if watch else ():
            weights = change(weights)
        return weights

    def noted(self, note: Note) -> None:
        """Tell whoever records what this call did."""
        watch = self.watch
        for tell in watch.tell if watch else ():
            tell(note)


def is_watched(model: nn.Module) -> bool:
    """Whether the current thread of execution records or edits any attention of a model."""
    return _any_open and any(module.watch is not None for module in model.modules() if isinstance(module, Watched))


def is_recording() -> bool:
    """Whether the current thread of execution is within a `record` or `edit` block of any model."""
    return _any_open and bool(_still_open())


def _asked_of(attention: Watched) -> Watch | None:
    """Combine what the open scopes ask of one attention."""
    edits, tell = list[Edit](), list[Callable[[Note], None]]()
    for scope in _scopes.get():
        watch = scope.watches.get(attention)
        if watch is not None:
            edits += watch.edits
            tell = [*watch.tell] if scope.diverts else [*tell, *watch.tell]
    return Watch(tuple(edits), tuple(tell)) if edits or tell else None


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
def one_note(attention: Watched) -> Iterator[None]:
    """Join the notes of all calls of an attention within the block into one, along its positions."""
    if attention.watch is None:
        yield
        return
    notes: list[Note] = []
    with _opened(_Scope({attention: Watch(tell=(notes.append,))}, diverts=True)):
        yield
    if notes:
        weights, output = (torch.cat([getattr(note, name) for note in notes], dim=2) for name in ("weights", "output"))
        attention.noted(Note(weights, notes[0].values, output))


@contextmanager
def _watching(found: Mapping[str, Watched], watches: Mapping[str, Watch]) -> Iterator[None]:
    """Watch attentions by their paths, in addition to what is watched already."""
    for path in watches:
        if path not in found:
            raise _unknown(path, found, "attentions are named by their module path")
    with _opened(_Scope({found[path]: watch for path, watch in watches.items()})):
        yield


@contextmanager
def _opened(scope: _Scope) -> Iterator[None]:
    """Open a scope in the current context, and close it wherever the block ends."""
    _count(1)
    try:
        _scopes.set((*_still_open(), scope))
        yield
    finally:
        scope.watches = {}  # closes it in every context that has a copy: blocks of interleaved generators end in any order
        _scopes.set(_still_open())
        _count(-1)


def _still_open() -> tuple[_Scope, ...]:
    """List the scopes of this context whose blocks have not ended."""
    return tuple(scope for scope in _scopes.get() if scope.watches)


def _count(more: int) -> None:
    """Count the open scopes of all threads."""
    global _open, _any_open
    with _counting:
        _open += more
        _any_open = _open > 0


def _path(name: str) -> str:
    """Strip what torch.compile and DistributedDataParallel put before a module's own path."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def _unknown(path: str, known: Mapping[str, object], must: str) -> DragomanError:
    """Answer a wrong path with the nearest right one."""
    return DragomanError(must, found=repr(path), fix=nearest(path, known) if known else "run the model first")
