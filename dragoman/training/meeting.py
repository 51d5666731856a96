"""A name for this meeting of the ranks.

A launcher that starts everybody again keeps its store, with the addresses and answers of the dead ones in it (measured with
`torchrun --max-restarts`: the new ranks called the old ports). Its count of restarts need not agree between machines. So the ranks
agree on a name that no earlier meeting can have had, and write below it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time

from dragoman.training.heartbeat import KeyStore

POLL_SECONDS = 0.05


def agree(store: KeyStore, *, rank: int, size: int, timeout: float) -> str:
    """Wait until all ranks are there and give the meeting's name; raises RuntimeError when some do not come."""
    token = secrets.token_hex(8)
    store.set(f"hello/{rank}", token)
    patience = time.monotonic() + timeout
    while time.monotonic() < patience:
        name = _invite(store, size) if rank == 0 else _accept(store, rank, token)
        if name and store.check([f"begin/{name}"]):
            return name
        time.sleep(POLL_SECONDS)
    missing = [other for other in range(size) if not store.check([f"hello/{other}"])]
    raise RuntimeError(f"not all of {size} ranks came within {timeout:.0f} s; never heard of: {missing or 'none, but not all are new'}")


def _invite(store: KeyStore, size: int) -> str:
    """Name the meeting of those who said hello last; it begins once each of them has found its own word in the list."""
    hellos = [f"hello/{rank}" for rank in range(size)]
    if not store.check(hellos):
        return ""
    tokens = [store.get(key).decode() for key in hellos]
    name = _name(tokens)
    store.set("invited", json.dumps(tokens))
    if store.check([f"here/{name}/{rank}" for rank in range(1, size)]):
        store.set(f"begin/{name}", "")
    return name


def _accept(store: KeyStore, rank: int, token: str) -> str:
    """Say that we are here where the list has our own word, and not that of a process that stood in our place before."""
    tokens = json.loads(store.get("invited")) if store.check(["invited"]) else []
    if len(tokens) <= rank or tokens[rank] != token:
        return ""
    name = _name(tokens)
    store.set(f"here/{name}/{rank}", "")
    return name


def _name(tokens: list[str]) -> str:
    return hashlib.sha256("/".join(tokens).encode()).hexdigest()[:16]
