"""What a machine lacks costs one line, which says what is used instead, and the result is the same: every case through the commands.

Each case runs a command twice, on a machine in order and on one that is broken in a certain way, and compares what comes out.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from dragoman.bundle import write_bundle
from dragoman.cli.app import main
from dragoman.config import read_config
from dragoman.engines import Native, choosing, installed
from dragoman.engines.cpu import building, freezing
from dragoman.errors import ConfigError
from dragoman.models.build import build_model
from dragoman.runs import machine
from dragoman.tasks.translate import TranslateTask
from dragoman.text.tokenizer import train_tokenizers
from dragoman.training import compiling, memory
from dragoman.training.precision import choose_precision
from dragoman.translator import Translator, device

PAIRS = [
    ("Guten Morgen.", "Good morning."),
    ("Ein Hund läuft durch den Schnee.", "A dog runs through the snow."),
    ("Zwei Männer reden.", "Two men are talking."),
    ("Das ist ein Haus.", "This is a house."),
]
SMALL = [
    "model.width=16",
    "model.heads=2",
    "model.feedforward=32",
    "model.dropout=0",
    "model.encoder=[self*1]",
    "model.decoder=[self*1]",
    "text.kind=characters",
]
SAME = "and the result is the same"

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a model, one that holds an engine where CTranslate2 is installed, and text to train and score on."""
    place = tmp_path_factory.mktemp("fallbacks")
    for column, side in enumerate(("de", "en")):
        (place / f"text.{side}").write_text("".join(f"{pair[column]}\n" for pair in PAIRS * 6), encoding="utf-8")
    config = read_config(recipe="tiny", overrides=[*SMALL, "decode.beam=2", "decode.max_ratio=1", "decode.max_extra=4"])
    tokenizers = train_tokenizers([src for src, _ in PAIRS] * 20, [tgt for _, tgt in PAIRS] * 20, config.text)
    torch.manual_seed(3)
    model = build_model(config.model, src_vocabulary=len(tokenizers.src), tgt_vocabulary=len(tokenizers.tgt))
    write_bundle(place / "model", config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=["Guten Morgen."])
    if importlib.util.find_spec("ctranslate2") is not None:
        from dragoman.exchange.exporting import export_ctranslate2

        for name in ("exported", "damaged"):
            shutil.copytree(place / "model", place / name)
            export_ctranslate2(place / name, quantisation="float32")
        (place / "damaged/engines/ctranslate2-float32/model.bin").write_bytes(b"no model")
    return place


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forget what was said before, and what other tests measured."""
    monkeypatch.setattr(device, "_told", set())
    monkeypatch.setattr(memory, "_told", set())
    monkeypatch.setattr(compiling, "_failed", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "_kernels", lambda folder, wanted: None)  # a compiler would take seconds in every test


# What can be broken


def no_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)


def old_driver(patch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).\nPlease update", stacklevel=2
        )
        return False

    patch.setattr(torch.cuda, "is_available", is_available)


def a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Pretend that there is one, as far as nobody computes on it."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "GeForce GTX 1080")
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (6, 1))
    patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_80"])
    patch.setattr(torch.cuda, "set_device", lambda *_: None)


def failing_gpu(error: RuntimeError) -> Break:
    def broken(patch: pytest.MonkeyPatch) -> None:
        a_gpu(patch)
        real = torch.ones

        def ones(*size: int, device: torch.device | str = "cpu", **more: object) -> torch.Tensor:
            if torch.device(device).type == "cuda":
                raise error
            return real(*size, device=device, **more)  # type: ignore[call-overload, no-any-return]

        patch.setattr(torch, "ones", ones)

    return broken


def narrow_gpu(patch: pytest.MonkeyPatch) -> None:
    """A GPU that has no room for a model."""
    a_gpu(patch)
    patch.setattr(device, "_no_cuda", lambda *_, **__: "")
    real = nn.Module.to

    def to(module: nn.Module, place: torch.device | str, *more: object) -> nn.Module:
        if torch.device(place).type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return real(module, place, *more)

    patch.setattr(nn.Module, "to", to)


def narrow_search(patch: pytest.MonkeyPatch) -> None:
    real = Native.generate

    def generate(engine: Native, request):  # type: ignore[no-untyped-def]
        if len(request.sources) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(engine, request)

    patch.setattr(Native, "generate", generate)


def narrow_training(patch: pytest.MonkeyPatch) -> None:
    real = TranslateTask.loss

    def loss(task: TranslateTask, model: nn.Module, batch):  # type: ignore[no-untyped-def]
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(task, model, batch)

    patch.setattr(TranslateTask, "loss", loss)


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        raise RuntimeError("C++ compile error\nmore of it")


def failing_compiler(*, late: bool = False) -> Break:
    """A compiler that fails when a block is called, or on the way back, where torch compiles as well."""

    def compiled(function, **options):  # type: ignore[no-untyped-def]
        def call(x, *rest):  # type: ignore[no-untyped-def]
            if late:
                return function(_NoWayBack.apply(x), *rest)
            raise RuntimeError("Cannot find a working triton installation.\nmore of it")

        return call

    return lambda patch: patch.setattr(torch, "compile", compiled)


def without(package: str) -> Break:
    def broken(patch: pytest.MonkeyPatch) -> None:
        real = importlib.util.find_spec
        patch.setattr(installed.importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest))

    return broken


def unloadable(package: str) -> Break:
    def broken(patch: pytest.MonkeyPatch) -> None:
        real = importlib.import_module

        def import_module(name: str, *rest: str) -> object:
            if name == package:
                raise ImportError("libiomp5.so: cannot open shared object file\nmore")
            return real(name, *rest)

        patch.setattr(installed.importlib, "import_module", import_module)

    return broken


def failing_engine(patch: pytest.MonkeyPatch) -> None:
    def generate(engine: object, request: object) -> None:
        raise RuntimeError("Unsupported model binary\nmore")

    patch.setattr("dragoman.engines.ctranslate2.CTranslate2.generate", generate)


def no_int8(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(freezing, "int8_refusal", lambda: "needs a processor that torch's fbgemm knows")


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The machine is in order: what is asked for is not there."""


class Case(NamedTuple):
    """A command, what breaks, and the line that says so."""

    command: str
    harm: Break
    line: str  # a regular expression for all of it
    usual: str = ""  # what the machine in order is asked for; by default the same


OLD = failing_gpu(RuntimeError("CUDA error: no kernel image is available for execution on the device\nCompile with TORCH_USE_CUDA_DSA"))
FULL = failing_gpu(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"))
LOST = failing_gpu(RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later"))
ON_CPU = f"the CPU is used, which takes longer, {SAME}"
NO_GPU = rf"torch (is built for CPUs alone and )?sees no GPU here: {ON_CPU}"
TRANSLATE, EVALUATE = "translate -m {}/model", "evaluate {}/model --src {}/text.de --ref {}/text.en"
EXPORTED = "translate -m {}/exported"
NATIVE = f"the native engine is used, {SAME}"

CASES = {
    "translate without a GPU": Case(f"{TRANSLATE} --device cuda", no_gpu, NO_GPU, usual=TRANSLATE),
    "evaluate without a GPU": Case(f"{EVALUATE} --device cuda", no_gpu, NO_GPU, usual=EVALUATE),
    "doctor without a GPU": Case("doctor {}/model --device cuda", no_gpu, NO_GPU, usual="doctor {}/model"),
    "a second GPU that is not there": Case(f"{TRANSLATE} --device cuda:1", a_gpu, rf"torch sees 1 GPU and no cuda:1: {ON_CPU}", TRANSLATE),
    "no Apple": Case(f"{TRANSLATE} --device mps", nothing, rf"there is no mps here: {ON_CPU}", TRANSLATE),
    "an old driver": Case(
        TRANSLATE, old_driver, rf"the GPU cannot be used \(CUDA init.*driver on your system is too old \(found version 11040\)\): {ON_CPU}"
    ),
    "an old GPU": Case(TRANSLATE, OLD, rf"GeForce GTX 1080 \(sm_61\) is too old for this torch, which is built for sm_75, sm_80: {ON_CPU}"),
    "doctor with an old GPU": Case("doctor {}/model", OLD, rf"GeForce .* is too old for this torch.*: {ON_CPU}"),
    "a full GPU": Case(TRANSLATE, FULL, rf"the memory of GeForce GTX 1080 is full: {ON_CPU}"),
    "a GPU that fails": Case(TRANSLATE, LOST, rf"GeForce .* cannot be used \(CUDA error: unspecified launch failure\): {ON_CPU}"),
    "a model too large for the GPU": Case(TRANSLATE, narrow_gpu, rf"the model does not fit into the memory of cuda: {ON_CPU}"),
    "doctor on a model too large": Case("doctor {}/model", narrow_gpu, rf"the model does not fit into the memory of cuda: {ON_CPU}"),
    "memory that ends in a search": Case(
        EVALUATE, narrow_search, rf"out of memory with \d+ sentences at once: .* translated in halves, {SAME}"
    ),
    "half precision without a GPU": Case(
        f"{TRANSLATE} --precision bfloat16",
        no_gpu,
        rf"the precision bfloat16 runs on a GPU: cpu computes in float32, {SAME} but for rounding",
        usual=TRANSLATE,
    ),
    "int8 that the processor lacks": Case(
        f"{TRANSLATE} --precision int8", no_int8, "int8 is not used, and the model runs in float32: needs a processor .*", usual=TRANSLATE
    ),
    "no ctranslate2": Case(
        EXPORTED,
        without("ctranslate2"),
        rf"the engine ctranslate2-float32 is not used \(found no ctranslate2; to have it: pip install 'dragoman\[fast\]'\): {NATIVE}",
    ),
    "no ctranslate2 where it is asked for": Case(
        f"{EXPORTED} --engine ctranslate2", without("ctranslate2"), rf"the engine ctranslate2-float32 is not used .*: {NATIVE}"
    ),
    "evaluate without ctranslate2": Case(
        EVALUATE.replace("model", "exported"), without("ctranslate2"), rf"the engine ctranslate2-float32 is not used .*: {NATIVE}"
    ),
    "a ctranslate2 that does not load": Case(
        EXPORTED,
        unloadable("ctranslate2"),
        rf"the engine ctranslate2-float32 is not used \(found a ctranslate2 that does not load \(ImportError: libiomp5.so: .*\): {NATIVE}",
    ),
    "a damaged engine": Case("translate -m {}/damaged", nothing, rf"the engine ctranslate2-float32 is not used \(.*\): {NATIVE}", EXPORTED),
    "a damaged engine that is asked for": Case(
        "translate -m {}/damaged --engine ctranslate2", nothing, rf"the engine ctranslate2-float32 is not used \(.*\): {NATIVE}", EXPORTED
    ),
    "an engine that fails when it is measured": Case(
        EXPORTED,
        failing_engine,
        rf"the engine ctranslate2-float32 failed \(Unsupported model binary\): {NATIVE} but for rounding",
        usual=f"{EXPORTED} --engine native",  # which measures nothing that could be remembered
    ),
    "an engine that fails at work": Case(
        f"{EXPORTED} --engine ctranslate2",
        failing_engine,
        rf"the engine ctranslate2-float32 failed \(Unsupported model binary\): {NATIVE} but for rounding",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_missing_costs_one_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if "exported" in case.command or "damaged" in case.command:
        pytest.importorskip("ctranslate2")
    expected = run(case.usual or case.command, folder, capsys)
    with monkeypatch.context() as patch:
        case.harm(patch)
        found = run(case.command, folder, capsys)
    assert found.code == expected.code == 0
    assert found.out == expected.out
    [line] = [line for line in found.lines if line not in expected.lines and "quickest" not in line]
    assert re.fullmatch(rf"dragoman: warning: {case.line}", line)


class Outcome(NamedTuple):
    code: int
    out: str
    lines: list[str]


def run(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """Run a command as a person would, and take off what no two runs share: the clock."""
    words = [word.replace("{}", str(folder)) for word in command.split()]
    code = main([*words, *(src for src, _ in PAIRS)] if words[0] == "translate" else words)
    out, err = capsys.readouterr()
    return Outcome(code, re.sub(r"\n\d+ sentences in .*", "", out), err.splitlines())


# Training


class Trained(NamedTuple):
    losses: list[float]
    lines: list[str]


def train(folder: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Trained:
    """Train for three updates."""
    settings = [*SMALL, "train.steps=3", "train.batch_tokens=120", "train.precision=float32", "train.checkpoint_every=100"]
    words = [f"--set={each}" for each in settings]
    code = main(["train", f"--src={folder}/text.de", f"--tgt={folder}/text.en", "--recipe=tiny", f"--out={out}", *words, *more])
    err = capsys.readouterr().err
    assert code == 0, err
    from dragoman.training.checkpoint import RunDirectory

    with RunDirectory(out / "training") as directory:
        losses = [record["loss"] for record in directory.records() if "nll" in record]
    return Trained(losses, err.splitlines())


TRAININGS = {
    "without a GPU": Case("--device=cuda", no_gpu, NO_GPU),
    "with a GPU that is too old": Case("", OLD, rf"GeForce .* is too old for this torch.*: {ON_CPU}"),
    "with a GPU that is too small": Case("", narrow_gpu, rf"the model does not fit into the memory of cuda:0: {ON_CPU}"),
    "in little memory": Case(
        "", narrow_training, rf"out of memory with \d+ slots of \d+x\d+: .* computed in parts, {SAME}; a lower train.batch_tokens avoids it"
    ),
    "without a compiler": Case(
        "--set=train.compile=on",
        failing_compiler(),
        rf"compiling failed, the blocks run as they are, {SAME} \(RuntimeError: Cannot find a working triton installation.\); train.* it",
    ),
    "with a compiler that fails on the way back": Case(
        "--set=train.compile=on",
        failing_compiler(late=True),
        rf"compiling failed, the blocks run as they are, {SAME} \(RuntimeError: C\+\+ compile error\); train.compile=off skips it",
    ),
}


@pytest.fixture(scope="module")
def usual(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[pytest.CaptureFixture[str]], Trained]:
    """Train on a machine in order, once."""
    known: list[Trained] = []

    def trained(capsys: pytest.CaptureFixture[str]) -> Trained:
        known[:] = known or [train(folder, tmp_path_factory.mktemp("usual") / "run", capsys)]
        return known[0]

    return trained


@pytest.mark.parametrize("name", TRAININGS)
def test_training_goes_on(  # type: ignore[no-untyped-def]
    name: str, folder: Path, tmp_path: Path, usual, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, expected = TRAININGS[name], usual(capsys)
    with monkeypatch.context() as patch:
        case.harm(patch)
        found = train(folder, tmp_path / "run", capsys, *case.command.split())
    assert found.losses == pytest.approx(expected.losses, rel=0.0 if case.harm is not narrow_training else 1e-5)
    [line] = [line for line in found.lines if "warning" in line]
    assert re.fullmatch(rf"dragoman: warning: {case.line}", line)


# What has no line on stderr, or nothing to fall back on


def test_the_doctor_leaves_out_an_engine_that_is_not_installed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2")
    without("ctranslate2")(monkeypatch)
    found = run("doctor {}/exported", folder, capsys)
    assert found.code == 0
    assert re.search(r"ctranslate2-float32 +SKIP +see below", found.out)
    assert "ctranslate2-float32: this needs ctranslate2; found no ctranslate2; install it: pip install" in found.out


@pytest.mark.parametrize("program", ["ctranslate2", "transformers", "onnxruntime"])
def test_an_export_needs_its_program(
    program: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
    assert re.fullmatch(r"dragoman: warning: the kernels could not be compiled, and torch's operations are used, .*/bin/false.*", line)


def test_several_processes_do_not_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that trained on its CPU alone would keep the others waiting for ever."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with monkeypatch.context() as patch:
        no_gpu(patch)
        with pytest.raises(ConfigError, match=r"every process .* found torch .*sees no GPU here; add --device cpu"):
            machine.take_device("cuda")
    with monkeypatch.context() as patch:
        a_gpu(patch)
        patch.setattr(device, "_no_cuda", lambda *_, **__: "")
        with pytest.raises(ConfigError, match="a GPU of its own; found 1 for process 2; start fewer"):
            machine.take_device("cuda")


def test_a_sentence_too_long_for_a_gpu_goes_to_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    translator = Translator.load(folder / "model", device="cpu")
    expected = translator.translate([src for src, _ in PAIRS])
    gpu = translator._native

    def generate(request: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "generate", generate)
    monkeypatch.setattr(Native, "device", property(lambda engine: torch.device("cuda" if engine is gpu else "cpu")))
    assert translator.translate([src for src, _ in PAIRS]) == expected
    said = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"out of memory with \d sentences at once: .* in halves, {SAME}", said[0])
    assert said[1:] == [f"out of memory for one sentence alone: the CPU translates what does not fit, {SAME}"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("out of memory\nmore"), "out of memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), "DefaultCPUAllocator"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_where_nothing_fits_one_line_says_so(
    error: Exception, said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(engine: Native, request: object) -> None:
        raise error

    monkeypatch.setattr(Native, "generate", generate)
    found = run(TRANSLATE, folder, capsys)
    assert found.code == 71
    assert "the memory must have room for what is asked; found it full" in found.lines[-1]
    assert said in found.lines[-1]
    assert not any("Traceback" in line for line in found.lines)


def test_a_gpu_without_bfloat16_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    a_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    for wanted in ("auto", "bfloat16"):
        assert choose_precision(wanted, torch.device("cuda")) == (torch.float32, "GeForce GTX 1080 does not multiply bfloat16")


@pytest.mark.parametrize(
    ("engine", "precision", "expected"), [("ctranslate2", None, True), ("auto", "int8", True), ("native", None, False)]
)
def test_auto_is_a_cpu_for_what_runs_there_alone(engine: str, precision: str | None, expected: bool) -> None:
    assert choosing.runs_on_cpu(engine, precision) == expected
