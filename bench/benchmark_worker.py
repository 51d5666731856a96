"""A contender in the race on a CPU: it gets ready in every way that it can use the cores, and translates whenever a line asks it to."""

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

from bench.core_layouts import CoreLayout, OwnThreading, ProcessPerCore, SingleProcess
from bench.workload import SHAPES, VOCABULARIES, TranslateBatch, batch_by_length, layers, sentences

BATCHES = (16, 32, 64, 128)  # rows tried, beams counted
TRIALS, SHORT_SECONDS = (
    3,
    1.0,
)  # times that a batch size is tried, the best counting, and seconds past which once is enough
TRIAL_ROWS = 32  # rows for choosing between threads and processes
PACKAGES = {
    "exported": "ctranslate2",
    "torch.nn.Transformer": "torch",
    "native": "dragoman",
    "JoeyNMT": "joeynmt",
}  # others have theirs


def core_layouts(
    name: str, size: str, beam: int, cores: int, folder: Path
) -> list[Callable[[], CoreLayout]]:
    """Give the ways in which a contender can use the cores."""
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
    threads: Callable[[], CoreLayout] = functools.partial(SingleProcess, load, cores)
    processes: Callable[[], CoreLayout] = functools.partial(ProcessPerCore, load, cores)
    return (
        [threads] if cores == 1 else [processes, threads]
    )  # in this order: they must be forked before torch is here


def peer_loader(
    program: str, size: str, precision: str, beam: int, folder: Path
) -> Callable[[], TranslateBatch]:
    """Give what loads a contender that translates one batch at a time."""
    from bench import local_systems
    from bench.toolkit_configs import SPECIALS
    from bench.toolkit_translators import TOOLKIT_TRANSLATORS, TranslationJob, train_toolkit_model

    if program in TOOLKIT_TRANSLATORS:
        shape = {each: SHAPES[size][each] for each in ("width", "heads", "ffn_width")} | {
            "layers": layers(size)
        }
        translation_job = TranslationJob(shape, VOCABULARIES[size], beam, folder)
        assert min(min(source) for source in sentences(10, VOCABULARIES[size])) >= SPECIALS, (
            "sources must hold no special tokens"
        )
        if program != "JoeyNMT":  # whose model is made without its command
            train_toolkit_model(program, translation_job)
        return functools.partial(TOOLKIT_TRANSLATORS[program], translation_job)
    peers = {
        "transformers": local_systems.transformers,
        "torch.nn.Transformer": local_systems.torch_transformer_peer,
    }
    return functools.partial(peers[program], size, precision, beam)


def run_worker(name: str, arguments: argparse.Namespace) -> None:
    """Be a contender: numbers of arrangements come in, lines of JSON go out."""
    with os.fdopen(os.dup(1), "w") as replies_file:
        os.dup2(2, 1)  # what toolkits print is not for who reads this
        for reply in worker_replies(name, arguments, map(int, sys.stdin)):
            print(json.dumps(reply), file=replies_file, flush=True)


def worker_replies(
    name: str, arguments: argparse.Namespace, numbers: Iterable[int]
) -> Iterator[dict[str, Any]]:
    """Load, find each arrangement's best batch size and say so; then translate by each arrangement that is asked for."""
    size, beam, count = arguments.size, arguments.beam, arguments.sentences
    sources = sentences(count, VOCABULARIES[size])
    some = batch_by_length(sources, max(1, count // 4))[min(1, count - 1)]  # of middling length

    def seconds(translate: CoreLayout, rows: int) -> float:
        batches = batch_by_length(some, max(1, rows // beam))
        translate(batches[:1])
        best = math.inf
        for _ in range(TRIALS):
            begin = time.perf_counter()
            translate(batches)
            best = min(best, time.perf_counter() - begin)
            if (
                best > SHORT_SECONDS
            ):  # a second trial is for those whom a moment's disturbance would mislead
                break
        return best

    arranged = [
        begin() for begin in core_layouts(name, size, beam, arguments.cores, arguments.folder)
    ][::-1]
    if arguments.arrangements == "better" and len(arranged) > 1:
        tried = {each.label: seconds(each, TRIAL_ROWS) for each in arranged}
        arranged.sort(key=lambda each: tried[each.label])
        while len(arranged) > 1:
            arranged.pop().close()
    ready: list[dict[str, Any]] = []
    for each in arranged:
        by_rows: dict[int, float] = {}
        for rows in BATCHES:
            if sum(by_rows.values()) < arguments.patience:
                by_rows[rows] = seconds(each, rows)
        ready.append(
            {
                "arrangement": each.label,
                "words": each.words,
                "rows": min(by_rows, key=lambda rows: by_rows[rows]),
            }
        )
    yield {"version": version(name), "core_layouts": ready}
    for number in numbers:
        chosen, batches = (
            arranged[number],
            batch_by_length(sources, max(1, ready[number]["rows"] // beam)),
        )
        begin = time.perf_counter()
        chosen(batches)
        yield {"seconds": time.perf_counter() - begin, "peak_mib": chosen.peak_mib()}


def version(name: str) -> str:
    """Say which release of a contender this is."""
    program = name.split()[0]
    try:
        return metadata.version(PACKAGES.get(program, program))
    except metadata.PackageNotFoundError:
        return "unknown"
