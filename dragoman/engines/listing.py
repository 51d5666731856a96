"""What could run a bundle: the engines that it holds, how they compared when they were made, and what was measured of them here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dragoman.bundle import Bundle
from dragoman.decoding.stepping import Strategy
from dragoman.engines.folder import FOLDER, engine_names, model_digest
from dragoman.engines.measuring import recall
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
    """List the native engine and those that a bundle holds, with what this machine remembers of their speed in a search."""
    choice = recall(bundle, strategy)
    rates = choice.rates if choice else {}
    quickest = choice.name if choice else ""
    native = max((rate for name, rate in rates.items() if _engine(name) == NATIVE), default=None)
    held = [Held(name=NATIVE, program="dragoman", type="float32", rate=native, chosen=_engine(quickest) == NATIVE)]
    for name in engine_names(bundle.path):
        rate = next((rate for each, rate in rates.items() if _engine(each) == name), None)
        held.append(_held(bundle, name, rate, chosen=_engine(quickest) == name))
    return held


def _engine(described: str) -> str:
    """Take the threads off an engine's name."""
    return described.partition(" ")[0]


def _held(bundle: Bundle, name: str, rate: float | None, *, chosen: bool) -> Held:
    """Read one engine's manifest."""
    try:
        facts = manifest.read_manifest(bundle.path / FOLDER / name)
        size = sum(int(record["bytes"]) for record in facts["files"].values())
    except (DragomanError, OSError, KeyError, TypeError, ValueError):
        return Held(name=name, trouble="damaged: export it again")
    parity = facts.get("parity")
    return Held(
        name=name,
        program=str(facts.get("engine", "")),
        type=str(facts.get("quantisation", "")),
        bytes=size,
        parity=parity if isinstance(parity, dict) else None,
        trouble="" if facts.get("model_sha256") == model_digest(bundle) else "stale: export it again",
        rate=rate,
        chosen=chosen,
    )
