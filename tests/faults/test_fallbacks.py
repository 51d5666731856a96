"""A missing dependency or device costs one warning that names the fallback; the result is the same.

Each case runs a command twice, on a healthy machine and on one that is broken in a certain way, and
compares the outputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fault_machines import (
    FULL,
    LOST,
    NO_GPU,
    OLD,
    ON_CPU,
    PAIRS,
    SAME,
    Case,
    a_gpu,
    failing_engine,
    forget,
    make_folder,
    narrow_gpu,
    narrow_search,
    no_gpu,
    no_int8,
    nothing,
    old_driver,
    unloadable,
    without,
)

from dragoman.cli.app import main
from dragoman.errors import ConfigError
from dragoman.inference import NativeEngine, Translator, engine_selection
from dragoman.runtime import device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("fallbacks"))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget(monkeypatch, tmp_path)


TRANSLATE, EVALUATE = "translate -m {}/model", "evaluate {}/model --src {}/text.de --ref {}/text.en"
EXPORTED = "translate -m {}/exported"
NATIVE = f"the native engine is used, {SAME}"

CASES = {
    "translate without a GPU": Case(f"{TRANSLATE} --device cuda", no_gpu, NO_GPU, usual=TRANSLATE),
    "evaluate without a GPU": Case(f"{EVALUATE} --device cuda", no_gpu, NO_GPU, usual=EVALUATE),
    "doctor without a GPU": Case(
        "doctor {}/model --device cuda", no_gpu, NO_GPU, usual="doctor {}/model"
    ),
    "a second GPU that is not there": Case(
        f"{TRANSLATE} --device cuda:1",
        a_gpu,
        rf"torch sees 1 GPU and no cuda:1: {ON_CPU}",
        TRANSLATE,
    ),
    "no Apple": Case(
        f"{TRANSLATE} --device mps", nothing, rf"no MPS device is available: {ON_CPU}", TRANSLATE
    ),
    "an old driver": Case(
        TRANSLATE,
        old_driver,
        rf"the GPU cannot be used \(CUDA init.*driver on your system is too old \(found "
        rf"version 11040\)\): {ON_CPU}",
    ),
    "an old GPU": Case(
        TRANSLATE,
        OLD,
        rf"GeForce GTX 1080 \(sm_61\) is too old for this torch, which is built for sm_75, "
        rf"sm_80: {ON_CPU}",
    ),
    "doctor with an old GPU": Case(
        "doctor {}/model", OLD, rf"GeForce .* is too old for this torch.*: {ON_CPU}"
    ),
    "a full GPU": Case(TRANSLATE, FULL, rf"the memory of GeForce GTX 1080 is full: {ON_CPU}"),
    "a GPU that fails": Case(
        TRANSLATE,
        LOST,
        rf"GeForce .* cannot be used \(CUDA error: unspecified launch failure\): {ON_CPU}",
    ),
    "a model too large for the GPU": Case(
        TRANSLATE, narrow_gpu, rf"the model does not fit into the memory of cuda: {ON_CPU}"
    ),
    "doctor on a model too large": Case(
        "doctor {}/model", narrow_gpu, rf"the model does not fit into the memory of cuda: {ON_CPU}"
    ),
    "memory that ends in a search": Case(
        EVALUATE,
        narrow_search,
        rf"out of memory with a batch of \d+ sentences: .* translated in halves, {SAME}",
    ),
    "half precision without a GPU": Case(
        f"{TRANSLATE} --precision bfloat16",
        no_gpu,
        rf"the precision bfloat16 runs on a GPU: cpu computes in float32, {SAME} but for rounding",
        usual=TRANSLATE,
    ),
    "int8 that the processor lacks": Case(
        f"{TRANSLATE} --precision int8",
        no_int8,
        "int8 is not used, and the model runs in float32: needs a processor .*",
        usual=TRANSLATE,
    ),
    "no ctranslate2": Case(
        EXPORTED,
        without("ctranslate2"),
        rf"the engine ctranslate2-float32 is not used \(found no ctranslate2; to have it: "
        rf"pip install 'dragoman\[fast\]'\): {NATIVE}",
    ),
    "no ctranslate2 where it is asked for": Case(
        f"{EXPORTED} --engine ctranslate2",
        without("ctranslate2"),
        rf"the engine ctranslate2-float32 is not used .*: {NATIVE}",
    ),
    "evaluate without ctranslate2": Case(
        EVALUATE.replace("model", "exported"),
        without("ctranslate2"),
        rf"the engine ctranslate2-float32 is not used .*: {NATIVE}",
    ),
    "a ctranslate2 that does not load": Case(
        EXPORTED,
        unloadable("ctranslate2"),
        rf"the engine ctranslate2-float32 is not used \(found a ctranslate2 that does not "
        rf"load \(ImportError: libiomp5.so: .*\): {NATIVE}",
    ),
    "a damaged engine": Case(
        "translate -m {}/damaged",
        nothing,
        rf"the engine ctranslate2-float32 is not used \(.*\): {NATIVE}",
        EXPORTED,
    ),
    "a damaged engine that is asked for": Case(
        "translate -m {}/damaged --engine ctranslate2",
        nothing,
        rf"the engine ctranslate2-float32 is not used \(.*\): {NATIVE}",
        EXPORTED,
    ),
    "an engine that fails when it is measured": Case(
        EXPORTED,
        failing_engine,
        rf"the engine ctranslate2-float32 failed \(Unsupported model binary\): {NATIVE} but "
        rf"for rounding",
        usual=f"{EXPORTED} --engine native",  # which measures nothing that could be remembered
    ),
    "an engine that fails at work": Case(
        f"{EXPORTED} --engine ctranslate2",
        failing_engine,
        rf"the engine ctranslate2-float32 failed \(Unsupported model binary\): {NATIVE} but "
        rf"for rounding",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_missing_dependency_is_one_warning(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if "exported" in case.command or "damaged" in case.command:
        pytest.importorskip("ctranslate2")
    expected = run(case.usual or case.command, folder, capsys)
    with monkeypatch.context() as patch:
        case.inject(patch)
        found = run(case.command, folder, capsys)
    assert found.code == expected.code == 0
    assert found.out == expected.out
    [line] = [line for line in found.lines if line not in expected.lines and "fastest" not in line]
    assert re.fullmatch(rf"dragoman: warning: {case.line}", line)


class Outcome(NamedTuple):
    code: int
    out: str
    lines: list[str]


def run(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """Run a command as a user would, and remove times from the output."""
    words = [word.replace("{}", str(folder)) for word in command.split()]
    code = main([*words, *(src for src, _ in PAIRS)] if words[0] == "translate" else words)
    out, err = capsys.readouterr()
    return Outcome(code, re.sub(r"\n\d+ sentences in .*", "", out), err.splitlines())


# What has no line on stderr, or nothing to fall back on


def test_doctor_skips_an_engine_that_is_not_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2")
    without("ctranslate2")(monkeypatch)
    found = run("doctor {}/exported", folder, capsys)
    assert found.code == 0
    assert re.search(r"ctranslate2-float32 +SKIP +see below", found.out)
    assert (
        "ctranslate2-float32: this needs ctranslate2; found no ctranslate2; install it: pip install"
        in found.out
    )


@pytest.mark.parametrize("program", ["ctranslate2", "transformers", "onnxruntime"])
def test_an_export_needs_its_program(
    program: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if program == "onnxruntime":
        pytest.importorskip("onnxscript")
    without(program)(monkeypatch)
    to = {"transformers": "huggingface", "onnxruntime": "onnx"}.get(program, program)
    found = run(f"export {{}}/model --to {to} --out {tmp_path}/out", folder, capsys)
    assert found.code == 2
    [line] = found.lines
    assert f"found no {program}; install it: pip install 'dragoman[" in line


def test_kernels_that_do_not_compile_are_not_used(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(TRANSLATE, folder, capsys)
    monkeypatch.undo()  # of `fresh`, which keeps compilers away
    monkeypatch.setenv("CXX", "/bin/false")
    found = run(TRANSLATE, folder, capsys)
    assert found.out == expected.out
    [line] = [line for line in found.lines if "warning" in line]
    assert re.fullmatch(
        r"dragoman: warning: .*/bin/false failed to compile the C\+\+ kernels: .*",
        line,
    )


def test_ranks_without_a_gpu_raise_instead_of_falling_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that trained on its CPU alone would keep the others waiting for ever."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with monkeypatch.context() as patch:
        no_gpu(patch)
        with pytest.raises(
            ConfigError, match=r"every process .* found torch .*sees no GPU here; add --device cpu"
        ):
            device.select_train_device("cuda")
    with monkeypatch.context() as patch:
        a_gpu(patch)
        patch.setattr(device, "cuda_problem", lambda *_, **__: "")
        with pytest.raises(
            ConfigError, match="a GPU of its own; found 1 for process 2; start fewer"
        ):
            device.select_train_device("cuda")


def test_a_sentence_too_long_for_a_gpu_is_translated_on_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    translator = Translator.load(folder / "model", device="cpu")
    expected = translator.translate([src for src, _ in PAIRS])
    gpu = translator._native

    def generate(request: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "generate", generate)
    monkeypatch.setattr(
        NativeEngine,
        "device",
        property(lambda engine: torch.device("cuda" if engine is gpu else "cpu")),
    )
    assert translator.translate([src for src, _ in PAIRS]) == expected
    messages = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(
        rf"out of memory with a batch of \d sentences: .* in halves, {SAME}", messages[0]
    )
    assert messages[1:] == [
        f"out of memory for a single sentence: sentences that do not fit are translated on "
        f"the CPU, {SAME}"
    ]


@pytest.mark.parametrize(
    ("error", "messages"),
    [
        (torch.OutOfMemoryError("out of memory\nmore"), "out of memory"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
            ),
            "DefaultCPUAllocator",
        ),
        (MemoryError(), "MemoryError"),
    ],
)
def test_without_enough_memory_one_line_reports_it(
    error: Exception,
    messages: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generate(engine: NativeEngine, request: object) -> None:
        raise error

    monkeypatch.setattr(NativeEngine, "generate", generate)
    found = run(TRANSLATE, folder, capsys)
    assert found.code == 71
    assert "the model and its batch must fit into memory; found it full" in found.lines[-1]
    assert messages in found.lines[-1]
    assert not any("Traceback" in line for line in found.lines)


@pytest.mark.parametrize(
    ("engine", "precision", "expected"),
    [("ctranslate2", None, True), ("auto", "int8", True), ("native", None, False)],
)
def test_auto_selects_the_cpu_for_engines_without_gpu_support(
    engine: str, precision: str | None, expected: bool
) -> None:
    assert engine_selection.requires_cpu(engine, precision) == expected
