from __future__ import annotations

import pytest
import torch

from dragoman.training import mixed_precision
from dragoman.training.mixed_precision import choose_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "name", "reason"),
    [
        ({"avx2", "avx512_bf16"}, "bfloat16", "avx512_bf16"),
        ({"avx2", "amx_bf16"}, "bfloat16", "amx_bf16"),
        ({"avx2", "avx512f"}, "float32", "no bfloat16 instructions"),
        (set(), "float32", "no bfloat16 instructions"),
    ],
)
def test_auto_precision_depends_on_cpu_flags(monkeypatch, flags, name, reason) -> None:
    monkeypatch.setattr(mixed_precision, "_cpu_flags", lambda: frozenset(flags))
    chosen = choose_precision("auto", CPU)
    assert chosen.name == name
    assert reason in chosen.reason


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_configured_precision_is_used(name) -> None:
    assert choose_precision(name, CPU).name == name
    assert choose_precision(name, CPU).reason == "as configured"


def test_unknown_devices_stay_with_float32() -> None:
    chosen = choose_precision("auto", torch.device("mps"))
    assert chosen.name == "float32"
    assert "mps" in chosen.reason


def test_autocast_is_on_only_where_it_is_chosen() -> None:
    """bfloat16 needs no loss scaling (facebookresearch/fairseq#1529, #512, #282, #1895, #4555)."""
    for name, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with choose_precision(name, CPU).autocast(CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == kind


def test_the_flags_of_this_machine_can_be_read() -> None:
    assert mixed_precision._cpu_flags() is not None
    assert choose_precision("auto", CPU).name in ("float32", "bfloat16")
