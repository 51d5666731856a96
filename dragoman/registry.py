"""Names that become objects: registries whose entries are data, so that listing them imports nothing heavy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.errors import ConfigError, suggest_name, suggest_names

MAX_LISTED_NAMES = 20  # members that a message may list


@dataclass(frozen=True, slots=True)
class Entry:
    """One named member: where its code lives, one line about it, and the promises it cannot keep."""

    target: str  # "package.module:Name"
    summary: str
    exempt: Mapping[str, str] | None = None  # contract -> why this member's definition breaks it
    family: str = ""  # what it is listed under, where a kind has families
    options: str = ""  # "package.module:Name" of what lists a block's options, so that they are checked without importing the block
    traits: tuple[
        str, ...
    ] = ()  # what decides with what it can be combined; a test compares them with the code


class Registry(Mapping[str, Entry]):
    """The members of one kind, by name."""

    def __init__(self, kind: str, /, **entries: Entry) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Entry:
        """Find an entry, or say which name was meant."""
        if name not in self._entries:
            hint = (
                suggest_name(name, self._entries)
                if len(self) <= MAX_LISTED_NAMES
                else f"{suggest_names(name, self._entries)} See `dragoman {self.kind}s`"
            )
            raise ConfigError([f"there is no {self.kind} named {name!r}; {hint}"])
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """Go through the names in the order they were written."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Count the members."""
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Say whether the name is a member."""
        return name in self._entries

    def add(self, name: str, entry: Entry) -> None:
        """Register one more member, as a person's own code does."""
        if name in self._entries:
            raise ConfigError(
                [
                    f"{self.kind} {name!r} must be new; found it registered as {self._entries[name].target}"
                ]
            )
        self._entries[name] = entry

    def load(self, name: str) -> Any:
        """Import the object behind a name."""
        return _import_target(self[name].target)

    def options(self, name: str) -> Any:
        """Import what lists the options of a member, or None where it has no such list."""
        return _import_target(self[name].options) if self[name].options else None


# Where each kind is listed. Strings, so that the configuration can ask for the names without importing
# the folder that owns them.
_CATALOGUES = {
    "score": "dragoman.attention.catalogue:SCORES",
    "alignment": "dragoman.attention.catalogue:ALIGNMENTS",
    "positions": "dragoman.attention.catalogue:POSITIONS",
    "norm": "dragoman.layers.catalogue:NORMS",
    "residual": "dragoman.layers.catalogue:RESIDUALS",
    "activation": "dragoman.layers.catalogue:ACTIVATIONS",
    "block": "dragoman.models.catalogue:BLOCKS",
    "optimizer": "dragoman.training.catalogue:OPTIMIZERS",
    "schedule": "dragoman.training.catalogue:SCHEDULES",
    "recipe": "dragoman.recipes.catalogue:RECIPES",
}


def catalogue(kind: str) -> Registry:
    """Find the registry of a kind: `catalogue("norm")`."""
    registry = _import_target(_CATALOGUES[kind])
    assert isinstance(registry, Registry), f"{_CATALOGUES[kind]} must be a Registry"
    return registry


def _import_target(target: str) -> Any:
    """Import what "package.module:Name" stands for."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
