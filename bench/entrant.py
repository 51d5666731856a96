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

from bench.arranged import Arranged, Own, Threads, Workers
from bench.forced import SHAPES, VOCABULARIES, TranslateOne, batched, layers, sentences

BATCHES = (16, 32, 64, 128)  # rows tried, beams counted
TRIALS, SHORT = 3, 1.0  # times that a batch size is tried, the best counting, and seconds past which once is enough
MIDDLING = 32  # rows for choosing between threads and processes
PACKAGES = {"exported": "ctranslate2", "torch.nn.Transformer": "torch", "native": "dragoman", "JoeyNMT": "joeynmt"}  # others have theirs


def ways(name: str, size: str, beam: int, cores: int, folder: Path) -> list[Callable[[], Arranged]]:
    """Give the ways in which a contender can use the cores."""
    from bench import contenders

    program, precision, *split = name.split()
    given = size, precision, beam, cores
    if program == "native":
        return [lambda: Own(contenders.native(*given), f"{cores} x 1")]
    if program == "exported":
        return [lambda: Own(contenders.our_export(*given, folder), f"{cores} x 1")]
    if program == "ctranslate2":
        workers = split == ["workers"]
        label = f"{cores} x 1" if workers else f"1 x {cores}"
        return [lambda: Own(contenders.ctranslate2_itself(*given, folder, workers=workers), label)]
    load = loader(program, size, precision, beam, folder)
    threads: Callable[[], Arranged] = functools.partial(Threads, load, cores)
    processes: Callable[[], Arranged] = functools.partial(Workers, load, cores)
    return [threads] if cores == 1 else [processes, threads]  # in this order: they must be forked before torch is here


def loader(program: str, size: str, precision: str, beam: int, folder: Path) -> Callable[[], TranslateOne]:
    """Give what loads a contender that translates one batch at a time."""
    from bench import contenders
    from bench.toolkit_settings import SPECIALS
    from bench.visitors import VISITORS, Asked, trained

    if program in VISITORS:
        shape = {each: SHAPES[size][each] for each in ("width", "heads", "feedforward")} | {"layers": layers(size)}
        asked = Asked(shape, VOCABULARIES[size], beam, folder)
        assert min(min(source) for source in sentences(10, VOCABULARIES[size])) >= SPECIALS, "sources must hold no special pieces"
        if program != "JoeyNMT":  # whose model is made without its command
            trained(program, asked)
        return functools.partial(VISITORS[program], asked)
    peers = {"transformers": contenders.transformers, "torch.nn.Transformer": contenders.torch_transformer}
    return functools.partial(peers[program], size, precision, beam)


def work(name: str, arguments: argparse.Namespace) -> None:
    """Be a contender: numbers of arrangements come in, lines of JSON go out."""
    with os.fdopen(os.dup(1), "w") as tell:
        os.dup2(2, 1)  # what toolkits print is not for who reads this
        for told in answers(name, arguments, map(int, sys.stdin)):
            print(json.dumps(told), file=tell, flush=True)


def answers(name: str, arguments: argparse.Namespace, numbers: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Load, find each arrangement's best batch size and say so; then translate by each arrangement that is asked for."""
    size, beam, count = arguments.size, arguments.beam, arguments.sentences
    sources = sentences(count, VOCABULARIES[size])
    some = batched(sources, max(1, count // 4))[min(1, count - 1)]  # of middling length

    def seconds(translate: Arranged, rows: int) -> float:
        batches = batched(some, max(1, rows // beam))
        translate(batches[:1])
        best = math.inf
        for _ in range(TRIALS):
            begin = time.perf_counter()
            translate(batches)
            best = min(best, time.perf_counter() - begin)
            if best > SHORT:  # a second trial is for those whom a moment's disturbance would mislead
                break
        return best

    arranged = [begin() for begin in ways(name, size, beam, arguments.cores, arguments.folder)][::-1]
    if arguments.arrangements == "better" and len(arranged) > 1:
        tried = {each.label: seconds(each, MIDDLING) for each in arranged}
        arranged.sort(key=lambda each: tried[each.label])
        while len(arranged) > 1:
            arranged.pop().close()
    ready: list[dict[str, Any]] = []
    for each in arranged:
        by_rows: dict[int, float] = {}
        for rows in BATCHES:
            if sum(by_rows.values()) < arguments.patience:
                by_rows[rows] = seconds(each, rows)
        ready.append({"arrangement": each.label, "words": each.words, "rows": min(by_rows, key=lambda rows: by_rows[rows])})
    yield {"version": version(name), "ways": ready}
    for number in numbers:
        chosen, batches = arranged[number], batched(sources, max(1, ready[number]["rows"] // beam))
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
