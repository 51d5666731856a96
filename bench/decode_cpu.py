"""Measure CPU translation throughput of Dragoman's engines against CTranslate2 and other peers.

    python bench/decode_cpu.py --size small --beam 1 --sentences 1000
    python bench/decode_cpu.py --peers all --sentences 400    # also OpenNMT-py, eole and JoeyNMT
    python bench/decode_cpu.py --only native eole             # systems by prefix of their names

The table has sentences/s (best and worst round), peak memory, the ratio to CTranslate2, and the
ratio of our native engine to each system. Weights are random. Sentences are batched by length, and
every output has the length of its batch's longest source plus two, so all systems decode the same
number of steps. Each system runs in its own process, which loads the model, tunes its batch size
and warms up before timing; rounds alternate between the systems. Systems that do not distribute
batches over the cores run in two layouts: one process with a thread per core, and one process per
core (`--layouts best`: the faster of the two).
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
    """A system's worker process, and one result row for each of its core layouts."""

    process: Any
    error_log: Path
    rows: list[dict[str, Any]]

    def request(self, line: str = "") -> dict[str, Any]:
        """Send a line, if any; return the reply, or the last line of stderr after a crash."""
        with contextlib.suppress(BrokenPipeError):  # the process has ended
            self.process.stdin.write(line)
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        reply = self.error_log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {"error": (reply or ["it ended without output"])[-1][:300]}


def start_system(
    name: str, arguments: argparse.Namespace, folder: Path
) -> RunningSystem | dict[str, Any]:
    """Start a system and wait until it is ready; return a row with the error if it fails."""
    python = sys.executable
    if name in TOOLKIT_SYSTEMS:
        from bench.toolkit_environments import InstallError, toolkit_python

        try:
            python = str(toolkit_python(name.split()[0], metadata.version("torch")))
        except InstallError as problem:
            return {"system": name, "error": str(problem)}
    command = [python, __file__, "--worker", name, "--folder", str(folder)]
    for each in ("size", "beam", "sentences", "cores", "patience", "layouts"):
        command += [f"--{each}", str(getattr(arguments, each))]
    error_log = folder / f"{name}.txt"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    with error_log.open("w") as log:
        pipes: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": log,
        }
        process = subprocess.Popen(command, **pipes, text=True, env=environment)
    running = RunningSystem(process, error_log, [])
    reply = running.request()
    if "error" in reply:
        process.communicate()
        return {"system": name, **reply}
    for each in reply["core_layouts"]:
        description = each.pop("description")
        full = f"{name}, {description}" if description else name
        running.rows.append(
            {"system": full, "program": name, "version": reply["version"], **each, "rounds": []}
        )
    return running


def run_round(running: RunningSystem, number: int, row: dict[str, Any], count: int) -> None:
    """Time one round of one core layout and append it to its row."""
    reply = running.request(f"{number}\n")
    if "error" in reply:
        row["error"] = reply["error"]
        print(f"{row['system']}: failed: {row['error']}", file=sys.stderr, flush=True)
        return
    row["rounds"].append(count / reply["seconds"])
    row["peak_mib"] = reply["peak_mib"]


def run_benchmark(
    names: Sequence[str], arguments: argparse.Namespace, folder: Path
) -> Iterator[dict[str, Any]]:
    """Run all rounds; return one row for each system and core layout."""
    started: list[RunningSystem | dict[str, Any]] = []
    for name in names:
        each = start_system(name, arguments, folder)
        if isinstance(each, RunningSystem):
            reply = "ready, " + " and ".join(
                f"{row['layout']} cores with {row['rows']} rows" for row in each.rows
            )
        else:
            reply = f"skipped: {each['error']}"
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
        each.process.communicate()  # closing stdin ends the worker
    for each in started:
        yield from each.rows if isinstance(each, RunningSystem) else [each]


def add_ratios(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows with their ratio to CTranslate2 and our native engine's ratio to them."""
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
    """Print the table of throughput and ratios, and one line of JSON."""
    print(
        f"{arguments.size}, beam {arguments.beam}, {arguments.sentences} sentences, "
        f"{arguments.cores} cores, best of {arguments.rounds}"
    )
    rows = list(add_ratios(rows))
    wide = max(len(row["system"]) for row in rows)
    print(
        f"{'':{wide}s} {'':>11s} {'worst':>8s} {'':>6s} {'':>5s} {'peak':>6s} {'ratio to':>11s}"
        "  native's ratio"
    )
    names = (
        f"{'system':{wide}s} {'sentences/s':>11s} {'round':>8s} {'cores':>6s} {'rows':>5s} "
        f"{'MiB':>6s}"
    )
    print(f"{names} {'CTranslate2':>11s} {'float32':>8s} {'int8':>6s}")
    for row in rows:
        if row.get("rounds"):
            ratios = [
                row["times_ctranslate2"],
                row["native_is"].get("float32"),
                row["native_is"].get("int8"),
            ]
            reply = [f"{ratio:.2f}" if ratio else "-" for ratio in ratios]
            numbers = (
                f"{row['best']:11.1f} {min(row['rounds']):8.1f} {row['layout']:>6s} "
                f"{row['rows']:5d} {row['peak_mib']:6d}"
            )
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
    """Return the selected systems; warn about those that are not installed."""
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
            print(f"{name}: skipped: {program} is not installed", file=sys.stderr)
            names.remove(name)
    return names


def main() -> None:
    """Parse the arguments and run the benchmark, or one worker of it."""
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
        help="all: also install and run OpenNMT-py, eole and JoeyNMT",
    )
    parser.add_argument("--only", nargs="*", help="systems, by prefix of their names")
    parser.add_argument(
        "--layouts",
        choices=["both", "best"],
        default="both",
        help="core layouts of systems that do not distribute batches",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=40.0,
        help="seconds after which no further round or batch size is run",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run_worker(arguments.worker, arguments)
        return
    names = select_systems(arguments)
    if not names:
        parser.error(
            f"--only must name systems by prefix; found {arguments.only}; "
            f"choose from: {'; '.join(LOCAL_SYSTEMS + TOOLKIT_SYSTEMS)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        print_table(list(run_benchmark(names, arguments, Path(folder))), arguments)


if __name__ == "__main__":
    main()
