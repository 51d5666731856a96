"""What could run a bundle: the engines that it holds, how they compared when they were made, and what was measured of them here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dragoman.bundle import Bundle
from dragoman.decoding.stepping import Strategy
from dragoman.engines.cpu.freezing import FLOAT32, INT8
from dragoman.engines.folder import FOLDER, engine_names, model_digest
from dragoman.engines.measuring import recall
from dragoman.engines.trust import is_trusted
from dragoman.errors import DragomanError
from dragoman.files import manifest

NATIVE = "native"


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One engine; what is not known of it is None."""

    name: str
    program: str = ""
    type: str = ""  # of its numbers
    bytes: int | None = None
    parity: dict[str, Any] | None = None  # as its export measured it
    trouble: str = ""  # why it cannot be used, as far as its manifest tells; `verify` and `doctor` look further
    rate: float | None = None  # sentences a second, measured on this machine
    chosen: bool = False  # whether `translate` takes it here

    def facts(self) -> dict[str, Any]:
        """Give plain values."""
        return asdict(self)


def list_engines(bundle: Bundle, strategy: Strategy) -> list[Held]:
    """List the native engine and those that a bundle holds, with what this machine remembers of their speed in a search.

    Only manifests are read; no engine is opened.
    """
    choices = {precision: recall(bundle, strategy, precision=precision) for precision in (FLOAT32, INT8)}
    rates = {name: rate for choice in choices.values() if choice for name, rate in choice.rates.items()}
    default = choices[FLOAT32]  # what is used unless another precision is asked for
    quickest = default.name if default else ""
    native = max((rate for name, rate in rates.items() if _engine(name) == NATIVE), default=None)
    held = [Held(name=NATIVE, program="dragoman", type=FLOAT32, rate=native, chosen=_engine(quickest) == NATIVE)]
    for name in engine_names(bundle.path):
        rate = next((rate for each, rate in rates.items() if _engine(each) == name), None)
        held.append(_held(bundle, name, rate, chosen=_engine(quickest) == name))
    return held


def _engine(described: str) -> str:
    """Take the threads off an engine's name."""
    return described.partition(" ")[0]


def _held(bundle: Bundle, name: str, rate: float | None, *, chosen: bool) -> Held:
    """Read one engine's manifest, which anybody may have written."""
    try:
        facts = manifest.read_manifest(bundle.path / FOLDER / name)
        size = sum(int(record["bytes"]) for record in facts["files"].values())
    except (DragomanError, OSError, KeyError, TypeError, ValueError):
        return Held(name=name, trouble="damaged: export it again")
    trouble = ""
    if facts.get("model_sha256") != model_digest(bundle):
        trouble = "stale: export it again"
    elif not is_trusted(manifest.manifest_digest(facts)):
        trouble = "not made here: opened only if --engine names it"
    program, _, kind = name.partition("-")
    return Held(name=name, program=program, type=kind, bytes=size, parity=_parity(facts), trouble=trouble, rate=rate, chosen=chosen)


def _parity(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read how an export compared, if it says so in numbers."""
    found = facts.get("parity")
    if not isinstance(found, dict) or not {"sentences", "equal"} <= found.keys():
        return None
    known = {name: found[name] for name in ("sentences", "equal", "difference", "bleu_native", "bleu") if name in found}
    numbers = all(type(value) in (int, float) and abs(value) < 1e15 for value in known.values())
    return known if numbers and ("bleu" in known) == ("bleu_native" in known) else None
