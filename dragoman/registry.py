"""Registries: names in configurations mapped to classes, without importing torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.errors import ConfigError, suggest_any, suggest_name, suggest_names

_WORD = re.compile(r"[^\W_]+")
MAX_LISTED_NAMES = 20  # names that a message may list


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered name: its import path, a one-line description and its exemptions."""

    target: str  # "package.module:Name"
    summary: str
    exempt: Mapping[str, str] | None = None  # contract -> why this entry is exempt from it
    family: str = ""  # heading that it is listed under, for kinds with families
    task: str = "translate"  # of a recipe: the task of its model
    # "package.module:Name" of the options class, so that options are validated without torch.
    options: str = ""
    # Properties that decide what it can be combined with; a test compares them with the code.
    traits: tuple[str, ...] = ()


class Registry(Mapping[str, Entry]):
    """Registered names of one kind, such as "norm"."""

    def __init__(self, kind: str, /, **entries: Entry) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Entry:
        """Return an entry; raise ConfigError with the nearest name if there is none."""
        if name not in self._entries:
            hint = (
                suggest_name(name, self._entries)
                if len(self) <= MAX_LISTED_NAMES
                else f"{near} See `dragoman {self.kind}s`"
                if (near := self._suggest_summary(name) or suggest_names(name, self._entries))
                else f"see `dragoman {self.kind}s`"
            )
            raise ConfigError([f"there is no {self.kind} named {name!r}; {hint}"])
        return self._entries[name]

    def _suggest_summary(self, words: str) -> str:
        """Return a suggestion of up to three entries with all words in name or summary."""
        wanted = set(_WORD.findall(words.lower()))
        near = [
            name
            for name, each in self._entries.items()
            if wanted and wanted <= set(_WORD.findall(f"{name} {each.summary}".lower()))
        ][:3]
        return suggest_any(near)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in order of registration."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Whether the name is registered."""
        return name in self._entries

    def add(self, name: str, entry: Entry) -> None:
        """Register a new entry, such as one of a user's own code."""
        if name in self._entries:
            raise ConfigError(
                [
                    f"{self.kind} {name!r} must be new; found it registered as "
                    f"{self._entries[name].target}"
                ]
            )
        self._entries[name] = entry

    def load(self, name: str) -> Any:
        """Import and return the object of a name."""
        return import_object(self[name].target)

    def options(self, name: str) -> Any:
        """Import and return the options class of an entry, or None."""
        return import_object(self[name].options) if self[name].options else None


# The registry of each kind, as strings: the configuration reads names without importing the folder
# that owns them.
_CATALOGUES = {
    "score": "dragoman.attention.catalogue:SCORES",
    "alignment": "dragoman.attention.catalogue:ALIGNMENTS",
    "positions": "dragoman.attention.catalogue:POSITIONS",
    "norm": "dragoman.layers.norm_and_activation_catalogue:NORMS",
    "residual": "dragoman.layers.norm_and_activation_catalogue:RESIDUALS",
    "activation": "dragoman.layers.norm_and_activation_catalogue:ACTIVATIONS",
    "block": "dragoman.models.block_catalogue:BLOCKS",
    "optimizer": "dragoman.training.optimizer_and_schedule_catalogue:OPTIMIZERS",
    "schedule": "dragoman.training.optimizer_and_schedule_catalogue:SCHEDULES",
    "recipe": "dragoman.recipes.catalogue:RECIPES",
    "predictor": "dragoman.inference.predictors.catalogue:PREDICTORS",
    "task": "dragoman.tasks.non_translation_catalogue:TASKS",
}


def catalogue(kind: str) -> Registry:
    """Return the registry of a kind: `catalogue("norm")`."""
    registry = import_object(_CATALOGUES[kind])
    assert isinstance(registry, Registry), f"{_CATALOGUES[kind]} must be a Registry"
    return registry


def import_object(target: str) -> Any:
    """Import and return the object of "package.module:Name"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
