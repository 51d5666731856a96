"""Machines that lack something: a GPU, memory, a compiler, a package; and what is run on them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from dragoman.bundle import write_bundle
from dragoman.config import read_config
from dragoman.inference import NativeEngine, untrusted_engine_trial
from dragoman.inference.cpu import cpp_kernel_library_loader, cpu_engine_conversion
from dragoman.models.factory import build_model
from dragoman.runtime import device, optional_package_checks
from dragoman.tasks.translation import TranslationTask
from dragoman.text.sentencepiece_tokenizer import train_tokenizers
from dragoman.training import torch_compile, train_step

PAIRS = [
    ("Guten Morgen.", "Good morning."),
    ("Ein Hund läuft durch den Schnee.", "A dog runs through the snow."),
    ("Zwei Männer reden.", "Two men are talking."),
    ("Das ist ein Haus.", "This is a house."),
]
SMALL = [
    "model.width=16",
    "model.heads=2",
    "model.ffn_width=32",
    "model.dropout=0",
    "model.encoder=[transformer*1]",
    "model.decoder=[transformer*1]",
    "text.tokenizer=characters",
]
SAME = "and the result is the same"

Fault = Callable[[pytest.MonkeyPatch], None]


def write_text(folder: Path) -> Path:
    """Write text to train and score, in both languages."""
    for column, side in enumerate(("de", "en")):
        (folder / f"text.{side}").write_text(
            "".join(f"{pair[column]}\n" for pair in PAIRS * 6), encoding="utf-8"
        )
    return folder


def make_folder(folder: Path) -> Path:
    """Write text and a model of it, with a CTranslate2 engine where possible."""
    write_text(folder)
    config = read_config(
        recipe="tiny",
        overrides=[
            *SMALL,
            "decode.beam=2",
            "decode.max_length_ratio=1",
            "decode.max_length_extra=4",
        ],
    )
    tokenizers = train_tokenizers(
        [src for src, _ in PAIRS] * 20, [tgt for _, tgt in PAIRS] * 20, config.text
    )
    torch.manual_seed(3)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    write_bundle(
        folder / "model",
        config=config,
        tokenizers=tokenizers,
        weights=model.state_dict(),
        golden=["Guten Morgen."],
    )
    if importlib.util.find_spec("ctranslate2") is not None:
        from dragoman.exchange.export import export_ctranslate2

        greedy = config.replace(
            decode={"beam": 1}
        )  # a beam search is the native engine's unless another is named
        for name in ("exported", "damaged"):
            write_bundle(
                folder / name,
                config=greedy,
                tokenizers=tokenizers,
                weights=model.state_dict(),
                golden=["Guten Morgen."],
            )
            export_ctranslate2(folder / name, quantization="float32")
        (folder / "damaged/engines/ctranslate2-float32/model.bin").write_bytes(b"no model")
    return folder


def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reset one-time warnings and cached measurements."""
    monkeypatch.setattr(device, "_warned", set())
    monkeypatch.setattr(train_step, "_warned", set())
    monkeypatch.setattr(torch_compile, "_failure", "")
    trusted = (
        untrusted_engine_trial.trust_directory()
    )  # where the engines of `make_folder` are recorded
    monkeypatch.setattr(untrusted_engine_trial, "trust_directory", lambda: trusted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(
        cpp_kernel_library_loader, "_load_kernel_library", lambda folder, wanted: None
    )  # a compiler would take seconds in every test


# What can be broken


def no_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)


def old_driver(patch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old "
            "(found version 11040).\nPlease update",
            stacklevel=2,
        )
        return False

    patch.setattr(torch.cuda, "is_available", is_available)


def a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Fake a GPU, for code that does not compute on it."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "GeForce GTX 1080")
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (6, 1))
    patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_80"])
    patch.setattr(torch.cuda, "set_device", lambda *_: None)
    # A torch that is built for GPUs asks its driver for the current stream in every Adam step.
    patch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)


def failing_gpu(error: RuntimeError) -> Fault:
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
    """A GPU without memory for a model."""
    a_gpu(patch)
    patch.setattr(device, "cuda_problem", lambda *_, **__: "")
    real = nn.Module.to

    def to(module: nn.Module, device: torch.device | str, *more: object) -> nn.Module:
        if torch.device(device).type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")
        return real(module, device, *more)

    patch.setattr(nn.Module, "to", to)


def narrow_search(patch: pytest.MonkeyPatch) -> None:
    real = NativeEngine.generate

    def generate(engine: NativeEngine, request):  # type: ignore[no-untyped-def]
        if len(request.sources) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(engine, request)

    patch.setattr(NativeEngine, "generate", generate)


def narrow_training(patch: pytest.MonkeyPatch) -> None:
    real = TranslationTask.loss

    def loss(task: TranslationTask, model: nn.Module, batch):  # type: ignore[no-untyped-def]
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(task, model, batch)

    patch.setattr(TranslationTask, "loss", loss)


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        raise RuntimeError("C++ compile error\nmore of it")


def failing_compiler(*, late: bool = False) -> Fault:
    """A torch.compile that fails in the forward or in the backward pass."""

    def compiled(function, **options):  # type: ignore[no-untyped-def]
        def call(x, *rest):  # type: ignore[no-untyped-def]
            if late:
                return function(_NoWayBack.apply(x), *rest)
            raise RuntimeError("Cannot find a working triton installation.\nmore of it")

        return call

    return lambda patch: patch.setattr(torch, "compile", compiled)


def without(package: str) -> Fault:
    def broken(patch: pytest.MonkeyPatch) -> None:
        real = importlib.util.find_spec
        patch.setattr(
            optional_package_checks.importlib.util,
            "find_spec",
            lambda name, *rest: None if name == package else real(name, *rest),
        )

    return broken


def unloadable(package: str) -> Fault:
    def broken(patch: pytest.MonkeyPatch) -> None:
        real = importlib.import_module

        def import_module(name: str, *rest: str) -> object:
            if name == package:
                raise ImportError("libiomp5.so: cannot open shared object file\nmore")
            return real(name, *rest)

        patch.setattr(optional_package_checks.importlib, "import_module", import_module)

    return broken


def failing_engine(patch: pytest.MonkeyPatch) -> None:
    def generate(engine: object, request: object) -> None:
        raise RuntimeError("Unsupported model binary\nmore")

    patch.setattr("dragoman.inference.ctranslate2_engine.CTranslate2Engine.generate", generate)


def no_int8(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        cpu_engine_conversion,
        "int8_unsupported_reason",
        lambda: "needs a processor that torch's fbgemm supports",
    )


def nothing(patch: pytest.MonkeyPatch) -> None:
    """A machine without faults; the requested thing does not exist."""


class Case(NamedTuple):
    """A command, what breaks, and the expected warning."""

    command: str
    inject: Fault
    line: str  # a regular expression for all of it
    usual: str = ""  # the command for a machine without faults; by default the same


OLD = failing_gpu(
    RuntimeError(
        "CUDA error: no kernel image is available for execution on the device\n"
        "Compile with TORCH_USE_CUDA_DSA"
    )
)
FULL = failing_gpu(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"))
LOST = failing_gpu(
    RuntimeError(
        "CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later"
    )
)
ON_CPU = "falling back to the CPU, which is slower; the result is the same"
NO_GPU = rf"torch (is built for CPUs only and )?sees no GPU here: {ON_CPU}"
