"""decode_cpu.py runs at its smallest size and gives all systems the same work."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dragoman.inference.cpu.cpp_kernel_library_loader import load_kernel_library

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.decode_cpu")


def test_batches_contain_every_sentence_once_by_length(bench: Any) -> None:
    from bench import workload

    drawn = workload.sentences(50, 500)
    batches = workload.batch_by_length(drawn, 16)
    assert sorted(each for batch in batches for each in batch) == sorted(drawn)
    assert [len(each) for batch in batches for each in batch] == sorted(
        map(len, drawn), reverse=True
    )
    assert workload.sentences(50, 500) == drawn


def test_having_no_peers_is_reported(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench import decode_cpu

    monkeypatch.setattr(sys, "argv", ["decode_cpu.py", "--only", "nobody"])
    with pytest.raises(SystemExit, match="2"):
        decode_cpu.main()
    messages = capsys.readouterr().err
    assert "found ['nobody']" in messages
    assert "native float32" in messages


def test_every_search_takes_as_many_steps_as_its_batch_requires(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of peers have one token per step; the last step of ours may only produce </s>."""
    from bench import benchmark_worker, workload
    from dragoman.inference import NativeEngine
    from dragoman.inference.cpu.cpp_kv_cache import CppKVCache

    found, advances = [], []
    generate, advance = NativeEngine.generate, CppKVCache.advance
    monkeypatch.setattr(CppKVCache, "advance", lambda self: advances.append(1) or advance(self))
    monkeypatch.setattr(
        NativeEngine,
        "generate",
        lambda self, request: found.append(generate(self, request)) or found[-1],
    )
    batch = workload.sentences(4, 500)
    [begin] = benchmark_worker.core_layouts("native float32", "tiny", 2, 1, tmp_path)
    begin()([batch])
    assert {len(best.tokens) for [best] in found[0]} == {workload.output_length(batch) - 1}
    if load_kernel_library() is not None:
        assert len(advances) == workload.output_length(batch)


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("program", ["transformers", "torch.nn.Transformer"])
def test_peers_generate_the_requested_length(
    bench: Any, tmp_path: Path, program: str, beam: int
) -> None:
    from bench import benchmark_worker, workload

    translate = benchmark_worker.peer_loader(program, "tiny", "float32", beam, tmp_path)()
    batch = workload.sentences(3, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes of torch's
        found = translate(batch, 6)
        alone = translate(batch[1:2], 6)
    assert [len(each) for each in found] == [6, 6, 6]
    assert alone[0] == found[1]  # whatever else is in the batch


def test_a_search_without_a_cache_finds_better_outputs_with_more_beams(
    bench: Any, tmp_path: Path
) -> None:
    """Score what was found by torch's own model, teacher-forced."""
    from bench import benchmark_worker, workload
    from bench.local_systems import build_model_and_config, pad_with_eos
    from bench.peers import NNTransformer
    from dragoman.text.special_tokens import BOS

    batch = workload.sentences(4, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            beam: benchmark_worker.peer_loader(
                "torch.nn.Transformer", "tiny", "float32", beam, tmp_path
            )()(batch, 5)
            for beam in (1, 8)
        }
        torch.manual_seed(0)
        _, config = build_model_and_config("tiny")
        model = NNTransformer(config.model, 1, 500).eval()
        scores = {}
        for beam, outputs in found.items():
            tgt_in = torch.tensor([[BOS, *output[:-1]] for output in outputs])
            src = pad_with_eos(batch)
            with torch.inference_mode():
                log_probs = model(src, src != 0, tgt_in).log_softmax(-1)
            scores[beam] = log_probs.gather(2, torch.tensor(outputs)[:, :, None]).sum(dim=(1, 2))
    assert (scores[8] >= scores[1] - 1e-4).all()
    assert (scores[8] > scores[1] + 1e-3).any()


def test_outputs_of_another_length_are_not_timed(bench: Any) -> None:
    from bench.core_layouts import translate_checked

    translate_checked(lambda batch, length: [[1] * length] * len(batch), [[5, 6], [7]])
    with pytest.raises(RuntimeError, match=r"must be 4 tokens long; found \[3, 4\]"):
        translate_checked(lambda batch, length: [[1] * length, [1] * 3], [[5, 6], [7]])


WORKERS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from bench.core_layouts import ProcessPerCore, OneProcess
def load():
    def translate(batch, length):
        with open(sys.argv[2], "a") as file:
            file.write(f"{os.getpid()} {len(batch)}\\n")
        if batch == [[13]]:
            raise ValueError("unlucky")
        return [[1] * length for _ in batch]
    return translate
for kind in (ProcessPerCore, OneProcess):
    layouts = kind(load, 2)
    layouts([[[5, 6]]] * 6)
    assert layouts.peak_mib() > 1
    print(layouts.label, layouts.description)
    try:
        layouts([[[13]]])
    except (RuntimeError, ValueError) as problem:
        print(problem)
    layouts.close()
def broken():
    raise ImportError("no such toolkit")
try:
    ProcessPerCore(broken, 2)
except RuntimeError as problem:
    print(problem)
"""


def test_batches_are_spread_over_processes_or_threads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKERS, str(ROOT), str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == [
        "2 x 1 2 processes",
        "ValueError: unlucky",
        "1 x 2 1 process, 2 threads",
        "unlucky",
        "ImportError: no such toolkit",
    ], done.stderr
    written = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert len(written) == 14
    assert len(set(written)) == 3  # two processes, and then their parent alone


STAND_IN = """
import argparse, json, sys
parser = argparse.ArgumentParser()
parser.add_argument("--worker")
name = parser.parse_known_args()[0].worker
if name.startswith("eole"):
    raise SystemExit("ImportError: no module named aiohttp")
seconds = {"native float32": [0.5], "native int8": [0.25], "ctranslate2 float32 workers": [0.8]}
seconds |= {"OpenNMT-py float32": [1.0], "transformers float32": [2.0, 1.25]}
seconds |= {"JoeyNMT float32": [30.0]}
shown = [("1 x 2", "1 process, 2 threads"), ("2 x 1", "2 processes")]
shown = shown if len(seconds[name]) > 1 else [("2 x 1", "")]
ways = [{"layout": label, "description": words, "rows": 32} for label, words in shown]
print(json.dumps({"version": "1.0", "core_layouts": ways}), flush=True)
for number, line in enumerate(sys.stdin):
    if name.startswith("OpenNMT") and number == 1:
        raise SystemExit("out of memory")
    print(json.dumps({"seconds": seconds[name][int(line)], "peak_mib": 100}), flush=True)
"""


@pytest.fixture
def stand_ins(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replace every worker by a script."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "stand_in.py"))
    toolkits = importlib.import_module("bench.toolkit_environments")
    monkeypatch.setattr(toolkits, "toolkit_python", lambda name, version: Path(sys.executable))

    def run(*options: str) -> None:
        monkeypatch.setattr(sys, "argv", ["bench/decode_cpu.py", "--sentences", "10", *options])
        bench.main()

    return run


def test_a_failing_system_is_reported_and_the_others_run(
    stand_ins: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins("--only", "native float32", "OpenNMT-py", "eole", "JoeyNMT", "--patience", "40")
    messages = capsys.readouterr()
    found = {row["system"]: row for row in json.loads(messages.out.splitlines()[-1])["rows"]}
    assert found["native float32"]["rounds"] == [20.0] * 3
    assert found["OpenNMT-py float32"]["rounds"] == [10.0]
    assert found["OpenNMT-py float32"]["error"] == "out of memory"
    assert found["eole float32"]["error"] == "ImportError: no module named aiohttp"
    assert len(found["JoeyNMT float32"]["rounds"]) == 2  # no patience for a third
    assert "eole float32: skipped: ImportError: no module named aiohttp\n" in messages.err
    assert "OpenNMT-py float32: failed: out of memory\n" in messages.err
    assert (
        "OpenNMT-py float32        10.0     10.0  2 x 1    32    100           -     2.00      -\n"
        in messages.out
    )


def test_both_core_layouts_run_in_every_round_with_ratios(
    stand_ins: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins("--only", "native", "ctranslate2 float32 workers", "transformers float32")
    messages = capsys.readouterr()
    found = {row["system"]: row for row in json.loads(messages.out.splitlines()[-1])["rows"]}
    assert list(found)[3:] == [
        "transformers float32, 1 process, 2 threads",
        "transformers float32, 2 processes",
    ]
    rates = {"1 process, 2 threads": 5.0, "2 processes": 8.0}
    for words, rate in rates.items():
        row = found[f"transformers float32, {words}"]
        assert row["rounds"] == [rate] * 3
        assert row["native_is"] == {"float32": 20 / rate, "int8": 40 / rate}
        assert row["times_ctranslate2"] == pytest.approx(rate / 12.5)
        assert f"{row['system']:42s}         {rate}" in messages.out
    assert found["native float32"]["times_ctranslate2"] == pytest.approx(1.6)
    assert found["native int8"]["times_ctranslate2"] is None


def test_a_toolkit_that_cannot_be_installed_is_left_out(
    stand_ins: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toolkits = importlib.import_module("bench.toolkit_environments")

    def fail(name: str, version: str) -> Path:
        raise toolkits.InstallError(f"{name} could not be installed: no network")

    monkeypatch.setattr(toolkits, "toolkit_python", fail)
    stand_ins("--only", "native float32", "JoeyNMT")
    messages = capsys.readouterr()
    assert "JoeyNMT float32: skipped: JoeyNMT could not be installed: no network\n" in messages.err
    assert "JoeyNMT float32 failed: JoeyNMT could not be installed: no network\n" in messages.out
    assert "native float32         20.0" in messages.out


def test_toolkits_are_included_in_all_peers(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    some = bench.select_systems(argparse.Namespace(peers="some", only=None))
    every = bench.select_systems(argparse.Namespace(peers="all", only=None))
    assert [name for name in every if name not in some] == list(bench.TOOLKIT_SYSTEMS)
    assert bench.select_systems(argparse.Namespace(peers="some", only=["eole"])) == ["eole float32"]
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.select_systems(argparse.Namespace(peers="some", only=["transformers int8"])) == []
    assert capsys.readouterr().err == "transformers int8: skipped: transformers is not installed\n"


def entered(
    monkeypatch: pytest.MonkeyPatch, layouts: str, numbers: Iterable[int]
) -> list[dict[str, Any]]:
    """Run a stub system with two core layouts on a fake clock."""
    from bench import benchmark_worker

    class Arranged:
        def __init__(self, label: str, quick: bool) -> None:
            self.label, self.description, self.quick, self.closed = (
                label,
                f"as {label}",
                quick,
                False,
            )

        def __call__(self, batches: Any) -> None:
            assert not self.closed
            clock.append(
                clock[-1] + (1 if self.quick else 2) * (len(batches) + (len(batches[0]) > 32))
            )

        def peak_mib(self) -> int:
            return 7 if self.quick else 8

        def close(self) -> None:
            self.closed = True

    clock = [0.0]
    monkeypatch.setattr(benchmark_worker.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(
        benchmark_worker,
        "core_layouts",
        lambda *_: [lambda: Arranged("slow", False), lambda: Arranged("quick", True)],
    )
    given = argparse.Namespace(
        size="tiny",
        beam=1,
        sentences=160,
        cores=2,
        folder=None,
        patience=1e3,
        layouts=layouts,
    )
    return list(benchmark_worker.worker_replies("native float32", given, numbers))


def test_a_worker_tunes_every_layout_and_runs_the_requested_one(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, quick, slow = entered(monkeypatch, "both", [0, 1])
    assert [each["layout"] for each in ready["core_layouts"]] == [
        "quick",
        "slow",
    ]  # what is begun last comes first
    assert [each["description"] for each in ready["core_layouts"]] == ["as quick", "as slow"]
    assert [each["rows"] for each in ready["core_layouts"]] == [32, 32]
    assert quick == {"seconds": 5.0, "peak_mib": 7}
    assert slow == {"seconds": 10.0, "peak_mib": 8}


def test_a_worker_keeps_the_best_layout_if_requested(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, quick = entered(monkeypatch, "best", [0])
    assert [each["layout"] for each in ready["core_layouts"]] == ["quick"]
    assert quick == {"seconds": 5.0, "peak_mib": 7}


@pytest.mark.slow
def test_the_benchmark_prints_a_table_and_a_line_of_json() -> None:
    command = [
        sys.executable,
        str(ROOT / "bench" / "decode_cpu.py"),
        "--size",
        "tiny",
        "--sentences",
        "16",
        "--rounds",
        "2",
        "--cores",
        "1",
    ]
    run = subprocess.run(
        [*command, "--only", "native"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    messages = json.loads(run.stdout.splitlines()[-1])
    assert [row["system"] for row in messages["rows"]] == ["native float32", "native int8"]
    assert all(len(row["rounds"]) == 2 and row["peak_mib"] > 50 for row in messages["rows"])
