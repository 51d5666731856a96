"""Translating on a CPU: our native engine and our exported one beside their peers, on the same work.

    python bench/decode_cpu.py --size small --beam 1 --sentences 1000
    python bench/decode_cpu.py --peers all --sentences 400      # with OpenNMT-py, eole and JoeyNMT, each installed for it
    python bench/decode_cpu.py --only native eole               # some, by the beginnings of their names

Random weights of a fixed seed; sentences of like lengths go together, and every output is as long as its batch's longest source and two
more, so that all do the same steps. Each contender lives in a process of its own, which loads, finds its best batch size and warms up
before anything is timed; the rounds then go from one to the next, one at a time, so that a busy machine is busy for all. The best of the
rounds counts, in sentences a second of wall time, with the worst beside it and the process's peak memory. Programs that do not spread
their batches over the cores themselves also choose between a thread and a process for each core. One that fails is told of in a line.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.arranged import Arranged, Own, Threads, Workers
from bench.forced import SHAPES, VOCABULARIES, TranslateOne, batched, layers, sentences

BATCHES = (16, 32, 64, 128)  # rows tried, beams counted
MIDDLING = 32  # rows for choosing between threads and processes
HERE = (
    "native float32",
    "native int8",
    "exported float32",
    "exported int8",
    "ctranslate2 float32 workers",
    "ctranslate2 int8 workers",
    "ctranslate2 float32 threads",
    "ctranslate2 int8 threads",
    "transformers float32",
    "transformers int8",
    "torch.nn.Transformer float32",
)
INSTALLED = ("OpenNMT-py float32", "eole float32", "JoeyNMT float32")
PACKAGES = {"exported": "ctranslate2", "torch.nn.Transformer": "torch", "native": "dragoman", "JoeyNMT": "joeynmt"}  # others have theirs


class Running(NamedTuple):
    """A contender's process, and what is known of it."""

    process: Any
    complaints: Path
    row: dict[str, Any]

    def ask(self) -> dict[str, Any]:
        """Read a line of its own; what it says last before it fails is the error."""
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        told = self.complaints.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {"error": (told or ["it ended without a word"])[-1][:300]}


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


def work(name: str, size: str, beam: int, count: int, cores: int, folder: Path, patience: float) -> None:
    """Be a contender: load, find the best arrangement and batch size, and then translate whenever a line comes in."""
    tell = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what toolkits print is not for who reads this
    sources = sentences(count, VOCABULARIES[size])
    some = batched(sources, max(1, count // 4))[min(1, count - 1)]  # of middling length

    def seconds(translate: Arranged, rows: int) -> float:
        batches = batched(some, max(1, rows // beam))
        translate(batches[:1])
        begin = time.perf_counter()
        translate(batches)
        return time.perf_counter() - begin

    arranged = [begin() for begin in ways(name, size, beam, cores, folder)]
    tried = {each.label: seconds(each, MIDDLING) for each in arranged}
    chosen = min(arranged, key=lambda each: tried[each.label])
    for each in arranged:
        if each is not chosen:
            each.close()
    by_rows: dict[int, float] = {}
    for rows in BATCHES:
        if sum(by_rows.values()) < patience:
            by_rows[rows] = seconds(chosen, rows)
    best = min(by_rows, key=lambda rows: by_rows[rows])
    batches = batched(sources, max(1, best // beam))
    rates = {label: len(some) / taken for label, taken in tried.items()}
    print(json.dumps({"rows": best, "arrangement": chosen.label, "tried": rates, "version": version(name)}), file=tell, flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        chosen(batches)
        print(json.dumps({"seconds": time.perf_counter() - begin, "peak_mib": chosen.peak_mib()}), file=tell, flush=True)


def version(name: str) -> str:
    """Say which release of a contender this is."""
    program = name.split()[0]
    try:
        return metadata.version(PACKAGES.get(program, program))
    except metadata.PackageNotFoundError:
        return "unknown"


def start(name: str, arguments: argparse.Namespace, folder: Path) -> Running | dict[str, Any]:
    """Start a contender and let it get ready; a failure is a row too."""
    python = sys.executable
    if name in INSTALLED:
        from bench.toolkits import InstallError, interpreter

        try:
            python = str(interpreter(name.split()[0], metadata.version("torch")))
        except InstallError as problem:
            return {"contender": name, "error": str(problem)}
    command = [python, __file__, "--be", name, "--folder", str(folder)]
    for each in ("size", "beam", "sentences", "cores", "patience"):
        command += [f"--{each}", str(getattr(arguments, each))]
    complaints = folder / f"{name}.txt"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    with complaints.open("w") as words:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": words}
        process = subprocess.Popen(command, **pipes, text=True, env=environment)
    running = Running(process, complaints, {"contender": name, "rounds": []})
    running.row.update(running.ask())
    return running


def race(names: Sequence[str], arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Run the rounds and give a row for each contender."""
    started = []
    for name in names:
        started.append(start(name, arguments, folder))
        row = started[-1].row if isinstance(started[-1], Running) else started[-1]
        told = f"left out: {row['error']}" if "error" in row else f"ready, {row['arrangement']} cores, {row['rows']} rows"
        print(f"{name}: {told}", file=sys.stderr, flush=True)
    running = [each for each in started if isinstance(each, Running)]
    for _ in range(arguments.rounds):
        for each in running:
            row = each.row
            spent = sum(arguments.sentences / rate for rate in row["rounds"])
            if "error" in row or spent > arguments.patience:
                continue
            each.process.stdin.write("go\n")
            each.process.stdin.flush()
            told = each.ask()
            if "error" in told:
                row["error"] = told["error"]
                print(f"{row['contender']}: failed: {row['error']}", file=sys.stderr, flush=True)
                continue
            row["rounds"].append(arguments.sentences / told["seconds"])
            row["peak_mib"] = told["peak_mib"]
    for each in running:
        each.process.communicate()  # no more lines: it ends
    yield from (each.row if isinstance(each, Running) else each for each in started)


def show(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the table, how many times as fast we are, and a line of JSON."""
    good = [row for row in rows if row.get("rounds")]
    best = {row["contender"]: max(row["rounds"]) for row in good}
    print(f"{arguments.size}, beam {arguments.beam}, {arguments.sentences} sentences, {arguments.cores} cores, best of {arguments.rounds}")
    print(f"{'contender':30s} {'sentences/s':>12s} {'worst':>8s} {'cores':>6s} {'rows':>5s} {'peak MiB':>9s}  times CTranslate2, native is")
    for row in good:
        name = row["contender"]
        precision = name.split()[1]
        directly = [best[each] for each in best if each.startswith(f"ctranslate2 {precision}")]
        ours = best.get(f"native {precision}")
        ratios = [f"{best[name] / max(directly):.2f}" if directly else "-", f"{ours / best[name]:.2f}" if ours else "-"]
        numbers = f"{best[name]:12.1f} {min(row['rounds']):8.1f} {row['arrangement']:>6s} {row['rows']:5d} {row['peak_mib']:9d}"
        print(f"{name:30s} {numbers}  {'  '.join(ratios)}")
    for row in rows:
        if "error" in row:
            print(f"{row['contender']:30s} failed: {row['error']}")
    signature = {"torch": metadata.version("torch"), "size": arguments.size, "beam": arguments.beam, "sentences": arguments.sentences}
    print(json.dumps({"bench": "decode_cpu", **signature, "cores": arguments.cores, "load": os.getloadavg()[0], "rows": rows}))


def wanted(arguments: argparse.Namespace) -> list[str]:
    """Choose the contenders; what is not installed here is told of in a line."""
    names = [*HERE, *INSTALLED] if arguments.peers == "all" or arguments.only else list(HERE)
    if arguments.only:
        names = [name for name in names if any(name.startswith(each) for each in arguments.only)]
    needs = {"ctranslate2": "ctranslate2", "exported": "ctranslate2", "transformers": "transformers"}
    for name in list(names):
        program = needs.get(name.split()[0])
        if program and importlib.util.find_spec(program) is None:
            print(f"{name}: left out: {program} is not installed", file=sys.stderr)
            names.remove(name)
    return names


def main() -> None:
    """Parse, and race or be raced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers", choices=["some", "all"], default="some", help="all: other toolkits too, which takes installations")
    parser.add_argument("--only", nargs="*", help="contenders, by the beginning of their names")
    parser.add_argument("--patience", type=float, default=40.0, help="no further round, or batch size, after so many seconds")
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        sizes = arguments.size, arguments.beam, arguments.sentences, arguments.cores
        work(arguments.be, *sizes, arguments.folder, arguments.patience)
        return
    with tempfile.TemporaryDirectory() as folder:
        show(list(race(wanted(arguments), arguments, Path(folder))), arguments)


if __name__ == "__main__":
    main()
