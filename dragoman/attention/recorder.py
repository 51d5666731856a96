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

from dragoman.errors import DragomanError, suggest_name

WeightsEdit = Callable[[Tensor], Tensor]  # weights (B, H, T, S) to weights of the same shape


class AttentionRecord(NamedTuple):
    """One call of one attention: `weights @ values` is `output`."""

    weights: Tensor  # (B, H, T, S), as used: after edits and dropout
    values: Tensor  # (B, H, S, Dh)
    output: Tensor  # (B, H, T, Dh), before the heads are joined


class AttentionHooks(NamedTuple):
    """What an attention does with its weights while it is watched."""

    edits: tuple[WeightsEdit, ...] = ()
    on_record: tuple[Callable[[AttentionRecord], None], ...] = ()


class _HookScope:
    """What one `record` or `edit` block asks of its attentions; empty once the block has ended."""

    def __init__(
        self, hooks_by_module: dict[nn.Module, AttentionHooks], *, replaces_outer: bool = False
    ) -> None:
        self.hooks_by_module = hooks_by_module
        self.replaces_outer = replaces_outer  # whether its listeners hear the notes in place of those of the scopes around it


# Scopes that are open in this context, outermost first. A generator that is closed in another context than it was started in leaves
# its scope here, but empty; so does a task that was started within a block and outlives it.
_scopes: ContextVar[tuple[_HookScope, ...]] = ContextVar("dragoman_recording", default=())
_open_lock = threading.Lock()
_open_count = 0  # scopes, in all threads
_any_open = False  # a plain global: torch.compile guards on it and recompiles, where reading a ContextVar breaks the graph


class RecordableAttention(nn.Module):
    """An attention that can be recorded and edited; every kind of attention is one."""

    @property
    def hooks(self) -> AttentionHooks | None:
        """What the current thread of execution asks of this attention; None if it neither records nor edits it."""
        return _collect_hooks(self) if _any_open else None

    def apply_edits(self, weights: Tensor) -> Tensor:
        """Apply the edits to weights (B, H, T, S)."""
        hooks = self.hooks
        for change in hooks.edits if hooks else ():
            weights = change(weights)
        return weights

    def emit_record(self, note: AttentionRecord) -> None:
        """Tell whoever records what this call did."""
        hooks = self.hooks
        for on_record in hooks.on_record if hooks else ():
            on_record(note)


def has_hooks(model: nn.Module) -> bool:
    """Whether the current thread of execution records or edits any attention of a model."""
    return _any_open and any(
        module.hooks is not None
        for module in model.modules()
        if isinstance(module, RecordableAttention)
    )


def is_recording() -> bool:
    """Whether the current thread of execution is within a `record` or `edit` block of any model."""
    return _any_open and bool(_active_scopes())


def _collect_hooks(attention: RecordableAttention) -> AttentionHooks | None:
    """Combine what the open scopes ask of one attention."""
    edits, on_record = list[WeightsEdit](), list[Callable[[AttentionRecord], None]]()
    for scope in _scopes.get():
        hooks = scope.hooks_by_module.get(attention)
        if hooks is not None:
            edits += hooks.edits
            on_record = (
                [*hooks.on_record] if scope.replaces_outer else [*on_record, *hooks.on_record]
            )
    return AttentionHooks(tuple(edits), tuple(on_record)) if edits or on_record else None


class AttentionRecords(Mapping[str, AttentionRecord]):
    """What was recorded, by module path such as `decoder.3.cross`; for several calls, the last of each."""

    def __init__(self) -> None:
        self._calls: dict[str, list[AttentionRecord]] = {}

    def __getitem__(self, path: str) -> AttentionRecord:
        """Find the last call of one attention."""
        return self.calls(path)[-1]

    def __iter__(self) -> Iterator[str]:
        """Go through the paths in the order in which they first ran."""
        return iter(self._calls)

    def __len__(self) -> int:
        """Count the attentions that ran."""
        return len(self._calls)

    def calls(self, path: str) -> list[AttentionRecord]:
        """List every call of one attention, first to last: while generating there is one a step."""
        if path not in self._calls:
            raise _unknown_path_error(path, self._calls, "the notes hold only attentions that ran")
        return self._calls[path]

    def make_listener(self, path: str) -> Callable[[AttentionRecord], None]:
        """Make the function that files the notes of one path."""
        return lambda note: self._calls.setdefault(path, []).append(note)


def find_attentions(model: nn.Module) -> dict[str, RecordableAttention]:
    """Find every attention in a model, by path."""
    return {
        _module_path(name): module
        for name, module in model.named_modules()
        if isinstance(module, RecordableAttention)
    }


@contextmanager
def record(model: nn.Module, paths: Sequence[str] | None = None) -> Iterator[AttentionRecords]:
    """Note weights, values and output of every attention (or of those named) while the block runs."""
    notes = AttentionRecords()
    found = find_attentions(model)
    chosen = list(found) if paths is None else list(paths)
    with _install_hooks(
        found, {path: AttentionHooks(on_record=(notes.make_listener(path),)) for path in chosen}
    ):
        yield notes


@contextmanager
def edit(model: nn.Module, changes: Mapping[str, WeightsEdit]) -> Iterator[None]:
    """Pass the weights of the named attentions through a function while the block runs."""
    with _install_hooks(
        find_attentions(model),
        {path: AttentionHooks(edits=(change,)) for path, change in changes.items()},
    ):
        yield


def heads_off(heads: Sequence[int]) -> WeightsEdit:
    """Switch heads off: they look nowhere and add nothing."""

    def change(weights: Tensor) -> Tensor:
        for head in heads:
            if not 0 <= head < weights.size(1):
                raise DragomanError(
                    f"a head must be one of 0 to {weights.size(1) - 1}",
                    found=str(head),
                    fix="count this attention's heads from 0",
                )
        off = torch.zeros(weights.size(1), dtype=torch.bool, device=weights.device)
        off[list(heads)] = True
        return weights.masked_fill(off.view(1, -1, 1, 1), 0.0)

    return change


@contextmanager
def merge_records(attention: RecordableAttention) -> Iterator[None]:
    """Join the notes of all calls of an attention within the block into one, along its positions."""
    if attention.hooks is None:
        yield
        return
    notes: list[AttentionRecord] = []
    with _open_scope(
        _HookScope({attention: AttentionHooks(on_record=(notes.append,))}, replaces_outer=True)
    ):
        yield
    if notes:
        weights, output = (
            torch.cat([getattr(note, name) for note in notes], dim=2)
            for name in ("weights", "output")
        )
        attention.emit_record(AttentionRecord(weights, notes[0].values, output))


@contextmanager
def _install_hooks(
    found: Mapping[str, RecordableAttention], hooks_by_module: Mapping[str, AttentionHooks]
) -> Iterator[None]:
    """Watch attentions by their paths, in addition to what is watched already."""
    for path in hooks_by_module:
        if path not in found:
            raise _unknown_path_error(path, found, "attentions are named by their module path")
    with _open_scope(_HookScope({found[path]: hooks for path, hooks in hooks_by_module.items()})):
        yield


@contextmanager
def _open_scope(scope: _HookScope) -> Iterator[None]:
    """Open a scope in the current context, and close it wherever the block ends."""
    _count_open(1)
    try:
        _scopes.set((*_active_scopes(), scope))
        yield
    finally:
        scope.hooks_by_module = {}  # closes it in every context that has a copy: blocks of interleaved generators end in any order
        _scopes.set(_active_scopes())
        _count_open(-1)


def _active_scopes() -> tuple[_HookScope, ...]:
    """List the scopes of this context whose blocks have not ended."""
    return tuple(scope for scope in _scopes.get() if scope.hooks_by_module)


def _count_open(more: int) -> None:
    """Count the open scopes of all threads."""
    global _open_count, _any_open
    with _open_lock:
        _open_count += more
        _any_open = _open_count > 0


def _module_path(name: str) -> str:
    """Strip what torch.compile and DistributedDataParallel put before a module's own path."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def _unknown_path_error(path: str, known: Mapping[str, object], must: str) -> DragomanError:
    """Answer a wrong path with the nearest right one."""
    return DragomanError(
        must, found=repr(path), fix=suggest_name(path, known) if known else "run the model first"
    )
