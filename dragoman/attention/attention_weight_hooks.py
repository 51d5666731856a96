"""Record and edit the attention weights of a model while it runs.

    with record(model) as records:        records["decoder.3.cross"].weights    (B, H, T, S)
    with edit(model, {"decoder.3.cross": heads_off([2])}):

Hooks belong to the thread or task that entered the block and to the calls it makes: they are kept
in a `contextvars.ContextVar`, and nothing is set on the modules. Other threads and tasks run the
same model without hooks.

Without hooks an attention pays one comparison per call. With hooks it computes explicit weights
instead of calling a fused kernel.
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
    """The record of one call of one attention; `output` is `weights @ values`."""

    weights: Tensor  # (B, H, T, S), as used: after edits and dropout
    values: Tensor  # (B, H, S, Dh)
    output: Tensor  # (B, H, T, Dh), before the heads are concatenated
    scores: Tensor | None = None  # (B, H, T, S) before the alignment; of a `Mechanism`


class AttentionHooks(NamedTuple):
    """The edits and listeners of one attention."""

    edits: tuple[WeightsEdit, ...] = ()
    on_record: tuple[Callable[[AttentionRecord], None], ...] = ()


class _HookScope:
    """The hooks of one `record` or `edit` block; empty once the block has ended."""

    def __init__(
        self, hooks_by_module: dict[nn.Module, AttentionHooks], *, replaces_outer: bool = False
    ) -> None:
        self.hooks_by_module = hooks_by_module
        self.replaces_outer = replaces_outer  # whether outer scopes' listeners get no records


# Scopes that are open in this context, outermost first. A generator that is closed in another
# context than it was started in leaves its scope here, but empty; so does a task that was started
# within a block and outlives it.
_scopes: ContextVar[tuple[_HookScope, ...]] = ContextVar("dragoman_recording", default=())
_open_lock = threading.Lock()
_open_count = 0  # scopes, in all threads
# A plain global: torch.compile guards on it and recompiles, while reading a ContextVar would break
# the graph of every unrecorded model.
any_scope_open = False


class RecordableAttention(nn.Module):
    """Base of all attention modules: their weights can be recorded and edited."""

    @property
    def hooks(self) -> AttentionHooks | None:
        """The hooks of the current thread or task on this attention, or None."""
        return _collect_hooks(self) if any_scope_open else None

    def apply_edits(self, weights: Tensor) -> Tensor:
        """Return the weights (B, H, T, S) after all edits."""
        hooks = self.hooks
        for apply_edit in hooks.edits if hooks else ():
            weights = apply_edit(weights)
        return weights

    def emit_record(self, record: AttentionRecord) -> None:
        """Pass the record of a call to all listeners."""
        hooks = self.hooks
        for on_record in hooks.on_record if hooks else ():
            on_record(record)


def has_hooks(model: nn.Module) -> bool:
    """Whether the current thread or task records or edits any attention of a model."""
    return any_scope_open and any(
        module.hooks is not None
        for module in model.modules()
        if isinstance(module, RecordableAttention)
    )


def is_recording() -> bool:
    """Whether the current thread or task is within a `record` or `edit` block of any model."""
    return any_scope_open and bool(_active_scopes())


def _collect_hooks(attention: RecordableAttention) -> AttentionHooks | None:
    """Return the combined hooks of the open scopes on one attention, or None."""
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
    """The last record of each attention, by module path such as `decoder.3.cross`."""

    def __init__(self) -> None:
        self._calls: dict[str, list[AttentionRecord]] = {}

    def __getitem__(self, path: str) -> AttentionRecord:
        """Return the record of an attention's last call."""
        return self.calls(path)[-1]

    def __contains__(self, path: object) -> bool:
        """Whether an attention ran."""
        return path in self._calls

    def __iter__(self) -> Iterator[str]:
        """Iterate over the paths in the order in which they first ran."""
        return iter(self._calls)

    def __len__(self) -> int:
        """Return the number of attentions that ran."""
        return len(self._calls)

    def calls(self, path: str) -> list[AttentionRecord]:
        """Return the records of every call of an attention; in decoding there is one per step."""
        if path not in self._calls:
            raise _unknown_path_error(path, self._calls, "only attentions that ran have records")
        return self._calls[path]

    def make_listener(self, path: str) -> Callable[[AttentionRecord], None]:
        """Return a function that appends records of one path."""
        return lambda record: self._calls.setdefault(path, []).append(record)


def find_attentions(model: nn.Module) -> dict[str, RecordableAttention]:
    """Return every attention of a model by its path."""
    return {
        _module_path(name): module
        for name, module in model.named_modules()
        if isinstance(module, RecordableAttention)
    }


@contextmanager
def record(model: nn.Module, paths: Sequence[str] | None = None) -> Iterator[AttentionRecords]:
    """Record weights, values and output of all attentions, or of `paths`, within the block."""
    records = AttentionRecords()
    found = find_attentions(model)
    chosen = list(found) if paths is None else list(paths)
    with _install_hooks(
        found, {path: AttentionHooks(on_record=(records.make_listener(path),)) for path in chosen}
    ):
        yield records


@contextmanager
def edit(model: nn.Module, changes: Mapping[str, WeightsEdit]) -> Iterator[None]:
    """Apply functions to the weights of the named attentions within the block."""
    with _install_hooks(
        find_attentions(model),
        {path: AttentionHooks(edits=(change,)) for path, change in changes.items()},
    ):
        yield


def heads_off(heads: Sequence[int]) -> WeightsEdit:
    """Return an edit that sets the weights of some heads to zero.

    Explanations switch heads off by their outputs instead: `explain/head_ablation.py`.
    """

    def apply_edit(weights: Tensor) -> Tensor:
        for head in heads:
            if not 0 <= head < weights.size(1):
                raise DragomanError(
                    f"a head must be from 0 to {weights.size(1) - 1}",
                    found=str(head),
                    fix="heads are counted from 0",
                )
        off = torch.zeros(weights.size(1), dtype=torch.bool, device=weights.device)
        off[list(heads)] = True
        return weights.masked_fill(off.view(1, -1, 1, 1), 0.0)

    return apply_edit


@contextmanager
def merge_records(attention: RecordableAttention) -> Iterator[None]:
    """Concatenate the records of all calls of an attention within the block, along positions."""
    if attention.hooks is None:
        yield
        return
    records: list[AttentionRecord] = []
    with _open_scope(
        _HookScope({attention: AttentionHooks(on_record=(records.append,))}, replaces_outer=True)
    ):
        yield
    if records:
        weights, output = (
            torch.cat([getattr(record, name) for record in records], dim=2)
            for name in ("weights", "output")
        )
        scores = [record.scores for record in records if record.scores is not None]
        attention.emit_record(
            AttentionRecord(
                weights,
                records[0].values,
                output,
                torch.cat(scores, dim=2) if len(scores) == len(records) else None,
            )
        )


@contextmanager
def _install_hooks(
    found: Mapping[str, RecordableAttention], hooks_by_module: Mapping[str, AttentionHooks]
) -> Iterator[None]:
    """Open a scope with hooks on attentions by their paths."""
    for path in hooks_by_module:
        if path not in found:
            raise _unknown_path_error(path, found, "an attention is named by its module path")
    with _open_scope(_HookScope({found[path]: hooks for path, hooks in hooks_by_module.items()})):
        yield


@contextmanager
def _open_scope(scope: _HookScope) -> Iterator[None]:
    """Open a scope in the current context, and close it at the end of the block."""
    _count_open(1)
    try:
        _scopes.set((*_active_scopes(), scope))
        yield
    finally:
        # Closes it in every context that has a copy: interleaved generators end in any order.
        scope.hooks_by_module = {}
        _scopes.set(_active_scopes())
        _count_open(-1)


def _active_scopes() -> tuple[_HookScope, ...]:
    """Return the scopes of this context whose blocks have not ended."""
    return tuple(scope for scope in _scopes.get() if scope.hooks_by_module)


def _count_open(change: int) -> None:
    """Update the number of open scopes of all threads."""
    global _open_count, any_scope_open
    with _open_lock:
        _open_count += change
        any_scope_open = _open_count > 0


def _module_path(name: str) -> str:
    """Return a module's path without the prefixes of torch.compile and DistributedDataParallel."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def _unknown_path_error(path: str, known: Mapping[str, object], must: str) -> DragomanError:
    """Return an error that suggests the nearest known path."""
    return DragomanError(
        must, found=repr(path), fix=suggest_name(path, known) if known else "run the model first"
    )
