"""What could run a bundle: the engines that it holds, how they compared when they were made, and what was measured of them here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dragoman.bundle import Bundle
from dragoman.decoding.search import SearchStrategy
from dragoman.errors import DragomanError
from dragoman.inference.cpu.conversion import FLOAT32, INT8
from dragoman.inference.engine_benchmark import load_measurement
from dragoman.inference.engine_directory import ENGINES_DIRECTORY, list_engine_names, model_digest
from dragoman.inference.engine_trust import is_trusted
from dragoman.storage import manifest

NATIVE = "native"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """One engine; what is not known of it is None."""

    name: str
    program: str = ""
    type: str = ""  # of its numbers
    bytes: int | None = None
    parity: dict[str, Any] | None = None  # as its export measured it
    trouble: str = ""  # why it cannot be used, as far as its manifest tells; `verify` and `doctor` look further
    rate: float | None = None  # sentences a second, measured on this machine
    chosen: bool = False  # whether `translate` takes it here

    def to_dict(self) -> dict[str, Any]:
        """Give plain values."""
        return asdict(self)


def list_engines(bundle: Bundle, strategy: SearchStrategy) -> list[EngineInfo]:
    """List the native engine and those that a bundle holds, with what this machine remembers of their speed in a search.

    Only manifests are read; no engine is opened.
    """
    choices = {
        precision: load_measurement(bundle, strategy, precision=precision)
        for precision in (FLOAT32, INT8)
    }
    rates = {
        name: rate for choice in choices.values() if choice for name, rate in choice.rates.items()
    }
    default = choices[FLOAT32]  # what is used unless another precision is asked for
    fastest = default.name if default else ""
    native = max(
        (rate for name, rate in rates.items() if _engine_name(name) == NATIVE), default=None
    )
    held = [
        EngineInfo(
            name=NATIVE,
            program="dragoman",
            type=FLOAT32,
            rate=native,
            chosen=_engine_name(fastest) == NATIVE,
        )
    ]
    for name in list_engine_names(bundle.path):
        rate = next((rate for each, rate in rates.items() if _engine_name(each) == name), None)
        held.append(_read_engine_info(bundle, name, rate, chosen=_engine_name(fastest) == name))
    return held


def _engine_name(described: str) -> str:
    """Take the threads off an engine's name."""
    return described.partition(" ")[0]


def _read_engine_info(bundle: Bundle, name: str, rate: float | None, *, chosen: bool) -> EngineInfo:
    """Read one engine's manifest, which anybody may have written."""
    try:
        facts = manifest.read_manifest(bundle.path / ENGINES_DIRECTORY / name)
        size = sum(int(record["bytes"]) for record in facts["files"].values())
    except (DragomanError, OSError, KeyError, TypeError, ValueError):
        return EngineInfo(name=name, trouble="damaged: export it again")
    trouble = ""
    if facts.get("model_sha256") != model_digest(bundle):
        trouble = "stale: export it again"
    elif not is_trusted(manifest.manifest_digest(facts)):
        trouble = "not made here: opened only if --engine names it"
    program, _, kind = name.partition("-")
    return EngineInfo(
        name=name,
        program=program,
        type=kind,
        bytes=size,
        parity=_read_parity(facts),
        trouble=trouble,
        rate=rate,
        chosen=chosen,
    )


def _read_parity(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read how an export compared, if it says so in numbers."""
    found = facts.get("parity")
    if not isinstance(found, dict) or not {"sentences", "equal"} <= found.keys():
        return None
    known = {
        name: found[name]
        for name in ("sentences", "equal", "difference", "bleu_native", "bleu")
        if name in found
    }
    numbers = all(type(value) in (int, float) and abs(value) < 1e15 for value in known.values())
    return known if numbers and ("bleu" in known) == ("bleu_native" in known) else None
