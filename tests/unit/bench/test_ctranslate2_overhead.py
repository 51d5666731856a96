"""Benchmark of the exported engine against CTranslate2 used directly: same work, and a readable
table.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ctranslate2")
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("bench.ctranslate2_overhead")


def test_sentences_are_drawn_alike(bench: ModuleType) -> None:
    first, again, others = (
        bench.synthetic_lines(50, seed=2),
        bench.synthetic_lines(50, seed=2),
        bench.synthetic_lines(50, seed=3),
    )
    assert first == again != others
    assert all(4 <= len(line.split()) <= 40 for line in first)


def test_all_interfaces_translate_the_same(bench: ModuleType, tmp_path: Path) -> None:
    """Directly, outputs are as long as their batch's limit, and ours are cut to their own; as far
    as both go they are equal.
    """
    translator, lines = (
        bench.make_translator(tmp_path, "tiny", "float32"),
        bench.synthetic_lines(40, seed=2),
    )
    directly = bench.DirectCTranslate2(translator, lines, 1).text()
    ours = translator.translate(lines, beam=1)
    for (_, name), way in bench.streaming_systems(translator, lines, tmp_path / "lines", 1).items():
        assert way() == ours, name
    assert (
        sum(
            there.startswith(here.rstrip("\ufffd"))
            for here, there in zip(ours, directly, strict=True)
        )
        >= 39
    )


@pytest.mark.parametrize(("precision", "batch_tokens"), [("float32", 1024), ("int8", 768)])
def test_batches_are_as_large_as_suits_the_precision(
    bench: ModuleType, precision: str, batch_tokens: int, tmp_path: Path
) -> None:
    translator, lines = (
        bench.make_translator(tmp_path, "tiny", precision),
        bench.synthetic_lines(300, seed=2),
    )
    assert translator.engine.batch_tokens == batch_tokens
    padded_sizes: list[int] = []

    class Asked:
        def translate_batch(self, sources: list[list[str]], **options: Any) -> Any:
            padded_sizes.append(len(sources) * (1 + max(map(len, sources))))
            return program.translate_batch(sources, **options)

    program = translator.engine._translator
    translator.engine._translator = Asked()
    assert len(translator.translate(lines, beam=1)) == len(lines)
    assert batch_tokens // 2 < max(padded_sizes) <= batch_tokens


@pytest.mark.parametrize("beam", ["1", "2"])
def test_the_table_and_the_line(
    bench: ModuleType,
    beam: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "exported.py",
            "--size=tiny",
            "--sentences=24",
            "--rounds=2",
            "--workers=1",
            f"--beam={beam}",
        ],
    )
    bench.main()
    *table, line = capsys.readouterr().out.strip().splitlines()
    report = json.loads(line)
    assert [(row["kind"], row["system"]) for row in report["rows"]] == [
        ("ids", "direct"),
        ("ids", "ours, engine"),
        ("text", "direct"),
        ("text", "ours, translate"),
        ("text", "ours, file"),
        ("text", "ours, pipe"),
        ("text", "ours, generator"),
    ]
    assert all(len(row["wall"]) == len(row["cpu"]) == 2 for row in report["rows"])
    assert len(table) == 9
