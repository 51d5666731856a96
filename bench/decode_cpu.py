"""Translating on a CPU: our native engine and our exported one beside their peers, on the same work.

    python bench/decode_cpu.py --size small --beam 1 --sentences 1000
    python bench/decode_cpu.py --peers all --sentences 400      # with OpenNMT-py, eole and JoeyNMT, each installed for it
    python bench/decode_cpu.py --only native eole               # some, by the beginnings of their names

Random weights of a fixed seed; sentences of like lengths go together, and every output is as long as its batch's longest source and two
more, so that all do the same steps. Each contender lives in a process of its own, which loads, finds its best batch size and warms up
before anything is timed; the rounds then go from one to the next, one at a time, so that a busy machine is busy for all. The best of the
rounds counts, in sentences a second of wall time, with the worst beside it and the process's peak memory. Programs that do not spread
their batches over the cores themselves run twice in every round: as they come, in one process with a thread for each core, and in a
process of one thread for each core (`--arrangements better`: only what was quicker when it got ready). One that fails is told of in a line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.benchmark_worker import run_worker
from bench.workload import SHAPES

LOCAL_SYSTEMS = (
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
TOOLKIT_SYSTEMS = ("OpenNMT-py float32", "eole float32", "JoeyNMT float32")


class RunningSystem(NamedTuple):
    """A contender's process, and what is known of it: a row for each of its arrangements."""

    process: Any
    error_log: Path
    rows: list[dict[str, Any]]

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line, if any, and read the answer; what it says last before it fails is the error."""
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no answer either
            self.process.stdin.write(line)
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        reply = self.error_log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {"error": (reply or ["it ended without a word"])[-1][:300]}


def start_system(
    name: str, arguments: argparse.Namespace, folder: Path
) -> RunningSystem | dict[str, Any]:
    """Start a contender and let it get ready; a failure is a row too, and all that there is."""
    python = sys.executable
    if name in TOOLKIT_SYSTEMS:
        from bench.toolkit_environments import InstallError, toolkit_python

        try:
            python = str(toolkit_python(name.split()[0], metadata.version("torch")))
        except InstallError as problem:
            return {"system": name, "error": str(problem)}
    command = [python, __file__, "--be", name, "--folder", str(folder)]
    for each in ("size", "beam", "sentences", "cores", "patience", "arrangements"):
        command += [f"--{each}", str(getattr(arguments, each))]
    error_log = folder / f"{name}.txt"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    with error_log.open("w") as words:
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": words,
        }
        process = subprocess.Popen(command, **pipes, text=True, env=environment)
    running = RunningSystem(process, error_log, [])
    reply = running.ask()
    if "error" in reply:
        process.communicate()
        return {"system": name, **reply}
    for each in reply["core_layouts"]:
        words = each.pop("words")
        full = f"{name}, {words}" if words else name
        running.rows.append(
            {"system": full, "program": name, "version": reply["version"], **each, "rounds": []}
        )
    return running


def run_round(running: RunningSystem, number: int, row: dict[str, Any], count: int) -> None:
    """Let one arrangement of a contender run once, and note how it did."""
    reply = running.ask(f"{number}\n")
    if "error" in reply:
        row["error"] = reply["error"]
        print(f"{row['system']}: failed: {row['error']}", file=sys.stderr, flush=True)
        return
    row["rounds"].append(count / reply["seconds"])
    row["peak_mib"] = reply["peak_mib"]


def run_benchmark(
    names: Sequence[str], arguments: argparse.Namespace, folder: Path
) -> Iterator[dict[str, Any]]:
    """Run the rounds and give a row for each contender and arrangement."""
    started: list[RunningSystem | dict[str, Any]] = []
    for name in names:
        each = start_system(name, arguments, folder)
        if isinstance(each, RunningSystem):
            reply = "ready, " + " and ".join(
                f"{row['arrangement']} cores with {row['rows']} rows" for row in each.rows
            )
        else:
            reply = f"left out: {each['error']}"
        print(f"{name}: {reply}", file=sys.stderr, flush=True)
        started.append(each)
    running = [each for each in started if isinstance(each, RunningSystem)]
    for _ in range(arguments.rounds):
        for each in running:
            for number, row in enumerate(each.rows):
                spent = sum(arguments.sentences / rate for rate in row["rounds"])
                if "error" not in row and spent <= arguments.patience:
                    run_round(each, number, row, arguments.sentences)
    for each in running:
        each.process.communicate()  # no more lines: it ends
    for each in started:
        yield from each.rows if isinstance(each, RunningSystem) else [each]


def add_ratios(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Add to each row how it compares: with CTranslate2's best of its precision, and how many times as fast ours is, in each precision."""
    best = {row["system"]: max(row["rounds"]) for row in rows if row.get("rounds")}
    ours = {
        precision: best[f"native {precision}"]
        for precision in ("float32", "int8")
        if f"native {precision}" in best
    }
    for row in rows:
        if row["system"] not in best:
            yield row
            continue
        rate, precision = best[row["system"]], row["program"].split()[1]
        ctranslate2_rate = max(
            (best[each] for each in best if each.startswith(f"ctranslate2 {precision}")),
            default=None,
        )
        yield row | {
            "best": rate,
            "times_ctranslate2": ctranslate2_rate and rate / ctranslate2_rate,
            "native_is": {each: native / rate for each, native in ours.items()},
        }


def print_table(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the table, how many times as fast we are, and a line of JSON."""
    print(
        f"{arguments.size}, beam {arguments.beam}, {arguments.sentences} sentences, {arguments.cores} cores, best of {arguments.rounds}"
    )
    rows = list(add_ratios(rows))
    wide = max(len(row["system"]) for row in rows)
    print(
        f"{'':{wide}s} {'':>11s} {'worst':>8s} {'':>6s} {'':>5s} {'peak':>6s} {'times':>11s}  native is, in"
    )
    names = f"{'system':{wide}s} {'sentences/s':>11s} {'round':>8s} {'cores':>6s} {'rows':>5s} {'MiB':>6s}"
    print(f"{names} {'CTranslate2':>11s} {'float32':>8s} {'int8':>6s}")
    for row in rows:
        if row.get("rounds"):
            ratios = [
                row["times_ctranslate2"],
                row["native_is"].get("float32"),
                row["native_is"].get("int8"),
            ]
            reply = [f"{ratio:.2f}" if ratio else "-" for ratio in ratios]
            numbers = f"{row['best']:11.1f} {min(row['rounds']):8.1f} {row['arrangement']:>6s} {row['rows']:5d} {row['peak_mib']:6d}"
            print(
                f"{row['system']:{wide}s} {numbers} {reply[0]:>11s} {reply[1]:>8s} {reply[2]:>6s}"
            )
    for row in rows:
        if "error" in row:
            print(f"{row['system']:{wide}s} failed: {row['error']}")
    signature = {
        "torch": metadata.version("torch"),
        "size": arguments.size,
        "beam": arguments.beam,
        "sentences": arguments.sentences,
    }
    print(
        json.dumps(
            {
                "bench": "decode_cpu",
                **signature,
                "cores": arguments.cores,
                "load": os.getloadavg()[0],
                "rows": rows,
            }
        )
    )


def select_systems(arguments: argparse.Namespace) -> list[str]:
    """Choose the contenders; what is not installed here is told of in a line."""
    names = (
        [*LOCAL_SYSTEMS, *TOOLKIT_SYSTEMS]
        if arguments.peers == "all" or arguments.only
        else list(LOCAL_SYSTEMS)
    )
    if arguments.only:
        names = [name for name in names if any(name.startswith(each) for each in arguments.only)]
    needs = {
        "ctranslate2": "ctranslate2",
        "exported": "ctranslate2",
        "transformers": "transformers",
    }
    for name in list(names):
        program = needs.get(name.split()[0])
        if program and importlib.util.find_spec(program) is None:
            print(f"{name}: left out: {program} is not installed", file=sys.stderr)
            names.remove(name)
    return names


def main() -> None:
    """Parse, and race or be raced."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--peers",
        choices=["some", "all"],
        default="some",
        help="all: other toolkits too, which takes installations",
    )
    parser.add_argument("--only", nargs="*", help="contenders, by the beginning of their names")
    parser.add_argument(
        "--arrangements",
        choices=["both", "better"],
        default="both",
        help="of programs that have no say in how they use the cores",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=40.0,
        help="no further round, or batch size, after so many seconds",
    )
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        run_worker(arguments.be, arguments)
        return
    names = select_systems(arguments)
    if not names:
        parser.error(
            f"--only must name contenders by their beginnings; found {arguments.only}; there are: {'; '.join(LOCAL_SYSTEMS + TOOLKIT_SYSTEMS)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        print_table(list(run_benchmark(names, arguments, Path(folder))), arguments)


if __name__ == "__main__":
    main()
