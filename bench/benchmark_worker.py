"""Worker process of one system in decode_cpu.py: load, tune the batch size, translate."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.core_layouts import CoreLayout, OneProcess, OwnThreading, ProcessPerCore
from bench.workload import SHAPES, VOCABULARIES, TranslateBatch, batch_by_length, layers, sentences

BATCHES = (16, 32, 64, 128)  # batch sizes tried, in hypotheses
TRIALS = 3  # of each batch size; the best counts
SHORT_SECONDS = 1.0  # a longer trial is not repeated
TRIAL_ROWS = 32  # batch size for choosing a core layout
PACKAGES = {
    "exported": "ctranslate2",
    "torch.nn.Transformer": "torch",
    "native": "dragoman",
    "JoeyNMT": "joeynmt",
}  # others are named like their package


def core_layouts(
    name: str, size: str, beam: int, cores: int, folder: Path
) -> list[Callable[[], CoreLayout]]:
    """Return the ways in which a system can use the cores, as functions that load it."""
    from bench import local_systems

    program, precision, *split = name.split()
    given = size, precision, beam, cores
    if program == "native":
        return [lambda: OwnThreading(local_systems.native(*given), f"{cores} x 1")]
    if program == "exported":
        return [lambda: OwnThreading(local_systems.exported_engine(*given, folder), f"{cores} x 1")]
    if program == "ctranslate2":
        workers = split == ["workers"]
        label = f"{cores} x 1" if workers else f"1 x {cores}"
        return [
            lambda: OwnThreading(
                local_systems.ctranslate2_direct(*given, folder, workers=workers), label
            )
        ]
    load = peer_loader(program, size, precision, beam, folder)
    threads: Callable[[], CoreLayout] = functools.partial(OneProcess, load, cores)
    processes: Callable[[], CoreLayout] = functools.partial(ProcessPerCore, load, cores)
    # processes first: they must be forked before torch is imported
    return [threads] if cores == 1 else [processes, threads]


def peer_loader(
    program: str, size: str, precision: str, beam: int, folder: Path
) -> Callable[[], TranslateBatch]:
    """Return the function that loads a peer, which translates one batch per call."""
    from bench import local_systems
    from bench.toolkit_configs import SPECIALS
    from bench.toolkit_translators import TOOLKIT_TRANSLATORS, TranslationJob, train_toolkit_model

    if program in TOOLKIT_TRANSLATORS:
        shape = {each: SHAPES[size][each] for each in ("width", "heads", "ffn_width")} | {
            "layers": layers(size)
        }
        translation_job = TranslationJob(shape, VOCABULARIES[size], beam, folder)
        assert min(min(source) for source in sentences(10, VOCABULARIES[size])) >= SPECIALS, (
            "sources must have no special tokens"
        )
        if program != "JoeyNMT":  # its model is built without its command
            train_toolkit_model(program, translation_job)
        return functools.partial(TOOLKIT_TRANSLATORS[program], translation_job)
    peers = {
        "transformers": local_systems.transformers,
        "torch.nn.Transformer": local_systems.torch_transformer_peer,
    }
    return functools.partial(peers[program], size, precision, beam)


def run_worker(name: str, arguments: argparse.Namespace) -> None:
    """Run as a worker: read layout numbers from stdin, write lines of JSON to stdout."""
    with os.fdopen(os.dup(1), "w") as replies_file:
        os.dup2(2, 1)  # stdout is for replies only
        for reply in worker_replies(name, arguments, map(int, sys.stdin)):
            print(json.dumps(reply), file=replies_file, flush=True)


def worker_replies(
    name: str, arguments: argparse.Namespace, numbers: Iterable[int]
) -> Iterator[dict[str, Any]]:
    """Load and tune every core layout and report it; then time each layout that is requested."""
    size, beam, count = arguments.size, arguments.beam, arguments.sentences
    sources = sentences(count, VOCABULARIES[size])
    some = batch_by_length(sources, max(1, count // 4))[min(1, count - 1)]  # of medium length

    def seconds(translate: CoreLayout, rows: int) -> float:
        batches = batch_by_length(some, max(1, rows // beam))
        translate(batches[:1])
        best = math.inf
        for _ in range(TRIALS):
            begin = time.perf_counter()
            translate(batches)
            best = min(best, time.perf_counter() - begin)
            if best > SHORT_SECONDS:
                break
        return best

    layouts = [
        begin() for begin in core_layouts(name, size, beam, arguments.cores, arguments.folder)
    ][::-1]
    if arguments.layouts == "best" and len(layouts) > 1:
        tried = {each.label: seconds(each, TRIAL_ROWS) for each in layouts}
        layouts.sort(key=lambda each: tried[each.label])
        while len(layouts) > 1:
            layouts.pop().close()
    ready: list[dict[str, Any]] = []
    for each in layouts:
        by_rows: dict[int, float] = {}
        for rows in BATCHES:
            if sum(by_rows.values()) < arguments.patience:
                by_rows[rows] = seconds(each, rows)
        ready.append(
            {
                "layout": each.label,
                "description": each.description,
                "rows": min(by_rows, key=lambda rows: by_rows[rows]),
            }
        )
    yield {"version": version(name), "core_layouts": ready}
    for number in numbers:
        chosen, batches = (
            layouts[number],
            batch_by_length(sources, max(1, ready[number]["rows"] // beam)),
        )
        begin = time.perf_counter()
        chosen(batches)
        yield {"seconds": time.perf_counter() - begin, "peak_mib": chosen.peak_mib()}


def version(name: str) -> str:
    """Return the installed version of a system's package."""
    program = name.split()[0]
    try:
        return metadata.version(PACKAGES.get(program, program))
    except metadata.PackageNotFoundError:
        return "unknown"
