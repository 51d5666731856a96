"""Augmentation: sides, tags, filters, and the same bytes after a kill at any point."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sync_kit import SyncRecorder

from dragoman.errors import ConfigError, CorruptError
from dragoman.inference import back_translation_and_distillation
from dragoman.inference.back_translation_and_distillation import (
    AugmentationRun,
    PairFilter,
    block_seed,
)

LINES = [f"line {at}" for at in range(10)] + ["", "same", "long"]


class KilledError(Exception):
    """Simulates a kill."""


def count_words(text: str, translation: str) -> tuple[int, int]:
    return len(text.split()), len(translation.split())


def translate(lines: Sequence[str], seed: int) -> list[str]:
    """Translate to upper case with the block's seed, so that a wrong block would show."""
    special = {"same": "SAME", "": "", "long": "x " * 40}
    return [special.get(line, f"{line.upper()} {seed}") for line in lines]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(back_translation_and_distillation, "BLOCK_LINES", 4)


def build(folder: Path, method: str = "back-translation", **more: Any) -> AugmentationRun:
    request = {"method": method, "tag": more.pop("tag", "")}
    return AugmentationRun(folder / "out.src", folder / "out.tgt", request, **more)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_back_translation_puts_the_synthetic_text_on_the_source_side(tmp_path: Path) -> None:
    result = build(tmp_path, tag="<BT>").run(LINES, translate, PairFilter(count_words))
    assert (result.lines, result.pairs) == (13, 10)
    assert result.dropped == {"empty": 1, "copy": 1, "length-ratio": 1}
    src, tgt = ((tmp_path / f"out.{side}").read_text().splitlines() for side in ("src", "tgt"))
    assert tgt == LINES[:10]
    assert src[0] == f"<BT> LINE 0 {block_seed(1, 0)}"
    assert src[9] == f"<BT> LINE 9 {block_seed(1, 2)}"
    assert sorted(contents(tmp_path)) == ["out.src", "out.tgt"], "nothing else is left"


def test_forward_translation_puts_it_on_the_target_side(tmp_path: Path) -> None:
    keep_all = PairFilter(count_words, max_ratio=0.0, drop_copies=False)
    result = build(tmp_path, "forward-translation").run(LINES, translate, keep_all)
    assert result.dropped == {"empty": 1, "copy": 0, "length-ratio": 0}
    assert (tmp_path / "out.src").read_text().splitlines() == [each for each in LINES if each]


@pytest.mark.parametrize("killed_at", range(1, 45))
def test_a_killed_run_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """Killed before any sync, rename or translation, and started again."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    pair_filter = PairFilter(count_words)
    expected = build(whole).run(LINES, translate, pair_filter)
    calls = 0

    def may_kill(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == killed_at:
                raise KilledError
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "rename"):
            patch.setattr(os, name, may_kill(getattr(os, name)))
        try:
            build(killed).run(LINES, may_kill(translate), pair_filter)
        except KilledError:
            pass
        else:
            assert calls < killed_at, "it was killed nowhere, because it ended before"
    if (killed / "out.src.progress.json").exists() or not (killed / "out.src").exists():
        found = build(killed).run(LINES, translate, pair_filter)
        assert (found.lines, found.pairs, found.dropped) == (
            expected.lines,
            expected.pairs,
            expected.dropped,
        )
    assert contents(killed) == contents(whole)


def test_pairs_are_durable_before_the_progress_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, run = SyncRecorder(monkeypatch), build(tmp_path)
    blocks = 0

    def check(lines: int) -> None:
        nonlocal blocks
        if not lines:
            return
        blocks += 1
        recorded = recorder.moved(run.progress_path)
        for path in run.partial_paths:
            assert path.stat().st_size > 0
            assert min(recorder.synced(path), default=recorded) < recorded

    run.run(LINES[:8], translate, PairFilter(count_words), advance=check)
    assert blocks == 2


def test_a_continued_run_does_not_translate_again(tmp_path: Path) -> None:
    seen = list[str]()

    def kill_third(lines: Sequence[str], seed: int) -> list[str]:
        if len(seen) == 8:
            raise KilledError
        seen.extend(lines)
        return translate(lines, seed)

    with pytest.raises(KilledError):
        build(tmp_path).run(LINES, kill_third, PairFilter(count_words))
    with open(tmp_path / "out.src.partial", "ab") as file:
        file.write(b"half a li")  # what a kill may leave behind the last record
    seen.append("")
    result = build(tmp_path).run(LINES, kill_third, PairFilter(count_words))
    assert result.resumed_lines == 8
    assert seen == [*LINES[:8], "", *LINES[8:]]
    assert b"half" not in (tmp_path / "out.src").read_bytes()


def test_nothing_is_overwritten_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "out.tgt").write_text("precious\n")
    with pytest.raises(ConfigError, match=r"found .*out\.tgt; rename it or add --overwrite"):
        build(tmp_path).open()
    assert contents(tmp_path) == {"out.tgt": b"precious\n"}
    build(tmp_path, overwrite=True).run(LINES, translate, PairFilter(count_words))
    assert (tmp_path / "out.tgt").read_text().splitlines() == LINES[:10]


def kill_second(lines: Sequence[str], seed: int) -> list[str]:
    if seed != block_seed(1, 0):
        raise KilledError
    return translate(lines, seed)


def test_an_unfinished_run_of_another_command_is_kept(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        build(tmp_path).run(LINES, kill_second, PairFilter(count_words))
    with pytest.raises(ConfigError, match=r"found .*out\.src\.progress\.json of another"):
        build(tmp_path, tag="<BT>").open()
    assert build(tmp_path, tag="<BT>", overwrite=True).open() == 0


def test_run_that_wrote_nothing_does_not_block_another(tmp_path: Path) -> None:
    """An input that could not be read is corrected, and is another file then."""
    assert build(tmp_path).open() == 0
    assert build(tmp_path, tag="<BT>").open() == 0


def test_a_partial_file_that_lost_bytes_is_reported(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        build(tmp_path).run(LINES, kill_second, PairFilter(count_words))
    (tmp_path / "out.tgt.partial").write_bytes(b"")
    with pytest.raises(CorruptError, match="found 0"):
        build(tmp_path).open()


@pytest.mark.parametrize(
    ("counts", "reason"),
    [((1, 6), ""), ((1, 7), "length-ratio"), ((7, 1), "length-ratio"), ((3, 9), ""),
     ((3, 10), "length-ratio"), ((0, 6), "length-ratio"), ((100, 106), "")],
)  # fmt: skip
def test_a_pair_is_dropped_above_the_ratio_if_it_differs_by_more_than_five_tokens(
    counts: tuple[int, int], reason: str
) -> None:
    assert PairFilter(lambda *_: counts).drop_reason("a", "b") == reason
